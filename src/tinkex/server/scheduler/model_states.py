"""The models that this process has opened: the state of each, restored from its log."""

import asyncio
import json
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from tinkex.server.queued_request import Cause
from tinkex.server.scheduler.engine_client import EngineClient, create_order
from tinkex.server.scheduler.results import Unstored
from tinkex.server.scheduler.step_queue import StepQueue, model_deleted, restore_queue
from tinkex.server.store import Model, Ownership, Store
from tinkex.wire.proto.frames_pb2 import Done, Order
from tinkex.wire.text_format import format_bytes

if TYPE_CHECKING:
    from tinkex.server.scheduler.engine_scheduler import EngineScheduler
    from tinkex.server.scheduler.model_copy import ModelCopy

log = logging.getLogger("tinkex.server.scheduler")

#: A snapshot may be late by this fraction of the interval, to be taken after an optimizer step.
MAX_DELAY_FRACTION = 10
#: Snapshots up to this size are written whenever they are due.
SMALL_SNAPSHOT_BYTES = 64 * 2**20
#: The speed of an ordinary disk or object store, and how many times longer than writing a larger
#: snapshot takes on it the steps before it should have computed.
WRITE_BYTES_PER_S = 200e6
REPLAY_PER_WRITE = 20


def is_worth_writing(size: int, *, payload_bytes: int, compute_s: float) -> bool:
    """
    Whether a snapshot saves more than it costs, after steps with these payloads and computation.

    It replaces their payloads on the disk, and computing them again after a crash.
    """
    small = max(SMALL_SNAPSHOT_BYTES, payload_bytes)
    return size <= small or compute_s >= replay_worth_s(size)


def replay_worth_s(size: int) -> float:
    """The computation that a snapshot of this size should save: then writing takes 5 % of the time."""
    return REPLAY_PER_WRITE * size / WRITE_BYTES_PER_S


@dataclass(slots=True)
class ModelSnapshots:
    """When the next snapshot of a model is due, and the one that is being written."""

    #: Steps since the last one, the bytes of their payloads, and the seconds that engines computed.
    steps: int = 0
    payload_bytes: int = 0
    compute_s: float = 0.0
    #: The bytes of one. Known once an engine has made the model.
    size: int = 0
    #: Whether the last step was an optimizer step. Then there are no gradients to write.
    after_optim_step: bool = False
    #: Writes one while later steps run.
    writing: asyncio.Task[None] | None = None

    def is_due(self, steps: int, payload_bytes: int) -> bool:
        """Whether one is due after this many steps or bytes of payloads; 0 means never."""
        if self.writing is not None and not self.writing.done():
            return False
        size = self.size
        if not self.after_optim_step:
            # Wait a while for an optimizer step: after it, there are no gradients to write.
            steps += steps // MAX_DELAY_FRACTION
            payload_bytes += payload_bytes // MAX_DELAY_FRACTION
            size += size // MAX_DELAY_FRACTION
        due = 0 < steps <= self.steps or 0 < payload_bytes <= self.payload_bytes
        return due and is_worth_writing(
            size, payload_bytes=self.payload_bytes, compute_s=self.compute_s
        )

    def restart(self) -> None:
        """One is taken now; the next one is due after the whole interval."""
        self.steps = self.payload_bytes = 0
        self.compute_s = 0.0

    async def written(self) -> None:
        """Wait until none is being written."""
        if self.writing is not None:
            await asyncio.wait({self.writing})
            self.writing = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Copied:
    """A copy of a model that an engine has: up to which step of the log."""

    incarnation: int
    position: int


