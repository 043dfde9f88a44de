"""
Submitting requests, and the routes of training steps.

Each request takes one path: `bodies` reads it within the memory budgets, its route checks its fields
and looks up what it names, and `accept` applies the limits of its owner and of the server, stores it
and gives it to the scheduler, which is fair between owners. A request is durable before its id is
returned. A repeated request finds the first one and gets the same id.

A step that is refused must not block later steps. So the reason for the refusal is also recorded
under the step's number, if model and number can be read from the body (`StepRoute`). The client may
use the number again; if it continues with the next number, the refused step counts as failed with
the same reason. Unknown models and limits (404, 410, 429) are not failures of a step.
"""

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tinkex.models.image_header import ImageRefused
from tinkex.models.patch_rules import PatchRules
from tinkex.server.api.auth import caller_of
from tinkex.server.api.bodies import (
    RECEIVED_BODY,
    MessageRoute,
    in_decode_slot,
    read_body,
    read_data,
    release_memory,
)
from tinkex.server.api.deps import Context, context_of, describe_body, json_response
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
from tinkex.wire.codec import PROTOBUF_TYPE, decode_forward_json, decode_json, encode_json
from tinkex.wire.errors import UserFailure, WireError
from tinkex.wire.futures import UntypedAPIFuture
from tinkex.wire.inputs import EncodedTextChunk, ImageChunk, ModelInput
from tinkex.wire.malformed_steps import StepId, step_id_in_json, step_id_in_protobuf
from tinkex.wire.protobuf import decode_forward_backward_request, encode_forward_backward_request
from tinkex.wire.redaction import redact
from tinkex.wire.training import ForwardBackwardRequest, ForwardRequest, OptimStepRequest

# Official clients wait this long, or a second of their own, and retry.
RETRY_AFTER_S = 1
# The protobuf field has 32 bits, so JSON must not allow more.
MAX_SEQ_ID = 2**31 - 1
#: Statuses of a refused step for which a retry would not help.
FINAL_STATUSES = frozenset({400, 413, 422})
#: The answer of routes that accept work.
FUTURE: dict[int | str, dict[str, Any]] = {200: {"model": UntypedAPIFuture}}
_PROTOBUF_BODY = {
    "requestBody": {"content": {PROTOBUF_TYPE: {"schema": {"type": "string", "format": "binary"}}}}
}


async def accept(
    request: Request,
    new: QueuedRequest,
    *,
    insert: Callable[[QueuedRequest], Awaitable[QueuedRequest]] | None = None,
    find_repeat: Callable[[QueuedRequest], Awaitable[QueuedRequest | None]] | None = None,
    token_stream: TokenStream | None = None,
) -> QueuedRequest:
    """
    Admit, store and schedule a request, or find the first one that it repeats.

    Raises a 429 for a request over a limit of its owner or of the server, and a 503 while nothing
    can be stored. A repeat of an accepted request gets neither: the first one may be what fills the
    server.

    `insert` stores what belongs to the request in the same transaction. The tokens of a new sample go
    to `token_stream` as they are sampled.
    """
    context = context_of(request)
    requests, health, scheduler = context.store.requests, context.store.health, context.scheduler
    refusal = await _over_limit(request, context, new)
    new.key_id = caller_of(request).key_id or 0
    first = None
    if refusal is not None or health.problem is not None:
        first = await (find_repeat or requests.find_repeat)(new)
        if first is None and refusal is not None:
            raise Refusal(429, refusal, headers={"Retry-After": str(RETRY_AFTER_S)})
        if first is None:
            health.refuse_new_work()
    if first is None:
        await scheduler.place(new)
        first = await (insert or requests.accept)(new)
    # Nothing may fail between the commit and the scheduler.
    if first.outcome is None:
        # A first request may also wait without being known to the scheduler.
        scheduler.submit(first, token_stream=token_stream if first is new else None)
    elif first is new:
        scheduler.creation_refused(first, first.outcome)
    # The body is stored, and a stream may last for minutes.
    release_memory(request.scope)
    return first


async def _over_limit(request: Request, context: Context, new: QueuedRequest) -> str | None:
    """The limit that a request exceeds; None for a step that later steps of its model wait for."""
    caller = caller_of(request)
    limits = Limits.of(context.settings, caller.limits)
    context.scheduler.training_limits.set(caller.owner, limits.max_training)
    futures = context.futures

    def refusal() -> str | None:
        load = futures.load(caller.owner)
        return over_limit(load, load_of(new), limits) or server_full(
            futures.accepted,
            context.settings.max_open,
            own=load.requests,
            owners=len({*futures.loads, caller.owner}),
        )

    if refusal() is None:
        return None
    await futures.refresh_loads()
    found = refusal()
    if found is None or new.model_id is None:
        return found
    # Otherwise the later steps would wait forever.
    blocks = await context.scheduler.is_blocked_by(new.model_id, new.seq_id or 0)
    return None if blocks else found


def future_response(new: QueuedRequest, first: QueuedRequest) -> Response:
    """The id of an accepted request."""
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


