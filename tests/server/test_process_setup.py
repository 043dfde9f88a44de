"""Garbage collection and the malloc arena of server processes."""

import asyncio
import gc
import subprocess
import sys
import weakref

import pytest

from tinkex.server.process_setup import tuned_gc

PROGRAM = """
import asyncio, gc
from tinkex.server.process_setup import tuned_gc

async def main():
    async with tuned_gc():
        before = sum(round["collections"] for round in gc.get_stats())
        open_requests = [{"request": [number]} for number in range(10_000)]
        after = sum(round["collections"] for round in gc.get_stats())
        print(after - before, gc.get_freeze_count() > 0)

asyncio.run(main())
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
        async with tuned_gc(every_s=0.01), asyncio.timeout(10):
            weakref.finalize(Connection(), freed.set)
            await freed.wait()

    threshold = gc.get_threshold()
    gc.disable()
    try:
        asyncio.run(until_freed())
    finally:
        gc.set_threshold(*threshold)
        gc.enable()


HEAPS = """
import ctypes, sys, threading
from tinkex.server.process_setup import use_single_arena

if sys.argv[1] == "shared":
    use_single_arena()
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
def test_threads_share_one_malloc_arena():
    def heaps(how: str) -> int:
        reported = subprocess.run(
            [sys.executable, "-c", HEAPS, how], capture_output=True, text=True, check=True
        )
        return reported.stdout.count("<heap nr=")

    assert heaps("shared") == 1
    assert heaps("own") > 1
