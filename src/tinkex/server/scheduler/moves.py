"""
Moves a model to another engine while it trains.

The model goes on where it is, while a copy elsewhere follows its log (`model_copy`). When the copy is
less than two optimizer steps behind, the model stops at the end of a batch; the copy runs what it
lacks, and the model continues there. A copy that comes no closer slows the model down: after each
batch, the model waits for it as long as the batch took, and longer if that does not help.

A move changes nothing that is stored until the model continues elsewhere, so one that fails changes
nothing at all.
"""

import asyncio
import contextlib
import functools
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
    from tinkex.server.scheduler.model_states import ModelState

log = logging.getLogger("tinkex.server.scheduler")

#: A copy that is this close is not waited for: an optimizer step and the pass before it.
CLOSE_STEPS = 2
#: A model stops for a copy that lacks no more optimizer steps than this: less than two steps.
MAX_OPTIM_STEPS = 1
#: How long a model waits after a batch for its copy: at least `MIN_WAIT_S`, because copies are also
#: behind by the messages about them, and twice as long after each `ROUNDS_PER_WAIT` times that the
#: copy came no closer.
MIN_WAIT_S, MAX_WAIT_S = 0.2, 5.0
ROUNDS_PER_WAIT = 5
#: How often a copy may come no closer, and how long a model waits for one that does not, before the
#: move is given up.
MAX_ROUNDS = 20
MAX_WAITED_S = 60.0
#: How long a model stands still while its copy runs what it lacks, unless that took its own engine more
#: than half of it; then the model goes on.
MAX_STOP_S = 5.0
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


