"""What everything that runs requests shares: background tasks, engine time, results to the disk."""

import asyncio
import functools
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from tinkex.server.executor import EngineLost, Executor, Outcome, Task, Work
from tinkex.server.scheduler.base_model_check import BaseModelCheck
from tinkex.server.scheduler.crash_isolation import Attempt, CrashIsolation, InFlightFile
from tinkex.server.scheduler.fairness import Admission
from tinkex.server.scheduler.results import (
    FinishedRequest,
    Futures,
    RequestOutcome,
    storage_failure,
)
from tinkex.server.scheduler.step_queue import Kind
from tinkex.server.store import (
    CustomLoss,
    Model,
    RequestRow,
    Store,
    accepted_work,
    request_writes,
)
from tinkex.server.store.requests import INLINE_BYTES
from tinkex.wire.codec import encode_json
from tinkex.wire.proto import frames_pb2

log = logging.getLogger("tinkex.server.scheduler")

#: A result that was not stored is tried again after these, and then its request fails. Trouble of
#: the disk or the database is not meant: that is waited for, however long it lasts.
STORE_RETRY_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)

#: Owners on the metrics page: those who used an engine last.
MAX_OWNERS = 1_000


class _Recent(defaultdict[str, float]):
    """Numbers of the owners that were set last."""

    def __setitem__(self, owner: str, value: float) -> None:
        self.pop(owner, None)
        super().__setitem__(owner, value)
        if len(self) > MAX_OWNERS:
            del self[next(iter(self))]


