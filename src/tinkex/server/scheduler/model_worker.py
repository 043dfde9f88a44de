"""One step of a model: what the engine does for it, and its way to the disk and its waiters."""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
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
from tinkex.server.scheduler import step_queue
from tinkex.server.scheduler.base_model_check import BaseModelChanged
from tinkex.server.scheduler.checkpoints import CheckpointSteps
from tinkex.server.scheduler.crash_isolation import ISOLATE_AFTER, Attempt
from tinkex.server.scheduler.execution import (
    Execution,
    clear_gradients_work,
    create_work,
    payload_size,
    training_work,
)
from tinkex.server.scheduler.fairness import TrainingSlots
from tinkex.server.scheduler.recovery import RebuildQueue, Recovery, Snapshots
from tinkex.server.scheduler.results import (
    RequestOutcome,
    crash_outcome,
    internal_error,
    storage_failure,
)
from tinkex.server.scheduler.step_queue import Cause, Kind, Step, StepBatch, StepQueue
from tinkex.server.store import Damaged, Model, NewRequest, RequestRow, StorageTrouble
from tinkex.wire.codec import encode_json
from tinkex.wire.errors import UserFailure
from tinkex.wire.training import CreateModelResponse

# MERGED: One model that has had work since this process started: its line, its engine, what it costs.


@dataclass(frozen=True, slots=True)
class UnstoredResult:
    """What became of a step, and why the optimizer was to be refused before it, if it was."""

    step: Step
    ending: RequestOutcome
    spoiled: str | None

    @property
    def is_late(self) -> bool:
        """It was never in the line of its model."""
        return self.ending.cause is Cause.LATE


@dataclass(slots=True)
class ModelState:
    """Changed by whoever is in its driver's place, one at a time."""

    model: Model
    line: StepQueue
    #: The engine incarnation that has this model in memory, as its log says.
    loaded_in: int | None = None
    driver: asyncio.Task[None] | None = None
    gap_timer: asyncio.TimerHandle | None = None
    #: What became of steps and is not on disk yet, in their order; and who stores it.
    unstored: deque[UnstoredResult] = field(default_factory=deque)
    storing: asyncio.Task[None] | None = None
    #: A result could not be stored: what runs now is put back, and the model built again.
    rewinding: bool = False
    #: Seconds that engines computed for it.
    computed_s: float = 0.0
    #: The snapshot that is being written while the model goes on.
    writing: asyncio.Task[None] | None = None
    #: StepRunner, and bytes of payloads, since the last snapshot.
    steps_since_snapshot: int = 0
    bytes_since_snapshot: int = 0
    #: Whether the last step was one of the optimizer, after which there are no gradients.
    after_optim_step: bool = False

    @property
    def is_idle(self) -> bool:
        """Nothing of it runs, waits, or is known here only."""
        waits = self.line.held or self.line.running or self.line.refused
        return self.driver is None and self.storing is None and not waits

    def computed(self, answer: asyncio.Future[Outcome]) -> None:
        """An engine has answered: the time it took is this model's."""
        if not answer.cancelled() and answer.exception() is None:
            self.computed_s += answer.result().compute_s

    async def settled(self) -> None:
        """Until every result of this model is on disk."""
        while self.storing is not None:
            await asyncio.wait({self.storing})

    async def written(self) -> None:
        """Until no snapshot of this model is under way."""
        if self.writing is not None:
            await asyncio.wait({self.writing})
            self.writing = None


def step_of(row: RequestRow) -> Step:
    return Step(
        seq_id=row.seq_id or 0,
        request_id=row.request_id,
        kind=Kind(row.kind),
        creates=row.kind == Kind.LOAD_WEIGHTS and row.seq_id == 0,
        tokens=row.tokens,
    )


# MERGED: What became of the steps of a model, on its way to the disk: strictly in the order of the steps. So the log on disk is always what the model was after one of its steps. A result that cannot be stored is tried again. If that does not help, its step fails, and the model goes back to the step before it: nobody was told what came after, and those steps run again.


