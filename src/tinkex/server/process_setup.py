"""
What the server's processes set up: logging for all, garbage collection for the web process.
"""

import gc
import logging
import sys
import time

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


# --- Garbage collection, for the web process. ---

# Reference counting frees most objects of a request. With Python's default threshold of 700 new
# objects, each collection would traverse thousands of open requests for nothing.
GC_THRESHOLD = 50_000
GC_OLDER_THRESHOLD = 20
# Uncollected cycles raise the peak heap size, and fragmentation keeps it there.
COLLECT_INTERVAL_S = 3.0
# A collection with thousands of open requests takes tens of milliseconds. The interval grows so
# that collections take at most this share of the time.
MAX_COLLECT_SHARE = 0.005


def tune_gc() -> None:
    """Exclude long-lived objects from collections. Call once, when start-up is complete."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, GC_OLDER_THRESHOLD, GC_OLDER_THRESHOLD)


async def collect_periodically(every_s: float = COLLECT_INTERVAL_S) -> None:
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

    pause_s = lambda: max(every_s, took_s / MAX_COLLECT_SHARE)
    await run_periodically(collect, pause_s, what="garbage collection", log=log)
