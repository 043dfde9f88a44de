"""
Isolates requests that crash an engine.

When an engine crashes, every request that it was running is lost. Most crashes are not caused by a
request, so after one crash the requests run again. A request that was running in two crashes is
isolated: it runs alone or, if there are many such requests, in small groups. If the engine crashes
while a request runs alone, that request fails, and the crash counts of the others are reset.

Crash counts are stored when an engine crashes, so they survive the web process. If the web process
itself dies without storing anything, the in-flight file tells the next one which requests the engine
had.
"""

import asyncio
import contextlib
import enum
import fcntl
import hashlib
import heapq
import os
import signal
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tinkex.server.retry import poll
from tinkex.wire import engine_protocol

#: A request that was running in this many crashes, the last time alone, fails.
MAX_CRASHES = 3
#: A request that was running in this many crashes is isolated.
ISOLATE_AFTER = MAX_CRASHES - 1
#: Up to this many isolated requests run one by one; more run in this many groups at first.
MAX_SINGLY = 16
GROUPS = 8
#: The name in the in-flight file of work that is not a request.
OTHER_WORK = ("snapshot",)


def group_size(isolated: int, crashes: int) -> int:
    """How many of this many isolated requests run together after this many crashes."""
    if isolated <= MAX_SINGLY:
        return 1
    return max(1, int(isolated / GROUPS ** (crashes - ISOLATE_AFTER + 1)))


@dataclass(slots=True, eq=False)
class Attempt:
    """One step batch of a model, or one sample, on an engine."""

    crashes: int
    #: Whether nothing else was on the engine at any time during this attempt.
    alone: bool = True
    names: Sequence[str] = OTHER_WORK
    lines: Sequence[int] = ()
    _started: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_isolated(self) -> bool:
        return self.crashes >= ISOLATE_AFTER


class CrashIsolation:
    """Admits attempts to one engine, in order of arrival."""

    def __init__(self, in_flight_file: "InFlightFile | None" = None) -> None:
        self._file = in_flight_file
        self._crashes: dict[str, int] = {}
        #: Requests that an earlier process found to crash the engine, with the reason.
        self._failed: dict[str, str] = {}
        self._running: set[Attempt] = set()
        self._isolated_running = 0
        self._waiting: deque[Attempt] = deque()
        self._held: set[str] = set()

    @contextlib.asynccontextmanager
    async def attempt(self, *request_ids: str) -> AsyncIterator[Attempt]:
        """Wait until these requests may run on the engine; they may run inside the `with` block."""
        crashes = max(map(self.crashes, request_ids), default=0)
        attempt = Attempt(crashes, names=request_ids or OTHER_WORK)
        self._waiting.append(attempt)
        self._admit()
        try:
            if not attempt._started.is_set():
                self._held.update(request_ids)
                await attempt._started.wait()
                self._held.difference_update(request_ids)
            yield attempt
        finally:
            self._held.difference_update(request_ids)
            if attempt in self._running:
                self._running.discard(attempt)
                self._isolated_running -= attempt.is_isolated
            else:
                self._waiting.remove(attempt)
            if self._file is not None:
                self._file.remove(attempt.lines)
            self._admit()

    def record_crash(self, request_id: str, attempt: Attempt, *, times: int = 1) -> bool:
        """Count an engine crash for a request that was running; True if the request caused it."""
        crashes = self._crashes[request_id] = self.crashes(request_id) + times
        caused = attempt.alone and crashes >= MAX_CRASHES
        if caused:
            # It caused the earlier crashes too, so the counts of the other requests are reset.
            self._crashes.clear()
        return caused

    def crashes(self, request_id: str) -> int:
        """How many crashes this request was in."""
        return self._crashes.get(request_id, 0)

    @property
    def crash_counts(self) -> Mapping[str, int]:
        return self._crashes

    def failure_reason(self, request_id: str) -> str | None:
        """Why this request must not run again; None if it may."""
        return self._failed.get(request_id)

    def is_held(self, request_id: str) -> bool:
        """Whether it waits because of an isolated request, or because it is one."""
        return request_id in self._held

    def restore(self, request_id: str, crashes: int, *, reason: str = "") -> None:
        """Set a count of an earlier process; with a reason, the request must not run again."""
        self._crashes[request_id] = crashes
        if reason:
            self._failed[request_id] = reason

    def forget(self, request_id: str) -> None:
        """The request is finished."""
        self._crashes.pop(request_id, None)
        self._failed.pop(request_id, None)

    def take_leftover(self) -> "LeftoverState | None":
        """What the previous web process left in the in-flight file; None the second time."""
        if self._file is None:
            return None
        leftover, self._file.leftover = self._file.leftover, None
        return leftover

    def _admit(self) -> None:
        # Strictly in order, so neither isolated requests nor the others wait forever.
        while self._waiting and self._may_start(self._waiting[0]):
            attempt = self._waiting.popleft()
            if self._running:
                attempt.alone = False
                # With several running, all have lost the flag already.
                if len(self._running) == 1:
                    next(iter(self._running)).alone = False
            self._running.add(attempt)
            self._isolated_running += attempt.is_isolated
            if self._file is not None:
                attempt.lines = self._file.add(attempt.names)
            attempt._started.set()

    def _may_start(self, attempt: Attempt) -> bool:
        if not attempt.is_isolated:
            return not self._isolated_running
        if len(self._running) > self._isolated_running:
            return False
        isolated = self._isolated_running + sum(other.is_isolated for other in self._waiting)
        return len(self._running) < group_size(isolated, attempt.crashes)


