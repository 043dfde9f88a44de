"""A real PostgreSQL server for tests: on loopback, with its data in a temporary folder."""

import itertools
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

#: Where Debian puts it; elsewhere it is on the path.
DEBIAN = Path("/usr/lib/postgresql")
START_S = 30.0
# Tests end before a power failure would matter. A commit still waits for its record to be written.
SETTINGS = ("fsync=off", "full_page_writes=off", "max_connections=60", "shared_buffers=32MB")


def binaries() -> Path | None:
    """The folder of the newest PostgreSQL on this machine; None where there is none."""
    versions = sorted(DEBIAN.glob("*/bin/initdb"), key=lambda file: float(file.parts[-3]))
    found = str(versions[-1]) if versions else shutil.which("initdb")
    return None if found is None else Path(found).parent


class Postgres:
    """A running server. `database` makes an empty database."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, password: str) -> None:
        self.process = process
        self._login = f"postgres:{password}@127.0.0.1:{port}"
        self._numbers = itertools.count()

    def database(self) -> str:
        """The SQLAlchemy URL of a new database."""
        name = f"tinkex_{next(self._numbers)}"
        with self.connect() as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        return f"postgresql+psycopg://{self._login}/{name}"

    def connect(self, name: str = "postgres") -> psycopg.Connection:
        return psycopg.connect(f"postgresql://{self._login}/{name}", autocommit=True)


@contextmanager
def postgres_server(*settings: str) -> Iterator[Postgres]:
    """Runs until the block ends. PostgreSQL refuses root, so it runs as its own user then."""
    found = binaries()
    assert found is not None
    user = "postgres" if os.geteuid() == 0 else None
    home = Path(tempfile.mkdtemp(prefix="tinkex-postgres-"))
    password = secrets.token_hex(8)
    # Its password file must be its own, as the folder is.
    (home / "password").write_text(password)
    if user is not None:
        shutil.chown(home, user)
        shutil.chown(home / "password", user)
    data = home / "data"
    made = subprocess.run(
        [
            *(found / "initdb", "-D", data, "-U", "postgres", "--auth=password"),
            *(f"--pwfile={home / 'password'}", "--no-sync", "--encoding=UTF8", "--no-locale"),
            # Texts are sorted as in most installations, not by their bytes.
            *("--locale-provider=icu", "--icu-locale=en"),
        ],
        user=user,
        cwd=home,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    chosen = [f"port={port}", "listen_addresses=127.0.0.1", "unix_socket_directories="]
    options = [part for setting in (*chosen, *SETTINGS, *settings) for part in ("-c", setting)]
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(
            [found / "postgres", "-D", data, *options], user=user, cwd=home, stdout=log, stderr=log
        )
    try:
        server = Postgres(process, port, password)
        _wait(server, home / "log")
        yield server
    finally:
        # "Fast": connections are ended, nothing is waited for.
        process.send_signal(signal.SIGINT)
        process.wait(30)
        shutil.rmtree(home, ignore_errors=True)


def _wait(server: Postgres, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            server.connect().close()
        except psycopg.OperationalError:
            assert server.process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        else:
            return
