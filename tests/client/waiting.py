"""Waits in a test for a condition, with a deadline."""

import time
from collections.abc import Callable


def until(condition: Callable[[], object], within_s: float = 10.0) -> None:
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, f"it is not so after {within_s} s"
        time.sleep(0.002)
