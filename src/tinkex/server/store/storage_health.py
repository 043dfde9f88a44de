"""
When the disk or the database fails: what it is, whether it may pass, and what to do about it.

    problem = storage_problem(error)      # None: the error is somebody else's

What `StorageHealth` holds is the state of the whole store: new work is refused while there is any.
"""

import errno
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import sqlalchemy as sa

log = logging.getLogger("tinkex.server.store")

#: Parts of a store that can be in problem by themselves.
DATABASE = "database"
FILES = "files"
FREE_SPACE = "reserve of room"
#: What `FILES` are in, where they are not in a folder.
OBJECT_STORE = "object store"
DATABASE_FILE = "database file"

FULL = "full"
READ_ONLY = "read_only"
FAILING = "failing"
UNREACHABLE = "away"
GONE = "gone"
CORRUPT = "corrupt"
KINDS = (FULL, READ_ONLY, FAILING, UNREACHABLE, GONE, CORRUPT)

_ERRNOS = {
    errno.ENOSPC: FULL,
    errno.EDQUOT: FULL,
    # A limit on the size of files, as `ulimit -f` sets it, is a disk that ends early.
    errno.EFBIG: FULL,
    errno.EROFS: READ_ONLY,
    errno.EACCES: READ_ONLY,
    errno.EPERM: READ_ONLY,
    errno.EIO: FAILING,
}
# By the first word group of SQLite's names for its errors.
_SQLITE = {
    "SQLITE_FULL": FULL,
    "SQLITE_READONLY": READ_ONLY,
    "SQLITE_CANTOPEN": READ_ONLY,
    "SQLITE_IOERR": FAILING,
    "SQLITE_CORRUPT": CORRUPT,
    "SQLITE_NOTADB": CORRUPT,
}
# By the SQLSTATE of PostgreSQL, or its first characters.
_POSTGRES = {
    "53100": FULL,
    "25006": READ_ONLY,
    "58030": FAILING,
    # It has connections enough, it is being stopped or started, or nothing answers.
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
    FAILING: "the disk of this server fails",
    UNREACHABLE: "the {part} of this server cannot be reached",
    GONE: "the database of this server was deleted, moved or replaced while it runs",
    CORRUPT: "the database of this server is damaged",
}
_ADVICE = {
    FULL: "Make room on it; the server goes on by itself.",
    READ_ONLY: "Make them writable for the server's user; the server goes on by itself.",
    FAILING: "Look at the disk and the system's log; the server goes on by itself when it can.",
    UNREACHABLE: "See that it runs and lets this server in; the server goes on by itself.",
    GONE: "If it was moved, move it back, with its -wal; the server goes on by itself. If it is lost, "
    "stop the server and restore a back-up with `tinkex restore`.",
    CORRUPT: "Stop the server, run `tinkex doctor`, and restore a back-up if it says so.",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageProblem:
    """Why nothing can be stored now."""

    kind: str
    #: What the system said.
    reason: str
    #: What cannot be reached, where something cannot.
    part: str = DATABASE

    @property
    def is_temporary(self) -> bool:
        """Whether it is worth trying again."""
        return self.kind != CORRUPT

    @property
    def blocks_reads(self) -> bool:
        """Whether the database is not even read: what it answers, or takes in, may be lost."""
        return self.kind in (GONE, CORRUPT)

    @property
    def text(self) -> str:
        """For clients: nothing is lost, and whose turn it is."""
        what = _WORDS[self.kind].format(part=self.part)
        return f"{what} ({self.reason}). Nothing new is taken in meanwhile."

    @property
    def advice(self) -> str:
        return _ADVICE[self.kind]


class StorageError(Exception):
    """Something could not be stored, or not be read: the request may be sent again."""

    def __init__(self, problem: StorageProblem) -> None:
        super().__init__(problem.text)
        self.problem = trouble


class DatabaseRefused(Exception):
    """The database cannot be used; the text says why, and holds no password."""


class ObjectStoreUnavailable(OSError):
    """
    An object store refused, did not answer, or cannot be reached.

    Each kind of store raises errors of its own; `Files` turns those that concern all objects into
    this one.
    """


class DatabaseLocked(Exception):
    """Another server works on the database."""


class DatabaseFileChanged(Exception):
    """The file of the database is not the one that was opened; the text names it."""


class NewDataRefused(StorageError):
    """Something new was to be added while nothing new is taken in; the store itself is as it was."""


class Damaged(Exception):
    """A file that a row points to is missing, or is not what was written; the text names it."""


def storage_problem(error: BaseException | None) -> StorageProblem | None:
    """What an error says about the disk or the database; None when it says nothing."""
    for one in _causes(error):
        if isinstance(one, StorageError):
            return one.problem
        if isinstance(one, ObjectStoreUnavailable):
            return StorageProblem(kind=UNREACHABLE, reason=str(one), part=OBJECT_STORE)
        if isinstance(one, DatabaseLocked):
            return StorageProblem(kind=UNREACHABLE, reason=str(one))
        if isinstance(one, DatabaseFileChanged):
            return StorageProblem(kind=GONE, reason=str(one))
        if isinstance(one, sa.exc.DBAPIError) and _is_lost(one):
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


def _is_lost(error: sa.exc.DBAPIError) -> bool:
    """Whether a connection broke, or could not be made: then PostgreSQL did not say why."""
    unmade = isinstance(error, sa.exc.OperationalError) and (
        getattr(error.orig, "sqlstate", "") is None
    )
    return error.connection_invalidated or unmade


def _first_line(error: BaseException | None) -> str:
    return str(error).strip().partition("\n")[0]


def os_error_in(message: str) -> OSError:
    """The error of another process, as Python and Rust put its number into words."""
    found = _NUMBER.search(message)
    number = int(found[1]) if found else 0
    return OSError(number, os.strerror(number))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and what it was made from."""
    while error is not None:
        yield error
        driver = error.orig if isinstance(error, sa.exc.DBAPIError) else None
        error = driver or error.__cause__


def _mildness(problem: StorageProblem) -> tuple[bool, bool]:
    return problem.is_temporary, not problem.blocks_reads


class StorageHealth:
    """
    How the store is, part by part, for all threads.

    A part is well again once it was written. A database that is damaged stays so until a restart.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._problems: dict[str, StorageProblem] = {}
        self._silence: Callable[[], StorageProblem | None] = lambda: None
        #: Called before each commit, in the thread that writes: notes or clears what it sees.
        self.look: Callable[[], None] = lambda: None

    def watch(self, silence: Callable[[], StorageProblem | None]) -> None:
        """`silence` tells whether something waits for an answer for too long; any thread asks."""
        self._silence = silence

    @property
    def trouble(self) -> StorageProblem | None:
        """The worst there is."""
        with self._lock:
            worst = min(self._problems.values(), key=_mildness, default=None)
        return worst or self._silence()

    def note(self, error: BaseException, part: str = DATABASE) -> StorageProblem | None:
        """What an error says about the store; from now on its state, if anything."""
        problem = storage_problem(error)
        if problem is None:
            return None
        if problem.kind == GONE and part != DATABASE_FILE:
            return problem  # told again by whoever was refused because of it
        with self._lock:
            before = self._problems.get(part)
            if before is None or before.is_temporary:
                self._problems[part] = trouble
        if before is None or (before.is_temporary and before.kind != problem.kind):
            log.error("%s %s", problem.text, problem.advice)
        return trouble

    def clear(self, part: str = DATABASE) -> None:
        """Something was written: the trouble of this part, if there was any, is over."""
        # Asked without the lock, because it is asked for every write; a late answer is harmless.
        if part not in self._problems:
            return
        with self._lock:
            problem = self._problems.get(part)
            if problem is None or not problem.is_temporary:
                return
            del self._problems[part]
        log.warning("the %s of this server can be written again", part)

    def refuse_any(self) -> None:
        """For new work: raises while anything is wrong."""
        if (problem := self.problem) is not None:
            raise StorageError(problem)

    def refuse_new(self) -> None:
        """
        For every new row and file: raises while files cannot be written or the reserve is in use.

        StorageProblem of the database itself is left out: a write to it finds out by itself.
        """
        if not self._problems:
            return
        with self._lock:
            problems = [one for part, one in self._problems.items() if part != DATABASE]
        if problems:
            raise NewDataRefused(min(problems, key=_mildness))

    def check(self) -> None:
        """Refuse to go on with a database that is damaged, or is not the one on the disk."""
        if self._problems and (problem := self.problem) is not None and problem.blocks_reads:
            raise StorageError(problem)

    def refusal(self, error: BaseException) -> StorageError:
        """For who must be told that nothing was stored."""
        problem = storage_problem(error) or self.problem
        refusal = StorageError(problem or StorageProblem(kind=FAILING, reason=str(error)))
        refusal.__cause__ = error
        return refusal
