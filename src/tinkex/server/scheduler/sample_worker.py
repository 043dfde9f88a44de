"""Runs requests that are not steps: samples, and the creation of custom losses."""

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from tinkex.server.executor import OnTokens
from tinkex.server.queued_request import Outcome, QueuedRequest
from tinkex.server.scheduler.engine_client import (
    EngineClient,
    RunElsewhere,
    register_loss_order,
    sample_order,
)
from tinkex.server.scheduler.results import Execution
from tinkex.wire.codec import encode_json
from tinkex.wire.custom_loss import CreateCustomLossResponse
from tinkex.wire.partial_sample import PartialSample
from tinkex.wire.proto.frames_pb2 import Order, Tokens

if TYPE_CHECKING:
    from tinkex.server.scheduler.engine_scheduler import EngineScheduler
    from tinkex.server.scheduler.model_states import ModelStates
    from tinkex.server.scheduler.replicas import Replicas


class TokenStream:
    """The tokens of a running sample, for any number of readers. Belongs to one event loop."""

    def __init__(self) -> None:
        self.partial = PartialSample()
        self._at_next: list[Callable[[], None]] = []

    def at_next_token(self, wake: Callable[[], None]) -> None:
        """Call a function once, when the next token arrives."""
        self._at_next.append(wake)

    def add(self, tokens: Tokens) -> None:
        """A restarted engine sends everything again; only new tokens count."""
        pairs = list(zip(tokens.top_tokens, tokens.top_logprobs, strict=True))
        count = tokens.top_count
        if self.partial.add(
            tokens.sequence,
            tokens.tokens,
            tokens.logprobs,
            start=tokens.start,
            tops=[pairs[at : at + count] for at in range(0, len(pairs), count or 1)],
        ):
            waking, self._at_next = self._at_next, []
            for wake in waking:
                wake()


class SampleWorker:
    """Runs the samples of one engine, all at once; the engine batches them."""

    def __init__(self, execution: Execution, engine: EngineClient) -> None:
        self._execution = execution
        self._engine = engine
        #: By request id: the owner, and the task whose cancellation cancels the sample.
        self._running: dict[str, tuple[str, asyncio.Task[Outcome]]] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._running

    def cancel(self, request_id: str, *, owner: str) -> None:
        """Cancel a sample; no effect if it is not running."""
        running_owner, task = self._running.get(request_id, (None, None))
        if task is not None and running_owner == owner:
            task.cancel()

    async def cancel_unless_polled(self, request_id: str, *, owner: str, after_s: float) -> None:
        """The reader of a sample disconnected: cancel it unless it is polled within the time."""
        futures = self._execution.futures
        polls = futures.poll_count(request_id)
        await asyncio.sleep(after_s)
        if futures.poll_count(request_id) == polls and not futures.is_polled(request_id):
            self.cancel(request_id, owner=owner)

    async def run(self, request: QueuedRequest) -> Outcome | None:
        """
        Run a sample; None if it runs again after the next start.

        Raises RunElsewhere if another replica has to run it.
        """
        task = asyncio.create_task(self._sample(request))
        self._running[request.request_id] = (request.owner, task)
        try:
            await asyncio.wait({task})
            if task.cancelled():
                return Outcome(error="cancelled: the client gave up on it.", category="user")
            if isinstance(task.exception(), RunElsewhere):
                raise RunElsewhere
            return await self._execution.outcome_of(task)
        finally:
            # Without effect unless the server is stopping.
            task.cancel()
            del self._running[request.request_id]

    async def _sample(self, request: QueuedRequest) -> Outcome:
        prepare = functools.partial(self._prepare, request)
        if request.version_id is None:
            done = await self._engine.run_request(request, prepare)
        else:
            with self._execution.store.checkpoints.in_use(request.version_id):
                done = await self._engine.run_request(request, prepare)
        return Outcome(result=done.result)

    async def _prepare(self, request: QueuedRequest) -> tuple[Order, OnTokens | None]:
        folder = None
        if request.version_id is not None:
            if (check := self._engine.base_check) is not None:
                await check.check_version(request.version_id, await self._engine.ready())
            folder = await self._execution.store.checkpoints.open_cached(request.version_id)
        payload = await self._execution.payloads.get(request)
        stream = self._execution.token_streams.get(request.request_id)
        order = sample_order(request.owner, folder, payload, streams=stream is not None)
        return order, None if stream is None else stream.add


class CustomLossWorker:
    """Registers a new custom loss in every engine that has a model of its session."""

    def __init__(
        self,
        execution: Execution,
        models: "ModelStates",
        replicas_of: "Callable[[str], Replicas]",
    ) -> None:
        self._execution = execution
        self._models = models
        self._replicas_of = replicas_of

    async def run(self, request: QueuedRequest) -> Outcome | None:
        """Check and register the loss; None if it runs again after the next start."""
        return await self._execution.outcome_of(self._register(request))

    async def _register(self, request: QueuedRequest) -> Outcome:
        loss = await self._execution.store.models.custom_loss(request.request_id)

        async def prepare() -> tuple[Order, None]:
            return register_loss_order(loss), None

        # An engine that loads a model of this session later registers its losses then. A model that is
        # being loaded, and a copy of one that moves, may have read them before this one was stored.
        engines = {
            engine
            for state in self._models.opened()
            if state.model.session_id == loss.session_id
            for engine in self._replicas_of(state.model.base_model).engines
            if engine.recovery.has_models_of(loss.session_id)
        }
        checked = False
        for engine in sorted(engines, key=lambda engine: engine.name):
            # A lost engine gets the losses with the models that it loads.
            with contextlib.suppress(RunElsewhere):
                await self._check(request, prepare, engine, loss.session_id)
                checked |= engine.client.base_model == request.base_model
        while not checked:
            engine = self._replicas_of(request.base_model).for_training()
            with contextlib.suppress(RunElsewhere):
                await self._check(request, prepare, engine, loss.session_id)
                checked = True
        return Outcome(result=encode_json(CreateCustomLossResponse(loss_id=loss.loss_id)))

    async def _check(
        self,
        request: QueuedRequest,
        prepare: Callable[[], Awaitable[tuple[Order, None]]],
        engine: "EngineScheduler",
        session_id: str,
    ) -> None:
        try:
            await engine.client.run_request(request, prepare)
        finally:
            await engine.recovery.loss_was_checked(session_id)
