"""
Fetches what a server has promised: long polls until the result is there.

What an answer means is decided by `read_answer`, how long to wait by `Pace`; the loop is thin.
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
from tinkex.client.http.api_calls import LONG_WAIT_S, Calls, asked_s, decode
from tinkex.client.http.retry import MOST_GARBLED, is_retryable
from tinkex.client.http.transport import Kind, Response
from tinkex.client.observe import queue_states
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

#: Servers hold a poll for about 30 s; this leaves them room.
POLL_DEADLINE_S = 45.0
#: A "not yet" that came sooner than this was not held, so the next poll waits.
HELD_S = 1.0
#: Proxies lose a request now and then with a 400; more than this in a row is an answer.
MAX_400 = 3
QUEUE_LOG_EVERY_S = 60.0
#: For servers that name a state without a reason.
QUEUE_REASONS = {
    "paused_rate_limit": "a rate limit of this account has been reached",
    "paused_capacity": "the service is short of capacity",
}


class QueueObserver(Protocol):
    """Is told why a request waits."""

    def on_queue_state_change(self, queue_state: str, queue_state_reason: str | None) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Wanted(Generic[T]):
    """What a promise is expected to hold, and how to read it."""

    #: The name servers know this kind of request by.
    request_type: str
    answer: type[T]
    #: Reads the protobuf form; None if this result only travels as JSON.
    read_protobuf: Callable[[bytes], T] | None = None


class Garbled(ValueError):
    """Bytes that are no message."""


def read_answer(
    response: Response, wanted: Wanted[T]
) -> T | TryAgainResponse | CompleteMetadata | RequestFailedResponse:
    """What a successful poll says. Raises `ValueError` for what the protocol does not allow."""
    if PROTOBUF_TYPE in response.headers.get("content-type", ""):
        if wanted.read_protobuf is None:
            raise ValueError(f"protobuf is not expected for a {wanted.request_type} result")
        try:
            return wanted.read_protobuf(response.content)
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
    return read_future(body, wanted.answer)


def _read(
    response: Response, wanted: Wanted[T], about: str
) -> T | TryAgainResponse | CompleteMetadata | RequestFailedResponse:
    try:
        return read_answer(response, wanted)
    except ValueError as error:
        unreadable = APIResponseValidationError(
            response,
            response.text[:2000],
            f"{about}: the answer cannot be read: {error}. The server and this client "
            "disagree about the protocol; report this with the versions of both.",
        )
        unreadable.garbled = isinstance(error, Garbled)
        raise unreadable from error


class Pace:
    """How long to pause between polls, so that no server is ever polled in a busy loop."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._quick = 0
        self._failures = 0

    def after_not_yet(self, held_s: float) -> float:
        """A server that holds its polls is asked again at once; one that does not, ever slower."""
        self._failures = 0
        if held_s >= HELD_S:
            self._quick = 0
            return 0.0
        self._quick += 1
        return self._jittered(min(0.02 * 2.0 ** min(self._quick, 20), 1.0))

    def after_failure(self, asked_s: float | None = None) -> float:
        """As the server asks, a minute at most: the result may be there long before."""
        self._failures += 1
        if asked_s is not None:
            return min(asked_s, LONG_WAIT_S)
        return self._jittered(min(0.05 * 2.0 ** min(self._failures, 20), 15.0))

    def _jittered(self, delay_s: float) -> float:
        return delay_s * (1 - 0.25 * self._rng.random())


class Patience:
    """What a poll that failed means: wait so long, or give up. One table for every kind of poll."""

    def __init__(self, calls: Calls, *, clock: Callable[[], float], rng: random.Random) -> None:
        self.pace = Pace(rng)
        self._calls = calls
        self._clock = clock
        self._last_contact = clock()
        self._bad_requests = 0
        self._garbled = 0

    def answered(self) -> None:
        self._last_contact = self._clock()
        self._bad_requests = 0
        self._garbled = 0

    def pause_s(self, error: APIError) -> float:
        """Seconds before the next poll. Raises the error when there is no point in one."""
        if isinstance(error, APIResponseValidationError):
            self._garbled += 1
            if not is_retryable(error) or self._garbled > MOST_GARBLED:
                raise error
            return self.pace.after_failure()
        if not isinstance(error, APIStatusError):
            if self._clock() - self._last_contact > self._calls.settings.reconnect_s:
                raise error
            return self.pace.after_failure()
        self._last_contact = self._clock()
        asked = asked_s(error, datetime.now(UTC))
        if error.status_code == 400 and self._bad_requests < MAX_400:
            self._bad_requests += 1
            return self.pace.after_failure(asked)
        if error.status_code == 402:
            pause = self._calls.lane.billing.pause_s()
            if pause is None:
                raise error
            return pause
        if error.status_code == 400 or not is_retryable(error):
            raise error
        delay = self.pace.after_failure(asked)
        if error.status_code == 429:
            self._calls.slow_down("retrieve_future", asked or delay)
            return 0.0  # the next poll waits with everybody of this lane
        self._calls.tell_of_a_long_wait("retrieve_future", asked or delay)
        return delay


