"""
One long poll for all samples of a client.

The server keeps a log of finished samples, a poll names the position up to which it was read, and the
server holds the poll until there is more. Results are then fetched one by one and acknowledged in the
next poll, so that the server may drop them.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator
from time import monotonic

from tinkex.client.errors import own_copy
from tinkex.client.http.polling import POLL_DEADLINE_S, PollRetries
from tinkex.client.http.retry import LONG_WAIT_S, NotYet, retrying
from tinkex.client.http.transport import Kind
from tinkex.client.http.typed_requests import Calls, decode
from tinkex.wire.futures import (
    FutureCompletion,
    FuturesRetrieveRequest,
    FuturesRetrieveResponse,
    SamplingSessionFuturesTarget,
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
