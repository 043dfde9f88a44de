"""The scheduler of a process with engines, on one machine or in a cluster, and what it needs."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from tinkex.server.activity import ActivityLog
from tinkex.server.executor import Executor
from tinkex.server.maintenance.disk_monitor import DiskMonitor
from tinkex.server.scheduler.base_model_check import BaseModelChecks
from tinkex.server.scheduler.crash_files import CrashFiles
from tinkex.server.scheduler.result_waiters import Futures
from tinkex.server.scheduler.scheduler import Scheduler
from tinkex.server.settings import Settings
from tinkex.server.store import Store

S = TypeVar("S", bound=Scheduler)


@asynccontextmanager
async def scheduling(
    make: Callable[..., S],
    settings: Settings,
    executor: Executor,
    store: Store,
    results: Futures,
    *,
    last_status: int,
) -> AsyncIterator[S]:
    """
    A scheduler that the caller starts and closes: requests run in between.

    `make` is `of` of its class, with the arguments that only this class has.
    `last_status` is the exit status of the last process on this data folder.
    """
    base_checks = BaseModelChecks(
        store, executor.served, folder=settings.folder, accept=settings.accept_changed_base
    )
    crash_files = CrashFiles(settings.folder)
    scheduler = make(
        settings,
        store=store,
        executor=executor,
        futures=results,
        crash_files=crash_files,
        last_status=last_status,
        base_checks=base_checks,
    )
    disk_monitor = DiskMonitor(settings, store)
    activity = ActivityLog(executor, scheduler, every_s=settings.activity_s)
    try:
        base_checks.start()
        await disk_monitor.start()
        activity.start()
        yield scheduler
    finally:
        await activity.close()
        await disk_monitor.close()
        await base_checks.close()
        crash_files.close()
