"""
The supervisor: owns the listening socket, keeps a web process on it, passes signals on.

The socket is opened once, here, so connections that come while the web process is being started
again wait in its queue and are not refused. Light on purpose: what does little does not die.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import TextIO

from tinkex.models.cache import plain_lines
from tinkex.models.resolve import DEFAULT_MODEL, ModelSource, resolve
from tinkex.server import blame, logs, restarts
from tinkex.server.settings import Settings, SettingsError, is_loopback

log = logging.getLogger("tinkex.server.run")

# A web process that drains gets this much longer than it was told before it is killed.
PATIENCE_S = 5.0
BACKLOG = 2048
# The GNU library gives each of many threads a heap of its own, and what one of them frees is of no
# use to the others: memory would grow for hours.
HEAPS = {"MALLOC_ARENA_MAX": "2"}
LOCK_FILE = "server.lock"
# Training data is nobody else's on this machine. A folder that was there before stays as it is.
PRIVATE = 0o700


class StartFailed(Exception):
    """The server could not begin; the text says why."""


def run(settings: Settings, *, announce: Callable[[str], None]) -> int:
    """Serve until SIGTERM or SIGINT; the exit status. `announce` gets the one line of "ready"."""
    logs.begin()
    logs.tell(settings.log_level)
    log.info(
        "tinkex %s begins with %s; all else is as by default", version("tinkex"), settings.changed()
    )
    for line in settings.lines():
        log.debug("setting %s", line)
    if not is_loopback(settings.host):
        settings.check_reachable(has_keys=_has_keys(settings))
    with (
        hold_folder(settings.folder),
        hold_database(settings),
        open_socket(settings) as listening,
    ):
        sources = [
            resolve(spec, progress=plain_lines(sys.stderr))
            for spec in settings.models or (DEFAULT_MODEL,)
        ]
        _check_names(sources)
        host, port = listening.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{port}"
        supervisor = Supervisor(settings, sources, listening)
        return supervisor.run(on_ready=lambda: announce(f"tinkex ready at {url}"))


class Supervisor:
    """Keeps one web process alive."""

    def __init__(
        self, settings: Settings, sources: Sequence[ModelSource], listening: socket.socket
    ) -> None:
        self._settings = settings
        self._sources = sources
        self._listening = listening
        self._stopping = False
        self._child: subprocess.Popen[bytes] | None = None
        #: The last web process died of what it did.
        self._crashed = False

    def run(self, *, on_ready: Callable[[], None]) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        wait_s: float | None = None
        ready = False
        while not self._stopping:
            began_s = time.monotonic()
            well = self._live_once(first=not ready, on_ready=on_ready)
            ready = ready or well
            if self._stopping:
                break
            if not ready:
                raise StartFailed("the web process ended before it was ready; its log is above")
            lived_s = time.monotonic() - began_s
            steady = restarts.web_was_well(ready=well, lived_s=lived_s)
            wait_s = restarts.WEB.wait_s(wait_s, well=steady)
            log.error("the web process died; starting it again in %.1f s", wait_s)
            self._pause(wait_s)
        log.info("stopped; what was accepted and not finished goes on at the next start")
        return 0

    def _live_once(self, *, first: bool, on_ready: Callable[[], None]) -> bool:
        """From start to death of one web process; whether it got ready."""
        kills = oom_kills()
        heard, told = os.pipe()
        # Nothing is ever written to this one: when the supervisor is gone, it ends.
        lifeline, held = os.pipe()
        try:
            child = subprocess.Popen(
                self._command(told, lifeline),
                pass_fds=(self._listening.fileno(), told, lifeline),
                # Not as an argument: a database URL may hold a password, and anybody sees those.
                stdin=subprocess.PIPE,
                # Standard output belongs to the line that says "ready".
                stdout=sys.stderr.fileno(),
                # Signals are passed on from here; a Ctrl-C must not reach it a second time.
                process_group=0,
                env={**HEAPS, **os.environ},
            )
            self._child = child
            _tell(child, self._settings.to_json())
            if self._stopping:
                child.send_signal(signal.SIGTERM)
            os.close(told)
            with os.fdopen(heard) as pipe:
                word, _, reason = pipe.read().partition("\n")
            if word == "ready" and first and not self._stopping:
                on_ready()
            status = child.wait()
            self._crashed = blame.crashed(status, oom_kills=oom_kills() - kills)
        finally:
            self._child = None
            os.close(lifeline)
            os.close(held)
        if word == "failed" and first and not self._stopping:
            raise StartFailed(reason.strip())
        return word == "ready"

    def _command(self, report_descriptor: int, lifeline: int) -> list[str]:
        command = [
            *(sys.executable, "-m", "tinkex.server.web"),
            *("--fd", str(self._listening.fileno())),
            *("--report-fd", str(report_descriptor)),
            *("--lifeline-fd", str(lifeline)),
        ]
        if self._crashed:
            command.append("--after-crash")
        for source in self._sources:
            command += ["--model", source.name, str(source.folder)]
        return command

    def _pause(self, seconds: float) -> None:
        """Sleep, but not through a signal."""
        until_s = time.monotonic() + seconds
        while not self._stopping and time.monotonic() < until_s:
            time.sleep(0.05)

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        child = self._child
        if not self._stopping and child is not None:
            # Draining has a limit, whatever hangs.
            timer = threading.Timer(self._settings.drain_s + PATIENCE_S, child.kill)
            timer.daemon = True
            timer.start()
        self._stopping = True
        if child is not None:
            child.send_signal(signal.SIGTERM)


def oom_kills() -> int:
    """How many processes this machine has killed for memory since it started."""
    with contextlib.suppress(OSError), Path("/proc/vmstat").open() as figures:
        return sum(int(line.split()[1]) for line in figures if line.startswith("oom_kill "))
    return 0


def _tell(child: "subprocess.Popen[bytes]", text: str) -> None:
    if child.stdin is not None:
        # A child that is dead already is noticed by its report.
        with contextlib.suppress(BrokenPipeError), child.stdin as pipe:
            pipe.write(text.encode())


@contextlib.contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """One server at a time for each data folder; the system frees it however we end."""
    try:
        folder.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        lock = (folder / LOCK_FILE).open("a+")
    except OSError as error:
        raise SettingsError(
            f"the data folder {folder} cannot be written: {error.strerror}.",
            hint="Choose another one with --data.",
        ) from error
    with lock:
        if (holder := _taken(lock)) is not None:
            raise SettingsError(
                f"another server (process {holder}) holds the data folder {folder}.",
                hint="Use that one, stop it, or choose another folder with --data.",
            )
        yield


@contextlib.contextmanager
def hold_database(settings: Settings) -> Iterator[None]:
    """
    One server at a time for each database file, wherever it is: with `--db` two folders may name it.

    PostgreSQL is held by the connection that writes.
    """
    file = database_file(settings.db_url)
    if file is None:
        yield
        return
    try:
        file.parent.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        descriptor = os.open(file.with_name(f"{file.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
        lock = os.fdopen(descriptor, "a+")
    except OSError as error:
        raise SettingsError(
            f"the database {file} cannot be held: {error.strerror}.",
            hint="Choose another one with --db, or leave it out for one in the data folder.",
        ) from error
    with lock:
        if (holder := _taken(lock)) is not None:
            raise SettingsError(
                f"another server (process {holder}) holds the database {file}.",
                hint="Use that server, stop it, or choose another database with --db.",
            )
        yield


def database_file(db_url: str) -> Path | None:
    """The file behind a URL of SQLite, whatever links lead to it; None for any other database."""
    backend, _, rest = db_url.partition("://")
    name = rest.partition("?")[0].removeprefix("/").removeprefix("file:")
    if backend.partition("+")[0] != "sqlite" or name in ("", ":memory:"):
        return None
    return Path(name).resolve()


def _taken(lock: TextIO) -> str | None:
    """Hold a lock; the process that has it already, if one does."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        return lock.read().strip() or "unknown"
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    return None


