"""A database that refuses writes for a while: required writes wait in order, others are refused."""

import asyncio
import errno
import os
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from server.stored_requests import is_new, unfinished
from tinkex.server.queued_request import Kind, Outcome, QueuedRequest
from tinkex.server.store import (
    StorageError,
    Store,
    group_commit,
    open_store,
    storage_health,
)
from tinkex.server.store.storage_health import FILES, StorageHealth

pytestmark = pytest.mark.anyio


def new() -> QueuedRequest:
    return QueuedRequest(owner="o", kind=Kind.SAMPLE, base_model="b", payload=b"p")


#: More than the free pages of a new database hold.
RESULT = b"r" * 60_000


@pytest.fixture
async def store(tmp_path: Path, anyio_backend: str) -> AsyncIterator[Store]:
    opened = open_store(
        db_url=f"sqlite:///{tmp_path / 'tinkex.db'}", storage_url=str(tmp_path), folder=tmp_path
    )
    yield opened
    opened.close()


async def writing(store: Store) -> sqlite3.Connection:
    """The connection of the writer thread."""
    found = await store._database.write(lambda connection: connection.connection.driver_connection)
    assert isinstance(found, sqlite3.Connection)
    return found


@contextmanager
def full(connection: sqlite3.Connection) -> Iterator[None]:
    """Limits the database to its current pages, with SQLite's own limit."""
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages}")
    try:
        yield
    finally:
        # Unless the store was closed.
        with suppress(sqlite3.ProgrammingError):
            connection.execute("PRAGMA max_page_count = 1000000000")


async def test_results_wait_in_order_and_new_requests_are_refused(store: Store) -> None:
    first, second = [await store.requests.accept(new()) for _ in range(2)]
    with full(await writing(store)):
        large = store.requests.finish_one(first, Outcome(result=RESULT))
        # Small enough to be written, but it must not overtake: a crash now would change the order.
        small = store.requests.finish_one(second, Outcome(result=b"s"))
        with pytest.raises(StorageError, match="full"):
            await store.requests.accept(new())
        assert store.health.problem is not None
        assert store.health.problem.kind == "full"
        rows = await unfinished(store)
        assert {row.request_id for row in rows} == {first.request_id, second.request_id}
        assert not large.done()
    async with asyncio.timeout(10):
        await asyncio.gather(large, small)
    assert store.health.problem is None
    assert await store.requests.result(first.request_id) == RESULT
    assert await is_new(store, new())


async def test_a_read_only_database_is_detected(store: Store) -> None:
    connection = await writing(store)
    first = await store.requests.accept(new())
    connection.execute("PRAGMA query_only = ON")
    with pytest.raises(StorageError, match="cannot write"):
        await store.requests.accept(new())
    failing = store.requests.finish_one(first, Outcome(error="e", category="server"))
    await store.probe()
    assert store.health.problem is not None
    assert store.health.problem.kind == "read_only"
    connection.execute("PRAGMA query_only = OFF")
    async with asyncio.timeout(10):
        await failing
    row = await store.requests.get(first.request_id)
    assert row is not None
    assert row.outcome is not None
    assert row.outcome.error == "e"
    assert store.health.problem is None


async def test_a_store_on_a_full_disk_can_be_closed(store: Store) -> None:
    first = await store.requests.accept(new())
    with full(await writing(store)):
        waiting = store.requests.finish_one(first, Outcome(result=RESULT))
        with pytest.raises(StorageError):
            await store.requests.accept(new())
        await asyncio.to_thread(store.close)
        # It is computed again after a restart.
        with pytest.raises(StorageError):
            await waiting


async def test_a_disk_that_hangs_before_the_commit_is_detected(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_commit, "RESPONSE_TIMEOUT_S", 0.2)
    answers = threading.Event()
    store.health.before_commit = lambda: answers.wait() and None
    try:
        waiting = asyncio.create_task(is_new(store, new()))
        async with asyncio.timeout(10):
            while store.health.problem is None:  # noqa: ASYNC110  there is no event to wait for
                await asyncio.sleep(0.05)
        with pytest.raises(StorageError, match="has not responded"):
            await store.requests.accept(new())
    finally:
        answers.set()
    assert await waiting
    assert store.health.problem is None


async def test_a_caller_may_write_again_as_soon_as_a_slow_write_is_stored(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_commit, "RESPONSE_TIMEOUT_S", 0.2)
    resolve = group_commit._resolve

    def resolve_slowly(outcomes: Sequence[Any]) -> None:
        resolve(outcomes)
        time.sleep(0.3)  # the caller runs before the writer's thread does

    monkeypatch.setattr(group_commit, "_resolve", resolve_slowly)
    # Called after the commit: to the writer, the database took this long to respond.
    monkeypatch.setattr(store.health, "clear", lambda: time.sleep(0.3))
    for _ in range(2):
        assert await is_new(store, new())


class _Slow(dict[str, object]):
    """Lets another thread run between a check and the following write."""

    def __contains__(self, key: object) -> bool:
        found = super().__contains__(key)
        self.clear()
        return found


def test_two_threads_clear_one_part() -> None:
    health = StorageHealth()
    health.record(OSError(errno.ENOSPC, "full"), FILES)
    health._problems = _Slow(health._problems)  # type: ignore[assignment]
    health.clear(FILES)
    assert health.problem is None


@pytest.mark.parametrize("number", sorted(storage_health._ERRNOS), ids=errno.errorcode.get)
async def test_required_file_work_waits_for_any_disk_problem(store: Store, number: int) -> None:
    fails = [True, True]

    def act() -> str:
        if fails:
            fails.pop()
            raise OSError(number, os.strerror(number))
        return "done"

    with pytest.raises(StorageError):
        await store._database.with_folder(act)
    assert await store._database.with_folder(act, required=True) == "done"
