"""
Storage health: classifies disk and database errors, and refuses new data during a problem.

    problem = storage_problem(error)      # None if the error has nothing to do with storage

`StorageHealth` holds the current problems of the whole store, for all threads.
"""

import errno
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import sqlalchemy as sa

log = logging.getLogger("tinkex.server.store")

#: Parts of the store that can have a problem of their own.
DATABASE = "database"
FILES = "files"
FREE_SPACE = "disk reserve"
#: Where `FILES` are, unless they are in a local folder.
OBJECT_STORE = "object store"
DATABASE_FILE = "database file"

# Kinds of problems. The values are part of `healthz` and of the metrics.
FULL = "full"
READ_ONLY = "read_only"
FAILING = "failing"
UNREACHABLE = "away"
GONE = "gone"
CORRUPT = "corrupt"
KINDS = (FULL, READ_ONLY, FAILING, UNREACHABLE, GONE, CORRUPT)

#: While data is written, free space is checked at most this often: a burst of requests can fill a
#: disk between two checks of the disk monitor.
SPACE_CHECK_S = 0.05

_ERRNOS = {
    errno.ENOSPC: FULL,
    errno.EDQUOT: FULL,
    # A limit on file size, such as `ulimit -f`, has the same effect as a full disk.
    errno.EFBIG: FULL,
    errno.EROFS: READ_ONLY,
    errno.EACCES: READ_ONLY,
    errno.EPERM: READ_ONLY,
    errno.EIO: FAILING,
}
# By the prefix of SQLite's error names.
_SQLITE = {
    "SQLITE_FULL": FULL,
    "SQLITE_READONLY": READ_ONLY,
    "SQLITE_CANTOPEN": READ_ONLY,
    "SQLITE_IOERR": FAILING,
    "SQLITE_CORRUPT": CORRUPT,
    "SQLITE_NOTADB": CORRUPT,
}
# By the prefix of PostgreSQL's SQLSTATE.
_POSTGRES = {
    "53100": FULL,
    "25006": READ_ONLY,
    "58030": FAILING,
    # Too many connections, shutting down or starting up, or connection lost.
    "53300": UNREACHABLE,
    "57P0": UNREACHABLE,
    "08": UNREACHABLE,
    "XX001": CORRUPT,
    "XX002": CORRUPT,
}

_NUMBER = re.compile(r"(?:Errno|os error) (\d{1,3})\b")

