"""The row cache: hits, eviction, and changes while a row is read."""

import asyncio

import pytest

from tinkex.server.api.deps import Cache

pytestmark = pytest.mark.anyio


async def test_a_row_that_changes_while_it_is_read_is_not_cached() -> None:
    """A session that is finished while another request looks it up must not stay open."""
    rows = {"s": "open"}
    go_on = asyncio.Event()

    async def slow(key: str) -> str | None:
        found = rows.get(key)
        await go_on.wait()
        return found

    cache = Cache(slow)
    reading = asyncio.create_task(cache.get("s"))
    await asyncio.sleep(0)
    rows["s"] = "finished"
    cache.forget("s")
    go_on.set()
    assert await reading == "open"
    assert await cache.get("s") == "finished"


async def test_rows_are_cached_and_missing_rows_are_not() -> None:
    requested: list[str] = []

    async def read(key: str) -> str | None:
        requested.append(key)
        return None if key == "missing" else key

    cache = Cache(read)
    for key in ("a", "a", "missing", "missing"):
        await cache.get(key)
    assert requested == ["a", "missing", "missing"]


async def test_unused_rows_are_evicted() -> None:
    requested: list[str] = []
    now_s = 0.0

    async def read(key: str) -> str | None:
        requested.append(key)
        return key

    cache = Cache(read, clock=lambda: now_s)
    for now_s in (0.0, 150.0, 300.0, 450.0):
        await cache.get("used")
        await cache.get(f"once at {now_s}")
    assert len(cache._new) + len(cache._old) <= 4
    await cache.get("once at 0.0")
    assert requested.count("used") == 1
    assert requested.count("once at 0.0") == 2
