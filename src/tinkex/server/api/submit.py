"""
Submitting requests: admit, store, schedule, return the request id.

A request is durable before its id is returned. A repeated request finds the first one and gets the
same id.

A step that is refused must not block later steps. So the reason for the refusal is also recorded
under the step's number, if model and number can be read from the body (`numbered_step`). The
client may use the number again; if it continues with the next number, the refused step counts as
failed with the same reason. Unknown models and limits (404, 410, 429) are not failures of a step.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import wraps

from starlette.requests import Request
from starlette.responses import Response

from tinkex.server.api.auth import caller_of
from tinkex.server.api.bodies import RECEIVED_BODY, read_body
from tinkex.server.api.deps import Context, context_of, json_response
from tinkex.server.api.errors import Refusal
from tinkex.server.queued_request import Kind, Outcome, QueuedRequest
from tinkex.server.scheduler.fairness import Limits, over_limit, server_full
from tinkex.server.scheduler.result_waiters import load_of
from tinkex.server.scheduler.sample_worker import TokenStream
from tinkex.server.store import Model
from tinkex.wire.checkpoints import (
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)
from tinkex.wire.codec import PROTOBUF_TYPE, decode_json, encode_json
from tinkex.wire.errors import UserFailure, WireError
from tinkex.wire.futures import UntypedAPIFuture
from tinkex.wire.inputs import EncodedTextChunk, ModelInput
from tinkex.wire.malformed_steps import StepId, step_id_in_json, step_id_in_protobuf
from tinkex.wire.redaction import redact
from tinkex.wire.training import OptimStepRequest

# Official clients wait this long, or a second of their own, and retry.
RETRY_AFTER_S = 1
# The protobuf field has 32 bits, so JSON must not allow more.
MAX_SEQ_ID = 2**31 - 1
#: Statuses of a refused step for which a retry would not help.
FINAL_STATUSES = frozenset({400, 413, 422})

Route = Callable[[Request], Awaitable[Response]]
NumberedStep = (
    OptimStepRequest
    | SaveWeightsRequest
    | SaveWeightsForSamplerRequest
    | SaveWeightsExternalRequest
)


async def admit(
    request: Request, context: Context, new: QueuedRequest, *, loss_number: int | None = None
) -> None:
    """
    Raise a 429 for a request that is over a limit of its owner or of the server.

    Two kinds of requests are always admitted: a step that later steps of its model wait for, because
    otherwise they would wait forever; and a repeat of an accepted request, because the first one may
    be what fills the server.
    """
    caller = caller_of(request)
    limits = Limits.of(context.settings, caller.limits)
    context.scheduler.training_limits.set(caller.owner, limits.max_training)
    load = context.futures.load(caller.owner)
    refusal = over_limit(load, load_of(new), limits) or server_full(
        len(context.futures),
        context.settings.max_open,
        own=load.requests,
        owners=len({*context.futures.loads, caller.owner}),
    )
    if refusal is None:
        return
    if new.model_id is not None and context.scheduler.is_blocked_by(new.model_id, new.seq_id or 0):
        return
    store = context.store
    if loss_number is not None and await store.models.has_custom_loss(
        new.session_id or "", loss_number
    ):
        return
    if await store.requests.find_repeat(new) is not None:
        return
    raise Refusal(429, refusal, headers={"Retry-After": str(RETRY_AFTER_S)})


async def submit_request(context: Context, new: QueuedRequest) -> Response:
    """Accept a request and return its id."""
    first = await accept_request(context, new)
    return json_response(
        UntypedAPIFuture(
            request_id=first.request_id,
            model_id=new.model_id,
            sample_sequence_ids=sequence_ids(first) if new.kind == Kind.SAMPLE else None,
        )
    )


def sequence_ids(first: QueuedRequest) -> list[str]:
    """The ids of a sample's sequences, which are known before the sequences exist."""
    return [f"{first.request_id}-{index}" for index in range(first.sequences)]


async def accept_request(
    context: Context, new: QueuedRequest, *, token_stream: TokenStream | None = None
) -> QueuedRequest:
    """
    Store and schedule a request, or find the first one that it repeats.

    The tokens of a new sample go to `token_stream` as they are sampled.
    """
    first = None
    if context.store.health.problem is not None:
        # A repeat of an accepted request succeeds even while nothing can be stored.
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
    await schedule(context, new, first, token_stream=token_stream)
    return first


