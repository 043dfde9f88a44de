"""The models that this process has opened: each with its queue of steps, restored from its log."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable

from tinkex.server.queued_request import Cause
from tinkex.server.scheduler.engine_scheduler import EngineScheduler
from tinkex.server.scheduler.model_copy import ModelCopy
from tinkex.server.scheduler.model_worker import Copied, ModelState
from tinkex.server.scheduler.step_queue import model_deleted, restore_queue
from tinkex.server.store import Ownership, Store


class ModelStates:
    """The models that have had work since this process started, restored from their logs."""

    def __init__(
        self,
        store: Store,
        engine_of: Callable[[str], EngineScheduler],
        ownership: Ownership | None,
    ) -> None:
        self._store = store
        self._ownership = ownership
        #: The engine for a model of this base model.
        self._engine_of = engine_of
        self._states: dict[str, ModelState] = {}
        self._opening: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        #: Models that another worker has now, until nothing of them runs here.
        self.leaving: dict[str, asyncio.Task[None]] = {}
        #: The copy of a model that was made here while another worker had it; a worker sets it.
        self.take_copy: Callable[[str], Awaitable[ModelCopy | None]] | None = None

    def get(self, model_id: str) -> ModelState | None:
        """The state if this process has opened the model."""
        return self._states.get(model_id)

    def opened(self) -> Iterable[ModelState]:
        return self._states.values()

    def opened_by_id(self) -> Iterable[tuple[str, ModelState]]:
        return self._states.items()

    def forget(self, state: ModelState) -> None:
        """Drop a state, unless something of it exists only in memory."""
        model_id = state.model.model_id
        idle = state.is_idle or state.disowned
        if not idle or self._states.get(model_id) is not state:
            return
        del self._states[model_id]
        state.engine.models.pop(model_id, None)
        if (opening := self._opening.get(model_id)) is not None and not opening.locked():
            del self._opening[model_id]

    async def open(self, model_id: str, *, first_seq: int = 0) -> ModelState:
        """Open a model; `first_seq` is the next number of a model whose log was deleted."""
        async with self._opening[model_id]:
            if (state := self._states.get(model_id)) is not None:
                return state
            if (leaving := self.leaving.get(model_id)) is not None:
                # It comes back.
                await asyncio.wait({leaving})
            model = await self._store.models.model(model_id)
            if model is None:
                raise LookupError(f"model {model_id} is not in the database")
            term = None
            if self._ownership is not None:
                # Before the log is read: whoever had the model adds nothing to it from now on.
                term = await self._ownership.take(model_id)
            snapshot = await self._store.snapshots.newest(model_id)
            after = -1 if snapshot is None else snapshot.seq_id
            finished = [
                step
                for step in await self._store.requests.log(model_id, after=after)
                # The queue had already passed a late step.
                if step.outcome is not None and step.outcome.cause is not Cause.LATE
            ]
            gradient_error = None if snapshot is None else snapshot.spoiled
            queue = restore_queue(finished, next_seq=after + 1, gradient_error=gradient_error)
            if snapshot is None and not await self._store.requests.has_steps(model_id):
                queue.creation_error, queue.next_seq = model_deleted(), first_seq
            state = await self._from_copy(model_id)
            if state is None:
                state = ModelState(
                    model=model, queue=queue, engine=self._engine_of(model.base_model)
                )
            state.queue, state.term, state.steps_since_snapshot = queue, term, len(finished)
            self._states[model_id] = state.engine.models[model_id] = state
            return state

    async def _from_copy(self, model_id: str) -> ModelState | None:
        """The state of a copy here, if there is one; its engine lacks only the last steps."""
        copy = None if self.take_copy is None else await self.take_copy(model_id)
        if copy is None or copy.incarnation is None or copy.position is None:
            return None
        copy.state.copied = Copied(incarnation=copy.incarnation, position=copy.position)
        return copy.state
