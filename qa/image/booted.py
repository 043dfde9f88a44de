"""A machine with systemd, as systemd-nspawn boots one from a folder."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import processes
from waiting import until

BOOT_S = 60.0


class Machine:
    """A booted machine with a network of its own."""

    def __init__(self, pid: int) -> None:
        self._enter = ["nsenter", "--target", str(pid), "--all", "--root", "--wd"]

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command on the machine as root; does not raise."""
        # Without the variables of this one.
        clean = ["env", "--ignore-environment", "PATH=/usr/bin:/usr/sbin"]
        return subprocess.run(
            [*self._enter, *clean, *command], capture_output=True, text=True, check=False
        )


@contextlib.contextmanager
def booted(root: Path, log: Path) -> Iterator[Machine]:
    """Boots the system in a folder until the block ends."""
    nspawn = ["systemd-nspawn", "--directory", str(root), "--boot", "--private-network"]
    with log.open("w") as console:
        process = subprocess.Popen(
            [*nspawn, "--register=no", "--keep-unit"],
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
        )
    try:
        until(lambda: "multi-user.target" in log.read_text(), BOOT_S)
        (first,) = processes.children(process.pid)
        yield Machine(first)
    finally:
        process.terminate()  # it powers the machine off
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
