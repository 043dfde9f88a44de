"""The routes of training steps: forward, forward_backward, optim_step."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tinkex.server.api.bodies import read_data
from tinkex.server.api.deps import context_of, openapi_body
from tinkex.server.api.submit import accept_step, numbered_step, submit_step, tokens_known
from tinkex.server.scheduler.step_queue import Kind
from tinkex.wire.codec import PROTOBUF_TYPE, decode_forward_json
from tinkex.wire.protobuf import (
    decode_forward_backward_request,
    encode_forward_backward_request,
)
from tinkex.wire.training import ForwardBackwardRequest, OptimStepRequest

router = APIRouter(prefix="/api/v1", tags=["training"])


@numbered_step(Kind.FORWARD)
async def forward(request: Request) -> Response:
    return await _accept_pass(request, Kind.FORWARD)


@numbered_step(Kind.FORWARD_BACKWARD)
async def forward_backward(request: Request) -> Response:
    return await _accept_pass(request, Kind.FORWARD_BACKWARD)


async def _accept_pass(request: Request, kind: Kind) -> Response:
    """Accept a pass. A `forward_backward` request with `forward_only` is a forward pass."""
    is_protobuf = PROTOBUF_TYPE in request.headers.get("content-type", "")
    message, forward_only, payload = await read_data(
        request, lambda body: _decode(body, is_protobuf)
    )
    context = context_of(request)
    model = await context.model(request, message.model_id)
    if forward_only:
        kind = Kind.FORWARD
    tokens = sum(tokens_known(datum.model_input) for datum in message.forward_backward_input.data)
    return await accept_step(request, context, model, kind, message.seq_id, payload, tokens=tokens)


def _decode(body: bytes, is_protobuf: bool) -> tuple[ForwardBackwardRequest, bool, bytes]:
    """The request, whether it is forward only, and its normalized encoding (protobuf)."""
    if is_protobuf:
        message, forward_only = decode_forward_backward_request(body)
        return message, forward_only, body
    message, forward_only = decode_forward_json(body)
    return (
        message,
        forward_only,
        encode_forward_backward_request(message, forward_only=forward_only),
    )


@router.post("/optim_step")
@numbered_step(Kind.OPTIM_STEP)
async def optim_step(request: Request) -> Response:
    return await submit_step(request, OptimStepRequest, Kind.OPTIM_STEP)
