"""Saving and loading, as steps of a model; and what a checkpoint is made of."""

import functools
import hashlib
import secrets
import time

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tinkex.server.api.auth import owner_of, reader_owners
from tinkex.server.api.deps import (
    Context,
    answer,
    context_of,
    describe,
    read_body,
    read_json,
    readable,
)
from tinkex.server.api.errors import Refusal
from tinkex.server.api.models import made
from tinkex.server.api.submit import admit, numbered
from tinkex.server.api.training import NumberedStep, accept_step, read_step
from tinkex.server.scheduler.checkpoints import check_ttl, refuse_external, tinker_path
from tinkex.server.scheduler.step_queue import Kind
from tinkex.server.store import (
    Model,
    NamedCheckpoint,
    NewRequest,
    OverQuota,
    RunTaken,
    Session,
    Version,
)
from tinkex.server.store.storage_health import NewDataRefused
from tinkex.wire.base import StrictModel
from tinkex.wire.checkpoints import (
    CopyWeightsRequest,
    CopyWeightsResponse,
    LoadWeightsRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
    WeightsInfoResponse,
)
from tinkex.wire.codec import decode_json, encode_json
from tinkex.wire.errors import UserFailure, WireError
from tinkex.wire.training import optimizer_config_from

router = APIRouter(prefix="/api/v1", tags=["checkpoints"])


class WeightsInfoRequest(StrictModel):
    tinker_path: str


@router.post("/save_weights", openapi_extra=dict(describe(SaveWeightsRequest)))
@numbered(Kind.SAVE_WEIGHTS)
async def save_weights(request: Request) -> Response:
    return await _step(request, SaveWeightsRequest, Kind.SAVE_WEIGHTS)


@router.post(
    "/save_weights_for_sampler", openapi_extra=dict(describe(SaveWeightsForSamplerRequest))
)
@numbered(Kind.SAVE_FOR_SAMPLER)
async def save_weights_for_sampler(request: Request) -> Response:
    return await _step(request, SaveWeightsForSamplerRequest, Kind.SAVE_FOR_SAMPLER)


@router.post("/save_weights_external", openapi_extra=dict(describe(SaveWeightsExternalRequest)))
@numbered(Kind.SAVE_EXTERNAL)
async def save_weights_external(request: Request) -> Response:
    return await _step(request, SaveWeightsExternalRequest, Kind.SAVE_EXTERNAL)


@router.post("/load_weights", openapi_extra=dict(describe(LoadWeightsRequest)))
@numbered(Kind.LOAD_WEIGHTS)
async def load_weights(request: Request) -> Response:
    """Into a model there is (`model_id`, `seq_id`), or a new one (`session_id`, `model_seq_id`)."""
    body = await read_body(request)
    asked = decode_json(LoadWeightsRequest, body)
    context = context_of(request)
    if asked.model_id is None and asked.session_id is not None:
        return await _create_from(request, context, asked)
    if asked.model_id is None:
        raise WireError.at(
            ("model_id",), "give `model_id` and `seq_id`, or `session_id` and `model_seq_id`."
        )
    model = await context.model(request, asked.model_id)
    return await accept_step(
        request,
        context,
        model,
        Kind.LOAD_WEIGHTS,
        asked.seq_id,
        _without_token(asked),
        version_id=await _foreign(request, context, model, asked),
    )


async def _foreign(
    request: Request, context: Context, model: Model, asked: LoadWeightsRequest
) -> str | None:
    """
    The version of another owner's checkpoint, if this request may read it.

    One's own is looked up when its turn comes: the step that saves it may be in line before it.
    """
    by = await reader_owners(request, asked.weights_access_token)
    try:
        version = await context.store.checkpoints.find(asked.path, readers=by)
    except UserFailure:
        return None  # the step fails with the reason
    if version is None or version.owner == model.owner:
        return None
    return version.version_id


def _without_token(asked: LoadWeightsRequest) -> bytes:
    """What is stored: never somebody's key."""
    return encode_json(asked.model_copy(update={"weights_access_token": None}))


async def _step(request: Request, message: type[NumberedStep], kind: Kind) -> Response:
    body = await read_body(request)
    model_id, seq_id, payload = read_step(message, body)
    context = context_of(request)
    model = await context.model(request, model_id)
    return await accept_step(request, context, model, kind, seq_id, payload)


async def _create_from(request: Request, context: Context, asked: LoadWeightsRequest) -> Response:
    """A new model whose step 0 is this load."""
    session = await context.open_session(request, asked.session_id or "")
    if asked.model_seq_id is None or asked.model_seq_id < 0:
        raise WireError.at(("model_seq_id",), "a number from 0 is needed.", "missing")
    version, source = await readable(request, context, asked.path, token=asked.weights_access_token)
    refuse_external(version)
    if asked.base_model is not None:
        named = context.base_model(asked.base_model)
        if named.name != source.base_model:
            raise Refusal(
                400, f"{asked.path} is an adapter of {source.base_model}, not of {named.name}."
            )
    optimizer = asked.optimizer_config
    model = Model(
        model_id=f"{session.session_id}:train:{asked.model_seq_id}",
        owner=session.owner,
        session_id=session.session_id,
        base_model=context.base_model(source.base_model).name,
        lora_config={**source.lora_config, "seed": secrets.randbits(31)},
        optimizer_config=optimizer.model_dump() if optimizer else source.optimizer_config,
        user_metadata=asked.user_metadata,
        created_s=time.time(),
    )
    new = NewRequest(
        owner=model.owner,
        kind=Kind.LOAD_WEIGHTS,
        base_model=model.base_model,
        payload=encode_json(asked.model_copy(update={"weights_access_token": None})),
        session_id=session.session_id,
        model_id=model.model_id,
        seq_id=0,
        version_id=version.version_id,
    )
    await admit(request, context, new)
    return await made(context, model, asked.model_seq_id, new)


