"""
Moves of models from one live worker to another: those of a draining worker, and one after the other to
a worker that has become free.

The worker that has a model asks another one for a copy of it (`copies`). Everything that they tell each
other is a hint, like all notifications: a question is repeated every second, and a move whose target is
gone is given up. Who has a model is decided by its row (`Workers.hand_over`), in a transaction that
requires the term. So a worker that dies or is cut off in any phase of a move leaves what a worker
without a move would: a model with a home, and a log.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from tinkex.server.cluster import messages
from tinkex.server.cluster.known_workers import LOOK_S, KnownWorkers
from tinkex.server.cluster.worker_scheduler import WorkerScheduler
from tinkex.server.queued_request import Kind, QueuedRequest
from tinkex.server.scheduler.model_states import ModelState
from tinkex.server.scheduler.moves import NotMoved
from tinkex.server.store import Store
from tinkex.server.store.notifier import Notifier, channel_of
from tinkex.server.store.workers import WorkerRow

log = logging.getLogger("tinkex.server.cluster")

#: Models that a draining worker moves at the same time.
MOVES_AT_ONCE = 2
#: The part of the time to drain in which models move while they train. Those that are left then stop,
#: and are rebuilt elsewhere.
LIVE_PART = 0.7
#: A model that had a step in this time is in training.
TRAINING_S = 60.0
#: A model moves once a worker has had so many more models in training than another one ...
UNEVEN_BY = 2
#: ... for this time, which begins anew with each move.
UNEVEN_S = 15.0
#: A model that has not moved by then stays, and none is tried for the time after it.
MOVE_S = 600.0
MOVE_RETRY_S = 60.0


def choose_move(rows: Sequence[WorkerRow]) -> tuple[str, str] | None:
    """
    Between which two workers a model should move: from the one with the most models in training to
    the one with the fewest, if they differ by `UNEVEN_BY`.

    All workers see the same rows and choose the same two, so only one of them acts.
    """
    by_load = sorted(rows, key=lambda row: (row.stats.get("training", 0), row.name))
    if not by_load:
        return None
    fewest, most = by_load[0], by_load[-1]
    difference = most.stats.get("training", 0) - fewest.stats.get("training", 0)
    return (most.name, fewest.name) if difference >= UNEVEN_BY else None


class RemoteCopy:
    """The copy of a model on another worker, as the worker sees it that has the model."""

    def __init__(
        self,
        state: ModelState,
        target: str,
        *,
        home: str,
        store: Store,
        notifier: Notifier,
        takes_work: Callable[[str], bool],
        disown: Callable[[], None],
    ) -> None:
        self._model_id = state.model.model_id
        self._term = state.term or 0
        self._target = target
        self._home = home
        self._store = store
        self._notifier = notifier
        self._takes_work = takes_work
        self._disown = disown
        #: The number of the last question, and its answer.
        self._question = 0
        self._answer: asyncio.Future[int] | None = None

    async def catch_up(self) -> int:
        """Ask until the other worker answers; NotMoved if it cannot, or is gone."""
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._answer = answer
        self._question += 1
        question = [self._model_id, self._term, self._question, self._home]
        while not answer.done():
            if not self._takes_work(self._target):
                raise NotMoved(f"the worker {self._target} takes no more work")
            self._send(messages.COPY, question)
            await asyncio.wait({answer}, timeout=LOOK_S)
        return answer.result()

    def answered(self, term: int, question: int, position: int | None, error: str) -> None:
        if (term, question) != (self._term, self._question):
            return
        if self._answer is None or self._answer.done():
            return
        if position is None:
            self._answer.set_exception(NotMoved(f"the worker {self._target} has no copy: {error}"))
        else:
            self._answer.set_result(position)

    async def take_over(self) -> None:
        """From this commit on, nothing of the model is published here."""
        try:
            await self._store.workers.hand_over(self._model_id, term=self._term, to=self._target)
        finally:
            # Also if another worker has taken it.
            self._disown()
        self._send(messages.MOVED, self._model_id)

    async def drop(self) -> None:
        self._send(messages.NO_COPY, [self._model_id, self._term])

    def _send(self, kind: str, item: Any) -> None:
        self._notifier.send(channel_of(self._target), kind, item)


class Moves:
    """The moves away from one worker."""

    def __init__(
        self,
        name: str,
        base_model: str,
        *,
        scheduler: WorkerScheduler,
        store: Store,
        known: KnownWorkers,
        notifier: Notifier,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._name = name
        self._base_model = base_model
        self._scheduler = scheduler
        self._store = store
        self._known = known
        self._notifier = notifier
        self._spawn = spawn
        #: By model.
        self._copies: dict[str, RemoteCopy] = {}
        #: Since when this worker has too many models, and when it may try again.
        self._uneven_since_s: float | None = None
        self._next_move_s = 0.0
        self._balancing: asyncio.Task[None] | None = None

    def answered(self, item: Sequence[Any]) -> None:
        """Another worker tells how far its copy is."""
        model_id, *answer = item
        if (copy := self._copies.get(model_id)) is not None:
            copy.answered(*answer)

    async def move(self, state: ModelState, target: str) -> bool:
        """Move a model to another worker while it trains; False if it stays."""
        model_id = state.model.model_id
        copy = self._copies[model_id] = self._copy(state, target)
        try:
            moved = await self._scheduler.move(state, copy)
        finally:
            del self._copies[model_id]
        if moved:
            log.info("%s moved to the worker %s", model_id, target)
        return moved

    def _copy(self, state: ModelState, target: str) -> RemoteCopy:
        return RemoteCopy(
            state,
            target,
            home=self._name,
            store=self._store,
            notifier=self._notifier,
            takes_work=lambda name: name in [row.name for row in self._others()],
            disown=lambda: self._scheduler.disown(state),
        )

    def _others(self) -> list[WorkerRow]:
        rows = self._known.that_take(self._base_model)
        return [row for row in rows if row.name != self._name]

    # -- a worker that drains ----------------------------------------------------------------------

    async def move_all(self, *, within_s: float) -> None:
        """Give all models to other workers; without any, whichever starts next gets them."""
        until_s = asyncio.get_running_loop().time() + LIVE_PART * within_s
        slots = asyncio.Semaphore(MOVES_AT_ONCE)

        async def one(state: ModelState) -> None:
            moved, target = False, self._next_home()
            if target is not None:
                try:
                    async with asyncio.timeout_at(until_s), slots:
                        moved = await self.move(state, target)
                except TimeoutError:
                    log.info("%s stops, to move in time", state.model.model_id)
            if not moved:
                await self._stop(state)

        if self._balancing is not None:
            self._balancing.cancel()
        await self._scheduler.placement.moves_over()
        while states := self._scheduler.movable():
            await asyncio.gather(*map(one, states))

    async def _stop(self, state: ModelState) -> None:
        async def give() -> None:
            # Looked up again: the last target may be gone.
            if (target := self._next_home()) is not None:
                await self._copy(state, target).take_over()
                log.info("%s goes to the worker %s", state.model.model_id, target)

        await self._scheduler.stop_here(state, give)

    def _next_home(self) -> str | None:
        model = QueuedRequest(
            owner="", kind=Kind.CREATE_MODEL, base_model=self._base_model, model_id="-"
        )
        return self._known.choose_home(model, without=self._name)

    # -- a worker that has become free -------------------------------------------------------------

    def balance(self) -> None:
        """Move one model if this worker has had too many for a while. Called once a second."""
        chosen = choose_move(self._known.that_take(self._base_model))
        if chosen is None or chosen[0] != self._name:
            self._uneven_since_s = None
            return
        now_s = time.monotonic()
        if self._uneven_since_s is None:
            self._uneven_since_s = now_s
        is_due = now_s - self._uneven_since_s >= UNEVEN_S and now_s >= self._next_move_s
        if is_due and self._balancing is None:
            self._balancing = self._spawn(self._balance(chosen[1]))

    async def _balance(self, target: str) -> None:
        since_s = time.monotonic() - TRAINING_S
        states = [
            state
            for state in self._scheduler.movable()
            if state.loaded_in is not None and state.last_step_s >= since_s
        ]
        moved = not states
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(MOVE_S):
                    # Any of them: one that cannot be moved must not keep the others from it.
                    moved = moved or await self.move(random.choice(states), target)
        finally:
            self._balancing = self._uneven_since_s = None
            if not moved:
                self._next_move_s = time.monotonic() + MOVE_RETRY_S
