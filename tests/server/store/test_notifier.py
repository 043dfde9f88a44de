"""Notifications on a real PostgreSQL: all arrive, in order, also after the connection was lost."""

import asyncio
from typing import Any

import pytest

from postgres import Postgres
from tinkex.server.store import notifier
from tinkex.server.store.notifier import Notifier
from waiting import until_async

pytestmark = pytest.mark.anyio

SECRET = b"a secret of the database"


@pytest.fixture
def url(postgres: Postgres) -> str:
    return postgres.database()


def listener(url: str, heard: list[Any]) -> Notifier:
    return Notifier(url, ["here"], lambda kind, items: heard.extend(items), secret=SECRET)


async def started(url: str, heard: list[Any]) -> tuple[Notifier, Notifier]:
    """One that listens, and another one."""
    one, other = listener(url, heard), Notifier(url, [], lambda *_: None, secret=SECRET)
    one.start()
    other.start()
    await until_async(lambda: one.listening_since_s < float("inf"))
    return one, other


async def test_all_that_is_sent_at_once_arrives_in_order(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "MAX_SENT", 3)
    heard: list[Any] = []
    one, other = await started(url, heard)
    # Eight notifications: two of these fit into one.
    items = [[number, "x" * 3_500] for number in range(16)]
    for item in items:
        other.send("here", "items", item)
    await until_async(lambda: len(heard) >= len(items))
    assert heard == items
    await asyncio.gather(one.close(), other.close())


async def test_a_listener_whose_connection_was_lost_hears_again(
    url: str, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "RECONNECT_S", 0.05)
    heard: list[Any] = []
    one = listener(url, heard)
    one.start()
    for number in range(3):
        await until_async(lambda: one.listening_since_s < float("inf"))
        one.send("here", "items", number)
        await until_async(lambda number=number: number in heard)
        since_s = one.listening_since_s
        with postgres.connect() as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = %s AND query LIKE 'LISTEN%%'",
                (url.rpartition("/")[2],),
            )
        await until_async(lambda since_s=since_s: since_s < one.listening_since_s < float("inf"))
    assert heard == [0, 1, 2]
    await one.close()


async def test_what_waits_in_the_socket_is_heard_after_a_check(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each check is a statement; notifications may come with its answer."""
    monkeypatch.setattr(notifier, "CHECK_S", 0.001)
    heard: list[Any] = []
    one = listener(url, heard)
    one.start()
    await until_async(lambda: one.listening_since_s < float("inf"))
    for number in range(200):
        one.send("here", "items", number)
        await asyncio.sleep(0)
    await until_async(lambda: len(heard) == 200)
    assert heard == list(range(200))
    await one.close()


async def test_what_waits_is_sent_before_the_end(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifier, "MAX_SENT", 1)
    monkeypatch.setattr(notifier, "CLOSE_S", 10.0)
    heard: list[Any] = []
    one, other = await started(url, heard)
    items = [[number, "x" * 3_500] for number in range(400)]
    for item in items:
        other.send("here", "items", item)
    await other.close()
    await until_async(lambda: len(heard) >= len(items))
    assert heard == items
    await one.close()
