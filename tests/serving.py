"""Runs a `tinkex serve` process for tests."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

#: The name under which tests serve the tiny model.
TINY = "test/tiny"


def unloaded(folder: Path) -> tuple[str, str]:
    """A model under two names: a server of several loads each on first use, and gets ready sooner."""
    return f"{TINY}={folder}", f"test/other={folder}"


@dataclass
class Server:
    """A running `tinkex serve` process."""

    url: str
    process: subprocess.Popen[str]
    data: Path
    log: list[str] = field(default_factory=list)


@contextmanager
def serving(
    *models: str,
    data: Path,
    args: tuple[str, ...] = (),
    env: Mapping[str, str] | None = None,
    python: Path = Path(sys.executable),
    cwd: Path | None = None,
) -> Iterator[Server]:
    """
    Runs `tinkex serve` on a free loopback port until the block ends.

    Clients do not find it by themselves, unless `env` names the folder where they look.
    """
    alone = {"XDG_STATE_HOME": str(data.with_name(f"{data.name}-state"))}
    command = [python, "-m", "tinkex.cli.main", "serve", *models]
    process = subprocess.Popen(
        [*command, "--port", "0", "--data", str(data), "--threads", "1", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**os.environ, **alone, **(env or {})},
    )
    assert process.stdout
    assert process.stderr
    log: list[str] = []
    drain = threading.Thread(target=log.extend, args=(process.stderr,), daemon=True)
    drain.start()
    try:
        ready = process.stdout.readline().strip()
        assert ready.startswith("tinkex ready at http://127.0.0.1:"), (ready, log)
        yield Server(url=ready.split()[-1], process=process, data=data, log=log)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        drain.join(5)
        process.stdout.close()
        process.stderr.close()