@dataclass(slots=True)
class ModelState:
    """A model that has had work since this process started. Its worker changes it."""

    model: Model
    queue: StepQueue
    #: The engine that runs its steps.
    engine: "EngineScheduler"
    #: Under which term this process has it; None on a server that is alone on its database.
    term: int | None = None
    #: Whether another worker has it now. Then nothing that is computed here counts.
    disowned: bool = False
    #: The engine incarnation that has this model in memory, in the state that its log describes.
    loaded_in: int | None = None
    #: The copy that was made while another worker had the model; the first rebuild completes it.
    copied: Copied | None = None
    worker: asyncio.Task[None] | None = None
    #: What its worker does before the next batch of steps.
    between: deque[Callable[[], Awaitable[None]]] = field(default_factory=deque)
    gap_timer: asyncio.TimerHandle | None = None
    #: Results in the order of their steps, and the task that stores them.
    unstored: deque[Unstored] = field(default_factory=deque)
    storing: asyncio.Task[None] | None = None
    #: Whether a result could not be stored. Then running steps are requeued, and the model is
    #: rebuilt.
    rewinding: bool = False
    #: Why it cannot be rebuilt: its log ends engines. Then all its steps fail.
    rebuild_error: str | None = None
    #: Seconds that engines computed for it.
    compute_s: float = 0.0
    #: When a step was last sent to an engine, by the monotonic clock.
    last_step_s: float = 0.0
    snapshots: ModelSnapshots = field(default_factory=ModelSnapshots)

    @property
    def is_idle(self) -> bool:
        """Whether it has no running or waiting steps, and no results that are not stored."""
        has_steps = self.queue.waiting or self.queue.running or self.queue.refused
        return self.worker is None and self.storing is None and not has_steps

    @property
    def is_movable(self) -> bool:
        """Whether another replica can take it: it is loaded, or has nothing to do."""
        return self.loaded_in is not None or self.is_idle

    async def send(
        self, engine: EngineClient, order: Order, incarnation: int
    ) -> asyncio.Future[Done]:
        """Send an order for this model to the incarnation that has it."""
        future = await engine.send(order, counted=True, incarnation=incarnation)
        future.add_done_callback(self._count_compute)
        return future

    async def run(self, engine: EngineClient, order: Order, incarnation: int) -> Done:
        return await (await self.send(engine, order, incarnation))

    def _count_compute(self, future: asyncio.Future[Done]) -> None:
        if not future.cancelled() and future.exception() is None:
            self.compute_s += future.result().compute_s
            self.snapshots.compute_s += future.result().compute_s

    async def create(self, engine: EngineClient, incarnation: int) -> None:
        """Make the model in the memory of an engine, without weights of its own yet."""
        done = await self.run(engine, create_order(self.model), incarnation)
        size = json.loads(done.result).get("snapshot_bytes", 0)
        if size != self.snapshots.size and size > SMALL_SNAPSHOT_BYTES:
            log.info(
                "a snapshot of %s takes %s: none is written before %.0f s of computation, or requests "
                "of this size",
                *(self.model.model_id, format_bytes(size), replay_worth_s(size)),
            )
        self.snapshots.size = size

    async def results_stored(self) -> None:
        """Wait until every result of this model is stored."""
        while self.storing is not None:
            await asyncio.wait({self.storing})


class ModelStates:
    """The models that have had work since this process started, restored from their logs."""

    def __init__(
        self,
        store: Store,
        engine_of: Callable[[str], "EngineScheduler"],
        ownership: Ownership | None,
    ) -> None:
        self._store = store
        self._ownership = ownership
        #: The engine for a model of this base model.
        self._engine_of = engine_of
        self._states: dict[str, ModelState] = {}
        #: Held while a model is opened.
        self._opening: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        #: Models that another worker has now, until nothing of them runs here.
        self.leaving: dict[str, asyncio.Task[None]] = {}
        #: The copy of a model that was made here while another worker had it; a worker sets it.
        self.take_copy: Callable[[str], Awaitable[ModelCopy | None]] | None = None

    def get(self, model_id: str) -> ModelState | None:
        """The state if this process has opened the model."""
        return self._states.get(model_id)

    def opened(self) -> Iterable[ModelState]:
        return self._states.values()

    def opened_by_id(self) -> Iterable[tuple[str, ModelState]]:
        return self._states.items()

    def forget(self, state: ModelState) -> None:
        """Drop a state, unless something of it exists only in memory."""
        model_id = state.model.model_id
        idle = state.is_idle or state.disowned
        if not idle or self._states.get(model_id) is not state:
            return
        del self._states[model_id]
        state.engine.models.pop(model_id, None)

    async def open(self, model_id: str, *, first_seq: int = 0) -> ModelState:
        """Open a model; `first_seq` is the next number of a model whose log was deleted."""
        async with self._opening.setdefault(model_id, asyncio.Lock()):
            if (state := self._states.get(model_id)) is not None:
                return state
            if (leaving := self.leaving.get(model_id)) is not None:
                # It comes back.
                await asyncio.wait({leaving})
            model = await self._store.models.model(model_id)
            if model is None:
                raise LookupError(f"model {model_id} is not in the database")
            term = None
            if self._ownership is not None:
                # Before the log is read: whoever had the model adds nothing to it from now on.
                term = await self._ownership.take(model_id)
            snapshot = await self._store.snapshots.newest(model_id)
            after = -1 if snapshot is None else snapshot.seq_id
            finished = [
                step
                for step in await self._store.requests.log(model_id, after=after)
                # The queue had already passed a late step.
                if step.outcome is not None and step.outcome.cause is not Cause.LATE
            ]
            gradient_error = None if snapshot is None else snapshot.spoiled
            queue = restore_queue(finished, next_seq=after + 1, gradient_error=gradient_error)
            if snapshot is None and not await self._store.requests.has_steps(model_id):
                queue.creation_error, queue.next_seq = model_deleted(), first_seq
            state = await self._from_copy(model_id)
            if state is None:
                state = ModelState(
                    model=model, queue=queue, engine=self._engine_of(model.base_model)
                )
            state.queue, state.term, state.snapshots.steps = queue, term, len(finished)
            self._states[model_id] = state.engine.models[model_id] = state
            return state

    async def _from_copy(self, model_id: str) -> ModelState | None:
        """The state of a copy here, if there is one; its engine lacks only the last steps."""
        copy = None if self.take_copy is None else await self.take_copy(model_id)
        if copy is None or copy.incarnation is None or copy.position is None:
            return None
        copy.state.copied = Copied(incarnation=copy.incarnation, position=copy.position)
        return copy.state
