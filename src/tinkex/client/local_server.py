"""
`base_url="local"`: a server on this machine, shared by the programs of this user.

    TINKEX_LOCAL_MODEL   what to serve: NAME, FOLDER or NAME=FOLDER (default: the embedded model)
    TINKEX_LOCAL_ARGS    more arguments for `tinkex serve`, as in a shell: --dtype bfloat16
    TINKEX_LOCAL_DATA    the server's data folder (default: that of `tinkex serve`)
    TINKEX_LOCAL_WAIT_S  how long it may take to start (default 600: it may download a model)
    TINKEX_LOCAL_KEEP_S  how long it stays after its last program (default 300)

The server of the data folder is used, whoever started it; if there is none, one is started. Every
program holds a lease (`tinkex.local.leases`), so that a server that this module started can stop
when it is no longer used, also after programs that were killed.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tinkex.client.errors import TinkerError
from tinkex.client.http.retry import NotYet, retrying_in_thread
from tinkex.client.settings import not_ready
from tinkex.local import leases, registry
from tinkex.local.control import ControlFailed, ask, status
from tinkex.local.leases import DEFAULT_KEEP_S, Lease
from tinkex.local.registry import RunningServer

log = logging.getLogger("tinkex.local")

READY = re.compile(r"^tinkex ready at (http://\S+)$", re.MULTILINE)
#: Lines of the server's log, which has them. Other lines show the progress of a download.
LOG_LINE = re.compile(r"^\d{4}-\d\d-\d\d ")
#: The line about a data folder of an earlier version (`server/registration.py`).
OLD_FOLDER = re.compile(r"(\S+ has runs and checkpoints of an earlier version\. .*)$")
POLL_S = 0.05
DEFAULT_WAIT_S = 600.0
#: A start that takes longer than this is worth a word.
SAY_AFTER_S = 1.0


@dataclass(frozen=True, kw_only=True)
class LocalSettings:
    """Which server to use or start. Programs with the same data folder share one."""

    model: str | None
    arguments: tuple[str, ...]
    data: Path
    wait_s: float = DEFAULT_WAIT_S
    keep_s: float = DEFAULT_KEEP_S
    #: Whether the user is told about a start or a load that takes long (`Settings.wait_notice_s`).
    tells_waits: bool = True
    #: The module of the command line.
    module: str = "tinkex.cli.main"

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> LocalSettings:
        data = env.get("TINKEX_LOCAL_DATA") or registry.data_folder(env)
        return cls(
            model=env.get("TINKEX_LOCAL_MODEL") or None,
            arguments=tuple(shlex.split(env.get("TINKEX_LOCAL_ARGS", ""))),
            data=Path(data).expanduser().resolve(),
            wait_s=_seconds("TINKEX_LOCAL_WAIT_S", env, DEFAULT_WAIT_S),
            keep_s=_seconds("TINKEX_LOCAL_KEEP_S", env, DEFAULT_KEEP_S),
        )

    def command(self) -> list[str]:
        """The arguments of `tinkex serve`."""
        models = [self.model] if self.model else []
        place = ["--local", "--host", "127.0.0.1", "--port", "0", "--data", str(self.data)]
        return ["serve", *models, *place, *self.arguments]


def _seconds(name: str, env: Mapping[str, str], default: float) -> float:
    text = env.get(name)
    try:
        seconds = float(text) if text else default
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise TinkerError(f"{name}={text!r} is not a number of seconds.")
    return seconds


class LocalServer:
    """A running server that this program uses; it runs at least until this object is released."""

    def __init__(
        self, url: str, lease: Lease, running: RunningServer | None, *, tells_waits: bool = True
    ) -> None:
        self.url = url
        self._tells_waits = tells_waits
        #: None if the server could not write its file: then others do not find it.
        self.running = running
        self._lease = lease

    @property
    def adds_models(self) -> bool:
        """Whether programs may add models. `tinkex serve` serves what it was given."""
        return self.running is not None and self.running.how == "local"

    def add_model(self, model: str, *, wait_s: float = DEFAULT_WAIT_S) -> str:
        """
        Make the server serve a NAME, FOLDER or NAME=FOLDER; returns the name. Blocks.

        TinkerError if it cannot.
        """
        if self.running is None:
            return model
        level = _level(self._tells_waits)
        log.log(
            level,
            "the local server does not serve %s yet: adding it. This loads the model, and first "
            "downloads it if this machine does not have it; at most %.0f s. Ctrl-C stops.",
            model,
            wait_s,
        )
        began = time.monotonic()
        try:
            added = ask(self.running, "models", add={"model": model}, timeout_s=wait_s)
        except ControlFailed as error:
            raise TinkerError(
                f"The local server at {self.url} cannot serve {model!r}: {error}"
            ) from error
        name = str(added["name"])
        log.log(level, "the local server serves %s after %.0f s.", name, time.monotonic() - began)
        return name

    @property
    def lease(self) -> str:
        """Names the lease of this program to the server."""
        return self._lease.name

    def release(self) -> None:
        """Allow the server to stop when no other program needs it. Later calls have no effect."""
        self._lease.release()


def attach(settings: LocalSettings | None = None) -> LocalServer:
    """The running server for these settings, or a new one. Blocks until it is ready."""
    settings = settings or LocalSettings.from_env()
    settings.data.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        # Waits for a server that is stopping.
        with leases.locked(settings.data):
            running = registry.of_data(settings.data)
            if running is None:
                return _start(settings)
            if not running.ready:
                raise TinkerError(not_ready(running))
            _check_fits(running, settings)
            if running.how == "serve":  # a local server does this itself
                leases.delete_ended(settings.data)
            lease = leases.take(settings.data, keep_s=settings.keep_s)
    except leases.NoFileLocks as error:
        raise TinkerError(str(error)) from error
    server = LocalServer(running.url, lease, running, tells_waits=settings.tells_waits)
    if settings.model is not None and not _serves(running, settings.model):
        try:
            server.add_model(settings.model, wait_s=settings.wait_s)
        except BaseException:
            server.release()
            raise
    return server


def hold(running: RunningServer, *, tells_waits: bool = True) -> LocalServer | None:
    """Use a server that was found. None if it has stopped since, or its folder is not writable."""
    data = Path(running.data)
    try:
        with leases.locked(data):
            if not registry.is_running(running):
                return None
            lease = leases.take(data, keep_s=LocalSettings.from_env().keep_s)
            return LocalServer(running.url, lease, running, tells_waits=tells_waits)
    except OSError as error:
        log.debug("no lease on the server at %s: %s", running.url, error)
        return None


def _check_fits(running: RunningServer, settings: LocalSettings) -> None:
    """Refuse a running server that has other settings than these."""
    wanted = shlex.join(settings.arguments)
    if wanted and wanted != running.arguments:
        has = f"TINKEX_LOCAL_ARGS={running.arguments!r}" if running.how == "local" else "its own"
        raise TinkerError(
            f"The server of the data folder {running.data} (process {running.pid}, {running.url}) "
            f"runs with other settings: {has}, and TINKEX_LOCAL_ARGS is {wanted!r} here. Stop it "
            f"with `tinkex stop {running.pid}`, unset TINKEX_LOCAL_ARGS, or set TINKEX_LOCAL_DATA "
            "to another folder."
        )


def _serves(running: RunningServer, model: str) -> bool:
    """Whether a server serves a NAME, FOLDER or NAME=FOLDER, as far as its name tells."""
    name, _, target = model.partition("=")
    if not target and Path(model).expanduser().is_dir():
        name = Path(model).expanduser().resolve().name
    told = status(running)
    return name in (running.models if told is None else [one["name"] for one in told["models"]])


def _start(settings: LocalSettings) -> LocalServer:
    lease = leases.take(settings.data, keep_s=settings.keep_s)
    out_path, log_path = settings.data / "local.out", settings.data / "local.log"
    process = None
    try:
        with out_path.open("wb") as out, log_path.open("wb") as log_file:
            process = subprocess.Popen(
                [sys.executable, "-m", settings.module, *settings.command()],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log_file,
                env={**os.environ, "TINKEX_LOCAL_ARGS": shlex.join(settings.arguments)},
                # Ctrl-C in the terminal must reach only the program; the server ends after it.
                start_new_session=True,
            )
        url = _wait_ready(process, out_path, log_path, settings)
    except BaseException:
        # Nobody uses it yet. If it stayed, the next program would find it half started.
        if process is not None:
            process.terminate()
            process.wait()
        lease.release()
        raise
    # Collects the exit status if the server ends before this program, to avoid a zombie process.
    threading.Thread(target=process.wait, name="tinkex-local", daemon=True).start()
    running = registry.of_data(settings.data)
    return LocalServer(url, lease, running, tells_waits=settings.tells_waits)


def _level(tells_waits: bool) -> int:
    """Of a line about a wait."""
    return logging.WARNING if tells_waits else logging.DEBUG


def _wait_ready(
    process: subprocess.Popen[bytes], out_path: Path, log_path: Path, settings: LocalSettings
) -> str:
    """The address, once the server is ready; says what takes long in the meantime."""
    began = time.monotonic()
    wait_s, level = settings.wait_s, _level(settings.tells_waits)
    said = False

    def look() -> str:
        nonlocal said
        ended = process.poll() is not None
        took_s = time.monotonic() - began
        for line in progress:
            if named := OLD_FOLDER.search(line):
                log.warning("%s", named[1])
            elif line.strip() and not LOG_LINE.match(line):
                log.log(level, "local server: %s", line.rstrip())
        if found := READY.search(out_path.read_text(errors="replace")):
            if said:
                log.log(level, "the local server is ready after %.0f s", took_s)
            return found[1]
        if took_s > SAY_AFTER_S and not said:
            said = True
            log.log(
                level,
                "starting a server on this machine (base_url='local'); its log is %s",
                log_path,
            )
        if ended:
            tail = "\n".join(log_path.read_text(errors="replace").splitlines()[-15:])
            raise TinkerError(
                f"The local server exited with status {process.returncode} before it was "
                f"ready. The end of its log ({log_path}):\n{tail}\n"
                "If a package is missing: pip install 'tinkex[server,engine]'."
            )
        if took_s > wait_s:
            raise TinkerError(
                f"The local server was not ready within {wait_s:g} s; see {log_path}. "
                "Set TINKEX_LOCAL_WAIT_S to wait longer."
            )
        raise NotYet(POLL_S)

    with log_path.open("r", errors="replace") as progress:
        return retrying_in_thread(look)
