"""
A worker: the scheduler and the engine of one replica of one base model, without HTTP.

It shares a PostgreSQL database and a storage with web processes (`tinkex web`) and other workers. It
has no supervisor: whoever started it (systemd, Kubernetes, Ray) starts it again.
"""

import asyncio
import functools
import hashlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from tinkex.models.cache import line_progress
from tinkex.models.resolve import ModelSource, resolve
from tinkex.server import process_setup
from tinkex.server.cluster.known_workers import LOOK_S
from tinkex.server.cluster.worker import PublishedResults, Worker
from tinkex.server.cluster.worker_scheduler import WorkerScheduler
from tinkex.server.engine_process import LocalExecutor
from tinkex.server.executor import EngineRefused, Executor
from tinkex.server.folder_lock import lock_folder
from tinkex.server.local_models import served_model
from tinkex.server.maintenance.cleanup import Cleanup
from tinkex.server.process_end import REPLACED_STATUS
from tinkex.server.retry import poll_async
from tinkex.server.scheduling import scheduling
from tinkex.server.settings import Settings, SettingsError
from tinkex.server.store import DatabaseRefused, Store, open_store
from tinkex.server.supervisor import StartFailed
from tinkex.server.web_process import engine_settings

log = logging.getLogger("tinkex.server.worker_process")

#: How often a thread that may be told to stop is asked.
STOP_POLL_S = 0.1


def worker_name(settings: Settings) -> str:
    """The name of a worker: the given one, or one that the same folder on the same machine keeps."""
    folder = hashlib.sha256(str(settings.folder).encode()).hexdigest()[:8]
    return settings.name or f"{socket.gethostname()}-{folder}"


def writer_name(name: str) -> str:
    """The name of a process in `usage.writer`, which is shorter than names may be."""
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def run_worker(
    settings: Settings,
    *,
    stop: threading.Event | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> int:
    """
    Work until SIGTERM, SIGINT or `stop`, then hand everything over to other workers.

    Returns 0, or REPLACED_STATUS if another process has taken the name. `on_ready` is called with the
    name of the worker once its engine is up. Outside the main thread only `stop` ends it.
    """
    settings.check_shared("tinkex worker")
    if len(settings.models) != 1:
        raise SettingsError(
            f"a worker serves one base model, and {len(settings.models)} were given.",
            hint="Start a worker for each: `tinkex worker NAME --db ... --storage ...`.",
        )
    name = worker_name(settings)
    log.info("starting the worker %s of tinkex %s", name, version("tinkex"))
    with lock_folder(settings.folder):
        source = resolve(settings.models[0], progress=line_progress(sys.stderr))
        try:
            store = open_store(
                db_url=settings.db_url,
                storage_url=settings.storage_url,
                folder=settings.folder,
                role="worker",
                writer=writer_name(name),
            )
        except DatabaseRefused as refused:
            raise StartFailed(str(refused)) from refused
        try:
            return asyncio.run(_work(settings, name, source, store, stop, on_ready))
        except EngineRefused as refused:
            raise StartFailed(str(refused), hint=refused.hint or None) from refused
        finally:
            store.close()


async def _work(
    settings: Settings,
    name: str,
    source: ModelSource,
    store: Store,
    stop: threading.Event | None,
    on_ready: Callable[[str], None] | None,
) -> int:
    stopping = asyncio.Event()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    replicas = settings.replicas_of_each(1)
    model = replace(served_model(source), replicas=replicas)
    executor = LocalExecutor(
        [model],
        [
            engine_settings(settings, model, shares_device=False, replica=number, number=number)
            for number in range(replicas)
        ],
        idle_s=0.0,
    )
    try:
        if not await _before_stop(stopping, stop, executor.start()):
            return 0
        async with (
            running_worker(settings, name, executor, store) as worker,
            process_setup.tuned_gc(),
        ):
            # Web processes read the rows of workers at this interval: now they know this one.
            await asyncio.sleep(1.5 * LOOK_S)
            log.info("the worker %s of %s is ready", name, model.name)
            if on_ready is not None:
                on_ready(name)
            if await _before_stop(stopping, stop, worker.replaced.wait()):
                # A worker that was silent for a day was forgotten; it may start again.
                names = {row.name for row in await store.workers.all()}
                return REPLACED_STATUS if name in names else 1
            log.info("draining: models go to other workers; what still waits follows")
            await worker.drain(settings.drain_s)
            return 0
    finally:
        await executor.close()


@asynccontextmanager
async def running_worker(
    settings: Settings, name: str, executor: Executor, store: Store
) -> AsyncIterator[Worker]:
    """A worker with its scheduler, from start to end. Its executor has one base model."""
    results = PublishedResults(store)
    async with scheduling(
        functools.partial(WorkerScheduler.of, ownership=store.ownership(name)),
        settings,
        executor,
        store,
        results,
        # Whoever started the last process does not say how it ended.
        last_status=-signal.SIGKILL,
    ) as scheduler:
        worker = Worker(
            name,
            executor.served[0],
            store=store,
            executor=executor,
            scheduler=scheduler,
            results=results,
            db_url=settings.db_url,
            takeover_s=settings.takeover_s,
        )
        cleanup = Cleanup(
            settings=settings,
            store=store,
            scheduler=worker,
            futures=results,
            homes=worker.homes,
            base_model=executor.served[0].name,
            is_first=lambda: worker.is_first,
        )
        try:
            await worker.start()
            await scheduler.start()
            cleanup.start()
            yield worker
        finally:
            await cleanup.close()
            await scheduler.close()
            await worker.close()


async def _before_stop(
    stopping: asyncio.Event, stop: threading.Event | None, work: Coroutine[Any, Any, object]
) -> bool:
    """Whether `work` was done before the process was told to stop; raises what it raises."""
    told = asyncio.ensure_future(_told(stopping, stop))
    working = asyncio.ensure_future(work)
    try:
        await asyncio.wait({working, told}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        return working.done()
    finally:
        working.cancel()
        told.cancel()
        await asyncio.gather(working, told, return_exceptions=True)


async def _told(stopping: asyncio.Event, stop: threading.Event | None) -> None:
    if stop is None:
        await stopping.wait()
        return
    await poll_async(lambda: stopping.is_set() or stop.is_set(), every_s=STOP_POLL_S)


def set_up_process(settings: Settings) -> None:
    """What the process of `tinkex worker` sets for itself; a caller of `run_worker` has its own."""
    process_setup.use_single_arena()
    # This process and its engines write training data: no other user may read it.
    os.umask(0o077)
    process_setup.setup_logging()
    process_setup.set_log_level(settings.log_level)
