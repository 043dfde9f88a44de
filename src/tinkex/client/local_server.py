"""
`base_url="local"`: an embedded server on this machine, shared by programs; ends with the last one.

    TINKEX_LOCAL_MODEL   what to serve: NAME, FOLDER or NAME=FOLDER (default: the embedded model)
    TINKEX_LOCAL_ARGS    more arguments for `tinkex serve`, as in a shell: --dtype bfloat16
    TINKEX_LOCAL_DATA    the server's data folder (default: one per model, in the data home)
    TINKEX_LOCAL_WAIT_S  how long it may take to start (default 600: it may download a model)

How it ends: every client holds a shared lock on the server's lease file, and a thread in the server
waits for an exclusive lock. The kernel releases the locks of a process when it ends, so the server
stops after the last client even if that was killed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from tinkex.client.errors import TinkerError
from tinkex.client.http.retry import NotYet, retrying_in_thread

READY = re.compile(r"^tinkex ready at (http://\S+)$", re.MULTILINE)
#: Lines of the server's log that do not show its progress.
ROUTINE_LINES = re.compile(r" (tinkex\.server\.supervisor setting|uvicorn)")
POLL_S = 0.05
DEFAULT_WAIT_S = 600.0
#: A server that is stopping has ended after this long.
SHUTDOWN_WAIT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class LocalSettings:
    """Which server to run. Programs with the same data folder share one."""

    model: str | None
    arguments: tuple[str, ...]
    data: Path
    wait_s: float = DEFAULT_WAIT_S
    #: The module of the command line.
    module: str = "tinkex.cli.main"

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> LocalSettings:
        model = env.get("TINKEX_LOCAL_MODEL") or None
        share = env.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
        name = "default"
        if model:
            # Readable, and unique for folders that have the same last name.
            slug = re.sub(r"[^A-Za-z0-9._-]+", "-", model).strip("-")[-40:]
            name = f"{slug}-{hashlib.sha256(model.encode()).hexdigest()[:8]}"
        data = env.get("TINKEX_LOCAL_DATA") or str(Path(share) / "tinkex" / "local" / name)
        return cls(
            model=model,
            arguments=tuple(shlex.split(env.get("TINKEX_LOCAL_ARGS", ""))),
            data=Path(data).expanduser().resolve(),
            wait_s=float(env.get("TINKEX_LOCAL_WAIT_S") or DEFAULT_WAIT_S),
        )

    def command(self) -> list[str]:
        """The arguments of `tinkex serve`."""
        models = [self.model] if self.model else []
        return ["serve", *models, "--port", "0", "--data", str(self.data), *self.arguments]


class LocalServer:
    """A running local server; it runs at least until this object is released."""

    def __init__(self, url: str, lease: int) -> None:
        self.url = url
        self._lease: int | None = lease

    def __del__(self) -> None:
        self.release()

    def release(self) -> None:
        """Allow the server to stop when no other client needs it. Later calls have no effect."""
        lease, self._lease = self._lease, None
        if lease is not None:
            # Closed, not unlocked: a forked child may hold the same lock and still need it.
            os.close(lease)


def attach(settings: LocalSettings | None = None) -> LocalServer:
    """The running local server for these settings, or a new one. Blocks until it is ready."""
    settings = settings or LocalSettings.from_env()
    settings.data.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(settings.data / "local.lock"):
        record = settings.data / "local.json"
        running = _running(record, settings)
        if running is not None:
            return running
        return _start(record, settings)


def _running(record: Path, settings: LocalSettings) -> LocalServer | None:
    try:
        noted = json.loads(record.read_text())
        url, command, pid = noted["url"], noted["command"], noted["pid"]
        lease = os.open(settings.data / noted["lease"], os.O_RDWR)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    stopping = not _try_shared_lock(lease)
    if stopping:
        # The server is stopping, and holds the lock until it has saved its data.
        deadline = time.monotonic() + SHUTDOWN_WAIT_S

        def wait_for_end() -> None:
            if not _try_shared_lock(lease) and time.monotonic() < deadline:
                raise NotYet(POLL_S)

        retrying_in_thread(wait_for_end)
    if stopping or not _healthy(url):
        os.close(lease)
        return None
    if command != settings.command():
        os.close(lease)
        raise TinkerError(
            f"A local server with other settings uses {settings.data} (process {pid}). It runs "
            f"`tinkex {shlex.join(command)}`, but these settings need "
            f"`tinkex {shlex.join(settings.command())}`. Wait until the programs that use it have "
            "ended, or set TINKEX_LOCAL_DATA to another folder."
        )
    return LocalServer(url, lease)


def _start(record: Path, settings: LocalSettings) -> LocalServer:
    fcntl = _fcntl()
    for old in settings.data.glob("lease-*"):
        old.unlink(missing_ok=True)
    lease_path = settings.data / f"lease-{uuid.uuid4().hex[:12]}"
    lease = os.open(lease_path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lease, fcntl.LOCK_SH)
    out_path, log_path = settings.data / "local.out", settings.data / "local.log"
    wrapper = [sys.executable, "-m", "tinkex.client.local_server", str(lease_path), settings.module]
    command = [*wrapper, *settings.command()]
    try:
        with out_path.open("wb") as out, log_path.open("wb") as log_file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log_file,
                # Ctrl-C in the terminal must reach only the program; the server ends after it.
                start_new_session=True,
            )
        url = _wait_ready(process, out_path, log_path, settings.wait_s)
    except BaseException:
        os.close(lease)
        raise
    record.write_text(
        json.dumps(
            {
                "url": url,
                "pid": process.pid,
                "lease": lease_path.name,
                "command": settings.command(),
            }
        )
    )
    # Collects the exit status if the server ends before this program, to avoid a zombie process.
    threading.Thread(target=process.wait, name="tinkex-local", daemon=True).start()
    return LocalServer(url, lease)


def _wait_ready(
    process: subprocess.Popen[bytes], out_path: Path, log_path: Path, wait_s: float
) -> str:
    """The address, once the server is ready; prints its progress in the meantime."""
    deadline = time.monotonic() + wait_s

    def look() -> str:
        ended = process.poll() is not None
        sys.stderr.writelines(line for line in progress if not ROUTINE_LINES.search(line))
        if found := READY.search(out_path.read_text(errors="replace")):
            return found[1]
        if ended:
            tail = "\n".join(log_path.read_text(errors="replace").splitlines()[-15:])
            raise TinkerError(
                f"The local server exited with status {process.returncode} before it was "
                f"ready. The end of its log ({log_path}):\n{tail}\n"
                "If a package is missing: pip install 'tinkex[server,engine]'."
            )
        if time.monotonic() > deadline:
            process.terminate()
            process.wait()
            raise TinkerError(
                f"The local server was not ready within {wait_s:g} s; see {log_path}. "
                "Set TINKEX_LOCAL_WAIT_S to wait longer."
            )
        raise NotYet(POLL_S)

    with log_path.open("r", errors="replace") as progress:
        return retrying_in_thread(look)


def _try_shared_lock(lease: int) -> bool:
    fcntl = _fcntl()
    try:
        fcntl.flock(lease, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _healthy(url: str) -> bool:
    # Directly to the loopback address, without proxies.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/api/v1/healthz", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    fcntl = _fcntl()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _fcntl() -> ModuleType:
    try:
        import fcntl
    except ModuleNotFoundError as error:
        raise TinkerError(
            'base_url="local" needs file locks, which this system lacks. Run `tinkex serve` '
            "yourself and pass its address."
        ) from error
    return fcntl


def serve_while_leased(lease_path: str, module: str, arguments: Sequence[str]) -> None:
    """In the server's process: run `tinkex serve`, and stop it after the last client."""
    import runpy

    fcntl = _fcntl()
    lease = os.open(lease_path, os.O_RDWR)

    def stop_when_unleased() -> None:
        fcntl.flock(lease, fcntl.LOCK_EX)  # waits while any client holds the shared lock
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_when_unleased, name="tinkex-lease", daemon=True).start()
    sys.argv = ["tinkex", *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    serve_while_leased(sys.argv[1], sys.argv[2], sys.argv[3:])
