"""
The running servers of this user on this machine.

Every server writes one file when it starts, again when it is ready, and deletes it when it stops:

    $XDG_STATE_HOME/tinkex/servers/HOST-PID.json      (default: ~/.local/state)

A file is trusted only if no other user can have written or read it, and if its process is still the
one that wrote it. The folder may be on a disk that several machines share, so files of other
machines are ignored, not deleted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import stat
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Literal

log = logging.getLogger("tinkex.local")

#: Proves to a server that its file could be read.
TOKEN_HEADER = "X-Tinkex-Local-Token"
#: Names the lease of a program that creates a session.
LEASE_HEADER = "X-Tinkex-Lease"

#: Larger files are not records.
MAX_BYTES = 64 * 1024

How = Literal["serve", "local"]


@dataclass(frozen=True, kw_only=True)
class RunningServer:
    """One running server, as it describes itself."""

    pid: int
    #: When the process started, in a form that only compares: ids of processes are reused.
    process_start: str
    #: The machine and its last boot.
    machine: str
    url: str
    #: The data folder, absolute.
    data: str
    #: `local` servers were started by `base_url="local"`, and stop when nobody uses them.
    how: How
    models: tuple[str, ...]
    #: Whether requests needed a key when the server started.
    keys: bool
    #: Seconds since 1970.
    started_s: float
    #: False while it starts. It gets ready once, and may have problems later.
    ready: bool = True
    #: TINKEX_LOCAL_ARGS of a local server.
    arguments: str = ""
    #: The file that its log goes to; None if that is a terminal or a pipe.
    log: str | None = None
    #: Allows local administration: adding models, reading the status.
    token: str = field(repr=False)


def state_folder(env: Mapping[str, str] = os.environ, home: Path | None = None) -> Path:
    """RuntimeError if this user has no home folder, as in some containers."""
    base = env.get("XDG_STATE_HOME")
    return (Path(base) if base else (home or Path.home()) / ".local/state") / "tinkex" / "servers"


def default_data_folder(env: Mapping[str, str] = os.environ) -> Path:
    """`$XDG_DATA_HOME/tinkex`, by default `~/.local/share/tinkex`."""
    base = env.get("XDG_DATA_HOME")
    return (Path(base) if base else Path("~/.local/share").expanduser()) / "tinkex"


def data_folder(env: Mapping[str, str] = os.environ) -> Path:
    """The data folder of servers that are given none."""
    return Path(env.get("TINKEX_DATA") or default_data_folder(env)).expanduser().resolve()


# -- writing -------------------------------------------------------------------------------------


def publish(server: RunningServer, env: Mapping[str, str] = os.environ) -> Path:
    """Write the file of a server; returns its path. OSError or RuntimeError if it cannot."""
    from tinkex.durable_files import write_file  # imported here: only servers need it

    folder = state_folder(env)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} is a link, or belongs to another user")
    folder.chmod(0o700)
    host = re.sub(r"[^\w.-]", "-", socket.gethostname())
    file = folder / f"{host}-{server.pid}.json"
    write_file(file, json.dumps(asdict(server)).encode())
    return file


# -- reading -------------------------------------------------------------------------------------


def running(env: Mapping[str, str] = os.environ, home: Path | None = None) -> list[RunningServer]:
    """The running servers of this user, oldest first. Deletes the files of ended ones."""
    if not hasattr(os, "getuid"):  # Windows, where no server runs
        return []
    try:
        folder = state_folder(env, home)
        about = folder.lstat()
    except (OSError, RuntimeError):
        return []
    if not _is_private(about, 0o700) or not stat.S_ISDIR(about.st_mode):
        log.warning(
            "%s is not used to find servers: it must be a folder of this user with mode 0700",
            folder,
        )
        return []
    found = [server for file in folder.glob("*.json") if (server := _read(file)) is not None]
    return sorted(found, key=lambda server: server.started_s)


def of_data(
    data: Path, env: Mapping[str, str] = os.environ, home: Path | None = None
) -> RunningServer | None:
    """The running server of a data folder."""
    wanted = str(data.expanduser().resolve())
    return next((server for server in running(env, home) if server.data == wanted), None)


class SeveralServers(LookupError):
    """Several servers run, and none is the obvious one."""

    def __init__(self, servers: Sequence[RunningServer]) -> None:
        super().__init__("several servers of this user run")
        self.servers = servers


def choose(servers: Sequence[RunningServer], data: Path) -> RunningServer | None:
    """The server to use if none was named: that of the default data folder, else the only one."""
    for server in servers:
        if server.data == str(data):
            return server
    if len(servers) > 1:
        raise SeveralServers(servers)
    return servers[0] if servers else None


def _read(file: Path) -> RunningServer | None:
    """The server of a file; None if it is not to be trusted, or not running."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with open(descriptor, "rb") as opened:
        about = os.fstat(descriptor)
        if not _is_private(about, 0o600) or not stat.S_ISREG(about.st_mode):
            log.warning("%s is ignored: it must be a file of this user with mode 0600", file)
            return None
        text = opened.read(MAX_BYTES)
    try:
        told = json.loads(text)
        known = {one.name for one in fields(RunningServer)}
        told["models"] = tuple(told["models"])
        server = RunningServer(**{name: told[name] for name in told if name in known})
        boot = server.machine.split(" ")[:2]
    except (ValueError, TypeError, KeyError, AttributeError):
        log.warning("%s is ignored: it does not describe a server", file)
        return None
    if server.machine != machine():
        # Another machine, a container of this one, or this machine before it was started again.
        here = machine().split(" ")[:2]
        if boot[:1] == here[:1] and boot[1:] != here[1:]:
            _delete(file)
        return None
    if not is_running(server):
        _delete(file)
        return None
    return server


def _delete(file: Path) -> None:
    with contextlib.suppress(OSError):  # a home folder that is read-only
        file.unlink(missing_ok=True)


def _is_private(about: os.stat_result, mode: int) -> bool:
    return about.st_uid == os.getuid() and stat.S_IMODE(about.st_mode) == mode


# -- processes -----------------------------------------------------------------------------------


def is_running(server: RunningServer) -> bool:
    """Whether the process of a server still runs, and is the same one."""
    return process_start(server.pid) == server.process_start


def process_start(pid: int) -> str | None:
    """When a process started; None if there is no such process, or it has ended."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if after_name[0] in "ZX" else after_name[19]
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
    except (ProcessLookupError, IndexError):
        return None
    return start_from_ps(pid)


def start_from_ps(pid: int) -> str | None:
    """The same on systems without /proc, such as macOS."""
    command = ["ps", "-o", "stat=", "-o", "lstart=", "-p", str(pid)]
    # The text is compared with that of other programs, which may have another language and zone.
    env = {**os.environ, "LC_ALL": "C", "TZ": "UTC"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    except OSError:
        return None
    state, _, started = done.stdout.strip().partition(" ")
    return None if state[:1] in ("", "Z") else started.strip()


def machine() -> str:
    """This machine, its last boot, and the container if processes are numbered there."""
    boot = namespace = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return f"{socket.gethostname()} {boot} {namespace}"
