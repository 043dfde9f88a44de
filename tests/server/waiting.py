"""Waiting in a test for something that only time brings about."""

import asyncio
import time
from collections.abc import Callable


async def until(true: Callable[[], bool], within_s: float = 20.0) -> None:
    end_s = time.monotonic() + within_s
    for _ in range(10**6):
        if true():
            return
        assert time.monotonic() < end_s, f"it is not so after {within_s} s"
        await asyncio.sleep(0.02)
