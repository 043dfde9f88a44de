"""
What differs between SQLite and PostgreSQL.

PostgreSQL: durable commits, a lock so that one server uses a database, and NUL characters in text.
SQLite: its write-ahead log (WAL) and the identity of its files. Both: `IN` for lists of any length.
"""

import contextlib
import json
import logging
import os
import socket
import sqlite3
import struct
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from tinkex.server.retry import poll
from tinkex.server.store.storage_health import DatabaseFileChanged, DatabaseLocked

log = logging.getLogger("tinkex.server.store")

# Identifies tinkex among advisory locks; the second half of the lock is the schema.
LOCK = 0x74696E6B
# The same for the process that changes tables.
MIGRATION_LOCK = LOCK + 1
# A server that was just killed may hold the lock for a moment.
LOCK_WAIT_S = 5.0
LOCK_RETRY_S = 0.1

# For new connections and broken networks. A slow or paused database is handled by the callers.
_TIMEOUTS = {
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}

# The application name of a process that holds a database; PostgreSQL truncates it to 63 bytes.
_NAME = "tinkex {role}, process {process} on {host}"

_SETTINGS = (
    # A crash must not lose commits, whatever the default of the database is.
    """
    SELECT set_config('synchronous_commit', 'on', false)
    WHERE current_setting('synchronous_commit') = 'off'
    """,
    # The lock of a machine that disappeared is released within half a minute, not two hours.
    "SET tcp_keepalives_idle = 10",
    "SET tcp_keepalives_interval = 5",
    "SET tcp_keepalives_count = 3",
)
_TAKE = f"SELECT pg_try_advisory_lock({LOCK}, hashtext(current_schema()))"
_TAKE_SHARED = f"SELECT pg_try_advisory_lock_shared({LOCK}, hashtext(current_schema()))"
_HOLDER = f"""
    SELECT a.application_name FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
    WHERE l.locktype = 'advisory' AND l.classid = {LOCK} AND l.granted
    AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND l.objid = (hashtext(current_schema())::bigint & 4294967295)::oid
    """


def timeouts(url: sa.URL) -> dict[str, int]:
    """Connection timeouts, except those that the URL sets."""
    return {name: value for name, value in _TIMEOUTS.items() if name not in url.query}


def prepare_writer(engine: sa.Engine, *, exclusive: bool, role: str = "") -> None:
    """
    Makes commits durable; with `exclusive`, each writing connection holds the database's lock.

    The lock belongs to the writing connection, so a server that loses the connection also loses
    the lock, and cannot write any more. So two servers never write to one database, even if the
    network fails. Web and worker processes, which have a `role`, share the lock: they run together,
    but not beside a server that is alone, nor beside a repair.
    """

    @event.listens_for(engine, "connect")
    def _connected(connection: Any, _record: object) -> None:
        try:
            with connection.cursor() as cursor:
                for statement in _SETTINGS:
                    cursor.execute(statement)
                if exclusive or role:
                    name = _NAME.format(
                        role=role or "serve", process=os.getpid(), host=socket.gethostname()
                    )
                    cursor.execute("SELECT set_config('application_name', %s, false)", (name,))
                    _take_lock(cursor, _TAKE if exclusive else _TAKE_SHARED)
            connection.commit()
        except BaseException:
            connection.close()
            raise


def lock_holder(connection: sa.Connection) -> str | None:
    """A process that has the lock of a PostgreSQL database, alone or with others."""
    found: str | None = connection.exec_driver_sql(_HOLDER).scalar()
    return found


def lock_migrations(connection: sa.Connection) -> None:
    """Wait until no other process changes the tables of this database; held by this transaction."""
    if connection.dialect.name == "sqlite":
        return  # the transaction began as the only one that writes
    connection.exec_driver_sql(
        f"SELECT pg_advisory_xact_lock({MIGRATION_LOCK}, hashtext(current_schema()))"
    )


# Unique violation, deadlock, serialization failure (https://postgresql.org/docs/current/errcodes-appendix.html).
_POSTGRES_RACES = frozenset({"23505", "40P01", "40001"})
_SQLITE_RACES = frozenset({"SQLITE_CONSTRAINT_UNIQUE", "SQLITE_CONSTRAINT_PRIMARYKEY"})


def met_another_writer(error: Exception) -> bool:
    """
    Whether a transaction may have failed because another process wrote at the same time.

    For example, both looked for a row, found none, and inserted it.
    """
    reason = getattr(error, "orig", None)
    return (
        getattr(reason, "sqlstate", None) in _POSTGRES_RACES
        or getattr(reason, "sqlite_errorname", None) in _SQLITE_RACES
    )


def replace_nul_characters(engine: sa.Engine) -> None:
    """
    Replaces NUL characters in text parameters, which PostgreSQL does not accept.

    Only clients send them: in a name they are replaced, and an id with one matches no row.
    """

    @event.listens_for(engine, "before_cursor_execute", retval=True)
    def _executing(
        _connection: object, _cursor: object, statement: str, parameters: Any, *_: object
    ) -> tuple[str, Any]:
        if isinstance(parameters, Mapping):
            return statement, _without_nul(parameters)
        return statement, [_without_nul(each) for each in parameters]


