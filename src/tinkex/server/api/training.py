"""Steps of training: forward, forward_backward, optim_step. Checked, stored, answered with an id."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tinkex.server.api.deps import Context, context_of, describe, read_body, read_data
from tinkex.server.api.submit import LARGEST_SEQ_ID, accepted, admit, numbered, tokens_known
from tinkex.server.scheduler.step_queue import Kind
from tinkex.server.store import Model, NewRequest
from tinkex.wire.checkpoints import (
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)
from tinkex.wire.codec import PROTOBUF_TYPE, decode_forward_json, decode_json, encode_json
from tinkex.wire.errors import UserFailure, WireError
from tinkex.wire.protobuf import (
    decode_forward_backward_request,
    encode_forward_backward_request,
)
from tinkex.wire.redaction import redact
from tinkex.wire.training import ForwardBackwardRequest, OptimStepRequest

router = APIRouter(prefix="/api/v1", tags=["training"])

NumberedStep = (
    OptimStepRequest
    | SaveWeightsRequest
    | SaveWeightsForSamplerRequest
    | SaveWeightsExternalRequest
)


@numbered(Kind.FORWARD)
async def forward(request: Request) -> Response:
    return await _pass(request, forward_only=True)


@numbered(Kind.FORWARD_BACKWARD)
async def forward_backward(request: Request) -> Response:
    return await _pass(request, forward_only=False)


async def _pass(request: Request, *, forward_only: bool) -> Response:
    is_protobuf = PROTOBUF_TYPE in request.headers.get("content-type", "")
    asked, said_forward, payload = await read_data(request, lambda body: _decode(body, is_protobuf))
    context = context_of(request)
    model = await context.model(request, asked.model_id)
    kind = Kind.FORWARD if forward_only or said_forward else Kind.FORWARD_BACKWARD
    tokens = sum(tokens_known(datum.model_input) for datum in asked.forward_backward_input.data)
    return await accept_step(request, context, model, kind, asked.seq_id, payload, tokens=tokens)


def _decode(body: bytes, is_protobuf: bool) -> tuple[ForwardBackwardRequest, bool, bytes]:
    """The pass, whether it is forward only, and its normal form."""
    if is_protobuf:
        asked, forward_only = decode_forward_backward_request(body)
        return asked, forward_only, body
    asked, forward_only = decode_forward_json(body)
    return asked, forward_only, encode_forward_backward_request(asked, forward_only=forward_only)


@router.post("/optim_step", openapi_extra=dict(describe(OptimStepRequest)))
@numbered(Kind.OPTIM_STEP)
async def optim_step(request: Request) -> Response:
    body = await read_body(request)
    model_id, seq_id, payload = read_step(OptimStepRequest, body)
    context = context_of(request)
    model = await context.model(request, model_id)
    return await accept_step(request, context, model, Kind.OPTIM_STEP, seq_id, payload)


def read_step(message: type[NumberedStep], body: bytes) -> tuple[str, int | None, bytes]:
    """
    The model and the number of a step, once its body is known to be sound, and what is stored.

    A sound body that asks for something unknown keeps its place in the order: it is accepted, and
    fails as the user's when its turn comes, so that the steps behind it do not wait for it. What
    nobody knows may be anything, a key too, so that is taken out.
    """
    try:
        asked = decode_json(message, body)
    except UserFailure as failure:
        model_id, seq_id = failure.request.get("model_id"), failure.request.get("seq_id")
        if not isinstance(model_id, str) or not isinstance(seq_id, int):
            raise
        return model_id, seq_id, redact(body.decode(errors="replace")).encode()
    return asked.model_id, asked.seq_id, encode_json(asked)


async def accept_step(
    request: Request,
    context: Context,
    model: Model,
    kind: Kind,
    seq_id: int | None,
    payload: bytes,
    *,
    version_id: str | None = None,
    tokens: int = 0,
) -> Response:
    """A numbered step of a model."""
    # A stray number far ahead would, once its gap is closed, leave every later step too late.
    if seq_id is None or not 1 <= seq_id <= LARGEST_SEQ_ID:
        found = "is missing" if seq_id is None else f"is {seq_id}"
        raise WireError.at(
            ("seq_id",),
            f"seq_id {found}; steps of a model are numbered from 1, without gaps, in 32 bits.",
            "missing" if seq_id is None else "value_error",
        )
    await context.open_session(request, model.session_id)
    new = NewRequest(
        owner=model.owner,
        kind=kind,
        base_model=model.base_model,
        payload=payload,
        session_id=model.session_id,
        model_id=model.model_id,
        seq_id=seq_id,
        version_id=version_id,
        tokens=tokens,
    )
    await admit(request, context, new)
    return await accepted(context, new)
