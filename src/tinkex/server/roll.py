"""
Who is with an engine, in a file that outlives the web process.

Written at every hand-out, so a word costs one small write to the system's memory and nothing is
synced: a machine that goes down blames nobody anyway (`blame`). The engine holds the same file open
and says there that it leaves because its web process is gone. Nothing here may stop the work: what
cannot be written is left out.
"""

import contextlib
import fcntl
import hashlib
import heapq
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from tinkex.server.blame import Engine, Remains
from tinkex.wire import frames

# One line each: the engine's state and the machine's start first, then a request or blanks.
LINE = 64
STATE = len(frames.LEFT)
#: How long an engine without its web process may take to leave before nobody waits for it.
LEAVES_S = 5.0
_LOOK_S = 0.02


def boot_id() -> str:
    """Another one after each start of the machine; empty where the system does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class Roll:
    """Of one engine. `remains` is what the last web process on this file left behind."""

    def __init__(self, file: Path) -> None:
        self._file = file
        file.parent.mkdir(parents=True, exist_ok=True)
        self.remains = _taken_over(file)
        # A new file: an engine that is still about writes into the old one.
        self.descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self.descriptor, fcntl.LOCK_EX)
        self._lines = 1
        self._free: list[int] = []
        self._write(0, f"{Engine.NONE:<{STATE}}{boot_id()}")

    @classmethod
    def of(cls, folder: Path, base_model: str) -> "Roll":
        return cls(folder / hashlib.sha256(base_model.encode()).hexdigest()[:16])

    def engine(self, state: Engine) -> None:
        """The engine is up, or has been seen to end."""
        with contextlib.suppress(OSError):
            os.pwrite(self.descriptor, f"{state:<{STATE}}".encode(), 0)

    def enter(self, names: Iterable[str]) -> Sequence[int]:
        """These are with the engine now; what `leave` takes."""
        lines = []
        for name in names:
            if self._free:
                line = heapq.heappop(self._free)
            else:
                line = self._lines
                self._lines += 1
            self._write(line, name)
            lines.append(line)
        return lines

    def leave(self, lines: Sequence[int]) -> None:
        for line in lines:
            self._write(line, "")
            heapq.heappush(self._free, line)

    def close(self) -> None:
        """An end in order leaves nothing behind."""
        self._file.unlink(missing_ok=True)
        os.close(self.descriptor)

    def _write(self, line: int, text: str) -> None:
        with contextlib.suppress(OSError):
            os.pwrite(self.descriptor, f"{text:<{LINE - 1}}\n".encode(), line * LINE)


def _taken_over(file: Path) -> Remains | None:
    """What is in the file, once nobody holds it any more; the file is gone then."""
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as old:
        stays = not _freed(descriptor)
        remains = _parsed(old.read(), stays=stays)
    file.unlink(missing_ok=True)
    return remains


def _freed(descriptor: int) -> bool:
    """Whether the old engine has left, or died, within its time."""
    until_s = time.monotonic() + LEAVES_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until_s:
                return False
            time.sleep(_LOOK_S)
        else:
            return True


def _parsed(data: bytes, *, stays: bool) -> Remains | None:
    """What a file says; nothing, if it is none of ours."""
    head, *lines = data.decode(errors="replace").splitlines() or [""]
    try:
        engine = Engine(head[:STATE].strip())
    except ValueError:
        return None
    return Remains(
        # One that is still there has outlived its web process.
        engine=Engine.LEFT if stays and engine is Engine.UP else engine,
        boot_id=head[STATE:].strip(),
        inside=tuple(name for line in lines if (name := line.strip())),
    )