_WORDS = {
    FULL: "the disk of this server is full",
    READ_ONLY: "this server cannot write to its data folder or its database",
    FAILING: "the disk of this server reports errors",
    UNREACHABLE: "the {part} of this server cannot be reached",
    GONE: "the database of this server was deleted, moved or replaced while it runs",
    CORRUPT: "the database of this server is damaged",
}
_ADVICE = {
    FULL: "Free some space; the server then continues by itself.",
    READ_ONLY: "Make them writable for the server's user; the server then continues by itself.",
    FAILING: "Check the disk and the system log; the server continues by itself once it can.",
    UNREACHABLE: "Check that it runs and accepts this server; the server then continues by itself.",
    GONE: "If it was moved, move it back together with its -wal file; the server then continues by "
    "itself. If it is lost, stop the server and restore a backup with `tinkex restore`.",
    CORRUPT: "Stop the server, run `tinkex doctor`, and restore a backup if it says so.",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageProblem:
    """Why nothing can be stored at the moment."""

    kind: str
    #: The operating system's or database's own message.
    reason: str
    #: What cannot be reached, if `kind` is UNREACHABLE.
    part: str = DATABASE

    @property
    def is_temporary(self) -> bool:
        """Whether a retry can succeed."""
        return self.kind != CORRUPT

    @property
    def blocks_reads(self) -> bool:
        """Whether the database must not even be read, because queries may return wrong results."""
        return self.kind in (GONE, CORRUPT)

    @property
    def text(self) -> str:
        """The message for clients."""
        return f"{self.summary}. New requests are refused until this is fixed."

    @property
    def summary(self) -> str:
        return f"{_WORDS[self.kind].format(part=self.part)} ({self.reason})"

    @property
    def advice(self) -> str:
        return _ADVICE[self.kind]


class StorageError(Exception):
    """Data could not be stored or read because of a storage problem; the request can be retried."""

    def __init__(self, problem: StorageProblem) -> None:
        super().__init__(problem.text)
        self.problem = problem


class NewDataRefused(StorageError):
    """A new row or file was refused because of a known problem. No write was attempted."""


class DatabaseRefused(Exception):
    """The database cannot be opened; the text says why and contains no password."""


class DatabaseLocked(Exception):
    """Another server uses the database."""


class DatabaseFileChanged(Exception):
    """The database file is not the one that was opened; the text names it."""


class ObjectStoreUnavailable(OSError):
    """
    An object store refused a request, did not answer, or cannot be reached.

    Each object store library raises its own errors. `Files` converts those that concern all
    objects to this one.
    """


class Damaged(Exception):
    """A stored file is missing or differs from what was written; the text names it."""


def storage_problem(error: BaseException | None) -> StorageProblem | None:
    """The storage problem that an error shows; None if it is not about storage."""
    for one in _causes(error):
        if isinstance(one, StorageError):
            return one.problem
        if isinstance(one, ObjectStoreUnavailable):
            return StorageProblem(kind=UNREACHABLE, reason=str(one), part=OBJECT_STORE)
        if isinstance(one, DatabaseLocked):
            return StorageProblem(kind=UNREACHABLE, reason=str(one))
        if isinstance(one, DatabaseFileChanged):
            return StorageProblem(kind=GONE, reason=str(one))
        if isinstance(one, sa.exc.DBAPIError) and _is_connection_lost(one):
            return StorageProblem(kind=UNREACHABLE, reason=_first_line(one.orig))
        name = getattr(one, "sqlite_errorname", None) or ""
        for prefix, kind in _SQLITE.items():
            if name.startswith(prefix):
                return StorageProblem(kind=kind, reason=str(one))
        state = getattr(one, "sqlstate", None) or ""
        for prefix, kind in _POSTGRES.items():
            if state.startswith(prefix):
                return StorageProblem(kind=kind, reason=_first_line(one))
        if isinstance(one, OSError) and (kind := _ERRNOS.get(one.errno or 0, "")) != "":
            return StorageProblem(kind=kind, reason=one.strerror or str(one))
    return None


def _is_connection_lost(error: sa.exc.DBAPIError) -> bool:
    """Whether a connection broke, or could not be made (then psycopg has no SQLSTATE)."""
    not_connected = isinstance(error, sa.exc.OperationalError) and (
        getattr(error.orig, "sqlstate", "") is None
    )
    return error.connection_invalidated or not_connected


def _first_line(error: BaseException | None) -> str:
    return str(error).strip().partition("\n")[0]


def os_error_in(message: str) -> OSError:
    """The OSError that another process reported as text, in Python's or Rust's wording."""
    found = _NUMBER.search(message)
    number = int(found[1]) if found else 0
    return OSError(number, os.strerror(number))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and the errors that caused it."""
    while error is not None:
        yield error
        driver = error.orig if isinstance(error, sa.exc.DBAPIError) else None
        error = driver or error.__cause__


def _severity_order(problem: StorageProblem) -> tuple[bool, bool]:
    """A sort key: the most severe problem first."""
    return problem.is_temporary, not problem.blocks_reads


class StorageHealth:
    """
    The current problems of the store, by part, for all threads.

    A part is healthy again after a successful write. A damaged database stays damaged until a
    restart.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.problems: dict[str, StorageProblem] = {}
        self._response_timeout: Callable[[], StorageProblem | None] = lambda: None
        self._check_space: Callable[[], None] = lambda: None
        self._space_checked_s = float("-inf")
        self._checking_space = threading.Lock()
        #: The writer thread calls this before each commit.
        self.before_commit: Callable[[], None] = lambda: None

    def report_timeouts(self, response_timeout: Callable[[], StorageProblem | None]) -> None:
        """Register a check, for any thread, that returns a problem if the database is too slow."""
        self._response_timeout = response_timeout

    def monitor_space(self, check: Callable[[], None]) -> None:
        """Use this to check free space, also before commits. It calls `record` or `clear`."""
        self._check_space = check
        self.before_commit = self._check_space_if_due

    def check_space(self) -> None:
        """Check free space now, unless another thread is checking it: on a hung disk that blocks."""
        if not self._checking_space.acquire(blocking=False):
            return
        try:
            self._space_checked_s = time.monotonic()
            self._check_space()
        finally:
            self._checking_space.release()

    def _check_space_if_due(self) -> None:
        if time.monotonic() - self._space_checked_s >= SPACE_CHECK_S:
            self.check_space()

    @property
    def problem(self) -> StorageProblem | None:
        """The most severe current problem."""
        with self._lock:
            worst = min(self.problems.values(), key=_severity_order, default=None)
        return worst or self._response_timeout()

    def record(self, error: BaseException, part: str = DATABASE) -> StorageProblem | None:
        """Store the problem that an error shows as the state of a part; None if it shows none."""
        problem = storage_problem(error)
        if problem is None:
            return None
        if problem.kind == GONE and part != DATABASE_FILE:
            return problem  # a consequence of the problem that `DATABASE_FILE` already has
        with self._lock:
            before = self.problems.get(part)
            if before is None or before.is_temporary:
                self.problems[part] = problem
        if before is None or (before.is_temporary and before.kind != problem.kind):
            log.error("%s %s", problem.text, problem.advice)
        return problem

    def clear(self, part: str = DATABASE) -> None:
        """A write to this part succeeded: its temporary problem, if any, is over."""
        # Checked without the lock, because every write calls this; a stale value does no harm.
        if part not in self.problems:
            return
        with self._lock:
            problem = self.problems.get(part)
            if problem is None or not problem.is_temporary:
                return
            del self.problems[part]
        if part == FREE_SPACE:
            log.warning("the disk of this server has enough free space again")
        else:
            log.warning("the %s of this server can be written again", part)

    def refuse_new_work(self) -> None:
        """Raise StorageError while there is any problem. For new requests."""
        if (problem := self.problem) is not None:
            raise StorageError(problem)

    def refuse_new_data(self) -> None:
        """
        Raise NewDataRefused while files cannot be written or the disk reserve is in use.

        For every new row and file. Problems of the database itself do not count here: writing to it
        shows them.
        """
        if not self.problems:
            return
        with self._lock:
            problems = [one for part, one in self.problems.items() if part != DATABASE]
        if problems:
            raise NewDataRefused(min(problems, key=_severity_order))

    def check_readable(self) -> None:
        """Raise StorageError if the database is damaged or its file was replaced."""
        if self.problems and (problem := self.problem) is not None and problem.blocks_reads:
            raise StorageError(problem)

    def as_storage_error(self, error: BaseException) -> StorageError:
        """The error for a caller whose data was not stored."""
        problem = storage_problem(error) or self.problem
        raised = StorageError(problem or StorageProblem(kind=FAILING, reason=str(error)))
        raised.__cause__ = error
        return raised
