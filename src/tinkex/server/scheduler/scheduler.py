"""
The scheduler: runs accepted requests.

`Scheduler` picks the engine of a request by its base model and, with several replicas, by
`replicas`; the rest is in `engine_scheduler`.
"""

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, Self

from tinkex.server.executor import Executor
from tinkex.server.queued_request import Kind, Outcome, QueuedRequest
from tinkex.server.retry import run_periodically
from tinkex.server.scheduler.base_model_check import BaseModelChecks
from tinkex.server.scheduler.crash_files import CrashFiles
from tinkex.server.scheduler.engine_client import RunElsewhere, after_web_crash
from tinkex.server.scheduler.engine_scheduler import EngineScheduler
from tinkex.server.scheduler.fairness import QueueState, TrainingLimits
from tinkex.server.scheduler.model_states import ModelState, ModelStates
from tinkex.server.scheduler.pickup import PICKUP_INTERVAL_S, WORKER_PICKUP_INTERVAL_S, Pickup
from tinkex.server.scheduler.placement import Placement
from tinkex.server.scheduler.result_waiters import Futures
from tinkex.server.scheduler.results import Execution
from tinkex.server.scheduler.sample_worker import CustomLossWorker, TokenStream
from tinkex.server.scheduler.step_queue import number_of
from tinkex.server.settings import Settings
from tinkex.server.store import Ownership, StorageError, Store

log = logging.getLogger("tinkex.server.scheduler")

# How long a stopping server waits until results are stored.
STORE_TIMEOUT_S = 5.0


