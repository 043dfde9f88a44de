"""PostgreSQL made to keep the promises that SQLite keeps: durable commits, one server, any text."""

import contextlib
import json
import logging
import os
import socket
import sqlite3
import struct
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement

from tinkex.server.store.storage_health import DatabaseFileChanged, DatabaseLocked

log = logging.getLogger("tinkex.server.store")

# Any number will do that no other program takes; the second half of the lock is the schema.
LOCK = 0x74696E6B
# A server that was killed just now may hold it for a moment.
LOCK_WAIT_S = 5.0
LOCK_RETRY_S = 0.1

# A database that says nothing is given up when a connection is made; so is one behind a network
# that is gone. One that is only slow, or paused, answers on the connections that there are.
_PATIENCE = {
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}

# What is said of a server that holds a database; PostgreSQL cuts it to 63 bytes.
_NAME = "tinkex serve, process {process} on {host}"

_SETTINGS = (
    # Databases that are told to forget the newest commits in a crash are told not to.
    """
    SELECT set_config('synchronous_commit', 'on', false)
    WHERE current_setting('synchronous_commit') = 'off'
    """,
    # A machine that vanished gives its lock back within half a minute, not two hours.
    "SET tcp_keepalives_idle = 10",
    "SET tcp_keepalives_interval = 5",
    "SET tcp_keepalives_count = 3",
)
_TAKE = f"SELECT pg_try_advisory_lock({LOCK}, hashtext(current_schema()))"
_HOLDER = f"""
    SELECT a.application_name FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
    WHERE l.locktype = 'advisory' AND l.classid = {LOCK} AND l.granted
    AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND l.objid = (hashtext(current_schema())::bigint & 4294967295)::oid
    """


def patience(url: sa.URL) -> dict[str, int]:
    """How long a database is waited for, as far as its URL does not say."""
    return {name: value for name, value in _PATIENCE.items() if name not in url.query}


def prepare_writer(engine: sa.Engine, *, exclusive: bool) -> None:
    """
    Commits are on disk; with `alone`, every connection that writes holds the database's lock.

    The lock belongs to the connection that writes, so a server that loses the one has lost the
    other: two servers never write to one database, whatever the network does between them.
    """

    @event.listens_for(engine, "connect")
    def _connected(connection: Any, _record: object) -> None:
        try:
            with connection.cursor() as cursor:
                for statement in _SETTINGS:
                    cursor.execute(statement)
                if alone:
                    name = _NAME.format(process=os.getpid(), host=socket.gethostname())
                    cursor.execute("SELECT set_config('application_name', %s, false)", (name,))
                    _take_lock(cursor)
            connection.commit()
        except BaseException:
            connection.close()
            raise


