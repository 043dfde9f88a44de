"""Models: made, asked about, taken out of memory."""

import secrets
import time

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tinkex.server.api.auth import owner_of
from tinkex.server.api.deps import Context, answer, context_of, describe, read_json
from tinkex.server.api.errors import Refusal
from tinkex.server.api.submit import accepted, admit, hand_on, made_before, row_of
from tinkex.server.scheduler.step_queue import Kind
from tinkex.server.store import Model, NewRequest
from tinkex.wire.codec import encode_json
from tinkex.wire.custom_loss import CreateCustomLossRequest
from tinkex.wire.errors import WireError
from tinkex.wire.futures import UntypedAPIFuture
from tinkex.wire.runs import GetInfoRequest, GetInfoResponse, ModelData
from tinkex.wire.training import CreateModelRequest, UnloadModelRequest, optimizer_config_from

router = APIRouter(prefix="/api/v1", tags=["models"])


@router.post("/create_model", openapi_extra=dict(describe(CreateModelRequest)))
async def create_model(request: Request) -> Response:
    """Unknown base models are refused here, with those that are served."""
    asked = await read_json(request, CreateModelRequest)
    context = context_of(request)
    session = await context.open_session(request, asked.session_id)
    base = context.base_model(asked.base_model)
    if asked.model_seq_id < 0:
        raise WireError.at(("model_seq_id",), f"{asked.model_seq_id} is negative.")
    if asked.lora_config is None:
        raise Refusal(
            400,
            "create_model without `lora_config` asks for training all weights, which this server "
            'does not do. Send {"lora_config": {"rank": 32}}.',
        )
    lora = asked.lora_config
    if lora.seed is None:
        # Fixed here, so that a model that is built again from its log begins with the same weights.
        lora = lora.model_copy(update={"seed": secrets.randbits(31)})
    model = Model(
        model_id=f"{session.session_id}:train:{asked.model_seq_id}",
        owner=session.owner,
        session_id=session.session_id,
        base_model=base.name,
        lora_config=lora.model_dump(),
        optimizer_config=asked.optimizer_config.model_dump(),
        user_metadata=asked.user_metadata,
        created_s=time.time(),
    )
    new = NewRequest(
        owner=model.owner,
        kind=Kind.CREATE_MODEL,
        base_model=base.name,
        payload=encode_json(asked),
        session_id=session.session_id,
        model_id=model.model_id,
        seq_id=0,
    )
    await admit(request, context, new)
    return await made(context, model, asked.model_seq_id, new)


async def made(context: Context, model: Model, number: int, new: NewRequest) -> Response:
    """Store a model with its first step, or find its earlier self; answer the request's id."""
    first = await context.store.runs.create_model(model=model, model_seq_id=number, request=new)
    if first.refused is not None:
        context.scheduler.creation_refused(row_of(new, first), first.refused)
    else:
        await hand_on(context, new, first)
    if not first.is_new:
        await made_before(context, new, first)
    return answer(UntypedAPIFuture(request_id=first.request_id, model_id=model.model_id))


@router.post("/get_info", openapi_extra=dict(describe(GetInfoRequest)))
async def get_info(request: Request) -> Response:
    asked = await read_json(request, GetInfoRequest)
    context = context_of(request)
    model = await context.model(request, asked.model_id)
    base = context.base_model(model.base_model)
    data = ModelData(
        arch=base.arch or None, model_name=base.name, tokenizer_id=context.tokenizer_id(base.name)
    )
    return answer(
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


@router.post("/unload_model", openapi_extra=dict(describe(UnloadModelRequest)))
async def unload_model(request: Request) -> Response:
    asked = await read_json(request, UnloadModelRequest)
    context = context_of(request)
    model = await context.model(request, asked.model_id)
    new = NewRequest(
        owner=owner_of(request),
        kind=Kind.UNLOAD_MODEL,
        base_model=model.base_model,
        payload=encode_json(asked),
        session_id=model.session_id,
        model_id=model.model_id,
    )
    await admit(request, context, new)
    return await accepted(context, new)


# MERGED: Losses that users wrote: checked by an engine, kept for the models of their session.


custom_loss_router = APIRouter(prefix="/api/v1", tags=["training"])

#: A graph of the most nodes that an engine takes is far smaller.
MOST_BYTES = 4 * 2**20
#: An engine keeps those of every session that has a model in its memory.
MOST_LOSSES = 1_000


@custom_loss_router.post(
    "/create_custom_loss", openapi_extra=dict(describe(CreateCustomLossRequest))
)
async def create_custom_loss(request: Request) -> Response:
    """The future answers with the loss's id, or fails saying which node is not offered."""
    asked = await read_json(request, CreateCustomLossRequest)
    context = context_of(request)
    session = await context.open_session(request, asked.session_id)
    if not 0 <= asked.custom_loss_seq_id < MOST_LOSSES:
        raise WireError.at(
            ("custom_loss_seq_id",),
            f"{asked.custom_loss_seq_id} is not a number of a loss; a session has at most "
            f"{MOST_LOSSES}, from 0.",
        )
    payload = encode_json(asked)
    if len(payload) > MOST_BYTES:
        raise Refusal(
            413, f"the loss has {len(payload)} bytes as JSON; at most {MOST_BYTES} are allowed."
        )
    # Any engine can say whether a graph is offered.
    base_model = context.executor.served[0].name
    new = NewRequest(
        owner=session.owner,
        kind=Kind.CREATE_CUSTOM_LOSS,
        base_model=base_model,
        payload=payload,
        session_id=session.session_id,
    )
    await admit(request, context, new, loss_number=asked.custom_loss_seq_id)
    first = await context.store.runs.create_custom_loss(
        custom_loss_seq_id=asked.custom_loss_seq_id, request=new
    )
    await hand_on(context, new, first)
    return answer(UntypedAPIFuture(request_id=first.request_id))
