"""The web process does not walk through its open requests for each few hundred new objects."""

import asyncio
import gc
import subprocess
import sys
import weakref

import pytest

from tinkex.server.processes import collect_by_the_clock

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


HEAPS = """
import ctypes, sys, threading
from tinkex.server.garbage import share_one_heap

if sys.argv[1] == "shared":
    share_one_heap()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
together = threading.Barrier(6)

def allocate() -> None:
    together.wait()
    for _ in range(1000):
        libc.malloc(2000)

threads = [threading.Thread(target=allocate) for _ in range(6)]
for thread in threads: thread.start()
for thread in threads: thread.join()
libc.stdout = ctypes.c_void_p.in_dll(libc, "stdout")
libc.malloc_info(0, libc.stdout)
libc.fflush(libc.stdout)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only the GNU library makes a heap a thread")
def test_threads_share_one_heap():
    def heaps(how: str) -> int:
        told = subprocess.run(
            [sys.executable, "-c", HEAPS, how], capture_output=True, text=True, check=True
        )
        return told.stdout.count("<heap nr=")

    assert heaps("shared") == 1
    assert heaps("own") > 1
