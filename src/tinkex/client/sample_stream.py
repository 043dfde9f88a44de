"""
Samples that are read while they are drawn.

On the background loop `open_stream` sends the request and `OpenStream` tells what comes; the user
holds a `SampleStream` and may read it from any thread or loop.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Any, Self

from tinkex.client.errors import (
    APIConnectionError,
    APIResponseValidationError,
    APIStatusError,
    RequestFailedError,
)
from tinkex.client.futures import Promise, refuse_to_block
from tinkex.client.http.api_calls import Calls
from tinkex.client.http.sse import Consumed, EventStream, ServerSentEvent
from tinkex.client.http.transport import Kind, Request, Response, Streamed
from tinkex.wire.codec import decode_json
from tinkex.wire.errors import RequestErrorCategory
from tinkex.wire.futures import UntypedAPIFuture
from tinkex.wire.partial_sample import PartialSample, PartialSampleReader, SampledTokens
from tinkex.wire.sampling import SampleRequest, SampleResponse

log = logging.getLogger("tinkex.streaming")

EVENT_STREAM = "text/event-stream"
#: Servers show a sign of life every ten seconds; after this long without one nobody is there.
SILENCE_S = 45.0


class Told:
    """What is known of one sample while it is drawn. Written on the loop, read from anywhere."""

    def __init__(self) -> None:
        # A stream may be collected, and so ended, in the middle of anything.
        self._lock = threading.RLock()
        self._growing = PartialSample()
        self._reader = PartialSampleReader(self._growing)
        self._changed: Promise[None] = Promise()
        self._ended = False

    @property
    def begun(self) -> bool:
        """Whether there are tokens: then the sample can not be drawn anew."""
        return bool(self._growing.sequences)

    def take(self, sequence: int, tokens: list[int], logprobs: list[float]) -> None:
        with self._lock:
            known = self._growing.count(sequence)
            if self._growing.add(sequence, tokens, logprobs, start=known):
                self._ring()

    def complete(self, answer: SampleResponse) -> None:
        """The whole answer is here; what of it was told before is not told again."""
        with self._lock:
            for index, sequence in enumerate(answer.sequences):
                self._growing.add(index, sequence.tokens, sequence.logprobs, start=0)
            self._ring()

    def end(self) -> None:
        with self._lock:
            self._ended = True
            self._ring()

    def _ring(self) -> None:
        changed, self._changed = self._changed, Promise()
        changed.finish(None)

    def news(self) -> list[SampledTokens] | Promise[None]:
        """What was not read yet, or when to look again; nothing once everything was read."""
        with self._lock:
            news = self._reader.read_new()
            return news if news or self._ended else self._changed


class SampleStream:
    """
    A sample that is read while it is drawn.

        with sampling.sample_stream(prompt, 1, params) as stream:
            for event in stream:                    # or: async for event in stream
                print(event.sequence, event.tokens, event.logprobs)
        answer = stream.response()                  # or: await stream.response_async()

    The events come once; `response` has the whole answer, whether or not they were read. A stream
    that is closed or forgotten before its end gives up the sample.
    """

    def __init__(self, promise: Promise[SampleResponse], told: Told) -> None:
        self._promise = promise
        self._told = told
        self._ready: deque[SampledTokens] = deque()
        self._begun = False
        weakref.finalize(self, promise.cancel).atexit = False

    def response(self, timeout: float | None = None) -> SampleResponse:
        """Block until the answer is whole, at most `timeout` seconds; what `sample` answers."""
        return self._promise.result(timeout)

    async def response_async(self, timeout: float | None = None) -> SampleResponse:  # noqa: ASYNC109 (as APIFuture)
        """The same, for coroutines."""
        return await self._promise.result_async(timeout)

    def close(self) -> None:
        """Give up the sample, unless it is whole."""
        self._promise.cancel()

    # -- reading ---------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[SampledTokens]:
        self._begin()
        return self

    def __next__(self) -> SampledTokens:
        while (news := self._look()) is not None:
            if isinstance(news, SampledTokens):
                return news
            refuse_to_block("Reading a SampleStream", "anext(stream)")
            news.block()
        raise StopIteration

    def __aiter__(self) -> AsyncIterator[SampledTokens]:
        self._begin()
        return self

    async def __anext__(self) -> SampledTokens:
        while (news := self._look()) is not None:
            if isinstance(news, SampledTokens):
                return news
            await news.result_async()
        raise StopAsyncIteration

    def _begin(self) -> None:
        if self._begun:
            raise Consumed(
                "This stream has been read already, and its events come only once. The whole "
                "answer is in response(); next(stream) goes on where a reader stopped."
            )
        self._begun = True

    def _look(self) -> SampledTokens | Promise[None] | None:
        """The next event, when to look again, or None at the end. Raises what went wrong."""
        if not self._ready:
            news = self._told.news()
            if isinstance(news, Promise):
                return news
            self._ready.extend(news)
        if self._ready:
            return self._ready.popleft()
        if not self._promise.cancelled() and (error := self._promise.exception(0)) is not None:
            raise error
        return None

    # -- with ------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


# -- on the loop -------------------------------------------------------------------------------------


class OpenStream:
    """A sample that the server has accepted, and whose events are coming."""

    def __init__(
        self,
        calls: Calls,
        sent: Request,
        streamed: Streamed,
        events: AsyncIterator[ServerSentEvent],
        promised: UntypedAPIFuture,
    ) -> None:
        #: What `asample` would have answered.
        self.promised = promised
        self._calls = calls
        self._sent = sent
        self._streamed = streamed
        self._events = events

    async def read(self, told: Told) -> SampleResponse | None:
        """The answer; None if the stream broke off before. Raises if the sample failed."""
        try:
            with self._calls.network_errors(self._sent):
                async for event in self._events:
                    match event.event:
                        case "token":
                            told.take(*_tokens(event, self._streamed))
                        case "done":
                            return _answer(event, self._streamed, self.promised)
                        case "error":
                            raise _failure(event, self.promised)
        except APIConnectionError as error:
            log.info("the stream of %s broke off: %s", self.promised.request_id, error)
        finally:
            self._streamed.close()
        return None


async def open_stream(calls: Calls, body: bytes, *, busy_s: float, about: str) -> OpenStream | None:
    """Send a sample and hear that it is accepted; None where the service has no streams."""
    sent = calls.request(
        "POST",
        "stream_sample",
        body,
        # Held open by the server like a poll, on a connection of its own.
        kind=Kind.RETRIEVE,
        headers={"Accept": EVENT_STREAM, "X-Tinker-Sampling-Backpressure": "1"},
        deadline_s=SILENCE_S,
    )

    async def once() -> OpenStream:
        streamed = await calls.open(sent, about=about)
        try:
            events = aiter(EventStream(streamed.chunks()))
            with calls.network_errors(sent, about=about):
                first = await anext(events, None)
            if first is None:
                raise APIConnectionError(
                    sent.bare(), f"Connection error. {about}: the stream ended before it began."
                )
            promised = _accepted(first, streamed)
        except BaseException:
            streamed.close()
            raise
        return OpenStream(calls, sent, streamed, events, promised)

    try:
        # Until it is accepted a lost request is sent again: its number makes it the same one.
        return await calls.insisting(once, path="stream_sample", kind=Kind.SAMPLE, busy_s=busy_s)
    except APIStatusError as error:
        if error.status_code not in (404, 405):
            raise
        log.info("this service answers samples whole: it has no stream_sample")
        return None


def answers_all(request: SampleRequest) -> bool:
    """Whether the last event holds everything asked for; JSON has no place for some of it."""
    return request.target_prompt_logprobs is None and not request.prompt_alt_tokens_k


def _accepted(event: ServerSentEvent, streamed: Streamed) -> UntypedAPIFuture:
    try:
        if event.event != "accepted":
            raise ValueError(f"the first event is {event.event!r}")
        return decode_json(UntypedAPIFuture, event.data.encode())
    except ValueError as error:
        raise _unreadable(event, streamed, error) from error


def _tokens(event: ServerSentEvent, streamed: Streamed) -> tuple[int, list[int], list[float]]:
    try:
        data = event.json()
        logprobs = [float("nan") if number is None else number for number in data["logprobs"]]
        if len(logprobs) != len(data["tokens"]):
            raise ValueError("one logprob for each token is needed")
        return data["sequence"], data["tokens"], logprobs
    except (ValueError, KeyError, TypeError) as error:
        raise _unreadable(event, streamed, error) from error


def _answer(
    event: ServerSentEvent, streamed: Streamed, promised: UntypedAPIFuture
) -> SampleResponse:
    try:
        data = event.json()
        ids = promised.sample_sequence_ids or []
        for sequence, name in zip(data["sequences"], ids, strict=True):
            sequence["sequence_id"] = name
        return SampleResponse.model_validate(data)
    except (ValueError, KeyError, TypeError) as error:
        raise _unreadable(event, streamed, error) from error


def _failure(event: ServerSentEvent, promised: UntypedAPIFuture) -> RequestFailedError:
    data: Any = event.json()
    return RequestFailedError(
        data["error"], promised.request_id, RequestErrorCategory.parse(data.get("category"))
    )


def _unreadable(
    event: ServerSentEvent, streamed: Streamed, error: Exception
) -> APIResponseValidationError:
    seen = Response(
        status_code=streamed.status_code,
        headers=streamed.headers,
        content=event.data[:2000].encode(),
        request=streamed.request,
    )
    return APIResponseValidationError(
        seen,
        seen.text,
        f"event {event.event!r} of a streamed sample cannot be read: {error}. The server and this "
        "client disagree about the protocol; report this with the versions of both.",
    )
