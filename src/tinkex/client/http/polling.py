"""
Fetches results by long polling.

`ResultPoller` polls for one result; `shared_poll` is one poll for all samples of a client.
"""

from __future__ import annotations

import contextlib
import json
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from time import monotonic
from typing import Generic, TypeVar

from pydantic import BaseModel

from tinkex.client.errors import (
    APIConnectionError,
    APIError,
    APIResponseValidationError,
    APIStatusError,
    RequestFailedError,
)
from tinkex.client.http.retry import (
    LONG_WAIT_S,
    MAX_GARBLED,
    NotYet,
    exponential_delay_s,
    is_retryable,
    requested_delay_s,
    retrying,
)
from tinkex.client.http.transport import Kind, Response
from tinkex.client.http.typed_requests import Calls
from tinkex.client.observe import queue_states
from tinkex.client.observe.waiting import Cause, Limit
from tinkex.wire.base import Payload
from tinkex.wire.codec import JSON_TYPE, PROTOBUF_TYPE
from tinkex.wire.futures import (
    CompleteMetadata,
    RequestFailedResponse,
    TryAgainResponse,
    read_future,
)

log = logging.getLogger("tinkex.results")

T = TypeVar("T", bound=BaseModel | Payload)

#: Servers hold a poll for about 30 s.
POLL_DEADLINE_S = 45.0
#: A server that responds faster than this did not hold the poll, so the next poll is delayed.
HELD_S = 1.0
#: Proxies sometimes drop a request and respond with a 400, so this many in a row are retried. The
#: next one counts as the response of the service.
MAX_400 = 3
#: Asks a tinkex server to answer a poll after so many seconds if the request is paused by then.
QUEUE_STATE_AFTER = "X-Tinkex-Queue-State-After"


@dataclass(frozen=True, kw_only=True)
class ExpectedResult(Generic[T]):
    """The type of a result, and how to decode it."""

    #: The server's name for this kind of request.
    request_type: str
    answer: type[T]
    #: Decodes the protobuf form; None if this result is only sent as JSON.
    read_protobuf: Callable[[bytes], T] | None = None


class Garbled(ValueError):
    """Bytes that cannot be decoded."""


def read_answer(
    response: Response, expected: ExpectedResult[T]
) -> T | TryAgainResponse | CompleteMetadata | RequestFailedResponse:
    """Decode a successful poll. Raises `ValueError` for what the protocol does not allow."""
    if PROTOBUF_TYPE in response.headers.get("content-type", ""):
        if expected.read_protobuf is None:
            raise ValueError(f"protobuf is not expected for a {expected.request_type} result")
        try:
            return expected.read_protobuf(response.content)
        except ValueError as error:
            raise Garbled(f"{error}") from error
    try:
        body = json.loads(response.content)
    except ValueError as error:
        raise Garbled(f"neither JSON nor protobuf: {error}") from error
    if not isinstance(body, dict):
        raise ValueError(  # noqa: TRY004 (bad bytes, not a bad argument)
            f"a JSON {type(body).__name__} where an object is expected"
        )
    if "error" in body:
        body = {"category": "unknown", **body}
    return read_future(body, expected.answer)


def _read(
    response: Response, expected: ExpectedResult[T], about: str
) -> T | TryAgainResponse | CompleteMetadata | RequestFailedResponse:
    try:
        return read_answer(response, expected)
    except ValueError as error:
        unreadable = APIResponseValidationError(
            response,
            response.text[:2000],
            f"{about}: the response cannot be decoded: {error}. The server and this client "
            "disagree about the protocol; report this with the versions of both.",
        )
        unreadable.garbled = isinstance(error, Garbled)
        raise unreadable from error


