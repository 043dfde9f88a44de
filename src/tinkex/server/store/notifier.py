"""
Notifications between processes that share a PostgreSQL database (NOTIFY and LISTEN).

A notification is a hint to look at the tables now. It may be lost, arrive twice or late; every receiver
also looks by itself once a second. It is sent after the commit that it tells of, on a connection of its
own: inside the transaction, NOTIFY would serialize all commits of the database.

A notification may have a result in it, and everybody who may connect to the database can send one. So
each is signed with a secret of the database.
"""

import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

import psycopg
import sqlalchemy as sa

from tinkex.server.retry import Backoff, poll_async, retry
from tinkex.server.store.sql_dialects import timeouts

log = logging.getLogger("tinkex.server.store")

#: PostgreSQL allows 8,000 bytes.
MAX_BYTES = 7_900
#: The longest item, as JSON; longer ones are dropped.
MAX_ITEM_BYTES = MAX_BYTES - 100
#: What waits to be sent, with the fixed part of each item; more is dropped.
MAX_PENDING_BYTES = 32 * 2**20
_ITEM_COST = 100
SIGNATURE_BYTES = 16
SIGNATURE_CHARS = 24
RECONNECT_S = 1.0
CLOSE_S = 1.0
#: How often a connection that only listens is checked.
CHECK_S = 30.0
#: Notifications that one statement sends.
MAX_SENT = 100

#: The channel that all web processes hear.
WEB = "tinkex_web"

#: Called with the kind of a notification and its items.
OnNotification = Callable[[str, list[Any]], None]


def channel_of(name: str) -> str:
    """The channel of one process."""
    return f"tinkex_{hashlib.blake2b(name.encode(), digest_size=12).hexdigest()}"


class Notifier:
    """Sends and receives notifications. Belongs to one event loop; `start` first, `close` last."""

    def __init__(
        self,
        db_url: str,
        channels: Iterable[str],
        on_notification: OnNotification,
        *,
        secret: bytes,
    ) -> None:
        url = sa.make_url(db_url)
        url = url.update_query_dict({name: str(value) for name, value in timeouts(url).items()})
        self._address = url.set(drivername="postgresql").render_as_string(hide_password=False)
        self._channels = list(channels)
        self._on_notification = on_notification
        self._secret = secret
        #: Items as JSON, by channel and kind.
        self._pending: dict[tuple[str, str], list[str]] = {}
        self._pending_bytes = 0
        #: When it began to hear what is sent, by the system clock; infinite while it does not.
        self.listening_since_s = math.inf
        self._has_pending = asyncio.Event()
        #: Whether something that is not pending any more is being sent.
        self._is_sending = False
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
                    await poll_async(
                        lambda: not self._pending and not self._is_sending, every_s=0.01
                    )
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def send(self, channel: str, kind: str, item: Any) -> None:
        """Queue a notification for whoever listens; what waits for one channel travels together."""
        text = json.dumps(item, separators=(",", ":"))
        cost = len(text) + _ITEM_COST
        if len(text) > MAX_ITEM_BYTES or self._pending_bytes + cost > MAX_PENDING_BYTES:
            return
        self._pending.setdefault((channel, kind), []).append(text)
        self._pending_bytes += cost
        self._has_pending.set()

    async def _until_closed(
        self, work: Callable[[psycopg.AsyncConnection], Awaitable[None]]
    ) -> None:
        """Run `work` on a connection, and again on a new one after each error."""

        async def connected() -> None:
            async with await psycopg.AsyncConnection.connect(
                self._address, autocommit=True
            ) as connection:
                await work(connection)

        await retry(
            connected,
            Backoff.every(RECONNECT_S),
            should_retry=lambda error: isinstance(error, psycopg.Error),
            on_retry=lambda error, _: log.info(
                "notifications are interrupted: %s", str(error).partition("\n")[0]
            ),
        )

    async def _listen(self, connection: psycopg.AsyncConnection) -> None:
        # psycopg's own iterator waits anew for each notification, which costs three times as much.
        loop, received = asyncio.get_running_loop(), connection.pgconn
        socket = received.socket
        connection.add_notify_handler(lambda notification: self._heard(notification.payload))
        for channel in self._channels:
            await connection.execute(f"LISTEN {channel}".encode())
        lost: asyncio.Future[None] = loop.create_future()

        def read() -> None:
            try:
                received.consume_input()
                while (notification := received.notifies()) is not None:
                    self._heard(notification.extra.decode(errors="replace"))
            except psycopg.Error as error:
                # The socket is closed; another one may get its number at once.
                loop.remove_reader(socket)
                if not lost.done():
                    lost.set_exception(error)

        self.listening_since_s = time.time()
        try:
            while True:
                loop.add_reader(socket, read)
                try:
                    # Also what came with the answer of the last statement.
                    read()
                    await asyncio.wait({lost}, timeout=CHECK_S)
                finally:
                    if not lost.done():
                        loop.remove_reader(socket)
                if lost.done():
                    lost.result()
                await connection.execute("SELECT 1")
        finally:
            self.listening_since_s = math.inf

    def _heard(self, payload: str) -> None:
        signature, text = payload[:SIGNATURE_CHARS], payload[SIGNATURE_CHARS:]
        if not hmac.compare_digest(signature.encode(), self._signature(text).encode()):
            log.warning("a notification was dropped: no process of this database has signed it")
            return
        try:
            kind, items = json.loads(text)
            self._on_notification(kind, items)
        except Exception:
            # A hint must not end the process; the tables have everything.
            log.exception("a notification was not understood")

    async def _send(self, connection: psycopg.AsyncConnection) -> None:
        while True:
            await self._has_pending.wait()
            self._has_pending.clear()
            pending, self._pending, self._pending_bytes = self._pending, {}, 0
            sent = [
                (channel, self._signature(text) + text)
                for (channel, kind), items in pending.items()
                for text in payloads(kind, items)
            ]
            self._is_sending = True
            try:
                for first in range(0, len(sent), MAX_SENT):
                    some = sent[first : first + MAX_SENT]
                    # Not arrays: psycopg needs more time for two of them than for the statement.
                    await connection.execute(
                        f"SELECT {', '.join(['pg_notify(%s, %s)'] * len(some))}".encode(),
                        [text for one in some for text in one],
                    )
            finally:
                self._is_sending = False

    def _signature(self, text: str) -> str:
        digest = hmac.digest(self._secret, text.encode(), "sha256")
        return base64.b64encode(digest[:SIGNATURE_BYTES]).decode()


def payloads(kind: str, items: Iterable[str]) -> Iterator[str]:
    """The items, which are JSON, as the contents of notifications, each within the limit."""
    some: list[str] = []
    size = 0
    for item in items:
        if some and size + len(item) + 1 > MAX_ITEM_BYTES:
            yield f'["{kind}",[{",".join(some)}]]'
            some, size = [], 0
        some.append(item)
        size += len(item) + 1
    if some:
        yield f'["{kind}",[{",".join(some)}]]'
