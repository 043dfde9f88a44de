"""Asking for a promised result: a poll is held until the result is there, or about 30 s."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tinkex.server.api.auth import owner_of
from tinkex.server.api.deps import Context, answer, context_of, describe, dialect_of, read_json
from tinkex.server.api.http_limits import GONE
from tinkex.server.scheduler.fairness import Waiting
from tinkex.server.scheduler.results import Settled
from tinkex.server.scheduler.step_queue import PASSES, Kind
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
from tinkex.wire.sdk_versions import Dialect, wants_protobuf

router = APIRouter(prefix="/api/v1", tags=["futures"])

PROTOBUF_RESULTS = PASSES | {Kind.SAMPLE}
# Smaller results are put into JSON where they are: moving to a thread would cost more.
INLINE_ENCODE_BYTES = 64 * 1024
LARGEST_NUMBER = 2**63 - 1

T = TypeVar("T")


async def retrieve_future(request: Request) -> Response:
    asked = await read_json(request, FutureRetrieveRequest)
    context = context_of(request)
    settled = await context.futures.wait(
        asked.request_id,
        owner=owner_of(request),
        within_s=context.settings.long_poll_s,
        leaving=_leaving(request),
    )
    if settled is None:
        return _try_again(context, asked.request_id)
    if settled.error is not None:
        category = RequestErrorCategory.parse(settled.category)
        context.store.requests.mark_fetched(asked.request_id)
        return answer(RequestFailedResponse(error=settled.error, category=category))
    size = len(settled.result)
    if asked.allow_metadata_only and size > context.settings.metadata_only_bytes:
        return answer(CompleteMetadata(response_payload_size=size))
    response = await _result(request, context, settled)
    context.store.requests.mark_fetched(asked.request_id)
    return response


async def retrieve_futures(request: Request) -> Response:
    """Which samples of one client have finished since its last poll; held until one has."""
    asked = await read_json(request, FuturesRetrieveRequest)
    context = context_of(request)
    target = asked.target
    # Anything but a 200 here ends the client's polling for good: only a wrong target gets it.
    await context.sampler(request, target.sampling_session_id)
    context.store.requests.mark_all_fetched(asked.retrieved_request_ids, owner=owner_of(request))
    for name, number in (("prev_cursor", asked.prev_cursor), ("target", target.cloned_sampler_id)):
        if not 0 <= number <= LARGEST_NUMBER:
            raise WireError.at((name,), f"{number} is not a number of 64 bits from 0.")
    within_s = context.settings.long_poll_s
    if asked.timeout is not None:
        within_s = min(within_s, asked.timeout) if asked.timeout > 0 else 0.0
    events = await context.futures.completions.after(
        target.sampling_session_id,
        target.cloned_sampler_id,
        cursor=asked.prev_cursor,
        within_s=within_s,
        leaving=_leaving(request),
    )
    cursor = events[-1].position if events else asked.prev_cursor
    return answer(
        FuturesRetrieveResponse(completions=[_event(event) for event in events], cursor=cursor)
    )


def _leaving(request: Request) -> Callable[[Callable[[], None]], None]:
    """A poll whose client has gone is not held: its connection ends it (`patience`)."""
    scope = request.scope

    def leaving(leave: Callable[[], None]) -> None:
        scope[GONE] = leave

    return leaving


def _event(event: Completion) -> FutureCompletion:
    if event.result_bytes is None:
        return FutureFailed(request_id=event.request_id)
    return FutureFinished(
        request_id=event.request_id, response_payload_uncompressed_size=event.result_bytes
    )


def _try_again(context: Context, request_id: str) -> Response:
    base_model = context.futures.base_model(request_id)
    standing = context.dispatcher.standing(request_id, base_model or "")
    if (problem := context.store.health.problem) is not None:
        # Its result may be there already, and wait for the disk.
        standing = Waiting(state="paused_capacity", reason=problem.text)
    return answer(
        TryAgainResponse(
            request_id=request_id,
            queue_state=standing.state,
            queue_state_reason=standing.reason,
        ),
        # A 408 is what every version polls again after without a word to its user.
        status=408,
    )


async def _result(request: Request, context: Context, settled: Settled) -> Response:
    if settled.kind not in PROTOBUF_RESULTS:
        return Response(settled.result, media_type=JSON_TYPE)
    session = None
    if settled.session_id is not None:
        session = await context.session(request, settled.session_id)
    dialect = dialect_of(request, session)
    if wants_protobuf(request.headers.get("accept")) and await _reads_protobuf(settled, dialect):
        digest = {"Content-Digest": content_digest(settled.result)}
        return Response(settled.result, media_type=PROTOBUF_TYPE, headers=digest)
    try:
        body = await _off_the_loop(settled, lambda: _as_json(settled, dialect))
    except UserFailure as failure:
        return answer(RequestFailedResponse(error=str(failure), category=RequestErrorCategory.User))
    return Response(body, media_type=JSON_TYPE)


async def _off_the_loop(settled: Settled, act: Callable[[], T]) -> T:
    """Work on a result: in a thread, if the result is large."""
    if len(settled.result) <= INLINE_ENCODE_BYTES:
        return act()
    return await asyncio.to_thread(act)


async def _reads_protobuf(settled: Settled, dialect: Dialect) -> bool:
    """Some versions ask for protobuf and misread some of it; those read JSON as well."""
    if settled.kind is Kind.SAMPLE or dialect.reads_protobuf_only:
        return True
    return await _off_the_loop(
        settled,
        lambda: dialect.reads_as_protobuf(decode_forward_backward_output(settled.result)),
    )


def _as_json(settled: Settled, dialect: Dialect) -> bytes:
    """For clients that read no protobuf."""
    if settled.kind is Kind.SAMPLE:
        return encode_json(dialect.sample_json(decode_sample_response(settled.result)))
    return encode_json(
        dialect.forward_backward_json(decode_forward_backward_output(settled.result))
    )


@router.post("/cancel_future", openapi_extra=dict(describe(CancelFutureRequest)))
async def cancel_future(request: Request) -> Response:
    """Gives up a sample. Anything else, finished, unknown or somebody else's, stays as it is."""
    asked = await read_json(request, CancelFutureRequest)
    context_of(request).dispatcher.cancel(asked.request_id, owner=owner_of(request))
    return answer({})
