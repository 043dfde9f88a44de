"""
The supervisor: owns the listening socket, restarts the web process, and forwards signals.

The socket is opened once, here: while the web process restarts, new connections queue in the socket
and are not refused. The supervisor does as little as possible, so that it does not crash itself.
"""

import contextlib
import errno
import http.client
import json
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
from types import FrameType
from urllib.parse import urlsplit

from tinkex.local import registry
from tinkex.models.cache import Progress
from tinkex.models.resolve import DEFAULT_MODEL, ModelSource, resolve
from tinkex.server import process_setup
from tinkex.server.announcement import Facts
from tinkex.server.folder_lock import HeldLock, lock_database, lock_folder
from tinkex.server.registration import (
    Administration,
    Registration,
    name_old_folders,
    reachable_url,
    take_over,
)
from tinkex.server.retry import Backoff, Crashed, poll, retry_blocking
from tinkex.server.settings import Settings, SettingsError, is_loopback

log = logging.getLogger("tinkex.server.supervisor")

# A stopping web process is killed this long after its drain time has passed.
KILL_GRACE_S = 5.0
BACKLOG = 2048
LOCK_CHECK_INTERVAL_S = 5.0
# While the web process restarts, new connections queue in the listening socket.
RESTART_BACKOFF = Backoff(first_s=0.2, max_s=5.0, immediate=True)
# Limits of the question to whoever uses the port.
PROBE_TIMEOUT_S = 1.0
MAX_PROBE_BYTES = 64 * 1024
# A web process that crashes sooner after its start may do so again.
STABLE_S = 3.0


class StartFailed(Exception):
    """The server could not start; the text says why, and the hint what to do."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


#: Called once with the URL and the facts of a server that is ready.
Announce = Callable[[str, Facts], None]
#: Gives a callback that shows the progress of downloads.
ShowFetching = Callable[[], contextlib.AbstractContextManager[Progress]]


def run(
    settings: Settings,
    *,
    announce: Announce,
    show_fetching: ShowFetching,
    local: bool = False,
    web: bool = False,
) -> int:
    """
    Serve until SIGTERM or SIGINT; return the exit status.

    A `local` server stops by itself when no program has used it for a while. With `web`, it has no
    engines: workers on the same database do the work.
    """
    if web:
        settings.check_shared("tinkex web")
    process_setup.setup_logging()
    process_setup.set_log_level(settings.log_level)
    changed = settings.changed() or "default settings"
    log.info("starting tinkex %s with %s", version("tinkex"), changed)
    for line in settings.lines():
        log.debug("setting %s", line)
    take_over(settings)
    name_old_folders(settings, log.warning)
    with contextlib.ExitStack() as stack:
        locks = [
            stack.enter_context(lock_folder(settings.folder)),
            stack.enter_context(lock_database(settings)),
        ]
        if not is_loopback(settings.host):
            settings.check_reachable(has_keys=_has_keys(settings))
        listening = stack.enter_context(open_socket(settings))
        host, port = listening.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{port}"
        registration = Registration(settings, local=local)
        stack.callback(registration.withdraw)
        # Before it is ready: a download, a large model or a full disk may take long.
        registration.publish(reachable_url(host, port), None)
        with show_fetching() as progress:
            specs = settings.models or (() if web else (DEFAULT_MODEL,))
            sources = [resolve(spec, progress=progress) for spec in specs]
        _check_names(sources)
        supervisor = Supervisor(
            settings,
            sources,
            listening,
            [one for one in locks if one],
            administration=registration.administration,
            web=web,
        )

        def on_ready(facts: Facts) -> None:
            registration.publish(reachable_url(host, port), facts)
            announce(url, facts)

        return supervisor.run(on_ready=on_ready)


class Supervisor:
    """Runs one web process, and restarts it with backoff when it crashes."""

    def __init__(
        self,
        settings: Settings,
        sources: Sequence[ModelSource],
        listening: socket.socket,
        locks: Sequence[HeldLock],
        *,
        administration: Administration,
        web: bool = False,
    ) -> None:
        self._web = web
        self._settings = settings
        self._administration = administration
        self._sources = sources
        self._listening = listening
        self._locks = locks
        self._stopping = False
        self._lost_lock = False
        #: Whether any web process got ready. Before that, a crash ends the server.
        self._was_ready = False
        self._child: subprocess.Popen[bytes] | None = None
        #: The exit status of the last web process; None before the first one.
        self._last_status: int | None = None

    def run(self, *, on_ready: Callable[[Facts], None]) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        threading.Thread(target=self._watch_locks, name="tinkex-locks", daemon=True).start()
        retry_blocking(
            lambda: self._run_until_crash(on_ready),
            RESTART_BACKOFF,
            should_retry=lambda error: isinstance(error, Crashed),
            on_retry=lambda error, wait_s: log.error("%s; restarting it in %.1f s", error, wait_s),
            sleep=self._pause,
        )
        log.info("stopped; accepted requests that are not finished run after the next start")
        return 1 if self._lost_lock else 0

    def _run_until_crash(self, on_ready: Callable[[Facts], None]) -> None:
        """Run a web process; returns when the server is stopped, raises Crashed otherwise."""
        if self._stopping:
            return
        began_s = time.monotonic()
        ready = self._run_once(first=not self._was_ready, on_ready=on_ready)
        self._was_ready = self._was_ready or ready
        if self._stopping:
            return
        if not self._was_ready:
            raise StartFailed(
                "the web process exited before it was ready; the log lines above say why"
            )
        stable = ready and time.monotonic() - began_s > STABLE_S
        raise Crashed("the web process crashed", stable=stable)

    def _run_once(self, *, first: bool, on_ready: Callable[[Facts], None]) -> bool:
        """Run one web process until it exits; return whether it got ready."""
        report_reader, report_writer = os.pipe()
        # Nothing is written to this pipe. It closes when the supervisor exits, for any reason.
        lifeline_reader, lifeline_writer = os.pipe()
        try:
            child = subprocess.Popen(
                self._command(report_writer, lifeline_reader),
                pass_fds=(self._listening.fileno(), report_writer, lifeline_reader),
                # Settings go through standard input: a database URL may contain a password, and
                # command lines are visible to all users.
                stdin=subprocess.PIPE,
                # Standard output is reserved for the "ready" line.
                stdout=sys.stderr.fileno(),
                # The supervisor forwards signals; Ctrl-C must not reach the child a second time.
                process_group=0,
            )
            self._child = child
            self._send_settings(child)
            if self._stopping:
                child.send_signal(signal.SIGTERM)
            os.close(report_writer)
            with os.fdopen(report_reader) as pipe:
                word, _, content = pipe.read().partition("\n")
            if word == "ready" and first and not self._stopping:
                on_ready(Facts.from_json(content))
            self._last_status = child.wait()
        finally:
            self._child = None
            os.close(lifeline_reader)
            os.close(lifeline_writer)
        if word == "failed" and not self._stopping:
            failure = StartFailed(**json.loads(content))
            if first:
                raise failure
            log.error("%s", failure)
        return word == "ready"

    def _send_settings(self, child: "subprocess.Popen[bytes]") -> None:
        if child.stdin is not None:
            lines = f"{self._settings.to_json()}\n{self._administration.to_json()}\n"
            # The report pipe shows when the child has already exited.
            with contextlib.suppress(BrokenPipeError), child.stdin as pipe:
                pipe.write(lines.encode())

    def _command(self, report_descriptor: int, lifeline: int) -> list[str]:
        command = [
            *(sys.executable, "-m", "tinkex.server"),
            *("--fd", str(self._listening.fileno())),
            *("--report-fd", str(report_descriptor)),
            *("--lifeline-fd", str(lifeline)),
        ]
        if self._web:
            command.append("--web")
        if self._last_status is not None:
            command.append(f"--last-status={self._last_status}")
        for source in self._sources:
            command += ["--model", source.name, str(source.folder)]
        return command

    def _watch_locks(self) -> None:
        """Stop the server when it loses a lock: another server may use the same data then."""

        def is_over() -> bool:
            problems = [problem for lock in self._locks if (problem := lock.problem()) is not None]
            if problems and not self._stopping:
                log.error(
                    "stopping, because another server may start on this data: %s", problems[0]
                )
                self._lost_lock = True
                self._stop(signal.SIGTERM, None)
            return self._stopping

        poll(is_over, every_s=LOCK_CHECK_INTERVAL_S)

    def _pause(self, seconds: float) -> None:
        """Sleep, but return early when the server is stopped."""
        poll(lambda: self._stopping, every_s=0.05, timeout_s=seconds)

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        child = self._child
        if not self._stopping and child is not None:
            # Kill the child if it hangs while it drains.
            timer = threading.Timer(self._settings.drain_s + KILL_GRACE_S, child.kill)
            timer.daemon = True
            timer.start()
        self._stopping = True
        if child is not None:
            child.send_signal(signal.SIGTERM)


def open_socket(settings: Settings) -> socket.socket:
    """Open the listening socket; connections queue in it from now on."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)
    except OSError as error:
        hint = "Choose another port with --port; 0 picks a free one."
        # Python appends the address to the reason.
        reason = (error.strerror or str(error)).partition(" (while")[0]
        message = f"cannot listen on {settings.host} port {settings.port}: {reason}."
        if error.errno == errno.EADDRINUSE:
            message, hint = _port_in_use(settings, message, hint)
        raise SettingsError(message, hint=hint) from error


