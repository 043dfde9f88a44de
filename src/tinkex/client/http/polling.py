"""
Fetches results by long polling.

`ResultPoller` polls for one result. `SharedPoll` is one long poll for all samples of a client: the
server keeps a log of finished samples, a poll names the position up to which it was read, and the
server holds the poll until there is more. Results are then fetched one by one and acknowledged in
the next poll, so that the server may drop them.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import json
import logging
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from time import monotonic
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from pydantic import BaseModel

from tinkex.client.errors import (
    APIConnectionError,
    APIError,
    APIResponseValidationError,
    APIStatusError,
    RequestFailedError,
    own_copy,
)
from tinkex.client.http.retry import (
    MAX_GARBLED,
    NotYet,
    exponential_delay_s,
    is_retryable,
    retrying,
)
from tinkex.client.http.transport import Kind, Response
from tinkex.client.http.typed_requests import LONG_WAIT_S, Calls, decode, requested_delay_s
from tinkex.client.observe import queue_states
from tinkex.client.observe.waiting import Cause, Limit
from tinkex.wire.base import Payload
from tinkex.wire.codec import JSON_TYPE, PROTOBUF_TYPE
from tinkex.wire.futures import (
    CompleteMetadata,
    FutureCompletion,
    FuturesRetrieveRequest,
    FuturesRetrieveResponse,
    RequestFailedResponse,
    SamplingSessionFuturesTarget,
    TryAgainResponse,
    read_future,
)

if TYPE_CHECKING:
    from tinkex.client.observe.telemetry import Telemetry


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
#: For servers that send a state without a reason.
QUEUE_REASONS = {
    "paused_rate_limit": "a rate limit of this account was reached",
    "paused_capacity": "the service is short of capacity",
}


class QueueObserver(Protocol):
    """Notified when the queue state of a request changes."""

    def on_queue_state_change(self, queue_state: str, queue_state_reason: str | None) -> None: ...


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
        observer: QueueObserver | None = None,
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

    def __init__(self, observer: QueueObserver | None, calls: Calls, started: float) -> None:
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
                    subject_of(self._observer),
                    queue_reason(state, reason),
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


def subject_of(observer: object) -> str:
    """What waits, in the words of the log: `Training of m`."""
    return str(getattr(observer, "subject", "A request"))


def queue_reason(state: str, reason: str | None) -> str:
    """The reason that the service gave, or a default one."""
    unnamed = f"queue state {state[:64]!r}, without a reason"
    return reason or QUEUE_REASONS.get(state, unnamed)


class QueueLog:
    """
    The default observer: publishes changes of the queue state to `on_queue_state` callbacks.

    They are also counted in the telemetry of the session.
    """

    def __init__(
        self, subject: str, *, telemetry: Callable[[], Telemetry | None] = lambda: None
    ) -> None:
        self.subject = subject
        self._telemetry = telemetry
        self._known: tuple[str, str | None] = ("active", None)

    def on_queue_state_change(self, queue_state: str, queue_state_reason: str | None) -> None:
        reason = None
        if queue_state != "active":
            reason = queue_reason(queue_state, queue_state_reason)
        if (queue_state, reason) != self._known:
            self._known = (queue_state, reason)
            if telemetry := self._telemetry():
                telemetry.record_queue_state(queue_state)
            queue_states.publish(
                queue_states.QueueState(subject=self.subject, state=queue_state, reason=reason)
            )


#: Up to this many samples of a client poll for themselves: that is one request less each, and few
#: connections (docs/decisions/0014-client.md).
MAX_SELF_POLLING = 64
#: Delay before the next poll after an event, so that one response reports several samples.
COALESCE_S = 0.01


class SharedPoll:
    """
    Reports to the samples of one client when they are finished.

    An event may arrive before the response that contains the sample's id. So a sample announces
    its submission (`submitting`), and unclaimed events are kept while a submission is running that
    they may belong to. Belongs to one event loop; polls only while samples wait or results must
    be acknowledged.
    """

    def __init__(
        self,
        calls: Calls,
        target: SamplingSessionFuturesTarget,
        *,
        keep: Callable[[asyncio.Task[None]], None],
        clock: Callable[[], float] = monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._calls = calls
        self._target = target
        self._keep = keep
        self._clock = clock
        self._rng = rng or random.Random()
        self._cursor = 0
        self._task: asyncio.Task[None] | None = None
        self._waiting: dict[str, asyncio.Future[FutureCompletion | None]] = {}
        self._fetched: set[str] = set()
        self._self_polling = 0
        #: Numbers submissions and unclaimed events in the order in which they begin or arrive.
        self._numbers = itertools.count()
        #: The numbers of the running submissions, in ascending order.
        self._submitting: dict[int, None] = {}
        self._unclaimed: dict[str, FutureCompletion] = {}
        #: (number, request id) of unclaimed events, in ascending order. An event can only belong to
        #: a submission with a lower number, which began before the event arrived.
        self._unclaimed_order: deque[tuple[int, str]] = deque()

    @contextlib.contextmanager
    def submitting(self) -> Iterator[None]:
        """The context of one submission. The caller `register`s the sample's id inside it."""
        number = next(self._numbers)
        self._submitting[number] = None
        try:
            yield
        finally:
            del self._submitting[number]
            self._drop_unclaimed()

    def register(self, request_id: str) -> None:
        """Watch for a sample, unless there are so few that it can poll for itself."""
        if self._self_polling + len(self._waiting) < MAX_SELF_POLLING:
            return
        done = self._waiting[request_id] = asyncio.get_running_loop().create_future()
        if (event := self._unclaimed.pop(request_id, None)) is not None:
            done.set_result(event)
        else:
            self._wake()

    async def finished(self, request_id: str) -> FutureCompletion | None:
        """The event of a registered sample; None if it should poll for itself."""
        done = self._waiting.get(request_id)
        if done is None:
            return None
        try:
            return await done
        finally:
            self._waiting.pop(request_id, None)

    @contextlib.contextmanager
    def self_polling(self) -> Iterator[None]:
        """The context of a sample that polls for itself: counts it as long as it polls."""
        self._self_polling += 1
        try:
            yield
        finally:
            self._self_polling -= 1

    def fetched(self, request_id: str) -> None:
        """The result was fetched, or has failed: the server may drop it."""
        self._fetched.add(request_id)
        self._wake()

    # -- the poll --------------------------------------------------------------------------------

    def _wake(self) -> None:
        if self._task is None:
            # It serves many samples, so it must not run in the context of one of them.
            self._task = asyncio.get_running_loop().create_task(
                self._poll(), context=contextvars.Context()
            )
            self._task.add_done_callback(self._ended)
            self._keep(self._task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        # All waiting samples fail. The next sample starts a new poll.
        self._fetched.clear()
        for done in self._waiting.values():
            if not done.done():
                done.set_exception(own_copy(error))

    async def _poll(self) -> None:
        retries = PollRetries(self._calls, clock=self._clock, rng=self._rng)

        async def poll() -> None:
            if not self._waiting and not self._fetched:
                return
            await self._calls.limits.backoff.wait_once(LONG_WAIT_S)
            reported = sorted(self._fetched)
            sent_at = self._clock()
            response = await self._calls.once(
                self._calls.request(
                    "POST",
                    "retrieve_futures",
                    FuturesRetrieveRequest(
                        target=self._target,
                        prev_cursor=self._cursor,
                        retrieved_request_ids=reported,
                    ),
                    kind=Kind.RETRIEVE,
                    deadline_s=POLL_DEADLINE_S,
                ),
                about=f"waiting for samples of {self._target.sampling_session_id}",
            )
            answer = decode(FuturesRetrieveResponse, response, about="waiting for samples")
            retries.answered()
            self._fetched.difference_update(reported)
            for event in answer.completions:
                self._deliver(event)
            if answer.cursor > self._cursor:
                self._cursor = answer.cursor
                raise NotYet(COALESCE_S)
            self._start_fallback_poll()
            raise NotYet(retries.delays.after_not_yet(self._clock() - sent_at))

        try:
            await retrying(poll, retries.delay_after)
        finally:
            retries.end()

    def _deliver(self, event: FutureCompletion) -> None:
        done = self._waiting.get(event.request_id)
        if done is None:
            if self._submitting and event.request_id not in self._unclaimed:
                self._unclaimed[event.request_id] = event
                self._unclaimed_order.append((next(self._numbers), event.request_id))
        elif not done.done():
            done.set_result(event)

    def _start_fallback_poll(self) -> None:
        """
        Let the oldest sample poll for itself, since nothing finished during a whole poll.

        Its responses contain the queue state, which the shared poll does not report. This also
        covers a server that lost an event.
        """
        if self._self_polling:
            return
        for done in self._waiting.values():
            if not done.done():
                done.set_result(None)
                return

    def _drop_unclaimed(self) -> None:
        oldest = next(iter(self._submitting), None)
        while self._unclaimed_order and (oldest is None or self._unclaimed_order[0][0] < oldest):
            _, request_id = self._unclaimed_order.popleft()
            self._unclaimed.pop(request_id, None)