class Scheduler:
    """Runs accepted requests. Belongs to one event loop; call `start` before, `close` after."""

    def __init__(
        self,
        *,
        store: Store,
        executor: Executor,
        futures: Futures,
        gap_s: float,
        snapshot_steps: int = 200,
        snapshot_bytes: int = 64 * 2**20,
        max_training: int = 0,
        max_sequences: int = 0,
        crash_files: CrashFiles | None = None,
        last_status: int = 0,
        base_checks: BaseModelChecks | None = None,
        ownership: Ownership | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._execution = Execution(
            store=store,
            executor=executor,
            futures=futures,
            worker_name=None if ownership is None else ownership.worker,
        )
        self.usage = self._execution.usage
        #: How many models of each owner may train at once on one engine.
        self.training_limits = TrainingLimits(max_training)
        new_engine = functools.partial(
            EngineScheduler,
            execution=self._execution,
            limits=self.training_limits,
            gap_s=gap_s,
            snapshot_steps=snapshot_steps,
            snapshot_bytes=snapshot_bytes,
            max_sequences=max_sequences,
            clock=clock,
            crash_files=crash_files,
        )
        self._crash_files = crash_files
        #: The exit status of the last web process.
        self._last_status = last_status
        self.placement = Placement(self._execution, new_engine, base_checks)
        #: The engines of a base model.
        self.replicas = self.placement.replicas
        self._models = ModelStates(
            store, lambda base: self.replicas(base).for_training(), ownership
        )
        #: Models whose steps are being read.
        self._opening: set[str] = set()
        self._losses = CustomLossWorker(self._execution, self._models, self.replicas)

    @classmethod
    def of(cls, settings: Settings, **parts: Any) -> Self:
        """A scheduler with the limits of the settings; `parts` are the other arguments."""
        return cls(
            gap_s=settings.gap_s,
            snapshot_steps=settings.snapshot_steps,
            snapshot_bytes=settings.snapshot_bytes,
            max_training=settings.max_training,
            max_sequences=settings.max_sequences,
            **parts,
        )

    @property
    def busy(self) -> asyncio.Event:
        """Set while there are unfinished requests."""
        return self._execution.futures.busy

    def runs_with_steps(self, since_s: float) -> int:
        """How many models had a step since this time of the monotonic clock, if still open."""
        return sum(state.last_step_s >= since_s for state in self._models.opened())

    @property
    def unfinished(self) -> int:
        """The number of accepted requests that are not finished."""
        return len(self._execution.futures)

    @property
    def waiting(self) -> int:
        """How many of them no engine has yet."""
        return self._execution.futures.waiting

    def base_models(self) -> set[str]:
        """The base models that have unfinished requests."""
        return self._execution.futures.base_models()

    async def start(self) -> None:
        """Start, and schedule the requests that an earlier process accepted and did not finish."""
        # Set the limits before any work is scheduled. Later, each request updates the limits of its
        # owner; on a worker, `refresh` does.
        await self.refresh()
        await self._restore_attempts()
        home = self._execution.worker_name
        # In the background, so that new requests do not wait for the stored ones.
        self._execution.spawn(
            run_periodically(
                Pickup(self._execution, self.submit, self._is_served, home=home).run,
                PICKUP_INTERVAL_S if home is None else WORKER_PICKUP_INTERVAL_S,
                what="reading the waiting requests",
                log=log,
                after_s=0.0,
            )
        )
        self.placement.start()

    async def refresh(self) -> None:
        """Read what other processes may have changed: failed sessions, and limits of keys."""
        await self._execution.failures.start()
        now_s = time.time()
        for key in await self._store.keys.all():
            if key.state(now_s) == "active" and "max_training" in key.limits:
                self.training_limits.set(key.owner, key.limits["max_training"])

    def _is_served(self, base_model: str) -> bool:
        return any(model.name == base_model for model in self._execution.executor.served)

    def _takes(self, request: QueuedRequest) -> bool:
        """Whether a request may run here. A worker leaves some to others."""
        return True

    async def _restore_attempts(self) -> None:
        """Restore the attempts of waiting requests; count the crash of the last web process too."""
        files, stored, home = self._crash_files, self._store.attempts, self._execution.worker_name
        isolated = None if files is None else files.find_crash(self._last_status)
        if isolated is None:
            counts = await stored.counted(home=home)
        else:
            counts = await stored.all_waiting(home=home)
            log.warning("the last web process crashed; waiting requests may have caused it")
        if isolated is not None:
            # Rebuilds have files too, by the ids of models; those are no requests.
            isolated &= {one for attempts in counts.values() for one in attempts}
        for base_model, attempts in counts.items():
            culprit = None
            if isolated is not None:
                attempts, culprit = after_web_crash(attempts, isolated)
                if attempts:
                    await stored.set(attempts)
                else:
                    await stored.clear(base_model, home=home)
            self.replicas(base_model).lost.restore(attempts, culprit)
        if files is not None:
            files.start()

    async def close(self) -> None:
        """Stop; unfinished requests are stored and run after the next start."""
        self._execution.closing = True
        for state in self._models.opened():
            if state.gap_timer is not None:
                state.gap_timer.cancel()
        # Store the results that exist, so that they are not computed again.
        storing = [one.storing for one in self._models.opened() if one.storing is not None]
        if storing:
            await asyncio.wait(storing, timeout=STORE_TIMEOUT_S)
        self.placement.close()
        await self._execution.stop()

    async def place(self, request: QueuedRequest) -> None:
        """Choose where a new request runs. Here it runs in this process."""

    def submit(
        self,
        request: QueuedRequest,
        *,
        token_stream: TokenStream | None = None,
    ) -> None:
        """
        Schedule a stored request, unless this process has it already.

        Reads nothing, so it cannot fail between the commit and here. The tokens of a sample go to
        the stream as they are drawn.
        """
        request_id, execution = request.request_id, self._execution
        if execution.futures.is_cached(request_id) or not self._takes(request):
            return
        # Even if it is known: `Pickup`, which has no stream, may have found the request first.
        if token_stream is not None:
            execution.token_streams[request_id] = token_stream
        if request_id in execution.claimed:
            return
        if request.attempts:
            # It may have been lost on another worker.
            counts = self.replicas(request.base_model).lost.counts
            counts.setdefault(request_id, request.attempts)
        # Before it is claimed: a step may have to wait until its model is read.
        execution.futures.track(request)
        match request.kind:
            case Kind.SAMPLE:
                self._run(request, self._sample(request))
            case Kind.UNLOAD_MODEL:
                self._run(request, self._unload(request))
            case Kind.CREATE_CUSTOM_LOSS:
                self._run(request, self._create_loss(request))
            case _:
                self._add_step(request)

    def _run(self, request: QueuedRequest, work: Coroutine[Any, Any, Outcome | None]) -> None:
        """Run a request that is not a step. If it ends in an error, `Pickup` finds it again."""
        if not self._execution.claim(request):
            work.close()
            return
        self._execution.spawn(self._run_claimed(request, work))

    async def _run_claimed(
        self, request: QueuedRequest, work: Coroutine[Any, Any, Outcome | None]
    ) -> None:
        try:
            outcome = await work
        except Exception:
            self._execution.release(request)
            raise
        if outcome is not None:
            await self._execution.finish(request, outcome)

    async def _create_loss(self, request: QueuedRequest) -> Outcome | None:
        return await self._losses.run(request)

    async def _sample(self, request: QueuedRequest) -> Outcome | None:
        replicas = self.replicas(request.base_model)
        try:
            while True:
                engine = replicas.begin_sample(request)
                try:
                    return await engine.samples.run(request)
                except RunElsewhere:
                    if self.placement.draining:
                        # It waited; another worker runs it.
                        self._execution.release(request)
                        self._execution.futures.untrack(request)
                        return None
                finally:
                    replicas.end_sample(request.request_id)
        finally:
            self._execution.token_streams.pop(request.request_id, None)

    def _add_step(self, step: QueuedRequest) -> None:
        if step.model_id is None or step.seq_id is None:
            raise ValueError(f"request {step.request_id} is not a step of a model")
        state = self._models.get(step.model_id)
        if state is None:
            # Opening the model reads its steps; until then no budget counts this payload.
            step.payload = None
            if step.model_id not in self._opening:
                self._opening.add(step.model_id)
                self._execution.spawn(self._open_with_steps(step.model_id, step.seq_id))
        elif self._execution.claim(step):
            state.engine.workers.add_step(state, step)

    async def _open_with_steps(self, model_id: str, first_seq: int) -> None:
        """Open a model; opening it adds all its stored steps."""
        try:
            await self._open(model_id, first_seq=first_seq)
        except StorageError as error:
            log.info("the steps of %s cannot be read now; retrying later: %s", model_id, error)
        finally:
            self._opening.discard(model_id)

    async def _open(self, model_id: str, *, first_seq: int = 0) -> ModelState:
        if (state := self._models.get(model_id)) is None:
            state = await self._models.open(model_id, first_seq=first_seq)
            # Otherwise a stored step with a lower number could be treated as missing.
            await state.engine.workers.add_waiting_steps(state)
        return state

    def creation_refused(self, request: QueuedRequest, outcome: Outcome) -> None:
        """A model was refused on acceptance: mark its session as failed."""
        self._execution.failures.update(request, outcome)

    async def refuse_step(self, step: QueuedRequest) -> None:
        """Record a refused step with its outcome. It fails so if its client sends later steps."""
        state = await self._open(step.model_id or "", first_seq=number_of(step))
        state.engine.workers.refuse_step(state, step)

    async def is_blocked_by(self, model_id: str, seq_id: int) -> bool:
        """Whether later steps of a model wait for this one."""
        state = self._models.get(model_id)
        return state is not None and state.queue.is_blocked_by(seq_id)

    def queue_state(self, request_id: str) -> QueueState:
        """The state of an unfinished request, and what it waits for."""
        engine = self._engine_of_request(request_id)
        return QueueState(state="active") if engine is None else engine.queue_state(request_id)

    def token_stream(self, request_id: str) -> TokenStream | None:
        """The tokens of a running sample, if it was started with a stream."""
        return self._execution.token_streams.get(request_id)

    def cancel(self, request_id: str, *, owner: str) -> None:
        """Cancel a sample. No effect on anything else: a step never leaves its queue."""
        if (engine := self._engine_of_request(request_id)) is not None:
            engine.samples.cancel(request_id, owner=owner)

    def cancel_unless_polled(self, request_id: str, *, owner: str, after_s: float) -> None:
        """The reader of a sample disconnected: cancel it unless it is polled within the time."""
        if (engine := self._engine_of_request(request_id)) is not None:
            self._execution.spawn(
                engine.samples.cancel_unless_polled(request_id, owner=owner, after_s=after_s)
            )

    def _engine_of_request(self, request_id: str) -> EngineScheduler | None:
        request = self._execution.futures.unfinished_request(request_id)
        if request is None:
            return None
        if request.kind is Kind.SAMPLE:
            return self.replicas(request.base_model).of_sample(request_id)
        state = self._models.get(request.model_id or "")
        # One that is not opened yet, and a custom loss, have no engine; the first one stands for all.
        return state.engine if state is not None else self.replicas(request.base_model).engines[0]

    async def _unload(self, request: QueuedRequest) -> Outcome:
        if (model_id := request.model_id) is None:
            raise ValueError(f"request {request.request_id} names no model")
        state = await self._open(model_id)
        return await state.engine.unload(state)

    def unload_session(self, session_id: str) -> None:
        """Unload the models of a session; the next step of each rebuilds it."""
        for state in self._models.opened():
            if state.model.session_id == session_id and not self._execution.closing:
                self._execution.spawn(self._retire(state))

    async def _retire(self, state: ModelState) -> None:
        if (moving := self.placement.moves.get(state.model.model_id)) is not None:
            # If it were forgotten now, its next step could rebuild it beside its copy.
            await asyncio.wait({moving})
        if state.disowned:
            return
        if await state.engine.retire(state):
            self._models.forget(state)

    async def snapshot(self, model_id: str) -> bool:
        """Take a snapshot of a model now, between two steps; False if that is not possible."""
        while (state := await self._open(model_id)).worker is not None:
            await asyncio.wait({state.worker})
        if self._execution.closing or state.queue.creation_error is not None:
            return False
        was_loaded = state.loaded_in is not None
        written = await state.engine.snapshot(state)
        if not was_loaded:
            self._execution.spawn(self._retire(state))
        return written
