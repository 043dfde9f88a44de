"""Snapshots between two steps: a model's state in one place, so that its log can be cut."""

import json
import logging

from tinkex.server.dispatch.desk import Desk
from tinkex.server.dispatch.revival import Revival
from tinkex.server.dispatch.run import Run
from tinkex.server.executor import EngineLost, EngineRefused, Task, Work

log = logging.getLogger("tinkex.server.dispatch")


class Snapshots:
    """Written by whoever is in the driver's place of a model."""

    def __init__(self, desk: Desk, revival: Revival, *, steps: int, payload_bytes: int) -> None:
        self._desk = desk
        self._revival = revival
        #: After so many steps, or bytes of payloads, one is due; 0 is never.
        self._steps = steps
        self._payload_bytes = payload_bytes

    def due(self, run: Run) -> bool:
        return 0 < self._steps <= run.steps_since or 0 < self._payload_bytes <= run.bytes_since

    async def write(self, run: Run) -> bool:
        """Everything up to the last finished step is kept in one place from now on."""
        # Tried again after as much again, whatever becomes of it.
        run.steps_since = run.bytes_since = 0
        if run.line.stillborn is not None or run.line.running:
            return False
        kept = self._desk.store.snapshots
        model_id, seq_id = run.model.model_id, run.line.next_seq - 1
        place, folder = kept.new_place(model_id)
        try:
            # As any work: nobody is with an engine while a suspect is alone with it.
            async with self._desk.companies[run.model.base_model].visit():
                incarnation = await self._revival.alive(run)
                await run.settled()
                work = Work(task=Task.SNAPSHOT, model_id=model_id, folder=folder)
                outcome = await self._revival.work(run, work, incarnation)
            return await kept.save(
                model_id=model_id,
                seq_id=seq_id,
                place=place,
                size_bytes=json.loads(outcome.result)["size_bytes"],
                spoiled=run.line.spoiled,
            )
        except (EngineLost, EngineRefused) as lost:
            log.info("no snapshot of %s: %s", model_id, lost)
        except Exception:
            # The model goes on: its log is complete without a snapshot.
            log.exception("no snapshot of %s", model_id)
        return False
