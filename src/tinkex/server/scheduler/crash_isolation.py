"""
Whether a death counts against the requests that were with an engine when it happened. Pure.

A death that the web process saw, it counts itself. These rules are for what its successor finds: a
web process that ended without a word, and requests that were with an engine at that moment. Whoever
restarts a server, or kills its web process, must not fail anybody's work by it.
"""

import asyncio
import contextlib
import enum
import fcntl
import hashlib
import heapq
import os
import signal
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tinkex.wire import engine_protocol

#: Ends of a web process that somebody else brought about.
_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


class EngineState(enum.StrEnum):
    """What an engine was doing last, as far as it is written down."""

    NONE = "none"  # not up yet, or seen to end and counted by whoever saw it
    UP = "up"  # it worked
    LEFT = "left"  # it outlived its web process, and left because that was gone


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftoverState:
    """What a web process left behind of one engine."""

    engine: EngineState
    #: Of the machine: another one after each start of it.
    boot_id: str
    #: Who was with the engine: request ids, and names of other work.
    inside: tuple[str, ...]


def crashed(status: int, *, oom_kills: int) -> bool:
    """
    Whether a web process that nobody had told to stop died of what it did.

    `status` is its exit status, negative for a signal; `oom_kills` is how many processes the system
    killed for memory while it lived. Without one of those, a SIGKILL is somebody's hand.
    """
    if status >= 0 or -status not in _FROM_OUTSIDE:
        return True
    return -status == signal.SIGKILL and oom_kills > 0


def counts(remains: LeftoverState, *, boot_id: str, web_crashed: bool) -> bool:
    """Whether what was with this engine is to be counted as lost with it once more."""
    if remains.boot_id != boot_id:
        return False  # the machine went down with everything on it
    if remains.engine is EngineState.UP:
        return True  # it died as well, and nobody was left to see it
    # An engine that was well at the end is no witness against its work, unless that came back to
    # the web process and broke it there.
    return remains.engine is EngineState.LEFT and web_crashed


# MERGED: Who is with an engine, in a file that outlives the web process. Written at every hand-out, so a word costs one small write to the system's memory and nothing is synced: a machine that goes down blames nobody anyway (`blame`). The engine holds the same file open and says there that it leaves because its web process is gone. Nothing here may stop the work: what cannot be written is left out.


# One line each: the engine's state and the machine's start first, then a request or blanks.
LINE = 64
STATE = len(engine_protocol.LEFT)
#: How long an engine without its web process may take to leave before nobody waits for it.
LEAVES_S = 5.0
_LOOK_S = 0.02


