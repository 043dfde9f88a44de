"""A cluster of two web processes and two workers, all in the process of the test."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from postgres import Postgres
from server.cluster_parts import a_web, a_worker
from server.echo import EchoExecutor
from server.hosting import Api
from tinkex.server.cluster.worker import Worker


@dataclass
class Parts:
    """The parts of a cluster; `names` are those of its workers."""

    db: str
    folder: Path
    webs: list[Api]
    workers: dict[str, Worker] = field(default_factory=dict)
    executors: dict[str, EchoExecutor] = field(default_factory=dict)

    def having(self, model_id: str) -> str:
        """The worker that has a model in memory."""
        (name,) = [name for name, one in self.executors.items() if model_id in one.models]
        return name


@pytest.fixture
def db(postgres: Postgres) -> str:
    return postgres.database()


@pytest.fixture
async def parts(db: str, tmp_path: Path) -> AsyncIterator[Parts]:
    async with contextlib.AsyncExitStack() as stack:
        found = Parts(db, tmp_path, [])
        for name in ("one", "two"):
            executor = found.executors[name] = EchoExecutor()
            worker = a_worker(db, tmp_path, name, executor, gap_s=30.0)
            found.workers[name] = await stack.enter_async_context(worker)
        for _ in range(2):
            found.webs.append(await stack.enter_async_context(a_web(db, tmp_path)))
        yield found
