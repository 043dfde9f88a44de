"""What runs in a web process of a cluster: routes, and nothing that another process cannot do too."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tinkex.server.api.deps import Context
from tinkex.server.app import Parts
from tinkex.server.cluster.known_workers import KnownWorkers
from tinkex.server.cluster.remote_results import RemoteFutures
from tinkex.server.cluster.remote_scheduler import RemoteScheduler
from tinkex.server.maintenance.cleanup import Cleanup
from tinkex.server.maintenance.disk_monitor import DiskMonitor
from tinkex.server.scheduler.session_status import SessionTimeouts
from tinkex.server.settings import Settings
from tinkex.server.store import Store


@asynccontextmanager
async def web_parts(
    settings: Settings, workers: KnownWorkers, store: Store, *, name: str
) -> AsyncIterator[Parts]:
    """The parts of one web process among others, from start to end."""
    results = RemoteFutures(store, retention_s=settings.result_kept_s)
    scheduler = RemoteScheduler(store, results, workers, db_url=settings.db_url, name=name)
    session_timeouts = SessionTimeouts(
        store, scheduler, grace_s=settings.session_grace_s, shared=True
    )
    context = Context(
        settings=settings,
        store=store,
        executor=workers,
        futures=results,
        scheduler=scheduler,
        session_timeouts=session_timeouts,
        shared=True,
    )

    async def changed(session_ids: list[str]) -> None:
        for session_id in session_ids:
            context.forget_session(session_id)
        await session_timeouts.changed(session_ids)

    scheduler.on_changed_sessions = changed
    disk_monitor = DiskMonitor(settings, store)
    # Workers delete what has expired. Local copies of files are those of this process.
    cleanup = Cleanup(
        settings=settings,
        store=store,
        scheduler=scheduler,
        futures=results,
        homes=lambda: (),
        is_first=lambda: False,
    )
    await disk_monitor.start()
    await workers.start()
    await session_timeouts.start()
    await scheduler.start()
    cleanup.start()
    try:
        yield Parts(context=context, cleanup=cleanup)
    finally:
        results.release()
        await cleanup.close()
        await disk_monitor.close()
        await session_timeouts.close()
        await scheduler.close()
        await workers.close()
