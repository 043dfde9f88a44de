"""What everything that runs requests shares: background tasks, engine time, results to the disk."""

import asyncio
import functools
import logging
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tinkex.server.executor import EngineLost, Executor, Outcome, Work
from tinkex.server.executor import Task as Doing
from tinkex.server.scheduler import step_queue
from tinkex.server.scheduler.base_model_check import BaseCheck
from tinkex.server.scheduler.crash_isolation import Company, Roll, Visit
from tinkex.server.scheduler.fairness import Admission
from tinkex.server.scheduler.jobs import Ending, Payloads, unstorable
from tinkex.server.scheduler.model_state import Run, Unstored
from tinkex.server.scheduler.results import Futures, Settled
from tinkex.server.scheduler.step_queue import Cause, Kind, Step
from tinkex.server.store import NewRequest, RequestRow, Store, accepted_work, request_writes

log = logging.getLogger("tinkex.server.scheduler")

#: A result that was not stored is tried again after these, and then its request fails. Trouble of
#: the disk or the database is not meant: that is waited for, however long it lasts.
STORE_AGAIN_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)

#: Owners on the metrics page: those who used an engine last.
MOST_OWNERS = 1_000


class _Recent(defaultdict[str, float]):
    """Numbers of the owners that were set last."""

    def __setitem__(self, owner: str, value: float) -> None:
        self.pop(owner, None)
        super().__setitem__(owner, value)
        if len(self) > MOST_OWNERS:
            del self[next(iter(self))]


class Desk:
    """One for each dispatcher. A result is committed before its waiters are woken."""

    def __init__(
        self,
        *,
        store: Store,
        executor: Executor,
        futures: Futures,
        rolls: Mapping[str, Roll] | None = None,
        base_check: BaseCheck | None = None,
        max_sequences: int = 0,
    ) -> None:
        self.store = store
        self.executor = executor
        self.futures = futures
        self.base_check = base_check
        self.payloads = Payloads(store)
        self.failures = Failures(store)
        #: Accepted requests that this process has, until their results are on disk.
        self.taken: set[str] = set()
        #: By base model: who is with its engine together.
        self.companies: defaultdict[str, Company] = defaultdict(Company)
        self.companies.update({name: Company(roll) for name, roll in (rolls or {}).items()})
        #: By base model: what outside the order of steps goes to its engine next.
        self._admissions: dict[str, Admission] = {}
        self._max_sequences = max_sequences
        #: Base models of which an engine died, and whose counts are not written down yet.
        self._to_count: set[str] = set()
        self.closing = False
        #: Seconds of computing and number of operations, by task; for the metrics page.
        self.computed: dict[Doing, tuple[int, float]] = {}
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

    def _count_work(self, task: Doing, owner: str, answer: asyncio.Future[Outcome]) -> None:
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

    def lost(self, base_model: str, request_id: str, visit: Visit, *, times: int = 1) -> bool:
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
                await self.store.crash_counts.set(counted)
            else:
                await self.store.crash_counts.clear(base_model)

    async def kept(self, request_id: str, ending: Ending) -> request_writes.FinalState:
        """What is to be written of a request; a large result is on disk already."""
        if ending.error is not None:
            category = ending.category or "server"
            return request_writes.failure(
                request_id, ending.error, category=category, cause=ending.cause
            )
        place = await self.store.requests.store_result(ending.result)
        return request_writes.success(request_id, ending.result, place)

    async def insist_on_storing(self, attempt: Callable[[], Awaitable[None]]) -> None:
        """Store something that was promised. Raises what the last attempt of many raised."""
        for wait_s in STORE_AGAIN_S:
            try:
                return await attempt()
            except Exception as error:  # noqa: BLE001  e.g. ObjectTooLarge
                log.warning("a result was not stored; again in %.1f s: %r", wait_s, error)
            await asyncio.sleep(wait_s)
        await attempt()

    async def settle(self, row: RequestRow, ending: Ending) -> None:
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
                ending = unstorable(error)

    async def _settle(self, row: RequestRow, ending: Ending) -> None:
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
        self, request_id: str, owner: str, kind: Kind, session_id: str | None, ending: Ending
    ) -> None:
        self.taken.discard(request_id)
        self.futures.settle(
            Settled(
                request_id=request_id,
                owner=owner,
                kind=kind,
                session_id=session_id,
                result=ending.result,
                error=ending.error,
                category=ending.category,
            )
        )


# MERGED: What became of the steps of a model, on its way to the disk: strictly in the order of the steps. So the log on disk is always what the model was after one of its steps. A result that cannot be stored is tried again. If that does not help, its step fails, and the model goes back to the step before it: nobody was told what came after, and those steps run again.


