"""
Where requests end: their outcomes are stored, and then the polls that wait for them are woken.

`Execution` is what all engines share: which requests this process runs, their payloads, and the end of
samples and other requests without an order. `ResultWriter` ends steps, in the order of their model.
"""

import asyncio
import functools
import logging
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkex.server.executor import EngineLost, EngineRefused, Executor, WorkFailed
from tinkex.server.queued_request import PASSES, Cause, Outcome, QueuedRequest
from tinkex.server.retry import Backoff, retry
from tinkex.server.scheduler.result_waiters import Futures
from tinkex.server.scheduler.step_queue import number_of
from tinkex.server.store import Completion, Damaged, NotOwner, Store, accepted_work
from tinkex.server.store.requests import INLINE_BYTES
from tinkex.wire.errors import UserFailure
from tinkex.wire.proto.frames_pb2 import Done

if TYPE_CHECKING:
    from tinkex.server.scheduler.model_states import ModelState
    from tinkex.server.scheduler.sample_worker import TokenStream

log = logging.getLogger("tinkex.server.scheduler")

#: Waits between the attempts to store a result; then its request fails. Outages of the disk or the
#: database are not counted: the store waits until they end.
STORE_BACKOFF = Backoff(first_s=0.5, max_s=30.0, retries=7)
#: The longest error text of a failed session.
MAX_MESSAGE_CHARS = 2000
#: Small payloads up to this size in total are kept in memory.
MAX_KEPT_BYTES = 128 * 2**20
#: A request that was lost this many times, the last time alone, fails.
MAX_ATTEMPTS = 3


def crash_outcome(reason: str) -> Outcome:
    """The failure of a request that crashes the engine: it must not run again."""
    return Outcome(
        error=f"the engine died {MAX_ATTEMPTS} times while this request was running, the last time "
        f"with no other request running, so it is not run again: {reason}. "
        "The server's log has more details.",
        category="server",
    )


def failure_outcome(error: Exception) -> Outcome:
    """The failure of a request that raised this error while it ran."""
    match error:
        case WorkFailed():
            return Outcome(error=error.message, category=error.category)
        case UserFailure():
            return Outcome(error=str(error), category="user")
        case EngineRefused():
            return Outcome(error=error.text, category="server", permanent=True)
        case EngineLost():
            return crash_outcome(str(error))
        case _:
            return internal_error(error)


def storage_failure(error: Exception) -> Outcome:
    """The result was computed and could not be stored."""
    error_id = secrets.token_hex(4)
    log.error("a result could not be stored (%s)", error_id, exc_info=error)
    return Outcome(
        error=f"its result could not be stored ({type(error).__name__}), so the request failed. "
        f"Send the work again. The server's log has the details under the id {error_id}.",
        category="server",
    )


def internal_error(error: Exception) -> Outcome:
    """An unexpected error; the log has it under the id that the user sees."""
    error_id = secrets.token_hex(4)
    if isinstance(error, Damaged):
        log.error("damaged data %s: %s", error_id, error)
        text = f"{error}. The server's log has this under the id {error_id}."
        return Outcome(error=text, category="server")
    log.error("bug %s", error_id, exc_info=error)
    return Outcome(
        error=f"the server failed unexpectedly ({type(error).__name__}). "
        f"Its log has the details under the id {error_id}.",
        category="server",
    )


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


class ComputeUsage:
    """What engines computed, for the metrics page."""

    def __init__(self) -> None:
        #: Number of operations and seconds of compute, by the name of the order.
        self.by_task: dict[str, tuple[int, float]] = {}

    def record(self, task: str, future: asyncio.Future[Done]) -> None:
        if future.cancelled() or future.exception() is not None:
            return
        compute_s = future.result().compute_s
        count, seconds = self.by_task.get(task, (0, 0.0))
        self.by_task[task] = (count + 1, seconds + compute_s)


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
        """
        Called for each outcome before it is stored, so that both are written together.

        On a worker, called for steps after it is stored, which another worker may prevent.
        """
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

    def __init__(
        self, *, store: Store, executor: Executor, futures: Futures, worker_name: str | None = None
    ) -> None:
        #: The name of this worker; None on a server that is alone.
        self.worker_name = worker_name
        #: Called when results were not stored because another worker has the model; a worker sets it.
        self.on_not_owner: Callable[[ModelState], None] = lambda _state: None
        self.store = store
        self.executor = executor
        self.futures = futures
        self.payloads = Payloads(store)
        self.failures = SessionFailures(store)
        self.usage = ComputeUsage()
        #: Streams of running samples, by request id.
        self.token_streams: dict[str, TokenStream] = {}
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

    def release(self, request: QueuedRequest) -> None:
        """Another process finishes the request."""
        self.claimed.discard(request.request_id)
        self.payloads.forget(request)

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
            self.wake(request, outcome, event)
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
            should_retry=lambda error: not isinstance(error, UserFailure | NotOwner),
            on_retry=lambda error, wait_s: log.warning(
                "a result was not stored; retrying in %.1f s: %r", wait_s, error
            ),
        )

    def wake(
        self, request: QueuedRequest, outcome: Outcome, event: Completion | None = None
    ) -> None:
        """The outcome is stored, and the event of a sample: wake the polls that wait for them."""
        self.claimed.discard(request.request_id)
        # A commit refers to the request, and finished requests are cached.
        request.outcome = outcome if outcome.commit is None else replace(outcome, commit=None)
        self.futures.finish(request, event)


#: A finished step whose outcome is not stored, and `StepQueue.gradient_error` before the step.
Unstored = tuple[QueuedRequest, Outcome, str | None]


class ResultWriter:
    """
    Stores the results of steps in order, with one task for each model that has some.

    Storing a result is retried. If it still fails, the step fails, and the model returns to its
    state before that step. Clients have not seen the results of later steps yet, so those steps run
    again.
    """

    def __init__(
        self,
        execution: Execution,
        on_rewind: Callable[["ModelState"], None],
    ) -> None:
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
        step.term = state.term
        if step.request_id:
            self._execution.payloads.forget(step)
            if outcome.commit is None and step.term is None:
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
        except NotOwner as lost:
            log.warning("nothing more is stored here: %s", lost)
            self._execution.on_not_owner(state)
            return
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
                if outcome.commit is None and step.term is not None:
                    # Not before: if another worker has the model, nothing that happened here counts.
                    self._execution.failures.update(step, outcome)
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