def prepare_texts(engine: sa.Engine) -> None:
    """
    No text has a NUL character, which PostgreSQL does not take.

    Nothing of ours has one. What a client puts into a name is stored without it, and an id with
    one in it is nobody's.
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
    """A text, or an array with one in it."""
    if isinstance(value, list):
        return any(_has_nul(one) for one in value)
    return isinstance(value, str) and "\0" in value


def _cleaned(value: object) -> object:
    if isinstance(value, list):
        return [_cleaned(one) for one in value]
    return value.replace("\0", "\ufffd") if isinstance(value, str) else value


def _take_lock(cursor: Any) -> None:
    deadline_s = time.monotonic() + LOCK_WAIT_S
    while not cursor.execute(_TAKE).fetchone()[0]:
        if time.monotonic() > deadline_s:
            row = cursor.execute(_HOLDER).fetchone()
            raise DatabaseLocked(
                f"another server ({row[0] if row else 'unknown'}) holds the database. Use that "
                "one, stop it, or choose another database with --db."
            )
        time.sleep(LOCK_RETRY_S)


# SQLite's index of its log begins with: the size of a page, how many pages the log has, and a number
# that is also in the log (https://sqlite.org/walformat.html).
_INDEX = struct.Struct("=14xHI12x8s")
_LOG_HEAD_BYTES = 32


def empty_log(engine: sa.Engine) -> None:
    """
    Move what is in SQLite's log into the database: a stopped server needs no second file.

    SQLite does it by itself when the last connection closes; a back-up may have one.
    """
    if engine.dialect.name != "sqlite":
        return
    try:
        with contextlib.closing(engine.raw_connection()) as connection:
            cursor = connection.cursor()
            cursor.execute("PRAGMA busy_timeout = 1000")
            cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except (sa.exc.DBAPIError, sqlite3.Error) as error:
        log.warning("the log of the database stays beside it: %s", error)


def log_is_lost(file: Path) -> bool:
    """
    Whether commits of a SQLite database are gone with its log, to be asked before it is opened.

    Its last user deletes the log once everything is in the database, and then the index of the log:
    an index without a log is that of a server that was ended in the midst of its work. So is an
    index that counts more pages than there are in the log of the same time.
    """
    log, index = (file.with_name(f"{file.name}-{end}") for end in ("wal", "shm"))
    try:
        with index.open("rb") as opened:
            counted = opened.read(_INDEX.size)
    except OSError:
        return False
    if not file.exists() or not log.exists():
        return file.exists()
    if len(counted) < _INDEX.size:
        return False
    page_bytes, pages, salt = _INDEX.unpack(counted)
    with log.open("rb") as opened:
        head = opened.read(_LOG_HEAD_BYTES)
    there = log.stat().st_size
    if not head:
        return bool(pages)
    counted_bytes = _LOG_HEAD_BYTES + pages * (page_bytes + 24)
    return bool(head[16:24] == salt and there < counted_bytes)


class SameFile:
    """The database and its write-ahead log, by device and inode."""

    def __init__(self, database: Path) -> None:
        self._files = (database, database.with_name(f"{database.name}-wal"))
        self._opened: dict[Path, tuple[int, int]] = {}

    def check(self) -> None:
        """Raises DatabaseFileChanged when one is not there, or is another. The first call takes note."""
        for file in self._files:
            try:
                stats = file.stat()
            except (FileNotFoundError, NotADirectoryError):
                if file in self._opened:
                    raise DatabaseFileChanged(f"{file} is not there any more") from None
                continue
            found = (stats.st_dev, stats.st_ino)
            if self._opened.setdefault(file, found) != found:
                raise DatabaseFileChanged(f"{file} is another file than the one that was opened")


# MERGED: `column IN (...)` for lists of any length, as one statement.


def in_list(
    column: sa.ColumnElement[str], texts: Collection[str] | sa.BindParameter[str]
) -> sa.ColumnElement[bool]:
    """
    Whether the column is one of these, or of what `listed` makes a parameter.

    With a parameter for each, every length would be a statement of its own. Connections keep the
    last hundred they have prepared: megabytes of the same question. And there may be too many.
    """
    given = texts if isinstance(texts, sa.BindParameter) else sa.literal(list_parameter(texts), sa.Text)
    return column.bool_op("IN")(_Rows(given))


def list_parameter(texts: Collection[str]) -> str:
    """For a parameter that `among` was given."""
    return json.dumps(list(texts))


class _Rows(FunctionElement[str]):
    """The texts of a list in JSON, each as a row."""

    type = sa.Text()
    inherit_cache = True


@compiles(_Rows, "sqlite")
def _in_sqlite(element: _Rows, compiler: SQLCompiler, **how: Any) -> str:
    return f"(SELECT value FROM json_each({compiler.process(element.clauses, **how)}))"


@compiles(_Rows, "postgresql")
def _in_postgres(element: _Rows, compiler: SQLCompiler, **how: Any) -> str:
    given = compiler.process(element.clauses, **how)
    return f"(SELECT jsonb_array_elements_text(CAST({given} AS jsonb)))"
