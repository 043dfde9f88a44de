"""Connections: one that writes, a few that read, and the migrations that run at opening."""

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

from tinkex.server.store import group_commit, migrations, request_writes, sql_dialects
from tinkex.server.store.group_commit import BatchWrite, Writer
from tinkex.server.store.schema import api_keys
from tinkex.server.store.storage_health import (
    DATABASE_FILE,
    FAILING,
    FILES,
    FULL,
    READ_ONLY,
    StorageHealth,
    DatabaseFileChanged,
    DatabaseLocked,
    DatabaseRefused,
    StorageError,
    storage_problem,
)

log = logging.getLogger("tinkex.server.store")

T = TypeVar("T")

# With less on its disk, SQLite cannot even begin.
FULL_BYTES = 2**20
Item = TypeVar("Item")

# Threads, each kind in a pool of its own: no kind waits for another.
#
# Reads are short; more threads than this only take turns at the same two cores.
READERS = 4
# Every request waits for the look-up of its key.
KEY_READERS = 1
# Lists, searches, traces: reads that grow with what an owner has, and their answers.
REPORTERS = 2
# Payloads and results, one file each.
FILE_THREADS = 4
# Whole folders: hashes, copies, uploads and downloads of checkpoints, the sweep. Minutes, at worst.
FOLDER_THREADS = 4

# For each connection. SQLite's own 2,000 fill up over hours, and nothing is faster for it.
PAGE_CACHE_KIB = 256

# What is to be read for work that was accepted is asked for again this often.
READ_RETRY_S = 0.5

#: Whether what runs now is accepted work.
_accepted: ContextVar[bool] = ContextVar("accepted", default=False)

_ADVICE = "See that it runs and lets this machine in, or choose another with --db."
# At a start nothing goes on by itself.
_ADVICE_BY_KIND = {
    FULL: "Make room on its disk, and start again.",
    READ_ONLY: "See that it and its folder can be written by the server's user, and start again.",
    FAILING: "Look at the disk and the system's log, and start again.",
}
ALLOWED = "Use sqlite:///FILE or postgresql+psycopg://USER:PASSWORD@HOST/NAME."


def accepted_work() -> Context:
    """
    The context for a task that does accepted work, and for the tasks that it creates.

    There every read waits while the database cannot be read: what was accepted is done.
    """
    context = copy_context()
    context.run(_accepted.set, True)
    return context


