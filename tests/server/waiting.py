"""Waiting in a test for something that only time brings about."""

import asyncio
import time
from collections.abc import Callable

from tinkex.server.store import RequestRow, Store


async def until(true: Callable[[], bool], within_s: float = 20.0) -> None:
    end_s = time.monotonic() + within_s
    for _ in range(10**6):
        if true():
            return
        assert time.monotonic() < end_s, f"it is not so after {within_s} s"
        await asyncio.sleep(0.02)


async def unfinished(store: Store) -> list[RequestRow]:
    """What was accepted and not finished: of each owner the oldest first."""
    rows: list[RequestRow] = []
    for owner in await store.requests.waiting_owners():
        rows += (await store.requests.waiting_of(owner, after=None, limit=10_000))[0]
    return rows
