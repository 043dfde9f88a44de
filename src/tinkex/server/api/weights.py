"""The routes that load, describe and copy checkpoints."""

import functools
import hashlib
import secrets
import time

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tinkex.server.api.auth import owner_of, reader_owners
from tinkex.server.api.bodies import MessageRoute
from tinkex.server.api.deps import Context, context_of, json_response, readable_checkpoint
from tinkex.server.api.errors import Refusal
from tinkex.server.api.models import create_with_first_step
from tinkex.server.api.submit import StepRoute, accept_step
from tinkex.server.queued_request import Kind
from tinkex.server.scheduler.checkpoints import check_ttl, refuse_external
from tinkex.server.store import (
    Model,
    NamedCheckpoint,
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
    WeightsInfoResponse,
    tinker_path,
)
from tinkex.wire.codec import encode_json
from tinkex.wire.errors import UserFailure, WireError
from tinkex.wire.training import optimizer_config_from

router = APIRouter(prefix="/api/v1", tags=["checkpoints"], route_class=MessageRoute)
step_router = APIRouter(prefix="/api/v1", tags=["checkpoints"], route_class=StepRoute)


# The name of a copy of an unnamed checkpoint.
UNNAMED_COPY = "copy"


class WeightsInfoRequest(StrictModel):
    tinker_path: str


@step_router.post("/load_weights")
async def load_weights(request: Request, message: LoadWeightsRequest) -> Response:
    """Into an existing model (`model_id`, `seq_id`) or a new one (`session_id`, `model_seq_id`)."""
    context = context_of(request)
    if message.model_id is None and message.session_id is not None:
        return await _create_model_from(request, context, message)
    if message.model_id is None:
        raise WireError.at(
            ("model_id",), "give `model_id` and `seq_id`, or `session_id` and `model_seq_id`."
        )
    model = await context.model(request, message.model_id)
    return await accept_step(
        request,
        model,
        Kind.LOAD_WEIGHTS,
        message.seq_id,
        _without_token(message),
        version_id=await _foreign_version(request, context, model, message),
    )


async def _foreign_version(
    request: Request, context: Context, model: Model, message: LoadWeightsRequest
) -> str | None:
    """
    The version of another owner's checkpoint, if this request may read it.

    A checkpoint of the same owner is looked up when the step runs: an earlier step that saves it may
    still be queued.
    """
    readers = await reader_owners(request, message.weights_access_token)
    try:
        version = await context.store.checkpoints.find(message.path, readers=readers)
    except UserFailure:
        return None  # the step itself fails with the reason
    if version is None or version.owner == model.owner:
        return None
    return version.version_id


def _without_token(message: LoadWeightsRequest) -> bytes:
    """The payload to store, without the key of the other owner."""
    return encode_json(message.model_copy(update={"weights_access_token": None}))


async def _create_model_from(
    request: Request, context: Context, message: LoadWeightsRequest
) -> Response:
    """Create a model whose first step is this load."""
    session = await context.open_session(request, message.session_id or "")
    if message.model_seq_id is None or message.model_seq_id < 0:
        raise WireError.at(("model_seq_id",), "a number of 0 or more is required.", "missing")
    version, source = await readable_checkpoint(
        request, context, message.path, token=message.weights_access_token
    )
    refuse_external(version)
    if message.base_model is not None:
        named = context.base_model(message.base_model)
        if named.name != source.base_model:
            raise Refusal(
                400, f"{message.path} is an adapter of {source.base_model}, not of {named.name}."
            )
    optimizer = message.optimizer_config
    model = Model(
        model_id=f"{session.session_id}:train:{message.model_seq_id}",
        owner=session.owner,
        session_id=session.session_id,
        base_model=context.base_model(source.base_model).name,
        lora_config={**source.lora_config, "seed": secrets.randbits(31)},
        optimizer_config=optimizer.model_dump() if optimizer else source.optimizer_config,
        user_metadata=message.user_metadata,
        created_s=time.time(),
    )
    return await create_with_first_step(
        request,
        model,
        message.model_seq_id,
        Kind.LOAD_WEIGHTS,
        _without_token(message),
        version_id=version.version_id,
    )


