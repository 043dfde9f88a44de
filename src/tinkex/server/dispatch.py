"""
From accepted rows to engines and back: every model's steps in order, every sample at once.

What runs when is decided in `plan`; this is the loop around it. A result is committed before its
waiters are woken. When an engine dies, a model is built again from its log before its next step.
"""

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinkex.server import plan
from tinkex.server.executor import (
    EngineLost,
    EngineRefused,
    Executor,
    Outcome,
    Task,
    Work,
    WorkFailed,
)
from tinkex.server.futures import ONE_REQUEST, Futures, Settled
from tinkex.server.plan import Cause, Kind, Line, Step, Turn
from tinkex.server.saving import Saving
from tinkex.server.shares import Ask, Load, Shares, Waiting
from tinkex.server.store import CustomLoss, Model, RequestRow, Status, Store
from tinkex.server.store.requests import INLINE_BYTES
from tinkex.wire.codec import encode_json
from tinkex.wire.custom_loss import CreateCustomLossResponse
from tinkex.wire.errors import UserFailure
from tinkex.wire.training import CreateModelResponse, UnloadModelResponse

log = logging.getLogger("tinkex.server.dispatch")

# A request that was with an engine each time it died is not tried for ever.
MOST_ATTEMPTS = 3
# Payloads stay in memory between acceptance and their turn, up to this; then they are read back.
PAYLOADS_BYTES = 128 * 2**20
# How long a stopping server waits for results to reach the disk.
SETTLE_S = 5.0
# Steps of a log that are with the engine together while a model is built again.
REPLAYED_TOGETHER = 8

# After these the next step may start before the result is on disk: if the process dies in
# between, the step simply runs again.
_SETTLED_BEHIND = frozenset({Kind.FORWARD, Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP})
# Of what is run again from a log, these hand their payload to the engine.
_CARRIES = frozenset({Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP})


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ending:
    """What became of a request."""

    result: bytes = b""
    error: str | None = None
    category: str | None = None
    cause: Cause = Cause.WORK
    #: The commit has happened already, together with other rows.
    committed: bool = False


@dataclass(slots=True)
class _Run:
    """One model that has had work since this process started."""

    model: Model
    line: Line
    #: The engine incarnation that has this model in memory, as its log says.
    live_in: int | None = None
    driver: asyncio.Task[None] | None = None
    gap_timer: asyncio.TimerHandle | None = None
    #: Results reach the writer in the order of their steps.
    commit_order: asyncio.Lock = field(default_factory=asyncio.Lock)
    settling: set[asyncio.Task[None]] = field(default_factory=set)
    #: Seconds that engines computed for it.
    computed_s: float = 0.0
    #: How often each step was with an engine that died.
    deaths: dict[int, int] = field(default_factory=dict)
    #: Steps, and bytes of payloads, since the last snapshot.
    steps_since: int = 0
    bytes_since: int = 0


