"""The copies on one worker, of models that other workers have and that may come to it."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from tinkex.server.cluster import messages
from tinkex.server.cluster.worker_scheduler import WorkerScheduler
from tinkex.server.scheduler.model_copy import ModelCopy
from tinkex.server.scheduler.model_states import ModelState
from tinkex.server.scheduler.moves import NOT_MOVED, NotMoved
from tinkex.server.scheduler.step_queue import StepQueue
from tinkex.server.store import Store
from tinkex.server.store.notifier import Notifier, channel_of

log = logging.getLogger("tinkex.server.cluster")

#: A copy that nobody asks for is kept this much longer than a worker without a heartbeat is: if its
#: model loses its worker, it may continue from the copy.
KEPT_S = 5.0


class _RequestedCopy:
    """A copy here of a model that another worker has, as long as that asks for it."""

    def __init__(self, term: int) -> None:
        self.term = term
        #: When it was last asked for.
        self.asked_s = time.monotonic()
        #: The number of the last question.
        self.question = 0
        self.copy: ModelCopy | None = None
        self.running: asyncio.Task[None] | None = None
        #: Why it is useless.
        self.error: str | None = None
        #: Whether it is being removed, or its model is here now.
        self.is_over = False
        self.dropping: asyncio.Task[None] | None = None

    async def stopped(self) -> None:
        """Wait until it runs nothing; it stops after its current batch."""
        self.is_over = True
        if self.copy is not None:
            self.copy.stop()
        if self.running is not None:
            await asyncio.wait({self.running})


class Copies:
    """The copies on one worker, of models that may come to it."""

    def __init__(
        self,
        scheduler: WorkerScheduler,
        store: Store,
        notifier: Notifier,
        *,
        kept_s: float,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._scheduler = scheduler
        self._store = store
        self._notifier = notifier
        self._kept_s = kept_s
        self._spawn = spawn
        self._copies: dict[str, _RequestedCopy] = {}

    def asked(self, model_id: str, term: int, question: int, home: str) -> None:
        """Another worker wants this copy to have the newest step."""
        one = self._copies.get(model_id)
        newest = self._scheduler.terms().get(model_id, -1) if one is None else one.term
        if newest > term:
            # The one who asks has lost the model, and does not know.
            self._answer(home, [model_id, term, question, None, "the model has changed hands"])
            return
        if one is None:
            if self._scheduler.draining or not self._scheduler.may_copy(model_id, term=term):
                return  # asked again a second later
            one = self._copies[model_id] = _RequestedCopy(term)
        if one.is_over:
            return
        if one.term < term:
            # The model has changed hands; the log that the copy follows has only grown.
            one.term = term
            if one.copy is not None:
                one.copy.state.term = term
        one.asked_s, one.question = time.monotonic(), question
        if one.running is None:
            one.running = self._spawn(self._catch_up(model_id, one, home))

    def not_needed(self, model_id: str, term: int) -> None:
        if (one := self._copies.get(model_id)) is not None and one.term == term:
            self._drop(model_id, one)

    def look(self) -> None:
        """Drop copies that nobody has asked for lately."""
        now_s = time.monotonic()
        for model_id, one in list(self._copies.items()):
            if one.running is None and now_s - one.asked_s > self._kept_s:
                self._drop(model_id, one)

    async def take(self, model_id: str) -> ModelCopy | None:
        """The model is here now: its copy, if it is of use."""
        if (one := self._copies.get(model_id)) is None:
            return None
        if one.dropping is not None:
            # Otherwise it would remove what is rebuilt here.
            await asyncio.wait({one.dropping})
            return None
        await one.stopped()
        del self._copies[model_id]
        # What the engine has of a useless one is replaced by the rebuild.
        return one.copy if one.error is None else None

    async def close(self) -> None:
        for one in self._copies.values():
            if one.running is not None:
                one.running.cancel()

    async def _catch_up(self, model_id: str, one: _RequestedCopy, home: str) -> None:
        answered = -1
        try:
            # A question that came meanwhile needs what was not in the log yet.
            while answered != one.question and not one.is_over:
                answered, position = one.question, None
                try:
                    if one.error is None:
                        position = await self._position(model_id, one)
                except (*NOT_MOVED, LookupError) as error:
                    one.error = str(error) or type(error).__name__
                    log.info("the copy of %s failed: %s", model_id, one.error)
                except Exception as error:
                    # A bug; without an answer, the model would try to move for minutes.
                    one.error = f"unexpectedly, {type(error).__name__}"
                    log.exception("the copy of %s failed", model_id)
                text = (one.error or "")[: messages.MAX_ERROR_CHARS]
                self._answer(home, [model_id, one.term, answered, position, text])
        finally:
            one.running = None

    def _answer(self, home: str, item: list[Any]) -> None:
        self._notifier.send(channel_of(home), messages.COPIED, item)

    async def _position(self, model_id: str, one: _RequestedCopy) -> int:
        if one.copy is None:
            model = await self._store.models.model(model_id)
            if model is None:
                raise LookupError(f"model {model_id} is not in the database")
            engine = self._scheduler.replicas(model.base_model).for_training()
            if one.is_over:
                raise NotMoved("it is not needed any more")
            # The term of its worker: a damaged snapshot is set aside only while that has the model.
            state = ModelState(model=model, queue=StepQueue(), engine=engine, term=one.term)
            one.copy = ModelCopy(state, engine, self._store)
        return await one.copy.catch_up()

    def _drop(self, model_id: str, one: _RequestedCopy) -> None:
        async def drop() -> None:
            try:
                await one.stopped()
                if one.copy is not None:
                    await one.copy.drop()
            finally:
                del self._copies[model_id]

        if not one.is_over:
            one.is_over = True
            one.dropping = self._spawn(drop())
