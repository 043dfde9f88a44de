"""Garbage collection of the web process."""

import asyncio
import gc
import subprocess
import sys
import weakref

from tinkex.server.process_setup import collect_periodically

PROGRAM = """
import gc
from tinkex.server.process_setup import tune_gc

tune_gc()
before = sum(round["collections"] for round in gc.get_stats())
open_requests = [{"request": [number]} for number in range(10_000)]
print(sum(round["collections"] for round in gc.get_stats()) - before, gc.get_freeze_count() > 0)
"""


def test_thousands_of_requests_in_flight_trigger_no_garbage_collection():
    reported = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert reported.stdout.split() == ["0", "True"]


class Connection:
    """A reference cycle, like a closed connection and its reader."""

    def __init__(self) -> None:
        self.reader = self


def test_reference_cycles_are_freed_periodically():
    async def until_freed() -> None:
        freed = asyncio.Event()
        weakref.finalize(Connection(), freed.set)
        collecting = asyncio.create_task(collect_periodically(every_s=0.01))
        async with asyncio.timeout(10):
            await freed.wait()
        collecting.cancel()

    gc.disable()
    try:
        asyncio.run(until_freed())
    finally:
        gc.enable()
