"""
Shared by everything that runs requests: work for engines, background tasks, storing results.

`Execution` is the part that all engines share, `ResultWriter` stores the results of steps in order,
and `EngineClient` sends work to one engine.
"""

import asyncio
import functools
import logging
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkex.server.executor import EngineLost, Executor, Outcome, Task, Work
from tinkex.server.retry import Backoff, retry
from tinkex.server.scheduler.base_model_check import BaseModelCheck
from tinkex.server.scheduler.crash_isolation import Attempt, CrashIsolation
from tinkex.server.scheduler.fairness import Admission
from tinkex.server.scheduler.result_waiters import (
    FinishedRequest,
    Futures,
    RequestOutcome,
    storage_failure,
)
from tinkex.server.scheduler.session_status import SessionFailures
from tinkex.server.scheduler.step_queue import PASSES, Cause, Kind, Step
from tinkex.server.scheduler.web_crash import CrashFiles
from tinkex.server.store import (
    CustomLoss,
    Model,
    NewRequest,
    RequestRow,
    Store,
    accepted_work,
    request_rows,
)
from tinkex.server.store.requests import INLINE_BYTES
from tinkex.wire.codec import encode_json
from tinkex.wire.proto import frames_pb2

if TYPE_CHECKING:
    from tinkex.server.scheduler.model_worker import ModelState

log = logging.getLogger("tinkex.server.scheduler")

#: Waits between the attempts to store a result; then its request fails. Outages of the disk or the
#: database are not counted: the store waits until they end.
STORE_BACKOFF = Backoff(first_s=0.5, max_s=30.0, retries=7)
#: Why a request must not run that was running alone when the web process crashed.
ENDED_WEB_PROCESS = "the web process crashed together with it"
#: Owners on the metrics page: the ones that used an engine last.
MAX_OWNERS = 1_000
#: Small payloads up to this size in total are cached; the rest are read from the store.
PAYLOAD_CACHE_BYTES = 128 * 2**20


def create_work(model: Model) -> Work:
    return Work(
        task=Task.CREATE,
        model_id=model.model_id,
        lora_config=encode_json(dict(model.lora_config)),
        optimizer_config=encode_json(dict(model.optimizer_config)),
    )


def training_work(model: Model, kind: Kind, payload: bytes | Path) -> Work:
    """A forward pass, a forward and backward pass, or an optimizer step."""
    return Work(
        task=Task.OPTIM_STEP if kind is Kind.OPTIM_STEP else Task.PASS,
        model_id=model.model_id,
        backward=kind is Kind.FORWARD_BACKWARD,
        session_id=model.session_id,
        **_payload_fields(payload),
    )


def sample_work(
    owner: str,
    folder: str | None,
    payload: bytes | Path,
    on_tokens: Callable[[frames_pb2.Tokens], None] | None = None,
) -> Work:
    return Work(
        task=Task.SAMPLE,
        folder=folder,
        owner=owner,
        on_tokens=on_tokens,
        **_payload_fields(payload),
    )


def register_loss_work(loss: CustomLoss) -> Work:
    return Work(
        task=Task.REGISTER_LOSS,
        loss_id=loss.loss_id,
        session_id=loss.session_id,
        payload=loss.definition,
    )


def forget_losses_work(session_id: str) -> Work:
    return Work(task=Task.FORGET_LOSSES, session_id=session_id)


def drop_work(model_id: str) -> Work:
    return Work(task=Task.DROP, model_id=model_id)


def clear_gradients_work(model_id: str) -> Work:
    return Work(task=Task.CLEAR_GRADIENTS, model_id=model_id)


def payload_size(payload: bytes | Path) -> int:
    return payload.stat().st_size if isinstance(payload, Path) else len(payload)


def _payload_fields(payload: bytes | Path) -> dict[str, Any]:
    return {"payload_file": payload} if isinstance(payload, Path) else {"payload": payload}