async def schedule(
    context: Context,
    new: QueuedRequest,
    first: QueuedRequest,
    *,
    token_stream: TokenStream | None = None,
) -> None:
    """Give a committed request to the scheduler. Nothing may fail between the commit and this."""
    if first is new:
        context.scheduler.submit(new, token_stream=token_stream)
    else:
        # The first request may be waiting without being known to the scheduler.
        await context.scheduler.resubmit(first.request_id)


async def check_same_model(context: Context, new: QueuedRequest, first: QueuedRequest) -> None:
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


def tokens_known(prompt: ModelInput) -> int:
    """Tokens of a prompt, without images: only the engine knows how many tokens those have."""
    try:
        return prompt.length
    except ValueError:
        return sum(c.length for c in prompt.chunks if isinstance(c, EncodedTextChunk))


async def submit_step(request: Request, message_type: type[NumberedStep], kind: Kind) -> Response:
    """Read and accept a step without training data."""
    model_id, seq_id, payload = _decode_step(message_type, await read_body(request))
    context = context_of(request)
    model = await context.model(request, model_id)
    return await accept_step(request, context, model, kind, seq_id, payload)


def _decode_step(message_type: type[NumberedStep], body: bytes) -> tuple[str, int | None, bytes]:
    """
    The model, the number, and the payload to store.

    A well-formed step with unknown fields or values is accepted and fails as a user error in its
    order, so that later steps do not wait for it. Its payload is stored without secrets.
    """
    try:
        message = decode_json(message_type, body)
    except UserFailure as failure:
        model_id, seq_id = failure.request.get("model_id"), failure.request.get("seq_id")
        if not isinstance(model_id, str) or not isinstance(seq_id, int):
            raise
        return model_id, seq_id, redact(body.decode(errors="replace")).encode()
    return message.model_id, message.seq_id, encode_json(message)


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
    """Accept a numbered step of a model."""
    # The limit catches wrong numbers. After a number that is far too high, the gap before it times
    # out, and all steps with correct numbers arrive late and fail.
    if seq_id is None or not 1 <= seq_id <= MAX_SEQ_ID:
        found = "is missing" if seq_id is None else f"is {seq_id}"
        raise WireError.at(
            ("seq_id",),
            f"seq_id {found}; steps of a model are numbered from 1, without gaps, in 32 bits.",
            "missing" if seq_id is None else "value_error",
        )
    await context.open_session(request, model.session_id)
    new = QueuedRequest(
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
    return await submit_request(context, new)


def numbered_step(kind: Kind) -> Callable[[Route], Route]:
    """Decorator for routes of numbered steps: records the reason when a step is refused."""

    def decorate(route: Route) -> Route:
        @wraps(route)
        async def handle(request: Request) -> Response:
            try:
                return await route(request)
            except (WireError, UserFailure) as refusal:
                await _record_refusal(request, kind, str(refusal))
                raise
            except Refusal as refusal:
                if refusal.status in FINAL_STATUSES:
                    await _record_refusal(request, kind, str(refusal))
                raise

        return handle

    return decorate


async def _record_refusal(request: Request, kind: Kind, reason: str) -> None:
    address = _address(request)
    if address is None or not 1 <= address.seq_id <= MAX_SEQ_ID:
        return
    context = context_of(request)
    try:
        model = await context.model(request, address.model_id)
        await context.open_session(request, model.session_id)
    except Refusal:
        return  # not this owner's model, or its session is finished: no step waits behind it
    if address.forward_only and kind is Kind.FORWARD_BACKWARD:
        kind = Kind.FORWARD
    error = f"it was refused when it arrived: {redact(reason[:2000])}"
    await context.scheduler.refuse_step(
        QueuedRequest(
            owner=model.owner,
            kind=kind,
            base_model=model.base_model,
            session_id=model.session_id,
            model_id=model.model_id,
            seq_id=address.seq_id,
            outcome=Outcome(error=error, category="user"),
        )
    )


def _address(request: Request) -> StepId | None:
    """Model and number of a step, as far as they can be read from its body."""
    body: bytes | None = request.scope.get(RECEIVED_BODY)
    if body is None:
        return None
    if PROTOBUF_TYPE in request.headers.get("content-type", ""):
        return step_id_in_protobuf(body)
    return step_id_in_json(body)
