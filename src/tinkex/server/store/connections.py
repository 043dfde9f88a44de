"""
Connections to a database: the pools for writing and reading, and what is refused at opening.

Also here: what can be read of a database of any version, without upgrading it.
"""

import contextlib
import logging
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event

from tinkex.server.retry import Backoff, retry_blocking
from tinkex.server.store import migrations, sql_dialects
from tinkex.server.store.failover import watch_timeline
from tinkex.server.store.schema import api_keys
from tinkex.server.store.storage_health import (
    FAILING,
    FULL,
    READ_ONLY,
    DatabaseLocked,
    DatabaseRefused,
    storage_problem,
)

log = logging.getLogger("tinkex.server.store")

# With less free space SQLite cannot even start.
FULL_BYTES = 2**20

# Per connection. SQLite's default of 2,000 KiB fills up over hours and makes nothing faster.
PAGE_CACHE_KIB = 256

#: How long a statement waits for a lock of another connection.
BUSY_S = 10
_WAL_BACKOFF = Backoff(first_s=0.01, max_s=0.1, within_s=BUSY_S)

_ADVICE = "Check that it runs and accepts this machine, or choose another with --db."
# A server that starts exits on these problems; a running server would retry. So the advice differs.
_ADVICE_BY_KIND = {
    FULL: "Free some space on its disk, and start again.",
    READ_ONLY: "Make it and its folder writable for the server's user, and start again.",
    FAILING: "Check the disk and the system log, and start again.",
}
ALLOWED = "Use sqlite:///FILE or postgresql+psycopg://USER:PASSWORD@HOST/NAME."


@contextlib.contextmanager
def as_refusal(engine: sa.Engine) -> Iterator[None]:
    """Turns errors of opening a database into DatabaseRefused."""
    try:
        yield
    except DatabaseLocked as error:
        raise DatabaseRefused(str(error)) from None
    except sa.exc.OperationalError as error:
        reason = str(error.orig).strip().partition("\n")[0]
        problem = storage_problem(error)
        kind = FULL if _is_full(engine) else problem and problem.kind
        advice = _ADVICE_BY_KIND.get(kind or "", _ADVICE)
        raise DatabaseRefused(
            f"the database {engine.url!r} cannot be used: {reason}. {advice}"
        ) from error
    except sa.exc.DatabaseError as error:
        raise _damaged(engine, str(error.orig)) from error


def outdated(url: str) -> migrations.Outdated | None:
    """How a schema differs from the newest, without changing it; None if it does not."""
    with _opened_read_only(url) as engine:
        if engine is None:
            return migrations.Outdated(None, migrations.known_versions()[0])
        return migrations.outdated(engine)


def has_keys(url: str) -> bool:
    """Whether a database has API keys; does not upgrade its schema."""
    with _opened_read_only(url) as engine:
        if engine is None:
            return False
        with engine.connect() as connection:
            has_table: bool = sa.inspect(connection).has_table("api_keys")
            return has_table and any_key(connection)


def any_key(connection: sa.Connection) -> bool:
    """Whether a key was ever created: rows of revoked keys stay."""
    return connection.execute(sa.select(api_keys.c.key_id).limit(1)).first() is not None


@contextlib.contextmanager
def _opened_read_only(url: str) -> Iterator[sa.Engine | None]:
    """An engine to read a database of any version; None if there is no file (none is created)."""
    writing, reading = connection_pools(url, exclusive=False)
    try:
        file = writing.url.database if writing.dialect.name == "sqlite" else None
        if file is not None and not Path(file).exists():
            yield None
            return
        if file is not None:
            _warn_of_lost_wal(Path(file))
        with as_refusal(reading):
            yield reading
    finally:
        writing.dispose()
        reading.dispose()


def check_integrity(engine: sa.Engine) -> None:
    """Refuse a SQLite file whose pages are inconsistent: queries may return wrong results."""
    if engine.dialect.name != "sqlite":
        return
    if engine.url.database:
        _warn_of_lost_wal(Path(engine.url.database))
    try:
        with engine.connect() as connection:
            found = connection.exec_driver_sql("PRAGMA quick_check(3)").scalars().all()
    except sa.exc.DatabaseError as error:
        if isinstance(error, sa.exc.OperationalError):
            raise
        found = [str(error.orig)]
    if found != ["ok"]:
        raise _damaged(engine, "; ".join(map(str, found)))