def _without_nul(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    if not any(_has_nul(value) for value in parameters.values()):
        return parameters
    return {name: _cleaned(value) for name, value in parameters.items()}


def _has_nul(value: object) -> bool:
    """Whether a text, or a text in a list, has a NUL character."""
    if isinstance(value, list):
        return any(_has_nul(one) for one in value)
    return isinstance(value, str) and "\0" in value


def _cleaned(value: object) -> object:
    if isinstance(value, list):
        return [_cleaned(one) for one in value]
    return value.replace("\0", "\ufffd") if isinstance(value, str) else value


def _take_lock(cursor: Any, statement: str) -> None:
    def take() -> bool:
        return bool(cursor.execute(statement).fetchone()[0])

    if not poll(take, every_s=LOCK_RETRY_S, timeout_s=LOCK_WAIT_S):
        row = cursor.execute(_HOLDER).fetchone()
        raise DatabaseLocked(
            f"another server ({row[0] if row else 'unknown'}) holds the database. Use that "
            "server, stop it, or choose another database with --db."
        )


# The start of SQLite's WAL index: page size, number of pages in the WAL, and a salt that is also in
# the WAL (https://sqlite.org/walformat.html).
_WAL_INDEX = struct.Struct("=14xHI12x8s")
_WAL_HEADER_BYTES = 32


def checkpoint_wal(engine: sa.Engine) -> None:
    """
    Move SQLite's WAL into the database file, so that a stopped server leaves one file.

    SQLite does this itself when the last connection closes, but a running backup may have one.
    """
    if engine.dialect.name != "sqlite":
        return
    try:
        with contextlib.closing(engine.raw_connection()) as connection:
            cursor = connection.cursor()
            cursor.execute("PRAGMA busy_timeout = 1000")
            cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except (sa.exc.DBAPIError, sqlite3.Error) as error:
        log.warning("the WAL could not be merged into the database file, so it remains: %s", error)


def is_wal_lost(file: Path) -> bool:
    """
    Whether commits of a SQLite database are lost with its WAL. Call it before opening the database.

    The last connection deletes the WAL once everything is in the database, and then the WAL index.
    So an index without a WAL is left by a server that was killed; so is an index that counts more
    pages than its WAL has.
    """
    wal, index = (file.with_name(f"{file.name}-{end}") for end in ("wal", "shm"))
    try:
        with index.open("rb") as opened:
            counted = opened.read(_WAL_INDEX.size)
    except OSError:
        return False
    if not file.exists() or not wal.exists():
        return file.exists()
    if len(counted) < _WAL_INDEX.size:
        return False
    page_bytes, pages, salt = _WAL_INDEX.unpack(counted)
    with wal.open("rb") as opened:
        head = opened.read(_WAL_HEADER_BYTES)
    size = wal.stat().st_size
    if not head:
        return bool(pages)
    counted_bytes = _WAL_HEADER_BYTES + pages * (page_bytes + 24)
    return bool(head[16:24] == salt and size < counted_bytes)


class SameFile:
    """
    Detects that a SQLite database or its WAL was deleted or replaced, by device and inode.

    A deleted file stays open: writes to it succeed and are lost when the process ends.
    """

    def __init__(self, database: Path) -> None:
        self._files = (database, database.with_name(f"{database.name}-wal"))
        self._opened: dict[Path, tuple[int, int]] = {}

    def check(self) -> None:
        """Raise DatabaseFileChanged if a file is missing or replaced since the first call."""
        for file in self._files:
            try:
                stats = file.stat()
            except (FileNotFoundError, NotADirectoryError):
                if file in self._opened:
                    raise DatabaseFileChanged(f"{file} does not exist any more") from None
                continue
            found = (stats.st_dev, stats.st_ino)
            if self._opened.setdefault(file, found) != found:
                raise DatabaseFileChanged(f"{file} is not the file that was opened")


def in_list(
    column: sa.ColumnElement[str], texts: Collection[str] | sa.BindParameter[str]
) -> sa.ColumnElement[bool]:
    """
    `column IN (...)` for a list of any length, with one parameter.

    `texts` is the list, or a parameter that gets its value from `list_parameter`. One parameter per
    element would make a new statement for each length, and fill the cache of prepared statements.
    """
    given = (
        texts if isinstance(texts, sa.BindParameter) else sa.literal(list_parameter(texts), sa.Text)
    )
    return column.bool_op("IN")(_JsonRows(given))


def list_parameter(texts: Collection[str]) -> str:
    """The value of a parameter for `in_list`."""
    return json.dumps(list(texts))


class _JsonRows(FunctionElement[str]):
    """The elements of a JSON list, each as a row."""

    type = sa.Text()
    inherit_cache = True


@compiles(_JsonRows, "sqlite")
def _in_sqlite(element: _JsonRows, compiler: SQLCompiler, **how: Any) -> str:
    return f"(SELECT value FROM json_each({compiler.process(element.clauses, **how)}))"


@compiles(_JsonRows, "postgresql")
def _in_postgres(element: _JsonRows, compiler: SQLCompiler, **how: Any) -> str:
    given = compiler.process(element.clauses, **how)
    return f"(SELECT jsonb_array_elements_text(CAST({given} AS jsonb)))"
