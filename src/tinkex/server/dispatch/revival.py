"""Engines come and go: a model is built again from its snapshot and log before its next step."""

import asyncio
import contextlib
import logging
from collections import defaultdict

from tinkex.server import plan
from tinkex.server.dispatch import orders
from tinkex.server.dispatch.desk import Desk
from tinkex.server.dispatch.rebuilding import Rebuilding, size_of
from tinkex.server.dispatch.run import Run
from tinkex.server.executor import EngineLost, EngineRefused, Outcome, Task, Work, WorkFailed
from tinkex.server.plan import Cause, Kind
from tinkex.server.saving import Saving
from tinkex.server.store import RequestRow, Status

log = logging.getLogger("tinkex.server.dispatch")

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
                        await self.work(run, orders.drop(run.model.model_id), incarnation)
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
        order = orders.forget_losses(session_id)
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
        for loss in await self._store.runs.custom_losses(run.model.session_id):
            self._with_losses.add(_place(run))
            # A loss that was refused is refused again, and nobody can ask for it.
            with contextlib.suppress(WorkFailed):
                await self.work(run, orders.register(loss), incarnation)

    async def _replay(self, run: Run, incarnation: int) -> None:
        await self._rebuilding.turn(run)
        snapshot = await self._store.snapshots.sound(run.model.model_id)
        if snapshot is not None:
            folder = await self._store.snapshots.open(snapshot)
            await self.work(run, orders.create(run.model), incarnation)
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
                what = plan.replayed(kind, failed)
                if what is plan.Replayed.NOTHING:
                    continue
                await self._rebuilding.turn(run)
                if kind in plan.PASSES and what is plan.Replayed.RUN:
                    # Together with the engine, and each sent before the next one is.
                    if waiting + row.tokens > TOKENS_TOGETHER:
                        await asyncio.gather(*passes)
                        passes.clear()
                        waiting = 0
                    waiting += row.tokens
                    await together.acquire()
                    payload = await self._desk.payloads.get(row.request_id)
                    run.bytes_since += orders.size(payload)
                    work = orders.pass_or_step(run.model, kind, payload)
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
        self, run: Run, row: RequestRow, what: plan.Replayed, incarnation: int
    ) -> None:
        kind = Kind(row.kind)
        model = run.model

        async def work(order: Work) -> Outcome:
            return await self.work(run, order, incarnation)

        match what:
            case plan.Replayed.CLEAR_GRADIENTS:
                await work(orders.clear_gradients(model.model_id))
            case plan.Replayed.RUN if kind is Kind.CREATE_MODEL:
                await work(orders.create(model))
            case plan.Replayed.RUN if kind is Kind.LOAD_WEIGHTS:
                if row.seq_id == 0:
                    await work(orders.create(model))
                payload = await self._desk.payloads.read(row.request_id)
                await self._saving.load(model, payload, work, version_id=row.version_id)
            case plan.Replayed.RUN:
                step = await self._desk.payloads.get(row.request_id)
                run.bytes_since += orders.size(step)
                await work(orders.pass_or_step(model, kind, step))
