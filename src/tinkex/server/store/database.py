"""Connections: one that writes, a few that read, and the migrations that run at opening."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from sqlalchemy import event

from tinkex.server.store import tally
from tinkex.server.store.writer import Writer

T = TypeVar("T")

# Reads are short; more threads than this only take turns at the same two cores.
READERS = 4


class Database:
    """The writer and the readers of one database. Closing is safe to repeat."""

    def __init__(self, url: str) -> None:
        self._writing = _engine(url, begin="BEGIN IMMEDIATE", pool_size=1)
        self._reading = _engine(url, begin="BEGIN", pool_size=READERS)
        migrate(self._writing)
        self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="tinkex-reader")
        self.writer = Writer(self._writing, last=tally.write, undone=tally.forget)

    async def write(self, act: Callable[[sa.Connection], T]) -> T:
        """Run `act` in a transaction; answers once that is on disk."""
        return await self.writer.submit(act)

    def submit(self, act: Callable[[sa.Connection], T]) -> asyncio.Future[T]:
        """The same, with its place among the writes taken at the call."""
        return self.writer.submit(act)

    def write_later(self, act: Callable[[sa.Connection], object]) -> None:
        """Run `act` with some later transaction; lost if the process dies before."""
        self.writer.later(act)

    async def read(self, act: Callable[[sa.Connection], T]) -> T:
        """Run `act` beside the writer, on what is committed."""
        return await self.in_thread(lambda: self._read(act))

    async def in_thread(self, act: Callable[[], T]) -> T:
        """Run blocking file work off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, act)

    def close(self) -> None:
        self.writer.close()
        self._threads.shutdown()
        self._reading.dispose()
        self._writing.dispose()

    def _read(self, act: Callable[[sa.Connection], T]) -> T:
        with self._reading.connect() as connection:
            return act(connection)


def migrate(engine: sa.Engine) -> None:
    """Bring the schema to the newest version; nothing happens when it is there."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    logging.getLogger("alembic").setLevel(logging.WARNING)
    with engine.connect() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def _engine(url: str, *, begin: str, pool_size: int) -> sa.Engine:
    engine = sa.create_engine(url, pool_size=pool_size, max_overflow=0)
    if engine.dialect.name == "sqlite":
        _prepare_sqlite(engine, begin)
    return engine


def _prepare_sqlite(engine: sa.Engine, begin: str) -> None:
    """The pragmas behind the promises; elsewhere they are the database's defaults."""

    @event.listens_for(engine, "connect")
    def _connected(connection: Any, _record: object) -> None:
        # The driver's own idea of when a transaction begins is switched off: we say it.
        connection.isolation_level = None
        cursor = connection.cursor()
        # Before anything is written: deleted rows give their room back, a piece at a time.
        cursor.execute("PRAGMA auto_vacuum = INCREMENTAL")
        cursor.execute("PRAGMA journal_mode = WAL")  # readers and the writer don't wait
        cursor.execute("PRAGMA synchronous = FULL")  # a commit is on disk, not on its way
        cursor.execute("PRAGMA journal_size_limit = 8388608")
        cursor.execute("PRAGMA foreign_keys = ON")
        cursor.execute("PRAGMA busy_timeout = 10000")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _begun(connection: sa.Connection) -> None:
        connection.exec_driver_sql(begin)