@router.post("/weights_info")
async def weights_info(request: Request, message: WeightsInfoRequest) -> Response:
    _, source = await readable_checkpoint(request, context_of(request), message.tinker_path)
    lora = source.lora_config
    return json_response(
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


@router.post("/copy_weights")
async def copy_weights(request: Request, message: CopyWeightsRequest) -> Response:
    """Into a project, or (SDK before 0.34) into a session. A repeat finds the first copy."""
    context = context_of(request)
    check_ttl(message.ttl_seconds)
    source, run = await readable_checkpoint(
        request, context, message.source_path, token=message.weights_access_token
    )
    session, number = await _copy_destination(request, context, message)
    now_s = time.time()
    # Access to a checkpoint does not include the metadata of its run.
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
    checkpoints, catalog = context.store.checkpoints, context.store.checkpoint_catalog
    copy = checkpoints.new_version(
        owner=model.owner,
        model_id=model.model_id,
        kind=source.kind,
        name=source.name or UNNAMED_COPY,
    ).with_size(source.size_bytes)
    written = await checkpoints.fingerprint(source)
    version = await catalog.earlier_copy(copy, written)
    if version is None:
        add = functools.partial(
            catalog.add_copy,
            copy,
            fingerprint=written,
            model=model,
            model_seq_id=number,
            source=source,
            like=await _metadata_source(context, source, is_own=is_own),
            expires_s=None if message.ttl_seconds is None else now_s + message.ttl_seconds,
        )
        await checkpoints.copy_files(source, copy)
        try:
            version = await context.store.quotas.within(model.owner, add)
        except (OverQuota, RunTaken, NewDataRefused):
            # After any other error the row may exist. Then the cleanup decides about the files.
            await checkpoints.discard(copy)
            raise
        if version is not copy:  # a concurrent request made the same copy first
            await checkpoints.discard(copy)
    path = tinker_path(version.model_id, version.kind, version.name or UNNAMED_COPY)
    return json_response(CopyWeightsResponse(tinker_path=path))


async def _metadata_source(
    context: Context, source: Version, *, is_own: bool
) -> NamedCheckpoint | None:
    """The checkpoint whose metadata the copy gets: the caller's own, or a published one."""
    if source.name is None:
        return None
    saved = await context.store.checkpoint_catalog.checkpoint(
        model_id=source.model_id, kind=source.kind, name=source.name
    )
    return saved if saved is not None and (is_own or saved.public) else None


def _copy_key(key: str) -> str:
    """Hashed, because the header may contain anything."""
    return f"copy:{hashlib.sha256(key.encode()).hexdigest()}"


async def _copy_destination(
    request: Request, context: Context, message: CopyWeightsRequest
) -> tuple[Session, int]:
    """The session of the copy, and its number there."""
    if message.session_id is not None:
        if message.model_seq_id is None or message.model_seq_id < 0:
            raise WireError.at(("model_seq_id",), "a number of 0 or more is required.", "missing")
        return await context.open_session(request, message.session_id), message.model_seq_id
    if message.destination_project_id is None:
        raise WireError.at(
            ("destination_project_id",),
            "give `destination_project_id`, or `session_id` and `model_seq_id`.",
            "missing",
        )
    # A repeated request has the same key, which finds the session of the first one.
    key = request.headers.get("x-idempotency-key")
    session = await context.store.sessions.create_session(
        owner=owner_of(request),
        sdk_version=None,
        tags=["copy"],
        user_metadata={},
        project_id=message.destination_project_id,
        display_name=None,
        idempotency_key=None if key is None else _copy_key(key),
    )
    return session, 0
