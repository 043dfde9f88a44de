"""
Runs the steps of models on one engine.

Each model with waiting steps has one worker task. It takes batch after batch from the model's queue
(`step_queue`), waits for a training slot, makes sure that the engine has the model, and sends the
steps. Results are stored strictly in the order of the steps, so the log always describes a state that
the model had between two steps.
"""

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from tinkex.server.executor import (
    BatchFailed,
    EngineLost,
    ModelNotLoaded,
    WorkFailed,
)
from tinkex.server.queued_request import Cause, Kind, Outcome, QueuedRequest
from tinkex.server.scheduler.checkpoints import CheckpointSteps
from tinkex.server.scheduler.engine_client import (
    Attempt,
    EngineClient,
    clear_gradients_order,
    payload_size,
    training_order,
)
from tinkex.server.scheduler.fairness import TrainingSlots
from tinkex.server.scheduler.model_states import ModelState
from tinkex.server.scheduler.recovery import RebuildQueue, Recovery
from tinkex.server.scheduler.results import (
    Execution,
    ResultWriter,
    failure_outcome,
    internal_error,
)
from tinkex.server.scheduler.snapshots import Snapshots
from tinkex.server.scheduler.step_queue import Gap, StepBatch, arrived_late, number_of
from tinkex.server.store import Damaged, NotOwner, StorageError
from tinkex.wire.codec import encode_json
from tinkex.wire.proto.frames_pb2 import Done, Order
from tinkex.wire.training import CreateModelResponse

log = logging.getLogger("tinkex.server.scheduler")

# After a step of these kinds, the next step may start before the result is stored. If the process
# crashes in between, the step runs again.
PIPELINED = frozenset({Kind.FORWARD, Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP})
#: A gap is not closed while the database cannot be read. Closing it is retried after this time.
GAP_RETRY_S = 1.0


class StepRunner:
    """Runs single steps on one engine and gives their results to the writer."""

    def __init__(
        self,
        execution: Execution,
        engine: EngineClient,
        checkpoints: CheckpointSteps,
        results: ResultWriter,
    ) -> None:
        self._execution = execution
        self._engine = engine
        self._checkpoints = checkpoints
        self._results = results

    async def begin(
        self,
        state: ModelState,
        step: QueuedRequest,
        payload: bytes | Path | BaseException,
        incarnation: int,
    ) -> asyncio.Task[None]:
        """
        Start a step. Returns the task that waits for its outcome and finishes it.

        The engine has a pass when this returns, so passes reach it in order. The task raises
        EngineLost if the step has to run again.
        """
        outcome: Awaitable[Outcome]
        state.last_step_s = time.monotonic()
        self._execution.futures.started(step)
        if isinstance(payload, BaseException):
            outcome = _raise(payload)
        elif step.kind in PIPELINED:
            try:
                state.snapshots.payload_bytes += payload_size(payload)
                order = training_order(state.model, step.kind, payload)
                outcome = _outcome_of(await state.send(self._engine, order, incarnation))
            except Exception as error:  # noqa: BLE001  handled like an error of the engine
                outcome = _raise(error)
        else:
            outcome = self._run_other(state, step, incarnation)
        return asyncio.create_task(self._wait_and_finish(state, step, outcome))

    async def _wait_and_finish(
        self, state: ModelState, step: QueuedRequest, waiting: Awaitable[Outcome]
    ) -> None:
        try:
            outcome = await waiting
        except EngineLost:
            raise  # the worker decides whether the step runs again
        except Exception as error:  # noqa: BLE001  a bug must fail one step, not stop the model
            outcome = failure_outcome(error)
        if outcome.category == "server":
            # The engine may have done half of the step: rebuild the model before its next one.
            state.loaded_in = None
        await self.finish(state, step, outcome)

    async def _run_other(self, state: ModelState, step: QueuedRequest, incarnation: int) -> Outcome:
        """Create, save and load."""
        model = state.model
        payloads = self._execution.payloads

        async def run(order: Order) -> Done:
            return await state.run(self._engine, order, incarnation)

        match step.kind:
            case Kind.CREATE_MODEL:
                await state.create(self._engine, incarnation)
                response = CreateModelResponse(model_id=model.model_id)
                return Outcome(result=encode_json(response))
            case Kind.SAVE_WEIGHTS | Kind.SAVE_FOR_SAMPLER | Kind.SAVE_EXTERNAL:
                return await self._checkpoints.save(model, step, await payloads.read(step), run)
            case Kind.LOAD_WEIGHTS:
                if step.creates_model:
                    await state.create(self._engine, incarnation)
                # For another owner's checkpoint, the version was resolved on acceptance.
                return await self._checkpoints.load(
                    model, await payloads.read(step), run, version_id=step.version_id
                )
            case _:
                raise ValueError(f"{step.kind} is not a step of a model")

    async def finish(self, state: ModelState, step: QueuedRequest, outcome: Outcome) -> None:
        """Give the result to the writer. Unless the kind is PIPELINED, wait until it is stored."""
        self._engine.isolation.forget(step.request_id)
        if state.disowned:
            return
        if state.rewinding:
            # The step used the effect of a step whose result could not be stored.
            state.queue.requeue([step])
            return
        gradient_error = state.queue.gradient_error
        state.queue.finish(step, failure=outcome.error)
        state.snapshots.steps += 1
        self._results.add(state, step, outcome, gradient_error=gradient_error)
        state.snapshots.after_optim_step = step.kind is Kind.OPTIM_STEP
        if step.kind not in PIPELINED:
            await state.results_stored()


