"""The routes that create, describe and unload models, and register custom losses."""

import asyncio
import secrets
import time

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tinkex.server.api.auth import owner_of
from tinkex.server.api.bodies import MessageRoute
from tinkex.server.api.deps import Context, context_of, json_response
from tinkex.server.api.errors import Refusal
from tinkex.server.api.submit import accept, future_response
from tinkex.server.queued_request import Kind, QueuedRequest
from tinkex.server.store import Model
from tinkex.wire.codec import encode_json
from tinkex.wire.custom_loss import CreateCustomLossRequest
from tinkex.wire.errors import WireError
from tinkex.wire.sessions import (
    GetInfoRequest,
    GetInfoResponse,
    ModelData,
)
from tinkex.wire.training import CreateModelRequest, UnloadModelRequest, optimizer_config_from

router = APIRouter(prefix="/api/v1", tags=["models"], route_class=MessageRoute)
custom_loss_router = APIRouter(prefix="/api/v1", tags=["training"], route_class=MessageRoute)

#: Far larger than a graph with the maximum number of nodes.
MAX_LOSS_BYTES = 4 * 2**20
#: An engine keeps the losses of all sessions that have a loaded model.
MAX_LOSSES_PER_SESSION = 1_000


@router.post("/create_model")
async def create_model(request: Request, message: CreateModelRequest) -> Response:
    """Refuses unknown base models with a list of the served ones."""
    context = context_of(request)
    session = await context.open_session(request, message.session_id)
    base = context.base_model(message.base_model)
    if message.model_seq_id < 0:
        raise WireError.at(("model_seq_id",), f"{message.model_seq_id} is negative.")
    if message.lora_config is None:
        raise Refusal(
            400,
            "create_model without `lora_config` requests full fine-tuning, which this server does "
            'not support. Send {"lora_config": {"rank": 32}}.',
        )
    lora = message.lora_config
    if lora.seed is None:
        # Fixed here, so that a model that is rebuilt from its log starts with the same weights.
        lora = lora.model_copy(update={"seed": secrets.randbits(31)})
    model = Model(
        model_id=f"{session.session_id}:train:{message.model_seq_id}",
        owner=session.owner,
        session_id=session.session_id,
        base_model=base.name,
        lora_config=lora.model_dump(),
        optimizer_config=message.optimizer_config.model_dump(),
        user_metadata=message.user_metadata,
        created_s=time.time(),
    )
    return await create_with_first_step(
        request, model, message.model_seq_id, Kind.CREATE_MODEL, encode_json(message)
    )


async def create_with_first_step(
    request: Request,
    model: Model,
    number: int,
    kind: Kind,
    payload: bytes,
    *,
    version_id: str | None = None,
) -> Response:
    """Store a model with its first step, or find the first one; returns the request id."""
    context = context_of(request)
    new = QueuedRequest(
        owner=model.owner,
        kind=kind,
        base_model=model.base_model,
        payload=payload,
        session_id=model.session_id,
        model_id=model.model_id,
        seq_id=0,
        version_id=version_id,
    )
    first = await accept(
        request,
        new,
        insert=lambda new: context.store.models.create_model(
            model=model, model_seq_id=number, request=new
        ),
    )
    if first is not new:
        await _check_same_model(context, new, first)
    return future_response(new, first)


async def _check_same_model(context: Context, new: QueuedRequest, first: QueuedRequest) -> None:
    """
    Refuse a repeated model creation with other settings: the client would not notice the difference.

    A 422, not a 409: clients retry a 409 for minutes.
    """
    payload = await context.store.requests.payload(first.request_id)
    before = payload if isinstance(payload, bytes) else await asyncio.to_thread(payload.read_bytes)
    if first.kind == new.kind and before == new.payload:
        return
    raise WireError.at(
        ("model_seq_id",),
        f"model {new.model_id} already exists with other settings ({first.kind}). A repeated "
        "request must be identical; use the next free number for another model.",
        "model_seq_id_reused",
    )


@router.post("/get_info")
async def get_info(request: Request, message: GetInfoRequest) -> Response:
    context = context_of(request)
    model = await context.model(request, message.model_id)
    base = context.base_model(model.base_model)
    data = ModelData(
        arch=base.arch or None, model_name=base.name, tokenizer_id=context.tokenizer_id(base.name)
    )
    return json_response(
        GetInfoResponse(
            type="get_info",
            model_data=data,
            model_id=model.model_id,
            is_lora=True,
            lora_rank=model.lora_config["rank"],
            model_name=base.name,
            optimizer_config=optimizer_config_from(model.optimizer_config),
        )
    )


@router.post("/unload_model")
async def unload_model(request: Request, message: UnloadModelRequest) -> Response:
    context = context_of(request)
    model = await context.model(request, message.model_id)
    new = QueuedRequest(
        owner=owner_of(request),
        kind=Kind.UNLOAD_MODEL,
        base_model=model.base_model,
        payload=encode_json(message),
        session_id=model.session_id,
        model_id=model.model_id,
    )
    return future_response(new, await accept(request, new))


@custom_loss_router.post("/create_custom_loss")
async def create_custom_loss(request: Request, message: CreateCustomLossRequest) -> Response:
    """The future returns the loss id, or fails with the name of an unsupported node."""
    context = context_of(request)
    session = await context.open_session(request, message.session_id)
    if not 0 <= message.custom_loss_seq_id < MAX_LOSSES_PER_SESSION:
        raise WireError.at(
            ("custom_loss_seq_id",),
            f"{message.custom_loss_seq_id} is not a valid number; a session has at most "
            f"{MAX_LOSSES_PER_SESSION} losses, numbered from 0.",
        )
    payload = encode_json(message)
    if len(payload) > MAX_LOSS_BYTES:
        raise Refusal(
            413, f"the loss has {len(payload)} bytes as JSON; at most {MAX_LOSS_BYTES} are allowed."
        )
    new = QueuedRequest(
        owner=session.owner,
        kind=Kind.CREATE_CUSTOM_LOSS,
        # Any engine can check a graph.
        base_model=context.any_base_model(),
        payload=payload,
        session_id=session.session_id,
    )
    number, losses = message.custom_loss_seq_id, context.store.models
    first = await accept(
        request,
        new,
        insert=lambda new: losses.create_custom_loss(custom_loss_seq_id=number, request=new),
        find_repeat=lambda new: losses.find_custom_loss(custom_loss_seq_id=number, request=new),
    )
    return future_response(new, first)
