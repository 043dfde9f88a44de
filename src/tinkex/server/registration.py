"""
A server among the other servers of its user: it takes over its data folder, and can be found.

* take_over      stops a local server without clients that holds the data folder
* Registration   the server's file in `tinkex.local.registry`, and the end of an unused local server
"""

import contextlib
import json
import logging
import os
import secrets
import shlex
import signal
import stat
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

from tinkex.local import control, leases, registry
from tinkex.local.registry import RunningServer
from tinkex.server.announcement import Facts
from tinkex.server.settings import Settings, SettingsError

log = logging.getLogger("tinkex.server.supervisor")


def take_over(settings: Settings) -> None:
    """Stop the local server that holds the data folder, if it has no clients."""
    found = registry.of_data(settings.folder)
    if found is None or found.how != "local" or found.pid == os.getpid():
        return
    try:
        control.stop(found)
    except control.HasClients as error:
        raise SettingsError(
            f"a local server (process {found.pid}, {found.url}) holds the data folder "
            f"{settings.folder}, and programs use it: {error.clients}.",
            hint="Wait until they have ended, or stop it with `tinkex stop --force "
            f"{found.pid}`. Or choose another folder with --data.",
        ) from error
    except control.NotResponding as error:
        raise SettingsError(
            f"a local server holds the data folder {settings.folder}: {error}.",
            hint=f"Try again, or stop it with `tinkex stop --force {found.pid}`. Its log is "
            f"{found.log}.",
        ) from error
    except control.StillRunning as error:
        raise SettingsError(
            f"a local server holds the data folder {settings.folder}, and {error}.",
            hint=f"Its log is {found.log}. `kill -9 {found.pid}` ends it; nothing is lost.",
        ) from error
    log.info("stopped the unused local server (process %d) that held %s", found.pid, found.data)


@dataclass(frozen=True, kw_only=True)
class Administration:
    """What the web process needs for the routes of local administration (`server/api/local.py`)."""

    #: Whoever can read the server's file has it, and may administer the server.
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    #: Whether the server was started by `base_url="local"`.
    local: bool

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))


class Registration:
    """How other programs of this user find this server."""

    def __init__(self, settings: Settings, *, local: bool) -> None:
        self._settings = settings
        self._file: Path | None = None
        self._started_s = time.time()
        self.administration = Administration(local=local)

    def publish(self, url: str, facts: Facts | None) -> None:
        """
        Write the server's file; without facts, the server is not ready yet.

        Without a file the server works, and is not found.
        """
        local = self.administration.local
        server = RunningServer(
            pid=os.getpid(),
            process_start=registry.process_start(os.getpid()) or "",
            machine=registry.machine(),
            url=url,
            data=str(self._settings.folder.resolve()),
            how="local" if local else "serve",
            models=tuple(model.name for model in facts.models) if facts else (),
            keys=facts.needs_keys if facts else False,
            started_s=self._started_s,
            ready=facts is not None,
            arguments=os.environ.get("TINKEX_LOCAL_ARGS", "") if local else "",
            log=_log_file(),
            token=self.administration.token,
        )
        try:
            self._file = registry.publish(server)
        except (OSError, RuntimeError) as error:
            log.warning("other programs will not find this server by themselves: %s", error)
        if local and facts is not None:
            leases.stop_when_unused(
                self._settings.folder,
                in_use=lambda keep_s: control.is_used_without_lease(server, keep_s),
                stop=lambda: os.kill(os.getpid(), signal.SIGTERM),
            )

    def withdraw(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.unlink(missing_ok=True)


def old_local_folders(settings: Settings) -> list[Path]:
    """Data folders of `base_url="local"` of earlier versions, which had one for each model."""
    return sorted(file.parent for file in (settings.folder / "local").glob("*/tinkex.db"))


def name_old_folders(settings: Settings, say: Callable[[str], None]) -> None:
    """Name the folders that were not imported yet, with the command that does it."""
    for folder in old_local_folders(settings):
        if not (folder / IMPORTED_FILE).exists():
            say(
                f"{folder} has runs and checkpoints of an earlier version. To have them here: "
                f"tinkex import {shlex.quote(str(folder))}"
            )


#: In an old data folder: it was imported.
IMPORTED_FILE = "imported.json"


def reachable_url(host: str, port: int) -> str:
    """The address for programs on this machine; a server on all addresses has the loopback one."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _log_file() -> str | None:
    """The file that standard error goes to, if it is one."""
    try:
        if stat.S_ISREG(os.fstat(sys.stderr.fileno()).st_mode):
            return os.readlink(f"/proc/self/fd/{sys.stderr.fileno()}")
    except (OSError, ValueError):
        pass
    return None
