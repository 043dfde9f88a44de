"""
Rebuilds models after an engine restart.

A restarted engine has no models in memory. Before the next step of a model, its state is rebuilt:
the last snapshot is restored, and the steps since then are replayed from the log.
"""

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from tinkex.server.executor import EngineLost, EngineRefused, WorkFailed
from tinkex.server.queued_request import PASSES, Kind, QueuedRequest
from tinkex.server.scheduler.checkpoints import CheckpointSteps
from tinkex.server.scheduler.engine_client import (
    Attempt,
    EngineClient,
    clear_gradients_order,
    payload_size,
    register_loss_order,
    training_order,
)
from tinkex.server.scheduler.fairness import TrainingSlots
from tinkex.server.scheduler.results import MAX_ATTEMPTS, Execution
from tinkex.server.scheduler.step_queue import Replay, StepBatch, replay_of
from tinkex.server.store import CustomLoss
from tinkex.wire.proto import frames_pb2
from tinkex.wire.proto.frames_pb2 import Done, Order

if TYPE_CHECKING:
    from tinkex.server.scheduler.model_states import ModelState

log = logging.getLogger("tinkex.server.scheduler")

#: The fixed cost of a step, in tokens.
STEP_TOKENS = 100
# Maximum number of passes that the engine has at the same time during a rebuild.
MAX_REPLAY_PASSES = 8
# Maximum tokens of these passes together (a single pass may have more), because steps of other
# owners wait until they are done.
MAX_REPLAY_TOKENS = 32_768


def _cost(step: QueuedRequest) -> int:
    """The approximate work of a step, in tokens."""
    return step.tokens + STEP_TOKENS


