"""Snapshots: a model's state between two steps, written down while it goes on, so that its log can be cut."""

import asyncio
import contextlib
import json
import logging
from collections.abc import Coroutine
from typing import Any

from tinkex.server.base_check import BaseChanged
from tinkex.server.dispatch.desk import Desk
from tinkex.server.dispatch.revival import Revival
from tinkex.server.dispatch.run import Run
from tinkex.server.executor import EngineLost, EngineRefused, Outcome, Task, Work, WorkFailed
from tinkex.server.store import Damaged, StorageTrouble

log = logging.getLogger("tinkex.server.dispatch")

#: How late a snapshot may be: by this part of what is between two of them.
PATIENCE = 10


class Snapshots:
    """Written by whoever is in the driver's place of a model."""

    def __init__(self, desk: Desk, revival: Revival, *, steps: int, payload_bytes: int) -> None:
        self._desk = desk
        self._revival = revival
        #: After so many steps, or bytes of payloads, one is due; 0 is never.
        self._steps = steps
        self._payload_bytes = payload_bytes

    def due(self, run: Run) -> bool:
        if run.writing is not None and not run.writing.done():
            return False  # the next one when this one is written
        # Just after an optimizer step there are no gradients to write: one is waited for a while.
        steps, payload_bytes = (
            most if run.stepped else most + most // PATIENCE
            for most in (self._steps, self._payload_bytes)
        )
        return 0 < steps <= run.steps_since or 0 < payload_bytes <= run.bytes_since

    async def write(self, run: Run) -> bool:
        """Everything up to the last finished step is kept in one place once this returns True."""
        written = await self.begin(run)
        return written is not None and await written

    async def begin(self, run: Run) -> asyncio.Future[bool] | None:
        """
        Take one of what the model is now; steps that come later run while it is written.

        The engine copies the model when the order reaches it, before any later step's. Whatever
        goes wrong, the model goes on: its log is complete without a snapshot.
        """
        try:
            return await self._begin(run)
        except (EngineLost, EngineRefused, BaseChanged, WorkFailed, Damaged) as lost:
            log.info("no snapshot of %s: %s", run.model.model_id, lost)
        except StorageTrouble as trouble:
            log.warning("no snapshot of %s: %s", run.model.model_id, trouble)
        except Exception:
            log.exception("no snapshot of %s", run.model.model_id)
        return None

    async def _begin(self, run: Run) -> asyncio.Future[bool] | None:
        await run.written()
        # Tried again after as much again, whatever becomes of it.
        run.steps_since = run.bytes_since = 0
        if run.line.stillborn is not None or run.line.running:
            return None
        async with contextlib.AsyncExitStack() as stack:
            # As any work: nobody is with an engine while a suspect is alone with it.
            visit = self._desk.companies[run.model.base_model].visit()
            await stack.enter_async_context(visit)
            incarnation = await self._revival.alive(run)
            await run.settled()
            if run.live_in != incarnation:  # a result could not be stored
                return None
            model_id = run.model.model_id
            place, folder = self._desk.store.snapshots.new_place(model_id)
            work = Work(task=Task.SNAPSHOT, model_id=model_id, folder=folder)
            # The engine has the order before anything that is asked for later.
            answer = await self._revival.send(run, work, incarnation)
            saving = self._save(run, answer, place, run.line.next_seq - 1, run.line.spoiled)
            written: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            run.writing = self._desk.spawn(_until_over(saving, written, stack.pop_all()))
        return written

    async def _save(
        self,
        run: Run,
        answer: asyncio.Future[Outcome],
        place: str,
        seq_id: int,
        spoiled: str | None,
    ) -> bool:
        kept = self._desk.store.snapshots
        model_id = run.model.model_id
        try:
            outcome = await answer
            return await kept.save(
                model_id=model_id,
                seq_id=seq_id,
                place=place,
                size_bytes=json.loads(outcome.result)["size_bytes"],
                spoiled=spoiled,
            )
        except (EngineLost, EngineRefused) as lost:
            log.info("no snapshot of %s: %s", model_id, lost)
        except (WorkFailed, StorageTrouble) as failed:
            log.warning("no snapshot of %s: %s", model_id, failed)
        except Exception:
            # The model goes on: its log is complete without a snapshot.
            log.exception("no snapshot of %s", model_id)
        return False


async def _until_over(
    taking: Coroutine[Any, Any, bool],
    written: asyncio.Future[bool],
    visit: contextlib.AsyncExitStack,
) -> None:
    try:
        async with visit:
            written.set_result(await taking)
    finally:
        written.cancel()  # nothing, unless the server stops
