"""Faults in a cluster, one after the other in an order that the seed decides."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from cluster import Cluster
from object_store import ObjectStore
from postgres import Postgres
from processes import children
from qa.chaos.process_kills import Progress
from qa.cluster.workers import RayWorkers, Workers, running_workers, send, with_children

FAULTS = (
    *("web", "web stopped", "web restart", "worker", "worker stopped", "engine", "drain"),
    *("connections", "database", "database silent", "store silent", "store refuses"),
)
#: Also, if Ray places the workers.
NODE = "node"
#: Longer than the take-over time of the test cluster (3 s).
STOPPED_S = 6.0
#: Longer than the time that a request to the store may take.
STORE_AWAY_S = (20.0, 30.0)
#: A worker that was killed has another process after this time at the latest.
RETURN_S = 60.0


class Faults:
    """Does harm in a thread of its own until it has done enough."""

    def __init__(
        self,
        running: Cluster,
        workers: Workers,
        postgres: Postgres,
        store: ObjectStore,
        progress: Progress,
        *,
        model: Path,
        seed: int,
        count: int,
        operations: int,
        until_s: float,
        say: Callable[[str], None],
    ) -> None:
        """`count` faults over so many `operations`, not after `until_s` of the monotonic clock."""
        self._running, self._workers, self._model = running, workers, model
        self._postgres, self._object_store = postgres, store
        self._progress, self._say = progress, say
        self._draw, self._count = random.Random(seed), count
        self._operations, self._until_s = operations, until_s
        self.done: Counter[str] = Counter()
        self.stuck = False
        #: Why a fault could not be done, such as a process that did not stop or start as it should.
        self.failure = ""
        self._thread = threading.Thread(target=self._run, name="faults", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._do_all()
        except Exception as error:  # noqa: BLE001  the run fails with it
            self.failure = f"{type(error).__name__}: {error}"

    def _do_all(self) -> None:
        began = self._progress.answers
        for number, fault in enumerate(self._planned(), 1):
            # Evenly over all operations, but never two at the same moment.
            each = self._operations / self._count
            after = round(each * self._draw.uniform(0.5, 1.5))
            if not self._reach(self._progress.answers + after):
                return
            self._do(fault)
            self.done[fault] += 1
            self._say(f"  {number} faults ({fault}), {self._progress.answers} answers")
        self._reach(began + self._operations)

    def _reach(self, answers: int) -> bool:
        """Wait for so many answers; False if the time is over or nothing is answered any more."""
        while self._progress.answers < answers:
            if time.monotonic() > self._until_s:
                return False
            # In steps: the time may end in between.
            if not self._progress.reach(min(self._progress.answers + 5, answers)):
                self.stuck = True
                return False
        return True

    def _planned(self) -> Iterator[str]:
        """All kinds in turn, each time in another order."""
        kinds = [*FAULTS, *((NODE,) if isinstance(self._workers, RayWorkers) else ())]
        some: list[str] = []
        for _ in range(self._count):
            some = some or self._draw.sample(kinds, len(kinds))
            yield some.pop()

    def _do(self, fault: str) -> None:
        match fault:
            case "web":
                send(signal.SIGKILL, children(self._web()))
            case "web stopped":
                self._stopped([self._web()])
            case "web restart":
                self._running.restart(self._draw.choice(self._running.urls))
            case "worker":
                name, pid = self._worker()
                send(signal.SIGKILL, with_children([pid]))
                time.sleep(self._draw.choice([0.0, STOPPED_S]))
                self._workers.returned(name)
            case "worker stopped":
                self._stopped([self._worker()[1]])
            case "engine":
                send(signal.SIGKILL, children(self._worker()[1]))
            case "drain":
                self._workers.drain(self._worker()[0])
            case "connections":
                self._end_connections()
            case "database":
                self._postgres.stop()
                time.sleep(self._draw.uniform(0.0, STOPPED_S))
                self._postgres.start()
            case "database silent":
                with self._postgres.paused():
                    time.sleep(STOPPED_S)
            case "store silent":
                self._without_store(self._object_store.paused())
            case "store refuses":
                self._without_store(self._object_store.refusing())
            case _:
                assert isinstance(self._workers, RayWorkers)
                self._workers.lose_node()

    def _web(self) -> int:
        return self._running.named(self._draw.choice(self._running.urls)).process.pid

    def _worker(self) -> tuple[str, int]:
        """One of the workers; waits if none is running at this moment."""
        end_s = time.monotonic() + RETURN_S
        while not (found := running_workers(self._model)):
            assert time.monotonic() < end_s, "no worker came back"
            time.sleep(0.1)
        return self._draw.choice(sorted(found.items()))

    def _stopped(self, pids: list[int]) -> None:
        stopped = with_children(pids)
        send(signal.SIGSTOP, stopped)
        time.sleep(STOPPED_S)
        send(signal.SIGCONT, stopped)

    def _end_connections(self) -> None:
        with self._postgres.connect() as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = %s AND pid <> pg_backend_pid()",
                (self._running.db.rpartition("/")[2],),
            )

    def _without_store(self, outage: AbstractContextManager[None]) -> None:
        with outage:
            time.sleep(self._draw.uniform(*STORE_AWAY_S))