#: Signals that end a web process from outside.
_EXTERNAL_SIGNALS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


class EngineState(enum.StrEnum):
    """The last state of an engine in the in-flight file."""

    NONE = "none"  # not up yet, or its end was observed and counted
    UP = "up"
    LEFT = "left"  # it exited because its web process was gone


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftoverState:
    """What a web process left in the in-flight file of one engine."""

    engine: EngineState
    #: Changes with every start of the machine.
    boot_id: str
    #: The request ids, and names of other work, that the engine had.
    in_flight: tuple[str, ...]


def web_process_crashed(status: int, *, oom_kills: int) -> bool:
    """
    Whether a web process crashed, and was not ended by a signal from outside.

    `status` is its exit status, negative for a signal. `oom_kills` is the number of processes that
    the kernel killed for lack of memory while it ran. If it is 0, a person or a tool sent SIGKILL.
    """
    if status >= 0 or -status not in _EXTERNAL_SIGNALS:
        return True
    return -status == signal.SIGKILL and oom_kills > 0


def counts_as_crash(leftover: LeftoverState, *, boot_id: str, web_crashed: bool) -> bool:
    """
    Whether the leftover requests were in a crash that was not counted yet.

    Restarting a server, or killing its web process, must not fail any request.
    """
    if leftover.boot_id != boot_id:
        return False  # the machine was restarted
    if leftover.engine is EngineState.UP:
        return True  # the engine crashed, and no web process was there to count it
    # The engine did not crash. Its requests count only if the web process crashed, because one of
    # their results may have caused that.
    return leftover.engine is EngineState.LEFT and web_crashed


# One line each: the engine's state and the boot id first, then a request id or blanks.
LINE_BYTES = 64
STATE_BYTES = len(engine_protocol.CLEAN_EXIT)
#: How long to wait for an engine without a web process to exit.
ENGINE_EXIT_S = 5.0
_POLL_S = 0.02


def current_boot_id() -> str:
    """An id that changes with every start of the machine; empty where the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class InFlightFile:
    """
    The requests that one engine is running, in a file that outlives the web process.

    It is written for every attempt, so a write is one small `pwrite` without a sync: after a machine
    crash the file does not count anyway. The engine holds the same file open and writes LEFT when it
    exits because its web process is gone. Write errors are ignored: they must not stop the work.

    `leftover` is what the previous web process left in the file.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        file.parent.mkdir(parents=True, exist_ok=True)
        self.leftover = _take_over(file)
        # A new file: an engine that is still running writes into the old one.
        self.descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self.descriptor, fcntl.LOCK_EX)
        self._lines = 1
        self._free: list[int] = []
        self._write(0, f"{EngineState.NONE:<{STATE_BYTES}}{current_boot_id()}")

    @classmethod
    def for_base_model(cls, folder: Path, base_model: str) -> "InFlightFile":
        return cls(folder / hashlib.sha256(base_model.encode()).hexdigest()[:16])

    def set_engine_state(self, state: EngineState) -> None:
        with contextlib.suppress(OSError):
            os.pwrite(self.descriptor, f"{state:<{STATE_BYTES}}".encode(), 0)

    def add(self, names: Iterable[str]) -> Sequence[int]:
        """The engine has these now. Returns their lines, for `remove`."""
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

    def remove(self, lines: Sequence[int]) -> None:
        for line in lines:
            self._write(line, "")
            heapq.heappush(self._free, line)

    def close(self) -> None:
        """Delete the file: after a clean shutdown there is nothing to count."""
        self._file.unlink(missing_ok=True)
        os.close(self.descriptor)

    def _write(self, line: int, text: str) -> None:
        with contextlib.suppress(OSError):
            os.pwrite(self.descriptor, f"{text:<{LINE_BYTES - 1}}\n".encode(), line * LINE_BYTES)


def _take_over(file: Path) -> LeftoverState | None:
    """Read and delete an old file, once its engine has exited."""
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as old:
        still_running = not _wait_for_exit(descriptor)
        leftover = _parse(old.read(), still_running=still_running)
    file.unlink(missing_ok=True)
    return leftover


def _wait_for_exit(descriptor: int) -> bool:
    """Whether the old engine released the file within the timeout."""

    def is_released() -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    return poll(is_released, every_s=_POLL_S, timeout_s=ENGINE_EXIT_S)


def _parse(data: bytes, *, still_running: bool) -> LeftoverState | None:
    """The content of a file; None if it is not an in-flight file."""
    head, *lines = data.decode(errors="replace").splitlines() or [""]
    try:
        engine = EngineState(head[:STATE_BYTES].strip())
    except ValueError:
        return None
    return LeftoverState(
        # An engine that is still running has outlived its web process.
        engine=EngineState.LEFT if still_running and engine is EngineState.UP else engine,
        boot_id=head[STATE_BYTES:].strip(),
        in_flight=tuple(name for line in lines if (name := line.strip())),
    )
