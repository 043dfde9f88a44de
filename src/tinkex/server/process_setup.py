"""
What the server's processes set up: logging for all, garbage collection for web and worker processes.
"""

import asyncio
import ctypes
import gc
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from tinkex.server.retry import run_periodically
from tinkex.wire.redaction import RedactingFormatter

log = logging.getLogger("tinkex.server.process_setup")

# --- Logging: one line per event on standard error, without keys and tokens. ---

LOG_FORMAT = "%(asctime)s %(name)s %(message)s"


def setup_logging() -> None:
    """Configure the root logger of this process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(RedactingFormatter(LOG_FORMAT))
    logging.basicConfig(handlers=[handler], level=logging.INFO)
    # Alembic logs its internals on every start; the store logs migrations itself.
    logging.getLogger("alembic").setLevel(logging.WARNING)


def set_log_level(level: str) -> None:
    """Set the level of tinkex loggers; library loggers keep theirs."""
    logging.getLogger("tinkex").setLevel(level.upper())


# --- Garbage collection and the C heap, for web and worker processes. ---

# Reference counting frees most objects of a request. With Python's default threshold of 700 new
# objects, each collection would traverse thousands of open requests for nothing.
GC_THRESHOLD = 50_000
GC_OLDER_THRESHOLD = 20
# Uncollected cycles raise the peak heap size, and fragmentation keeps it there.
COLLECT_INTERVAL_S = 3.0
# A collection with thousands of open requests takes tens of milliseconds. The interval grows so
# that collections take at most this share of the time.
MAX_COLLECT_SHARE = 0.005


def use_single_arena() -> None:
    """
    Let all threads share one malloc arena. Call before any thread starts.

    By default glibc gives each thread an arena of its own, and each of them fragments separately.
    """
    if _mallopt is not None:
        _mallopt(_M_ARENA_MAX, 1)


@asynccontextmanager
async def tuned_gc(every_s: float = COLLECT_INTERVAL_S) -> AsyncIterator[None]:
    """
    Exclude long-lived objects from collections, and collect at intervals instead of by number.

    Enter it once, when start-up is complete.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, GC_OLDER_THRESHOLD, GC_OLDER_THRESHOLD)
    collecting = asyncio.create_task(_collect_periodically(every_s))
    try:
        yield
    finally:
        collecting.cancel()


async def _collect_periodically(every_s: float) -> None:
    """
    Collect reference cycles until cancelled: exceptions with their frames, closed connections.

    An idle server would take hours to reach the threshold. This is a task of its own because the
    cleanup loop may be busy for minutes, just when a busy server makes the most garbage.
    """
    took_s = 0.0

    async def collect() -> None:
        nonlocal took_s
        began_s = time.thread_time()
        gc.collect()
        took_s = time.thread_time() - began_s
        # Return free heap memory to the operating system.
        if _malloc_trim is not None:
            await asyncio.to_thread(_malloc_trim, 0)

    pause_s = lambda: max(every_s, took_s / MAX_COLLECT_SHARE)
    await run_periodically(collect, pause_s, what="garbage collection", log=log)


def _glibc_function(name: str) -> Callable[..., int] | None:
    """A function that only glibc has, and only glibc needs; None elsewhere."""
    if sys.platform != "linux":
        return None
    found: Callable[..., int] | None = getattr(ctypes.CDLL(None), name, None)
    return found


_malloc_trim = _glibc_function("malloc_trim")
_mallopt = _glibc_function("mallopt")
# M_ARENA_MAX in glibc's malloc.h.
_M_ARENA_MAX = -8