class Results:
    """One task for each model that has something to store."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        #: Called when steps of a model wait again.
        self.went_back: Callable[[Run], None] = lambda run: None

    def add(self, run: Run, step: Step, ending: Ending, *, spoiled: str | None) -> None:
        """The step is over; `spoiled` is what its line said before it."""
        model = run.model
        if step.request_id:
            self._desk.payloads.forget(step.request_id)
            self._desk.failures.settled(
                ending,
                request_id=step.request_id,
                kind=step.kind,
                session_id=model.session_id,
                model_id=model.model_id,
                creates=step.kind is Kind.CREATE_MODEL or step.creates,
            )
        run.unstored.append(Unstored(step, ending, spoiled))
        if run.storing is None:
            run.storing = self._desk.spawn(self._store_all(run))

    async def _store_all(self, run: Run) -> None:
        try:
            while run.unstored:
                await self._store_next(run)
        finally:
            run.storing = None

    async def _store_next(self, run: Run) -> None:
        group = _together(run.unstored)
        try:
            try:
                await self._desk.insist_on_storing(lambda: self._commit(run, group))
            except Exception:
                if len(group) == 1:
                    raise
                # The first alone, so that it does not fail for one behind it.
                group = group[:1]
                await self._desk.insist_on_storing(lambda: self._commit(run, group))
        except Exception as error:  # noqa: BLE001  e.g. ObjectTooLarge
            self._go_back(run, group[0], unstorable(error))
            return
        for one in group:
            run.unstored.popleft()
            if one.step.request_id:
                self._desk.wake(
                    one.step.request_id,
                    run.model.owner,
                    one.step.kind,
                    run.model.session_id,
                    one.ending,
                )

    async def _commit(self, run: Run, group: Sequence[Unstored]) -> None:
        """All of a group in one transaction."""
        requests = self._desk.store.requests
        first = group[0]
        if first.ending.committed:
            return
        if not first.step.request_id:
            model = run.model
            new = NewRequest(
                owner=model.owner,
                kind=first.step.kind,
                base_model=model.base_model,
                payload=b"",
                session_id=model.session_id,
                model_id=model.model_id,
                seq_id=first.step.seq_id,
            )
            await requests.store_refused(new, first.ending.error or "", cause=Cause.WORK)
            return
        endings = [await self._desk.kept(one.step.request_id, one.ending) for one in group]
        await requests.finish_all(endings)

    def _go_back(self, run: Run, failed: Unstored, ending: Ending) -> None:
        """The step fails; what ran after it was not told to anybody, and runs again."""
        if failed.ending.error is not None:
            # It has changed nothing, so nothing after it is different without it.
            again = replace(ending, cause=failed.ending.cause)
            run.unstored[0] = replace(failed, ending=again)
            return
        behind = [one for one in list(run.unstored)[1:] if not one.is_late]
        late = [one for one in list(run.unstored)[1:] if one.is_late]
        run.unstored = deque([replace(failed, ending=ending), *late])
        line = run.line
        line.spoiled = failed.spoiled
        line.learn(failed.step, ending.error)
        # Not with the first of those put back: the number before it may be one that never came.
        line.go_back(failed.step.seq_id + 1)
        for one in behind:
            if one.step.request_id:
                line.put_back([one.step])
            else:
                line.put_back_refused(one.step, one.ending.error or "")
        run.live_in = None
        run.going_back = True
        self.went_back(run)


def _together(unstored: Sequence[Unstored]) -> list[Unstored]:
    """
    The passes in front, or the one step that is there.

    Everything else is stored once all before it is: it must not be on disk without them.
    """
    group: list[Unstored] = []
    for one in unstored:
        alone = (
            one.step.kind not in step_queue.PASSES
            or not one.step.request_id
            or one.ending.committed
        )
        if group and alone:
            break
        group.append(one)
        if alone:
            break
    return group


# MERGED: Which sessions have failed: marked with the reason, until work of theirs succeeds again. A session has failed when the server could not do its work, or when a model of it was not created. What a user can mend in the next request, such as an unknown loss, fails that request only.


LONGEST_MESSAGE = 2000


class Failures:
    """The marks, in memory and in the rows of their sessions."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._marked: set[str] = set()

    async def start(self) -> None:
        self._marked = set(await self._store.sessions.failed_sessions())

    def settled(
        self,
        ending: Ending,
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
                self._store.sessions.mark_failed(session_id, None)
            return
        if ending.category != "server" and not creates:
            return
        reason: dict[str, Any] = {
            "type": "request",
            "request_id": request_id,
            "request_type": kind.value,
        }
        if model_id is not None and (creates or ending.lasting):
            reason = {"type": "training_run", "training_run_id": model_id}
        elif sampling_session_id is not None and ending.lasting:
            reason = {"type": "sampling_session", "sampling_session_id": sampling_session_id}
        self._marked.add(session_id)
        failure = {
            "category": "user" if ending.category == "user" else "internal",
            "message": ending.error[:LONGEST_MESSAGE],
            "reason": reason,
        }
        self._store.sessions.mark_failed(session_id, failure)
