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
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkex.server.executor import EngineLost, Executor, OnTokens
from tinkex.server.queued_request import PASSES, Cause, Kind, Outcome, QueuedRequest
from tinkex.server.retry import Backoff, retry
from tinkex.server.scheduler.base_model_check import BaseModelCheck
from tinkex.server.scheduler.crash_isolation import Attempt, CrashIsolation
from tinkex.server.scheduler.fairness import Admission
from tinkex.server.scheduler.result_waiters import Futures, failure_outcome, storage_failure
from tinkex.server.scheduler.step_queue import number_of
from tinkex.server.scheduler.web_crash import CrashFiles
from tinkex.server.store import CustomLoss, Model, Store, accepted_work
from tinkex.server.store.requests import INLINE_BYTES
from tinkex.wire.codec import encode_json
from tinkex.wire.errors import UserFailure
from tinkex.wire.proto import frames_pb2
from tinkex.wire.proto.frames_pb2 import Done, Order

if TYPE_CHECKING:
    from tinkex.server.scheduler.model_worker import ModelState

log = logging.getLogger("tinkex.server.scheduler")

#: Waits between the attempts to store a result; then its request fails. Outages of the disk or the
#: database are not counted: the store waits until they end.
STORE_BACKOFF = Backoff(first_s=0.5, max_s=30.0, retries=7)
#: Why a request must not run that was running alone when the web process crashed.
ENDED_WEB_PROCESS = "the web process crashed together with it"
#: The longest error text of a failed session.
MAX_MESSAGE_CHARS = 2000
#: Owners on the metrics page: the ones that used an engine last.
MAX_OWNERS = 1_000
#: Small payloads up to this size in total are kept in memory.
MAX_KEPT_BYTES = 128 * 2**20


def create_order(model: Model) -> Order:
    return Order(
        create=frames_pb2.Create(
            model_id=model.model_id,
            lora_config=encode_json(dict(model.lora_config)),
            optimizer_config=encode_json(dict(model.optimizer_config)),
        )
    )


def training_order(model: Model, kind: Kind, payload: bytes | Path) -> Order:
    """A forward pass, a forward and backward pass, or an optimizer step."""
    carried = _payload(payload)
    if kind is Kind.OPTIM_STEP:
        step = frames_pb2.OptimStep(model_id=model.model_id, payload=carried)
        return Order(optim_step=step)
    return Order(
        run_pass=frames_pb2.Pass(
            model_id=model.model_id,
            payload=carried,
            backward=kind is Kind.FORWARD_BACKWARD,
            session_id=model.session_id,
        )
    )


def sample_order(owner: str, folder: str | None, payload: bytes | Path, *, streams: bool) -> Order:
    """`folder` is that of the adapter; None for the base model."""
    return Order(
        sample=frames_pb2.Sample(
            payload=_payload(payload), adapter_folder=folder or "", owner=owner, streams=streams
        )
    )


def register_loss_order(loss: CustomLoss) -> Order:
    return Order(
        register_loss=frames_pb2.RegisterLoss(
            loss_id=loss.loss_id, session_id=loss.session_id, payload=_payload(loss.definition)
        )
    )


def clear_gradients_order(model_id: str) -> Order:
    return Order(clear_gradients=frames_pb2.ClearGradients(model_id=model_id))


def payload_size(payload: bytes | Path) -> int:
    return payload.stat().st_size if isinstance(payload, Path) else len(payload)


def _payload(payload: bytes | Path) -> frames_pb2.Payload:
    if isinstance(payload, Path):
        return frames_pb2.Payload(file=str(payload))
    return frames_pb2.Payload(inline=payload)