class Results:
    """Waits for promises of one service. Belongs to one event loop."""

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
        wanted: Wanted[T],
        *,
        observer: QueueObserver | None = None,
        round_trip_s: float | None = None,
        size: int | None = None,
    ) -> T:
        """
        The result of a promise; raises `RequestFailedError` if the server could not keep it.

        Where the `size` of the result is known, room is made for it first. Otherwise a large one
        is announced by the server, and fetched when there is room.
        """
        patience = Patience(self._calls, clock=self._clock, rng=self._rng)
        polls = 0
        may_withhold = size is None
        about = f"result of {wanted.request_type} request {request_id}"
        telling = _Telling(observer)
        async with contextlib.AsyncExitStack() as room:
            room.callback(telling.over)
            if size is not None:
                await room.enter_async_context(self._calls.lane.result_bytes.hold(size))
            while True:
                headers = {
                    "X-Tinker-Request-Type": wanted.request_type,
                    "X-Tinker-Request-Iteration": str(polls),
                    "Accept": PROTOBUF_TYPE if wanted.read_protobuf else JSON_TYPE,
                }
                if polls == 0 and round_trip_s is not None:
                    headers["X-Tinker-Create-Promise-Roundtrip-Time"] = f"{round_trip_s:.6f}"
                polls += 1
                await self._calls.lane.backoff.wait_once(LONG_WAIT_S)
                asked_at = self._clock()
                try:
                    response = await self._calls.once(
                        self._calls.request(
                            "POST",
                            "retrieve_future",
                            {"request_id": request_id, "allow_metadata_only": may_withhold},
                            kind=Kind.RETRIEVE,
                            headers=headers,
                            deadline_s=POLL_DEADLINE_S,
                        ),
                        about=about,
                    )
                    answer = _read(response, wanted, about)
                except (APIConnectionError, APIStatusError, APIResponseValidationError) as error:
                    if isinstance(error, APIStatusError) and error.status_code == 408:
                        patience.answered()
                        telling.hear(error.body)
                        delay = patience.pace.after_not_yet(self._clock() - asked_at)
                    else:
                        delay = patience.pause_s(error)
                    await asyncio.sleep(delay)
                    continue
                patience.answered()
                if isinstance(answer, RequestFailedResponse):
                    raise RequestFailedError(answer.error, request_id, answer.category)
                if isinstance(answer, TryAgainResponse):
                    telling.hear(response.json())  # in the words of the service, new ones too
                    await asyncio.sleep(patience.pace.after_not_yet(self._clock() - asked_at))
                elif isinstance(answer, CompleteMetadata):
                    if may_withhold:
                        may_withhold = False
                        size = answer.response_payload_size
                        await room.enter_async_context(self._calls.lane.result_bytes.hold(size))
                    else:  # asked not to, and it withheld the result all the same
                        await asyncio.sleep(patience.pace.after_not_yet(0.0))
                else:
                    return answer


class _Telling:
    """Passes on what polls say about the queue, and at the end that the waiting is over."""

    def __init__(self, observer: QueueObserver | None) -> None:
        self._observer = observer
        self._state = "active"

    def hear(self, body: object) -> None:
        if not isinstance(body, dict):
            return
        state, reason = body.get("queue_state"), body.get("queue_state_reason")
        if isinstance(state, str):
            self._tell(state, reason if isinstance(reason, str) else None)

    def over(self) -> None:
        if self._state != "active":
            self._tell("active", None)

    def _tell(self, state: str, reason: str | None) -> None:
        self._state = state
        if self._observer is None:
            return
        try:
            self._observer.on_queue_state_change(state, reason)
        except Exception:
            log.exception("a queue-state observer failed; the request goes on")


class QueueLog:
    """
    The usual observer: one line a minute at most while something waits for a reason.

    Changes are also published to `on_queue_state` callbacks, and counted by the telemetry of the
    session.
    """

    def __init__(
        self,
        subject: str,
        clock: Callable[[], float] = monotonic,
        *,
        telemetry: Callable[[], Telemetry | None] = lambda: None,
    ) -> None:
        self._subject = subject
        self._clock = clock
        self._telemetry = telemetry
        self._last = -QUEUE_LOG_EVERY_S
        self._known: tuple[str, str | None] = ("active", None)

    def on_queue_state_change(self, queue_state: str, queue_state_reason: str | None) -> None:
        reason = None
        if queue_state != "active":
            reason = queue_state_reason or QUEUE_REASONS.get(
                queue_state, f"queue state {queue_state[:64]!r}, and no reason given"
            )
        if (queue_state, reason) != self._known:
            self._known = (queue_state, reason)
            if telemetry := self._telemetry():
                telemetry.note_queue_state(queue_state)
            queue_states.publish(
                queue_states.QueueState(subject=self._subject, state=queue_state, reason=reason)
            )
        now = self._clock()
        if reason is not None and now - self._last >= QUEUE_LOG_EVERY_S:
            self._last = now
            log.warning("%s is paused: %s", self._subject, reason)


