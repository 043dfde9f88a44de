"""
The database: one connection that writes, a few that read, and the checks and upgrades at opening.

Writes go through the group-commit thread. Reads and file work run in thread pools, one for each kind
of work, so that no kind waits for another.
"""

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, ContextVar, copy_context
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import event

from tinkex.server.retry import Backoff, retry, retry_blocking
from tinkex.server.store import group_commit, migrations, request_rows, sql_dialects
from tinkex.server.store.group_commit import BatchWrite, Writer
from tinkex.server.store.schema import api_keys
from tinkex.server.store.storage_health import (
    DATABASE_FILE,
    FAILING,
    FILES,
    FULL,
    READ_ONLY,
    DatabaseFileChanged,
    DatabaseLocked,
    DatabaseRefused,
    StorageError,
    StorageHealth,
    storage_problem,
)

log = logging.getLogger("tinkex.server.store")

T = TypeVar("T")

# With less free space SQLite cannot even start.
FULL_BYTES = 2**20
Item = TypeVar("Item")

# Threads for short reads.
READERS = 4
# For API key lookups: every request waits for one.
KEY_READERS = 1
# For lists, searches and traces, whose size grows with an owner's data.
REPORTERS = 2
# For payloads and results, one file each.
FILE_THREADS = 4
# For whole folders: hashing, copying, uploading, downloading, deleting orphans. May take minutes.
FOLDER_THREADS = 4

# Per connection. SQLite's default of 2,000 KiB fills up over hours and makes nothing faster.
PAGE_CACHE_KIB = 256

# How often a read for accepted work is retried while the database is unavailable.
READ_RETRY_S = 0.5
_ONCE_MORE = Backoff.every(0.0, retries=1)

#: Whether the current task does accepted work.
_accepted: ContextVar[bool] = ContextVar("accepted", default=False)

_ADVICE = "Check that it runs and accepts this machine, or choose another with --db."
# A server that starts exits on these problems; a running server would retry. So the advice differs.
_ADVICE_BY_KIND = {
    FULL: "Free some space on its disk, and start again.",
    READ_ONLY: "Make it and its folder writable for the server's user, and start again.",
    FAILING: "Check the disk and the system log, and start again.",
}
ALLOWED = "Use sqlite:///FILE or postgresql+psycopg://USER:PASSWORD@HOST/NAME."


def accepted_work() -> Context:
    """
    The context for a task that does accepted work, and for the tasks it creates.

    In it, reads wait while the database is unavailable, because accepted work must be done.
    """
    context = copy_context()
    context.run(_accepted.set, True)
    return context


