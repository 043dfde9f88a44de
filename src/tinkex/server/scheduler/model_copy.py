"""
A copy of a model that trains elsewhere, so that the model can continue here without a long pause.

The copy begins with the newest snapshot of the model and runs the steps of its log. It takes turns with
the models that train there, one batch at a time, and never runs beside the rebuild of a model whose
client waits for it.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING

from tinkex.server.executor import EngineLost, WorkFailed
from tinkex.server.queued_request import PASSES, QueuedRequest
from tinkex.server.scheduler.recovery import MAX_REPLAY_TOKENS
from tinkex.server.scheduler.step_queue import (
    MAX_PASSES_PER_BATCH,
    Replay,
    StepBatch,
    number_of,
    replay_of,
)
from tinkex.server.store import Store

if TYPE_CHECKING:
    from tinkex.server.scheduler.engine_scheduler import EngineScheduler
    from tinkex.server.scheduler.model_states import ModelState


#: Steps of the log that are read together with their payloads: at most 4 MiB.
MAX_READ = 64
#: After this time, a copy tells how far it is.
MAX_CATCH_UP_S = 5.0


class ModelCopy:
    """The copy of one model on one engine. Anything that it raises makes it useless: drop it."""

    def __init__(self, state: "ModelState", engine: "EngineScheduler", store: Store) -> None:
        self.state = state
        self.engine = engine
        self._store = store
        #: The engine incarnation that has it.
        self.incarnation: int | None = None
        #: The last step of the log that it has; None before it is made.
        self.position: int | None = None
        #: Whether `catch_up` left steps that it knew of.
        self.has_more = True
        self._stopped = False
        self._losses: set[str] = set()

    async def catch_up(self) -> int:
        """Run some of the steps of the log that it does not have; returns the last one that it has."""
        if self.incarnation is None:
            self.incarnation = await self.engine.client.ready()
        state, recovery, incarnation = self.state, self.engine.recovery, self.incarnation
        if self.position is None:
            if (check := self.engine.client.base_check) is not None:
                await check.check_run(state.model.model_id, incarnation)
            await recovery.expect(state)
            snapshot = await recovery.newest_snapshot(state)
            position = -1
            if snapshot is not None:
                position, folder = snapshot
                if not await self._may_run():
                    return -1
                async with self._turn(()):
                    await recovery.restore(state, folder, incarnation)
            self.position = position
        rows, losses = await self._store.models.log_and_losses(
            state.model, after=self.position, limit=MAX_READ
        )
        new = [loss for loss in losses if loss.loss_id not in self._losses]
        await recovery.register_losses(state, new, incarnation)
        self._losses.update(loss.loss_id for loss in new)
        until_s = time.monotonic() + MAX_CATCH_UP_S
        for steps in replay_batches(rows):
            if not await self._may_run():
                break
            await self._run(steps, incarnation)
            self.position = number_of(steps[-1])
            if time.monotonic() > until_s:
                break
        newest = number_of(rows[-1]) if rows else self.position
        self.has_more = len(rows) == MAX_READ or self.position < newest
        return self.position

    def stop(self) -> None:
        """End `catch_up` after its current batch."""
        self._stopped = True
        self.engine.recovery.rebuilds.recheck()

    async def drop(self) -> None:
        """Remove it from the memory of the engine."""
        if self.incarnation is not None:
            await self.engine.recovery.drop(self.state, self.incarnation)

    async def _may_run(self) -> bool:
        """Wait until no model is rebuilt, for which a client waits; False if the copy is to stop."""
        await self.engine.recovery.rebuilds.none_left(unless=lambda: self._stopped)
        return not self._stopped

    async def _run(self, steps: Sequence[QueuedRequest], incarnation: int) -> None:
        """Run one batch: passes, or one other step."""
        recovery = self.engine.recovery
        if replay_of(steps[0]) is Replay.SKIP:
            return
        async with self._turn(steps):
            if steps[0].kind not in PASSES or replay_of(steps[0]) is not Replay.RUN:
                await recovery.replay_one(self.state, steps[0], incarnation)
                return
            sent = [await recovery.send_pass(self.state, step, incarnation) for step in steps]
            await asyncio.gather(*sent)

    @contextlib.asynccontextmanager
    async def _turn(self, steps: Sequence[QueuedRequest]) -> AsyncIterator[None]:
        """A training slot for one batch; a crash of the engine counts for the model."""
        model_id, client = self.state.model.model_id, self.engine.client
        async with (
            self.engine.slots.acquire(self.state, StepBatch(steps=tuple(steps))),
            client.isolation.attempt(model_id) as attempt,
        ):
            try:
                yield
            except EngineLost as lost:
                if client.count_attempt(model_id, attempt, lost):
                    raise WorkFailed("server", f"its log ends engines: {lost}") from lost
                raise


def replay_batches(rows: Sequence[QueuedRequest]) -> Iterator[Sequence[QueuedRequest]]:
    """The steps of a log in batches as a model in training has them: some passes, or one other step."""
    passes: list[QueuedRequest] = []
    for row in rows:
        is_pass = row.kind in PASSES and replay_of(row) is Replay.RUN
        full = len(passes) == MAX_PASSES_PER_BATCH
        if passes and (
            not is_pass or full or sum(one.tokens for one in passes) >= MAX_REPLAY_TOKENS
        ):
            yield passes
            passes = []
        if is_pass:
            passes.append(row)
        else:
            yield [row]
    if passes:
        yield passes
