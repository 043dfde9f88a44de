"""
The database: one connection that writes, and a few that read.

Writes go through the group-commit thread. Reads and file work run in thread pools, one for each kind
of work, so that no kind waits for another.
"""

import asyncio
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, ContextVar, copy_context
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import event

from tinkex.server.retry import Backoff, retry, retry_blocking
from tinkex.server.store import group_commit, migrations, request_rows, sql_dialects, step_rows
from tinkex.server.store.connections import as_refusal, check_integrity, connection_pools
from tinkex.server.store.group_commit import BatchWrite, Writer
from tinkex.server.store.schema import (
    Status,
    audit,
    checkpoint_names,
    models,
    requests,
    sessions,
)
from tinkex.server.store.storage_health import (
    DATABASE_FILE,
    FILES,
    DatabaseFileChanged,
    DatabaseRefused,
    StorageError,
    StorageHealth,
)

T = TypeVar("T")
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

# For accepted work while the database or the files are unavailable.
ACCEPTED_BACKOFF = Backoff.every(0.5)
_ONCE_MORE = Backoff.every(0.0, retries=1)

#: Whether the current task does accepted work.
_accepted: ContextVar[bool] = ContextVar("accepted", default=False)


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
    SQLite the data folder is locked (`server/folder_lock.py`).
    """

    def __init__(
        self,
        url: str,
        *,
        exclusive: bool = False,
        role: str = "",
        writer: str = "",
        prepare: Callable[[sa.Engine, sa.Engine], None] | None = None,
    ) -> None:
        """
        `role` is what a process of a cluster does. `writer` names this process among those that write
        to one database (`usage.writer`).

        `prepare` gets the engines that read and write once the tables are there.
        """
        if role:
            _upgrade_alone(url)
        self._writing, self._reading = connection_pools(
            url, exclusive=exclusive, role=role, readers=READERS + KEY_READERS + REPORTERS
        )
        self._exclusive = exclusive
        #: Whether the current operation may not insert rows while new data is refused.
        self._refuses_inserts = False
        event.listen(self._writing, "before_cursor_execute", self._refuse_new_rows)

        @event.listens_for(self._writing, "connect")
        def _connected(_connection: object, record: Any) -> None:
            record.info[request_rows.WRITER] = writer

        self.health = StorageHealth()
        with as_refusal(self._writing):
            if exclusive:
                check_integrity(self._writing)
            found = migrations.outdated(self._writing)
            if found is not None and not (found.is_empty or exclusive):
                advice = "Starting a server, or `tinkex doctor --repair`, upgrades it."
                if role:
                    advice = "Stop all web and worker processes; the first that starts upgrades it."
                raise DatabaseRefused(f"{found}. {advice}")
            if found is not None:
                migrations.migrate(self._writing)
            if prepare is not None:
                prepare(self._reading, self._writing)
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
            before_commit=_write_effects,
            after_rollback=_discard_effects,
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
        if not required and self.health.problems:
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

    def write_deferred_batched(self, many: BatchWrite[Item, Any], item: Item) -> None:
        """Like `write_deferred`, but writes of the same kind share their statements."""
        self.writer.defer_batched(many, item)

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
            ACCEPTED_BACKOFF,
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
            lambda: _run(threads, function), ACCEPTED_BACKOFF, should_retry=should_retry
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


def _upgrade_alone(url: str) -> None:
    """Upgrade an older schema if no process of another version uses the database."""
    writing, reading = connection_pools(url, exclusive=False)
    alone = None
    try:
        with as_refusal(writing):
            found = migrations.outdated(writing)
            if found is None or found.is_empty:
                return
            alone, other = connection_pools(url, exclusive=True)
            other.dispose()
            migrations.migrate(alone)
    finally:
        for engine in (writing, reading, alone):
            if engine is not None:
                engine.dispose()


def _write_effects(connection: sa.Connection) -> None:
    """What finished requests add beside their own rows: usage of their owner, steps of their run."""
    request_rows.write_token_counts(connection)
    step_rows.write_steps(connection)


def _discard_effects(connection: sa.Connection) -> None:
    request_rows.discard_token_counts(connection)
    step_rows.forget_steps(connection)


def _waits_for_database(error: Exception) -> bool:
    return isinstance(error, StorageError) and _accepted.get() and error.problem.is_temporary


def _is_connection_lost(error: Exception) -> bool:
    return isinstance(error, sa.exc.DBAPIError) and error.connection_invalidated


def _run(threads: ThreadPoolExecutor, function: Callable[[], T]) -> asyncio.Future[T]:
    return asyncio.get_running_loop().run_in_executor(threads, function)


# -- statements as functions of a connection, for `read`, `write` and the rest -------------------
#
# Rows become dataclasses, whose fields have the names of the columns:
#
#     await database.read(one(Model, sa.select(*columns(Model, models)).where(...)))


def columns(kind: type, table: sa.Table) -> tuple[sa.Column[Any], ...]:
    """The columns of a table that a dataclass has, in the order of its fields."""
    return tuple(table.c[field.name] for field in fields(kind))


def values(row: object) -> dict[str, Any]:
    """The fields of a dataclass by name, to insert it."""
    return {field.name: getattr(row, field.name) for field in fields(row)}  # type: ignore[arg-type]


def one(kind: type[T], statement: sa.Executable) -> Callable[[sa.Connection], T | None]:
    """The first row as a dataclass; None if there is none."""

    def operation(connection: sa.Connection) -> T | None:
        row = connection.execute(statement).first()
        return None if row is None else kind(**row._mapping)

    return operation


def every(kind: type[T], statement: sa.Executable) -> Callable[[sa.Connection], list[T]]:
    """All rows as dataclasses."""
    return lambda connection: [kind(**row._mapping) for row in connection.execute(statement)]


def scalar(statement: sa.Executable) -> Callable[[sa.Connection], Any]:
    """The first value; None if there is no row."""
    return lambda connection: connection.scalar(statement)


def scalars(statement: sa.Executable) -> Callable[[sa.Connection], list[Any]]:
    """The first value of each row."""
    return lambda connection: list(connection.scalars(statement))


def execute(
    statement: sa.Executable, given: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None
) -> Callable[[sa.Connection], sa.CursorResult[Any]]:
    """Executes a change, once for each mapping of values."""
    return lambda connection: connection.execute(statement, given)


# -- SQL that the queries and transactions of several tables share ---------------------------------

#: The values of `GET audit?event_type=`, by the first word of an event.
TOPICS = {
    "checkpoint": "checkpoints",
    "project": "projects",
    "session": "sessions",
    "key": "organizations",
}
_INSERT_AUDIT = audit.insert()


def note_audit(
    connection: sa.Connection, *, owner: str, event: str, details: Mapping[str, Any]
) -> None:
    """Add an entry inside a transaction. The details must not contain secrets."""
    connection.execute(
        _INSERT_AUDIT,
        {
            "owner": owner,
            "at_s": time.time(),
            "topic": TOPICS[event.partition(".")[0]],
            "event": event,
            "details": dict(details),
        },
    )


def name_is(model_id: str, kind: str, name: str | None) -> sa.ColumnElement[bool]:
    """SQL: the row of this name."""
    return sa.and_(
        checkpoint_names.c.model_id == model_id,
        checkpoint_names.c.kind == kind,
        checkpoint_names.c.name == name,
    )


def not_expired(now_s: float) -> sa.ColumnElement[bool]:
    """SQL: the name has not expired."""
    expires_s = checkpoint_names.c.expires_s
    return sa.or_(expires_s.is_(None), expires_s > now_s)


def has_published_checkpoint(now_s: float) -> sa.ColumnElement[bool]:
    """SQL: the model has a published checkpoint."""
    return sa.exists().where(
        checkpoint_names.c.model_id == models.c.model_id,
        checkpoint_names.c.public,
        not_expired(now_s),
    )


def was_created() -> sa.ColumnElement[bool]:
    """SQL: the model's creation did not fail. A failed one has a row for repeats, but is no run."""
    return sa.not_(
        sa.exists().where(
            requests.c.model_id == models.c.model_id,
            requests.c.seq_id == 0,
            requests.c.status == Status.FAILED,
        )
    )


def session_ended(abandoned_before_s: float) -> sa.ColumnElement[bool]:
    """SQL: the session was finished or abandoned."""
    return sa.or_(sessions.c.finished_s.is_not(None), sessions.c.seen_s < abandoned_before_s)
