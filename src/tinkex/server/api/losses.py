"""Losses that users wrote: checked by an engine, kept for the models of their session."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tinkex.server.api.accept import admit, hand_on
from tinkex.server.api.context import answer, context_of, describe, read_json
from tinkex.server.api.errors import Refusal
from tinkex.server.plan import Kind
from tinkex.server.store import NewRequest
from tinkex.wire.codec import encode_json
from tinkex.wire.custom_loss import CreateCustomLossRequest
from tinkex.wire.errors import WireError
from tinkex.wire.futures import UntypedAPIFuture

router = APIRouter(prefix="/api/v1", tags=["training"])

#: A graph of the most nodes that an engine takes is far smaller.
MOST_BYTES = 4 * 2**20
#: An engine keeps those of every session that has a model in its memory.
MOST_LOSSES = 1_000


@router.post("/create_custom_loss", openapi_extra=dict(describe(CreateCustomLossRequest)))
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