class PollDelays:
    """Delays between polls, so that no server is polled in a busy loop."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._quick_responses = 0
        self._failures = 0

    def after_not_yet(self, held_s: float) -> float:
        """No delay if the server holds its polls; otherwise an increasing one."""
        self._failures = 0
        if held_s >= HELD_S:
            self._quick_responses = 0
            return 0.0
        self._quick_responses += 1
        return exponential_delay_s(
            self._quick_responses, first_s=0.04, max_s=1.0, jitter=0.25, rng=self._rng
        )

    def after_failure(self, requested_s: float | None = None) -> float:
        """The delay that the server asks for, at most a minute: the result may be ready earlier."""
        self._failures += 1
        if requested_s is not None:
            return min(requested_s, LONG_WAIT_S)
        return exponential_delay_s(
            self._failures, first_s=0.1, max_s=15.0, jitter=0.25, rng=self._rng
        )


class PollRetries:
    """
    After a failed poll: wait, or give up. The same rules for every kind of poll.

    Call `end` when the polls end.
    """

    def __init__(self, calls: Calls, *, clock: Callable[[], float], rng: random.Random) -> None:
        self.delays = PollDelays(rng)
        self._calls = calls
        self._clock = clock
        self._last_contact = clock()
        self._bad_requests = 0
        self._garbled = 0
        #: When the failures began that are not over; None if the last poll was answered.
        self._failing_since: float | None = None

    def answered(self) -> None:
        self._last_contact = self._clock()
        self._bad_requests = 0
        self._garbled = 0
        if self._failing_since is not None:
            self._failing_since = None
            self._calls.limits.waiting.over(self)

    def end(self) -> None:
        if self._failing_since is not None:
            self._calls.limits.waiting.leave(self)

    def delay_after(self, error: Exception) -> float | None:
        """Seconds before the next poll; None if polling again is pointless."""
        delay = self._delay_after(error)
        if delay is not None and isinstance(error, APIError):
            if self._failing_since is None:
                self._failing_since = self._clock()
            settings, limit = self._calls.settings, Limit()
            if isinstance(error, APIConnectionError):
                ends_at = self._last_contact + settings.reconnect_s
                limit = Limit(ends_at, "results: TINKEX_RECONNECT_S")
            elif isinstance(error, APIStatusError) and error.status_code == 402:
                limit = Limit(self._calls.limits.billing.ends_at)
            self._calls.limits.waiting.wait(
                self,
                self._calls.cause(error),
                limit,
                since=self._failing_since,
                notice_s=settings.wait_notice_s,
            )
        return delay

    def _delay_after(self, error: Exception) -> float | None:
        if isinstance(error, APIResponseValidationError):
            self._garbled += 1
            if not is_retryable(error) or self._garbled > MAX_GARBLED:
                return None
            return self.delays.after_failure()
        if isinstance(error, APIConnectionError):
            if self._clock() - self._last_contact > self._calls.settings.reconnect_s:
                return None
            return self.delays.after_failure()
        if not isinstance(error, APIStatusError):
            return None
        self._last_contact = self._clock()
        requested = requested_delay_s(error, datetime.now(UTC))
        if error.status_code == 400 and self._bad_requests < MAX_400:
            self._bad_requests += 1
            return self.delays.after_failure(requested)
        if error.status_code == 402:
            return self._calls.limits.billing.pause_s()
        if error.status_code == 400 or not is_retryable(error):
            return None
        delay = self.delays.after_failure(requested)
        if error.status_code == 429:
            self._calls.note_rate_limit("retrieve_future", error, requested or delay)
            return 0.0  # the next poll waits for the shared back-off
        return delay


class ResultPoller:
    """Fetches results from one service. Belongs to one event loop."""

    def __init__(
        self,
        calls: Calls,
        *,
        clock: Callable[[], float] = monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._calls = calls
        self._clock = clock
        self._rng = rng or random.Random()

    async def fetch(
        self,
        request_id: str,
        expected: ExpectedResult[T],
        *,
        observer: queue_states.QueueObserver | None = None,
        round_trip_s: float | None = None,
        size: int | None = None,
    ) -> T:
        """
        Poll until the result is available; raises `RequestFailedError` if the request failed.

        If the `size` of the result is known, its bytes are reserved first. Otherwise the server
        announces a large result, and it is fetched once its bytes are reserved.
        """
        retries = PollRetries(self._calls, clock=self._clock, rng=self._rng)
        polls = 0
        allow_metadata_only = size is None
        about = f"result of {expected.request_type} request {request_id}"
        reporter = _QueueStateReporter(observer, self._calls, self._clock())
        reserved = contextlib.AsyncExitStack()

        async def poll() -> T:
            nonlocal polls, allow_metadata_only
            headers = {
                "X-Tinker-Request-Type": expected.request_type,
                "X-Tinker-Request-Iteration": str(polls),
                "Accept": PROTOBUF_TYPE if expected.read_protobuf else JSON_TYPE,
            }
            if reporter.wants_state and self._calls.settings.wait_notice_s is not None:
                headers[QUEUE_STATE_AFTER] = f"{self._calls.settings.wait_notice_s:g}"
            if polls == 0 and round_trip_s is not None:
                headers["X-Tinker-Create-Promise-Roundtrip-Time"] = f"{round_trip_s:.6f}"
            polls += 1
            await self._calls.limits.backoff.wait_once(LONG_WAIT_S)
            sent_at = self._clock()
            try:
                response = await self._calls.once(
                    self._calls.request(
                        "POST",
                        "retrieve_future",
                        {"request_id": request_id, "allow_metadata_only": allow_metadata_only},
                        kind=Kind.RETRIEVE,
                        headers=headers,
                        deadline_s=POLL_DEADLINE_S,
                    ),
                    about=about,
                )
            except APIStatusError as error:
                if error.status_code != 408:
                    raise
                retries.answered()
                reporter.update(error.body)
                raise NotYet(retries.delays.after_not_yet(self._clock() - sent_at)) from None
            answer = _read(response, expected, about)
            retries.answered()
            if isinstance(answer, RequestFailedResponse):
                raise RequestFailedError(answer.error, request_id, answer.category)
            if isinstance(answer, TryAgainResponse):
                reporter.update(response.json())  # as sent: it may contain states unknown here
                raise NotYet(retries.delays.after_not_yet(self._clock() - sent_at))
            if not isinstance(answer, CompleteMetadata):
                return answer
            if not allow_metadata_only:  # the server withheld the result although asked not to
                raise NotYet(retries.delays.after_not_yet(0.0))
            allow_metadata_only = False
            await reserved.enter_async_context(
                self._calls.limits.result_bytes.hold(answer.response_payload_size)
            )
            raise NotYet(0.0)  # fetch it now

        async with reserved:
            reserved.callback(retries.end)
            reserved.push(reporter.finish)
            if size is not None:
                await reserved.enter_async_context(self._calls.limits.result_bytes.hold(size))
            return await retrying(poll, retries.delay_after)


class _QueueStateReporter:
    """Notifies an observer of queue states, and of the end of the wait; the log gets both too."""

    def __init__(
        self, observer: queue_states.QueueObserver | None, calls: Calls, started: float
    ) -> None:
        self._observer = observer
        self._calls = calls
        self._started = started
        self._state = "active"

    @property
    def wants_state(self) -> bool:
        """Whether it is not known that the request waits."""
        return self._state == "active"

    def update(self, body: object) -> None:
        if not isinstance(body, dict):
            return
        state, reason = body.get("queue_state"), body.get("queue_state_reason")
        if isinstance(state, str):
            self._report(state, reason if isinstance(reason, str) else None)

    def finish(self, error: type[BaseException] | None, *_: object) -> None:
        if self._state != "active":
            if error is not None:
                self._calls.limits.waiting.leave(self)
            self._report("active", None)

    def _report(self, state: str, reason: str | None) -> None:
        waiting = self._calls.limits.waiting
        if state != "active":
            waiting.wait(
                self,
                Cause(
                    f"queue {state[:64]}",
                    queue_states.subject_of(self._observer),
                    queue_states.queue_reason(state, reason),
                    joint=" is paused:",
                    does="Waiting",
                    over="goes on",
                ),
                getattr(self._observer, "limit", Limit)(),
                since=self._started,
                notice_s=self._calls.settings.wait_notice_s,
            )
        elif self._state != "active":
            waiting.over(self)
        self._state = state
        if self._observer is None:
            return
        try:
            self._observer.on_queue_state_change(state, reason)
        except Exception:
            log.exception("a queue-state observer failed; the request continues")