class Database:
    """
    The writer and the readers of one database. Closing is safe to repeat.

    `alone` is for servers: it refuses a database that another one works on. SQLite is in a
    folder, and that is locked as a whole.
    """

    def __init__(self, url: str, *, exclusive: bool = False) -> None:
        self._writing, self._reading = _engines(url, exclusive=exclusive)
        self._alone = alone
        #: Whether the write that runs now may be refused its new rows.
        self._gated = False
        event.listen(self._writing, "before_cursor_execute", self._refuse_new_rows)
        #: Whether it can be written, and believed.
        self.health = StorageHealth()
        with _told(self._writing):
            if alone:
                _check_sound(self._writing)
            elif (
                problem := migrations.outdated(self._writing)
            ) is not None and not problem.is_empty:
                raise DatabaseRefused(
                    f"{problem}. A server that starts, or `tinkex doctor --repair`, brings it up "
                    "to date."
                )
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
            last=request_writes.write_token_counts,
            undone=request_writes.discard_token_counts,
            condition=self.health,
        )

    async def write(
        self, act: Callable[[sa.Connection], T], *, required: bool = False, reserve: bool = False
    ) -> T:
        """
        Run `act` in a transaction; answers once that is on disk.

        While the disk takes nothing this raises StorageError, or waits if it `must` be written.
        New rows are refused while the reserve of room is in use. Only what must be written, and
        what may use the `reserve` (it frees room, or belongs to accepted work), adds rows then.
        The refusal comes at the first INSERT, so an act that finds its earlier self answers it.
        """
        return await self.submit(act, required=required, reserve=reserve)

    def submit(
        self, act: Callable[[sa.Connection], T], *, required: bool = False, reserve: bool = False
    ) -> asyncio.Future[T]:
        """The same, with its place among the writes taken at the call."""
        return self.writer.submit(act if required or reserve else self._gate(act), required=required)

    def submit_batched(
        self, many: BatchWrite[Item, T], item: Item, *, required: bool = False
    ) -> asyncio.Future[T]:
        """The same for a write that shares its statements with others of its kind."""
        if not required:
            # One statement adds the rows of all: it cannot be refused for one of them.
            self.health.refuse_new_data()
        return self.writer.submit_batched(many, item, required=required)

    def write_deferred(
        self,
        act: Callable[[sa.Connection], object],
        *,
        about: Hashable = None,
        dropped: Callable[[], None] | None = None,
    ) -> None:
        """Run `act` with some later transaction; lost if the process dies before."""
        self.writer.defer(self._gate(act), about=about, dropped=dropped)

    def _gate(self, act: Callable[[sa.Connection], T]) -> Callable[[sa.Connection], T]:
        """The act, with its INSERTs refused while nothing new is taken in."""

        def gated(connection: sa.Connection) -> T:
            self._gated = True
            try:
                return act(connection)
            finally:
                self._gated = False

        return gated

    def _refuse_new_rows(
        self, _connection: object, _cursor: object, statement: str, *_rest: object
    ) -> None:
        if self._gated and statement.startswith("INSERT"):
            self.health.refuse_new_data()

    async def read(self, act: Callable[[sa.Connection], T]) -> T:
        """
        Run `act` beside the writer, on what is committed.

        While the database cannot be read this raises StorageError, or waits in `accepted_work`.
        """
        while True:
            try:
                return await self._answered(_run(self._readers, lambda: self._read(act)))
            except StorageError as error:
                if not _accepted.get() or not error.problem.is_temporary:
                    raise
            await asyncio.sleep(READ_RETRY_S)

    async def read_key(self, act: Callable[[sa.Connection], T]) -> T:
        """The same for a look-up that every request waits for: behind no other read."""
        return await self._answered(_run(self._key_readers, lambda: self._read(act)))

    async def read_report(self, act: Callable[[sa.Connection], T]) -> T:
        """The same for a read that grows with what an owner has: no other read is behind it."""
        return await self._answered(_run(self._reporters, lambda: self._read(act)))

    async def _answered(self, reading: asyncio.Future[T]) -> T:
        """
        What is read, unless the database has said nothing for too long.

        While it owes the writer an answer as well, there is less hope for this one.
        """
        began_s = time.monotonic()
        try:
            while not (await asyncio.wait((reading,), timeout=group_commit.RESPONSE_TIMEOUT_S))[0]:
                silent_s = time.monotonic() - began_s
                if silent_s >= group_commit.RECONNECT_S or self.health.problem is not None:
                    raise StorageError(group_commit.not_responding(self._writing, silent_s))
            return reading.result()
        finally:
            # Its thread goes on until it is answered; nobody listens.
            reading.cancel()

    def check_file(self) -> None:
        """Whether the file of a SQLite database is still the one that was opened."""
        if self._file is None:
            return
        try:
            self._file.check()
        except DatabaseFileChanged as gone:
            self.health.record(gone, DATABASE_FILE)
        else:
            self.health.clear(DATABASE_FILE)

    def read_sync(self, act: Callable[[sa.Connection], T]) -> T:
        """The same, once, in the thread of the caller."""
        return self._read(act)

    async def build_report(self, act: Callable[[], T]) -> T:
        """Build a large answer off the event loop, where such reads are made."""
        return await _run(self._reporters, act)

    async def with_file(self, act: Callable[[], T], *, required: bool = False) -> T:
        """
        Read or write one payload or result off the event loop.

        While an object store is away, or the disk is full or fails, this raises StorageError, or
        waits if it `must` be done.
        """
        return await self._on_files(self._file_threads, act, required=required)

    async def with_folder(self, act: Callable[[], T], *, required: bool = False) -> T:
        """The same for work on whole folders. It may take minutes."""
        return await self._on_files(self._folder_threads, act, required=required)

    async def _on_files(
        self, threads: ThreadPoolExecutor, act: Callable[[], T], *, required: bool
    ) -> T:
        while True:
            try:
                return await _run(threads, act)
            except OSError as error:
                if self.health.record(error, FILES) is None:
                    raise
                if not required:
                    raise self.health.as_storage_error(error) from error
            await asyncio.sleep(READ_RETRY_S)

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
        if self._alone:
            sql_dialects.empty_log(self._writing)
        self._writing.dispose()

    def _read(self, act: Callable[[sa.Connection], T]) -> T:
        self.health.check_readable()
        try:
            with self._reading.connect() as connection:
                return act(connection)
        except sa.exc.DBAPIError as error:
            if not error.connection_invalidated:
                if (problem := self.health.record(error)) is not None:
                    raise StorageError(problem) from error
                raise
        # The database was started again since this connection was made; the next is a new one.
        try:
            with self._reading.connect() as connection:
                return act(connection)
        except sa.exc.DBAPIError as error:
            if (problem := self.health.record(error)) is not None:
                raise StorageError(problem) from error
            raise


def _run(threads: ThreadPoolExecutor, act: Callable[[], T]) -> asyncio.Future[T]:
    return asyncio.get_running_loop().run_in_executor(threads, act)


@contextlib.contextmanager
def _told(engine: sa.Engine) -> Iterator[None]:
    """Whatever keeps a database from being opened, as DatabaseRefused."""
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
    """In which way a schema is not the newest, without changing it; None when it is."""
    with _looked_at(url) as engine:
        if engine is None:
            return migrations.Outdated(None, migrations.known_versions()[0])
        return migrations.outdated(engine)


def has_keys(url: str) -> bool:
    """Whether a database has keys; its schema is left as it is."""
    with _looked_at(url) as engine:
        if engine is None:
            return False
        with engine.connect() as connection:
            has_table: bool = sa.inspect(connection).has_table("api_keys")
            return has_table and any_key(connection)


def any_key(connection: sa.Connection) -> bool:
    """Whether there ever was a key: revoked ones stay."""
    return connection.execute(sa.select(api_keys.c.key_id).limit(1)).first() is not None


