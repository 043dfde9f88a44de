"""Who sends next, and with which number. Knows nothing of HTTP."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

T = TypeVar("T")


class Turnstile:
    """
    Hands out numbered tickets, and starts what their holders bring in that order.

    `take` may be called from any thread; `start` and `skip` belong to the event loop. One of them
    must be called once for every ticket.
    """

    def __init__(self) -> None:
        self._tickets = itertools.count()
        self._serving = 0
        self._waiting: dict[int, asyncio.Event] = {}
        self._spent: set[int] = set()

    def take(self) -> int:
        return next(self._tickets)

    def start(self, ticket: int, send: Callable[[], Awaitable[T]]) -> asyncio.Task[T]:
        """Run `send` as soon as every earlier ticket is spent."""
        task = asyncio.ensure_future(self._send_in_turn(ticket, send))
        # Not a `finally` in the coroutine: a task cancelled before its first step
        # never runs one, and everyone behind it would wait forever.
        task.add_done_callback(lambda _: self.skip(ticket))
        return task

    async def _send_in_turn(self, ticket: int, send: Callable[[], Awaitable[T]]) -> T:
        if ticket != self._serving:
            await self._waiting.setdefault(ticket, asyncio.Event()).wait()
        return await send()

    def skip(self, ticket: int) -> None:
        """Spend a ticket: later ones no longer wait for it."""
        self._spent.add(ticket)
        self._waiting.pop(ticket, None)
        while self._serving in self._spent:
            self._spent.remove(self._serving)
            self._serving += 1
        if next_in_line := self._waiting.pop(self._serving, None):
            next_in_line.set()


class Fate(Enum):
    """What became of one numbered submission."""

    UNSENT = "unsent"  # never left: the number is still free
    REFUSED = "refused"  # the server said no: the number is still free
    UNKNOWN = "unknown"  # sent, and not answered: the server may have it
    ACCEPTED = "accepted"  # the server has it


@dataclass
class Numbers:
    """
    The `seq_id`s of one model, given inside a turn, so that nothing the client does leaves a gap.

    A server runs steps strictly by number, so a number that was skipped stops everything behind
    it. Numbers that never reached the server go back to the pool when nothing later did;
    otherwise they are kept as gaps, which the next turn must fill before it sends its own.
    """

    next: int = 1
    #: Number to fill -> whether it belongs to a batch of which the server may have got a part, so
    #: that the gradients of that part must not be used.
    gaps: dict[int, bool] = field(default_factory=dict)

    def settle(self, fates: Sequence[Fate], *, adds_gradients: bool = False) -> None:
        """Account for a turn that gave its submissions `next`, `next + 1`, ... in this order."""
        first = self.next
        reached = [
            first + index
            for index, fate in enumerate(fates)
            if fate in (Fate.ACCEPTED, Fate.UNKNOWN)
        ]
        if not reached:
            return
        self.next = max(reached) + 1
        for number, fate in zip(range(first, self.next), fates, strict=False):
            if fate is not Fate.ACCEPTED:
                self.gaps[number] = adds_gradients and len(fates) > 1