def wait_for_copy_s(batch_s: float, rounds: int) -> float:
    """How long a model waits after a batch for its copy, which came no closer so many times."""
    return min(max(batch_s, MIN_WAIT_S) * 2.0 ** (rounds // ROUNDS_PER_WAIT), MAX_WAIT_S)


class Copy(Protocol):
    """The copy of one model, on another engine of this server or on another worker."""

    async def catch_up(self) -> int:
        """Make it, or run the steps that it lacks, or some of many; returns the last one."""

    async def take_over(self) -> None:
        """Between two batches, with all results stored: the model continues there."""

    async def drop(self) -> None:
        """The model was not moved."""


async def move(state: "ModelState", copy: Copy, store: Store) -> bool:
    """Move a model that is in the memory of its engine; False if it goes on where it was."""
    moved = False
    try:
        if state.snapshots.steps and not await state.engine.snapshot_while_training(state):
            raise NotMoved("its snapshot could not be written")
        await _Move(state, copy, store).run()
        moved = True
    except NOT_MOVED as error:
        log.info("%s was not moved: %s", state.model.model_id, error)
    except Exception:
        log.exception("%s was not moved", state.model.model_id)
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
        self._origin = state.engine
        self._position = -1
        #: The fewest steps that the copy lacked, and how often it came no closer since.
        self._least = sys.maxsize
        self._rounds = 0
        #: How long the model has waited for its copy since that came closer.
        self._waited_s = 0.0
        self._slows_down = False
        self._catching_up: asyncio.Task[int]
        self._is_over = False

    async def run(self) -> None:
        """Until the model is elsewhere; raises one of NOT_MOVED."""
        state, before = self._state, sys.maxsize
        self._catch_up()
        try:
            while not self._slows_down and not self._is_over:
                self._position = await self._catching_up
                behind = state.queue.next_seq - 1 - self._position
                comes_closer, before = behind < before, min(before, behind)
                if comes_closer and behind > CLOSE_STEPS:
                    self._catch_up()
                else:
                    await self._between_batches(self._hand_over_or_slow_down)
            while not self._is_over:
                runs = bool(state.queue.running)
                if not runs:
                    await asyncio.wait({self._catching_up}, timeout=IDLE_POLL_S)
                if runs or self._catching_up.done():
                    await self._between_batches(functools.partial(self._wait_for_copy, runs))
        finally:
            self._is_over = True
            self._catching_up.cancel()
            with contextlib.suppress(asyncio.CancelledError, *NOT_MOVED):
                await self._catching_up

    def _catch_up(self) -> None:
        self._catching_up = asyncio.create_task(self._copy.catch_up())

    async def _between_batches(self, work: Callable[[], Awaitable[None]]) -> None:
        async def run() -> None:
            if not self._is_over:
                await work()

        await self._origin.workers.run_between_batches(self._state, run)

    async def _hand_over_or_slow_down(self) -> None:
        if not await self._hand_over(MAX_OPTIM_STEPS):
            self._slows_down = True
            self._catch_up()

    async def _wait_for_copy(self, after_batch: bool) -> None:
        """After a batch, the model waits for its copy as long as the batch took, or a moment."""
        began_s = time.monotonic()
        batch_s = began_s - self._state.last_step_s
        await self._look_at_copy()
        if after_batch and not self._is_over:
            wait_s = wait_for_copy_s(batch_s, self._rounds)
            await asyncio.wait({self._catching_up}, timeout=wait_s)
            await self._look_at_copy()
            self._waited_s += time.monotonic() - began_s
            if self._waited_s > MAX_WAITED_S and not self._is_over:
                raise NotMoved(f"its copy came no closer while it waited {self._waited_s:.0f} s")

    async def _look_at_copy(self) -> None:
        """Hand the model over if its copy is close now; otherwise the copy goes on."""
        if self._is_over or not self._catching_up.done():
            return
        self._position = self._catching_up.result()
        # A model that waits after each batch has lost up to a step already.
        if not await self._hand_over(0):
            self._catch_up()

    async def _hand_over(self, may_lack: int) -> bool:
        """The model stands still: it goes to its copy, if that lacks so few optimizer steps."""
        state = self._state
        if self._origin.models.get(state.model.model_id) is not state:
            raise NotMoved("it was taken over or forgotten meanwhile")
        await state.results_stored()
        lacking = await self._store.requests.log(state.model.model_id, after=self._position)
        left = [row for row in lacking if replay_of(row) is not Replay.SKIP]
        if sum(row.kind is Kind.OPTIM_STEP for row in left) <= may_lack:
            await self._copy.take_over()
            self._is_over = True
            return True
        if len(left) < self._least:
            self._least, self._rounds, self._waited_s = len(left), 0, 0.0
        else:
            self._rounds += 1
        if self._rounds > MAX_ROUNDS:
            raise NotMoved(f"its copy lacks {len(left)} requests and comes no closer")
        return False


class LocalCopy:
    """A copy on another engine of this server."""

    def __init__(self, state: "ModelState", target: "EngineScheduler", store: Store) -> None:
        self._state = state
        self._target = target
        self._copy = ModelCopy(state, target, store)
        #: The engine incarnation that the model has left; None if none had all of it.
        self.left: int | None = None
        #: What engines had computed for the model when the copy began to catch up.
        self._compute_s = 0.0

    async def catch_up(self) -> int:
        self._compute_s = self._state.compute_s
        return await self._copy.catch_up()

    async def take_over(self) -> None:
        state, origin = self._state, self._state.engine
        within_s = max(MAX_STOP_S, 2 * (state.compute_s - self._compute_s))
        try:
            async with asyncio.timeout(within_s):
                await self._copy.catch_up()
                while self._copy.has_more:
                    await self._copy.catch_up()
        except TimeoutError:
            raise NotMoved(f"its copy lacks steps after {within_s:.0f} s") from None
        if origin.models.get(state.model.model_id) is not state:
            raise NotMoved("it was taken over or forgotten meanwhile")
        self.left = state.loaded_in
        self._target.take_over(state)
        state.loaded_in = self._copy.incarnation

    async def drop(self) -> None:
        if self._state.engine is not self._target:
            await self._copy.drop()
