"""
Which engine runs what: the engines of each base model, and the models that move between replicas.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Iterator

from tinkex.server.executor import ServedModel
from tinkex.server.retry import run_periodically
from tinkex.server.scheduler.base_model_check import BaseModelChecks
from tinkex.server.scheduler.engine_client import LostAttempts
from tinkex.server.scheduler.engine_scheduler import EngineScheduler
from tinkex.server.scheduler.model_states import ModelState
from tinkex.server.scheduler.replicas import Replicas, choose_move
from tinkex.server.scheduler.results import Execution

log = logging.getLogger("tinkex.server.scheduler")

#: How often replicas that are down are looked for.
REPLICA_CHECK_S = 1.0
#: After a model could not be moved to another replica.
MOVE_RETRY_S = 60.0


class Placement:
    """The engines of one process, and what moves between them. Belongs to one event loop."""

    def __init__(
        self,
        execution: Execution,
        new_engine: Callable[..., EngineScheduler],
        base_checks: BaseModelChecks | None,
    ) -> None:
        self._execution = execution
        self._new_engine = new_engine
        self._base_checks = base_checks
        #: By base model.
        self._replicas: dict[str, Replicas] = {}
        #: Models that are moving to another replica or worker; each is done at the end of its move.
        self.moves: dict[str, asyncio.Future[None]] = {}
        #: When a model may move to another replica, after one was not moved.
        self._next_move_s = 0.0
        #: A draining worker has no use for an even share.
        self.draining = False
        for served in execution.executor.served:
            self.replicas(served.name)

    def start(self) -> None:
        """Look after replicas from now on, if a base model has several."""
        if any(len(replicas.engines) > 1 for replicas in self._replicas.values()):
            self._execution.spawn(
                run_periodically(
                    self._share_work,
                    REPLICA_CHECK_S,
                    what="sharing work between replicas",
                    log=log,
                )
            )

    def close(self) -> None:
        for replicas in self._replicas.values():
            for engine in replicas.engines:
                engine.client.close()

    def replicas(self, base_model: str) -> Replicas:
        """The engines of a base model; requests of a model that is not served fail there."""
        found = self._replicas.get(base_model)
        if found is None:
            found = self._replicas[base_model] = self._new_replicas(base_model)
        return found

    def _new_replicas(self, base_model: str) -> Replicas:
        executor = self._execution.executor
        served = next((one for one in executor.served if one.name == base_model), None)
        names = (base_model,) if served is None else served.engines
        lost = LostAttempts()
        engines = [
            self._new_engine(
                name,
                base_model=base_model,
                lost=lost,
                has_replicas=len(names) > 1,
                base_check=self._base_checks.get(base_model) if self._base_checks else None,
            )
            for name in names
        ]
        return Replicas(engines, lost)

    def add_model(self, model: ServedModel) -> None:
        """A running server serves one more model; requests of its earlier runs may come now."""
        replicas = self.replicas(model.name)
        if self._base_checks is not None:
            check = self._base_checks.add(model)
            for engine in replicas.engines:
                engine.set_base_check(check)

    @property
    def has_samples(self) -> bool:
        """Whether samples run, or wait for an engine."""
        return any(replicas.has_samples for replicas in self._replicas.values())

    def give_up_waiting_samples(self) -> None:
        """Samples that no engine has yet go to other workers."""
        for replicas in self._replicas.values():
            for engine in replicas.engines:
                engine.client.give_up_waiting_samples()

    async def _share_work(self) -> None:
        """Move the work of replicas that stay down to the others, and back when they return."""
        for replicas in self._replicas.values():
            for engine in replicas.lost_engines(time.monotonic()):
                # A moving model goes on moving: its copy needs only the log, and a rebuild on the
                # same engine would run the same steps again.
                states = [one for id_, one in engine.models.items() if id_ not in self.moves]
                if states:
                    log.warning(
                        "the engine of %s is down; its %d models move to other replicas",
                        engine.name,
                        len(states),
                    )
                for state in states:
                    replicas.for_training().take_over(state)
                    engine.recovery.forget(state)
                engine.client.give_up()
            is_free = not self.moves and not self.draining
            if is_free and time.monotonic() >= self._next_move_s:
                self._balance(replicas)

    def _balance(self, replicas: Replicas) -> None:
        """Move one model if one replica has more than its share, for example after a crash."""
        move = choose_move(replicas.loads()) if len(replicas.engines) > 1 else None
        if move is None:
            return
        origin, target = (replicas.engines[number] for number in move)
        movable = [state for state in origin.models.values() if state.is_movable]
        if movable:
            # Any of them: one that cannot be moved must not keep the others from it.
            self._execution.spawn(self._move_to_replica(random.choice(movable), target))

    async def _move_to_replica(self, state: ModelState, target: EngineScheduler) -> None:
        """In the background: engines that are lost meanwhile are noticed."""
        origin, moved = state.engine, False
        try:
            with self.moving(state):
                moved = await target.move_here(state)
        finally:
            if not moved:
                self._next_move_s = time.monotonic() + MOVE_RETRY_S
        if moved:
            log.info("%s moved from %s to %s", state.model.model_id, origin.name, target.name)

    @contextlib.contextmanager
    def moving(self, state: ModelState) -> Iterator[None]:
        """While it is in force, nothing else moves this model, and it is not forgotten."""
        over = self.moves[state.model.model_id] = asyncio.get_running_loop().create_future()
        try:
            yield
        finally:
            del self.moves[state.model.model_id]
            over.set_result(None)

    async def moves_over(self) -> None:
        """Wait until no model moves."""
        while self.moves:
            await asyncio.wait(self.moves.values())