class Payloads:
    """Keeps small payloads in memory until their requests ran. Engines read large ones from files."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._kept_bytes = 0

    def keep(self, request: QueuedRequest) -> None:
        """Keep the payload of a new request in memory if there is room."""
        if request.payload is None:
            return
        size = len(request.payload)
        if size > INLINE_BYTES or self._kept_bytes + size > MAX_KEPT_BYTES:
            request.payload = None
        else:
            self._kept_bytes += size

    async def get(self, request: QueuedRequest) -> bytes | Path:
        """The bytes, or the file that has them."""
        if request.payload is not None:
            return request.payload
        return await self._store.requests.payload(request.request_id)

    async def read(self, request: QueuedRequest) -> bytes:
        payload = await self.get(request)
        return await asyncio.to_thread(payload.read_bytes) if isinstance(payload, Path) else payload

    def forget(self, request: QueuedRequest) -> None:
        if request.payload is not None:
            self._kept_bytes -= len(request.payload)
            request.payload = None


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
        #: Number of operations and seconds of compute, by the name of the order.
        self.by_task: dict[str, tuple[int, float]] = {}
        #: Seconds of compute.
        self.by_owner: defaultdict[str, float] = _RecentOwners(float)

    def record(self, task: str, owner: str, future: asyncio.Future[Done]) -> None:
        if future.cancelled() or future.exception() is not None:
            return
        compute_s = future.result().compute_s
        count, seconds = self.by_task.get(task, (0, 0.0))
        self.by_task[task] = (count + 1, seconds + compute_s)
        self.by_owner[owner] += compute_s


class SessionFailures:
    """
    Marks sessions as failed, with the reason, until one of their requests succeeds.

    A session has failed when the server could not do its work, or when one of its models was not
    created. An error that the user can fix in the next request, such as an unknown loss, fails only
    that request.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._failed: set[str] = set()

    async def start(self) -> None:
        self._failed = set(await self._store.sessions.failed_sessions())

    def update(self, request: QueuedRequest, outcome: Outcome) -> None:
        """Called for each outcome before it is stored, so that both are written together."""
        session_id = request.session_id
        if session_id is None:
            return
        if outcome.error is None:
            if session_id in self._failed:
                self._failed.discard(session_id)
                self._store.sessions.mark_failed(session_id, None)
            return
        if outcome.category != "server" and not request.creates_model:
            return
        reason: dict[str, Any] = {
            "type": "request",
            "request_id": request.request_id,
            "request_type": request.kind.value,
        }
        sampler_id = request.sampling_session_id
        if request.model_id is not None and (request.creates_model or outcome.permanent):
            reason = {"type": "training_run", "training_run_id": request.model_id}
        elif sampler_id is not None and outcome.permanent:
            reason = {"type": "sampling_session", "sampling_session_id": sampler_id}
        self._failed.add(session_id)
        failure = {
            "category": "user" if outcome.category == "user" else "internal",
            "message": outcome.error[:MAX_MESSAGE_CHARS],
            "reason": reason,
        }
        self._store.sessions.mark_failed(session_id, failure)


