"""How long to wait before a process that died is started again. No clock, no processes."""

import asyncio
import ctypes
import gc
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from tinkex.wire.redaction import ScrubbedFormatter


@dataclass(frozen=True, kw_only=True, slots=True)
class Backoff:
    """At once after a good life; else a little, then twice as long each time, up to a limit."""

    first_s: float
    longest_s: float

    def wait_s(self, last_s: float | None, *, well: bool) -> float:
        """The next wait, by the one before it (None: there was none) and how the life since went."""
        if last_s is None or well:
            return 0.0
        return min(max(self.first_s, 2 * last_s), self.longest_s)


#: Of the web process; connections wait in the listening socket meanwhile.
WEB = Backoff(first_s=0.2, longest_s=5.0)
WEB_STABLE_S = 3.0
#: Of an engine; loading a large model takes minutes, and what is in its way rarely goes by itself.
ENGINE = Backoff(first_s=0.5, longest_s=30.0)
ENGINE_STABLE_S = 60.0


def web_was_stable(*, ready: bool, lived_s: float) -> bool:
    """One that got ready and died at once may do so for ever."""
    return ready and lived_s > WEB_STABLE_S


def engine_was_stable(*, answered: bool, lived_s: float) -> bool:
    """One that did something was well: it need not wait as one that cannot come up."""
    return answered or lived_s > ENGINE_STABLE_S


# MERGED: The log of a server process: one line for each event on standard error, without keys and tokens.


FORMAT = "%(asctime)s %(name)s %(message)s"


def begin() -> None:
    """What every logger of this process writes from now on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(ScrubbedFormatter(FORMAT))
    logging.basicConfig(handlers=[handler], level=logging.INFO)
    # It tells of its own parts each time it is loaded; what it does to the database is ours to say.
    logging.getLogger("alembic").setLevel(logging.WARNING)


def tell(level: str) -> None:
    """How much our own loggers say; those of libraries stay as they are."""
    logging.getLogger("tinkex").setLevel(level.upper())


# MERGED: How often the web process looks for garbage: rarely, and never among what it was born with.


# Most of what a request makes is freed by counting references. With Python's defaults (700 new
# objects) thousands of requests in flight are walked through again and again, for nothing.
NEW_OBJECTS = 50_000
YOUNG_ROUNDS = 20
# What lies about between two rounds is what memory grows by: it is full of holes afterwards.
EVERY_S = 3.0
# A walk through thousands of open requests takes some tens of milliseconds: then they are rarer.
MOST_OF_THE_TIME = 0.005


def use_single_arena() -> None:
    """
    Call before there are threads. Each would get a heap of its own, with holes of its own, and
    could not use it while another one holds the interpreter.
    """
    if _mallopt is not None:
        _mallopt(_MOST_HEAPS, 1)


def tune_gc() -> None:
    """Call once, when everything that lives as long as the process has been made."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, YOUNG_ROUNDS, YOUNG_ROUNDS)


async def collect_periodically(every_s: float = EVERY_S) -> None:
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
