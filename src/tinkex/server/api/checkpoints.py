"""Saving and loading, as steps of a model; and what a checkpoint is made of."""

import secrets
import time

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tinkex.server.api.accept import admit
from tinkex.server.api.auth import reader_owners
from tinkex.server.api.context import Context, answer, context_of, describe, read_body, read_json
from tinkex.server.api.errors import Refusal
from tinkex.server.api.models import made
from tinkex.server.api.numbers import numbered
from tinkex.server.api.reading import readable
from tinkex.server.api.training import NumberedStep, accept_step, read_step
from tinkex.server.plan import Kind
from tinkex.server.saving import refuse_external
from tinkex.server.store import Model, NewRequest
from tinkex.wire.base import StrictModel
from tinkex.wire.checkpoints import (
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
