"""
The supervisor: owns the listening socket, keeps a web process on it, passes signals on.

The socket is opened once, here, so connections that come while the web process is being started
again wait in its queue and are not refused. Light on purpose: what does little does not die.
"""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from types import FrameType

from tinkex.models.cache import plain_lines
from tinkex.models.resolve import DEFAULT_MODEL, ModelSource, resolve
from tinkex.server import processes
from tinkex.server.scheduler import crash_isolation
from tinkex.server.settings import Settings, SettingsError, is_loopback
from tinkex.server.store.folder_lock import HeldLock, lock_database, lock_folder

log = logging.getLogger("tinkex.server.supervisor")

# A web process that drains gets this much longer than it was told before it is killed.
PATIENCE_S = 5.0
BACKLOG = 2048
# Whether the locks are still held is looked at this often.
LOCKS_LOOKED_S = 5.0


class StartFailed(Exception):
    """The server could not begin; the text says why."""


def run(settings: Settings, *, announce: Callable[[str], None]) -> int:
    """Serve until SIGTERM or SIGINT; the exit status. `announce` gets the one line of "ready"."""
    processes.begin()
    processes.tell(settings.log_level)
    log.info(
        "tinkex %s begins with %s; all else is as by default", version("tinkex"), settings.changed()
    )
    for line in settings.lines():
        log.debug("setting %s", line)
    with contextlib.ExitStack() as stack:
        locks = [
            stack.enter_context(lock_folder(settings.folder)),
            stack.enter_context(lock_database(settings)),
        ]
        if not is_loopback(settings.host):
            settings.check_reachable(has_keys=_has_keys(settings))
        listening = stack.enter_context(open_socket(settings))
        sources = [
            resolve(spec, progress=plain_lines(sys.stderr))
            for spec in settings.models or (DEFAULT_MODEL,)
        ]
        _check_names(sources)
        host, port = listening.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{port}"
        supervisor = Supervisor(settings, sources, listening, [one for one in locks if one])
        return supervisor.run(on_ready=lambda: announce(f"tinkex ready at {url}"))


class Supervisor:
    """Keeps one web process alive."""

    def __init__(
        self,
        settings: Settings,
        sources: Sequence[ModelSource],
        listening: socket.socket,
        locks: Sequence[HeldLock],
    ) -> None:
        self._settings = settings
        self._sources = sources
        self._listening = listening
        self._locks = locks
        self._stopping = False
        self._lost_lock = False
        self._child: subprocess.Popen[bytes] | None = None
        #: The last web process died of what it did.
        self._crashed = False

    def run(self, *, on_ready: Callable[[], None]) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        threading.Thread(target=self._watch_locks, name="tinkex-locks", daemon=True).start()
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
            steady = processes.web_was_well(ready=well, lived_s=lived_s)
            wait_s = processes.WEB.wait_s(wait_s, well=steady)
            log.error("the web process died; starting it again in %.1f s", wait_s)
            self._pause(wait_s)
        log.info("stopped; what was accepted and not finished goes on at the next start")
        return 1 if self._lost_lock else 0

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
            self._crashed = crash_isolation.crashed(status, oom_kills=oom_kills() - kills)
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

    def _watch_locks(self) -> None:
        """A server that does not hold its folder any more may not be the only one: it stops."""
        while not self._stopping:
            time.sleep(LOCKS_LOOKED_S)
            for lock in self._locks:
                if (problem := lock.problem()) is not None and not self._stopping:
                    log.error(
                        "stopping, because another server may start on this data: %s", problem
                    )
                    self._lost_lock = True
                    self._stop(signal.SIGTERM, None)

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
    from tinkex.server.store import DatabaseRefused
    from tinkex.server.store.database import has_keys

    try:
        return has_keys(settings.db_url)
    except DatabaseRefused as refused:
        raise StartFailed(str(refused)) from refused


def _check_names(sources: Sequence[ModelSource]) -> None:
    names = [source.name for source in sources]
    for name in names:
        if names.count(name) > 1:
            raise SettingsError(
                f"two models are to be served as {name}.",
                hint="Give one of them another name: NAME=FOLDER.",
            )
