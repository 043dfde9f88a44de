"""Deferred writes do not accumulate while the database does not respond."""

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa

from tinkex.server.store import Store, group_commit, open_store
from tinkex.server.store.schema import sessions

pytestmark = pytest.mark.anyio


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(
        db_url=f"sqlite:///{tmp_path / 'tinkex.db'}", storage_url=str(tmp_path), folder=tmp_path
    )
    yield opened
    opened.close()


@contextmanager
def not_responding(store: Store) -> Iterator[None]:
    """The database has received a write and does not respond."""
    received, responds = threading.Event(), threading.Event()

    def act(_: sa.Connection) -> None:
        received.set()
        responds.wait(30)

    promise = store._database.write(act)
    assert received.wait(10)
    try:
        yield
    finally:
        responds.set()
        promise.add_done_callback(lambda done: done.exception())


def waiting(store: Store) -> int:
    writer = store._database.writer
    return len(writer._deferred) + len(writer._deferred_by_key)


async def a_session(store: Store) -> str:
    session = await store.sessions.create_session(
        owner="local",
        sdk_version=None,
        tags=[],
        user_metadata={},
        project_id=None,
        display_name=None,
        idempotency_key=None,
    )
    return session.session_id


async def test_the_oldest_deferred_writes_are_dropped_and_logged_once(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(group_commit, "MAX_DEFERRED", 50)
    written: list[int] = []
    with not_responding(store), caplog.at_level(logging.WARNING):
        for number in range(500):
            store._database.write_deferred(lambda _, number=number: written.append(number))
        assert waiting(store) == 50
    await store.keys.create(owner="alice")
    assert written == list(range(450, 500))
    logged = [record for record in caplog.records if "are dropped" in record.message]
    assert len(logged) == 1


async def test_a_newer_deferred_write_replaces_one_with_the_same_key(store: Store) -> None:
    session_id = await a_session(store)
    key, _ = await store.keys.create(owner="alice")
    with not_responding(store):
        for _ in range(200):
            store.sessions.mark_seen(session_id)
            store.keys.mark_used(key.key_id)
            store.sessions.mark_active(session_id)
            store.sessions.mark_failed(session_id, {"error": "x"})
        store.sessions.mark_failed(session_id, None)
        assert waiting(store) == 4
    await store.keys.create(owner="alice")
    found = await store._database.read(
        lambda connection: connection.execute(sa.select(sessions)).one()
    )
    assert found.failure is None
    assert found.seen_s > found.created_s
    used = await store.keys.by_id(key.key_id)
    assert used is not None
    assert used.used_s is not None


async def test_dropped_fetched_marks_are_not_counted(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_commit, "MAX_DEFERRED", 3)
    with not_responding(store):
        for number in range(10):
            store.requests.mark_all_fetched([str(number)] * 10, owner="alice")
        assert store.requests._fetched_pending == {"alice": 30}
    await store.keys.create(owner="alice")
    assert store.requests._fetched_pending == {}


async def test_fetched_marks_are_dropped_while_the_disk_is_full(store: Store) -> None:
    def full(_: sa.Connection) -> None:
        raise sa.exc.OperationalError("", {}, Exception("database or disk is full"))

    writing = store._database.write(full)
    store.requests.mark_all_fetched(["a", "b"], owner="alice")
    with pytest.raises(Exception, match="full"):
        await writing
    for _ in range(200):
        if not store.requests._fetched_pending:
            break
        await asyncio.sleep(0.05)
    assert store.requests._fetched_pending == {}


class _Slow(Counter[str]):
    """Lets another thread run between a read and the following write."""

    def __getitem__(self, key: str) -> int:
        found = super().__getitem__(key)
        time.sleep(0.002)
        return found


async def test_fetched_marks_of_two_threads_are_all_counted(store: Store) -> None:
    store.requests._fetched_pending = _Slow()
    for number in range(50):
        store.requests.mark_all_fetched([str(number)], owner="alice")
        store._database.write(lambda _: None)
        await asyncio.sleep(0)
    await store.keys.create(owner="alice")
    assert store.requests._fetched_pending == {}
