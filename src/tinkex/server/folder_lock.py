"""
Locks: one server at a time on a data folder, and on a SQLite database.

    with lock_folder(settings.folder) as folder, lock_database(settings) as database:
        ...
        folder.problem()        # called regularly: is it still the folder that was locked?

The folder itself and the database file itself are locked: lock files can be deleted, and a hard
link gives a database a second name. The lock files contain the id of the process that holds the
lock, and also lock out servers of earlier versions.
"""

import contextlib
import errno
import fcntl
import logging
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from tinkex.server.settings import Settings, SettingsError

if TYPE_CHECKING:
    from tinkex.server.store import Store

log = logging.getLogger("tinkex.server.supervisor")

LOCK_FILE = "server.lock"
# Other users must not read training data. The mode of an existing folder is not changed.
PRIVATE_MODE = 0o700
# SQLite locks bytes around 2**30 of its file, so this byte is free.
LOCKED_BYTE = 2**62


class HeldLock:
    """A lock file that this process holds, and the folder or database that it locks."""

    def __init__(self, lock: TextIO, file: Path, of: Path, descriptor: int | None) -> None:
        self._lock = lock
        self._file = file
        self._of = of
        self._descriptor = descriptor

    def problem(self) -> str | None:
        """Why the lock is lost; None if it is held. A deleted lock file is created again."""
        try:
            if self._descriptor is not None and not _is_same(self._of, self._descriptor):
                return f"{self._of} was moved, deleted or replaced"
            if not _is_same(self._file, self._lock.fileno()):
                return self._lock_again()
        except OSError as error:
            log.warning("%s cannot be checked: %s", self._file, error.strerror)
        return None

    def _lock_again(self) -> str | None:
        lock = _opened(self._file)
        if (holder := _take(lock)) is not None:
            lock.close()
            return f"{self._file} was deleted, and process {holder} holds a new one"
        log.warning("%s was deleted; creating it again", self._file)
        self.close()
        self._lock = lock
        return None

    def close(self) -> None:
        self._lock.close()


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[HeldLock]:
    """Lock a data folder. The operating system releases the lock when the process ends."""
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(mode=PRIVATE_MODE, parents=True, exist_ok=True)
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, descriptor)
            free = _flock(descriptor)
            lock = stack.enter_context(_opened(folder / LOCK_FILE))
            _take_or_refuse(lock, free, f"data folder {folder}", "folder with --data")
        except OSError as error:
            space = "Free some space, or choose" if error.errno == errno.ENOSPC else "Choose"
            raise SettingsError(
                f"the data folder {folder} cannot be written: {error.strerror}.",
                hint=f"{space} another one with --data.",
            ) from error
        held = HeldLock(lock, folder / LOCK_FILE, folder, descriptor)
        stack.callback(held.close)
        yield held


@contextlib.contextmanager
def lock_database(settings: Settings) -> Iterator[HeldLock | None]:
    """
    Lock a SQLite database file, because with `--db` two data folders may name the same file.

    For PostgreSQL this does nothing: the writing connection locks the database (`sql_dialects`).
    """
    file = database_file(settings.db_url)
    if file is None:
        yield None
        return
    with contextlib.ExitStack() as stack:
        try:
            file.parent.mkdir(mode=PRIVATE_MODE, parents=True, exist_ok=True)
            lock_file = file.with_name(f"{file.name}.lock")
            lock = stack.enter_context(_opened(lock_file))
        except OSError as error:
            raise SettingsError(
                f"the lock file of the database {file} cannot be opened: {error.strerror}.",
                hint="Choose another one with --db, or leave it out for one in the data folder.",
            ) from error
        free = True
        # Errors of the file itself are reported later, when the database is opened.
        with contextlib.suppress(OSError):
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
            stack.callback(os.close, descriptor)
            free = _lock_byte(descriptor)
        _take_or_refuse(lock, free, f"database {file}", "database with --db")
        held = HeldLock(lock, lock_file, file, None)
        stack.callback(held.close)
        yield held


def lock_holder(folder: Path) -> str | None:
    """The process that holds a data folder; None if it is free."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    try:
        free = _flock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)
    try:
        lock = (folder / LOCK_FILE).open()
    except FileNotFoundError:
        return None if free else "unknown"
    with lock:
        return None if free and _flock(lock.fileno(), fcntl.LOCK_SH) else _holder_in(lock)


def open_shared_store(settings: Settings) -> "Store":
    """
    The store of a data folder that a server may be using.

    The schema is upgraded only while no server holds the folder.
    """
    from tinkex.server.store import DatabaseRefused, open_store
    from tinkex.server.store.connections import outdated
    from tinkex.server.store.database import Database

    if (problem := outdated(settings.db_url)) is not None:
        try:
            with lock_folder(settings.folder), lock_database(settings):
                Database(settings.db_url, exclusive=True).close()
        except SettingsError as held:
            raise DatabaseRefused(
                f"{problem}, and {held} Use the tinkex version of that server, or stop it first: "
                "then this command upgrades the database."
            ) from held
    return open_store(
        db_url=settings.db_url, storage_url=settings.storage_url, folder=settings.folder
    )


def database_file(db_url: str) -> Path | None:
    """The file of a SQLite URL, with links resolved; None for other databases."""
    backend, _, rest = db_url.partition("://")
    name = rest.partition("?")[0].removeprefix("/").removeprefix("file:")
    if backend.partition("+")[0] != "sqlite" or name in ("", ":memory:"):
        return None
    return Path(name).resolve()


def _opened(file: Path) -> TextIO:
    """Open or create a lock file that only its user can read, independent of the umask."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    lock = os.fdopen(descriptor, "a+")
    # The file may belong to another user, who lets this user write it.
    with contextlib.suppress(PermissionError):
        os.fchmod(descriptor, 0o600)
    return lock


def _is_same(path: Path, descriptor: int) -> bool:
    """Whether a path refers to an open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _flock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    """
    Lock an open file or folder. Returns False if another process holds the lock.

    Some file systems, such as NFS, cannot lock folders. Then this returns True, and only the lock
    file protects the folder.
    """
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        log.debug("this file system cannot lock folders; only the lock file is used: %s", error)
    return True


def _lock_byte(descriptor: int) -> bool:
    """
    Lock one byte of a database file, far after its end. Returns False if the byte is locked.

    A lock on the whole file would conflict with SQLite's own locks on some systems. On Linux this
    is an open file description lock: unlike a POSIX lock, it is not released when SQLite in this
    process closes its own descriptor of the file.
    """
    try:
        if sys.platform == "linux":
            lock = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, LOCKED_BYTE, 1, 0)
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, lock)
        else:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, LOCKED_BYTE)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _take_or_refuse(lock: TextIO, free: bool, what: str, other: str) -> None:
    """Take a lock file; refuse if another server has it, or holds the data itself (not `free`)."""
    holder = _take(lock) if free else _holder_in(lock)
    if holder is not None:
        raise SettingsError(
            f"another server (process {holder}) holds the {what}.",
            hint=f"Use that server, stop it, or choose another {other}.",
        )


def _take(lock: TextIO) -> str | None:
    """Lock a lock file and write the process id to it. Returns the current holder, if any."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _holder_in(lock)
    lock.truncate(0)
    # Not buffered: on a full disk, closing the file would fail again.
    os.write(lock.fileno(), f"{os.getpid()}\n".encode())
    return None


def _holder_in(lock: TextIO) -> str:
    """The process id in a lock file."""
    lock.seek(0)
    return lock.read().strip() or "unknown"