class PayloadCache:
    """Payloads between acceptance and execution. Large ones are files, which engines read."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._cache: dict[str, bytes] = {}
        self._cache_bytes = 0

    def add(self, request_id: str, payload: bytes) -> None:
        fits = self._cache_bytes + len(payload) <= PAYLOAD_CACHE_BYTES
        if len(payload) <= INLINE_BYTES and fits:
            self._cache[request_id] = payload
            self._cache_bytes += len(payload)

    async def get(self, request_id: str) -> bytes | Path:
        """The bytes, or the file that has them."""
        if (payload := self._cache.get(request_id)) is not None:
            return payload
        return await self._store.requests.payload(request_id)

    async def read(self, request_id: str) -> bytes:
        payload = await self.get(request_id)
        return await asyncio.to_thread(payload.read_bytes) if isinstance(payload, Path) else payload

    def forget(self, request_id: str) -> None:
        if (payload := self._cache.pop(request_id, None)) is not None:
            self._cache_bytes -= len(payload)


class _RecentOwners(defaultdict[str, float]):
    """Keeps the owners whose numbers were set last."""

    def __setitem__(self, owner: str, value: float) -> None:
        self.pop(owner, None)
        super().__setitem__(owner, value)
        if len(self) > MAX_OWNERS:
            del self[next(iter(self))]


class ComputeUsage:
    """What engines computed, for the metrics page."""

    def __init__(self) -> None:
        #: Number of operations and seconds of compute.
        self.by_task: dict[Task, tuple[int, float]] = {}
        #: Seconds of compute.
        self.by_owner: defaultdict[str, float] = _RecentOwners(float)

    def record(self, task: Task, owner: str, future: asyncio.Future[Outcome]) -> None:
        if future.cancelled() or future.exception() is not None:
            return
        compute_s = future.result().compute_s
        count, seconds = self.by_task.get(task, (0, 0.0))
        self.by_task[task] = (count + 1, seconds + compute_s)
        self.by_owner[owner] += compute_s


class Execution:
    """What all engines of a server share. A result is committed before its polls are woken."""

    def __init__(self, *, store: Store, executor: Executor, futures: Futures) -> None:
        self.store = store
        self.executor = executor
        self.futures = futures
        self.payloads = PayloadCache(store)
        self.failures = SessionFailures(store)
        self.usage = ComputeUsage()
        #: Accepted requests that this process runs, until their results are stored.
        self.claimed: set[str] = set()
        self.closing = False
        #: Done once the polls of the last commit were woken.
        self._last_woken: asyncio.Future[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def claim(self, row: RequestRow) -> bool:
        """Mark a request as run by this process; False if it already is, or is finished."""
        if row.request_id in self.claimed or self.futures.is_cached(row.request_id):
            return False
        self.claimed.add(row.request_id)
        self.futures.track(row)
        return True

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run in the background until the server stops; its reads wait for the database."""
        task = asyncio.create_task(work, context=accepted_work())
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a background task failed", exc_info=error)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def finish(self, row: RequestRow, outcome: RequestOutcome) -> None:
        """Store the outcome of a request that is not a step, and wake its polls."""
        self.payloads.forget(row.request_id)
        self.failures.update(
            outcome,
            request_id=row.request_id,
            kind=Kind(row.kind),
            session_id=row.session_id,
            model_id=row.model_id,
            sampling_session_id=row.sampling_session_id,
        )
        while True:
            try:
                return await self.store_with_retries(
                    functools.partial(self._store_and_wake, row, outcome)
                )
            except Exception as error:  # noqa: BLE001  e.g. ObjectTooLarge
                outcome = storage_failure(error)

    async def _store_and_wake(self, row: RequestRow, outcome: RequestOutcome) -> None:
        write = await self.prepare_write(row.request_id, outcome)
        commit = self.store.requests.finish_one(write)
        previous, woken = self._last_woken, asyncio.get_running_loop().create_future()
        # No `await` since the commit was queued: polls are woken in the order of the commits.
        self._last_woken = woken
        try:
            event = await commit
            if previous is not None and not previous.done():
                await asyncio.wait({previous})
            self.wake(row.request_id, row.owner, Kind(row.kind), row.session_id, outcome)
            # After the result: a client that reads the event fetches the result immediately.
            if event is not None:
                self.futures.completion_log.add(event)
        finally:
            woken.set_result(None)

    async def prepare_write(
        self, request_id: str, outcome: RequestOutcome
    ) -> request_rows.FinalState:
        """The row update of an outcome; a large result is written to a file here."""
        if outcome.error is not None:
            category = outcome.category or "server"
            return request_rows.failure(
                request_id, outcome.error, category=category, cause=outcome.cause
            )
        place = await self.store.requests.store_result(outcome.result)
        return request_rows.success(request_id, outcome.result, place)

    async def store_with_retries(self, attempt: Callable[[], Awaitable[None]]) -> None:
        """Raises the error of the last attempt."""
        await retry(
            attempt,
            STORE_BACKOFF,
            on_retry=lambda error, wait_s: log.warning(
                "a result was not stored; retrying in %.1f s: %r", wait_s, error
            ),
        )

    def wake(
        self,
        request_id: str,
        owner: str,
        kind: Kind,
        session_id: str | None,
        outcome: RequestOutcome,
    ) -> None:
        """The result is stored: wake the polls that wait for it."""
        self.claimed.discard(request_id)
        self.futures.finish(
            FinishedRequest(
                request_id=request_id,
                owner=owner,
                kind=kind,
                session_id=session_id,
                result=outcome.result,
                error=outcome.error,
                category=outcome.category,
            )
        )


