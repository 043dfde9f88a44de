"""One step of a model: what the engine does for it, and its way to the disk and its waiters."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from tinkex.server.executor import (
    EngineLost,
    EngineRefused,
    ModelMissing,
    Outcome,
    Work,
    WorkFailed,
    WorkMuddled,
)
from tinkex.server.scheduler import jobs, step_queue
from tinkex.server.scheduler.base_model_check import BaseChanged
from tinkex.server.scheduler.checkpoints import Saving
from tinkex.server.scheduler.crash_isolation import SUSPECT, Visit
from tinkex.server.scheduler.execution import Desk, Results
from tinkex.server.scheduler.fairness import Places
from tinkex.server.scheduler.jobs import Ending, bug, deadly
from tinkex.server.scheduler.model_state import Run, step_of
from tinkex.server.scheduler.recovery import Rebuilding, Revival, Snapshots
from tinkex.server.scheduler.step_queue import Cause, Kind, Step, Turn
from tinkex.server.store import Damaged, StorageError
from tinkex.wire.codec import encode_json
from tinkex.wire.errors import UserFailure
from tinkex.wire.training import CreateModelResponse

# After these the next step may start before the result is on disk: if the process dies in
# between, the step simply runs again.
SETTLED_BEHIND = frozenset({Kind.FORWARD, Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP})


class Steps:
    """Runs steps whose turn has come; whose turn it is, others know."""

    def __init__(self, desk: Desk, revival: Revival, saving: Saving, results: Results) -> None:
        self._desk = desk
        self._revival = revival
        self._saving = saving
        self._results = results

    async def begin(
        self, run: Run, step: Step, payload: bytes | Path | BaseException, incarnation: int
    ) -> asyncio.Task[None]:
        """
        Send the engine what a step is, and follow it to its end, good or bad.

        A pass is with the engine when this returns, so a later one comes later. What is answered
        raises EngineLost if the step is to be tried again.
        """
        doing: Awaitable[Ending]
        if isinstance(payload, BaseException):
            doing = _raised(payload)
        elif step.kind in SETTLED_BEHIND:
            try:
                run.bytes_since += jobs.size(payload)
                work = jobs.pass_or_step(run.model, step.kind, payload)
                doing = _computed(await self._revival.send(run, work, incarnation))
            except Exception as error:  # noqa: BLE001  as if the engine had answered it
                doing = _raised(error)
        else:
            doing = self._perform(run, step, incarnation)
        return asyncio.create_task(self._follow(run, step, doing))

    async def _follow(self, run: Run, step: Step, doing: Awaitable[Ending]) -> None:
        try:
            ending = await doing
        except EngineLost:
            raise  # whether it is tried again, its turn decides
        except WorkFailed as failed:
            ending = Ending(error=failed.message, category=failed.category)
        except UserFailure as failed:
            ending = Ending(error=str(failed), category="user")
        except Exception as error:  # noqa: BLE001  a bug must fail one step, not stop the model
            ending = bug(error)
        if ending.category == "server":
            # Half a step may have happened: the model is built again before its next one.
            run.live_in = None
        await self.end(run, step, ending)

    async def _perform(self, run: Run, step: Step, incarnation: int) -> Ending:
        model = run.model
        requests = self._desk.store.requests

        async def work(order: Work) -> Outcome:
            return await self._revival.work(run, order, incarnation)

        match step.kind:
            case Kind.CREATE_MODEL:
                await work(jobs.create(model))
                return Ending(result=encode_json(CreateModelResponse(model_id=model.model_id)))
            case Kind.SAVE_WEIGHTS | Kind.SAVE_FOR_SAMPLER | Kind.SAVE_EXTERNAL:
                payload = await self._desk.payloads.read(step.request_id)
                result = await self._saving.save(model, step, payload, work)
                return Ending(result=result, committed=True)
            case Kind.LOAD_WEIGHTS:
                if step.creates:
                    await work(jobs.create(model))
                payload = await self._desk.payloads.read(step.request_id)
                # Another owner's checkpoint was found when the request came.
                row = await requests.get(step.request_id)
                given = None if row is None else row.version_id
                result, version_id = await self._saving.load(model, payload, work, version_id=given)
                await requests.finish_load(step.request_id, result, version_id)
                return Ending(result=result, committed=True)
            case _:
                raise ValueError(f"{step.kind} is not a step of a model")

    async def end(self, run: Run, step: Step, ending: Ending) -> None:
        """The step is over: let the line go on, store the result, wake the waiters."""
        self._desk.companies[run.model.base_model].over(step.request_id)
        if run.going_back:
            # What it was computed from is not what the log says.
            run.line.put_back([step])
            return
        self._file(run, step, ending)
        run.stepped = step.kind is Kind.OPTIM_STEP
        if step.kind not in SETTLED_BEHIND:
            await run.settled()

    def file_refused(self, run: Run, step: Step, reason: str) -> None:
        """A step that was never accepted, and has failed: nobody waits for it."""
        if run.going_back:
            run.line.put_back_refused(step, reason)
        else:
            self._file(run, step, Ending(error=reason, category="user"))

    def _file(self, run: Run, step: Step, ending: Ending) -> None:
        spoiled = run.line.spoiled
        run.line.finish(step, failure=ending.error)
        run.steps_since += 1
        self._results.add(run, step, ending, spoiled=spoiled)


async def _computed(answer: asyncio.Future[Outcome]) -> Ending:
    return Ending(result=(await answer).result)


async def _raised(error: BaseException) -> Ending:
    raise error


# MERGED: Turn after turn of each model, for as long as its next step is there. What runs when is decided in `plan`; this is the loop around it.


log = logging.getLogger("tinkex.server.scheduler")

#: A gap is not closed while the database cannot be read; this long after, it is tried again.
GAP_AGAIN_S = 1.0


class Turns:
    """At most one driver for each model: it alone runs steps, or stands in their way."""

    def __init__(
        self,
        desk: Desk,
        *,
        revival: Revival,
        rebuilding: Rebuilding,
        results: Results,
        steps: Steps,
        places: Places,
        snapshots: Snapshots,
        gap_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._desk = desk
        self._revival = revival
        self._rebuilding = rebuilding
        self._results = results
        results.went_back = self._drive
        self._steps = steps
        self._places = places
        self._snapshots = snapshots
        self._gap_s = gap_s
        self._clock = clock

    def arrive(self, run: Run, step: Step) -> None:
        """A step has come: it runs when its turn comes."""
        if run.line.arrive(step, now_s=self._clock()):
            self._drive(run)
        else:
            late = Ending(error=step_queue.late(step.seq_id), category="user", cause=Cause.LATE)
            self._results.add(run, step, late, spoiled=None)

    async def find(self, run: Run) -> None:
        """Let steps of this model arrive that are on disk and not here."""
        for row in await self._desk.store.requests.waiting_steps(run.model.model_id):
            if self._desk.take(row):
                self.arrive(run, step_of(row))

    def refuse(self, run: Run, seq_id: int, kind: Kind, reason: str) -> None:
        """A step was malformed: those behind it need not wait for its number."""
        run.line.refuse(seq_id, kind, reason)
        self._drive(run)

    def between(self, run: Run, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do this in the driver's place, so that a step that comes now waits for it."""

        async def drive() -> None:
            try:
                await run.written()
                await work
            finally:
                work.close()
                run.driver = None
                self._drive(run)

        run.driver = self._desk.spawn(drive())
        return run.driver

    def _drive(self, run: Run) -> None:
        if run.driver is None and not self._desk.closing:
            run.driver = self._desk.spawn(self._drive_on(run))

    async def _drive_on(self, run: Run) -> None:
        """Take turn after turn until the next step has not come."""
        try:
            while not self._desk.closing:
                # Nothing of it runs now, so everything that had to be put back is.
                run.going_back = False
                turn = run.line.take(now_s=self._clock(), most=self._most(run))
                if turn is None:
                    break
                await self._take(run, turn)
                if self._snapshots.due(run):
                    await self._snapshots.begin(run)
        finally:
            run.driver = None
            self._watch_gap(run)

    def _most(self, run: Run) -> int | None:
        """After a death one at a time, to learn which step it was."""
        company = self._desk.companies[run.model.base_model]
        first = run.line.held.get(run.line.next_seq)
        return 1 if first is not None and company.deaths(first.request_id) else None

    async def _take(self, run: Run, turn: Turn) -> None:
        company = self._desk.companies[run.model.base_model]
        try:
            if turn.refusal is not None:
                await self._refuse(run, turn)
                return
            if (guilt := company.condemned(turn.steps[0].request_id)) is not None:
                await self._fail(run, turn, deadly(guilt))
                return
            if turn.steps[0].kind not in SETTLED_BEHIND:
                # It is stored by itself, and must not be on disk without what was before it.
                await run.settled()
            if run.live_in is None and (check := self._desk.base_check) is not None:
                await check.known(run.model.model_id, run.model.base_model)
            async with (
                self._places.place(run, turn),
                company.visit(*(step.request_id for step in turn.steps)) as visit,
            ):
                try:
                    await self._run(run, turn)
                except EngineLost as lost:
                    await self._lost(run, turn, visit, lost)
        except BaseChanged as changed:
            await self._fail(run, turn, Ending(error=str(changed), category="user"))
        except EngineRefused as refused:
            await self._fail(run, turn, Ending(error=str(refused), category="server", lasting=True))
        except WorkFailed as failed:
            # Not a step but building the model again: it is tried anew at the next step.
            run.live_in = None
            text = f"this model could not be built again from its log: {failed.message}"
            await self._fail(run, turn, Ending(error=text, category="server", lasting=True))
        except Damaged as damaged:
            run.live_in = None
            reason = Damaged(f"this model cannot be built again: {damaged}")
            await self._fail(run, turn, replace(bug(reason), lasting=True))
        except Exception as error:  # noqa: BLE001  a bug must fail steps, not stop the model
            run.live_in = None
            await self._fail(run, turn, bug(error))

    async def _lost(self, run: Run, turn: Turn, visit: Visit, lost: EngineLost) -> None:
        """What was with an engine that died is tried again, unless it is what killed it."""
        muddled = isinstance(lost, WorkMuddled)
        if muddled or isinstance(lost, ModelMissing):
            # That engine lives, and what it holds of this model is not what the log says.
            run.live_in = None
        unfinished = [step for step in turn.steps if step.seq_id in run.line.running]
        guilty = False
        if not self._desk.closing:
            # Neighbours in a batch are told apart at once: each is alone the next time.
            times = SUSPECT if muddled else 1
            base_model = run.model.base_model
            found = [
                self._desk.lost(base_model, step.request_id, visit, times=times)
                for step in unfinished
            ]
            guilty = found == [True]
        if guilty:
            await self._steps.end(run, unfinished[0], deadly(str(lost)))
        else:
            run.line.put_back(unfinished)

    async def _run(self, run: Run, turn: Turn) -> None:
        incarnation = await self._revival.alive(run)
        await self._rebuilding.give_way(run, turn)
        # At hand before any step starts: while a large one is being found, a small one behind it
        # would overtake it on the way to the engine.
        payloads = await asyncio.gather(
            *(self._desk.payloads.get(step.request_id) for step in turn.steps),
            return_exceptions=True,
        )
        if run.going_back:
            run.line.put_back(turn.steps)
            return
        running: list[asyncio.Task[None]] = []
        try:
            # One is with the engine before the next one is sent.
            for step, payload in zip(turn.steps, payloads, strict=True):
                running.append(await self._steps.begin(run, step, payload, incarnation))
            outcomes = await asyncio.gather(*running, return_exceptions=True)
        except asyncio.CancelledError:
            for task in running:
                task.cancel()
            raise
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _fail(self, run: Run, turn: Turn, ending: Ending) -> None:
        for step in turn.steps:
            if step.seq_id not in run.line.running:
                continue
            if turn.unfiled:  # it has failed already, and nobody waits for it
                self._steps.file_refused(run, step, turn.refusal or "")
            else:
                await self._steps.end(run, step, ending)

    async def _refuse(self, run: Run, turn: Turn) -> None:
        if turn.clears_gradients and run.line.stillborn is None:
            work = jobs.clear_gradients(run.model.model_id)
            # Gradients that died with their engine are gone. What is built again from the log
            # stops at these refusals: put back, the steps would run as if nothing were missing.
            with contextlib.suppress(EngineLost):
                await self._revival.work(run, work, await self._revival.alive(run))
        for step in turn.steps:
            if turn.unfiled:
                self._steps.file_refused(run, step, turn.refusal or "")
                continue
            refused = Ending(error=turn.refusal, category="user", cause=turn.cause)
            await self._steps.end(run, step, refused)

    def _watch_gap(self, run: Run) -> None:
        """Set the clock for a number that others wait for."""
        if run.gap_timer is not None:
            run.gap_timer.cancel()
            run.gap_timer = None
        gap = run.line.gap()
        if gap is None or self._desk.closing:
            return
        left_s = gap.since_s + self._gap_s - self._clock()
        left_s = max(left_s, min(GAP_AGAIN_S, self._gap_s))
        run.gap_timer = asyncio.get_running_loop().call_later(left_s, self._gap_over, run, gap)

    def _gap_over(self, run: Run, gap: step_queue.Gap) -> None:
        run.gap_timer = None
        if run.line.gap() == gap and run.driver is None:
            self.between(run, self._close_gap(run, gap))

    async def _close_gap(self, run: Run, gap: step_queue.Gap) -> None:
        # What was accepted has arrived, even if it was not handed on.
        try:
            await self.find(run)
        except StorageError as error:
            log.info("a missing step of %s is given up later: %s", run.model.model_id, error)
            return
        if run.line.gap() == gap:
            await self._take(run, run.line.close_gap(now_s=self._clock()))
