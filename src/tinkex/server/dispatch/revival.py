"""Engines come and go: a model is built again from its snapshot and log before its next step."""

import asyncio
import contextlib
import logging
from pathlib import Path

from tinkex.server import plan
from tinkex.server.dispatch import orders
from tinkex.server.dispatch.desk import Desk
from tinkex.server.dispatch.run import Run
from tinkex.server.executor import Outcome, Task, Work, WorkFailed
from tinkex.server.plan import Cause, Kind
from tinkex.server.saving import Saving
from tinkex.server.store import RequestRow, Status

log = logging.getLogger("tinkex.server.dispatch")

# Steps of a log that are with the engine together while a model is built again.
REPLAYED_TOGETHER = 8

# Of what is run again from a log, these hand their payload to the engine.
_CARRIES = frozenset({Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP})


class Revival:
    """Keeps models in memory, or brings them back there."""

    def __init__(self, desk: Desk, saving: Saving) -> None:
        self._desk = desk
        self._store = desk.store
        self._saving = saving

    async def alive(self, run: Run) -> int:
        """The incarnation that holds this model as its log says; built again if need be."""
        incarnation = await self._desk.executor.ready(run.model.base_model)
        if run.live_in != incarnation:
            # The log is complete once every result of this model is on disk.
            await run.settled()
            # And stays as it is while it is read: a snapshot would cut it.
            await run.written()
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

    async def _register_losses(self, run: Run, incarnation: int) -> None:
        """An engine that has just met a model gets the losses of its session first."""
        for loss in await self._store.runs.custom_losses(run.model.session_id):
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
