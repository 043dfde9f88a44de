"""Finds accepted requests that did not reach the scheduler."""

import logging
import time
from collections import Counter
from collections.abc import Callable

from tinkex.server.queued_request import Kind, QueuedRequest
from tinkex.server.scheduler.results import Execution
from tinkex.server.store import StorageError

log = logging.getLogger("tinkex.server.scheduler")

#: How often the number of waiting rows is compared with the claimed requests.
PICKUP_INTERVAL_S = 5.0
#: The same on a worker, to which requests come by notifications that may be lost.
WORKER_PICKUP_INTERVAL_S = 1.0
#: A worker reads its waiting rows at least this often: it may have claimed what another finished.
WORKER_LOOK_S = 15.0
#: Rows that one read returns. Small, so that it does not block other reads and the event loop.
PICKUP_BATCH = 200


class Pickup:
    """
    Finds accepted requests that this process does not have, until the server stops.

    At the start these are all requests that an earlier process left. Later they are requests that
    were committed and did not reach the scheduler, because a read failed or the connection ended.

    Requests of a base model that is not served wait: another server of this data folder may have
    accepted them, and a later one may serve their model.
    """

    def __init__(
        self,
        execution: Execution,
        submit: Callable[[QueuedRequest], None],
        is_served: Callable[[str], bool],
        *,
        home: str | None = None,
    ) -> None:
        """On a worker, `home` is its name: it runs what waits for it, and nothing else."""
        self._home = home
        self._looked_s = time.monotonic()
        self._execution = execution
        self._submit = submit
        self._is_served = is_served
        #: How many requests of each base model the last look left, because it is not served.
        self._unserved: Counter[str] = Counter()

    async def run(self) -> None:
        """Look once."""
        try:
            # One number from an index, while nothing is missing.
            waiting = await self._execution.store.requests.count_waiting(home=self._home)
            if any(self._is_served(base_model) for base_model in self._unserved):
                self._unserved.clear()  # it was added since
            missing = waiting > len(self._execution.claimed) + self._unserved.total()
            if missing or (self._home is not None and waiting and self._is_due()):
                await self.look()
        except StorageError as error:
            log.info("cannot read the waiting requests now; retrying: %s", error)

    def _is_due(self) -> bool:
        return time.monotonic() - self._looked_s >= WORKER_LOOK_S

    async def look(self) -> None:
        """Submit waiting requests: one batch of each owner in turn, those with the fewest first."""
        requests = self._execution.store.requests
        self._looked_s = time.monotonic()
        before, self._unserved = self._unserved, Counter()
        positions = dict.fromkeys(await requests.waiting_owners(home=self._home))
        while positions and not self._execution.closing:
            for owner, after in list(positions.items()):
                rows, last = await requests.waiting_of(
                    owner, after=after, limit=PICKUP_BATCH, home=self._home
                )
                for row in rows:
                    any_model = self._home is not None and row.kind is Kind.CREATE_CUSTOM_LOSS
                    if any_model or self._is_served(row.base_model):
                        self._submit(row)
                    else:
                        self._unserved[row.base_model] += 1
                if last is None:
                    del positions[owner]
                else:
                    positions[owner] = last
        for base_model, count in self._unserved.items():
            if before[base_model] != count:
                log.warning(
                    "%d requests wait for %s, which this server does not serve. They run when "
                    "another one on this database serves it.",
                    count,
                    base_model,
                )