def boot_id() -> str:
    """Another one after each start of the machine; empty where the system does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class InFlightFile:
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
        self._write(0, f"{EngineState.NONE:<{STATE}}{boot_id()}")

    @classmethod
    def of(cls, folder: Path, base_model: str) -> "InFlightFile":
        return cls(folder / hashlib.sha256(base_model.encode()).hexdigest()[:16])

    def engine(self, state: EngineState) -> None:
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


def _taken_over(file: Path) -> LeftoverState | None:
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


def _parsed(data: bytes, *, stays: bool) -> LeftoverState | None:
    """What a file says; nothing, if it is none of ours."""
    head, *lines = data.decode(errors="replace").splitlines() or [""]
    try:
        engine = EngineState(head[:STATE].strip())
    except ValueError:
        return None
    return LeftoverState(
        # One that is still there has outlived its web process.
        engine=EngineState.LEFT if stays and engine is EngineState.UP else engine,
        boot_id=head[STATE:].strip(),
        inside=tuple(name for line in lines if (name := line.strip())),
    )


# MERGED: Who is with an engine together, so that one that kills it is found and the others are not blamed. An engine takes everything with it that it was working on. What was lost once is simply tried again: most deaths have nothing to do with the work. What was lost twice is a suspect, and is tried apart from everybody else, alone or at first in small groups. What dies alone is the culprit; the others are cleared. Counts outlive this process: `Execution` writes them down when an engine dies, and a roll tells the next process who was with an engine when this one ended without a word.


#: Lost so often, the last time alone: it is not tried again.
MAX_CRASHES = 3
#: Lost so often: tried apart from the others.
ISOLATE_AFTER = MAX_CRASHES - 1
#: So many suspects are tried one by one at once; more are narrowed down, this many groups at a time.
MAX_SINGLY = 16
GROUPS = 8
#: On the roll, work that is no request.
OTHER_WORK = ("snapshot",)


def width(suspects: int, deaths: int) -> int:
    """How many suspects run together, of so many that were lost so often."""
    if suspects <= MAX_SINGLY:
        return 1
    return max(1, int(suspects / GROUPS ** (deaths - ISOLATE_AFTER + 1)))


@dataclass(slots=True, eq=False)
class Attempt:
    """One turn of a model, or one sample, with an engine."""

    deaths: int
    #: Nobody else was with the engine at any time of this visit.
    alone: bool = True
    names: Sequence[str] = OTHER_WORK
    lines: Sequence[int] = ()
    _enter: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_suspect(self) -> bool:
        return self.deaths >= ISOLATE_AFTER


class CrashIsolation:
    """The visitors of one base model's engine, in the order in which they came."""

    def __init__(self, roll: InFlightFile | None = None) -> None:
        self._roll = roll
        self._deaths: dict[str, int] = {}
        #: Found guilty by an earlier process, with the reason.
        self._condemned: dict[str, str] = {}
        self._inside: set[Attempt] = set()
        self._suspects_inside = 0
        self._waiting: deque[Attempt] = deque()
        self._kept_out: set[str] = set()

    def deaths(self, request_id: str) -> int:
        """How often this request was with an engine that died."""
        return self._deaths.get(request_id, 0)

    def keeps_out(self, request_id: str) -> bool:
        """Whether it waits because suspects are tried, or because it is one."""
        return request_id in self._kept_out

    @property
    def counted(self) -> Mapping[str, int]:
        """Everybody who was lost, and how often."""
        return self._deaths

    def remember(self, request_id: str, deaths: int, *, reason: str = "") -> None:
        """It was lost so often before; with a reason it is what killed the engines."""
        self._deaths[request_id] = deaths
        if reason:
            self._condemned[request_id] = reason

    def condemned(self, request_id: str) -> str | None:
        """Why it is not tried again, if it is not."""
        return self._condemned.get(request_id)

    def lost(self, request_id: str, visit: Attempt, *, times: int = 1) -> bool:
        """A request was lost with its engine; whether it is the one that kills it."""
        deaths = self._deaths[request_id] = self.deaths(request_id) + times
        guilty = visit.alone and deaths >= MAX_CRASHES
        if guilty:
            # Whoever shared an engine with it was lost because of it.
            self._deaths.clear()
        return guilty

    def over(self, request_id: str) -> None:
        """A request has its result."""
        self._deaths.pop(request_id, None)
        self._condemned.pop(request_id, None)

    @contextlib.asynccontextmanager
    async def visit(self, *request_ids: str) -> AsyncIterator[Attempt]:
        """With the engine, once those may come in who have been lost as often as these."""
        deaths = max(map(self.deaths, request_ids), default=0)
        visit = Attempt(deaths, names=request_ids or OTHER_WORK)
        self._waiting.append(visit)
        self._let_in()
        try:
            if not visit._enter.is_set():
                self._kept_out.update(request_ids)
                await visit._enter.wait()
                self._kept_out.difference_update(request_ids)
            yield visit
        finally:
            self._kept_out.difference_update(request_ids)
            if visit in self._inside:
                self._inside.discard(visit)
                self._suspects_inside -= visit.is_suspect
            else:
                self._waiting.remove(visit)
            if self._roll is not None:
                self._roll.leave(visit.lines)
            self._let_in()

    def _let_in(self) -> None:
        """Strictly in order: suspects keep nobody out for ever, and are not kept out either."""
        while self._waiting and self._may_enter(self._waiting[0]):
            visit = self._waiting.popleft()
            if self._inside:
                visit.alone = False
                # Of several, none is alone any more.
                if len(self._inside) == 1:
                    next(iter(self._inside)).alone = False
            self._inside.add(visit)
            self._suspects_inside += visit.is_suspect
            if self._roll is not None:
                visit.lines = self._roll.enter(visit.names)
            visit._enter.set()

    def _may_enter(self, visit: Attempt) -> bool:
        if not visit.is_suspect:
            return not self._suspects_inside
        if len(self._inside) > self._suspects_inside:
            return False
        suspects = self._suspects_inside + sum(other.is_suspect for other in self._waiting)
        return len(self._inside) < width(suspects, visit.deaths)