@router.post("/weights_info", openapi_extra=dict(describe(WeightsInfoRequest)))
async def weights_info(request: Request) -> Response:
    asked = await read_json(request, WeightsInfoRequest)
    _, source = await readable(request, context_of(request), asked.tinker_path)
    lora = source.lora_config
    return answer(
        WeightsInfoResponse(
            base_model=source.base_model,
            optimizer_config=optimizer_config_from(source.optimizer_config),
            is_lora=True,
            lora_rank=lora["rank"],
            train_unembed=lora["train_unembed"],
            train_mlp=lora["train_mlp"],
            train_attn=lora["train_attn"],
        )
    )


# MERGED: Copies of checkpoints, one's own or another owner's, as runs of their own.


# What a copy of a save without a name is called.
UNNAMED = "copy"


@router.post("/copy_weights", openapi_extra=dict(describe(CopyWeightsRequest)))
async def copy_weights(request: Request) -> Response:
    """Into a project, or (before 0.34) into a session. A repeat finds the first copy."""
    asked = await read_json(request, CopyWeightsRequest)
    context = context_of(request)
    check_ttl(asked.ttl_seconds)
    source, run = await readable(
        request, context, asked.source_path, token=asked.weights_access_token
    )
    session, number = await _place(request, context, asked)
    now_s = time.time()
    # Whoever may read a checkpoint may not read what its owner noted about the run.
    is_own = run.owner == session.owner
    model = Model(
        model_id=f"{session.session_id}:train:{number}",
        owner=session.owner,
        session_id=session.session_id,
        base_model=run.base_model,
        lora_config=run.lora_config,
        optimizer_config=run.optimizer_config,
        user_metadata=run.user_metadata if is_own else None,
        created_s=now_s,
    )
    checkpoints, lists = context.store.checkpoints, context.store.checkpoint_lists
    copy = checkpoints.new_version(
        owner=model.owner,
        model_id=model.model_id,
        kind=source.kind,
        name=source.name or UNNAMED,
    ).with_size(source.size_bytes)
    written = await checkpoints.fingerprint(source)
    version = await lists.earlier_copy(copy, written)
    if version is None:
        add = functools.partial(
            lists.add_copy,
            copy,
            fingerprint=written,
            model=model,
            model_seq_id=number,
            source=source,
            like=await _notes(context, source, is_own=is_own),
            expires_s=None if asked.ttl_seconds is None else now_s + asked.ttl_seconds,
        )
        await checkpoints.copy_files(source, copy)
        try:
            version = await context.store.quotas.within(model.owner, add)
        except (OverQuota, RunTaken, NewDataRefused):
            # After any other error the row may be there: the sweep, which looks, deletes them.
            await checkpoints.discard(copy)
            raise
        if version is not copy:  # another try of this copy was first
            await checkpoints.discard(copy)
    path = tinker_path(version.model_id, version.kind, version.name or UNNAMED)
    return answer(CopyWeightsResponse(tinker_path=path))


async def _notes(context: Context, source: Version, *, is_own: bool) -> NamedCheckpoint | None:
    """The checkpoint whose own metadata the copy may have: the reader's, or a published one."""
    if source.name is None:
        return None
    saved = await context.store.checkpoint_lists.checkpoint(
        model_id=source.model_id, kind=source.kind, name=source.name
    )
    return saved if saved is not None and (is_own or saved.public) else None


def _copy_key(key: str) -> str:
    """Hashed, as those of sessions: a header may hold anything."""
    return f"copy:{hashlib.sha256(key.encode()).hexdigest()}"


async def _place(
    request: Request, context: Context, asked: CopyWeightsRequest
) -> tuple[Session, int]:
    """The session that the copy belongs to, and its number in it."""
    if asked.session_id is not None:
        if asked.model_seq_id is None or asked.model_seq_id < 0:
            raise WireError.at(("model_seq_id",), "a number from 0 is needed.", "missing")
        return await context.open_session(request, asked.session_id), asked.model_seq_id
    if asked.destination_project_id is None:
        raise WireError.at(
            ("destination_project_id",),
            "give `destination_project_id`, or `session_id` and `model_seq_id`.",
            "missing",
        )
    # The client repeats a copy under one key, so the key finds the session of the first try.
    key = request.headers.get("x-idempotency-key")
    session = await context.store.sessions.create_session(
        owner=owner_of(request),
        sdk_version=None,
        tags=["copy"],
        user_metadata={},
        project_id=asked.destination_project_id,
        display_name=None,
        idempotency_key=None if key is None else _copy_key(key),
    )
    return session, 0
