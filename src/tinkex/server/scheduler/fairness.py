"""
Limits per owner, and fair sharing of an engine between owners.

- `over_limit` and `server_full` decide whether one more request is accepted.
- `TrainingSlots` decides which owner's model trains next, so that many models of one owner do not
  starve the only model of another. The policy is `FairShares`.
- `Admission` decides which sample goes to the engine next when not all can go at once.
"""

import asyncio
import contextlib
import itertools
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Literal

from tinkex.server.executor import EngineLost
from tinkex.wire.engine_settings import EngineSettings

if TYPE_CHECKING:
    from tinkex.server.scheduler.model_states import ModelState
    from tinkex.server.scheduler.step_queue import StepBatch

# Models that train on an engine at the same time: as many as fit into one efficient batch.
TRAINING_SLOTS = 32
# Maximum slots of one owner while other owners want slots too. So a new owner waits for a few
# batches only, however many steps are queued.
CONTESTED_SLOTS_PER_OWNER = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one owner may have at once; 0 means no limit."""

    max_requests: int = 0
    max_queued_tokens: int = 0
    max_samples: int = 0
    max_training: int = 0

    @classmethod
    def of(cls, settings: object, own: Mapping[str, int]) -> "Limits":
        """The server's limits, overridden by those of a key."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: own.get(name, getattr(settings, name)) for name in names})


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """The accepted and unfinished work of one owner."""

    requests: int = 0
    tokens: int = 0
    #: Number of sequences being sampled.
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
    """Why one more request would exceed the owner's limits; None when it fits."""
    if not load.requests:
        # An owner's only request is always accepted; if it exceeds the token limit by itself, it
        # could never run otherwise.
        return None
    total = load + new
    for has, more, limit, what in (
        (load.requests, 1, limits.max_requests, "requests that are not finished"),
        (load.tokens, new.tokens, limits.max_queued_tokens, "tokens in unfinished requests"),
        (load.samples, new.samples, limits.max_samples, "sequences being sampled"),
    ):
        if limit and more and has + more > limit:
            return (
                f"you have {has} {what}, and {limit} are allowed. Send this again when some are "
                f"done ({total.requests - 1} of your requests are in progress)."
            )
    return None


