"""
Limits that all clients with the same service and credential share (`ServiceLimits`).

A fair limit on running samples, byte budgets, a shared back-off after 429, and a pause after 402.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

from tinkex.client.http.circuit_breaker import Breaker, BreakerPolicy
from tinkex.client.http.transport import Kind
from tinkex.client.observe.waiting import Cause, Waiting
from tinkex.wire.inputs import DmelChunk, EncodedTextChunk, ImageChunk, ModelInput

E = TypeVar("E")

NO_LIMIT = 2**31
#: After a back-off, samples are submitted a few at a time for this long.
SLOW_START_S = 10.0
#: Requests that wait for the end of the same back-off resume within at most this many seconds of
#: each other.
MAX_SPREAD_S = 15.0
#: Delay between attempts while a 402 counts as a pause and not as an error.
BILLING_PAUSE_S = 5.0
#: After this long without a 402, the next one starts a new pause.
BILLING_RESET_S = 300.0


class ClientQueue(Generic[E]):
    """
    The waiting entries of one client, first in, first out.

    A waiting entry takes no task and no socket. `start` starts one and returns whether it did; the
    entry may have been cancelled while it waited.
    """

    def __init__(self, start: Callable[[E], bool], limit: int | None = None) -> None:
        self.start = start
        #: Entries of this client that may run at the same time.
        self.limit = NO_LIMIT if limit is None else limit
        self.waiting: deque[E] = deque()
        self.running = 0
        self._is_ready = False

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running


class FairLimiter:
    """
    Admits at most `size` running entries from any number of clients.

    Clients take turns, one entry each, so that a client with thousands of waiting entries does not
    delay another's first. Belongs to one event loop.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0
        #: Clients that have waiting entries and are below their own limit.
        self._ready: deque[ClientQueue[Any]] = deque()

    def enqueue(self, queue: ClientQueue[E], entries: Iterable[E]) -> None:
        queue.waiting.extend(entries)
        self._add_ready(queue)
        self._admit()

    def release(self, queue: ClientQueue[Any]) -> None:
        """Called when an entry that `queue.start` started has ended."""
        queue.running -= 1
        self.used -= 1
        self._add_ready(queue)
        self._admit()

    def _add_ready(self, queue: ClientQueue[Any]) -> None:
        if queue.waiting and queue.running < queue.limit and not queue._is_ready:
            queue._is_ready = True
            self._ready.append(queue)

    def _admit(self) -> None:
        while self._ready and self.used < self.size:
            queue = self._ready.popleft()
            queue._is_ready = False
            while queue.waiting:
                if queue.start(queue.waiting.popleft()):
                    queue.running += 1
                    self.used += 1
                    break
            self._add_ready(queue)


class Budget:
    """
    Limits an amount, such as bytes, that may be in flight at the same time.

    First in, first out. A request larger than the whole budget waits until nothing else is in
    flight and then runs alone.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0
        self._order = asyncio.Lock()
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def hold(self, amount: int) -> AsyncIterator[None]:
        async with self._order:
            while self.used and self.used + amount > self.size:
                self._freed.clear()
                await self._freed.wait()
            self.used += amount
        try:
            yield
        finally:
            self.used -= amount
            self._freed.set()


class Backoff:
    """The time until which no request is sent, shared by all requests after a 429."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._until = -math.inf

    def extend(self, delay_s: float) -> None:
        """Send no request for the next `delay_s` seconds. Never shortens the current back-off."""
        self._until = max(self._until, self._clock() + delay_s)

    @property
    def left_s(self) -> float:
        return max(0.0, self._until - self._clock())

    @property
    def in_slow_start(self) -> bool:
        """Whether a back-off is running, or ended less than `SLOW_START_S` ago."""
        return self._clock() < self._until + SLOW_START_S

    async def wait(self, at_most_s: float = math.inf) -> None:
        """Wait until the back-off ends, including any extension made while waiting."""
        ends = self._clock() + at_most_s
        while (left := min(self.left_s, ends - self._clock())) > 0:
            await _spread(left)

    async def wait_once(self, at_most_s: float) -> None:
        """
        Wait until the back-off ends as it is set now; ignore later extensions.

        For polls: a fetched result frees resources on the server, so a poll should not wait long.
        """
        if (left := min(self.left_s, at_most_s)) > 0:
            await _spread(left)


async def _spread(delay_s: float) -> None:
    """Sleep with jitter: requests that return at the same moment would be rate-limited again."""
    await asyncio.sleep(delay_s + min(0.25 * delay_s, MAX_SPREAD_S) * random.random())


class BillingPause:
    """Treats 402 as a pause for `max_pause_s`, and as an error after that."""

    def __init__(self, max_pause_s: float = 3600.0, clock: Callable[[], float] = monotonic) -> None:
        self.max_pause_s = max_pause_s
        self._clock = clock
        self._opened = -math.inf
        self._last = -math.inf

    @property
    def ends_at(self) -> float:
        """When a 402 counts as an error."""
        return self._opened + self.max_pause_s

    def pause_s(self) -> float | None:
        """Seconds to wait after a 402, or None if the pause has lasted `max_pause_s`."""
        now = self._clock()
        if now - self._last > BILLING_RESET_S:
            self._opened = now
        self._last = now
        return BILLING_PAUSE_S if now - self._opened < self.max_pause_s else None


def input_bytes(model_input: ModelInput, *, per_token: int = 4) -> int:
    """Approximate size of the input on the wire: 4 bytes per token in protobuf, 10 in JSON."""
    size = 0
    for chunk in model_input.chunks:
        if isinstance(chunk, EncodedTextChunk):
            size += per_token * chunk.length
        elif isinstance(chunk, ImageChunk):
            size += len(chunk.data)
        elif isinstance(chunk, DmelChunk):
            size += len(chunk.dmel)
        else:
            size += len(chunk.location)
    return size


@dataclass(eq=False)
class ServiceLimits:
    """Shared by all requests to the same service with the same credential."""

    backoff: Backoff = field(default_factory=Backoff)
    billing: BillingPause = field(default_factory=BillingPause)
    #: Why the service sent the last 429.
    busy: Cause = field(default_factory=lambda: Cause("busy", "the service", "it is busy"))
    #: What the user is told about waits.
    waiting: Waiting = field(default_factory=Waiting)
    #: Circuit breakers, if the settings enable them; each policy has its own.
    breakers: dict[tuple[Kind, BreakerPolicy], Breaker] = field(default_factory=dict)
    #: Running samples, from submission to result.
    samples: FairLimiter = field(default_factory=lambda: FairLimiter(2_000))
    #: Fetches of results that are ready: more would only open more connections.
    fetches: Budget = field(default_factory=lambda: Budget(64))
    #: Samples being submitted shortly after a 429.
    slow_start: Budget = field(default_factory=lambda: Budget(10))
    #: Bytes of prompts being submitted.
    sample_bytes: Budget = field(default_factory=lambda: Budget(10 * 1024 * 1024))
    #: Bytes of training data being submitted.
    training_bytes: Budget = field(default_factory=lambda: Budget(50_000_000))
    #: Bytes of results being fetched.
    result_bytes: Budget = field(default_factory=lambda: Budget(50 * 1024 * 1024))


class ServiceLimitsTable:
    """The limits of one event loop, by service and credential; unused ones are dropped."""

    def __init__(self) -> None:
        self._limits: WeakValueDictionary[tuple[str, str], ServiceLimits] = WeakValueDictionary()

    def get(self, key: tuple[str, str]) -> ServiceLimits:
        limits = self._limits.get(key)
        if limits is None:
            limits = self._limits[key] = ServiceLimits()
        return limits
