"""
Disk monitor: refuses new work while free space is below the reserve, and detects recovery.

Results of accepted requests need disk space too; the reserve is for them.
"""

import asyncio
import contextlib
import errno
import logging
import shutil

from tinkex.server.retry import PeriodicTask
from tinkex.server.settings import MEBIBYTE, Settings
from tinkex.server.store import Store
from tinkex.server.store.storage_health import FREE_SPACE

log = logging.getLogger("tinkex.server.maintenance.disk_monitor")

CHECK_EVERY_S = 1.0


def shortage(free_bytes: int, settings: Settings) -> OSError | None:
    """The error for too little free space; None if there is enough."""
    reserve = int(settings.reserve_mb * MEBIBYTE)
    if free_bytes >= reserve:
        return None
    return OSError(
        errno.ENOSPC,
        f"{free_bytes / MEBIBYTE:.0f} MiB are free, and {reserve / MEBIBYTE:.0f} MiB are reserved "
        "for results; the setting is reserve_mb",
    )


class DiskMonitor:
    """Checks the disk periodically. Belongs to one event loop; call `start` first, `close` last."""

    def __init__(self, settings: Settings, store: Store) -> None:
        self._settings = settings
        self._store = store
        self._task = PeriodicTask()
        store.health.monitor_space(self._check_free_space)

    async def start(self) -> None:
        await asyncio.to_thread(self._check_all)
        self._task.start(self.check, CHECK_EVERY_S, what="checking the disk", log=log)

    async def close(self) -> None:
        await self._task.close()

    async def check(self) -> None:
        """Check the disk once; during a temporary problem, test whether writing works again."""
        # In a thread: a network disk that hangs must not block the event loop.
        await asyncio.to_thread(self._check_all)
        problem = self._store.health.problem
        if problem is not None and problem.is_temporary:
            await self._store.probe()

    def _check_all(self) -> None:
        self._store.health.check_space()
        self._store.check_database_file()

    def _check_free_space(self) -> None:
        health = self._store.health
        # If the folder cannot be read, the next write to it reports the problem.
        with contextlib.suppress(OSError):
            free = shutil.disk_usage(self._settings.folder).free
            if (short := shortage(free, self._settings)) is not None:
                health.record(short, FREE_SPACE)
            else:
                health.clear(FREE_SPACE)
