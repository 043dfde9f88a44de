"""Takes the snapshots of models, which keep their rebuilds short."""

import asyncio
import contextlib
import json
import logging
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from tinkex.server.executor import EngineLost, EngineRefused, WorkFailed
from tinkex.server.scheduler.base_model_check import BaseModelChanged
from tinkex.server.scheduler.engine_client import EngineClient
from tinkex.server.scheduler.recovery import Recovery
from tinkex.server.scheduler.results import Execution
from tinkex.server.store import Damaged, NotOwner, StorageError
from tinkex.wire.proto import frames_pb2
from tinkex.wire.proto.frames_pb2 import Done, Order

if TYPE_CHECKING:
    from tinkex.server.scheduler.model_states import ModelState

log = logging.getLogger("tinkex.server.scheduler")


class Snapshots:
    """
    Takes snapshots of models on one engine.

    A snapshot is the state of a model between two steps. It is written while later steps run; then
    the log before it is truncated. Only the model's worker, or a task that runs instead of the
    worker, may take a snapshot.
    """

    def __init__(
        self,
        execution: Execution,
        engine: EngineClient,
        recovery: Recovery,
        *,
        steps: int,
        payload_bytes: int,
    ) -> None:
        self._execution = execution
        self._engine = engine
        self._recovery = recovery
        #: A snapshot is due after this many steps, or bytes of payloads; 0 means never.
        self.steps = steps
        self.payload_bytes = payload_bytes

    async def write(self, state: "ModelState") -> bool:
        """Take a snapshot and wait until it is stored; False if that failed."""
        written = await self.begin(state)
        return written is not None and await written

    async def begin(self, state: "ModelState") -> asyncio.Future[bool] | None:
        """
        Take a snapshot of the current state; later steps run while it is written.

        The engine copies the model when the order reaches it, before any later step. If the
        snapshot fails, the model continues, because its log is still complete.
        """
        try:
            return await self._begin(state)
        except (EngineLost, EngineRefused, BaseModelChanged, WorkFailed, Damaged) as error:
            log.info("the snapshot of %s failed: %s", state.model.model_id, error)
        except StorageError as trouble:
            log.warning("the snapshot of %s failed: %s", state.model.model_id, trouble)
        except Exception:
            log.exception("the snapshot of %s failed", state.model.model_id)
        return None

    async def _begin(self, state: "ModelState") -> asyncio.Future[bool] | None:
        await state.snapshots.written()
        state.snapshots.restart()  # even if this one fails
        if state.queue.creation_error is not None or state.queue.running:
            return None
        async with contextlib.AsyncExitStack() as stack:
            # Like all work, it must not run beside an isolated request.
            model_id = state.model.model_id
            attempt = await stack.enter_async_context(self._engine.isolation.attempt(model_id))
            incarnation = await self._recovery.ensure_loaded(state, attempt)
            await state.results_stored()
            if state.loaded_in != incarnation:  # a result could not be stored
                return None
            place, folder = self._execution.store.snapshots.new_key(model_id)
            order = Order(snapshot=frames_pb2.Snapshot(model_id=model_id, folder=folder))
            future = await state.send(self._engine, order, incarnation)
            saving = self._save(
                state, future, place, state.queue.next_seq - 1, state.queue.gradient_error
            )
            written: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            state.snapshots.writing = self._execution.spawn(
                _finish_snapshot(saving, written, stack.pop_all())
            )
        return written

    async def _save(
        self,
        state: "ModelState",
        future: asyncio.Future[Done],
        place: str,
        seq_id: int,
        gradient_error: str | None,
    ) -> bool:
        model_id = state.model.model_id
        try:
            done = await future
            state.snapshots.compute_s -= done.compute_s  # counted as computation of the model
            return await self._execution.store.snapshots.save(
                model_id=model_id,
                seq_id=seq_id,
                place=place,
                size_bytes=json.loads(done.result)["size_bytes"],
                spoiled=gradient_error,
                term=state.term,
            )
        except (EngineLost, EngineRefused, NotOwner) as lost:
            log.info("the snapshot of %s failed: %s", model_id, lost)
        except (WorkFailed, StorageError) as failed:
            log.warning("the snapshot of %s failed: %s", model_id, failed)
        except Exception:
            log.exception("the snapshot of %s failed", model_id)
        return False


async def _finish_snapshot(
    saving: Coroutine[Any, Any, bool],
    written: asyncio.Future[bool],
    attempt: contextlib.AsyncExitStack,
) -> None:
    try:
        async with attempt:
            saved = await saving
            if not written.done():  # who waited for it may have been canceled
                written.set_result(saved)
    finally:
        written.cancel()  # without effect unless the server is stopping
