"""A real PostgreSQL server for tests: on loopback, with its data in a temporary folder."""

import itertools
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from ports import free_port
from processes import children

#: Debian's folder; on other systems `initdb` is on the path.
DEBIAN = Path("/usr/lib/postgresql")
START_S = 30.0
# Tests need no durability across a power failure. A commit still waits for its WAL record.
SETTINGS = ("fsync=off", "full_page_writes=off", "max_connections=60", "shared_buffers=32MB")


def binaries() -> Path | None:
    """The folder of the newest PostgreSQL on this machine; None if none is installed."""
    versions = sorted(DEBIAN.glob("*/bin/initdb"), key=lambda file: float(file.parts[-3]))
    found = str(versions[-1]) if versions else shutil.which("initdb")
    return None if found is None else Path(found).parent


class Postgres:
    """A PostgreSQL server that a test can stop, pause and start again."""

    def __init__(
        self, home: Path, user: str | None, password: str, settings: Iterable[str]
    ) -> None:
        self._home = home
        self._data = home / "data"
        self._user = user
        port = free_port()
        chosen = (f"port={port}", "listen_addresses=127.0.0.1", "unix_socket_directories=")
        self._options = [
            part for setting in (*chosen, *SETTINGS, *settings) for part in ("-c", setting)
        ]
        self._login = f"postgres:{password}@127.0.0.1:{port}"
        self._numbers = itertools.count()
        self._process: subprocess.Popen[bytes] | None = None

    def database(self) -> str:
        """Creates an empty database; its SQLAlchemy URL."""
        name = f"tinkex_{next(self._numbers)}"
        with self.connect() as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        return f"postgresql+psycopg://{self._login}/{name}"

    def connect(self, name: str = "postgres") -> psycopg.Connection:
        return psycopg.connect(f"postgresql://{self._login}/{name}", autocommit=True)

    def start(self) -> None:
        """Returns when the server accepts connections."""
        found = binaries()
        assert found is not None
        with (self._home / "log").open("wb") as log:
            process = subprocess.Popen(
                [found / "postgres", "-D", self._data, *self._options],
                user=self._user,
                cwd=self._home,
                stdout=log,
                stderr=log,
            )
        self._process = process
        deadline = time.monotonic() + START_S
        while True:
            try:
                self.connect().close()
            except psycopg.OperationalError:
                log_text = (self._home / "log").read_text()
                assert process.poll() is None, log_text
                assert time.monotonic() < deadline, log_text
                time.sleep(0.05)
            else:
                return

    def stop(self) -> None:
        """A "fast" shutdown, which closes all connections. Safe to repeat."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(30)
            self._process = None

    def make_standby(self) -> None:
        """Copy the server as it is now. Later commits do not reach the copy."""
        self._run("pg_basebackup", "-d", f"postgresql://{self._login}/postgres", "-c", "fast",
                  "--no-sync", "-R", "-D", self._home / "standby")  # fmt: skip

    def fail_over(self) -> None:
        """End the server as by a loss of power; the copy takes its place and address."""
        assert self._process is not None
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(30)
        self._data = self._home / "standby"
        self.start()
        self._run("pg_ctl", "promote", "-w", "-D", self._data)

    def _run(self, program: str, *arguments: str | Path) -> None:
        found = binaries()
        assert found is not None
        done = subprocess.run(
            [found / program, *arguments],
            user=self._user,
            cwd=self._home,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The server accepts data and does not respond until the block ends."""
        assert self._process is not None
        # The parent stops first, so that it starts no child while they are listed.
        os.kill(self._process.pid, signal.SIGSTOP)
        stopped = [self._process.pid, *children(self._process.pid)]
        try:
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            yield
        finally:
            for pid in reversed(stopped):
                os.kill(pid, signal.SIGCONT)


@contextmanager
def postgres_server(*settings: str) -> Iterator[Postgres]:
    """Runs until the block ends. PostgreSQL refuses to run as root; then it runs as user postgres."""
    found = binaries()
    assert found is not None
    user = "postgres" if os.geteuid() == 0 else None
    home = Path(tempfile.mkdtemp(prefix="tinkex-postgres-"))
    password = secrets.token_hex(8)
    # The server's user must own the password file and the folder.
    (home / "password").write_text(password)
    if user is not None:
        shutil.chown(home, user)
        shutil.chown(home / "password", user)
    made = subprocess.run(
        [
            *(found / "initdb", "-D", home / "data", "-U", "postgres", "--auth=password"),
            *(f"--pwfile={home / 'password'}", "--no-sync", "--encoding=UTF8", "--no-locale"),
            # Text sorts by locale, as in most installations, and not by bytes.
            *("--locale-provider=icu", "--icu-locale=en"),
        ],
        user=user,
        cwd=home,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    server = Postgres(home, user, password, settings)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(home, ignore_errors=True)
