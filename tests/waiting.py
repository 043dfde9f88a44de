"""Waits in a test until a condition holds; fails the test when it does not hold in time."""

import asyncio
import time
from collections.abc import Callable


def until(condition: Callable[[], object], within_s: float = 10.0) -> None:
    """Blocks the calling thread."""
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, f"the condition does not hold after {within_s} s"
        time.sleep(0.002)


async def until_async(condition: Callable[[], object], within_s: float = 20.0) -> None:
    """Leaves the event loop free between two checks."""
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, f"the condition does not hold after {within_s} s"
        await asyncio.sleep(0.02)