class Database:
    """
    The writer and the readers of one database. Closing is safe to repeat.

    Servers open it `exclusive`: a PostgreSQL database that another server uses is refused. For
    SQLite the data folder is locked (`folder_lock`).
    """

    def __init__(self, url: str, *, exclusive: bool = False) -> None:
        self._writing, self._reading = _engines(url, exclusive=exclusive)
        self._exclusive = exclusive
        #: Whether the current operation may not insert rows while new data is refused.
        self._refuses_inserts = False
        event.listen(self._writing, "before_cursor_execute", self._refuse_new_rows)
        self.health = StorageHealth()
        with _as_refusal(self._writing):
            if exclusive:
                _check_integrity(self._writing)
            found = migrations.outdated(self._writing)
            if found is not None and not (found.is_empty or exclusive):
                raise DatabaseRefused(
                    f"{found}. Starting a server, or `tinkex doctor --repair`, upgrades it."
                )
            if found is not None:
                migrations.migrate(self._writing)
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="tinkex-reader")
        self._key_readers = ThreadPoolExecutor(KEY_READERS, thread_name_prefix="tinkex-key-reader")
        self._reporters = ThreadPoolExecutor(REPORTERS, thread_name_prefix="tinkex-report")
        self._file_threads = ThreadPoolExecutor(FILE_THREADS, thread_name_prefix="tinkex-file")
        self._folder_threads = ThreadPoolExecutor(
            FOLDER_THREADS, thread_name_prefix="tinkex-folder"
        )
        file = self._writing.url.database
        self._file = (
            sql_dialects.SameFile(Path(file))
            if file and self._writing.dialect.name == "sqlite"
            else None
        )
        self.writer = Writer(
            self._writing,
            before_commit=request_rows.write_token_counts,
            after_rollback=request_rows.discard_token_counts,
            health=self.health,
        )

    def write(
        self,
        operation: Callable[[sa.Connection], T],
        *,
        required: bool = False,
        reserve: bool = False,
    ) -> asyncio.Future[T]:
        """
        Run `operation` in a transaction. The future gets its result once the transaction is on disk.

        The operation is queued by this call, not by the await. While the disk refuses writes, the
        future raises StorageError, or waits if the write is `required`.

        While free space is below the disk reserve, new rows are refused. Exceptions are `required`
        writes and writes with `reserve`, which free space or belong to accepted work. The refusal
        happens at the first INSERT, so an operation that only finds an existing row succeeds.
        """
        return self.writer.submit(
            operation if required or reserve else self._without_new_rows(operation),
            required=required,
        )

    def write_batched(
        self, many: BatchWrite[Item, T], item: Item, *, required: bool = False
    ) -> asyncio.Future[T]:
        """Like `write`, but writes of the same kind share their statements (`Writer`)."""
        if not required:
            # Checked before queueing: one INSERT has the rows of many callers, so refusing it would
            # refuse all of them.
            self.health.refuse_new_data()
        return self.writer.submit_batched(many, item, required=required)

    def write_deferred(
        self,
        operation: Callable[[sa.Connection], object],
        *,
        key: Hashable = None,
        on_dropped: Callable[[], None] | None = None,
    ) -> None:
        """Queue `operation` for a later transaction, without waiting for it; see `Writer.defer`."""
        self.writer.defer(self._without_new_rows(operation), key=key, on_dropped=on_dropped)

    def _without_new_rows(
        self, operation: Callable[[sa.Connection], T]
    ) -> Callable[[sa.Connection], T]:
        """Wrap `operation` so that its INSERTs fail while new data is refused."""

        def wrapped(connection: sa.Connection) -> T:
            self._refuses_inserts = True
            try:
                return operation(connection)
            finally:
                self._refuses_inserts = False

        return wrapped

    def _refuse_new_rows(
        self, _connection: object, _cursor: object, statement: str, *_rest: object
    ) -> None:
        if self._refuses_inserts and statement.startswith("INSERT"):
            self.health.refuse_new_data()

    async def read(self, operation: Callable[[sa.Connection], T]) -> T:
        """
        Run `operation` on committed data, concurrently with the writer.

        While the database is unavailable this raises StorageError, or waits in `accepted_work`.
        """
        return await retry(
            lambda: self._with_timeout(_run(self._readers, lambda: self._read(operation))),
            Backoff.every(READ_RETRY_S),
            should_retry=_waits_for_database,
        )

    async def read_key(self, operation: Callable[[sa.Connection], T]) -> T:
        """Like `read`, in a separate thread pool: every request waits for the lookup of its key."""
        return await self._with_timeout(_run(self._key_readers, lambda: self._read(operation)))

    async def read_report(self, operation: Callable[[sa.Connection], T]) -> T:
        """Like `read`, in a separate thread pool, for reads that grow with an owner's data."""
        return await self._with_timeout(_run(self._reporters, lambda: self._read(operation)))

    async def _with_timeout(self, reading: asyncio.Future[T]) -> T:
        """
        The result of a read, or StorageError if the database does not respond.

        The timeout is shorter if the database does not respond to the writer either.
        """
        began_s = time.monotonic()
        try:
            while not (await asyncio.wait((reading,), timeout=group_commit.RESPONSE_TIMEOUT_S))[0]:
                waited_s = time.monotonic() - began_s
                if waited_s >= group_commit.RECONNECT_S or self.health.problem is not None:
                    raise StorageError(group_commit.not_responding(self._writing, waited_s))
            return reading.result()
        finally:
            # The thread continues until the database responds; its result is dropped.
            reading.cancel()

    def check_file(self) -> None:
        """Record in `health` whether the SQLite file is still the one that was opened."""
        if self._file is None:
            return
        try:
            self._file.check()
        except DatabaseFileChanged as changed:
            self.health.record(changed, DATABASE_FILE)
        else:
            self.health.clear(DATABASE_FILE)

    def read_sync(self, operation: Callable[[sa.Connection], T]) -> T:
        """Like `read`, once, in the caller's thread."""
        return self._read(operation)

    async def build_report(self, function: Callable[[], T]) -> T:
        """Run `function`, which builds a large response, in the thread pool of `read_report`."""
        return await _run(self._reporters, function)

    async def with_file(self, function: Callable[[], T], *, required: bool = False) -> T:
        """
        Run `function`, which reads or writes one payload or result, in a thread.

        While storage has a problem this raises StorageError, or waits if the work is `required`.
        """
        return await self._on_files(self._file_threads, function, required=required)

    async def with_folder(self, function: Callable[[], T], *, required: bool = False) -> T:
        """Like `with_file`, for work on whole folders, which may take minutes."""
        return await self._on_files(self._folder_threads, function, required=required)

    async def _on_files(
        self, threads: ThreadPoolExecutor, function: Callable[[], T], *, required: bool
    ) -> T:
        def should_retry(error: Exception) -> bool:
            if not isinstance(error, OSError) or self.health.record(error, FILES) is None:
                return False
            if not required:
                raise self.health.as_storage_error(error) from error
            return True

        return await retry(
            lambda: _run(threads, function), Backoff.every(READ_RETRY_S), should_retry=should_retry
        )

    def close(self) -> None:
        self.writer.close()
        for threads in (
            self._readers,
            self._key_readers,
            self._reporters,
            self._file_threads,
            self._folder_threads,
        ):
            threads.shutdown()
        self._reading.dispose()
        if self._exclusive:
            sql_dialects.checkpoint_wal(self._writing)
        self._writing.dispose()

    def _read(self, operation: Callable[[sa.Connection], T]) -> T:
        self.health.check_readable()

        def attempt() -> T:
            with self._reading.connect() as connection:
                return operation(connection)

        try:
            # If the database was restarted, the next attempt gets a new connection.
            return retry_blocking(attempt, _ONCE_MORE, should_retry=_is_connection_lost)
        except sa.exc.DBAPIError as error:
            if (problem := self.health.record(error)) is not None:
                raise StorageError(problem) from error
            raise