class ResultWriter:
    """One task for each model that has something to store."""

    def __init__(self, desk: Execution) -> None:
        self._desk = desk
        #: Called when steps of a model wait again.
        self.went_back: Callable[[ModelState], None] = lambda run: None

    def add(
        self, run: ModelState, step: Step, ending: RequestOutcome, *, spoiled: str | None
    ) -> None:
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
        run.unstored.append(UnstoredResult(step, ending, spoiled))
        if run.storing is None:
            run.storing = self._desk.spawn(self._store_all(run))

    async def _store_all(self, run: ModelState) -> None:
        try:
            while run.unstored:
                await self._store_next(run)
        finally:
            run.storing = None

    async def _store_next(self, run: ModelState) -> None:
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
            self._go_back(run, group[0], storage_failure(error))
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

    async def _commit(self, run: ModelState, group: Sequence[UnstoredResult]) -> None:
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
            await requests.file_refused(new, first.ending.error or "", cause=Cause.WORK)
            return
        endings = [await self._desk.kept(one.step.request_id, one.ending) for one in group]
        await requests.finish_all(endings)

    def _go_back(self, run: ModelState, failed: UnstoredResult, ending: RequestOutcome) -> None:
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
        line.rewind(failed.step.seq_id + 1)
        for one in behind:
            if one.step.request_id:
                line.requeue([one.step])
            else:
                line.requeue_refused(one.step, one.ending.error or "")
        run.loaded_in = None
        run.rewinding = True
        self.went_back(run)


def _together(unstored: Sequence[UnstoredResult]) -> list[UnstoredResult]:
    """
    The passes in front, or the one step that is there.

    Everything else is stored once all before it is: it must not be on disk without them.
    """
    group: list[UnstoredResult] = []
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


# MERGED: One step of a model


# After these the next step may start before the result is on disk: if the process dies in
# between, the step simply runs again.
PIPELINED = frozenset({Kind.FORWARD, Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP})


class StepRunner:
    """ModelStates steps whose turn has come; whose turn it is, others know."""

    def __init__(
        self, desk: Execution, revival: Recovery, saving: CheckpointSteps, results: ResultWriter
    ) -> None:
        self._desk = desk
        self._revival = revival
        self._saving = saving
        self._results = results

    async def begin(
        self, run: ModelState, step: Step, payload: bytes | Path | BaseException, incarnation: int
    ) -> asyncio.Task[None]:
        """
        Send the engine what a step is, and follow it to its end, good or bad.

        A pass is with the engine when this returns, so a later one comes later. What is answered
        raises EngineLost if the step is to be tried again.
        """
        doing: Awaitable[RequestOutcome]
        if isinstance(payload, BaseException):
            doing = _raised(payload)
        elif step.kind in PIPELINED:
            try:
                run.bytes_since_snapshot += payload_size(payload)
                work = training_work(run.model, step.kind, payload)
                doing = _computed(await self._revival.send(run, work, incarnation))
            except Exception as error:  # noqa: BLE001  as if the engine had answered it
                doing = _raised(error)
        else:
            doing = self._perform(run, step, incarnation)
        return asyncio.create_task(self._follow(run, step, doing))

    async def _follow(self, run: ModelState, step: Step, doing: Awaitable[RequestOutcome]) -> None:
        try:
            ending = await doing
        except EngineLost:
            raise  # whether it is tried again, its turn decides
        except WorkFailed as failed:
            ending = RequestOutcome(error=failed.message, category=failed.category)
        except UserFailure as failed:
            ending = RequestOutcome(error=str(failed), category="user")
        except Exception as error:  # noqa: BLE001  a bug must fail one step, not stop the model
            ending = internal_error(error)
        if ending.category == "server":
            # Half a step may have happened: the model is built again before its next one.
            run.loaded_in = None
        await self.end(run, step, ending)

    async def _perform(self, run: ModelState, step: Step, incarnation: int) -> RequestOutcome:
        model = run.model
        requests = self._desk.store.requests

        async def work(order: Work) -> Outcome:
            return await self._revival.work(run, order, incarnation)

        match step.kind:
            case Kind.CREATE_MODEL:
                await work(create_work(model))
                return RequestOutcome(
                    result=encode_json(CreateModelResponse(model_id=model.model_id))
                )
            case Kind.SAVE_WEIGHTS | Kind.SAVE_FOR_SAMPLER | Kind.SAVE_EXTERNAL:
                payload = await self._desk.payloads.read(step.request_id)
                result = await self._saving.save(model, step, payload, work)
                return RequestOutcome(result=result, committed=True)
            case Kind.LOAD_WEIGHTS:
                if step.creates:
                    await work(create_work(model))
                payload = await self._desk.payloads.read(step.request_id)
                # Another owner's checkpoint was found when the request came.
                row = await requests.get(step.request_id)
                given = None if row is None else row.version_id
                result, version_id = await self._saving.load(model, payload, work, version_id=given)
                await requests.finish_load(step.request_id, result, version_id)
                return RequestOutcome(result=result, committed=True)
            case _:
                raise ValueError(f"{step.kind} is not a step of a model")

    async def end(self, run: ModelState, step: Step, ending: RequestOutcome) -> None:
        """The step is over: let the line go on, store the result, wake the waiters."""
        self._desk.companies[run.model.base_model].over(step.request_id)
        if run.rewinding:
            # What it was computed from is not what the log says.
            run.line.requeue([step])
            return
        self._file(run, step, ending)
        run.after_optim_step = step.kind is Kind.OPTIM_STEP
        if step.kind not in PIPELINED:
            await run.settled()

    def file_refused(self, run: ModelState, step: Step, reason: str) -> None:
        """A step that was never accepted, and has failed: nobody waits for it."""
        if run.rewinding:
            run.line.requeue_refused(step, reason)
        else:
            self._file(run, step, RequestOutcome(error=reason, category="user"))

    def _file(self, run: ModelState, step: Step, ending: RequestOutcome) -> None:
        spoiled = run.line.spoiled
        run.line.finish(step, failure=ending.error)
        run.steps_since_snapshot += 1
        self._results.add(run, step, ending, spoiled=spoiled)


