"""
Who may ask for how much, and whose turn to train is next. No clock, no sockets, no SQL.

Two decisions. `over_limit`: may this owner have one more request accepted? `FairShares`: which owner's
model goes to the engine next, so that many models of one do not starve the only one of another.
"""

import asyncio
import contextlib
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tinkex.server.scheduler.model_worker import ModelState
    from tinkex.server.scheduler.step_queue import StepBatch

# Models that are with an engine at once: as many as it can put into one batch to advantage.
TRAINING_SLOTS = 32
# Of these each owner has no more than so many while others want some too: then the wait of a
# newcomer is a few turns long, whatever is queued.
CONTESTED_SLOTS_PER_OWNER = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one owner may have at once; 0 is no limit."""

    max_requests: int = 0
    max_queued_tokens: int = 0
    max_samples: int = 0
    max_training: int = 0

    @classmethod
    def of(cls, settings: object, own: Mapping[str, int]) -> "Limits":
        """The server's, with those of a key in their place."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: own.get(name, getattr(settings, name)) for name in names})


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What one owner has accepted and not finished."""

    requests: int = 0
    tokens: int = 0
    #: Sequences being sampled.
    samples: int = 0

    def __add__(self, other: "Load") -> "Load":
        return Load(
            requests=self.requests + other.requests,
            tokens=self.tokens + other.tokens,
            samples=self.samples + other.samples,
        )

    def __sub__(self, other: "Load") -> "Load":
        return self + Load(requests=-other.requests, tokens=-other.tokens, samples=-other.samples)


def over_limit(load: Load, new: Load, limits: Limits) -> str | None:
    """Why one more request is too many; None when it fits."""
    if not load.requests:
        # Alone, it may be as large as it is: otherwise it would never come in.
        return None
    total = load + new
    for has, more, most, what in (
        (load.requests, 1, limits.max_requests, "requests that are not finished"),
        (load.tokens, new.tokens, limits.max_queued_tokens, "tokens in unfinished requests"),
        (load.samples, new.samples, limits.max_samples, "sequences being sampled"),
    ):
        if most and more and has + more > most:
            return (
                f"you have {has} {what}, and {most} are allowed. Send this again when some are "
                f"done ({total.requests - 1} requests are on their way)."
            )
    return None


def server_full(unfinished: int, most: int, *, own: int, owners: int) -> str | None:
    """
    Why the server takes nothing more from this owner; None when it does.

    `owners` have something unfinished, or ask now. Who has less than an even share of a full
    server is let in, up to twice what it takes: nobody can close it to others by filling it.
    """
    if not most or unfinished < most or (own < most // owners and unfinished < 2 * most):
        return None
    return (
        f"the server has {unfinished} requests that are not finished, and takes {most} at once. "
        "Send this again when some are done."
    )


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class SlotRequest:
    """One model that has a turn to take."""

    owner: str
    #: Models of this owner that may train at once; 0 is no limit.
    most: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueState:
    """Why something waits: `queue_state` of the protocol, and the reason."""

    state: Literal["active", "paused_capacity", "paused_rate_limit"]
    reason: str | None = None


@dataclass(slots=True)
class FairShares:
    """
    The places of one engine for training, shared evenly by owners.

    The next place goes to the owner with the fewest taken; among equals, to the one who has used
    the least time; among those, to who asked first. Time while an owner wanted nothing is not
    saved up.
    """

    places: int = TRAINING_SLOTS
    contested_places: int = CONTESTED_SLOTS_PER_OWNER
    _waiting: list[SlotRequest] = field(default_factory=list)
    _running: dict[SlotRequest, None] = field(default_factory=dict)
    #: Seconds of computing, by owner, of those who want some now.
    _used_s: dict[str, float] = field(default_factory=dict)

    def ask(self, ask: SlotRequest) -> None:
        """A turn is ready to be taken."""
        present = self._present()
        if ask.owner not in present:
            least = min((self._used_s[owner] for owner in present), default=0.0)
            self._used_s[ask.owner] = max(least, self._used_s.get(ask.owner, 0.0))
        self._waiting.append(ask)

    def take(self) -> SlotRequest | None:
        """Who goes next; None while all places are taken or nobody may."""
        if len(self._running) >= self.places:
            return None
        taken, contested = self._taken(), self.contested
        free = [ask for ask in self._waiting if self._why_not(ask, taken, contested) is None]
        if not free:
            return None
        # `min` keeps the first of equals.
        best = min(free, key=lambda ask: (taken[ask.owner], self._used_s[ask.owner]))
        self._waiting.remove(best)
        self._running[best] = None
        return best

    def done(self, ask: SlotRequest, *, used_s: float) -> None:
        """A turn is over, or given up while it waited."""
        if ask in self._running:
            del self._running[ask]
            self._used_s[ask.owner] += used_s
        elif ask in self._waiting:
            self._waiting.remove(ask)
        if not self._present():
            self._used_s.clear()

    def why(self, ask: SlotRequest) -> QueueState:
        """How an ask stands."""
        if ask not in self._waiting:
            return QueueState(state="active")
        waits = self._why_not(ask, self._taken(), self.contested)
        return waits or QueueState(state="active")

    @property
    def contested(self) -> bool:
        """Whether more than one owner wants places."""
        return len(self._present()) > 1

    def _why_not(self, ask: SlotRequest, taken: Counter[str], contested: bool) -> QueueState | None:
        mine = taken[ask.owner]
        if ask.most and mine >= ask.most:
            return QueueState(
                state="paused_rate_limit",
                reason=f"{mine} of your models are training, and {ask.most} may at once",
            )
        if len(self._running) >= self.places:
            return QueueState(
                state="paused_capacity",
                reason=f"{len(self._running)} models are training, and {len(self._waiting)} wait",
            )
        if contested and mine >= self.contested_places:
            return QueueState(
                state="paused_capacity",
                reason=f"{mine} of your models are training, and other owners want their share",
            )
        return None

    def _taken(self) -> Counter[str]:
        return Counter(ask.owner for ask in self._running)

    def _present(self) -> set[str]:
        return {ask.owner for ask in self._waiting} | {ask.owner for ask in self._running}


# MERGED: TrainingSlots for training in each engine, handed out fairly: a turn runs once it has one.


class TrainingSlots:
    """Who is next is decided in `shares`; this wakes them."""

    def __init__(self, *, max_training: int = 0) -> None:
        #: Of each owner who was not given a number of their own; 0 is any number.
        self._max_training_each = max_training
        self._shares: defaultdict[str, FairShares] = defaultdict(FairShares)
        #: ModelWorkers that have a place, or wait for one; and the requests in those turns.
        self._given: dict[SlotRequest, asyncio.Event] = {}
        self._asking: dict[str, tuple[FairShares, SlotRequest]] = {}
        self._max_training: dict[str, int] = {}
        #: Called when a turn is over: others may do what they could not before.
        self.freed: Callable[[], None] = lambda: None

    def allow(self, owner: str, max_training: int) -> None:
        """From now on so many models of this owner may train at once; 0 is any number."""
        if max_training == self._max_training_each:
            self._max_training.pop(owner, None)
        else:
            self._max_training[owner] = max_training

    def why(self, request_id: str) -> QueueState | None:
        """How a request stands that has a place or waits for one."""
        if (held := self._asking.get(request_id)) is None:
            return None
        shares, ask = held
        return shares.why(ask)

    def contested(self, base_model: str) -> bool:
        """Whether several owners train on this engine, or wait to."""
        return self._shares[base_model].contested

    @contextlib.asynccontextmanager
    async def place(self, run: "ModelState", turn: "StepBatch") -> AsyncIterator[None]:
        """One of the engine's places for training, once this owner's turn for it has come."""
        shares = self._shares[run.model.base_model]
        owner = run.model.owner
        ask = SlotRequest(owner=owner, most=self._max_training.get(owner, self._max_training_each))
        given = self._given[ask] = asyncio.Event()
        self._asking.update({step.request_id: (shares, ask) for step in turn.steps})
        computed_s = run.computed_s
        shares.ask(ask)
        try:
            self._give(shares)
            await given.wait()
            yield
        finally:
            del self._given[ask]
            for step in turn.steps:
                self._asking.pop(step.request_id, None)
            shares.done(ask, used_s=run.computed_s - computed_s)
            self._give(shares)
            self.freed()

    def _give(self, shares: FairShares) -> None:
        while (ask := shares.take()) is not None:
            self._given[ask].set()


# MERGED: Which request outside the order of steps goes to an engine next, when not all can go at once. An engine that has just started is given what waits by turns of owners, those who have the least with it first. So one owner's thousands do not hold up another's single sample.


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