@contextlib.contextmanager
def _looked_at(url: str) -> Iterator[sa.Engine | None]:
    """A database to read from as it is; None when there is no file, which is not made."""
    writing, reading = _engines(url, alone=False)
    try:
        file = writing.url.database if writing.dialect.name == "sqlite" else None
        if file is not None and not Path(file).exists():
            yield None
            return
        if file is not None:
            _tell_of_lost_log(Path(file))
        with _told(reading):
            yield reading
    finally:
        writing.dispose()
        reading.dispose()


def _check_sound(engine: sa.Engine) -> None:
    """Refuse a SQLite file whose pages do not fit together: its answers may be wrong."""
    if engine.dialect.name != "sqlite":
        return
    if engine.url.database:
        _tell_of_lost_log(Path(engine.url.database))
    try:
        with engine.connect() as connection:
            found = connection.exec_driver_sql("PRAGMA quick_check(3)").scalars().all()
    except sa.exc.DatabaseError as error:
        if isinstance(error, sa.exc.OperationalError):
            raise
        found = [str(error.orig)]
    if found != ["ok"]:
        raise _damaged(engine, "; ".join(map(str, found)))


def _tell_of_lost_log(file: Path) -> None:
    if sql_dialects.log_is_lost(file):
        log.error(
            "%s-wal is gone or was cut short, and what was committed last was in it: clients will "
            "hear that their newest requests are not known. If you can put it back, stop this "
            "server first.",
            file,
        )


def _is_full(engine: sa.Engine) -> bool:
    """SQLite calls it an I/O error when there is no room for its index."""
    if engine.dialect.name != "sqlite" or not engine.url.database:
        return False
    try:
        return shutil.disk_usage(Path(engine.url.database).parent).free < FULL_BYTES
    except OSError:
        return False


def _damaged(engine: sa.Engine, reason: str) -> DatabaseRefused:
    return DatabaseRefused(
        f"the database {engine.url.database} is damaged: {reason}. Run "
        "`tinkex doctor --data DIR` to see what is left, and `tinkex restore` for a back-up."
    )


def _engines(url: str, *, exclusive: bool) -> tuple[sa.Engine, sa.Engine]:
    """The one that writes and the one that reads."""
    try:
        backend = sa.make_url(url).get_backend_name()
        if backend not in ("sqlite", "postgresql"):
            raise DatabaseRefused(f"--db is a database of {backend}. {ALLOWED}")
        # Errors are logged, and what was to be written belongs to somebody.
        shared: dict[str, Any] = {"hide_parameters": True, "max_overflow": 0}
        if backend == "postgresql":
            shared["connect_args"] = sql_dialects.patience(sa.make_url(url))
        writing = sa.create_engine(url, pool_size=1, **shared)
        reading = sa.create_engine(url, pool_size=READERS + KEY_READERS + REPORTERS, **shared)
    except ModuleNotFoundError as error:
        raise DatabaseRefused(
            f"the database needs {error.name}, which is not installed. "
            "Run `pip install 'tinkex[postgres]'`, or leave out --db for SQLite."
        ) from error
    except sa.exc.ArgumentError as error:
        raise DatabaseRefused(f"--db is no URL of a database. {ALLOWED}") from error
    if backend == "sqlite":
        _prepare_sqlite(writing, "BEGIN IMMEDIATE", writes=True)
        _prepare_sqlite(reading, "BEGIN", writes=False)
    else:
        sql_dialects.prepare_writer(writing, exclusive=exclusive)
        sql_dialects.prepare_texts(writing)
        sql_dialects.prepare_texts(reading)
        # All statements of one read see the same commits, as with SQLite.
        reading = reading.execution_options(
            isolation_level="REPEATABLE READ", postgresql_readonly=True
        )
    return writing, reading


def _prepare_sqlite(engine: sa.Engine, begin: str, *, writes: bool) -> None:
    """The pragmas behind the promises."""

    @event.listens_for(engine, "connect")
    def _connected(connection: Any, _record: object) -> None:
        # The driver's own idea of when a transaction begins is switched off: we say it.
        connection.isolation_level = None
        cursor = connection.cursor()
        # First of all: it is how long the others wait.
        cursor.execute("PRAGMA busy_timeout = 10000")
        if writes:
            # Before anything is written: deleted rows give their room back, a piece at a time.
            # This waits for whoever writes, so those who only read leave it alone.
            cursor.execute("PRAGMA auto_vacuum = INCREMENTAL")
        cursor.execute("PRAGMA journal_mode = WAL")  # readers and the writer don't wait
        cursor.execute("PRAGMA synchronous = FULL")  # a commit is on disk, not on its way
        cursor.execute("PRAGMA journal_size_limit = 8388608")
        cursor.execute("PRAGMA foreign_keys = ON")
        # Pages that each connection holds for itself; the system has them in memory anyway.
        cursor.execute(f"PRAGMA cache_size = -{PAGE_CACHE_KIB}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _begun(connection: sa.Connection) -> None:
        connection.exec_driver_sql(begin)