async def count_tokens(request: Request, base_model: str, prompts: Sequence[ModelInput]) -> int:
    """
    The tokens of text, and of images as the engine will place them.

    For limits and usage. The sender's `expected_tokens` is not used. A prompt that the engine will
    refuse may have fewer.
    """
    if not any(isinstance(chunk, ImageChunk) for prompt in prompts for chunk in prompt.chunks):
        return _text_tokens(prompts)
    served = context_of(request).executor.served
    folder = next((model.folder for model in served if model.name == base_model), None)
    # A JPEG file may have its size behind a thousand other parts.
    return await in_decode_slot(request, lambda: _text_tokens(prompts) + _images(folder, prompts))


def _text_tokens(prompts: Sequence[ModelInput]) -> int:
    return sum(
        chunk.length
        for prompt in prompts
        for chunk in prompt.chunks
        if isinstance(chunk, EncodedTextChunk)
    )


def _images(folder: Path | None, prompts: Sequence[ModelInput]) -> int:
    if folder is None:
        return 0
    try:
        rules = PatchRules.read(folder)
        return sum(
            rules.count(chunk.data, chunk.format)
            for prompt in prompts
            for chunk in prompt.chunks
            if isinstance(chunk, ImageChunk)
        )
    except ImageRefused:
        return 0


class StepRoute(MessageRoute):
    """A route of a numbered step, named like its kind: records the reason when a step is refused."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle, kind = super().get_route_handler(), Kind(self.path.rpartition("/")[2])

        async def handle_step(request: Request) -> Response:
            try:
                return await handle(request)
            except (WireError, UserFailure) as refusal:
                await _record_refusal(request, kind, str(refusal))
                raise
            except Refusal as refusal:
                if refusal.status in FINAL_STATUSES:
                    await _record_refusal(request, kind, str(refusal))
                raise

        return handle_step


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


async def accept_step(
    request: Request,
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
    await context_of(request).open_session(request, model.session_id)
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
    first = await accept(request, new)
    if first.kind != kind:
        raise WireError.at(
            ("seq_id",),
            f"step {seq_id} of this model was already used for {first.kind}, so it cannot be "
            f"{kind}. Two clients may be numbering the steps of one model.",
            "seq_id_reused",
        )
    return future_response(new, first)


router = APIRouter(prefix="/api/v1", tags=["training"], route_class=StepRoute, responses=FUTURE)
save_router = APIRouter(
    prefix="/api/v1", tags=["checkpoints"], route_class=StepRoute, responses=FUTURE
)

SaveRequest = SaveWeightsRequest | SaveWeightsForSamplerRequest | SaveWeightsExternalRequest


@router.post(
    "/forward_backward",
    operation_id="forwardBackwardRequest",
    dependencies=[describe_body(ForwardBackwardRequest)],
    summary="A forward pass, and a backward pass unless `forward_only`",
    openapi_extra=_PROTOBUF_BODY,
)
async def forward_backward(request: Request) -> Response:
    return await _accept_pass(request, Kind.FORWARD_BACKWARD)


@router.post(
    "/forward",
    operation_id="forwardRequest",
    dependencies=[describe_body(ForwardRequest)],
    summary="A forward pass, as SDKs before 0.25 send it",
)
async def forward(request: Request) -> Response:
    return await _accept_pass(request, Kind.FORWARD)


async def _accept_pass(request: Request, kind: Kind) -> Response:
    """Accept a pass. A `forward_backward` request with `forward_only` is a forward pass."""
    is_protobuf = PROTOBUF_TYPE in request.headers.get("content-type", "")
    message, forward_only, payload = await read_data(
        request, lambda body: _decode(body, is_protobuf)
    )
    model = await context_of(request).model(request, message.model_id)
    if forward_only:
        kind = Kind.FORWARD
    inputs = [datum.model_input for datum in message.forward_backward_input.data]
    tokens = await count_tokens(request, model.base_model, inputs)
    return await accept_step(request, model, kind, message.seq_id, payload, tokens=tokens)


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


@router.post("/optim_step", dependencies=[describe_body(OptimStepRequest)])
async def optim_step(request: Request) -> Response:
    body = await read_body(request)
    model_id: object
    seq_id: object
    try:
        message = decode_json(OptimStepRequest, body)
        model_id, seq_id, payload = message.model_id, message.seq_id, encode_json(message)
    except UserFailure as failure:
        # A step with an unknown setting is accepted and fails as a user error in its order, so that
        # later steps do not wait for it. Its payload is stored without secrets.
        model_id, seq_id = failure.request.get("model_id"), failure.request.get("seq_id")
        if not isinstance(model_id, str) or not isinstance(seq_id, int):
            raise
        payload = redact(body.decode(errors="replace")).encode()
    model = await context_of(request).model(request, model_id)
    return await accept_step(request, model, Kind.OPTIM_STEP, seq_id, payload)


@save_router.post("/save_weights")
async def save_weights(request: Request, message: SaveWeightsRequest) -> Response:
    return await _accept_save(request, message, Kind.SAVE_WEIGHTS)


@save_router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(
    request: Request, message: SaveWeightsForSamplerRequest
) -> Response:
    return await _accept_save(request, message, Kind.SAVE_FOR_SAMPLER)


@save_router.post("/save_weights_external")
async def save_weights_external(request: Request, message: SaveWeightsExternalRequest) -> Response:
    return await _accept_save(request, message, Kind.SAVE_EXTERNAL)


async def _accept_save(request: Request, message: SaveRequest, kind: Kind) -> Response:
    model = await context_of(request).model(request, message.model_id)
    return await accept_step(request, model, kind, message.seq_id, encode_json(message))
