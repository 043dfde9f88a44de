"""
Everything that belongs to one engine.

Steps go to its model workers, samples to its sample worker. Both send their work through one
`EngineClient`, so crash isolation and admission see all of it.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from tinkex.server.executor import WorkFailed
from tinkex.server.queued_request import Outcome
from tinkex.server.scheduler.base_model_check import BaseModelCheck
from tinkex.server.scheduler.checkpoints import CheckpointSteps
from tinkex.server.scheduler.crash_files import CrashFiles
from tinkex.server.scheduler.engine_client import EngineClient, LostAttempts
from tinkex.server.scheduler.fairness import QueueState, TrainingLimits, TrainingSlots
from tinkex.server.scheduler.model_states import ModelState
from tinkex.server.scheduler.model_worker import ModelWorkers
from tinkex.server.scheduler.moves import NOT_MOVED, LocalCopy, move
from tinkex.server.scheduler.recovery import RebuildQueue, Recovery
from tinkex.server.scheduler.results import Execution, failure_outcome
from tinkex.server.scheduler.sample_worker import SampleWorker
from tinkex.server.scheduler.snapshots import Snapshots
from tinkex.wire.codec import encode_json
from tinkex.wire.training import UnloadModelResponse

log = logging.getLogger("tinkex.server.scheduler")

# How often a model that is to be unloaded is checked while its steps wait for a missing number.
GAP_POLL_S = 1.0


class EngineScheduler:
    """Runs requests on one engine: that of a base model, or one of its replicas."""

    def __init__(
        self,
        name: str,
        execution: Execution,
        *,
        base_model: str,
        lost: LostAttempts,
        has_replicas: bool,
        limits: TrainingLimits,
        gap_s: float,
        snapshot_steps: int,
        snapshot_bytes: int,
        max_sequences: int,
        clock: Callable[[], float],
        crash_files: CrashFiles | None,
        base_check: BaseModelCheck | None,
    ) -> None:
        self.name = name
        #: Models that train here, by id. They are in its memory, or will be for their next step.
        self.models: dict[str, ModelState] = {}
        self._execution = execution
        self.client = EngineClient(
            name,
            execution,
            base_model=base_model,
            lost=lost,
            has_replicas=has_replicas,
            crash_files=crash_files,
            base_check=base_check,
            max_sequences=max_sequences,
        )
        self._checkpoints = checkpoints = CheckpointSteps(execution.store, base_check)
        self.slots = TrainingSlots(limits)
        rebuilds = RebuildQueue(self.slots)
        self.recovery = Recovery(execution, self.client, checkpoints, rebuilds)
        self._snapshots = Snapshots(
            execution,
            self.client,
            self.recovery,
            steps=snapshot_steps,
            payload_bytes=snapshot_bytes,
        )
        self.workers = ModelWorkers(
            execution,
            self.client,
            recovery=self.recovery,
            rebuilds=rebuilds,
            checkpoints=checkpoints,
            slots=self.slots,
            snapshots=self._snapshots,
            gap_s=gap_s,
            clock=clock,
        )
        self.samples = SampleWorker(execution, self.client)

    @property
    def is_up(self) -> bool:
        """Whether it makes progress, as far as is known."""
        return self._execution.executor.waiting_for(self.name) is None

    @property
    def is_running(self) -> bool:
        """Whether its process runs, even if it does not respond at the moment."""
        return self._execution.executor.stats(self.name) is not None

    def take_over(self, state: ModelState) -> None:
        """
        Run the steps of a model here from now on; its next step rebuilds it from its log.

        The engine that had it may still have it in memory.
        """
        state.engine.models.pop(state.model.model_id, None)
        state.engine = self
        self.models[state.model.model_id] = state
        state.loaded_in = None
        if state.gap_timer is not None:
            state.gap_timer.cancel()
            state.gap_timer = None
        self.workers.start(state)

    async def move_here(self, state: ModelState) -> bool:
        """
        Move a model that trains on another replica here, while it goes on training there.

        False if it was not moved; then it goes on where it was.
        """
        origin, store, left = state.engine, self._execution.store, state.loaded_in
        if left is None or state.queue.creation_error is not None:
            self.take_over(state)
        else:
            copy = LocalCopy(state, self, store)
            if not await move(state, copy, store):
                return False
            left = copy.left
        await origin.recovery.drop(state, left)
        return True

    async def complete_copy(self, state: ModelState) -> None:
        """Load a model that has just moved here, also if no step of it waits."""

        async def load() -> None:
            # The next step tries again, and reports what is wrong.
            with contextlib.suppress(*NOT_MOVED):
                async with self.client.isolation.attempt(state.model.model_id) as attempt:
                    await self.recovery.ensure_loaded(state, attempt)

        await self.workers.run_between_batches(state, load)

    async def snapshot_while_training(self, state: ModelState) -> bool:
        """Take a snapshot after the current batch; later steps run while it is written."""
        written: asyncio.Future[bool] | None = None

        async def begin() -> None:
            nonlocal written
            written = await self._snapshots.begin(state)

        await self.workers.run_between_batches(state, begin)
        return written is not None and await written

    async def snapshot_now(self, state: ModelState) -> bool:
        """Take a snapshot between two batches, and wait until it is stored."""
        return await self._snapshots.write(state)

    def set_base_check(self, check: BaseModelCheck) -> None:
        """The base model is served from now on."""
        self.client.base_check = self._checkpoints.base_check = check

    def queue_state(self, request_id: str) -> QueueState:
        """The state of an unfinished request, and what it waits for."""
        executor, base_model = self._execution.executor, self.client.base_model
        if (reason := executor.waiting_for(self.name)) is not None:
            return QueueState(state="paused_capacity", reason=reason)
        if self.client.isolation.is_held(request_id):
            return QueueState(
                state="paused_capacity",
                reason=f"the engine of {base_model} crashed more than once; the requests it was "
                "running run again a few at a time, to find the one that crashes it",
            )
        if (state := self.slots.queue_state(request_id)) is not None:
            return state
        stats = executor.stats(self.name)
        if request_id in self.samples and stats is not None and stats.samples_waiting:
            running = stats.sequences_running
            what = (
                f"the engine is full: {running} sequences are being sampled"
                if running
                else "the engine is busy with other work, such as training"
            )
            return QueueState(
                state="paused_capacity", reason=f"{what}; {stats.samples_waiting} samples wait"
            )
        return QueueState(state="active")

    async def unload(self, state: ModelState) -> Outcome:
        """Free a model's memory; its next step rebuilds it from its log."""
        response = UnloadModelResponse(model_id=state.model.model_id)
        outcome = Outcome(result=encode_json(response))

        async def unload() -> None:
            nonlocal outcome
            try:
                await self.recovery.unload(state)
            except WorkFailed as failed:
                outcome = failure_outcome(failed)

        # Between two steps: not while one runs, nor while the model is being rebuilt.
        while state.worker is not None:
            await asyncio.wait({state.worker})
        if state.engine is not self:  # it has moved meanwhile
            return await state.engine.unload(state)
        if state.loaded_in is not None or self.recovery.may_be_loaded(state):
            await asyncio.wait({self.workers.run_between_steps(state, unload())})
        return outcome

    async def retire(self, state: ModelState) -> bool:
        """Unload an idle model; False if its client has sent more steps in the meantime."""
        newest = max(state.queue.waiting, default=state.queue.next_seq - 1)
        while (worker := state.worker) is not None or state.queue.waiting:
            # Steps behind a missing number fail after a while.
            await (asyncio.sleep(GAP_POLL_S) if worker is None else asyncio.wait({worker}))
        if self._execution.closing or state.queue.next_seq > newest + 1:
            return False
        if state.engine is not self:  # it has moved meanwhile
            return await state.engine.retire(state)
        if state.loaded_in is not None or self.recovery.may_be_loaded(state):
            await asyncio.wait({self.workers.run_between_steps(state, self._unload_quietly(state))})
            while state.worker is not None:
                await asyncio.wait({state.worker})
        return True

    async def _unload_quietly(self, state: ModelState) -> None:
        with contextlib.suppress(WorkFailed):
            await self.recovery.unload(state)

    async def snapshot(self, state: ModelState) -> bool:
        """Take a snapshot of a model without a worker; False if that failed."""
        written = False

        async def write() -> None:
            nonlocal written
            written = await self._snapshots.write(state)

        await asyncio.wait({self.workers.run_between_steps(state, write())})
        return written