async def _computed(answer: asyncio.Future[Outcome]) -> RequestOutcome:
    return RequestOutcome(result=(await answer).result)


async def _raised(error: BaseException) -> RequestOutcome:
    raise error


# MERGED: StepBatch after turn of each model, for as long as its next step is there. What runs when is decided in `plan`; this is the loop around it.


log = logging.getLogger("tinkex.server.scheduler")

#: A gap is not closed while the database cannot be read; this long after, it is tried again.
GAP_RETRY_S = 1.0


class ModelWorkers:
    """At most one driver for each model: it alone runs steps, or stands in their way."""

    def __init__(
        self,
        desk: Execution,
        *,
        revival: Recovery,
        rebuilding: RebuildQueue,
        results: ResultWriter,
        steps: StepRunner,
        places: TrainingSlots,
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

    def arrive(self, run: ModelState, step: Step) -> None:
        """A step has come: it runs when its turn comes."""
        if run.line.arrive(step, now_s=self._clock()):
            self._drive(run)
        else:
            late = RequestOutcome(
                error=step_queue.late(step.seq_id), category="user", cause=Cause.LATE
            )
            self._results.add(run, step, late, spoiled=None)

    async def find(self, run: ModelState) -> None:
        """Let steps of this model arrive that are on disk and not here."""
        for row in await self._desk.store.requests.waiting_steps(run.model.model_id):
            if self._desk.take(row):
                self.arrive(run, step_of(row))

    def refuse(self, run: ModelState, seq_id: int, kind: Kind, reason: str) -> None:
        """A step was malformed: those behind it need not wait for its number."""
        run.line.refuse(seq_id, kind, reason)
        self._drive(run)

    def between(self, run: ModelState, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
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

    def _drive(self, run: ModelState) -> None:
        if run.driver is None and not self._desk.closing:
            run.driver = self._desk.spawn(self._drive_on(run))

    async def _drive_on(self, run: ModelState) -> None:
        """Take turn after turn until the next step has not come."""
        try:
            while not self._desk.closing:
                # Nothing of it runs now, so everything that had to be put back is.
                run.rewinding = False
                turn = run.line.take(now_s=self._clock(), most=self._most(run))
                if turn is None:
                    break
                await self._take(run, turn)
                if self._snapshots.due(run):
                    await self._snapshots.begin(run)
        finally:
            run.driver = None
            self._watch_gap(run)

    def _most(self, run: ModelState) -> int | None:
        """After a death one at a time, to learn which step it was."""
        company = self._desk.companies[run.model.base_model]
        first = run.line.held.get(run.line.next_seq)
        return 1 if first is not None and company.deaths(first.request_id) else None

    async def _take(self, run: ModelState, turn: StepBatch) -> None:
        company = self._desk.companies[run.model.base_model]
        try:
            if turn.refusal is not None:
                await self._refuse(run, turn)
                return
            if (guilt := company.condemned(turn.steps[0].request_id)) is not None:
                await self._fail(run, turn, crash_outcome(guilt))
                return
            if turn.steps[0].kind not in PIPELINED:
                # It is stored by itself, and must not be on disk without what was before it.
                await run.settled()
            if run.loaded_in is None and (check := self._desk.base_check) is not None:
                await check.known(run.model.model_id, run.model.base_model)
            async with (
                self._places.place(run, turn),
                company.visit(*(step.request_id for step in turn.steps)) as visit,
            ):
                try:
                    await self._run(run, turn)
                except EngineLost as lost:
                    await self._lost(run, turn, visit, lost)
        except BaseModelChanged as changed:
            await self._fail(run, turn, RequestOutcome(error=str(changed), category="user"))
        except EngineRefused as refused:
            await self._fail(
                run, turn, RequestOutcome(error=str(refused), category="server", permanent=True)
            )
        except WorkFailed as failed:
            # Not a step but building the model again: it is tried anew at the next step.
            run.loaded_in = None
            text = f"this model could not be built again from its log: {failed.message}"
            await self._fail(
                run, turn, RequestOutcome(error=text, category="server", permanent=True)
            )
        except Damaged as damaged:
            run.loaded_in = None
            reason = Damaged(f"this model cannot be built again: {damaged}")
            await self._fail(run, turn, replace(internal_error(reason), permanent=True))
        except Exception as error:  # noqa: BLE001  a bug must fail steps, not stop the model
            run.loaded_in = None
            await self._fail(run, turn, internal_error(error))

    async def _lost(
        self, run: ModelState, turn: StepBatch, visit: Attempt, lost: EngineLost
    ) -> None:
        """What was with an engine that died is tried again, unless it is what killed it."""
        muddled = isinstance(lost, WorkMuddled)
        if muddled or isinstance(lost, ModelMissing):
            # That engine lives, and what it holds of this model is not what the log says.
            run.loaded_in = None
        unfinished = [step for step in turn.steps if step.seq_id in run.line.running]
        guilty = False
        if not self._desk.closing:
            # Neighbours in a batch are told apart at once: each is alone the next time.
            times = ISOLATE_AFTER if muddled else 1
            base_model = run.model.base_model
            found = [
                self._desk.lost(base_model, step.request_id, visit, times=times)
                for step in unfinished
            ]
            guilty = found == [True]
        if guilty:
            await self._steps.end(run, unfinished[0], crash_outcome(str(lost)))
        else:
            run.line.requeue(unfinished)

    async def _run(self, run: ModelState, turn: StepBatch) -> None:
        incarnation = await self._revival.alive(run)
        await self._rebuilding.give_way(run, turn)
        # At hand before any step starts: while a large one is being found, a small one behind it
        # would overtake it on the way to the engine.
        payloads = await asyncio.gather(
            *(self._desk.payloads.get(step.request_id) for step in turn.steps),
            return_exceptions=True,
        )
        if run.rewinding:
            run.line.requeue(turn.steps)
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

    async def _fail(self, run: ModelState, turn: StepBatch, ending: RequestOutcome) -> None:
        for step in turn.steps:
            if step.seq_id not in run.line.running:
                continue
            if turn.unfiled:  # it has failed already, and nobody waits for it
                self._steps.file_refused(run, step, turn.refusal or "")
            else:
                await self._steps.end(run, step, ending)

    async def _refuse(self, run: ModelState, turn: StepBatch) -> None:
        if turn.clears_gradients and run.line.creation_error is None:
            work = clear_gradients_work(run.model.model_id)
            # Gradients that died with their engine are gone. What is built again from the log
            # stops at these refusals: put back, the steps would run as if nothing were missing.
            with contextlib.suppress(EngineLost):
                await self._revival.work(run, work, await self._revival.alive(run))
        for step in turn.steps:
            if turn.unfiled:
                self._steps.file_refused(run, step, turn.refusal or "")
                continue
            refused = RequestOutcome(error=turn.refusal, category="user", cause=turn.cause)
            await self._steps.end(run, step, refused)

    def _watch_gap(self, run: ModelState) -> None:
        """Set the clock for a number that others wait for."""
        if run.gap_timer is not None:
            run.gap_timer.cancel()
            run.gap_timer = None
        gap = run.line.gap()
        if gap is None or self._desk.closing:
            return
        left_s = gap.since_s + self._gap_s - self._clock()
        left_s = max(left_s, min(GAP_RETRY_S, self._gap_s))
        run.gap_timer = asyncio.get_running_loop().call_later(left_s, self._gap_over, run, gap)

    def _gap_over(self, run: ModelState, gap: step_queue.Gap) -> None:
        run.gap_timer = None
        if run.line.gap() == gap and run.driver is None:
            self.between(run, self._close_gap(run, gap))

    async def _close_gap(self, run: ModelState, gap: step_queue.Gap) -> None:
        # What was accepted has arrived, even if it was not handed on.
        try:
            await self.find(run)
        except StorageTrouble as error:
            log.info("a missing step of %s is given up later: %s", run.model.model_id, error)
            return
        if run.line.gap() == gap:
            await self._take(run, run.line.close_gap(now_s=self._clock()))
