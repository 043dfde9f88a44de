"""
A copy of a model that trains elsewhere, so that the model can continue here without a long pause.

The copy begins with the newest snapshot of the model and runs the steps of its log. It comes after all
other work of its engine: one batch at a time, like a batch of a model that trains there, and never
beside the rebuild of a model whose client waits for it.
"""

import asyncio
import contextlib
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
    from tinkex.server.scheduler.model_worker import ModelState


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
        #: Set to end `catch_up` after its current batch.
        self.hurry = False
        self._losses: set[str] = set()

    async def catch_up(self) -> int:
        """Run the steps of the log that it does not have; returns the last one."""
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
                async with self._turn(()):
                    await recovery.restore(state, folder, incarnation)
            self.position = position
        rows = await self._store.requests.log(state.model.model_id, after=self.position)
        # After the rows: a loss that one of them uses was stored before it.
        await recovery.register_losses(state, incarnation, known=self._losses)
        for steps in replay_batches(rows):
            if self.hurry:
                break
            await self._run(steps, incarnation)
            self.position = number_of(steps[-1])
        return self.position

    async def drop(self) -> None:
        """Remove it from the memory of the engine."""
        if self.incarnation is not None:
            await self.engine.recovery.drop(self.state, self.incarnation)

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
        """Wait until a batch of the copy may run; a crash of the engine counts for the model."""
        model_id, client = self.state.model.model_id, self.engine.client
        await self.engine.recovery.rebuilds.none_left()
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