async def _outcome_of(future: asyncio.Future[Done]) -> Outcome:
    done = await future
    return Outcome(result=done.result, compute_s=done.compute_s)


async def _raise(error: BaseException) -> Outcome:
    raise error


class ModelWorkers:
    """The workers of the models on one engine: at most one task for each model."""

    def __init__(
        self,
        execution: Execution,
        engine: EngineClient,
        *,
        recovery: Recovery,
        rebuilds: RebuildQueue,
        checkpoints: CheckpointSteps,
        slots: TrainingSlots,
        snapshots: Snapshots,
        gap_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._execution = execution
        self._engine = engine
        self._recovery = recovery
        self._rebuilds = rebuilds
        self._slots = slots
        self._snapshots = snapshots
        self._results = ResultWriter(execution, self.start)
        self._steps = StepRunner(execution, engine, checkpoints, self._results)
        self._gap_s = gap_s
        self._clock = clock

    def add_step(self, state: ModelState, step: QueuedRequest) -> None:
        """Queue a step; it fails if the queue has already passed its number."""
        if state.queue.add(step, now_s=self._clock()):
            self.start(state)
        else:
            late = Outcome(error=arrived_late(number_of(step)), category="user", cause=Cause.LATE)
            self._results.add(state, step, late, gradient_error=None)

    async def add_waiting_steps(self, state: ModelState) -> None:
        """Queue the steps of this model that are in the store and not here."""
        for row in await self._execution.store.requests.waiting_steps(state.model.model_id):
            if self._execution.claim(row):
                self.add_step(state, row)

    def refuse_step(self, state: ModelState, step: QueuedRequest) -> None:
        """Record a malformed step, so that later steps do not wait for its number."""
        state.queue.refuse(step)
        self.start(state)

    def run_between_steps(
        self, state: ModelState, work: Coroutine[Any, Any, None]
    ) -> asyncio.Task[None]:
        """Run `work` while no worker of the model runs; new steps wait until it is done."""

        async def run() -> None:
            try:
                await state.snapshots.written()
                await work
            finally:
                work.close()
                state.worker = None
                state.engine.workers.start(state)

        state.worker = self._execution.spawn(run())
        return state.worker

    async def run_between_batches(
        self, state: ModelState, work: Callable[[], Awaitable[None]]
    ) -> None:
        """
        Run `work` after the current batch, also if more steps wait; raises what it raises.

        NotOwner if another worker has the model before that.
        """
        if state.disowned:
            raise NotOwner([state.model.model_id])
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def run() -> None:
            try:
                if state.disowned:
                    raise NotOwner([state.model.model_id])
                await work()
            except Exception as error:  # noqa: BLE001  the caller gets it
                if not done.done():
                    done.set_exception(error)
            else:
                if not done.done():
                    done.set_result(None)

        state.between.append(run)
        self.start(state)
        await done

    def _has(self, state: ModelState) -> bool:
        """Whether the steps of this model run here; False once another engine or worker has it."""
        return state.engine.workers is self and not state.disowned

    def start(self, state: ModelState) -> None:
        """Run the waiting steps of a model, unless something of it runs."""
        if state.engine.workers is not self:
            state.engine.workers.start(state)  # it has moved
        elif state.worker is None and not self._execution.closing and not state.disowned:
            state.worker = self._execution.spawn(self._work(state))

    async def _work(self, state: ModelState) -> None:
        """Run batches of steps until the next step has not arrived yet, or the model moves."""
        try:
            while not self._execution.closing and not state.disowned:
                while state.between:
                    await state.between.popleft()()
                if not self._has(state):
                    break
                # No step is running now, so all steps that had to be requeued have been.
                state.rewinding = False
                batch = state.queue.next_batch(
                    now_s=self._clock(), max_passes=self._max_passes(state)
                )
                if batch is None:
                    break
                await self._process(state, batch)
                if self._has(state) and state.snapshots.is_due(
                    self._snapshots.steps, self._snapshots.payload_bytes
                ):
                    await self._snapshots.begin(state)
        finally:
            state.worker = None
            if state.disowned:
                pass
            elif state.engine.workers is self:
                self._start_gap_timer(state)
            else:
                self.start(state)

    def _max_passes(self, state: ModelState) -> int | None:
        """1 if the next step was lost before, to find the step that crashes the engine."""
        first, isolation = state.queue.waiting.get(state.queue.next_seq), self._engine.isolation
        lost = first is not None and isolation.attempts(first.request_id)
        # A step that must not run must be the first of its batch.
        return 1 if lost or isolation.culprit is not None else None

    async def _process(self, state: ModelState, batch: StepBatch) -> None:
        """Run, refuse or fail a batch. Never raises because of its content."""
        try:
            if batch.refusal is not None:
                await self._refuse(state, batch)
                return
            if batch.steps[0].kind not in PIPELINED:
                # Its result is committed in its own transaction, which must follow those of all
                # steps before it.
                await state.results_stored()
            if state.loaded_in is None and (check := self._engine.base_check) is not None:
                await check.wait_if_needed(state.model.model_id)
            async with self._slots.acquire(state, batch):
                again = await self._engine.attempt(
                    batch.steps,
                    functools.partial(self._load_and_run, state, batch),
                    model_id=state.model.model_id,
                    is_unfinished=lambda step: step.seq_id in state.queue.running,
                )
            state.queue.requeue(again)
        except WorkFailed as failed:
            # The rebuild of the model failed, not a step. The next step tries to rebuild it again.
            state.loaded_in = None
            text = f"this model could not be rebuilt from its log: {failed.message}"
            outcome = Outcome(error=text, category="server", permanent=True)
            await self._fail(state, batch, outcome)
        except Damaged as damaged:
            state.loaded_in = None
            rebuild_error = Damaged(f"this model cannot be rebuilt: {damaged}")
            await self._fail(state, batch, replace(internal_error(rebuild_error), permanent=True))
        except Exception as error:  # noqa: BLE001  a bug must fail steps, not stop the model
            # EngineLost: the step that is left crashes engines. The model in this one is as before.
            if not isinstance(error, EngineLost):
                state.loaded_in = None
            await self._fail(state, batch, failure_outcome(error))

    async def _load_and_run(self, state: ModelState, batch: StepBatch, attempt: Attempt) -> None:
        try:
            incarnation = await self._engine.ready()
            if state.loaded_in != incarnation and self._has(state):
                incarnation = await self._recovery.ensure_loaded(state, attempt)
        except EngineLost:
            # This counts for the model, not for these steps.
            state.queue.requeue(batch.steps)
            return
        if not self._has(state):
            if state.engine.workers is not self:
                state.loaded_in = None  # it was loaded here, and runs there
            state.queue.requeue(batch.steps)
            return
        try:
            await self._run(state, batch, incarnation)
        except (BatchFailed, ModelNotLoaded):
            # The engine is up, but it does not have the state of this model that the log describes.
            state.loaded_in = None
            raise

    async def _run(self, state: ModelState, batch: StepBatch, incarnation: int) -> None:
        if self._rebuilds.left:
            await self._rebuilds.yield_to_rebuilds(state, batch)
        # Read all payloads before any step starts: while a large one is being read, a small one
        # behind it would reach the engine first.
        payloads = await asyncio.gather(
            *(self._execution.payloads.get(step) for step in batch.steps),
            return_exceptions=True,
        )
        if state.rewinding:
            state.queue.requeue(batch.steps)
            return
        running: list[asyncio.Task[None]] = []
        try:
            # Each step reaches the engine before the next one is sent.
            for step, payload in zip(batch.steps, payloads, strict=True):
                running.append(await self._steps.begin(state, step, payload, incarnation))
            outcomes = await asyncio.gather(*running, return_exceptions=True)
        except asyncio.CancelledError:
            for task in running:
                task.cancel()
            raise
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _fail(self, state: ModelState, batch: StepBatch, outcome: Outcome) -> None:
        for step in batch.steps:
            if step.seq_id in state.queue.running:
                # A step that was refused on arrival fails with that reason.
                await self._steps.finish(state, step, step.outcome or outcome)

    async def _refuse(self, state: ModelState, batch: StepBatch) -> None:
        if batch.clears_gradients and state.queue.creation_error is None:
            # If the engine is lost, its gradients are gone too, and the rebuild applies these
            # refusals. If the steps were requeued instead, they would run as if nothing were missing.
            model_id = state.model.model_id
            async with self._engine.isolation.attempt(model_id) as attempt:
                with contextlib.suppress(EngineLost):
                    incarnation = await self._recovery.ensure_loaded(state, attempt)
                    order = clear_gradients_order(model_id)
                    await state.run(self._engine, order, incarnation)
        for step in batch.steps:
            refused = Outcome(error=batch.refusal, category="user", cause=batch.cause)
            await self._steps.finish(state, step, refused)

    def _start_gap_timer(self, state: ModelState) -> None:
        if state.gap_timer is not None:
            state.gap_timer.cancel()
            state.gap_timer = None
        gap = state.queue.gap()
        if gap is None or self._execution.closing:
            return
        left_s = gap.since_s + self._gap_s - self._clock()
        left_s = max(left_s, min(GAP_RETRY_S, self._gap_s))
        loop = asyncio.get_running_loop()
        state.gap_timer = loop.call_later(left_s, self._on_gap_timeout, state, gap)

    def _on_gap_timeout(self, state: ModelState, gap: Gap) -> None:
        state.gap_timer = None
        if state.engine.workers is not self:
            self.start(state)  # it has moved
        elif state.queue.gap() == gap and state.worker is None:
            self.run_between_steps(state, self._close_gap(state, gap))

    async def _close_gap(self, state: ModelState, gap: Gap) -> None:
        # The missing step may have been accepted without reaching the scheduler.
        try:
            await self.add_waiting_steps(state)
        except StorageError as error:
            log.info(
                "the missing step of %s cannot be looked up now; retrying later: %s",
                state.model.model_id,
                error,
            )
            return
        if state.queue.gap() == gap:
            await self._process(state, state.queue.close_gap(now_s=self._clock()))
