"""A long write transaction does not block reads, and one owner cannot delay others."""

import asyncio
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tinkex.server.store import Store, open_store
from tinkex.server.store.requests import MAX_FETCHED_PENDING

pytestmark = pytest.mark.anyio


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(
        db_url=f"sqlite:///{tmp_path / 'tinkex.db'}", storage_url=str(tmp_path), folder=tmp_path
    )
    yield opened
    opened.close()


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Another process has a write transaction."""
    with closing(sqlite3.connect(folder / "tinkex.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


async def test_new_read_connections_do_not_wait_for_a_writer(store: Store, tmp_path: Path) -> None:
    with writing(tmp_path):
        began_s = time.monotonic()
        # More than the connections that exist.
        assert await asyncio.gather(*(store.keys.any() for _ in range(8))) == [False] * 8
        assert time.monotonic() - began_s < 4


async def test_fetched_marks_of_one_owner_do_not_delay_others(store: Store, tmp_path: Path) -> None:
    waiting = store.requests._fetched_pending
    request_ids = [f"{number}" for number in range(MAX_FETCHED_PENDING * 2 // 3)]
    with writing(tmp_path):
        for owner in ("alice", "alice", "alice", "bob"):
            store.requests.mark_all_fetched(request_ids, owner=owner)
        assert waiting == {"alice": MAX_FETCHED_PENDING, "bob": len(request_ids)}
    await store.keys.create(owner="alice")
    assert not +waiting