class Execution:
    """What all engines of a server share. A result is committed before its polls are woken."""

    def __init__(self, *, store: Store, executor: Executor, futures: Futures) -> None:
        self.store = store
        self.executor = executor
        self.futures = futures
        self.payloads = Payloads(store)
        self.failures = SessionFailures(store)
        self.usage = ComputeUsage()
        #: Accepted requests that this process runs, until their results are stored.
        self.claimed: set[str] = set()
        self.closing = False
        #: Done once the polls of the last commit were woken.
        self._last_woken: asyncio.Future[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def claim(self, request: QueuedRequest) -> bool:
        """Mark a request as run by this process; False if it already is, or is finished."""
        if request.request_id in self.claimed or self.futures.is_cached(request.request_id):
            return False
        self.claimed.add(request.request_id)
        self.futures.track(request)
        self.payloads.keep(request)
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

    async def outcome_of(self, work: Awaitable[Outcome]) -> Outcome | None:
        """What became of a request that is not a step; None if it runs after the next start."""
        try:
            return await work
        except Exception as error:  # noqa: BLE001  a bug must fail one request and be logged
            if self.closing and isinstance(error, EngineLost):
                return None
            return failure_outcome(error)

    async def finish(self, request: QueuedRequest, outcome: Outcome) -> None:
        """Store the outcome of a request that is not a step, and wake its polls."""
        self.payloads.forget(request)
        self.failures.update(request, outcome)
        while True:
            try:
                return await self.store_with_retries(
                    functools.partial(self._store_and_wake, request, outcome)
                )
            except Exception as error:  # noqa: BLE001  e.g. ObjectTooLarge
                outcome = storage_failure(error)

    async def _store_and_wake(self, request: QueuedRequest, outcome: Outcome) -> None:
        outcome = await self.with_stored_result(outcome)
        commit = self.store.requests.finish_one(request, outcome)
        previous, woken = self._last_woken, asyncio.get_running_loop().create_future()
        # No `await` since the commit was queued: polls are woken in the order of the commits.
        self._last_woken = woken
        try:
            event = await commit
            if previous is not None and not previous.done():
                await asyncio.wait({previous})
            self.wake(request, outcome)
            # After the result: a client that reads the event fetches the result immediately.
            if event is not None:
                self.futures.completion_log.add(event)
        finally:
            woken.set_result(None)

    async def with_stored_result(self, outcome: Outcome) -> Outcome:
        """The outcome as it is committed; a large result is written to a file here."""
        if outcome.error is not None:
            return outcome
        key = await self.store.requests.store_result(outcome.result)
        return outcome if key is None else replace(outcome, result_key=key)

    async def store_with_retries(self, attempt: Callable[[], Awaitable[None]]) -> None:
        """Raises the error of the last attempt."""
        await retry(
            attempt,
            STORE_BACKOFF,
            should_retry=lambda error: not isinstance(error, UserFailure),
            on_retry=lambda error, wait_s: log.warning(
                "a result was not stored; retrying in %.1f s: %r", wait_s, error
            ),
        )

    def wake(self, request: QueuedRequest, outcome: Outcome) -> None:
        """The outcome is stored: wake the polls that wait for it."""
        self.claimed.discard(request.request_id)
        request.outcome = outcome
        self.futures.finish(request)


#: A finished step whose outcome is not stored, and `StepQueue.gradient_error` before the step.
Unstored = tuple[QueuedRequest, Outcome, str | None]


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
        step: QueuedRequest,
        outcome: Outcome,
        *,
        gradient_error: str | None,
    ) -> None:
        """Queue the result of a step; `gradient_error` is the queue's value before the step."""
        if step.request_id:
            self._execution.payloads.forget(step)
            if outcome.commit is None:
                self._execution.failures.update(step, outcome)
        state.unstored.append((step, outcome, gradient_error))
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
                await store(lambda: self._commit(group))
            except Exception:
                if len(group) == 1:
                    raise
                # Retry with the first result alone, so that a problem of a later one does not fail
                # it.
                group = group[:1]
                await store(lambda: self._commit(group))
        except UserFailure as refused:
            # For example, the name of a checkpoint was taken meanwhile. The model is unchanged.
            step, _, gradient_error = group[0]
            state.unstored[0] = (step, failure_outcome(refused), gradient_error)
            return
        except Exception as error:  # noqa: BLE001  e.g. ObjectTooLarge
            self._rewind(state, group[0], storage_failure(error))
            return
        for step, outcome, _ in group:
            state.unstored.popleft()
            if step.request_id:
                self._execution.wake(step, outcome)

    async def _commit(self, group: Sequence[Unstored]) -> None:
        """Store a group in one transaction."""
        requests = self._execution.store.requests
        step, outcome, _ = group[0]
        if outcome.commit is not None:
            await outcome.commit()
            self._execution.failures.update(step, outcome)
            return
        if not step.request_id:
            await requests.store_refused(step, outcome)
            return
        await requests.finish_all(
            [
                (step, await self._execution.with_stored_result(outcome))
                for step, outcome, _ in group
            ]
        )

    def _rewind(self, state: "ModelState", failed: Unstored, outcome: Outcome) -> None:
        """Fail the step, and requeue the steps that ran after it."""
        step, before, gradient_error = failed
        if before.error is not None:
            # A failed step changed nothing, so the results of the steps after it are still valid.
            state.unstored[0] = (step, replace(outcome, cause=before.cause), gradient_error)
            return
        # A late step was never in the queue.
        behind = [one for one in list(state.unstored)[1:] if one[1].cause is not Cause.LATE]
        late = [one for one in list(state.unstored)[1:] if one[1].cause is Cause.LATE]
        state.unstored = deque([(step, outcome, gradient_error), *late])
        queue = state.queue
        queue.gradient_error = gradient_error
        queue.apply_result(step, outcome.error)
        # Not to the first requeued step: there may be a gap before it.
        queue.rewind(number_of(step) + 1)
        queue.requeue(requeued for requeued, _, _ in behind)
        state.loaded_in = None
        state.rewinding = True
        self._on_rewind(state)


