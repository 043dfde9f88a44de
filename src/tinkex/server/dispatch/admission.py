"""
Which request outside the order of steps goes to an engine next, when not all can go at once.

An engine that has just started is given what waits by turns of owners, those who have the least
with it first. So one owner's thousands do not hold up another's single sample.
"""

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Awaitable, Callable

#: What an engine samples at once unless it is told otherwise.
MAX_SEQUENCES = 256


class Admission:
    """Of one engine. While it is up and has few requests of an owner, nobody waits here."""

    def __init__(self, ready: Callable[[], Awaitable[object]], *, max_sequences: int = 0) -> None:
        self._ready = ready
        #: Requests of one owner that are with the engine at once: more than it samples at a time,
        #: and few enough that another owner's order is soon read behind them.
        self._most_each = 2 * (max_sequences or MAX_SEQUENCES)
        self._up = False
        self._inside: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._starting: asyncio.Task[None] | None = None

    async def enter(self, owner: str) -> None:
        """Wait for this owner's turn; `leave` afterwards."""
        if self._up and owner not in self._waiting and self._inside[owner] < self._most_each:
            self._inside[owner] += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        self._start_for_waiting()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave(owner)
            raise

    def leave(self, owner: str) -> None:
        self._inside[owner] -= 1
        if not self._inside[owner]:
            del self._inside[owner]
        self._let_in()

    def lost(self) -> None:
        """The engine died: whoever waits, or comes now, waits for the next one."""
        self._up = False
        # Not left to whoever was lost: a request that has failed does not come back.
        self._start_for_waiting()

    def close(self) -> None:
        if self._starting is not None:
            self._starting.cancel()

    def _start_for_waiting(self) -> None:
        if self._waiting and not self._up and self._starting is None:
            self._starting = asyncio.create_task(self._start())

    async def _start(self) -> None:
        try:
            # What it raises, whoever is let in meets as well, and says so.
            with contextlib.suppress(Exception):
                await self._ready()
        finally:
            self._starting = None
        self._up = True
        self._let_in()

    def _let_in(self) -> None:
        while self._up and self._waiting and (owner := self._next()) is not None:
            waiting = self._waiting[owner]
            turn = waiting.popleft()
            if not waiting:
                del self._waiting[owner]
            if not turn.cancelled():
                self._inside[owner] += 1
                turn.set_result(None)

    def _next(self) -> str | None:
        free = (owner for owner in self._waiting if self._inside[owner] < self._most_each)
        return min(free, key=self._inside.__getitem__, default=None)