def holder_of(folder: Path) -> str | None:
    """The process that holds a data folder; None when nobody does."""
    try:
        lock = (folder / LOCK_FILE).open()
    except FileNotFoundError:
        return None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return lock.read().strip() or "unknown"
        return None


def open_socket(settings: Settings) -> socket.socket:
    """The listening socket; connections wait in it from now on."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise SettingsError(
            f"cannot listen on {settings.host} port {settings.port}: {error.strerror}.",
            hint="Choose another port with --port; 0 picks a free one.",
        ) from error


def _has_keys(settings: Settings) -> bool:
    """Asked before anything is opened to the world; only then does this process speak SQL."""
    from tinkex.server.store import DatabaseRefused, open_store

    try:
        store = open_store(
            db_url=settings.db_url, storage_url=settings.storage_url, folder=settings.folder
        )
    except DatabaseRefused as refused:
        raise StartFailed(str(refused)) from refused
    try:
        return asyncio.run(store.keys.any())
    finally:
        store.close()


def _check_names(sources: Sequence[ModelSource]) -> None:
    names = [source.name for source in sources]
    for name in names:
        if names.count(name) > 1:
            raise SettingsError(
                f"two models are to be served as {name}.",
                hint="Give one of them another name: NAME=FOLDER.",
            )