class RebuildQueue:
    """
    Decides which models of one engine are rebuilt now.

    If only one owner uses the engine, all its models are rebuilt at the same time. If several
    owners do, one model of each owner is a candidate, and the one with the least work left is
    rebuilt first. So a short rebuild does not wait for long ones, which are hardly delayed by it.
    """

    def __init__(self, slots: TrainingSlots) -> None:
        self._slots = slots
        #: By owner: the work left for each model, in the order in which the rebuilds began.
        self.left: dict[str, dict[str, int]] = {}
        self._changed = asyncio.Event()

    @contextlib.contextmanager
    def rebuilding(self, state: "ModelState") -> Iterator[None]:
        """Register the rebuild of a model. Before each step it must wait for `may_continue`."""
        owner, model_id = state.model.owner, state.model.model_id
        # Zero until its log has been read.
        self.left.setdefault(owner, {})[model_id] = 0
        self._slots.on_release = self.recheck
        try:
            yield
        finally:
            del self.left[owner][model_id]
            if not self.left[owner]:
                del self.left[owner]
            if not self.left:
                self._slots.on_release = None
            self.recheck()

    def set_left(self, state: "ModelState", tokens: int) -> None:
        """Update the work that is left for this model."""
        self.left[state.model.owner][state.model.model_id] = tokens
        self.recheck()

    async def may_continue(self, state: "ModelState") -> None:
        """Wait until the next step of this model may be replayed."""
        while not self._is_next(state):
            await self._changed.wait()

    async def yield_to_rebuilds(self, state: "ModelState", batch: StepBatch) -> None:
        """
        Wait while another owner's rebuild has less work left than this batch.

        The engine alternates between models. Without this, each small step of a rebuild would wait
        for a large pass of an owner whose model is ready.
        """
        cost = sum(map(_cost, batch.steps))
        while self._has_smaller_rebuild(state, cost):
            await self._changed.wait()

    async def none_left(self, *, unless: Callable[[], bool]) -> None:
        """Wait until no model is being rebuilt, or `unless` is true; `recheck` looks at it again."""
        while self.left and not unless():
            await self._changed.wait()

    def _has_smaller_rebuild(self, state: "ModelState", cost: int) -> bool:
        return any(
            next(iter(models.values())) < cost
            for owner, models in self.left.items()
            if owner != state.model.owner
        )

    def _is_next(self, state: "ModelState") -> bool:
        if not self._slots.contested:
            return True
        # One model of each owner: the first that began.
        firsts = [next(iter(models.items())) for models in self.left.values()]
        least = min(left for _, left in firsts)
        return (state.model.model_id, least) in firsts

    def recheck(self) -> None:
        """Something has changed for those that wait."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class Recovery:
    """Loads models into the memory of one engine, and unloads them."""

    def __init__(
        self,
        execution: Execution,
        engine: EngineClient,
        checkpoints: CheckpointSteps,
        rebuilds: RebuildQueue,
    ) -> None:
        self._store = execution.store
        self._payloads = execution.payloads
        self._engine = engine
        self._checkpoints = checkpoints
        self.rebuilds = rebuilds
        #: By session: the models that the engine has in memory, or is loading.
        self._loaded: defaultdict[str, set[str]] = defaultdict(set)
        #: Sessions whose custom losses are registered in the engine.
        self._with_losses: set[str] = set()
        #: Held while it is decided whether to remove losses, and the order is sent.
        self._losses_lock = asyncio.Lock()

    async def ensure_loaded(self, state: "ModelState", attempt: Attempt) -> int:
        """
        Rebuild the model if the engine does not have it. Returns the engine's incarnation.

        A rebuild is isolated like a request, under the id of its model. If it ends the engine, no
        further rebuild is tried: WorkFailed.
        """
        if state.rebuild_error is not None:
            raise WorkFailed("server", state.rebuild_error)
        incarnation = await self._engine.ready()
        if state.loaded_in != incarnation:
            model_id = state.model.model_id
            try:
                await self._rebuild(state, incarnation)
            except EngineLost as lost:
                if self._engine.count_attempt(model_id, attempt, lost):
                    state.rebuild_error = (
                        f"the engine died {MAX_ATTEMPTS} times during this, the last time with no "
                        f"other request running: {lost}. The server's log has more details."
                    )
                    raise WorkFailed("server", state.rebuild_error) from lost
                raise
            self._engine.isolation.forget(model_id)
            state.loaded_in = incarnation
        return incarnation

    async def _rebuild(self, state: "ModelState", incarnation: int) -> None:
        model = state.model
        if (check := self._engine.base_check) is not None:
            await check.check_run(model.model_id, incarnation)
        # The log is complete once all results of this model are stored.
        await state.results_stored()
        # A snapshot would truncate the log while it is read.
        await state.snapshots.written()
        copied, state.copied = state.copied, None
        await self.expect(state)
        losses = await self._store.models.custom_losses(model.session_id)
        await self.register_losses(state, losses, incarnation)
        # A copy from a move needs only the steps that it does not have.
        after = None
        if copied is not None and copied.incarnation == incarnation:
            after = copied.position
        with self.rebuilds.rebuilding(state):
            await self._replay(state, incarnation, after=after)

    async def expect(self, state: "ModelState") -> None:
        """The engine will have this model: keep what its session needs."""
        async with self._losses_lock:
            self._loaded[state.model.session_id].add(state.model.model_id)

    def may_be_loaded(self, state: "ModelState") -> bool:
        """Whether the engine may have something of this model in memory."""
        return state.model.model_id in self._loaded.get(state.model.session_id, ())

    def has_models_of(self, session_id: str) -> bool:
        """Whether the engine may have a model of this session in memory, or a copy of one."""
        return session_id in self._loaded

    async def drop(self, state: "ModelState", incarnation: int | None) -> None:
        """
        Remove what the engine has of a model that another engine has.

        `incarnation` is that which has the model; None if none has all of it.
        """
        with contextlib.suppress(WorkFailed):
            await self._drop(state, incarnation)

    async def _drop(self, state: "ModelState", incarnation: int | None) -> None:
        try:
            with contextlib.suppress(EngineLost, EngineRefused):
                if incarnation is None and self.may_be_loaded(state):
                    # An earlier rebuild failed; the engine may still have the incomplete model.
                    incarnation = await self._engine.ready()
                if incarnation is not None:
                    # Like all work, it must not run beside an isolated request.
                    async with self._engine.isolation.attempt():
                        order = Order(drop=frames_pb2.Drop(model_id=state.model.model_id))
                        await state.run(self._engine, order, incarnation)
        finally:
            self.forget(state)
        if incarnation is not None:
            await self._forget_losses(state.model.session_id, incarnation)

    def forget(self, state: "ModelState") -> None:
        """Another engine has the model now."""
        models = self._loaded.get(state.model.session_id)
        if models is not None:
            models.discard(state.model.model_id)
            if not models:
                del self._loaded[state.model.session_id]

    async def unload(self, state: "ModelState") -> None:
        """
        Remove a model from the engine's memory. Call it only while the model's worker does not run.

        After the last model of a session, the custom losses are removed too. Raises WorkFailed.
        """
        await state.results_stored()
        incarnation, state.loaded_in = state.loaded_in, None
        await self._drop(state, incarnation)

    async def loss_was_checked(self, session_id: str) -> None:
        """Remove a loss that the engine only checked and does not need: no model can use it yet."""
        self._with_losses.add(session_id)
        with contextlib.suppress(EngineLost, EngineRefused):
            await self._forget_losses(session_id, await self._engine.ready())

    async def _forget_losses(self, session_id: str, incarnation: int) -> None:
        """
        Remove the custom losses of a session from the engine, unless a loaded model needs them.

        A model that is loaded later registers them again.
        """
        async with self._engine.isolation.attempt():
            with contextlib.suppress(EngineLost, EngineRefused, WorkFailed):
                # Locked, so that no model of the session is loaded between the check and the send.
                async with self._losses_lock:
                    if session_id in self._loaded or session_id not in self._with_losses:
                        return
                    self._with_losses.discard(session_id)
                    order = Order(forget_losses=frames_pb2.ForgetLosses(session_id=session_id))
                    future = await self._engine.send(order, incarnation=incarnation)
                await future

    async def register_losses(
        self, state: "ModelState", losses: Iterable[CustomLoss], incarnation: int
    ) -> None:
        """Register custom losses of a model's session."""
        for loss in losses:
            self._with_losses.add(state.model.session_id)
            # A loss that was refused is refused again; no request can use it.
            with contextlib.suppress(WorkFailed):
                await state.run(self._engine, register_loss_order(loss), incarnation)

    async def newest_snapshot(self, state: "ModelState") -> tuple[int, str] | None:
        """The step of the newest snapshot, and its folder on this machine."""
        snapshot = await self._store.snapshots.newest_intact(state.model.model_id, term=state.term)
        if snapshot is None:
            return None
        return snapshot.seq_id, await self._store.snapshots.open(snapshot)

    async def restore(self, state: "ModelState", folder: str, incarnation: int) -> None:
        """Make the model on the engine, with the state of a snapshot."""
        await state.create(self._engine, incarnation)
        restore = frames_pb2.Restore(model_id=state.model.model_id, folder=folder)
        await state.run(self._engine, Order(restore=restore), incarnation)

    async def _replay(
        self, state: "ModelState", incarnation: int, *, after: int | None = None
    ) -> None:
        """Run the steps of the log after this one, or after the last snapshot."""
        model_id = state.model.model_id
        await self.rebuilds.may_continue(state)
        if after is None:
            after = -1
            if (snapshot := await self.newest_snapshot(state)) is not None:
                after, folder = snapshot
                await self.restore(state, folder, incarnation)
        rows = await self._store.requests.log(model_id, after=after)
        if rows:
            log.info("rebuilding %s: replaying %d steps of its log", model_id, len(rows))
        left = sum(map(_cost, rows))
        free, sent_tokens = asyncio.Semaphore(MAX_REPLAY_PASSES), 0
        passes: list[asyncio.Future[Done]] = []
        try:
            for row in rows:
                self.rebuilds.set_left(state, left)
                left -= _cost(row)
                action = replay_of(row)
                if action is Replay.SKIP:
                    continue
                await self.rebuilds.may_continue(state)
                if row.kind in PASSES and action is Replay.RUN:
                    # Several passes are on the engine at the same time; they are sent in order.
                    if sent_tokens + row.tokens > MAX_REPLAY_TOKENS:
                        await asyncio.gather(*passes)
                        passes.clear()
                        sent_tokens = 0
                    sent_tokens += row.tokens
                    await free.acquire()
                    passes.append(await self.send_pass(state, row, incarnation))
                    passes[-1].add_done_callback(lambda _: free.release())
                    continue
                # Everything else waits for the passes before it.
                await asyncio.gather(*passes)
                passes.clear()
                sent_tokens = 0
                await self.replay_one(state, row, incarnation)
            await asyncio.gather(*passes)
        finally:
            for one in passes:
                one.cancel()

    async def send_pass(
        self, state: "ModelState", row: QueuedRequest, incarnation: int
    ) -> asyncio.Future[Done]:
        """Send a pass of the log; the engine has it before what is sent later."""
        payload = await self._payloads.get(row)
        state.snapshots.payload_bytes += payload_size(payload)
        order = training_order(state.model, row.kind, payload)
        return await state.send(self._engine, order, incarnation)

    async def replay_one(self, state: "ModelState", row: QueuedRequest, incarnation: int) -> None:
        """Do what a finished step did, if it is not a pass."""
        model = state.model

        async def run(order: Order) -> Done:
            return await state.run(self._engine, order, incarnation)

        match replay_of(row):
            case Replay.CLEAR_GRADIENTS:
                await run(clear_gradients_order(model.model_id))
            case Replay.RUN if row.kind is Kind.CREATE_MODEL:
                await state.create(self._engine, incarnation)
            case Replay.RUN if row.kind is Kind.LOAD_WEIGHTS:
                if row.creates_model:
                    await state.create(self._engine, incarnation)
                request = await self._payloads.read(row)
                await self._checkpoints.load(model, request, run, version_id=row.version_id)
            case Replay.RUN:
                payload = await self._payloads.get(row)
                state.snapshots.payload_bytes += payload_size(payload)
                await run(training_order(model, row.kind, payload))
