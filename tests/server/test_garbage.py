"""The web process does not walk through its open requests for each few hundred new objects."""

import asyncio
import gc
import subprocess
import sys
import weakref

from tinkex.server.garbage import collect_by_the_clock

PROGRAM = """
import gc
from tinkex.server.garbage import collect_rarely

collect_rarely()
before = sum(round["collections"] for round in gc.get_stats())
open_requests = [{"request": [number]} for number in range(10_000)]
print(sum(round["collections"] for round in gc.get_stats()) - before, gc.get_freeze_count() > 0)
"""


def test_thousands_of_requests_in_flight_start_no_search_for_garbage():
    told = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert told.stdout.split() == ["0", "True"]


class Connection:
    """Holds itself, as an ended connection and its reader do."""

    def __init__(self) -> None:
        self.reader = self


def test_what_only_holds_itself_is_freed_by_the_clock():
    async def until_freed() -> None:
        freed = asyncio.Event()
        weakref.finalize(Connection(), freed.set)
        collecting = asyncio.create_task(collect_by_the_clock(every_s=0.01))
        async with asyncio.timeout(10):
            await freed.wait()
        collecting.cancel()

    gc.disable()
    try:
        asyncio.run(until_freed())
    finally:
        gc.enable()
