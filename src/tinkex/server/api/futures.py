"""The routes that return results: long polls, held until the result is ready or for about 30 s."""

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tinkex.server.api.auth import owner_of
from tinkex.server.api.bodies import MessageRoute
from tinkex.server.api.connection_limits import connection_of
from tinkex.server.api.deps import Context, context_of, dialect_of, json_response
from tinkex.server.queued_request import PASSES, Kind, QueuedRequest
from tinkex.server.scheduler.fairness import QueueState
from tinkex.server.store import Completion
from tinkex.wire.codec import JSON_TYPE, PROTOBUF_TYPE, encode_json
from tinkex.wire.content_digest import content_digest
from tinkex.wire.errors import RequestErrorCategory, UserFailure, WireError
from tinkex.wire.futures import (
    CancelFutureRequest,
    CompleteMetadata,
    FutureCompletion,
    FutureFailed,
    FutureFinished,
    FutureRetrieveRequest,
    FuturesRetrieveRequest,
    FuturesRetrieveResponse,
    RequestFailedResponse,
    TryAgainResponse,
)
from tinkex.wire.protobuf import decode_forward_backward_output, decode_sample_response
from tinkex.wire.sdk_versions import SdkVersion, wants_protobuf
from tinkex.wire.training import ForwardBackwardOutput

router = APIRouter(prefix="/api/v1", tags=["futures"], route_class=MessageRoute)

PROTOBUF_RESULTS = PASSES | {Kind.SAMPLE}
# Smaller results are converted to JSON on the event loop: a thread would cost more.
INLINE_ENCODE_BYTES = 64 * 1024
MAX_INT64 = 2**63 - 1
# A client that asks earlier whether its request is paused is answered after this many seconds.
MIN_EARLY_S = 0.1

T = TypeVar("T")

_RESULT: dict[str, Any] = {
    "model": ForwardBackwardOutput | RequestFailedResponse | CompleteMetadata | dict[str, Any],
    "content": {PROTOBUF_TYPE: {"schema": {"type": "string", "format": "binary"}}},
}


@router.post(
    "/retrieve_future",
    operation_id="futureRetrieveRequest",
    summary="Wait for a result, up to about 30 s",
    responses={
        200: _RESULT,
        408: {"description": "Not ready: poll again", "model": TryAgainResponse},
    },
)
async def retrieve_future(request: Request, message: FutureRetrieveRequest) -> Response:
    context = context_of(request)
    within_s = context.settings.long_poll_s
    early_s = _queue_state_after(request, within_s)
    started = time.monotonic()
    finished = await context.futures.wait(
        message.request_id,
        owner=owner_of(request),
        within_s=early_s,
        wake_early=on_disconnect_of(request),
    )
    waited_s = time.monotonic() - started
    # Less if the client has disconnected, or the server is stopping.
    if finished.outcome is None and early_s < within_s and waited_s > 0.9 * early_s:
        if queue_state_of(context, message.request_id).state != "active":
            return _try_again(context, message.request_id)
        finished = await context.futures.wait(
            message.request_id,
            owner=owner_of(request),
            within_s=within_s - waited_s,
            wake_early=on_disconnect_of(request),
        )
    if (outcome := finished.outcome) is None:
        return _try_again(context, message.request_id)
    if outcome.error is not None:
        category = RequestErrorCategory.parse(outcome.category)
        context.store.requests.mark_fetched(message.request_id)
        return json_response(RequestFailedResponse(error=outcome.error, category=category))
    size = len(outcome.result)
    if message.allow_metadata_only and size > context.settings.metadata_only_bytes:
        return json_response(CompleteMetadata(response_payload_size=size))
    response = await _result(request, context, finished, outcome.result)
    context.store.requests.mark_fetched(message.request_id)
    return response


@router.post(
    "/retrieve_futures",
    operation_id="futuresRetrieveRequest",
    summary="Wait for results of a sampling session",
    responses={200: {"model": FuturesRetrieveResponse}},
)
async def retrieve_futures(request: Request, message: FuturesRetrieveRequest) -> Response:
    """The samples of a sampling client that finished since its last poll; waits for one."""
    context = context_of(request)
    target = message.target
    # Official clients stop polling after any status other than 200. So only a request
    # that can never succeed gets an error status.
    await context.sampler(request, target.sampling_session_id)
    context.store.requests.mark_all_fetched(message.retrieved_request_ids, owner=owner_of(request))
    for name, number in (
        ("prev_cursor", message.prev_cursor),
        ("target", target.cloned_sampler_id),
    ):
        if not 0 <= number <= MAX_INT64:
            raise WireError.at((name,), f"{number} is not between 0 and {MAX_INT64}.")
    within_s = context.settings.long_poll_s
    if message.timeout is not None:
        within_s = min(within_s, message.timeout) if message.timeout > 0 else 0.0
    events = await context.futures.completion_log.after(
        target.sampling_session_id,
        target.cloned_sampler_id,
        cursor=message.prev_cursor,
        within_s=within_s,
        wake_early=on_disconnect_of(request),
    )
    cursor = events[-1].position if events else message.prev_cursor
    return json_response(
        FuturesRetrieveResponse(completions=[_event(event) for event in events], cursor=cursor)
    )


