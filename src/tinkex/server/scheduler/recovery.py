"""
Which models are built again at once, after an engine died.

An owner who is alone has all of theirs built together. While others want the same engine, each
owner has one at a time, and the one with the least left to do goes first: a few small steps are
not held up by somebody else's many large ones, and those lose little by waiting.
"""

import asyncio
import contextlib
import json
import logging
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from tinkex.server.executor import EngineLost, EngineRefused, Outcome, Task, Work, WorkFailed
from tinkex.server.scheduler import jobs, step_queue
from tinkex.server.scheduler.base_model_check import BaseChanged
from tinkex.server.scheduler.checkpoints import Saving
from tinkex.server.scheduler.execution import Desk
from tinkex.server.scheduler.model_state import Run
from tinkex.server.scheduler.step_queue import Cause, Kind, Step, Turn
from tinkex.server.store import Damaged, RequestRow, Status, StorageError

#: What a step costs beside its tokens, in tokens.
STEP_TOKENS = 100


def size_of(step: Step | RequestRow) -> int:
    """About how much work a step is, in tokens."""
    return step.tokens + STEP_TOKENS


class Rebuilding:
    """Models that are being built again. `contested` says whether several owners want an engine."""

    def __init__(self, contested: Callable[[str], bool]) -> None:
        self._contested = contested
        #: By base model and owner: what each model has left to do, in the order they began.
        self._left: defaultdict[str, dict[str, dict[str, int]]] = defaultdict(dict)
        self._changed = asyncio.Event()

    @contextlib.contextmanager
    def model(self, run: Run) -> Iterator[None]:
        """This model is being built again, step by step: each waits for `turn`."""
        model = run.model
        owners = self._left[model.base_model]
        # Nothing until its log has been read.
        owners.setdefault(model.owner, {})[model.model_id] = 0
        try:
            yield
        finally:
            del owners[model.owner][model.model_id]
            if not owners[model.owner]:
                del owners[model.owner]
            self.look_again()

    def left(self, run: Run, tokens: int) -> None:
        """What this model has left to do."""
        model = run.model
        self._left[model.base_model][model.owner][model.model_id] = tokens
        self.look_again()

    async def turn(self, run: Run) -> None:
        """Until the next step of this model may be built again."""
        while not self._may(run):
            await self._changed.wait()

    async def give_way(self, run: Run, turn: Turn) -> None:
        """
        Until no other owner has a model that is built again with less work than this turn is.

        An engine does one thing of each model in turn. A few small steps of a log would each wait
        for a large pass of somebody who has their model already.
        """
        size = sum(map(size_of, turn.steps))
        while self._less_left(run, size):
            await self._changed.wait()

    def _less_left(self, run: Run, size: int) -> bool:
        owners = self._left.get(run.model.base_model, {})
        return any(
            next(iter(each.values())) < size
            for owner, each in owners.items()
            if owner != run.model.owner
        )

    def look_again(self) -> None:
        """Somebody may go on who could not before."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _may(self, run: Run) -> bool:
        model = run.model
        if not self._contested(model.base_model):
            return True
        # One of each owner: the first that began.
        firsts = [next(iter(each.items())) for each in self._left[model.base_model].values()]
        least = min(left for _, left in firsts)
        return (model.model_id, least) in firsts


# MERGED: Engines come and go: a model is built again from its snapshot and log before its next step.


log = logging.getLogger("tinkex.server.scheduler")

# Steps of a log that are with the engine together while a model is built again.
REPLAYED_TOGETHER = 8
# And their tokens, unless a single one has more: another owner's step waits for some of these.
TOKENS_TOGETHER = 32_768


_Place = tuple[str, str]


def _place(run: Run) -> _Place:
    return run.model.base_model, run.model.session_id


class Revival:
    """Keeps models in memory, or brings them back there."""

    def __init__(self, desk: Desk, saving: Saving, rebuilding: Rebuilding) -> None:
        self._desk = desk
        self._rebuilding = rebuilding
        self._store = desk.store
        self._saving = saving
        #: By base model and session: the models that are in the engine's memory, or on their way.
        self._there: defaultdict[_Place, set[str]] = defaultdict(set)
        #: By base model: held while an order to forget losses is decided and sent.
        self._arriving: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        #: Where losses were registered.
        self._with_losses: set[_Place] = set()

    async def alive(self, run: Run) -> int:
        """The incarnation that holds this model as its log says; built again if need be."""
        incarnation = await self._desk.executor.ready(run.model.base_model)
        if run.live_in != incarnation:
            if (check := self._desk.base_check) is not None:
                await check.check_run(run.model.model_id, run.model.base_model, incarnation)
            # The log is complete once every result of this model is on disk.
            await run.settled()
            # And stays as it is while it is read: a snapshot would cut it.
            await run.written()
            async with self._arriving[run.model.base_model]:
                self._there[_place(run)].add(run.model.model_id)
            await self._register_losses(run, incarnation)
            with self._rebuilding.model(run):
                await self._replay(run, incarnation)
            run.live_in = incarnation
        return incarnation

    async def send(self, run: Run, work: Work, incarnation: int) -> asyncio.Future[Outcome]:
        """Work for one model, sent to the incarnation that holds it; its outcome is answered."""
        model = run.model
        answer = await self._desk.send(
            model.base_model, work, owner=model.owner, incarnation=incarnation
        )
        answer.add_done_callback(run.computed)
        return answer

    async def work(self, run: Run, work: Work, incarnation: int) -> Outcome:
        """The same, done when this returns."""
        return await (await self.send(run, work, incarnation))

    def holds(self, run: Run) -> bool:
        """Whether an engine may have something of this model in memory."""
        return run.model.model_id in self._there.get(_place(run), ())

    async def drop(self, run: Run) -> None:
        """
        Take a model out of the memory of its engine; in the driver's place.

        With the last model of a session its losses leave too. Raises WorkFailed.
        """
        await run.settled()
        base_model, place = run.model.base_model, _place(run)
        incarnation, run.live_in = run.live_in, None
        try:
            with contextlib.suppress(EngineLost, EngineRefused):
                if incarnation is None and self.holds(run):
                    # Building it again ended half-way, in whichever engine is up now.
                    incarnation = await self._desk.executor.ready(base_model)
                if incarnation is not None:
                    # As any work: nobody is with an engine while a suspect is alone with it.
                    async with self._desk.companies[base_model].visit():
                        await self.work(run, jobs.drop(run.model.model_id), incarnation)
        finally:
            self._there[place].discard(run.model.model_id)
            if not self._there[place]:
                del self._there[place]
        if incarnation is not None:
            await self._forget_losses(place, incarnation)

    async def loss_was_checked(self, base_model: str, session_id: str) -> None:
        """An engine that has no model of a session does not keep a loss of it."""
        self._with_losses.add((base_model, session_id))
        with contextlib.suppress(EngineLost, EngineRefused):
            incarnation = await self._desk.executor.ready(base_model)
            await self._forget_losses((base_model, session_id), incarnation)

    async def _forget_losses(self, place: "_Place", incarnation: int) -> None:
        """Unless they are needed. A model that comes later registers them anew."""
        base_model, session_id = place
        order = jobs.forget_losses(session_id)
        async with self._desk.companies[base_model].visit():
            with contextlib.suppress(EngineLost, EngineRefused, WorkFailed):
                # No model of the session can come between the look and the order.
                async with self._arriving[base_model]:
                    if place in self._there or place not in self._with_losses:
                        return
                    self._with_losses.discard(place)
                    executor = self._desk.executor
                    answer = await executor.send(base_model, order, incarnation=incarnation)
                await answer

    async def _register_losses(self, run: Run, incarnation: int) -> None:
        """An engine that has just met a model gets the losses of its session first."""
        for loss in await self._store.models.custom_losses(run.model.session_id):
            self._with_losses.add(_place(run))
            # A loss that was refused is refused again, and nobody can ask for it.
            with contextlib.suppress(WorkFailed):
                await self.work(run, jobs.register(loss), incarnation)

    async def _replay(self, run: Run, incarnation: int) -> None:
        await self._rebuilding.turn(run)
        snapshot = await self._store.snapshots.newest_intact(run.model.model_id)
        if snapshot is not None:
            folder = await self._store.snapshots.open(snapshot)
            await self.work(run, jobs.create(run.model), incarnation)
            work = Work(task=Task.RESTORE, model_id=run.model.model_id, folder=folder)
            await self.work(run, work, incarnation)
        after = -1 if snapshot is None else snapshot.seq_id
        rows = await self._store.requests.log(run.model.model_id, after=after)
        if rows:
            log.info("building %s again from %d steps", run.model.model_id, len(rows))
        left = sum(map(size_of, rows))
        together, waiting = asyncio.Semaphore(REPLAYED_TOGETHER), 0

        passes: list[asyncio.Future[Outcome]] = []
        try:
            for row in rows:
                self._rebuilding.left(run, left)
                left -= size_of(row)
                kind = Kind(row.kind)
                failed = None if row.status is Status.DONE else Cause(row.cause or Cause.WORK)
                what = step_queue.replayed(kind, failed)
                if what is step_queue.Replayed.NOTHING:
                    continue
                await self._rebuilding.turn(run)
                if kind in step_queue.PASSES and what is step_queue.Replayed.RUN:
                    # Together with the engine, and each sent before the next one is.
                    if waiting + row.tokens > TOKENS_TOGETHER:
                        await asyncio.gather(*passes)
                        passes.clear()
                        waiting = 0
                    waiting += row.tokens
                    await together.acquire()
                    payload = await self._desk.payloads.get(row.request_id)
                    run.bytes_since += jobs.size(payload)
                    work = jobs.pass_or_step(run.model, kind, payload)
                    passes.append(await self.send(run, work, incarnation))
                    passes[-1].add_done_callback(lambda _: together.release())
                    continue
                # Everything else waits for them.
                await asyncio.gather(*passes)
                passes.clear()
                waiting = 0
                await self._replay_one(run, row, what, incarnation)
            await asyncio.gather(*passes)
        finally:
            for one in passes:
                one.cancel()

    async def _replay_one(
        self, run: Run, row: RequestRow, what: step_queue.Replayed, incarnation: int
    ) -> None:
        kind = Kind(row.kind)
        model = run.model

        async def work(order: Work) -> Outcome:
            return await self.work(run, order, incarnation)

        match what:
            case step_queue.Replayed.CLEAR_GRADIENTS:
                await work(jobs.clear_gradients(model.model_id))
            case step_queue.Replayed.RUN if kind is Kind.CREATE_MODEL:
                await work(jobs.create(model))
            case step_queue.Replayed.RUN if kind is Kind.LOAD_WEIGHTS:
                if row.seq_id == 0:
                    await work(jobs.create(model))
                payload = await self._desk.payloads.read(row.request_id)
                await self._saving.load(model, payload, work, version_id=row.version_id)
            case step_queue.Replayed.RUN:
                step = await self._desk.payloads.get(row.request_id)
                run.bytes_since += jobs.size(step)
                await work(jobs.pass_or_step(model, kind, step))


# MERGED: Snapshots: a model's state between two steps, written down while it goes on, so that its log can be cut.


#: How late a snapshot may be: by this part of what is between two of them.
PATIENCE = 10


class Snapshots:
    """Written by whoever is in the driver's place of a model."""

    def __init__(self, desk: Desk, revival: Revival, *, steps: int, payload_bytes: int) -> None:
        self._desk = desk
        self._revival = revival
        #: After so many steps, or bytes of payloads, one is due; 0 is never.
        self._steps = steps
        self._payload_bytes = payload_bytes

    def due(self, run: Run) -> bool:
        if run.writing is not None and not run.writing.done():
            return False  # the next one when this one is written
        # Just after an optimizer step there are no gradients to write: one is waited for a while.
        steps, payload_bytes = (
            most if run.stepped else most + most // PATIENCE
            for most in (self._steps, self._payload_bytes)
        )
        return 0 < steps <= run.steps_since or 0 < payload_bytes <= run.bytes_since

    async def write(self, run: Run) -> bool:
        """Everything up to the last finished step is kept in one place once this returns True."""
        written = await self.begin(run)
        return written is not None and await written

    async def begin(self, run: Run) -> asyncio.Future[bool] | None:
        """
        Take one of what the model is now; steps that come later run while it is written.

        The engine copies the model when the order reaches it, before any later step's. Whatever
        goes wrong, the model goes on: its log is complete without a snapshot.
        """
        try:
            return await self._begin(run)
        except (EngineLost, EngineRefused, BaseChanged, WorkFailed, Damaged) as lost:
            log.info("no snapshot of %s: %s", run.model.model_id, lost)
        except StorageError as trouble:
            log.warning("no snapshot of %s: %s", run.model.model_id, trouble)
        except Exception:
            log.exception("no snapshot of %s", run.model.model_id)
        return None

    async def _begin(self, run: Run) -> asyncio.Future[bool] | None:
        await run.written()
        # Tried again after as much again, whatever becomes of it.
        run.steps_since = run.bytes_since = 0
        if run.line.stillborn is not None or run.line.running:
            return None
        async with contextlib.AsyncExitStack() as stack:
            # As any work: nobody is with an engine while a suspect is alone with it.
            visit = self._desk.companies[run.model.base_model].visit()
            await stack.enter_async_context(visit)
            incarnation = await self._revival.alive(run)
            await run.settled()
            if run.live_in != incarnation:  # a result could not be stored
                return None
            model_id = run.model.model_id
            place, folder = self._desk.store.snapshots.new_key(model_id)
            work = Work(task=Task.SNAPSHOT, model_id=model_id, folder=folder)
            # The engine has the order before anything that is asked for later.
            answer = await self._revival.send(run, work, incarnation)
            saving = self._save(run, answer, place, run.line.next_seq - 1, run.line.spoiled)
            written: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            run.writing = self._desk.spawn(_until_over(saving, written, stack.pop_all()))
        return written

    async def _save(
        self,
        run: Run,
        answer: asyncio.Future[Outcome],
        place: str,
        seq_id: int,
        spoiled: str | None,
    ) -> bool:
        kept = self._desk.store.snapshots
        model_id = run.model.model_id
        try:
            outcome = await answer
            return await kept.save(
                model_id=model_id,
                seq_id=seq_id,
                place=place,
                size_bytes=json.loads(outcome.result)["size_bytes"],
                spoiled=spoiled,
            )
        except (EngineLost, EngineRefused) as lost:
            log.info("no snapshot of %s: %s", model_id, lost)
        except (WorkFailed, StorageError) as failed:
            log.warning("no snapshot of %s: %s", model_id, failed)
        except Exception:
            # The model goes on: its log is complete without a snapshot.
            log.exception("no snapshot of %s", model_id)
        return False


async def _until_over(
    taking: Coroutine[Any, Any, bool],
    written: asyncio.Future[bool],
    visit: contextlib.AsyncExitStack,
) -> None:
    try:
        async with visit:
            written.set_result(await taking)
    finally:
        written.cancel()  # nothing, unless the server stops