# MERGED: One long poll for all samples of a client: which of them have finished. The server keeps a log of what finished; a poll names the place up to which it was read and is held until there is more. Results are fetched one by one afterwards, and named in the next poll, so that the server may drop them. Belongs to one event loop; runs only while somebody waits or there is something to report.


#: So many samples of a client ask for themselves: one request less each, and they hold few
#: connections (docs/decisions/0014-client.md).
FEW = 64
#: After news this long until the next poll: what finishes meanwhile is told by one answer.
GATHER_S = 0.01


class Poller:
    """
    Tells the samples of one client when they are done.

    An event may come before the answer that gives a sample its id, so a sample says that it is
    about to be sent (`expecting`); events that belong to nobody are kept only while there is a
    submission under way that they may belong to.
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
        self._alone = 0
        self._tickets = itertools.count()
        self._submitting: dict[int, None] = {}
        self._early: dict[str, FutureCompletion] = {}
        #: The early ones in the order they came, each with the first ticket it cannot belong to.
        self._early_order: deque[tuple[int, str]] = deque()

    @contextlib.contextmanager
    def expecting(self) -> Iterator[None]:
        """A sample is being sent; inside, its id becomes known and `register`ed."""
        ticket = next(self._tickets)
        self._submitting[ticket] = None
        try:
            yield
        finally:
            del self._submitting[ticket]
            self._forget_strays()

    def register(self, request_id: str) -> None:
        """Watch for a sample, unless there are so few that it may as well ask for itself."""
        if self._alone + len(self._waiting) < FEW:
            return
        done = self._waiting[request_id] = asyncio.get_running_loop().create_future()
        if (event := self._early.pop(request_id, None)) is not None:
            done.set_result(event)
        else:
            self._wake()

    async def finished(self, request_id: str) -> FutureCompletion | None:
        """The event of a registered sample; None if it should ask for its result itself."""
        done = self._waiting.get(request_id)
        if done is None:
            return None
        try:
            return await done
        finally:
            self._waiting.pop(request_id, None)

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """Around a sample that asks for itself."""
        self._alone += 1
        try:
            yield
        finally:
            self._alone -= 1

    def fetched(self, request_id: str) -> None:
        """The result is here, or known to be a failure: the server need not keep it."""
        self._fetched.add(request_id)
        self._wake()

    # -- the loop --------------------------------------------------------------------------------

    def _wake(self) -> None:
        if self._task is None:
            # For many samples, so in the name of none of them.
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
        # Told to all who wait. The next sample polls anew, and hears it again if it is still so.
        self._fetched.clear()
        for done in self._waiting.values():
            if not done.done():
                done.set_exception(own_copy(error))

    async def _poll(self) -> None:
        patience = Patience(self._calls, clock=self._clock, rng=self._rng)
        while self._waiting or self._fetched:
            await self._calls.lane.backoff.wait_once(LONG_WAIT_S)
            reported = sorted(self._fetched)
            asked_at = self._clock()
            try:
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
            except (APIConnectionError, APIStatusError, APIResponseValidationError) as error:
                await asyncio.sleep(patience.pause_s(error))
                continue
            patience.answered()
            self._fetched.difference_update(reported)
            for event in answer.completions:
                self._hand_over(event)
            if answer.cursor > self._cursor:
                self._cursor = answer.cursor
                await asyncio.sleep(GATHER_S)
            else:
                self._send_a_scout()
                held_s = self._clock() - asked_at
                await asyncio.sleep(patience.pace.after_not_yet(held_s))

    def _hand_over(self, event: FutureCompletion) -> None:
        done = self._waiting.get(event.request_id)
        if done is None:
            if self._submitting and event.request_id not in self._early:
                self._early[event.request_id] = event
                self._early_order.append((next(self._tickets), event.request_id))
        elif not done.done():
            done.set_result(event)

    def _send_a_scout(self) -> None:
        """
        Nothing finished for as long as a poll is held: let the oldest sample ask for itself.

        Its answers say why it waits, which these polls do not, and an event that a server forgot
        does not keep it waiting forever.
        """
        if self._alone:
            return
        for done in self._waiting.values():
            if not done.done():
                done.set_result(None)
                return

    def _forget_strays(self) -> None:
        oldest = next(iter(self._submitting), None)
        while self._early_order and (oldest is None or self._early_order[0][0] < oldest):
            _, request_id = self._early_order.popleft()
            self._early.pop(request_id, None)
