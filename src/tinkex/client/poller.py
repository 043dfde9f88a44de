"""
One long poll for all samples of a client: which of them have finished.

The server keeps a log of what finished; a poll names the place up to which it was read and is held
until there is more. Results are fetched one by one afterwards, and named in the next poll, so that
the server may drop them. Belongs to one event loop; runs only while somebody waits or there is
something to report.
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

from tinkex.client.calls import LONG_WAIT_S, Calls, decode
from tinkex.client.errors import (
    APIConnectionError,
    APIResponseValidationError,
    APIStatusError,
    own_copy,
)
from tinkex.client.results import POLL_DEADLINE_S, Patience
from tinkex.client.transport import Kind
from tinkex.wire.futures import (
    FutureCompletion,
    FuturesRetrieveRequest,
    FuturesRetrieveResponse,
    SamplingSessionFuturesTarget,
)

#: So many samples of a client ask for themselves: one request less each, and they hold few
#: connections (docs/decisions/0041-a-few-samples-ask-for-themselves.md).
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