class Dispatcher:
    """Runs what was accepted. Belongs to one event loop; `start` before, `close` after."""

    def __init__(
        self,
        *,
        store: Store,
        executor: Executor,
        futures: Futures,
        gap_s: float,
        snapshot_steps: int = 200,
        snapshot_bytes: int = 64 * 2**20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._executor = executor
        self._futures = futures
        self._saving = Saving(store)
        self._gap_s = gap_s
        self._snapshot_steps = snapshot_steps
        self._snapshot_bytes = snapshot_bytes
        self._clock = clock
        self._runs: dict[str, _Run] = {}
        self._opening: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._payloads: dict[str, bytes] = {}
        self._payloads_bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()
        #: Samples that are waited for, by request: cancelling one of these cancels the sample.
        self._samples: dict[str, tuple[str, asyncio.Task[_Ending]]] = {}
        self._shares: defaultdict[str, Shares] = defaultdict(Shares)
        #: Turns that have a place, or wait for one; and the requests in those turns.
        self._given: dict[Ask, asyncio.Event] = {}
        self._asking: dict[str, tuple[Shares, Ask]] = {}
        self._max_training: dict[str, int] = {}
        self._closing = False
        #: Seconds of computing and number of operations, by task; for the metrics page.
        self.computed: dict[Task, tuple[int, float]] = {}
        #: Seconds of computing by owner: who has which share.
        self.used_s: defaultdict[str, float] = defaultdict(float)

    async def start(self) -> None:
        """Take up what an earlier process accepted and did not finish."""
        await self._futures.start()
        for row in await self._store.requests.waiting():
            self._futures.expect(row.request_id, owner=row.owner, base_model=row.base_model)
            if row.kind == Kind.SAMPLE:
                self.sample(row)
            elif row.kind == Kind.UNLOAD_MODEL:
                self.unload(row)
            elif row.kind == Kind.CREATE_CUSTOM_LOSS:
                self.create_loss(row)
            else:
                await self.step(row)

    async def close(self) -> None:
        """Stop; what is unfinished is on disk and waits for the next start."""
        self._closing = True
        for run in self._runs.values():
            if run.gap_timer is not None:
                run.gap_timer.cancel()
        # Results that are on their way to the disk get there, so that they need not be computed
        # again.
        settling = [task for run in self._runs.values() for task in run.settling]
        if settling:
            await asyncio.wait(settling, timeout=SETTLE_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def expect(
        self,
        request_id: str,
        *,
        owner: str,
        base_model: str,
        payload: bytes | None = None,
        load: Load = ONE_REQUEST,
    ) -> None:
        """Somebody may wait for this request from now on."""
        self._futures.expect(request_id, owner=owner, base_model=base_model, load=load)
        # Large ones are files already, and the engine reads them itself.
        if (
            payload is not None
            and len(payload) <= INLINE_BYTES
            and self._payloads_bytes + len(payload) <= PAYLOADS_BYTES
        ):
            self._payloads[request_id] = payload
            self._payloads_bytes += len(payload)

    async def step(self, row: RequestRow) -> None:
        """A step was accepted: run it when its turn comes."""
        if row.model_id is None or row.seq_id is None:
            raise ValueError(f"request {row.request_id} is not a step of a model")
        run = await self._open(row.model_id, first_seq=row.seq_id)
        step = Step(
            seq_id=row.seq_id,
            request_id=row.request_id,
            kind=Kind(row.kind),
            creates=row.kind == Kind.LOAD_WEIGHTS and row.seq_id == 0,
        )
        if run.line.arrive(step, now_s=self._clock()):
            self._drive(run)
        else:
            late = _Ending(error=plan.late(step.seq_id), category="user", cause=Cause.LATE)
            self._spawn(self._settle(run, step, late))

    def sample(self, row: RequestRow) -> None:
        """A sample was accepted: run it now."""
        self._spawn(self._sample(row))

    def cancel(self, request_id: str, *, owner: str) -> None:
        """
        Give up a sample that nobody waits for any more.

        Harmless for everything else: what is finished stays so, and a step of a model is never
        taken out of its line.
        """
        running_owner, work = self._samples.get(request_id, (None, None))
        if work is not None and running_owner == owner:
            work.cancel()

    def unload(self, row: RequestRow) -> None:
        """Free a model's memory; its next step brings it back from its log."""
        if row.model_id is None:
            raise ValueError(f"request {row.request_id} names no model")
        self._spawn(self._unload(row, row.model_id))

    def free_session(self, session_id: str) -> None:
        """Take a session's idle models out of memory; the next step of each brings it back."""
        for run in self._runs.values():
            idle = run.driver is None and run.live_in is not None and not self._closing
            if idle and run.model.session_id == session_id:
                # In the driver's place, so that a step that comes now waits for it.
                run.driver = self._spawn(self._free(run))

    def create_loss(self, row: RequestRow) -> None:
        """A loss was accepted: let the engines look at it."""
        self._spawn(self._create_loss(row))

    def allow(self, owner: str, max_training: int) -> None:
        """From now on so many models of this owner may train at once; 0 is any number."""
        self._max_training[owner] = max_training

    def awaits(self, model_id: str, seq_id: int) -> bool:
        """Whether later steps of a model wait for this one."""
        run = self._runs.get(model_id)
        return run is not None and run.line.awaits(seq_id)

    def standing(self, request_id: str, base_model: str) -> Waiting:
        """How an unfinished request stands, and what is in its way."""
        if (reason := self._executor.waiting_for(base_model)) is not None:
            return Waiting(state="paused_capacity", reason=reason)
        if (held := self._asking.get(request_id)) is not None:
            shares, ask = held
            return shares.why(ask)
        stats = self._executor.stats(base_model)
        if request_id in self._samples and stats is not None and stats.samples_waiting:
            return Waiting(
                state="paused_capacity",
                reason=f"the engine is full: {stats.sequences_running} sequences are being "
                f"sampled, and {stats.samples_waiting} samples wait",
            )
        return Waiting(state="active")

    # -- one model ---------------------------------------------------------------------------

    async def _open(self, model_id: str, *, first_seq: int = 0) -> _Run:
        """The model's line, read from its log the first time."""
        async with self._opening[model_id]:
            if (run := self._runs.get(model_id)) is not None:
                return run
            model = await self._store.runs.model(model_id)
            if model is None:
                raise LookupError(f"model {model_id} is not in the database")
            snapshot = await self._store.snapshots.newest(model_id)
            after = -1 if snapshot is None else snapshot.seq_id
            finished = [
                (_step_of(row), row.error if row.status is Status.FAILED else None)
                for row in await self._store.requests.log(model_id, after=after)
                # The line had gone on without it.
                if row.cause != Cause.LATE
            ]
            spoiled = None if snapshot is None else snapshot.spoiled
            line = plan.restored(finished, next_seq=after + 1, spoiled=spoiled)
            if snapshot is None and not await self._store.requests.has_steps(model_id):
                line.stillborn, line.next_seq = plan.forgotten(), first_seq
            run = _Run(model=model, line=line, steps_since=len(finished))
            self._runs[model_id] = run
            return run

    def _drive(self, run: _Run) -> None:
        if run.driver is None and not self._closing:
            run.driver = self._spawn(self._drive_on(run))

    async def _drive_on(self, run: _Run) -> None:
        """Take turn after turn until the next step has not come."""
        try:
            while not self._closing:
                # After a death one at a time, to learn which step it was.
                most = 1 if run.deaths else None
                turn = run.line.take(now_s=self._clock(), most=most)
                if turn is None:
                    break
                await self._take_turn(run, turn)
                if (
                    0 < self._snapshot_steps <= run.steps_since
                    or 0 < self._snapshot_bytes <= run.bytes_since
                ):
                    await self._snapshot(run)
        finally:
            run.driver = None
        self._watch_gap(run)

    async def _take_turn(self, run: _Run, turn: Turn) -> None:
        try:
            if turn.refusal is not None:
                await self._refuse(run, turn)
            else:
                async with self._place(run, turn):
                    await self._run_turn(run, turn)
        except EngineLost:
            unfinished = [step for step in turn.steps if step.seq_id in run.line.running]
            run.line.put_back(unfinished)
        except EngineRefused as refused:
            await self._fail_turn(run, turn, _Ending(error=str(refused), category="server"))
        except WorkFailed as failed:
            # Not a step but building the model again: it is tried anew at the next step.
            run.live_in = None
            text = f"this model could not be built again from its log: {failed.message}"
            await self._fail_turn(run, turn, _Ending(error=text, category="server"))
        except Exception as error:  # noqa: BLE001  a bug must fail steps, not stop the model
            run.live_in = None
            await self._fail_turn(run, turn, _bug(error))

    async def _fail_turn(self, run: _Run, turn: Turn, ending: _Ending) -> None:
        for step in turn.steps:
            if step.seq_id in run.line.running:
                await self._end(run, step, ending)

    async def _refuse(self, run: _Run, turn: Turn) -> None:
        if turn.clears_gradients and run.line.stillborn is None:
            work = Work(task=Task.CLEAR_GRADIENTS, model_id=run.model.model_id)
            # Gradients that died with their engine are gone. What is built again from the log
            # stops at these refusals: put back, the steps would run as if nothing were missing.
            with contextlib.suppress(EngineLost):
                await self._run_work(run, work, await self._alive(run))
        for step in turn.steps:
            refused = _Ending(error=turn.refusal, category="user", cause=turn.cause)
            await self._end(run, step, refused)

    @contextlib.asynccontextmanager
    async def _place(self, run: _Run, turn: Turn) -> AsyncIterator[None]:
        """One of the engine's places for training, once this owner's turn for it has come."""
        shares = self._shares[run.model.base_model]
        owner = run.model.owner
        ask = Ask(owner=owner, most=self._max_training.get(owner, 0))
        given = self._given[ask] = asyncio.Event()
        self._asking.update({step.request_id: (shares, ask) for step in turn.steps})
        computed_s = run.computed_s
        shares.ask(ask)
        try:
            self._give_places(shares)
            await given.wait()
            yield
        finally:
            del self._given[ask]
            for step in turn.steps:
                self._asking.pop(step.request_id, None)
            shares.done(ask, used_s=run.computed_s - computed_s)
            self._give_places(shares)

    def _give_places(self, shares: Shares) -> None:
        while (ask := shares.take()) is not None:
            self._given[ask].set()

    async def _run_turn(self, run: _Run, turn: Turn) -> None:
        incarnation = await self._alive(run)
        # At hand before any step starts: while a large one is being found, a small one behind it
        # would overtake it on the way to the engine.
        payloads = await asyncio.gather(
            *(self._payload(step.request_id) for step in turn.steps), return_exceptions=True
        )
        # Tasks start in this order, so the engine gets the steps in the order of their numbers.
        running = [
            asyncio.create_task(self._run_step(run, step, payload, incarnation))
            for step, payload in zip(turn.steps, payloads, strict=True)
        ]
        try:
            outcomes = await asyncio.gather(*running, return_exceptions=True)
        except asyncio.CancelledError:
            for task in running:
                task.cancel()
            raise
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    async def _run_step(
        self, run: _Run, step: Step, payload: bytes | Path | BaseException, incarnation: int
    ) -> None:
        try:
            if isinstance(payload, BaseException):
                raise payload
            ending = await self._perform(run, step, payload, incarnation)
        except EngineLost:
            if self._closing:
                raise
            deaths = run.deaths[step.seq_id] = run.deaths.get(step.seq_id, 0) + 1
            if deaths < MOST_ATTEMPTS:
                raise
            ending = _Ending(
                error=f"the engine died {deaths} times while this request was running, so it is "
                "not tried again. The server's log says why the engine died.",
                category="server",
            )
        except WorkFailed as failed:
            ending = _Ending(error=failed.message, category=failed.category)
        except UserFailure as failed:
            ending = _Ending(error=str(failed), category="user")
        except Exception as error:  # noqa: BLE001  a bug must fail one step, not stop the model
            ending = _bug(error)
        run.deaths.pop(step.seq_id, None)
        if ending.category == "server" and step.kind not in plan.PASSES:
            # Half a step may have happened: the model is built again before its next one.
            run.live_in = None
        await self._end(run, step, ending)

    async def _perform(
        self, run: _Run, step: Step, payload: bytes | Path, incarnation: int
    ) -> _Ending:
        model = run.model

        async def work(order: Work) -> Outcome:
            return await self._run_work(run, order, incarnation)

        match step.kind:
            case Kind.CREATE_MODEL:
                await work(_create(model))
                return _Ending(result=encode_json(CreateModelResponse(model_id=model.model_id)))
            case Kind.FORWARD | Kind.FORWARD_BACKWARD | Kind.OPTIM_STEP:
                run.bytes_since += _size(payload)
                outcome = await work(_pass_or_step(model, step.kind, payload))
                return _Ending(result=outcome.result)
            case Kind.SAVE_WEIGHTS | Kind.SAVE_FOR_SAMPLER | Kind.SAVE_EXTERNAL:
                payload = await self._small_payload(step.request_id)
                result = await self._saving.save(model, step, payload, work)
                return _Ending(result=result, committed=True)
            case Kind.LOAD_WEIGHTS:
                if step.creates:
                    await work(_create(model))
                payload = await self._small_payload(step.request_id)
                # Another owner's checkpoint was found when the request came.
                row = await self._store.requests.get(step.request_id)
                given = None if row is None else row.version_id
                result, version_id = await self._saving.load(model, payload, work, version_id=given)
                await self._store.requests.finish_load(step.request_id, result, version_id)
                return _Ending(result=result, committed=True)
            case _:
                raise ValueError(f"{step.kind} is not a step of a model")

    async def _end(self, run: _Run, step: Step, ending: _Ending) -> None:
        """The step is over: let the line go on, store the result, wake the waiters."""
        run.line.finish(step, failure=ending.error)
        run.steps_since += 1
        settling = self._spawn(self._settle(run, step, ending))
        run.settling.add(settling)
        settling.add_done_callback(run.settling.discard)
        if step.kind not in _SETTLED_BEHIND:
            await asyncio.shield(settling)

    async def _settle(self, run: _Run, step: Step, ending: _Ending) -> None:
        self._forget_payload(step.request_id)
        requests = self._store.requests
        if not ending.committed:
            async with run.commit_order:
                if ending.error is not None:
                    category = ending.category or "server"
                    commit = requests.fail(
                        step.request_id, ending.error, category=category, cause=ending.cause
                    )
                else:
                    place = await requests.keep(ending.result)
                    commit = requests.finish(step.request_id, ending.result, place)
            await commit
        self._wake(step.request_id, run.model.owner, step.kind, run.model.session_id, ending)

    # -- snapshots ---------------------------------------------------------------------------

    async def snapshot(self, model_id: str) -> bool:
        """Write a model's state down now, between two of its steps; whether that was possible."""
        run = await self._open(model_id)
        while run.driver is not None:
            await asyncio.wait({run.driver})
        if self._closing or run.line.stillborn is not None:
            return False
        writing = asyncio.create_task(self._snapshot(run))

        async def drive() -> None:
            try:
                await writing
            finally:
                run.driver = None
            self._drive(run)

        run.driver = self._spawn(drive())
        await asyncio.wait({run.driver})
        return writing.done() and not writing.cancelled() and writing.result()

    async def _snapshot(self, run: _Run) -> bool:
        """Everything up to the last finished step is kept in one place from now on."""
        # Tried again after as much again, whatever becomes of it.
        run.steps_since = run.bytes_since = 0
        if run.line.stillborn is not None or run.line.running:
            return False
        model_id, seq_id = run.model.model_id, run.line.next_seq - 1
        place, folder = self._store.snapshots.new_place(model_id)
        try:
            incarnation = await self._alive(run)
            await asyncio.gather(*run.settling, return_exceptions=True)
            work = Work(task=Task.SNAPSHOT, model_id=model_id, folder=folder)
            outcome = await self._run_work(run, work, incarnation)
            return await self._store.snapshots.save(
                model_id=model_id,
                seq_id=seq_id,
                place=place,
                size_bytes=json.loads(outcome.result)["size_bytes"],
                spoiled=run.line.spoiled,
            )
        except (EngineLost, EngineRefused) as lost:
            log.info("no snapshot of %s: %s", model_id, lost)
        except Exception:
            # The model goes on: its log is complete without a snapshot.
            log.exception("no snapshot of %s", model_id)
        return False

    # -- gaps --------------------------------------------------------------------------------

    def _watch_gap(self, run: _Run) -> None:
        """Set the clock for a number that others wait for."""
        if run.gap_timer is not None:
            run.gap_timer.cancel()
            run.gap_timer = None
        gap = run.line.gap()
        if gap is None or self._closing:
            return
        left_s = max(0.0, gap.since_s + self._gap_s - self._clock())
        run.gap_timer = asyncio.get_running_loop().call_later(left_s, self._gap_over, run, gap)

    def _gap_over(self, run: _Run, gap: plan.Gap) -> None:
        run.gap_timer = None
        if run.line.gap() == gap and run.driver is None:
            run.driver = self._spawn(self._close_gap(run))

    async def _close_gap(self, run: _Run) -> None:
        try:
            await self._take_turn(run, run.line.close_gap(now_s=self._clock()))
        finally:
            run.driver = None
        self._drive(run)

    # -- engines that come and go ------------------------------------------------------------

    async def _alive(self, run: _Run) -> int:
        """The incarnation that holds this model as its log says; built again if need be."""
        incarnation = await self._executor.ready(run.model.base_model)
        if run.live_in != incarnation:
            # The log is complete once every result of this model is on disk.
            await asyncio.gather(*run.settling, return_exceptions=True)
            await self._register_losses(run, incarnation)
            await self._replay(run, incarnation)
            run.live_in = incarnation
        return incarnation

    async def _register_losses(self, run: _Run, incarnation: int) -> None:
        """An engine that has just met a model gets the losses of its session first."""
        for loss in await self._store.runs.custom_losses(run.model.session_id):
            # A loss that was refused is refused again, and nobody can ask for it.
            with contextlib.suppress(WorkFailed):
                await self._run_work(run, _register(loss), incarnation)

    async def _replay(self, run: _Run, incarnation: int) -> None:
        snapshot = await self._store.snapshots.newest(run.model.model_id)
        if snapshot is not None:
            folder = await self._store.snapshots.open(snapshot)
            await self._run_work(run, _create(run.model), incarnation)
            work = Work(task=Task.RESTORE, model_id=run.model.model_id, folder=folder)
            await self._run_work(run, work, incarnation)
        after = -1 if snapshot is None else snapshot.seq_id
        rows = await self._store.requests.log(run.model.model_id, after=after)
        if rows:
            log.info("building %s again from %d steps", run.model.model_id, len(rows))
        together = asyncio.Semaphore(REPLAYED_TOGETHER)

        async def one(row: RequestRow, payload: bytes | Path) -> None:
            try:
                await self._replay_one(run, row, payload, incarnation)
            finally:
                together.release()

        replaying: list[asyncio.Task[None]] = []
        try:
            for row in rows:
                # Passes may be with the engine together; everything else waits for them.
                if Kind(row.kind) not in plan.PASSES:
                    await asyncio.gather(*replaying)
                    replaying = []
                await together.acquire()
                payload: bytes | Path = b""
                if Kind(row.kind) in _CARRIES and row.status is Status.DONE:
                    # Found here, one after the other: passes must not overtake each other.
                    payload = await self._payload(row.request_id)
                replaying.append(asyncio.create_task(one(row, payload)))
                if Kind(row.kind) not in plan.PASSES:
                    await asyncio.gather(*replaying)
                    replaying = []
            await asyncio.gather(*replaying)
        finally:
            for task in replaying:
                task.cancel()

    async def _replay_one(
        self, run: _Run, row: RequestRow, payload: bytes | Path, incarnation: int
    ) -> None:
        kind = Kind(row.kind)
        model = run.model

        async def work(order: Work) -> Outcome:
            return await self._run_work(run, order, incarnation)

        failed = None if row.status is Status.DONE else Cause(row.cause or Cause.WORK)
        match plan.replayed(kind, failed):
            case plan.Replayed.CLEAR_GRADIENTS:
                await work(Work(task=Task.CLEAR_GRADIENTS, model_id=model.model_id))
            case plan.Replayed.RUN if kind is Kind.CREATE_MODEL:
                await work(_create(model))
            case plan.Replayed.RUN if kind is Kind.LOAD_WEIGHTS:
                if row.seq_id == 0:
                    await work(_create(model))
                payload = await self._small_payload(row.request_id)
                await self._saving.load(model, payload, work, version_id=row.version_id)
            case plan.Replayed.RUN:
                run.bytes_since += _size(payload)
                await work(_pass_or_step(model, kind, payload))
            case plan.Replayed.NOTHING:
                pass

    async def _run_work(self, run: _Run, work: Work, incarnation: int) -> Outcome:
        outcome = await self._executor.run(run.model.base_model, work, incarnation=incarnation)
        self._count(work.task, outcome)
        run.computed_s += outcome.compute_s
        self.used_s[run.model.owner] += outcome.compute_s
        return outcome

    # -- outside the order of steps ----------------------------------------------------------

    async def _sample(self, row: RequestRow) -> None:
        work = asyncio.create_task(self._perform_sample(row))
        self._samples[row.request_id] = (row.owner, work)
        try:
            await asyncio.wait({work})
            ending = work.result()
        except asyncio.CancelledError:
            if not work.cancelled():
                # It is this task that was cancelled: the server stops, and the sample runs again.
                work.cancel()
                raise
            ending = _Ending(error="cancelled: the client gave up on it.", category="user")
        except (WorkFailed, EngineRefused) as failed:
            category = failed.category if isinstance(failed, WorkFailed) else "server"
            ending = _Ending(error=str(failed), category=category)
        except EngineLost as lost:
            if self._closing:
                return
            ending = _Ending(error=f"{lost}, {MOST_ATTEMPTS} times", category="server")
        except Exception as error:  # noqa: BLE001  a bug must fail one sample and be seen
            ending = _bug(error)
        finally:
            del self._samples[row.request_id]
        await self._settle_alone(row, ending)

    async def _perform_sample(self, row: RequestRow) -> _Ending:
        folder = None
        if row.version_id is not None:
            folder = await self._store.checkpoints.open(row.version_id)
        payload = await self._payload(row.request_id)
        work = Work(task=Task.SAMPLE, folder=folder, owner=row.owner, **_carried(payload))
        for attempt in range(MOST_ATTEMPTS):
            try:
                outcome = await self._executor.run(row.base_model, work)
            except EngineLost:
                if self._closing or attempt == MOST_ATTEMPTS - 1:
                    raise
            else:
                self._count(work.task, outcome)
                self.used_s[row.owner] += outcome.compute_s
                return _Ending(result=outcome.result)
        raise AssertionError("unreachable")

    async def _unload(self, row: RequestRow, model_id: str) -> None:
        run = await self._open(model_id)
        run.live_in = None
        ending = _Ending(result=encode_json(UnloadModelResponse(model_id=model_id)))
        try:
            await self._executor.run(run.model.base_model, Work(task=Task.DROP, model_id=model_id))
        except (EngineLost, EngineRefused):
            pass
        except WorkFailed as failed:
            ending = _Ending(error=failed.message, category=failed.category)
        await self._settle_alone(row, ending)

    async def _free(self, run: _Run) -> None:
        try:
            await asyncio.gather(*run.settling, return_exceptions=True)
            run.live_in = None
            work = Work(task=Task.DROP, model_id=run.model.model_id)
            with contextlib.suppress(EngineLost, EngineRefused, WorkFailed):
                await self._executor.run(run.model.base_model, work)
        finally:
            run.driver = None
        self._drive(run)

    async def _create_loss(self, row: RequestRow) -> None:
        try:
            ending = await self._perform_create_loss(row)
        except (WorkFailed, EngineRefused) as failed:
            category = failed.category if isinstance(failed, WorkFailed) else "server"
            ending = _Ending(error=str(failed), category=category)
        except EngineLost as lost:
            if self._closing:
                return
            ending = _Ending(error=f"{lost}, {MOST_ATTEMPTS} times", category="server")
        except Exception as error:  # noqa: BLE001  a bug must fail one request and be seen
            ending = _bug(error)
        await self._settle_alone(row, ending)

    async def _perform_create_loss(self, row: RequestRow) -> _Ending:
        loss = await self._store.runs.custom_loss(row.request_id)
        # Engines that meet a model of this session later get its losses then.
        alive = {
            run.model.base_model
            for run in self._runs.values()
            if run.model.session_id == loss.session_id and run.live_in is not None
        }
        for base_model in sorted(alive | {row.base_model}):
            for attempt in range(MOST_ATTEMPTS):
                try:
                    await self._executor.run(base_model, _register(loss))
                    break
                except EngineLost:
                    if self._closing or attempt == MOST_ATTEMPTS - 1:
                        raise
        return _Ending(result=encode_json(CreateCustomLossResponse(loss_id=loss.loss_id)))

    async def _settle_alone(self, row: RequestRow, ending: _Ending) -> None:
        self._forget_payload(row.request_id)
        requests = self._store.requests
        if ending.error is not None:
            category = ending.category or "server"
            commit = requests.fail(
                row.request_id, ending.error, category=category, cause=ending.cause
            )
        else:
            place = await requests.keep(ending.result)
            commit = requests.finish(row.request_id, ending.result, place)
        event = await commit
        self._wake(row.request_id, row.owner, Kind(row.kind), row.session_id, ending)
        # After the result: who hears of it fetches it at once.
        if event is not None:
            self._futures.completions.add(event)

    # -- shared ------------------------------------------------------------------------------

    def _wake(
        self, request_id: str, owner: str, kind: Kind, session_id: str | None, ending: _Ending
    ) -> None:
        self._futures.settle(
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

    async def _payload(self, request_id: str) -> bytes | Path:
        if (payload := self._payloads.get(request_id)) is not None:
            return payload
        return await self._store.requests.payload(request_id)

    async def _small_payload(self, request_id: str) -> bytes:
        payload = await self._payload(request_id)
        return await asyncio.to_thread(payload.read_bytes) if isinstance(payload, Path) else payload

    def _forget_payload(self, request_id: str) -> None:
        if (payload := self._payloads.pop(request_id, None)) is not None:
            self._payloads_bytes -= len(payload)

    def _count(self, task: Task, outcome: Outcome) -> None:
        count, seconds = self.computed.get(task, (0, 0.0))
        self.computed[task] = (count + 1, seconds + outcome.compute_s)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._over)
        return task

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a background task failed", exc_info=error)


def _step_of(row: RequestRow) -> Step:
    return Step(
        seq_id=row.seq_id or 0,
        request_id=row.request_id,
        kind=Kind(row.kind),
        creates=row.kind == Kind.LOAD_WEIGHTS and row.seq_id == 0,
    )


def _create(model: Model) -> Work:
    return Work(
        task=Task.CREATE,
        model_id=model.model_id,
        lora_config=encode_json(dict(model.lora_config)),
        optimizer_config=encode_json(dict(model.optimizer_config)),
    )


def _register(loss: CustomLoss) -> Work:
    return Work(
        task=Task.REGISTER_LOSS,
        loss_id=loss.loss_id,
        session_id=loss.session_id,
        payload=loss.definition,
    )


def _pass_or_step(model: Model, kind: Kind, payload: bytes | Path) -> Work:
    return Work(
        task=Task.OPTIM_STEP if kind is Kind.OPTIM_STEP else Task.PASS,
        model_id=model.model_id,
        backward=kind is Kind.FORWARD_BACKWARD,
        session_id=model.session_id,
        **_carried(payload),
    )


def _size(payload: bytes | Path) -> int:
    return payload.stat().st_size if isinstance(payload, Path) else len(payload)


def _carried(payload: bytes | Path) -> dict[str, Any]:
    return {"payload_file": payload} if isinstance(payload, Path) else {"payload": payload}


def _bug(error: Exception) -> _Ending:
    bug = secrets.token_hex(4)
    log.error("bug %s", bug, exc_info=error)
    return _Ending(
        error=f"the server failed unexpectedly ({type(error).__name__}). "
        f"Its log has the details under the id {bug}.",
        category="server",
    )
