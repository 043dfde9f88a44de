"""Processes that a test did not start itself: which there are, and whether one has ended."""

import time
from pathlib import Path


def has_exited(pid: int, within_s: float = 15) -> bool:
    """True as soon as the process has ended; False if it has not within the time."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":  # ended; whoever should collect it has not yet
            return True
        time.sleep(0.02)
    return False


def children(pid: int) -> list[int]:
    """Processes that this one started."""
    return [
        int(child)
        for tasks in Path(f"/proc/{pid}/task").glob("*/children")
        for child in tasks.read_text().split()
    ]