def _waits_for_database(error: Exception) -> bool:
    return isinstance(error, StorageError) and _accepted.get() and error.problem.is_temporary


def _is_connection_lost(error: Exception) -> bool:
    return isinstance(error, sa.exc.DBAPIError) and error.connection_invalidated


def _run(threads: ThreadPoolExecutor, function: Callable[[], T]) -> asyncio.Future[T]:
    return asyncio.get_running_loop().run_in_executor(threads, function)


@contextlib.contextmanager
def _as_refusal(engine: sa.Engine) -> Iterator[None]:
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
    writing, reading = _engines(url, exclusive=False)
    try:
        file = writing.url.database if writing.dialect.name == "sqlite" else None
        if file is not None and not Path(file).exists():
            yield None
            return
        if file is not None:
            _warn_of_lost_wal(Path(file))
        with _as_refusal(reading):
            yield reading
    finally:
        writing.dispose()
        reading.dispose()


def _check_integrity(engine: sa.Engine) -> None:
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


def _engines(url: str, *, exclusive: bool) -> tuple[sa.Engine, sa.Engine]:
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
        reading = sa.create_engine(url, pool_size=READERS + KEY_READERS + REPORTERS, **shared)
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
        sql_dialects.prepare_writer(writing, exclusive=exclusive)
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
        cursor.execute("PRAGMA busy_timeout = 10000")
        if writes:
            # Must precede the first table. Lets `Retention.free_pages` shrink the file in steps.
            # It waits for a running writer, so read-only connections do not set it.
            cursor.execute("PRAGMA auto_vacuum = INCREMENTAL")
        cursor.execute(
            "PRAGMA journal_mode = WAL"
        )  # readers and the writer do not block each other
        cursor.execute("PRAGMA synchronous = FULL")  # a commit is on disk when it returns
        cursor.execute("PRAGMA journal_size_limit = 8388608")
        cursor.execute("PRAGMA foreign_keys = ON")
        # A cache per connection; the operating system caches the pages anyway.
        cursor.execute(f"PRAGMA cache_size = -{PAGE_CACHE_KIB}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _begun(connection: sa.Connection) -> None:
        connection.exec_driver_sql(begin)
