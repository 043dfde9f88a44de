"""Restart backoff, garbage collection and the malloc arena of server processes."""

import asyncio
import gc
import itertools
import subprocess
import sys
import weakref

import pytest

from tinkex.server.process_setup import (
    ENGINE_BACKOFF,
    ENGINE_STABLE_S,
    WEB_BACKOFF,
    WEB_STABLE_S,
    Backoff,
    collect_periodically,
    engine_was_stable,
    web_was_stable,
)

STABLE, UNSTABLE = True, False


def waits(rule: Backoff, runs: list[bool]) -> list[float]:
    found: list[float] = []
    for stable in runs:
        found.append(rule.next_wait_s(found[-1] if found else None, stable=stable))
    return found


@pytest.mark.parametrize(
    ("rule", "runs", "expected"),
    [
        # The first crash may be an accident, however short the run was.
        (WEB_BACKOFF, [UNSTABLE], [0.0]),
        (WEB_BACKOFF, [UNSTABLE] * 8, [0.0, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]),
        (ENGINE_BACKOFF, [UNSTABLE] * 9, [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]),
        (WEB_BACKOFF, [STABLE] * 5, [0.0] * 5),
        (ENGINE_BACKOFF, [STABLE] * 5, [0.0] * 5),
        # A stable run resets the backoff.
        (
            WEB_BACKOFF,
            [UNSTABLE, UNSTABLE, UNSTABLE, STABLE, UNSTABLE, UNSTABLE],
            [0.0, 0.2, 0.4, 0.0, 0.2, 0.4],
        ),
        (
            ENGINE_BACKOFF,
            [STABLE, UNSTABLE, UNSTABLE, STABLE, STABLE, UNSTABLE],
            [0.0, 0.5, 1.0, 0.0, 0.0, 0.5],
        ),
    ],
)
def test_waits_double_up_to_a_maximum_and_a_stable_run_resets_them(
    rule: Backoff, runs: list[bool], expected: list[float]
) -> None:
    assert waits(rule, runs) == pytest.approx(expected)


@pytest.mark.parametrize("rule", [WEB_BACKOFF, ENGINE_BACKOFF])
def test_waits_stay_within_the_maximum_and_only_the_first_is_zero(rule: Backoff) -> None:
    first, *later = waits(rule, [UNSTABLE] * 1000)
    assert first == 0.0
    assert all(one <= two for one, two in itertools.pairwise(later))
    assert min(later) == rule.first_s
    assert max(later) == rule.max_s


@pytest.mark.parametrize(
    ("ready", "lived_s", "stable"),
    [
        (True, WEB_STABLE_S + 0.1, STABLE),
        (True, WEB_STABLE_S, UNSTABLE),
        (True, 0.0, UNSTABLE),
        # A process that never got ready is not stable, however long it ran.
        (False, 10_000.0, UNSTABLE),
    ],
)
def test_a_web_process_was_stable_if_it_was_ready_for_a_while(
    ready: bool, lived_s: float, stable: bool
) -> None:
    assert web_was_stable(ready=ready, lived_s=lived_s) is stable


@pytest.mark.parametrize(
    ("finished_work", "lived_s", "stable"),
    [
        # A step may crash an engine soon after its start, but earlier steps were done.
        (True, 0.0, STABLE),
        (False, ENGINE_STABLE_S + 0.1, STABLE),
        (False, ENGINE_STABLE_S, UNSTABLE),
        (False, 0.0, UNSTABLE),
    ],
)
def test_an_engine_was_stable_if_it_finished_work_or_ran_for_long(
    finished_work: bool, lived_s: float, stable: bool
) -> None:
    assert engine_was_stable(finished_work=finished_work, lived_s=lived_s) is stable


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