def server_full(unfinished: int, limit: int, *, own: int, owners: int) -> str | None:
    """
    Why the server accepts nothing more from this owner; None when it does.

    `owners` is how many owners have unfinished requests, including this one. An owner with less than
    an even share is accepted up to twice the limit, so no owner can fill the server for the others.
    """
    if not limit or unfinished < limit or (own < limit // owners and unfinished < 2 * limit):
        return None
    return (
        f"the server has {unfinished} requests that are not finished, and takes {limit} at once. "
        "Send this again when some are done."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueState:
    """`queue_state` of the protocol, and the reason."""

    state: Literal["active", "paused_capacity", "paused_rate_limit"]
    reason: str | None = None


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class SlotRequest:
    """One model with a step batch that is ready to run."""

    owner: str
    #: How many models of this owner may train at once; 0 means no limit.
    max_running: int = 0


@dataclass(slots=True)
class FairShares:
    """
    The training slots of one engine, shared evenly by owners. Pure logic: no clock, no waiting.

    The next slot goes to the owner with the fewest slots; among equals to the one with the least
    compute time; then to the earliest request. An owner that was idle starts with the
    least compute time of the active owners, so it does not gain priority by being idle.
    """

    slots: int = TRAINING_SLOTS
    contested_slots: int = CONTESTED_SLOTS_PER_OWNER
    _waiting: list[SlotRequest] = field(default_factory=list)
    _running: dict[SlotRequest, None] = field(default_factory=dict)
    #: Seconds of compute by owner, since the last time that no owner wanted a slot.
    _used_s: dict[str, float] = field(default_factory=dict)

    def add(self, request: SlotRequest) -> None:
        owners = self._owners()
        if request.owner not in owners:
            least = min((self._used_s[owner] for owner in owners), default=0.0)
            self._used_s[request.owner] = max(least, self._used_s.get(request.owner, 0.0))
        self._waiting.append(request)

    def grant_next(self) -> SlotRequest | None:
        """Give a slot to the next request; None while no request may have one."""
        if len(self._running) >= self.slots:
            return None
        taken, contested = self._slots_by_owner(), self.contested
        ready = [one for one in self._waiting if self._blocked(one, taken, contested) is None]
        if not ready:
            return None
        # `min` keeps the first of equals.
        best = min(ready, key=lambda one: (taken[one.owner], self._used_s[one.owner]))
        self._waiting.remove(best)
        self._running[best] = None
        return best

    def release(self, request: SlotRequest, *, used_s: float) -> None:
        """A batch has finished, or was given up while it waited."""
        if request in self._running:
            del self._running[request]
            self._used_s[request.owner] += used_s
        elif request in self._waiting:
            self._waiting.remove(request)
        if not self._owners():
            self._used_s.clear()

    def queue_state(self, request: SlotRequest) -> QueueState:
        if request not in self._waiting:
            return QueueState(state="active")
        blocked = self._blocked(request, self._slots_by_owner(), self.contested)
        return blocked or QueueState(state="active")

    @property
    def contested(self) -> bool:
        """Whether more than one owner wants slots."""
        return len(self._owners()) > 1

    def _blocked(
        self, request: SlotRequest, taken: Counter[str], contested: bool
    ) -> QueueState | None:
        own = taken[request.owner]
        if request.max_running and own >= request.max_running:
            return QueueState(
                state="paused_rate_limit",
                reason=f"{own} of your models are training, and {request.max_running} may train "
                "at once",
            )
        if len(self._running) >= self.slots:
            return QueueState(
                state="paused_capacity",
                reason=f"{len(self._running)} models are training, and {len(self._waiting)} wait",
            )
        if contested and own >= self.contested_slots:
            return QueueState(
                state="paused_capacity",
                reason=f"{own} of your models are training, and other owners want their share",
            )
        return None

    def _slots_by_owner(self) -> Counter[str]:
        return Counter(request.owner for request in self._running)

    def _owners(self) -> set[str]:
        return {one.owner for one in self._waiting} | {one.owner for one in self._running}


class TrainingLimits:
    """How many models of an owner may train at once on one engine; 0 means no limit."""

    def __init__(self, default: int = 0) -> None:
        self._default = default
        self._by_owner: dict[str, int] = {}

    def set(self, owner: str, max_training: int) -> None:
        if max_training == self._default:
            self._by_owner.pop(owner, None)
        else:
            self._by_owner[owner] = max_training

    def of(self, owner: str) -> int:
        return self._by_owner.get(owner, self._default)


class TrainingSlots:
    """The training slots of one engine: a step batch runs once it has one."""

    def __init__(self, limits: TrainingLimits) -> None:
        self._limits = limits
        self._shares = FairShares()
        self._granted: dict[SlotRequest, asyncio.Event] = {}
        #: The slot request of each step that has a slot or waits for one, by request id.
        self._requests: dict[str, SlotRequest] = {}
        #: Called when a slot is released, while models are being rebuilt.
        self.on_release: Callable[[], None] | None = None

    @contextlib.asynccontextmanager
    async def acquire(self, state: "ModelState", batch: "StepBatch") -> AsyncIterator[None]:
        """Hold a slot; waits until the owner is next."""
        owner = state.model.owner
        request = SlotRequest(owner=owner, max_running=self._limits.of(owner))
        granted = self._granted[request] = asyncio.Event()
        self._requests.update({step.request_id: request for step in batch.steps})
        compute_s = state.compute_s
        self._shares.add(request)
        try:
            self._grant()
            await granted.wait()
            yield
        finally:
            del self._granted[request]
            for step in batch.steps:
                self._requests.pop(step.request_id, None)
            self._shares.release(request, used_s=state.compute_s - compute_s)
            self._grant()
            if self.on_release is not None:
                self.on_release()

    @property
    def contested(self) -> bool:
        """Whether several owners train on this engine, or wait to."""
        return self._shares.contested

    def queue_state(self, request_id: str) -> QueueState | None:
        """The state of a step that has a slot or waits for one; None for anything else."""
        request = self._requests.get(request_id)
        return None if request is None else self._shares.queue_state(request)

    def _grant(self) -> None:
        while (request := self._shares.grant_next()) is not None:
            self._granted[request].set()


class Admission:
    """
    Decides which sample goes to one engine next.

    A sample is admitted immediately if the engine is up and has few samples of the same owner.
    Otherwise it waits. Waiting samples are admitted in turn: first those of the owner with the
    fewest samples on the engine. So thousands of samples of one owner do not delay a single one of
    another.
    """

    def __init__(self, ready: Callable[[], Awaitable[object]], *, max_sequences: int = 0) -> None:
        self._ready = ready
        #: Maximum samples of one owner on the engine: more than it runs at once, so that it is
        #: never idle, and few enough that samples of other owners reach it soon.
        self._max_per_owner = 2 * (max_sequences or EngineSettings.max_sequences)
        self._up = False
        self._admitted: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._starting: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        """Wait for admission; the sample may run inside the `with` block."""
        await self._enter(owner)
        try:
            yield
        finally:
            self._leave(owner)

    async def _enter(self, owner: str) -> None:
        if self._up and owner not in self._waiting and self._admitted[owner] < self._max_per_owner:
            self._admitted[owner] += 1
            return
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(admitted)
        self._start_for_waiting()
        try:
            await admitted
        except asyncio.CancelledError:
            if admitted.done() and not admitted.cancelled():
                self._leave(owner)
            raise

    def _leave(self, owner: str) -> None:
        self._admitted[owner] -= 1
        if not self._admitted[owner]:
            del self._admitted[owner]
        self._admit()

    def engine_lost(self) -> None:
        """The engine crashed: everything waits for the next one."""
        self._up = False
        # Restart it for the waiting samples. The lost requests may have failed, and then they would
        # not restart it.
        self._start_for_waiting()

    def send_elsewhere(self, reason: type[Exception]) -> None:
        """The engine stays down: what waits for it gets this exception, and goes to another one."""
        waiting, self._waiting = self._waiting, {}
        self._up = False
        for admitted in itertools.chain.from_iterable(waiting.values()):
            if not admitted.done():
                admitted.set_exception(reason())

    def close(self) -> None:
        if self._starting is not None:
            self._starting.cancel()

    def _start_for_waiting(self) -> None:
        if self._waiting and not self._up and self._starting is None:
            self._starting = asyncio.create_task(self._start())

    async def _start(self) -> None:
        try:
            await self._ready()
            self._up = True
        except EngineLost:
            pass  # given up: `send_elsewhere` has moved those that waited until then
        except Exception:  # noqa: BLE001  the admitted requests get the same error, and report it
            self._up = True
        finally:
            self._starting = None
        self._admit()
        self._start_for_waiting()

    def _admit(self) -> None:
        while self._up and self._waiting and (owner := self._next_owner()) is not None:
            waiting = self._waiting[owner]
            admitted = waiting.popleft()
            if not waiting:
                del self._waiting[owner]
            if not admitted.cancelled():
                self._admitted[owner] += 1
                admitted.set_result(None)

    def _next_owner(self) -> str | None:
        ready = (owner for owner in self._waiting if self._admitted[owner] < self._max_per_owner)
        return min(ready, key=self._admitted.__getitem__, default=None)
