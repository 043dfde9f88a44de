"""
Leases: which programs use the server of a data folder, and when a local server may stop.

Every program holds a file in `DATA/leases`, with its process id and name, and a lock on it. The
kernel releases the locks of a process when it ends, so a killed program holds nothing.

Whoever starts, attaches to or stops a local server holds `DATA/local.lock` meanwhile. A server that
stops keeps that lock until its process has ended: a program that comes then waits, and starts a new
one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

log = logging.getLogger("tinkex.local")

FOLDER = "leases"
LOCK_FILE = "local.lock"
#: Seconds that a local server stays after its last program.
DEFAULT_KEEP_S = 300.0
#: How often a server looks for programs.
LOOK_EVERY_S = 1.0
#: How long it waits after it could not read the leases.
READ_AGAIN_S = 30.0


class NoFileLocks(Exception):
    """This system is Windows, where no server runs."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A program that uses a server."""

    lease: str
    pid: int
    program: str
    #: How long the server stays after this program.
    keep_s: float

    def __str__(self) -> str:
        return f"process {self.pid} ({self.program})"


class Lease:
    """A lease of this program, until it is released."""

    def __init__(self, name: str, descriptor: int) -> None:
        self.name = name
        self._descriptor: int | None = descriptor

    def __del__(self) -> None:
        self.release()

    def release(self) -> None:
        """Later calls have no effect."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            # Closed, not unlocked or deleted: a forked child may hold the same lock and need it.
            os.close(descriptor)


def take(data: Path, *, keep_s: float = DEFAULT_KEEP_S) -> Lease:
    """A new lease on the server of a data folder."""
    fcntl = _fcntl()
    folder = data / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    name = f"{os.getpid()}-{secrets.token_hex(4)}"
    part = folder / f".{name}.part"
    descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        about = {"pid": os.getpid(), "program": _program(), "keep_s": keep_s}
        os.write(descriptor, json.dumps(about).encode())
        # It gets its name when it is locked: nobody sees a lease without a holder.
        part.rename(folder / f"{name}.json")
    except BaseException:
        os.close(descriptor)
        part.unlink(missing_ok=True)
        raise
    return Lease(name, descriptor)


def holders(data: Path) -> list[Holder]:
    """The programs that hold a lease."""
    return _look(data)[0]


def delete_ended(data: Path) -> list[Holder]:
    """Delete the leases of programs that have ended; returns those."""
    ended = _look(data)[1]
    for one in ended:
        (data / FOLDER / f"{one.lease}.json").unlink(missing_ok=True)
    return ended


def _look(data: Path) -> tuple[list[Holder], list[Holder]]:
    """The programs that hold a lease, and those that have ended."""
    fcntl = _fcntl()
    held, ended = [], []
    for file in sorted((data / FOLDER).glob("*.json")):
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            holder = _holder(file, os.read(descriptor, 4096))
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            ended.append(holder)
        except BlockingIOError:
            held.append(holder)
        finally:
            os.close(descriptor)
    return held, ended


def _holder(file: Path, text: bytes) -> Holder:
    try:
        told = json.loads(text)
        return Holder(
            lease=file.stem,
            pid=int(told["pid"]),
            program=str(told["program"]),
            keep_s=float(told["keep_s"]),
        )
    except (ValueError, KeyError, TypeError):
        return Holder(lease=file.stem, pid=0, program="unknown", keep_s=DEFAULT_KEEP_S)


def _program() -> str:
    """The name of this program, for people: `train.py`, `tinkex run list`."""
    path = Path(sys.argv[0] if sys.argv else "")
    if path.name in ("", "-", "-c", "-m"):
        return "python"
    if path.name == "tinkex" or path.parts[-3:] == ("tinkex", "cli", "main.py"):
        words = [word for word in sys.argv[1:3] if word.isalpha()]
        return " ".join(["tinkex", *words])
    # `python -m pytest` runs pytest/__main__.py.
    return (path.parent.name if path.name == "__main__.py" else path.name)[:100]


@contextlib.contextmanager
def locked(data: Path) -> Iterator[None]:
    """Hold `local.lock`: to start, attach to or stop the local server of a data folder."""
    descriptor = _open_lock(data)
    try:
        _fcntl().flock(descriptor, _fcntl().LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _open_lock(data: Path) -> int:
    return os.open(data / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)


def _fcntl() -> ModuleType:
    try:
        import fcntl
    except ModuleNotFoundError as error:
        raise NoFileLocks(
            'base_url="local" does not work on Windows. Run `tinkex serve` in WSL 2 or on another '
            "machine, and pass its address."
        ) from error
    return fcntl


# -- the end of a local server -------------------------------------------------------------------


class IdleTime:
    """How long a server has had no programs, and whether it may stop."""

    def __init__(self, now_s: float, keep_s: float = DEFAULT_KEEP_S) -> None:
        self._since_s = now_s
        self.keep_s = keep_s

    def is_over(self, held: Sequence[Holder], ended: Sequence[Holder], now_s: float) -> bool:
        """
        Whether the server may stop. It stays as long as its last programs asked for.

        `ended` are the programs that have ended since the last call.
        """
        if held or ended:
            self._since_s = now_s
            self.keep_s = max(one.keep_s for one in (*held, *ended))
        return not held and now_s - self._since_s >= self.keep_s


def stop_when_unused(
    data: Path, *, in_use: Callable[[float], bool], stop: Callable[[], None]
) -> None:
    """
    Start a thread that calls `stop` when no program has used the server for a while.

    `in_use` gets that while in seconds, and tells whether somebody without a lease needs the
    server: an official SDK, for example. It is called only if no lease is held.
    """
    threading.Thread(
        target=_watch, args=(data, in_use, stop), name="tinkex-leases", daemon=True
    ).start()


def _watch(data: Path, in_use: Callable[[float], bool], stop: Callable[[], None]) -> None:
    fcntl = _fcntl()
    idle = IdleTime(time.monotonic())
    lock = _open_lock(data)
    while True:
        try:
            ended = delete_ended(data)
            over = idle.is_over(holders(data), ended, time.monotonic())
        except OSError as error:
            # A full or hung disk: nobody knows who uses the server.
            log.warning("the leases in %s cannot be read now: %s", data / FOLDER, error)
            time.sleep(READ_AGAIN_S)
            continue
        if not over:
            # A short time is wanted by tests, and by programs that need the memory back.
            time.sleep(LOOK_EVERY_S if idle.keep_s >= LOOK_EVERY_S else LOOK_EVERY_S / 10)
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(LOOK_EVERY_S / 10)  # a program is attaching
            continue
        if not holders(data) and not in_use(idle.keep_s):
            stop()
            return  # the lock is released by the end of the process
        fcntl.flock(lock, fcntl.LOCK_UN)
        time.sleep(LOOK_EVERY_S)