class Execution:
    """One for each dispatcher. A result is committed before its waiters are woken."""

    def __init__(
        self,
        *,
        store: Store,
        executor: Executor,
        futures: Futures,
        rolls: Mapping[str, InFlightFile] | None = None,
        base_check: BaseModelCheck | None = None,
        max_sequences: int = 0,
    ) -> None:
        self.store = store
        self.executor = executor
        self.futures = futures
        self.base_check = base_check
        self.payloads = PayloadCache(store)
        self.failures = SessionFailures(store)
        #: Accepted requests that this process has, until their results are on disk.
        self.taken: set[str] = set()
        #: By base model: who is with its engine together.
        self.companies: defaultdict[str, CrashIsolation] = defaultdict(CrashIsolation)
        self.companies.update({name: CrashIsolation(roll) for name, roll in (rolls or {}).items()})
        #: By base model: what outside the order of steps goes to its engine next.
        self._admissions: dict[str, Admission] = {}
        self._max_sequences = max_sequences
        #: Base models of which an engine died, and whose counts are not written down yet.
        self._to_count: set[str] = set()
        self.closing = False
        #: Seconds of computing and number of operations, by task; for the metrics page.
        self.computed: dict[Task, tuple[int, float]] = {}
        #: Seconds of computing by owner: who has which share.
        self.used_s: defaultdict[str, float] = _Recent(float)
        #: Done once the last request whose commit was asked for has been told of.
        self._told: asyncio.Future[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, row: RequestRow) -> bool:
        """Whether this process takes a request now: False when it has it, or has finished it."""
        if row.request_id in self.taken or self.futures.is_kept(row.request_id):
            return False
        self.taken.add(row.request_id)
        self.futures.expect(row)
        return True

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """In the background, until it is done or the server stops; its reads wait for the database."""
        task = asyncio.create_task(work, context=accepted_work())
        self._tasks.add(task)
        task.add_done_callback(self._over)
        return task

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a background task failed", exc_info=error)

    async def stop(self) -> None:
        for admission in self._admissions.values():
            admission.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def send(
        self, base_model: str, work: Work, *, owner: str, incarnation: int | None = None
    ) -> asyncio.Future[Outcome]:
        """
        Hand work to an engine, on its owner's account; what is answered is its outcome.

        The engine has it when this returns: what is sent later comes later.
        """
        answer = await self.executor.send(base_model, work, incarnation=incarnation)
        answer.add_done_callback(functools.partial(self._count_work, work.task, owner))
        return answer

    async def run(
        self, base_model: str, work: Work, *, owner: str, incarnation: int | None = None
    ) -> Outcome:
        """Let an engine do this, on its owner's account."""
        return await (await self.send(base_model, work, owner=owner, incarnation=incarnation))

    def _count_work(self, task: Task, owner: str, answer: asyncio.Future[Outcome]) -> None:
        if answer.cancelled() or answer.exception() is not None:
            return
        compute_s = answer.result().compute_s
        count, seconds = self.computed.get(task, (0, 0.0))
        self.computed[task] = (count + 1, seconds + compute_s)
        self.used_s[owner] += compute_s

    async def insist(
        self, row: RequestRow, prepare: Callable[[], Awaitable[Work]], *, base_model: str = ""
    ) -> Outcome:
        """
        The same for a request outside the order of steps, however often its engine dies.

        The work is prepared when its turn comes, so that what waits takes no memory.
        """
        base_model = base_model or row.base_model
        company, admission = self.companies[base_model], self._admission(base_model)
        try:
            if (reason := company.condemned(row.request_id)) is not None:
                raise EngineLost(reason)
            while True:
                await admission.enter(row.owner)
                try:
                    work = await prepare()
                    async with company.visit(row.request_id) as visit:
                        try:
                            return await self.run(base_model, work, owner=row.owner)
                        except EngineLost:
                            if self.closing:
                                raise
                            admission.lost()
                            if self.lost(base_model, row.request_id, visit):
                                raise
                finally:
                    admission.leave(row.owner)
        finally:
            company.over(row.request_id)

    def _admission(self, base_model: str) -> Admission:
        if (admission := self._admissions.get(base_model)) is None:
            ready = functools.partial(self.executor.ready, base_model)
            admission = Admission(ready, max_sequences=self._max_sequences)
            self._admissions[base_model] = admission
        return admission

    def lost(self, base_model: str, request_id: str, visit: Attempt, *, times: int = 1) -> bool:
        """A request was lost with its engine; whether it is the one that kills it."""
        if self.futures.closing:
            return False  # the server was told to stop, and its engines may have been too
        guilty = self.companies[base_model].lost(request_id, visit, times=times)
        # Everybody who was lost at once is written down at once.
        if not self._to_count:
            self.spawn(self._count())
        self._to_count.add(base_model)
        return guilty

    async def _count(self) -> None:
        """Write down who was lost how often: another process may have to go on with it."""
        while self._to_count:
            base_model = self._to_count.pop()
            counted = dict(self.companies[base_model].counted)
            if counted:
                await self.store.deaths.note(counted)
            else:
                await self.store.deaths.clear(base_model)

    async def kept(self, request_id: str, ending: RequestOutcome) -> request_writes.Ending:
        """What is to be written of a request; a large result is on disk already."""
        if ending.error is not None:
            category = ending.category or "server"
            return request_writes.failure(
                request_id, ending.error, category=category, cause=ending.cause
            )
        place = await self.store.requests.keep(ending.result)
        return request_writes.success(request_id, ending.result, place)

    async def insist_on_storing(self, attempt: Callable[[], Awaitable[None]]) -> None:
        """Store something that was promised. Raises what the last attempt of many raised."""
        for wait_s in STORE_RETRY_S:
            try:
                return await attempt()
            except Exception as error:  # noqa: BLE001  e.g. ObjectTooLarge
                log.warning("a result was not stored; again in %.1f s: %r", wait_s, error)
            await asyncio.sleep(wait_s)
        await attempt()

    async def settle(self, row: RequestRow, ending: RequestOutcome) -> None:
        """A request outside the order of steps is over."""
        self.payloads.forget(row.request_id)
        self.failures.settled(
            ending,
            request_id=row.request_id,
            kind=Kind(row.kind),
            session_id=row.session_id,
            model_id=row.model_id,
            sampling_session_id=row.sampling_session_id,
        )
        while True:
            try:
                return await self.insist_on_storing(functools.partial(self._settle, row, ending))
            except Exception as error:  # noqa: BLE001  e.g. ObjectTooLarge
                ending = storage_failure(error)

    async def _settle(self, row: RequestRow, ending: RequestOutcome) -> None:
        """Store what became of a request, and tell everybody in the order of the commits."""
        kept = await self.kept(row.request_id, ending)
        commit = self.store.requests.finish_one(kept)
        before, told = self._told, asyncio.get_running_loop().create_future()
        # With nothing between this and the commit, so both have one order.
        self._told = told
        try:
            event = await commit
            if before is not None and not before.done():
                await asyncio.wait({before})
            self.wake(row.request_id, row.owner, Kind(row.kind), row.session_id, ending)
            # After the result: who hears of it fetches it at once.
            if event is not None:
                self.futures.completions.add(event)
        finally:
            told.set_result(None)

    def wake(
        self,
        request_id: str,
        owner: str,
        kind: Kind,
        session_id: str | None,
        ending: RequestOutcome,
    ) -> None:
        self.taken.discard(request_id)
        self.futures.settle(
            FinishedRequest(
                request_id=request_id,
                owner=owner,
                kind=kind,
                session_id=session_id,
                result=ending.result,
                error=ending.error,
                category=ending.category,
            )
        )


