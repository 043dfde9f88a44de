"""Who samples next: so many at a time, in order within a client, in turn between clients."""

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
from tinkex.wire.inputs import DmelChunk, EncodedTextChunk, ImageChunk, ModelInput

E = TypeVar("E")

NO_LIMIT = 2**31


class ClientQueue(Generic[E]):
    """
    What one client has waiting, first come, first served.

    What waits is an entry in a queue and nothing more: no task, no socket. `begin` starts one,
    and says whether there was anything to start; it may have been taken back meanwhile.
    """

    def __init__(self, begin: Callable[[E], bool], limit: int | None = None) -> None:
        self.begin = begin
        #: How many of this line may be inside together.
        self.limit = NO_LIMIT if limit is None else limit
        self.waiting: deque[E] = deque()
        self.running = 0
        self._is_ready = False

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running


class FairLimiter:
    """
    Lets in at most `size` at a time from any number of lines.

    Lines take turns, one entry each, so that a client with ten thousand waiting does not keep
    another from its first. Belongs to one event loop.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0
        #: Lines that have something waiting and are below their own limit.
        self._ready: deque[ClientQueue[Any]] = deque()

    def enqueue(self, queue: ClientQueue[E], entries: Iterable[E]) -> None:
        queue.waiting.extend(entries)
        self._add_ready(queue)
        self._admit()

    def release(self, queue: ClientQueue[Any]) -> None:
        """One that `line.begin` started has ended."""
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
                if queue.begin(queue.waiting.popleft()):
                    queue.running += 1
                    self.used += 1
                    break
            self._add_ready(queue)


# MERGED: How much may be in flight, and backing off together when the service says "busy".


#: For this long after a back-off samples are sent a few at a time.
SLOW_START_S = 10.0
#: Those who wait for the same moment come back within this long at most.
MAX_SPREAD_S = 15.0
#: While a 402 is tolerated, this long between attempts.
BILLING_PAUSE_S = 5.0
#: Users are told this often that they are paused.
BILLING_WARN_S = 60.0
#: This long without a 402 closes the window; the next one opens a fresh window.
BILLING_RESET_S = 300.0


class Budget:
    """
    A number of bytes (or of anything) that may be in flight together.

    First come, first served. A request larger than the whole budget waits until
    nothing else is in flight and then passes alone: slow, rather than impossible.
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
    """One moment before which nobody sends, shared by all who were told that it is busy."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._until = -math.inf

    def extend(self, delay_s: float) -> None:
        """Nobody sends for `delay_s` from now; a longer wish made earlier stays."""
        self._until = max(self._until, self._clock() + delay_s)

    @property
    def left_s(self) -> float:
        return max(0.0, self._until - self._clock())

    @property
    def in_slow_start(self) -> bool:
        """Whether the service was busy a moment ago, and may be again."""
        return self._clock() < self._until + SLOW_START_S

    async def wait(self, at_most_s: float = math.inf) -> None:
        """Until nobody is told to wait any more, however often the moment moves meanwhile."""
        ends = self._clock() + at_most_s
        while (left := min(self.left_s, ends - self._clock())) > 0:
            await _spread(left)

    async def wait_once(self, at_most_s: float) -> None:
        """Until the moment that is known now. For polls: they end what keeps the service busy."""
        if (left := min(self.left_s, at_most_s)) > 0:
            await _spread(left)


async def _spread(delay_s: float) -> None:
    """Sleep, not all to the same moment: the first ones back would be told "busy" again."""
    await asyncio.sleep(delay_s + min(0.25 * delay_s, MAX_SPREAD_S) * random.random())


class BillingPause:
    """402 means "paused" for a while, and an error after that."""

    def __init__(self, max_pause_s: float = 3600.0, clock: Callable[[], float] = monotonic) -> None:
        self.max_pause_s = max_pause_s
        self._clock = clock
        self._opened = -math.inf
        self._last = -math.inf
        self._warned_at = -math.inf

    def should_warn(self) -> bool:
        """Whether it is time to tell the user that things are paused, once for all who wait."""
        now = self._clock()
        if now - self._warned_at < BILLING_WARN_S:
            return False
        self._warned_at = now
        return True

    def pause_s(self) -> float | None:
        """Seconds to wait after a 402, or None when patience has run out."""
        now = self._clock()
        if now - self._last > BILLING_RESET_S:
            self._opened = now
        self._last = now
        return BILLING_PAUSE_S if now - self._opened < self.max_pause_s else None


def input_bytes(model_input: ModelInput, *, per_token: int = 4) -> int:
    """About how many bytes the input has on the wire: 4 for a token in protobuf, 10 in JSON."""
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
    """What everything with the same service and the same credential shares."""

    backoff: Backoff = field(default_factory=Backoff)
    billing: BillingPause = field(default_factory=BillingPause)
    #: When the user was last told of a long wait.
    long_wait_warned_at: float = -math.inf
    #: Where settings ask for them, by kind of work; each policy has its own.
    breakers: dict[tuple[Kind, BreakerPolicy], Breaker] = field(default_factory=dict)
    #: Samples under way, submission to result.
    samples: FairLimiter = field(default_factory=lambda: FairLimiter(2_000))
    #: Results that are known to be there, being fetched: many would only open connections.
    fetches: Budget = field(default_factory=lambda: Budget(64))
    #: Samples being submitted while the service was busy a moment ago.
    slow_start: Budget = field(default_factory=lambda: Budget(10))
    #: Bytes of prompts being submitted.
    sample_bytes: Budget = field(default_factory=lambda: Budget(10 * 1024 * 1024))
    #: Bytes of training data being submitted.
    training_bytes: Budget = field(default_factory=lambda: Budget(50_000_000))
    #: Bytes of results being fetched.
    result_bytes: Budget = field(default_factory=lambda: Budget(50 * 1024 * 1024))


class ServiceLimitsTable:
    """The lanes of one event loop; one goes when the last client that uses it goes."""

    def __init__(self) -> None:
        self._limits: WeakValueDictionary[tuple[str, str], ServiceLimits] = WeakValueDictionary()

    def get(self, key: tuple[str, str]) -> ServiceLimits:
        limits = self._limits.get(key)
        if limits is None:
            limits = self._limits[key] = ServiceLimits()
        return limits