@dataclass(frozen=True, slots=True)
class UnstoredResult:
    step: Step
    outcome: RequestOutcome
    #: `StepQueue.gradient_error` before the step.
    gradient_error: str | None

    @property
    def is_late(self) -> bool:
        """Whether the step arrived after its gap was closed, so that it was never in the queue."""
        return self.outcome.cause is Cause.LATE


class ResultWriter:
    """
    Stores the results of steps in order, with one task for each model that has some.

    Storing a result is retried. If it still fails, the step fails, and the model returns to its
    state before that step. Clients have not seen the results of later steps yet, so those steps run
    again.
    """

    def __init__(self, execution: Execution, on_rewind: Callable[["ModelState"], None]) -> None:
        self._execution = execution
        self._on_rewind = on_rewind

    def add(
        self,
        state: "ModelState",
        step: Step,
        outcome: RequestOutcome,
        *,
        gradient_error: str | None,
    ) -> None:
        """Queue the result of a step; `gradient_error` is the queue's value before the step."""
        model = state.model
        if step.request_id:
            self._execution.payloads.forget(step.request_id)
            self._execution.failures.update(
                outcome,
                request_id=step.request_id,
                kind=step.kind,
                session_id=model.session_id,
                model_id=model.model_id,
                creates_model=step.kind is Kind.CREATE_MODEL or step.creates_model,
            )
        state.unstored.append(UnstoredResult(step, outcome, gradient_error))
        if state.storing is None:
            state.storing = self._execution.spawn(self._store_all(state))

    async def _store_all(self, state: "ModelState") -> None:
        try:
            while state.unstored:
                await self._store_next(state)
        finally:
            state.storing = None

    async def _store_next(self, state: "ModelState") -> None:
        group = _storable_together(state.unstored)
        store = self._execution.store_with_retries
        try:
            try:
                await store(lambda: self._commit(state, group))
            except Exception:
                if len(group) == 1:
                    raise
                # Retry with the first result alone, so that a problem of a later one does not fail
                # it.
                group = group[:1]
                await store(lambda: self._commit(state, group))
        except Exception as error:  # noqa: BLE001  e.g. ObjectTooLarge
            self._rewind(state, group[0], storage_failure(error))
            return
        model = state.model
        for one in group:
            state.unstored.popleft()
            step = one.step
            if step.request_id:
                self._execution.wake(
                    step.request_id, model.owner, step.kind, model.session_id, one.outcome
                )

    async def _commit(self, state: "ModelState", group: Sequence[UnstoredResult]) -> None:
        """Store a group in one transaction."""
        requests = self._execution.store.requests
        first = group[0]
        if first.outcome.committed:
            return
        if not first.step.request_id:
            model = state.model
            new = NewRequest(
                owner=model.owner,
                kind=first.step.kind,
                base_model=model.base_model,
                payload=b"",
                session_id=model.session_id,
                model_id=model.model_id,
                seq_id=first.step.seq_id,
            )
            await requests.store_refused(new, first.outcome.error or "", cause=Cause.WORK)
            return
        writes = [
            await self._execution.prepare_write(one.step.request_id, one.outcome) for one in group
        ]
        await requests.finish_all(writes)

    def _rewind(self, state: "ModelState", failed: UnstoredResult, outcome: RequestOutcome) -> None:
        """Fail the step, and requeue the steps that ran after it."""
        if failed.outcome.error is not None:
            # A failed step changed nothing, so the results of the steps after it are still valid.
            again = replace(outcome, cause=failed.outcome.cause)
            state.unstored[0] = replace(failed, outcome=again)
            return
        behind = [one for one in list(state.unstored)[1:] if not one.is_late]
        late = [one for one in list(state.unstored)[1:] if one.is_late]
        state.unstored = deque([replace(failed, outcome=outcome), *late])
        queue = state.queue
        queue.gradient_error = failed.gradient_error
        queue.apply_result(failed.step, outcome.error)
        # Not to the first requeued step: there may be a gap before it.
        queue.rewind(failed.step.seq_id + 1)
        for one in behind:
            if one.step.request_id:
                queue.requeue([one.step])
            else:
                queue.requeue_refused(one.step, one.outcome.error or "")
        state.loaded_in = None
        state.rewinding = True
        self._on_rewind(state)