def _storable_together(unstored: Sequence[Unstored]) -> list[Unstored]:
    """
    The results to store in one transaction: all passes at the front, or else the first step.

    A step that is not a pass is stored in its own transaction, after all steps before it.
    """
    group: list[Unstored] = []
    for one in unstored:
        step, outcome, _ = one
        alone = step.kind not in PASSES or not step.request_id or outcome.commit is not None
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
        self,
        order: Order,
        *,
        owner: str | None = None,
        incarnation: int | None = None,
        on_tokens: OnTokens | None = None,
    ) -> asyncio.Future[Done]:
        """
        Send an order, counted as usage of the owner if there is one.

        The engine has the order when this returns, before anything that is sent later.
        """
        future = await self._executor.send(
            self.base_model, order, incarnation=incarnation, on_tokens=on_tokens
        )
        if owner is not None:
            task = order.WhichOneof("work") or ""
            future.add_done_callback(functools.partial(self._execution.usage.record, task, owner))
        return future

    async def attempt(
        self,
        requests: Sequence[QueuedRequest],
        run: Callable[[Attempt], Awaitable[None]],
        *,
        admission: AbstractAsyncContextManager[None],
        model_id: str | None = None,
        is_unfinished: Callable[[QueuedRequest], bool] = lambda _: True,
    ) -> Sequence[QueuedRequest]:
        """
        Run requests once: one sample, or a batch of steps of `model_id`. Everything runs through here.

        Waits for `admission`, and keeps requests apart that crashed the engine before. If the engine
        is lost, this counts for each unfinished request. Returns the requests that have to run again.
        Raises `EngineLost` if the one request that is left crashes engines.
        """
        request_ids = [request.request_id for request in requests]
        if request_ids[0] == self.isolation.culprit:
            raise EngineLost(ENDED_WEB_PROCESS)
        names = request_ids if model_id is None else [model_id, *request_ids]
        async with admission, self.isolation.attempt(*names) as attempt:
            try:
                await run(attempt)
            except EngineLost as lost:
                unfinished = [request for request in requests if is_unfinished(request)]
                found = [self.count_loss(one.request_id, attempt, lost) for one in unfinished]
                if found == [True]:
                    raise
                return unfinished
        return ()

    async def run_request(
        self,
        request: QueuedRequest,
        prepare: Callable[[], Awaitable[tuple[Order, OnTokens | None]]],
    ) -> Done:
        """
        Run a request that is not a step, again after each loss until it is found to cause them.

        The order is made after admission, so waiting requests take no memory.
        """
        done = Done()

        async def run(_: Attempt) -> None:
            nonlocal done
            order, on_tokens = await prepare()
            try:
                done = await (await self.send(order, owner=request.owner, on_tokens=on_tokens))
            except EngineLost:
                if not self._execution.closing:
                    self._admission.engine_lost()
                raise

        try:
            while await self.attempt([request], run, admission=self._admission.turn(request.owner)):
                if self._execution.closing:
                    raise EngineLost("the server is stopping")
            return done
        finally:
            self.isolation.forget(request.request_id)

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
