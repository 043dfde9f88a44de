"""
Notifications between processes that share a PostgreSQL database (NOTIFY and LISTEN).

A notification is a hint to look at the tables now. It may be lost, arrive twice or late; every receiver
also looks by itself once a second. It is sent after the commit that it tells of, on a connection of its
own: inside the transaction, NOTIFY would serialize all commits of the database.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator

import psycopg
import sqlalchemy as sa

from tinkex.server.retry import poll_async
from tinkex.server.store.sql_dialects import timeouts

log = logging.getLogger("tinkex.server.store")

#: PostgreSQL allows 8,000 bytes.
MAX_BYTES = 7_900
#: Notifications that wait to be sent; more are dropped.
MAX_PENDING = 20_000
RECONNECT_S = 1.0
CLOSE_S = 1.0
#: How often a connection that only listens is checked.
CHECK_S = 30.0

#: The channel that all web processes hear.
WEB = "tinkex_web"

#: Called with the kind of a notification and its items.
OnNotification = Callable[[str, list[str]], None]


def channel_of(name: str) -> str:
    """The channel of one process."""
    return f"tinkex_{hashlib.blake2b(name.encode(), digest_size=12).hexdigest()}"


class Notifier:
    """Sends and receives notifications. Belongs to one event loop; `start` first, `close` last."""

    def __init__(
        self, db_url: str, channels: Iterable[str], on_notification: OnNotification
    ) -> None:
        url = sa.make_url(db_url)
        url = url.update_query_dict({name: str(value) for name, value in timeouts(url).items()})
        self._address = url.set(drivername="postgresql").render_as_string(hide_password=False)
        self._channels = list(channels)
        self._on_notification = on_notification
        #: By channel and kind.
        self._pending: dict[tuple[str, str], list[str]] = {}
        self._count = 0
        self._has_pending = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._until_closed(self._listen)),
            asyncio.create_task(self._until_closed(self._send)),
        ]

    async def close(self) -> None:
        """Send what waits, then stop."""
        if self._tasks:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await poll_async(lambda: not self._pending, every_s=0.01)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def send(self, channel: str, kind: str, item: str) -> None:
        """Queue a notification for whoever listens; what waits for one channel travels together."""
        if self._count >= MAX_PENDING:
            return
        self._pending.setdefault((channel, kind), []).append(item)
        self._count += 1
        self._has_pending.set()

    async def _until_closed(
        self, work: Callable[[psycopg.AsyncConnection], Awaitable[None]]
    ) -> None:
        """Run `work` on a connection, and again on a new one after each error."""
        while True:
            try:
                async with await psycopg.AsyncConnection.connect(
                    self._address, autocommit=True
                ) as connection:
                    await work(connection)
            except psycopg.Error as error:
                log.info("notifications are interrupted: %s", str(error).partition("\n")[0])
            await asyncio.sleep(RECONNECT_S)

    async def _listen(self, connection: psycopg.AsyncConnection) -> None:
        for channel in self._channels:
            await connection.execute(f"LISTEN {channel}".encode())
        while True:
            async for notification in connection.notifies(timeout=CHECK_S):
                self._heard(notification.payload)
            await connection.execute("SELECT 1")

    def _heard(self, payload: str) -> None:
        try:
            kind, items = json.loads(payload)
            self._on_notification(kind, items)
        except Exception:
            # A hint must not end the process; the tables have everything.
            log.exception("a notification was not understood")

    async def _send(self, connection: psycopg.AsyncConnection) -> None:
        while True:
            await self._has_pending.wait()
            self._has_pending.clear()
            pending, self._pending, self._count = self._pending, {}, 0
            sent = [
                (channel, payload)
                for (channel, kind), items in pending.items()
                for payload in payloads(kind, items)
            ]
            channels, texts = zip(*sent, strict=True) if sent else ((), ())
            await connection.execute(
                "SELECT pg_notify(one.channel, one.payload) "
                "FROM unnest(%s::text[], %s::text[]) AS one (channel, payload)",
                (list(channels), list(texts)),
            )


def payloads(kind: str, items: list[str]) -> Iterator[str]:
    """The items as the contents of notifications, each within the limit; larger items are dropped."""
    some: list[str] = []
    size = 0
    for item in items:
        cost = len(json.dumps(item)) + 2
        if cost > MAX_BYTES - 50:
            continue
        if size + cost > MAX_BYTES - 50:
            yield json.dumps([kind, some])
            some, size = [], 0
        some.append(item)
        size += cost
    if some:
        yield json.dumps([kind, some])
