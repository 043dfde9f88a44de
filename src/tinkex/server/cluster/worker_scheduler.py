"""
The scheduler of a worker: besides running requests, it hands models over to other workers.

Who has a model is decided by its row, and its term (`Ownership`). A model that another worker has is
disowned here: nothing more of it is published, and its requests go where it is.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

from tinkex.server.queued_request import Kind, Outcome, QueuedRequest
from tinkex.server.scheduler.model_copy import ModelCopy
from tinkex.server.scheduler.model_states import ModelState
from tinkex.server.scheduler.moves import Copy, move
from tinkex.server.scheduler.scheduler import Scheduler
from tinkex.server.store import NotOwner, Ownership
from tinkex.server.store.workers import NewHomes

log = logging.getLogger("tinkex.server.cluster")


class WorkerScheduler(Scheduler):
    """Runs the requests of one worker. `Worker` sets the functions that tell other processes."""

    def __init__(self, *, ownership: Ownership, **parts: Any) -> None:
        super().__init__(ownership=ownership, **parts)
        self._name = ownership.worker
        #: Set if another process has the name of this worker; then it takes nothing.
        self.replaced = False
        #: Called with the new home of requests that came here, and their model.
        self.on_forwarded: Callable[[str, str], None] = lambda _home, _model_id: None
        #: The names of all workers that run.
        self.live_workers: Callable[[], Awaitable[frozenset[str]]] | None = None
        self._execution.on_not_owner = self.disown

    # -- which requests run here -------------------------------------------------------------------

    @property
    def draining(self) -> bool:
        """A draining worker takes only the work of models that it still has."""
        return self.placement.draining

    def drain(self) -> None:
        """Take no more work, except that of the models that are here."""
        self.placement.draining = True

    def has(self, request_id: str, model_id: str | None) -> bool:
        """Whether this process runs a request, or has its model."""
        if request_id in self._execution.claimed:
            return True
        return model_id is not None and self._models.get(model_id) is not None

    def _takes(self, request: QueuedRequest) -> bool:
        """
        Whether a request may run here.

        A worker that started again with another base model leaves the requests of the old one to
        the workers that serve it. Custom losses need no base model.
        """
        if self.replaced:
            return False
        if request.kind is Kind.CREATE_CUSTOM_LOSS:
            return True
        if self.draining and not self.has(request.request_id, request.model_id):
            return False
        return self._is_served(request.base_model)

    async def _run_claimed(
        self, request: QueuedRequest, work: Coroutine[Any, Any, Outcome | None]
    ) -> None:
        try:
            await super()._run_claimed(request, work)
        except NotOwner as lost:
            await self._forward(lost.model_ids)

    async def _open_with_steps(self, model_id: str, first_seq: int) -> None:
        try:
            await super()._open_with_steps(model_id, first_seq)
        except NotOwner as lost:
            await self._forward(lost.model_ids)

    async def _forward(self, model_ids: Iterable[str]) -> None:
        """These models have another home: their requests, which came here, go there."""
        for model_id in model_ids:
            log.info("%s is on another worker; its requests go there", model_id)
            home = await self._store.workers.forward(model_id)
            self._execution.futures.untrack_model(model_id)
            if home is not None:
                self.on_forwarded(home, model_id)

    async def _create_loss(self, request: QueuedRequest) -> Outcome | None:
        """
        Register a custom loss here, then on the next worker that has a model of its session.

        The request goes from worker to worker, in the order of their names; the last one finishes it.
        """
        if not self._is_served(request.base_model):
            # Any base model will do, and this worker has another one.
            request.base_model = self._execution.executor.served[0].name
        outcome = await super()._create_loss(request)
        if outcome is None or outcome.error is not None:
            return outcome
        homes = await self._store.workers.homes_of_session(request.session_id or "")
        live = await self.live_workers() if self.live_workers is not None else frozenset()
        following = next((one for one in homes if one > self._name and one in live), None)
        if following is None:
            # A worker that seems dead may return; the models that it has in memory lack the loss.
            running = {self._name, *live}
            await self._store.workers.fence_off(request.session_id or "", running)
            return outcome
        await self._store.workers.rehome(NewHomes(requests={request.request_id: following}))
        self._execution.release(request)
        self._execution.futures.untrack(request)
        return None

    # -- which models are here ---------------------------------------------------------------------

    def terms(self) -> dict[str, int]:
        """The models that this worker has, each with its term."""
        return {
            state.model.model_id: state.term
            for state in self._models.opened()
            if state.term is not None
        }

    def sessions(self) -> set[str]:
        """The sessions that have a model here."""
        return {state.model.session_id for state in self._models.opened()}

    def models_with_gap(self) -> list[str]:
        """Models whose next step is missing while later ones wait."""
        return [
            state.model.model_id for state in self._models.opened() if state.queue.gap() is not None
        ]

    async def snapshot(self, model_id: str) -> bool:
        """False also if another worker has the model."""
        try:
            return await super().snapshot(model_id)
        except NotOwner:
            return False

    # -- models that go ----------------------------------------------------------------------------

    def movable(self) -> list[ModelState]:
        """The models that this process has and that do not move, busy ones last."""
        states = [
            one for id_, one in self._models.opened_by_id() if id_ not in self.placement.moves
        ]
        return sorted(states, key=lambda state: not state.is_idle)

    async def move(self, state: ModelState, copy: Copy) -> bool:
        """Move a model to another worker while it goes on here; False if it stays."""
        with self.placement.moving(state):
            if state.loaded_in is not None and state.queue.creation_error is None:
                return await move(state, copy, self._store)
            # It is not in memory, so there is nothing to copy.
            moved = False

            async def give() -> None:
                nonlocal moved
                await state.results_stored()
                if self._models.get(state.model.model_id) is state:
                    await copy.take_over()
                    moved = True

            with contextlib.suppress(NotOwner):
                await state.engine.workers.run_between_batches(state, give)
            return moved

    async def stop_here(self, state: ModelState, give: Callable[[], Awaitable[None]]) -> None:
        """
        Stop running a model after its current batch, with a snapshot of it; then `give` it away.

        Whoever has it next continues from the snapshot.
        """

        async def stop() -> None:
            await state.results_stored()
            if state.snapshots.steps and state.loaded_in is not None:
                await state.engine.snapshot_now(state)
            await give()
            self.disown(state)

        with contextlib.suppress(NotOwner):
            await state.engine.workers.run_between_batches(state, stop)

    def disown_all(self, model_ids: Iterable[str]) -> None:
        """Other workers have these models now."""
        for model_id in model_ids:
            if (state := self._models.get(model_id)) is not None:
                self.disown(state)

    def disown(self, state: ModelState) -> None:
        """Another worker has the model: it finishes the steps that were here."""
        if state.disowned:
            return
        state.disowned = True
        if state.gap_timer is not None:
            state.gap_timer.cancel()
        steps = (*state.queue.waiting.values(), *state.queue.running.values())
        for step in (*steps, *(step for step, _, _ in state.unstored)):
            self._execution.release(step)
        state.unstored.clear()
        model_id = state.model.model_id
        if self._models.get(model_id) is not state:
            # It was unloaded before: what this process has of the model is not of this state.
            self._execution.spawn(self._worker_ended(state))
            return
        self._execution.futures.untrack_model(model_id)
        self._models.forget(state)
        self._models.leaving[model_id] = self._execution.spawn(self._drop_disowned(state))

    async def _worker_ended(self, state: ModelState) -> None:
        """Nothing more of a disowned state runs."""
        while state.worker is not None:
            await asyncio.wait({state.worker})
        while state.between:
            await state.between.popleft()()  # whoever waits for it gets NotOwner

    async def _drop_disowned(self, state: ModelState) -> None:
        try:
            await self._worker_ended(state)
            incarnation = state.loaded_in
            if incarnation is None and state.copied is not None:
                incarnation = state.copied.incarnation
            await state.engine.recovery.drop(state, incarnation)
        finally:
            del self._models.leaving[state.model.model_id]

    # -- models that come --------------------------------------------------------------------------

    def take_copies_from(self, take: Callable[[str], Awaitable[ModelCopy | None]]) -> None:
        """Where this worker has copies of models that may come to it."""
        self._models.take_copy = take

    def may_copy(self, model_id: str, *, term: int) -> bool:
        """
        Whether a copy of a model may be made here: nothing of it runs here.

        A model that this process had under an earlier term is given up first.
        """
        if (state := self._models.get(model_id)) is not None and (state.term or 0) < term:
            self.disown(state)
        return self._models.get(model_id) is None and model_id not in self._models.leaving

    async def adopt(self, model_id: str) -> None:
        """This worker has a model now: complete the copy of it, and run the steps that wait."""
        try:
            known = self._models.get(model_id)
            state = await self._open(model_id)
        except (LookupError, NotOwner):
            return
        if known is state:
            await state.engine.workers.add_waiting_steps(state)
        elif state.copied is not None:
            await state.engine.complete_copy(state)
