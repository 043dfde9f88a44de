"""What everything that runs requests shares: background tasks, engine time, results to the disk."""

import asyncio
import functools
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from tinkex.server.base_check import BaseCheck
from tinkex.server.dispatch.admission import Admission
from tinkex.server.dispatch.company import Company, Visit
from tinkex.server.dispatch.ending import Ending, unstorable
from tinkex.server.dispatch.failures import Failures
from tinkex.server.dispatch.payloads import Payloads
from tinkex.server.executor import EngineLost, Executor, Outcome, Work
from tinkex.server.executor import Task as Doing
from tinkex.server.futures import Futures, Settled
from tinkex.server.plan import Kind
from tinkex.server.roll import Roll
from tinkex.server.store import RequestRow, Store, accepted_work, finishing

log = logging.getLogger("tinkex.server.dispatch")

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
                await self.store.deaths.note(counted)
            else:
                await self.store.deaths.clear(base_model)

    async def kept(self, request_id: str, ending: Ending) -> finishing.Ending:
        """What is to be written of a request; a large result is on disk already."""
        if ending.error is not None:
            category = ending.category or "server"
            return finishing.failure(
                request_id, ending.error, category=category, cause=ending.cause
            )
        place = await self.store.requests.keep(ending.result)
        return finishing.success(request_id, ending.result, place)

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
