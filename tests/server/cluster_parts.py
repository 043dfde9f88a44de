"""Web and worker parts of a cluster in one process, on a real database, with given executors."""

import functools
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from server.hosting import Api, listening
from tinkex.server.app import create_app
from tinkex.server.cluster.known_workers import KnownWorkers
from tinkex.server.cluster.web import web_parts
from tinkex.server.cluster.worker import Worker
from tinkex.server.executor import Executor
from tinkex.server.settings import Settings
from tinkex.server.store import open_store
from tinkex.server.store.notifier import Notifier
from tinkex.server.worker_process import running_worker

_numbers = itertools.count()


def settings_of(db: str, folder: Path, **changed: Any) -> Settings:
    """The settings of one process; it has a data folder of its own."""
    chosen = {
        "takeover_s": 2.0,
        "long_poll_s": 2.0,
        "activity_s": 0.0,
        "storage": str(folder / "storage"),
        **changed,
    }
    return Settings(db=db, data=str(folder / f"process-{next(_numbers)}"), **chosen)


@asynccontextmanager
async def a_web(db: str, folder: Path, **changed: Any) -> AsyncIterator[Api]:
    """A web process of a cluster, as far as its parts go."""
    settings = settings_of(db, folder, **changed)
    store = open_store(
        db_url=settings.db_url, storage_url=settings.storage_url, folder=settings.folder, role="web"
    )
    try:
        workers = KnownWorkers(store, takeover_s=settings.takeover_s)
        name = f"web {next(_numbers)}"
        parts = functools.partial(web_parts, settings, workers, store, name=name)
        async with listening(create_app(settings, workers, store, parts=parts), settings) as api:
            yield api
    finally:
        store.close()


@asynccontextmanager
async def a_worker(
    db: str, folder: Path, name: str, executor: Executor, **changed: Any
) -> AsyncIterator[Worker]:
    """A worker with this executor."""
    settings = settings_of(db, folder, **changed)
    store = open_store(
        db_url=settings.db_url,
        storage_url=settings.storage_url,
        folder=settings.folder,
        role="worker",
        writer=name,
    )
    try:
        async with running_worker(settings, name, executor, store) as worker:
            yield worker
    finally:
        store.close()


class Forgetful:
    """While it is in force, every second notification is lost: when it is sent, and when it is heard."""

    def __init__(self) -> None:
        self._send, self._heard = Notifier.send, Notifier._heard
        self._count = itertools.count()

    def __enter__(self) -> None:
        Notifier.send = self._dropping(self._send)  # type: ignore[method-assign]
        Notifier._heard = self._dropping(self._heard)  # type: ignore[method-assign]

    def __exit__(self, *_error: object) -> None:
        Notifier.send, Notifier._heard = self._send, self._heard  # type: ignore[method-assign]

    def _dropping(self, method: Callable[..., None]) -> Callable[..., None]:
        def maybe(*given: Any) -> None:
            if next(self._count) % 2:
                method(*given)

        return maybe