def _warn_of_lost_wal(file: Path) -> None:
    if sql_dialects.is_wal_lost(file):
        log.error(
            "%s-wal is missing or truncated, and it contained the newest commits: clients will "
            "be told that their newest requests are unknown. To put it back, stop this server "
            "first.",
            file,
        )


def _is_full(engine: sa.Engine) -> bool:
    """On a full disk SQLite may report an I/O error instead, because it cannot write its index."""
    if engine.dialect.name != "sqlite" or not engine.url.database:
        return False
    try:
        return shutil.disk_usage(Path(engine.url.database).parent).free < FULL_BYTES
    except OSError:
        return False


def _damaged(engine: sa.Engine, reason: str) -> DatabaseRefused:
    return DatabaseRefused(
        f"the database {engine.url.database} is damaged: {reason}. Run "
        "`tinkex doctor --data DIR` to see what is left, and `tinkex restore` to restore a backup."
    )


def connection_pools(
    url: str, *, exclusive: bool, role: str = "", readers: int = 1
) -> tuple[sa.Engine, sa.Engine]:
    """The SQLAlchemy engine that writes, and the one that reads."""
    try:
        backend = sa.make_url(url).get_backend_name()
        if backend not in ("sqlite", "postgresql"):
            raise DatabaseRefused(
                f"--db names a {backend} database, which is not supported. {ALLOWED}"
            )
        # `hide_parameters`: errors are logged, and parameters are user data.
        shared: dict[str, Any] = {"hide_parameters": True, "max_overflow": 0}
        if backend == "postgresql":
            shared["connect_args"] = sql_dialects.timeouts(sa.make_url(url))
        writing = sa.create_engine(url, pool_size=1, **shared)
        reading = sa.create_engine(url, pool_size=readers, **shared)
    except ModuleNotFoundError as error:
        raise DatabaseRefused(
            f"the database needs {error.name}, which is not installed. "
            "Run `pip install 'tinkex[postgres]'`, or leave out --db for SQLite."
        ) from error
    except sa.exc.ArgumentError as error:
        raise DatabaseRefused(f"--db is not a database URL. {ALLOWED}") from error
    if backend == "sqlite":
        _prepare_sqlite(writing, "BEGIN IMMEDIATE", writes=True)
        _prepare_sqlite(reading, "BEGIN", writes=False)
    else:
        sql_dialects.prepare_writer(writing, exclusive=exclusive, role=role)
        if exclusive or role:
            watch_timeline(writing, reading)
        sql_dialects.replace_nul_characters(writing)
        sql_dialects.replace_nul_characters(reading)
        # All statements of one read see the same snapshot, as in SQLite.
        reading = reading.execution_options(
            isolation_level="REPEATABLE READ", postgresql_readonly=True
        )
    return writing, reading


def _prepare_sqlite(engine: sa.Engine, begin: str, *, writes: bool) -> None:
    """Sets the pragmas for durability and concurrency."""

    @event.listens_for(engine, "connect")
    def _connected(connection: Any, _record: object) -> None:
        # Turns off the driver's implicit transactions; `begin` below starts them.
        connection.isolation_level = None
        cursor = connection.cursor()
        # First, because the next pragmas may have to wait for a lock.
        cursor.execute(f"PRAGMA busy_timeout = {BUSY_S * 1000}")
        if writes:
            # Must precede the first table. Lets `Retention.free_pages` shrink the file in steps.
            # It waits for a running writer, so read-only connections do not set it.
            cursor.execute("PRAGMA auto_vacuum = INCREMENTAL")
        _use_wal(cursor)
        cursor.execute("PRAGMA synchronous = FULL")  # a commit is on disk when it returns
        cursor.execute("PRAGMA journal_size_limit = 8388608")
        cursor.execute("PRAGMA foreign_keys = ON")
        # A cache per connection; the operating system caches the pages anyway.
        cursor.execute(f"PRAGMA cache_size = -{PAGE_CACHE_KIB}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _begun(connection: sa.Connection) -> None:
        connection.exec_driver_sql(begin)


def _use_wal(cursor: sqlite3.Cursor) -> None:
    """
    Readers and the writer do not block each other.

    A new file, or a restored one, must be switched first. SQLite's time-out does not apply to that:
    while another process writes, or switches the same file, the statement fails at once.
    """
    retry_blocking(
        lambda: cursor.execute("PRAGMA journal_mode = WAL"), _WAL_BACKOFF, should_retry=_is_busy
    )


def _is_busy(error: Exception) -> bool:
    return (
        isinstance(error, sqlite3.OperationalError)
        and error.sqlite_errorcode == sqlite3.SQLITE_BUSY
    )
