"""Looks up processes that a test did not start itself, in /proc, and stops them for a while."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path


def has_exited(pid: int, within_s: float = 15) -> bool:
    """Waits for a process to exit; False if it is still running after the time."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":  # a zombie: exited, and its parent has not waited for it
            return True
        time.sleep(0.02)
    return False


def children(pid: int) -> list[int]:
    """The child processes of a process."""
    return [
        int(child)
        for tasks in Path(f"/proc/{pid}/task").glob("*/children")
        for child in tasks.read_text().split()
    ]


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process does nothing within the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
