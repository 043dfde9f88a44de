"""
Looks after the disk: new work is refused before it is full, and taken again when it can be written.

Results of work that was accepted need room too; that is what the reserve is for.
"""

import asyncio
import contextlib
import errno
import logging
import shutil
import time

from tinkex.server.settings import MEBIBYTE, Settings
from tinkex.server.store import Store
from tinkex.server.store.storage_health import FREE_SPACE

log = logging.getLogger("tinkex.server.maintenance.disk_monitor")

CHECK_EVERY_S = 1.0
# While things are added, the room is looked at more often: a flood fills much in a second.
FLOOD_LOOK_S = 0.05


def shortage(free_bytes: int, settings: Settings) -> OSError | None:
    """What is wrong with so much room; None when it is enough."""
    reserve = int(settings.reserve_mb * MEBIBYTE)
    if free_bytes >= reserve:
        return None
    return OSError(
        errno.ENOSPC,
        f"{free_bytes / MEBIBYTE:.0f} MiB are left, and {reserve / MEBIBYTE:.0f} MiB are kept for "
        "results; the setting is reserve_mb",
    )


class DiskMonitor:
    """The loop. Belongs to one event loop; `start` before, `close` after."""

    def __init__(self, settings: Settings, store: Store) -> None:
        self._settings = settings
        self._store = store
        self._running: asyncio.Task[None] | None = None
        self._looked_s = float("-inf")
        store.health.before_commit = self._look_if_due

    async def start(self) -> None:
        await asyncio.to_thread(self._check_all)
        self._running = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            try:
                await self.check()
            except Exception:
                log.exception("the disk could not be looked at; it is tried again")

    async def check(self) -> None:
        """How the disk is now."""
        # A network disk that hangs keeps this thread, and not the event loop.
        await asyncio.to_thread(self._check_all)
        problem = self._store.health.problem
        if problem is not None and problem.is_temporary:
            await self._store.probe()

    def _check_all(self) -> None:
        self._check_free_space()
        self._store.check_database_file()

    def _look_if_due(self) -> None:
        if time.monotonic() - self._looked_s >= FLOOD_LOOK_S:
            self._check_free_space()

    def _check_free_space(self) -> None:
        self._looked_s = time.monotonic()
        condition = self._store.health
        # A folder that cannot be asked is noticed by whoever writes to it.
        with contextlib.suppress(OSError):
            free = shutil.disk_usage(self._settings.folder).free
            if (short := shortage(free, self._settings)) is not None:
                condition.note(short, FREE_SPACE)
            else:
                condition.clear(FREE_SPACE)