def on_disconnect_of(request: Request) -> Callable[[Callable[[], None]], None]:
    """Registers a function that ends a poll when its client disconnects (see `connection_limits`)."""
    connection = connection_of(request.scope)

    def register(end_poll: Callable[[], None]) -> None:
        if connection is None:
            return
        connection.on_disconnect = end_poll
        if connection.disconnected:  # while the poll read the database
            end_poll()

    return register


def _event(event: Completion) -> FutureCompletion:
    if event.result_bytes is None:
        return FutureFailed(request_id=event.request_id)
    return FutureFinished(
        request_id=event.request_id, response_payload_uncompressed_size=event.result_bytes
    )


def _queue_state_after(request: Request, within_s: float) -> float:
    """After how many seconds the client wants to know that its request is paused."""
    text = request.headers.get("x-tinkex-queue-state-after")
    if text is None:
        return within_s
    try:
        seconds = float(text)
    except ValueError:
        return within_s
    # Also without a number (NaN).
    return max(seconds, MIN_EARLY_S) if seconds < within_s else within_s


def queue_state_of(context: Context, request_id: str) -> QueueState:
    """What an unfinished request waits for."""
    if (problem := context.store.health.problem) is not None:
        # The request may be done, with a result that cannot be stored now.
        return QueueState(state="paused_capacity", reason=problem.text)
    return context.scheduler.queue_state(request_id)


def _try_again(context: Context, request_id: str) -> Response:
    waiting = queue_state_of(context, request_id)
    return json_response(
        TryAgainResponse(
            request_id=request_id,
            queue_state=waiting.state,
            queue_state_reason=waiting.reason,
        ),
        # All SDK versions silently poll again after a 408.
        status=408,
    )


async def _result(
    request: Request, context: Context, finished: QueuedRequest, result: bytes
) -> Response:
    if finished.kind not in PROTOBUF_RESULTS:
        return Response(result, media_type=JSON_TYPE)
    session = None
    if finished.session_id is not None:
        session = await context.session(request, finished.session_id)
    dialect = dialect_of(request, session)
    is_sample = finished.kind is Kind.SAMPLE
    if wants_protobuf(request.headers.get("accept")) and (
        is_sample or await _reads_protobuf(result, dialect)
    ):
        digest = {"Content-Digest": content_digest(result)}
        return Response(result, media_type=PROTOBUF_TYPE, headers=digest)
    try:
        body = await in_thread_if_large(result, lambda: _as_json(result, is_sample, dialect))
    except UserFailure as failure:
        return json_response(
            RequestFailedResponse(error=str(failure), category=RequestErrorCategory.User)
        )
    return Response(body, media_type=JSON_TYPE)


async def in_thread_if_large(result: bytes, function: Callable[[], T]) -> T:
    """Call `function`; in a thread if the result is large, to keep the event loop free."""
    if len(result) <= INLINE_ENCODE_BYTES:
        return function()
    return await asyncio.to_thread(function)


async def _reads_protobuf(result: bytes, dialect: SdkVersion) -> bool:
    """Whether this SDK version reads the result of a pass as protobuf; some misread some."""
    if dialect.reads_protobuf_only:
        return True
    return await in_thread_if_large(
        result, lambda: dialect.reads_as_protobuf(decode_forward_backward_output(result))
    )


def _as_json(result: bytes, is_sample: bool, dialect: SdkVersion) -> bytes:
    """The result as JSON, for clients that do not read protobuf."""
    if is_sample:
        return encode_json(dialect.sample_json(decode_sample_response(result)))
    return encode_json(dialect.forward_backward_json(decode_forward_backward_output(result)))


@router.post("/cancel_future")
async def cancel_future(request: Request, message: CancelFutureRequest) -> Response:
    """Cancels a sample of the caller. Other requests, and finished ones, are not affected."""
    context_of(request).scheduler.cancel(message.request_id, owner=owner_of(request))
    return json_response({})
