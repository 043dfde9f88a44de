"""
The route that samples and returns the tokens as a stream of server-sent events.

    accepted   {"request_id", "sample_sequence_ids"}: the sample is stored from here on
    token      {"sequence", "tokens", "logprobs"}: new tokens
    done       the complete response as JSON, with "sample_sequence_ids"
    error      {"error", "category"}: instead of `done`

A broken stream loses nothing: the result can be fetched by its request id, and a repeated request
reads the same sample. A stream without `done` or `error` at its end means that the server stopped;
the sample continues after the next start.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from tinkex.server.api.auth import owner_of
from tinkex.server.api.bodies import MessageRoute
from tinkex.server.api.connection_limits import LimitedProtocol, connection_of
from tinkex.server.api.deps import Context, context_of, describe_body, dialect_of
from tinkex.server.api.futures import in_thread_if_large
from tinkex.server.api.sampling import read_sample
from tinkex.server.api.submit import accept, sequence_ids
from tinkex.server.queued_request import Outcome, QueuedRequest
from tinkex.server.scheduler.result_waiters import UnknownRequest
from tinkex.server.scheduler.results import internal_error
from tinkex.server.scheduler.sample_worker import TokenStream
from tinkex.server.store.requests import ResultGone
from tinkex.wire.codec import encode_json
from tinkex.wire.errors import UserFailure
from tinkex.wire.partial_sample import PartialSample, PartialSampleReader, SampledTokens
from tinkex.wire.protobuf import decode_sample_response
from tinkex.wire.sampling import SampleRequest, SampleResponse
from tinkex.wire.sdk_versions import SdkVersion

router = APIRouter(prefix="/api/v1", tags=["sampling"], route_class=MessageRoute)

EVENT_STREAM = "text/event-stream"
_EVENTS = {
    EVENT_STREAM: {
        "schema": {
            "type": "string",
            "description": "Events `accepted` (`request_id`, `sample_sequence_ids`), `token` "
            "(`sequence`, `tokens`, `logprobs`) as they are sampled, and `done` (the response as JSON) or "
            "`error` (`error`, `category`).",
        }
    }
}
# Proxies must neither cache nor buffer the events.
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
# Sent while there are no tokens, so that proxies and clients do not close the connection as idle.
KEEP_ALIVE_S = 10.0
KEEP_ALIVE = b": keep-alive\n\n"
STOPPING = b": the server is stopping; the result can be fetched by its request id\n\n"
# The last event of a long sample may have megabytes. It is sent in slices, so that a slow reader
# keeps only one slice in memory.
SLICE_BYTES = 64 * 1024


@router.post(
    "/stream_sample",
    operation_id="streamSample",
    dependencies=[describe_body(SampleRequest)],
    summary="Sample sequences, as a stream",
    response_class=StreamingResponse,
    responses={200: {"content": _EVENTS}},
)
async def stream_sample(request: Request) -> Response:
    context = context_of(request)
    new = await read_sample(request)
    first = await accept(request, new, token_stream=TokenStream())
    session = None
    if new.session_id is not None:
        session = await context.session(request, new.session_id)
    sample = _SampleEvents(
        context, first, owner=owner_of(request), dialect=dialect_of(request, session)
    )
    return EventStream(sample.events())


class EventStream(StreamingResponse):
    """Closes its event generator when the client disconnects, so that the sample is abandoned."""

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        self._events = events
        super().__init__(events, media_type=EVENT_STREAM, headers=STREAM_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._events):
            if (connection := connection_of(scope)) is None:
                await super().__call__(scope, receive, send)
            else:
                await self._stream_until_disconnected(connection, send)

    async def _stream_until_disconnected(self, connection: LimitedProtocol, send: Send) -> None:
        """Without a task of its own that waits for the disconnect, as Starlette has it."""
        task, left = asyncio.current_task(), False
        assert task is not None

        def leave() -> None:
            nonlocal left
            left = True
            task.cancel()

        connection.on_disconnect = leave
        if connection.disconnected:
            # A generator abandons its sample when it is closed, but only if it has begun.
            asyncio.get_running_loop().call_soon(leave)
        try:
            await self.stream_response(send)
        except asyncio.CancelledError:
            if not left or task.uncancel():
                raise  # somebody else cancels this task
        finally:
            connection.on_disconnect = None

    async def stream_response(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        async for piece in self._events:
            for at in range(0, len(piece), SLICE_BYTES):
                body = piece[at : at + SLICE_BYTES]
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class SampleReader:
    """Follows one sample for one client: its tokens as they are sampled, and its outcome."""

    def __init__(self, context: Context, first: QueuedRequest, *, owner: str) -> None:
        self._context = context
        self._request_id = first.request_id
        self._owner = owner
        # None if the sample is finished or was started by `asample`: then all tokens come at the end.
        self._stream = context.scheduler.token_stream(first.request_id)
        self._partial = PartialSample() if self._stream is None else self._stream.partial
        self._reader = PartialSampleReader(self._partial)
        #: None until the sample is finished, and if the server stops before that.
        self.outcome: Outcome | None = None

    @property
    def is_streamed(self) -> bool:
        """Whether this sample was started as a stream; another one may have other clients."""
        return self._stream is not None

    async def new_tokens(self) -> AsyncGenerator[list[SampledTokens]]:
        """
        New tokens until the sample is finished or the server stops.

        A list is empty after some time without tokens, for a sign of life to the client.
        """
        futures = self._context.futures
        keep_alive_s = min(KEEP_ALIVE_S, self._context.settings.long_poll_s or KEEP_ALIVE_S)
        at_next_token = None if self._stream is None else self._stream.at_next_token
        while True:
            while news := self._reader.read_new():
                yield news
            # One future for both, the next token and the result: there are thousands of streams.
            found = await futures.wait(
                self._request_id,
                owner=self._owner,
                within_s=keep_alive_s,
                wake_early=at_next_token,
            )
            self.outcome = found.outcome
            if self.outcome is not None or futures.closing:
                return
            yield self._reader.read_new()

    def rest(self, response: SampleResponse) -> list[SampledTokens]:
        """The tokens of the complete response that were not returned yet."""
        for index, sequence in enumerate(response.sequences):
            self._partial.add(
                index,
                sequence.tokens,
                sequence.logprobs,
                start=0,
                tops=[row or [] for row in sequence.topk_logprobs or ()],
            )
        return self._reader.read_new()


class _SampleEvents:
    """The events of one sample for one client."""

    def __init__(
        self, context: Context, first: QueuedRequest, *, owner: str, dialect: SdkVersion
    ) -> None:
        self._context = context
        self._request_id = first.request_id
        self._ids = sequence_ids(first)
        self._owner = owner
        self._dialect = dialect
        self._sample = SampleReader(context, first, owner=owner)

    async def events(self) -> AsyncGenerator[bytes]:
        ended = False
        try:
            accepted = {"request_id": self._request_id, "sample_sequence_ids": self._ids}
            yield event("accepted", accepted)
            async with contextlib.aclosing(self._sample.new_tokens()) as pieces:
                async for piece in pieces:
                    for news in piece:
                        yield token_event(news)
                    if not piece:
                        yield KEEP_ALIVE
            if self._sample.outcome is None:
                ended = True
                yield STOPPING
                return
            for last in await self._ending(self._sample.outcome):
                yield last
            ended = True
            self._context.store.requests.mark_fetched(self._request_id)
        except (UnknownRequest, ResultGone):
            ended = True
            yield error_event("the result has expired: request a new sample.", "user")
        except Exception as failure:  # noqa: BLE001  too late for an HTTP status
            ended = True
            ending = internal_error(failure)
            yield error_event(ending.error or "", ending.category)
        finally:
            # A sample that `asample` started may have other clients that wait for it.
            if not ended and self._sample.is_streamed:
                self._context.scheduler.cancel_unless_polled(
                    self._request_id,
                    owner=self._owner,
                    after_s=self._context.settings.stream_grace_s,
                )

    async def _ending(self, outcome: Outcome) -> list[bytes]:
        """Events for the remaining tokens and the complete response."""
        if outcome.error is not None:
            return [error_event(outcome.error, outcome.category)]
        try:
            return await in_thread_if_large(outcome.result, lambda: self._answer(outcome.result))
        except UserFailure as failure:  # numbers that JSON cannot represent
            return [error_event(str(failure), "user")]

    def _answer(self, result: bytes) -> list[bytes]:
        response = decode_sample_response(result, self._ids)
        done = event(
            "done", {**complete_json(response, self._dialect), "sample_sequence_ids": self._ids}
        )
        return [*(token_event(news) for news in self._sample.rest(response)), done]


def complete_json(response: SampleResponse, dialect: SdkVersion) -> dict[str, Any]:
    """The JSON response of a poll, with the top-k logprobs added."""
    answer = dialect.sample_json(response)
    for encoded, sequence in zip(answer["sequences"], response.sequences, strict=True):
        if sequence.topk_logprobs is not None:
            encoded["topk_logprobs"] = sequence.topk_logprobs
    return answer


def token_event(news: SampledTokens) -> bytes:
    logprobs = [number if math.isfinite(number) else None for number in news.logprobs]
    return event("token", {"sequence": news.sequence, "tokens": news.tokens, "logprobs": logprobs})


def error_event(text: str, category: str | None) -> bytes:
    return event("error", {"error": text, "category": category or "unknown"})


def event(name: str, data: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), encode_json(data))