def _port_in_use(settings: Settings, message: str, hint: str) -> tuple[str, str]:
    """The error and the advice for a port that another program has; it may be a tinkex server."""
    for server in registry.running():
        if urlsplit(server.url).port == settings.port:
            message = (
                f"port {settings.port} is in use by your tinkex server at {server.url} (process "
                f"{server.pid}, data folder {server.data})."
            )
            use = f"Use that server: export TINKER_BASE_URL={server.url}. Or stop it with"
            return message, f"{use} `tinkex stop {server.pid}`. {hint}"
    if _answers_as_tinkex(settings.host, settings.port):
        message = (
            f"port {settings.port} is in use by another tinkex server. It belongs to another "
            "user, or was started with another XDG_STATE_HOME."
        )
    return message, hint


def _answers_as_tinkex(host: str, port: int) -> bool:
    """Whether a server at this port answers /readyz as this one does."""
    connection = http.client.HTTPConnection(host, port, timeout=PROBE_TIMEOUT_S)
    try:
        connection.request("GET", "/readyz")
        answer = json.loads(connection.getresponse().read(MAX_PROBE_BYTES))
    except (OSError, ValueError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return isinstance(answer, dict) and answer.get("status") in ("ready", "not ready")


def _has_keys(settings: Settings) -> bool:
    """Whether the database has API keys. The only database access of this process."""
    from tinkex.server.store import DatabaseRefused
    from tinkex.server.store.connections import has_keys

    try:
        return has_keys(settings.db_url)
    except DatabaseRefused as refused:
        raise StartFailed(str(refused)) from refused


def _check_names(sources: Sequence[ModelSource]) -> None:
    names = [source.name for source in sources]
    for name in names:
        if names.count(name) > 1:
            raise SettingsError(
                f"two models have the name {name}.",
                hint="Give one of them another name: NAME=FOLDER.",
            )
