"""Accept before acknowledging: the row is on disk, then the client hears the request's id."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import wraps

from starlette.requests import Request
from starlette.responses import Response

from tinkex.server.api.auth import caller_of
from tinkex.server.api.deps import SENT, Context, answer, context_of
from tinkex.server.api.errors import Refusal
from tinkex.server.scheduler.fairness import Limits, all_full, over_limit
from tinkex.server.scheduler.results import load_of
from tinkex.server.scheduler.sample_worker import Tap
from tinkex.server.scheduler.step_queue import Kind
from tinkex.server.store import Accepted, NewRequest, RequestRow, Status
from tinkex.wire.codec import PROTOBUF_TYPE
from tinkex.wire.errors import UserFailure, WireError
from tinkex.wire.futures import UntypedAPIFuture
from tinkex.wire.inputs import EncodedTextChunk, ModelInput
from tinkex.wire.redaction import scrubbed
from tinkex.wire.salvage import Address, address_in_json, address_in_protobuf

# The official clients take this, or a second of their own, and send the request again.
RETRY_AFTER_S = 1


async def admit(
    request: Request, context: Context, new: NewRequest, *, loss_number: int | None = None
) -> None:
    """
    Refuse what is over the limits of its owner, or of the server, for now: a 429.

    A step that others of its model wait for is always let in: they would hold its place for ever.
    So is the repeat of what was accepted: it may itself be what fills the server.
    """
    caller = caller_of(request)
    limits = Limits.of(context.settings, caller.limits)
    context.dispatcher.allow(caller.owner, limits.max_training)
    load = context.futures.load(caller.owner)
    refusal = over_limit(load, load_of(new), limits) or all_full(
        len(context.futures),
        context.settings.max_open,
        own=load.requests,
        owners=len({*context.futures.loads, caller.owner}),
    )
    if refusal is None:
        return
    if new.model_id is not None and context.dispatcher.awaits(new.model_id, new.seq_id or 0):
        return
    store = context.store
    if loss_number is not None and await store.models.has_custom_loss(
        new.session_id or "", loss_number
    ):
        return
    if await store.requests.find_repeat(new) is not None:
        return
    raise Refusal(429, refusal, headers={"Retry-After": str(RETRY_AFTER_S)})


async def accepted(context: Context, new: NewRequest) -> Response:
    """Store the request, or find its earlier self; hand it on if it is new; answer its id."""
    first = await take(context, new)
    return answer(
        UntypedAPIFuture(
            request_id=first.request_id,
            model_id=new.model_id,
            sample_sequence_ids=sequence_ids(first) if new.kind == Kind.SAMPLE else None,
        )
    )


def sequence_ids(first: Accepted) -> list[str]:
    """The names of a sample's sequences, before they exist."""
    return [f"{first.request_id}-{index}" for index in range(first.sequences)]


async def take(context: Context, new: NewRequest, *, tap: Tap | None = None) -> Accepted:
    """The same without the answer; a new sample tells its tokens to the tap."""
    first = None
    if context.store.health.problem is not None:
        # What was promised stands, whatever the disk takes now.
        first = await context.store.requests.find_repeat(new)
        if first is None:
            context.store.health.refuse_new_work()
    if first is None:
        first = await context.store.requests.accept(new)
    if first.kind != new.kind:
        raise WireError.at(
            ("seq_id",),
            f"step {new.seq_id} of this model was already used for {first.kind}, so it cannot be "
            f"{new.kind}. Two clients may be numbering the steps of one model.",
            "seq_id_reused",
        )
    await hand_on(context, new, first, tap=tap)
    return first


async def made_before(context: Context, new: NewRequest, first: Accepted) -> None:
    """
    A model that is made a second time must be the same one: nothing would show the difference.

    A 422 and no 409, which clients send again for minutes.
    """
    payload = await context.store.requests.payload(first.request_id)
    before = payload if isinstance(payload, bytes) else await asyncio.to_thread(payload.read_bytes)
    if first.kind == new.kind and before == new.payload:
        return
    raise WireError.at(
        ("model_seq_id",),
        f"model {new.model_id} was already made, with other settings ({first.kind}). A repeat "
        "must say the same; use the next free number for another model.",
        "model_seq_id_reused",
    )


def tokens_known(prompt: ModelInput) -> int:
    """Tokens, as far as they are known here: what an image comes to is the engine's to say."""
    try:
        return prompt.length
    except ValueError:
        return sum(c.length for c in prompt.chunks if isinstance(c, EncodedTextChunk))


def row_of(new: NewRequest, first: Accepted) -> RequestRow:
    """The row that was just written."""
    return RequestRow(
        request_id=first.request_id,
        owner=new.owner,
        session_id=new.session_id,
        model_id=new.model_id,
        sampling_session_id=new.sampling_session_id,
        seq_id=new.seq_id,
        kind=new.kind,
        status=Status.WAITING,
        base_model=new.base_model,
        sequences=new.sequences,
        version_id=new.version_id,
        result_bytes=None,
        error=None,
        category=None,
        cause=None,
        tokens=new.tokens,
    )


async def hand_on(
    context: Context, new: NewRequest, first: Accepted, *, tap: Tap | None = None
) -> None:
    """
    What was just committed is the dispatcher's; nothing in between may fail.

    So is a repeat of something that waits and never got there.
    """
    if first.is_new:
        row = row_of(new, first)
        context.dispatcher.take(row, payload=new.payload, tap=tap)
    else:
        await context.dispatcher.take_again(first.request_id)


# MERGED: A step that is refused does not hold up those behind it. The refusal is answered as ever. It is also noted under the step's number, where model and number can be read: the sender may use the number again, and if it goes on instead, the step counts as failed with the same reason. Unknown models and limits (404, 410, 429) are no failures of a step.


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
