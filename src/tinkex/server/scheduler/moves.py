"""
Moves a model to another engine while it trains.

The model goes on where it is, while a copy elsewhere follows its log (`model_copy`). When the copy is
less than two optimizer steps behind, the model stops at the end of a batch; the copy runs what it
lacks, and the model continues there. A copy that comes no closer slows the model down: after each
batch, the model waits for it as long as the batch took.

A move changes nothing that is stored until the model continues elsewhere, so one that fails changes
nothing at all.
"""

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

from tinkex.server.executor import EngineLost, EngineRefused, WorkFailed
from tinkex.server.queued_request import Kind
from tinkex.server.scheduler.model_copy import ModelCopy
from tinkex.server.scheduler.step_queue import Replay, replay_of
from tinkex.server.store import Damaged, NotOwner, StorageError, Store
from tinkex.wire.errors import UserFailure

if TYPE_CHECKING:
    from tinkex.server.scheduler.engine_scheduler import EngineScheduler
    from tinkex.server.scheduler.model_worker import ModelState

log = logging.getLogger("tinkex.server.scheduler")

#: A copy that is this close is not waited for: an optimizer step and the pass before it.
CLOSE_STEPS = 2
#: A model stops for a copy that lacks no more optimizer steps than this, if it comes no closer.
MAX_OPTIM_STEPS = 1
#: How long a model stands still at most while its copy runs what it lacks; then it goes on.
MAX_STOP_S = 60.0
#: How often a copy may come no closer before the move is given up.
MAX_ROUNDS = 20
#: How often a model without steps is looked at while its copy catches up.
IDLE_POLL_S = 0.05


class NotMoved(Exception):
    """The model stays where it is; the text says why."""


#: Why a model may not be moved.
NOT_MOVED = (
    NotMoved,
    EngineLost,
    EngineRefused,
    WorkFailed,
    UserFailure,
    Damaged,
    StorageError,
    NotOwner,
)


class Copy(Protocol):
    """The copy of one model, on another engine of this server or on another worker."""

    async def catch_up(self) -> int:
        """Bring it to the newest step of the log, or make it; returns that step."""

    async def take_over(self) -> None:
        """Between two batches, with all results stored: the model continues there."""

    async def drop(self) -> None:
        """The model was not moved."""


async def move(state: "ModelState", copy: Copy, store: Store) -> bool:
    """Move a model that is in the memory of its engine; False if it goes on where it was."""
    moved = False
    try:
        if state.steps_since_snapshot and not await state.home.snapshot_while_training(state):
            raise NotMoved("its snapshot could not be written")
        await _Move(state, copy, store).run()
        moved = True
    except NOT_MOVED as error:
        log.info("%s was not moved: %s", state.model.model_id, error)
    finally:
        if not moved:
            await copy.drop()
    return moved


class _Move:
    """One model that goes on training while its copy comes closer."""

    def __init__(self, state: "ModelState", copy: Copy, store: Store) -> None:
        self._state = state
        self._copy = copy
        self._store = store
        self._origin = state.home
        self._position = -1
        #: How often the copy came no closer.
        self._rounds = 0
        self._slows_down = False
        self._catching_up: asyncio.Task[int] | None = None
        self._is_over = False

    async def run(self) -> None:
        """Until the model is elsewhere; raises one of NOT_MOVED."""
        state, before = self._state, sys.maxsize
        try:
            while not self._is_over:
                self._catching_up = asyncio.create_task(self._copy.catch_up())
                if self._slows_down:
                    await self._wait_for_copy()
                self._position = await self._catching_up
                behind = state.queue.next_seq - 1 - self._position
                if CLOSE_STEPS < behind < before:
                    before = behind
                    continue
                before = min(before, behind)
                await self._between_batches(self._hand_over)
        finally:
            self._is_over = True
            if self._catching_up is not None:
                self._catching_up.cancel()
                with contextlib.suppress(asyncio.CancelledError, *NOT_MOVED):
                    await self._catching_up

    async def _between_batches(self, work: Callable[[], Awaitable[None]]) -> None:
        await self._origin.workers.run_between_batches(self._state, work)

    async def _wait_for_copy(self) -> None:
        """After each batch, the model waits for its copy as long as the batch took."""
        catching_up = self._catching_up
        assert catching_up is not None

        async def wait() -> None:
            if not self._is_over:
                took_s = time.monotonic() - began_s
                await asyncio.wait({catching_up}, timeout=took_s)

        while not catching_up.done():
            if not self._state.queue.running:
                await asyncio.wait({catching_up}, timeout=IDLE_POLL_S)
                continue
            began_s = self._state.last_step_s
            await self._between_batches(wait)

    async def _hand_over(self) -> None:
        """The model stands still: it goes to its copy, or goes on here, more slowly."""
        state = self._state
        if self._is_over:
            return
        if self._origin.models.get(state.model.model_id) is not state:
            raise NotMoved("it was taken over or forgotten meanwhile")
        await state.results_stored()
        lacking = await self._store.requests.log(state.model.model_id, after=self._position)
        left = [row for row in lacking if replay_of(row) is not Replay.SKIP]
        if sum(row.kind is Kind.OPTIM_STEP for row in left) <= MAX_OPTIM_STEPS:
            await self._copy.take_over()
            self._is_over = True
            return
        self._slows_down = True
        self._rounds += 1
        if self._rounds > MAX_ROUNDS:
            raise NotMoved(f"its copy lacks {len(left)} requests and comes no closer")


class LocalCopy:
    """A copy on another engine of this server."""

    def __init__(self, state: "ModelState", target: "EngineScheduler", store: Store) -> None:
        self._state = state
        self._target = target
        self._copy = ModelCopy(state, target, store)
        #: The engine incarnation that the model has left.
        self.left: int | None = None

    async def catch_up(self) -> int:
        return await self._copy.catch_up()

    async def take_over(self) -> None:
        state, origin = self._state, self._state.home
        try:
            async with asyncio.timeout(MAX_STOP_S):
                await self._copy.catch_up()
        except TimeoutError:
            raise NotMoved(f"its copy lacks steps after {MAX_STOP_S:.0f} s") from None
        if origin.models.get(state.model.model_id) is not state:
            raise NotMoved("it was taken over or forgotten meanwhile")
        self.left = state.loaded_in
        self._target.take_over(state)
        state.loaded_in = self._copy.incarnation

    async def drop(self) -> None:
        if self._state.home is not self._target:
            await self._copy.drop()
