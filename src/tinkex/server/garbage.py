"""How often the web process looks for garbage: rarely, and never among what it was born with."""

import asyncio
import ctypes
import gc
import sys
import time
from collections.abc import Callable

# Most of what a request makes is freed by counting references. With Python's defaults (700 new
# objects) thousands of requests in flight are walked through again and again, for nothing.
NEW_OBJECTS = 50_000
YOUNG_ROUNDS = 20
# What lies about between two rounds is what memory grows by: it is full of holes afterwards.
EVERY_S = 3.0
# A walk through thousands of open requests takes some tens of milliseconds: then they are rarer.
MOST_OF_THE_TIME = 0.005


def share_one_heap() -> None:
    """
    Call before there are threads. Each would get a heap of its own, with holes of its own, and
    could not use it while another one holds the interpreter.
    """
    if _mallopt is not None:
        _mallopt(_MOST_HEAPS, 1)


def collect_rarely() -> None:
    """Call once, when everything that lives as long as the process has been made."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, YOUNG_ROUNDS, YOUNG_ROUNDS)


async def collect_by_the_clock(every_s: float = EVERY_S) -> None:
    """
    Until cancelled, free what is held by nothing but itself: errors with their frames, connections
    that ended. A quiet server would wait for hours until there is enough of it.

    A task of its own: what deletes rows may be busy for minutes, and a busy server makes the most
    garbage.
    """
    took_s = 0.0
    while True:
        await asyncio.sleep(max(every_s, took_s / MOST_OF_THE_TIME))
        began_s = time.thread_time()
        gc.collect()
        took_s = time.thread_time() - began_s
        # Memory that the allocator keeps although nothing is in it, for the system.
        if _trim is not None:
            await asyncio.to_thread(_trim, 0)


def _gnu(name: str) -> Callable[..., int] | None:
    """Only the GNU library has these, and only there they are needed."""
    if sys.platform != "linux":
        return None
    found: Callable[..., int] | None = getattr(ctypes.CDLL(None), name, None)
    return found


_trim = _gnu("malloc_trim")
_mallopt = _gnu("mallopt")
# Of its `malloc.h`.
_MOST_HEAPS = -8
