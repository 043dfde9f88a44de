"""
A step that is refused does not hold up those behind it.

The refusal is answered as ever. It is also noted under the step's number, where model and number can
be read: the sender may use the number again, and if it goes on instead, the step counts as failed with
the same reason. Unknown models and limits (404, 410, 429) are no failures of a step.
"""

from collections.abc import Awaitable, Callable
from functools import wraps

from starlette.requests import Request
from starlette.responses import Response

from tinkex.server.api.context import SENT, context_of
from tinkex.server.api.errors import Refusal
from tinkex.server.plan import Kind
from tinkex.wire.address import Address, address_in_json, address_in_protobuf
from tinkex.wire.codec import PROTOBUF_TYPE
from tinkex.wire.errors import UserFailure, WireError
from tinkex.wire.scrubbing import scrubbed

Route = Callable[[Request], Awaitable[Response]]

# Protobuf has 32 bits for it; JSON must not bring more.
LARGEST_SEQ_ID = 2**31 - 1

#: What a step can be answered at once that will not become better by sending it again.
FINAL = frozenset({400, 413, 422})


def numbered(kind: Kind) -> Callable[[Route], Route]:
    """For routes that take steps of this kind."""

    def around(route: Route) -> Route:
        @wraps(route)
        async def send(request: Request) -> Response:
            try:
                return await route(request)
            except (WireError, UserFailure) as refusal:
                await _note(request, kind, str(refusal))
                raise
            except Refusal as refusal:
                if refusal.status in FINAL:
                    await _note(request, kind, str(refusal))
                raise

        return send

    return around


async def _note(request: Request, kind: Kind, reason: str) -> None:
    address = _address(request)
    if address is None or not 1 <= address.seq_id <= LARGEST_SEQ_ID:
        return
    context = context_of(request)
    try:
        model = await context.model(request, address.model_id)
        await context.open_session(request, model.session_id)
    except Refusal:
        return  # not this owner's, or over: there is nobody behind it
    if address.forward_only and kind is Kind.FORWARD_BACKWARD:
        kind = Kind.FORWARD
    await context.dispatcher.refuse(
        model.model_id,
        address.seq_id,
        kind,
        f"it was refused when it came: {scrubbed(reason[:2000])}",
    )


def _address(request: Request) -> Address | None:
    body: bytes | None = request.scope.get(SENT)
    if body is None:
        return None
    if PROTOBUF_TYPE in request.headers.get("content-type", ""):
        return address_in_protobuf(body)
    return address_in_json(body)