def _storable_together(unstored: Sequence[UnstoredResult]) -> list[UnstoredResult]:
    """
    The results to store in one transaction: all passes at the front, or else the first step.

    A step that is not a pass is stored in its own transaction, after all steps before it.
    """
    group: list[UnstoredResult] = []
    for one in unstored:
        alone = one.step.kind not in PASSES or not one.step.request_id or one.outcome.committed
        if group and alone:
            break
        group.append(one)
        if alone:
            break
    return group


class EngineClient:
    """Sends work to the engine of one base model, and isolates requests that crash it."""

    def __init__(
        self,
        base_model: str,
        execution: Execution,
        *,
        crash_files: CrashFiles | None = None,
        base_check: BaseModelCheck | None = None,
        max_sequences: int = 0,
    ) -> None:
        self.base_model = base_model
        self.base_check = base_check
        self.isolation = CrashIsolation(crash_files)
        self._crash_files = crash_files
        self._execution = execution
        self._executor = execution.executor
        self._admission = Admission(self.ready, max_sequences=max_sequences)
        #: Attempts were counted since the counts were stored.
        self._counts_changed = False

    def close(self) -> None:
        self._admission.close()

    async def ready(self) -> int:
        """Wait until the engine is up. Returns its incarnation."""
        return await self._executor.ready(self.base_model)

    async def send(
        self, work: Work, *, owner: str | None = None, incarnation: int | None = None
    ) -> asyncio.Future[Outcome]:
        """
        Send work, counted as usage of the owner if there is one. Returns a future of the outcome.

        The engine has the work when this returns, before anything that is sent later.
        """
        future = await self._executor.send(self.base_model, work, incarnation=incarnation)
        if owner is not None:
            record = functools.partial(self._execution.usage.record, work.task, owner)
            future.add_done_callback(record)
        return future

    async def run_request(self, row: RequestRow, prepare: Callable[[], Awaitable[Work]]) -> Outcome:
        """
        Run a request that is not a step, again after each loss until it is found to cause them.

        The work is prepared after admission, so waiting requests take no memory.
        """
        try:
            if self.isolation.must_fail(row.request_id):
                raise EngineLost(ENDED_WEB_PROCESS)
            while True:
                await self._admission.enter(row.owner)
                try:
                    work = await prepare()
                    async with self.isolation.attempt(row.request_id) as attempt:
                        try:
                            return await (await self.send(work, owner=row.owner))
                        except EngineLost as lost:
                            if self._execution.closing:
                                raise
                            self._admission.engine_lost()
                            if self.count_loss(row.request_id, attempt, lost):
                                raise
                finally:
                    self._admission.leave(row.owner)
        finally:
            self.isolation.forget(row.request_id)

    def count_loss(self, request_id: str, attempt: Attempt, lost: EngineLost) -> bool:
        """Count a lost attempt of a request or rebuild; True if this ended the engine."""
        stopping = self._execution.closing or self._execution.futures.closing
        if not lost.attempts or stopping:
            return False
        ended_engine = self.isolation.count(request_id, attempt, lost.attempts)
        # One write for all requests that were lost together.
        if not self._counts_changed:
            self._counts_changed = True
            self._execution.spawn(self._store_counts())
        return ended_engine

    async def _store_counts(self) -> None:
        """Store the counts, so that they survive this process."""
        self._counts_changed = False
        if self._crash_files is not None:
            self._crash_files.mark_running()
        stored = self._execution.store.attempts
        if counts := dict(self.isolation.counts):
            await stored.set(counts)
        else:
            await stored.clear(self.base_model)