# MERGED: Which sessions have failed: marked with the reason, until work of theirs succeeds again. A session has failed when the server could not do its work, or when a model of it was not created. What a user can mend in the next request, such as an unknown loss, fails that request only.


MAX_MESSAGE_CHARS = 2000


class SessionFailures:
    """The marks, in memory and in the rows of their sessions."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._marked: set[str] = set()

    async def start(self) -> None:
        self._marked = set(await self._store.runs.failed_sessions())

    def settled(
        self,
        ending: RequestOutcome,
        *,
        request_id: str,
        kind: Kind,
        session_id: str | None,
        model_id: str | None = None,
        sampling_session_id: str | None = None,
        creates: bool = False,
    ) -> None:
        """Called for each result before it is stored, so that both are written together."""
        if session_id is None:
            return
        if ending.error is None:
            if session_id in self._marked:
                self._marked.discard(session_id)
                self._store.runs.mark_failed(session_id, None)
            return
        if ending.category != "server" and not creates:
            return
        reason: dict[str, Any] = {
            "type": "request",
            "request_id": request_id,
            "request_type": kind.value,
        }
        if model_id is not None and (creates or ending.permanent):
            reason = {"type": "training_run", "training_run_id": model_id}
        elif sampling_session_id is not None and ending.permanent:
            reason = {"type": "sampling_session", "sampling_session_id": sampling_session_id}
        self._marked.add(session_id)
        failure = {
            "category": "user" if ending.category == "user" else "internal",
            "message": ending.error[:MAX_MESSAGE_CHARS],
            "reason": reason,
        }
        self._store.runs.mark_failed(session_id, failure)


# MERGED: What engines are told for each kind of request. Pure: from stored things to work.


def create_work(model: Model) -> Work:
    return Work(
        task=Task.CREATE,
        model_id=model.model_id,
        lora_config=encode_json(dict(model.lora_config)),
        optimizer_config=encode_json(dict(model.optimizer_config)),
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


def training_work(model: Model, kind: Kind, payload: bytes | Path) -> Work:
    return Work(
        task=Task.OPTIM_STEP if kind is Kind.OPTIM_STEP else Task.PASS,
        model_id=model.model_id,
        backward=kind is Kind.FORWARD_BACKWARD,
        session_id=model.session_id,
        **_carried(payload),
    )


def sample_work(
    owner: str,
    folder: str | None,
    payload: bytes | Path,
    on_tokens: Callable[[frames_pb2.Tokens], None] | None = None,
) -> Work:
    return Work(
        task=Task.SAMPLE, folder=folder, owner=owner, on_tokens=on_tokens, **_carried(payload)
    )


def drop_work(model_id: str) -> Work:
    return Work(task=Task.DROP, model_id=model_id)


def clear_gradients_work(model_id: str) -> Work:
    return Work(task=Task.CLEAR_GRADIENTS, model_id=model_id)


def payload_size(payload: bytes | Path) -> int:
    return payload.stat().st_size if isinstance(payload, Path) else len(payload)


def _carried(payload: bytes | Path) -> dict[str, Any]:
    return {"payload_file": payload} if isinstance(payload, Path) else {"payload": payload}


# MERGED: What requests carry, kept in memory between their acceptance and their turn.


# Up to this much is kept; the rest is read back.
PAYLOAD_CACHE_BYTES = 128 * 2**20


class PayloadCache:
    """Bytes, or the file that holds them: large ones are files already, and engines read those."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._kept: dict[str, bytes] = {}
        self._kept_bytes = 0

    def keep(self, request_id: str, payload: bytes) -> None:
        """Keep this for its turn if it is small and there is room."""
        fits = self._kept_bytes + len(payload) <= PAYLOAD_CACHE_BYTES
        if len(payload) <= INLINE_BYTES and fits:
            self._kept[request_id] = payload
            self._kept_bytes += len(payload)

    async def get(self, request_id: str) -> bytes | Path:
        if (payload := self._kept.get(request_id)) is not None:
            return payload
        return await self._store.requests.payload(request_id)

    async def read(self, request_id: str) -> bytes:
        """The bytes themselves, wherever they are."""
        payload = await self.get(request_id)
        return await asyncio.to_thread(payload.read_bytes) if isinstance(payload, Path) else payload

    def forget(self, request_id: str) -> None:
        if (payload := self._kept.pop(request_id, None)) is not None:
            self._kept_bytes -= len(payload)
