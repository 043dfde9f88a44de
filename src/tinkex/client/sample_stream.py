"""
Streamed samples: tokens are read while they are generated.

On the background loop, `open_stream` sends the request and `OpenStream` reads its events into a
`PartialOutput`. The user reads the `SampleStream` from any thread or loop.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Self

from tinkex import display
from tinkex.client.errors import (
    APIConnectionError,
    APIResponseValidationError,
    APIStatusError,
    RequestFailedError,
)
from tinkex.client.futures import Promise, refuse_to_block
from tinkex.client.http.sse import Consumed, EventStream, ServerSentEvent
from tinkex.client.http.transport import Kind, Request, Response, StreamedResponse
from tinkex.client.http.typed_requests import Calls
from tinkex.client.observe.waiting import Limit
from tinkex.wire.codec import decode_json
from tinkex.wire.errors import RequestErrorCategory
from tinkex.wire.futures import UntypedAPIFuture
from tinkex.wire.partial_sample import PartialSample, PartialSampleReader, SampledTokens
from tinkex.wire.sampling import SampleRequest, SampleResponse

log = logging.getLogger("tinkex.streaming")

EVENT_STREAM = "text/event-stream"
#: Servers send a keep-alive every ten seconds; after this long without one the stream has failed.
SILENCE_S = 45.0


class PartialOutput:
    """The tokens of one sample so far. Written on the loop, read from any thread."""

    def __init__(self) -> None:
        # Reentrant: garbage collection may close a stream while this thread holds the lock.
        self._lock = threading.RLock()
        self._partial = PartialSample()
        self._reader = PartialSampleReader(self._partial)
        self._changed: Promise[None] = Promise()
        self._ended = False

    @property
    def has_tokens(self) -> bool:
        """Whether tokens have arrived: then the sample cannot be retried."""
        return bool(self._partial.sequences)

    def counts(self) -> list[int]:
        """The number of tokens of each sequence so far."""
        with self._lock:
            return [self._partial.count(sequence) for sequence in sorted(self._partial.sequences)]

    def take(self, sequence: int, tokens: list[int], logprobs: list[float]) -> None:
        with self._lock:
            known = self._partial.count(sequence)
            if self._partial.add(sequence, tokens, logprobs, start=known):
                self._notify()

    def complete(self, answer: SampleResponse) -> None:
        """Add the complete response; tokens that were streamed before are not repeated."""
        with self._lock:
            for index, sequence in enumerate(answer.sequences):
                self._partial.add(index, sequence.tokens, sequence.logprobs, start=0)
            self._notify()

    def end(self) -> None:
        with self._lock:
            self._ended = True
            self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, Promise()
        changed.finish(None)

    def updates(self) -> list[SampledTokens] | Promise[None]:
        """Unread tokens, or a future that is set at the next change; empty at the end."""
        with self._lock:
            update = self._reader.read_new()
            return update if update or self._ended else self._changed


class SampleStream:
    """
    A sample whose tokens are read while they are generated.

        with sampling.sample_stream(prompt, 1, params) as stream:
            for event in stream:                    # or: async for event in stream
                print(event.sequence, event.tokens, event.logprobs)
        answer = stream.response()                  # or: await stream.response_async()

    The events come once; `response` returns the complete result, whether or not they were read. A
    stream that is closed or garbage-collected before its end cancels the sample.
    """

    def __init__(self, promise: Promise[SampleResponse], partial: PartialOutput) -> None:
        self._promise = promise
        self._partial_output = partial
        self._ready: deque[SampledTokens] = deque()
        self._started = False
        weakref.finalize(self, promise.cancel).atexit = False

    def __repr__(self) -> str:
        promise = self._promise
        state = "cancelled" if promise.cancelled() else "open"
        if promise.done() and not promise.cancelled():
            state = "done" if promise.exception(0) is None else "failed"
        counts = self._partial_output.counts()
        return display.call("SampleStream", [("state", state), ("tokens_per_sequence", counts)])

    def response(self, timeout: float | None = None) -> SampleResponse:
        """
        Block until the sample is complete.

        Args:
            timeout: Most seconds to wait. None: no limit.

        Returns:
            The result of `sample`, whether or not the events were read.

        Raises:
            TimeoutError: The sample is not complete yet.

        Example:
            with sampling.sample_stream(prompt, 1, tinkex.SamplingParams(max_tokens=4)) as stream:
                answer = stream.response()
        """
        return self._promise.result(timeout)

    async def response_async(self, timeout: float | None = None) -> SampleResponse:  # noqa: ASYNC109 (as APIFuture)
        """
        `response` for coroutines.

        Args:
            timeout: Most seconds to wait. None: no limit.

        Returns:
            The result of `sample`, whether or not the events were read.

        Raises:
            TimeoutError: The sample is not complete yet.

        Example:
            async def answer(stream):
                return await stream.response_async(timeout=60)
        """
        return await self._promise.result_async(timeout)

    def close(self) -> None:
        """
        Cancel the sample, unless it is complete.

        Example:
            stream = sampling.sample_stream(prompt, 1, tinkex.SamplingParams(max_tokens=4))
            stream.close()
        """
        self._promise.cancel()

    # -- reading ---------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[SampledTokens]:
        self._begin()
        return self

    def __next__(self) -> SampledTokens:
        while (update := self._next_update()) is not None:
            if isinstance(update, SampledTokens):
                return update
            refuse_to_block("Reading a SampleStream", "anext(stream)")
            update.block()
        raise StopIteration

    def __aiter__(self) -> AsyncIterator[SampledTokens]:
        self._begin()
        return self

    async def __anext__(self) -> SampledTokens:
        while (update := self._next_update()) is not None:
            if isinstance(update, SampledTokens):
                return update
            await update.result_async()
        raise StopAsyncIteration

    def _begin(self) -> None:
        if self._started:
            raise Consumed(
                "This stream has already been read, and its events come only once. The complete "
                "result is in response(); next(stream) continues where a reader stopped."
            )
        self._started = True

    def _next_update(self) -> SampledTokens | Promise[None] | None:
        """The next event, a future of it, or None at the end. Raises the error of the sample."""
        if not self._ready:
            update = self._partial_output.updates()
            if isinstance(update, Promise):
                return update
            self._ready.extend(update)
        if self._ready:
            return self._ready.popleft()
        if not self._promise.cancelled() and (error := self._promise.exception(0)) is not None:
            raise error
        return None

    # -- with ------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


# -- on the loop ---------------------------------------------------------------------------------


class OpenStream:
    """A sample that the server has accepted, and whose events are arriving."""

    def __init__(
        self,
        calls: Calls,
        sent: Request,
        streamed: StreamedResponse,
        events: AsyncIterator[ServerSentEvent],
        promised: UntypedAPIFuture,
    ) -> None:
        #: What `asample` would have returned.
        self.promised = promised
        self._calls = calls
        self._sent = sent
        self._streamed = streamed
        self._events = events

    async def read(self, partial: PartialOutput) -> SampleResponse | None:
        """The response; None if the stream broke off. Raises if the sample failed."""
        try:
            with self._calls.network_errors(self._sent):
                async for event in self._events:
                    match event.event:
                        case "token":
                            partial.take(*_tokens(event, self._streamed))
                        case "done":
                            return _answer(event, self._streamed, self.promised)
                        case "error":
                            raise _failure(event, self.promised)
        except APIConnectionError as error:
            log.info("the stream of %s broke off: %s", self.promised.request_id, error)
        finally:
            self._streamed.close()
        return None


async def open_stream(
    calls: Calls,
    body: bytes,
    *,
    rate_limit_wait_s: float,
    rate_limit_ends: Callable[[], Limit] = Limit,
    about: str,
) -> OpenStream | None:
    """Send a sample and wait until it is accepted; None if the service has no streams."""
    sent = calls.request(
        "POST",
        "stream_sample",
        body,
        # The server holds it open like a poll, on a connection of its own.
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
                    sent.without_payload(),
                    f"Connection error. {about}: the stream ended before it began.",
                )
            promised = _accepted(first, streamed)
        except BaseException:
            streamed.close()
            raise
        return OpenStream(calls, sent, streamed, events, promised)

    try:
        # A request without a response is sent again. It has the same seq_id, so the server takes
        # both for one sample.
        return await calls.with_retries(
            once,
            path="stream_sample",
            kind=Kind.SAMPLE,
            rate_limit_wait_s=rate_limit_wait_s,
            rate_limit_ends=rate_limit_ends,
        )
    except APIStatusError as error:
        if error.status_code not in (404, 405):
            raise
        log.info("this service has no stream_sample: samples are returned when complete")
        return None


def answers_all(request: SampleRequest) -> bool:
    """Whether the last event contains all requested fields; its JSON form lacks some."""
    return request.target_prompt_logprobs is None and not request.prompt_alt_tokens_k


def _accepted(event: ServerSentEvent, streamed: StreamedResponse) -> UntypedAPIFuture:
    try:
        if event.event != "accepted":
            raise ValueError(f"the first event is {event.event!r}")
        return decode_json(UntypedAPIFuture, event.data.encode())
    except ValueError as error:
        raise _unreadable(event, streamed, error) from error


def _tokens(
    event: ServerSentEvent, streamed: StreamedResponse
) -> tuple[int, list[int], list[float]]:
    try:
        data = event.json()
        logprobs = [float("nan") if number is None else number for number in data["logprobs"]]
        if len(logprobs) != len(data["tokens"]):
            raise ValueError("one logprob for each token is needed")
        return data["sequence"], data["tokens"], logprobs
    except (ValueError, KeyError, TypeError) as error:
        raise _unreadable(event, streamed, error) from error


def _answer(
    event: ServerSentEvent, streamed: StreamedResponse, promised: UntypedAPIFuture
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
    event: ServerSentEvent, streamed: StreamedResponse, error: Exception
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
