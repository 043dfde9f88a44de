"""Engines come and go: a model is built again from its snapshot and log before its next step."""

import asyncio
import contextlib
import logging
from collections import defaultdict
from pathlib import Path

from tinkex.server import plan
from tinkex.server.dispatch import orders
from tinkex.server.dispatch.desk import Desk
from tinkex.server.dispatch.run import Run
from tinkex.server.executor import EngineLost, EngineRefused, Outcome, Task, Work, WorkFailed
from tinkex.server.plan import Cause, Kind
from tinkex.server.saving import Saving
from tinkex.server.store import RequestRow, Status

log = logging.getLogger("tinkex.server.dispatch")

# Steps of a log that are with the engine together while a model is built again.
REPLAYED_TOGETHER = 8

# Of what is run again from a log, these hand their payload to the engine.
_CARRIES = frozenset({Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP})


_Place = tuple[str, str]


def _place(run: Run) -> _Place:
    return run.model.base_model, run.model.session_id


class Revival:
    """Keeps models in memory, or brings them back there."""

    def __init__(self, desk: Desk, saving: Saving) -> None:
        self._desk = desk
        self._store = desk.store
        self._saving = saving
        #: By base model and session: the models that are in the engine's memory, or on their way.
        self._there: defaultdict[_Place, set[str]] = defaultdict(set)
        #: Where losses were registered.
        self._with_losses: set[_Place] = set()

    async def alive(self, run: Run) -> int:
        """The incarnation that holds this model as its log says; built again if need be."""
        incarnation = await self._desk.executor.ready(run.model.base_model)
        if run.live_in != incarnation:
            # The log is complete once every result of this model is on disk.
            await run.settled()
            # And stays as it is while it is read: a snapshot would cut it.
            await run.written()
            self._there[_place(run)].add(run.model.model_id)
            await self._register_losses(run, incarnation)
            await self._replay(run, incarnation)
            run.live_in = incarnation
        return incarnation

    async def work(self, run: Run, work: Work, incarnation: int) -> Outcome:
        """Work for one model, on the incarnation that holds it."""
        model = run.model
        outcome = await self._desk.run(
            model.base_model, work, owner=model.owner, incarnation=incarnation
        )
        run.computed_s += outcome.compute_s
        return outcome

    def holds(self, run: Run) -> bool:
        """Whether an engine may have something of this model in memory."""
        return run.model.model_id in self._there.get(_place(run), ())

    async def left(self, run: Run, incarnation: int | None) -> None:
        """A model left the memory of its engine; with the last of a session its losses leave too."""
        place = _place(run)
        with contextlib.suppress(EngineLost, EngineRefused):
            if incarnation is None:
                incarnation = await self._desk.executor.ready(run.model.base_model)
        self._there[place].discard(run.model.model_id)
        if not self._there[place]:
            del self._there[place]
        await self._forget_losses(place, incarnation)

    async def loss_was_checked(self, base_model: str, session_id: str) -> None:
        """An engine that has no model of a session does not keep a loss of it."""
        self._with_losses.add((base_model, session_id))
        with contextlib.suppress(EngineLost, EngineRefused):
            incarnation = await self._desk.executor.ready(base_model)
            await self._forget_losses((base_model, session_id), incarnation)

    async def _forget_losses(self, place: "_Place", incarnation: int | None) -> None:
        """
        Unless they are needed. Nothing comes between the look and the order to that engine.

        A model that comes later registers them anew, and its order reaches the engine later.
        """
        if place in self._there or place not in self._with_losses:
            return
        self._with_losses.discard(place)
        base_model, session_id = place
        with contextlib.suppress(EngineLost, EngineRefused, WorkFailed):
            order = orders.forget_losses(session_id)
            await self._desk.executor.run(base_model, order, incarnation=incarnation)

    async def _register_losses(self, run: Run, incarnation: int) -> None:
        """An engine that has just met a model gets the losses of its session first."""
        for loss in await self._store.runs.custom_losses(run.model.session_id):
            self._with_losses.add(_place(run))
            # A loss that was refused is refused again, and nobody can ask for it.
            with contextlib.suppress(WorkFailed):
                await self.work(run, orders.register(loss), incarnation)

    async def _replay(self, run: Run, incarnation: int) -> None:
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
                    payload = await self._desk.payloads.get(row.request_id)
                replaying.append(asyncio.create_task(one(row, payload)))
                if Kind(row.kind) not in plan.PASSES:
                    await asyncio.gather(*replaying)
                    replaying = []
            await asyncio.gather(*replaying)
        finally:
            for task in replaying:
                task.cancel()

    async def _replay_one(
        self, run: Run, row: RequestRow, payload: bytes | Path, incarnation: int
    ) -> None:
        kind = Kind(row.kind)
        model = run.model

        async def work(order: Work) -> Outcome:
            return await self.work(run, order, incarnation)

        failed = None if row.status is Status.DONE else Cause(row.cause or Cause.WORK)
        match plan.replayed(kind, failed):
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
                run.bytes_since += orders.size(payload)
                await work(orders.pass_or_step(model, kind, payload))
            case plan.Replayed.NOTHING:
                pass
