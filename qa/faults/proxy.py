"""
A proxy on loopback through which a client meets every fault a network has.

It knows just enough HTTP/1.1 to see where a message begins and ends. Whether the n-th request of an
endpoint meets a fault, and which, depends on the seed alone, so the seed of a run that failed
brings the same faults again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any
from urllib.parse import urlsplit

MOST_HEADERS = 2**16
LONGEST_DELAY_S = 0.2
DRIPS = 8
GARBAGE = b"\x16\x03\x01\x02\x00\x01\x00 is this HTTP?\r\n\r\n"
PAGE = b"<html><body>Back in a moment.</body></html>"


class HungUp(Exception):
    """One of the two sides is gone, or we left it."""


@dataclass(frozen=True)
class Asked:
    head: bytes
    body: bytes

    @property
    def path(self) -> str:
        return self.head.split(b" ", 2)[1].decode()

    @property
    def endpoint(self) -> str:
        """The path without its ids, so that requests of one kind are counted together."""
        parts = self.path.partition("?")[0].removeprefix("/api/v1/").split("/")
        if parts[0] in ("sessions", "samplers", "training_runs") and len(parts) > 1:
            parts[1] = "*"
        return "/".join(parts)


@dataclass
class Answered:
    """An answer whose body is still on its way, in the pieces in which it travels."""

    head: bytes
    pieces: AsyncIterator[bytes]

    async def whole(self) -> bytes:
        return b"".join([piece async for piece in self.pieces])

    def with_length(self, change: Callable[[int], int]) -> bytes:
        """The head with another Content-Length; as it is where there is none."""
        lines = self.head.split(b"\r\n")
        for index, line in enumerate(lines):
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                lines[index] = b"%s: %d" % (name, max(0, change(int(value))))
        return b"\r\n".join(lines)


async def read_head(reader: asyncio.StreamReader) -> tuple[bytes, dict[bytes, bytes]]:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, OSError) as error:
        raise HungUp from error
    lines = [line.partition(b":") for line in head.split(b"\r\n")[1:] if line]
    return head, {name.lower(): value.strip() for name, _, value in lines}


async def read_asked(reader: asyncio.StreamReader) -> Asked:
    head, headers = await read_head(reader)
    assert b"transfer-encoding" not in headers, "this proxy reads no chunked requests"
    return Asked(head, await reader.readexactly(int(headers.get(b"content-length", 0))))


class Link:
    """A connection to the server; opened when needed, opened anew when the server closed it."""

    def __init__(self, host: str, port: int) -> None:
        self._place = (host, port)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, asked: Asked) -> Answered:
        if self._streams is None or self._streams[0].at_eof():
            self.close()
            self._streams = await asyncio.open_connection(*self._place, limit=MOST_HEADERS)
        reader, writer = self._streams
        writer.write(asked.head + asked.body)
        await writer.drain()
        head, headers = await read_head(reader)
        return Answered(head, self._pieces(reader, headers))

    async def _pieces(
        self, reader: asyncio.StreamReader, headers: Mapping[bytes, bytes]
    ) -> AsyncIterator[bytes]:
        try:
            if headers.get(b"transfer-encoding") != b"chunked":
                yield await reader.readexactly(int(headers.get(b"content-length", 0)))
                return
            size = None
            while size != 0:
                line = await reader.readuntil(b"\r\n")
                size = int(line, 16)
                yield line + await reader.readexactly(size + 2)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise HungUp from error

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


@dataclass
class Passage:
    """One request on its way through; its methods are the ways it may go."""

    asked: Asked
    client: asyncio.StreamWriter
    link: Link
    rng: random.Random
    aside: Callable[[Coroutine[Any, Any, None]], None]
    fresh_link: Callable[[], Link]
    config: Mapping[str, Any]

    async def ask(self) -> Answered:
        answer = await self.link.ask(self.asked)
        if self.config and self.asked.endpoint == "client/config":
            body = json.dumps(json.loads(await answer.whole()) | dict(self.config)).encode()
            head = answer.with_length(lambda _: len(body))
            return Answered(head, _one(body))
        return answer

    async def give(self, head: bytes, pieces: AsyncIterator[bytes]) -> None:
        self.client.write(head)
        async for piece in pieces:
            self.client.write(piece)
            await self.client.drain()

    async def untouched(self) -> None:
        answer = await self.ask()
        await self.give(answer.head, answer.pieces)

    # -- faults ----------------------------------------------------------------------------------

    async def delayed(self) -> None:
        await asyncio.sleep(self.rng.random() * LONGEST_DELAY_S)
        await self.untouched()

    async def reset_before(self) -> None:
        self._reset()

    async def reset_after(self) -> None:
        await (await self.ask()).whole()
        self._reset()

    async def cut_short(self) -> None:
        answer = await self.ask()
        pieces = [piece async for piece in answer.pieces]
        body = b"".join(pieces)
        self.client.write(answer.head + body[: self.rng.randrange(len(body) or 1)])
        await self.client.drain()
        self._hang_up()

    async def sent_twice(self) -> None:
        async def again() -> None:
            link = self.fresh_link()
            try:
                await (await link.ask(self.asked)).whole()
            finally:
                link.close()

        self.aside(again())
        await self.untouched()

    async def answered_408(self) -> None:
        await self._refuse(408, "Request Timeout")

    async def answered_409(self) -> None:
        await self._refuse(409, "Conflict")

    async def answered_429_with_milliseconds(self) -> None:
        await self._refuse(429, "Too Many Requests", "retry-after-ms: 20")

    async def answered_429_with_seconds(self) -> None:
        await self._refuse(429, "Too Many Requests", "Retry-After: 0.03")

    async def answered_429_with_a_date(self) -> None:
        then = format_datetime(datetime.now(UTC) + timedelta(seconds=1), usegmt=True)
        await self._refuse(429, "Too Many Requests", f"Retry-After: {then}")

    async def answered_500(self) -> None:
        await self._refuse(500, "Internal Server Error")

    async def answered_502(self) -> None:
        await self._refuse(502, "Bad Gateway")

    async def answered_503(self) -> None:
        await self._refuse(503, "Service Unavailable", "Retry-After: 0.05")

    async def length_too_long(self) -> None:
        answer = await self.ask()
        await self.give(answer.with_length(lambda size: size + 10), answer.pieces)
        self._hang_up()

    async def length_too_short(self) -> None:
        answer = await self.ask()
        # And everything is sent all the same: what is left over stays on the connection.
        await self.give(answer.with_length(lambda size: size - 1 - size // 3), answer.pieces)

    async def half_closed(self) -> None:
        await (await self.ask()).whole()
        self.client.write_eof()
        await asyncio.sleep(0.05)
        self._hang_up()

    async def no_http(self) -> None:
        self.client.write(GARBAGE)

    async def another_page(self) -> None:
        await (await self.ask()).whole()
        await self._say(200, "OK", PAGE, "Content-Type: text/html")

    async def dripped(self) -> None:
        answer = await self.ask()
        self.client.write(answer.head)
        async for piece in answer.pieces:
            size = len(piece) // DRIPS + 1
            for start in range(0, len(piece), size):
                self.client.write(piece[start : start + size])
                await asyncio.sleep(0.005)

    # -- parts of them ---------------------------------------------------------------------------

    async def _refuse(self, status: int, reason: str, *headers: str) -> None:
        """In the server's place; half of the time it has done the work, and nobody hears of it."""
        if self.rng.random() < 0.5:
            await (await self.ask()).whole()
        body = self.rng.choice([b"", PAGE, b'{"detail":"not now"}'])
        await self._say(status, reason, body, *headers)

    async def _say(self, status: int, reason: str, body: bytes, *headers: str) -> None:
        lines = [f"HTTP/1.1 {status} {reason}", f"Content-Length: {len(body)}", *headers]
        self.client.write("\r\n".join([*lines, "", ""]).encode() + body)
        await self.client.drain()

    def _reset(self) -> None:
        self.client.transport.abort()
        raise HungUp

    def _hang_up(self) -> None:
        self.client.close()
        raise HungUp


async def _one(piece: bytes) -> AsyncIterator[bytes]:
    yield piece


#: Every fault, and how many times as often as the rarest it comes.
FAULTS: dict[str, tuple[Callable[[Passage], Coroutine[Any, Any, None]], int]] = {
    "delayed": (Passage.delayed, 4),
    "reset before the server": (Passage.reset_before, 4),
    "reset after the server": (Passage.reset_after, 4),
    "cut short": (Passage.cut_short, 4),
    "sent twice": (Passage.sent_twice, 4),
    "408": (Passage.answered_408, 2),
    "409": (Passage.answered_409, 2),
    "429, Retry-After-Ms": (Passage.answered_429_with_milliseconds, 2),
    "429, Retry-After in seconds": (Passage.answered_429_with_seconds, 2),
    "429, Retry-After as a date": (Passage.answered_429_with_a_date, 1),
    "500": (Passage.answered_500, 2),
    "502": (Passage.answered_502, 2),
    "503": (Passage.answered_503, 2),
    "Content-Length too long": (Passage.length_too_long, 2),
    "Content-Length too short": (Passage.length_too_short, 2),
    "half-closed": (Passage.half_closed, 2),
    "not HTTP": (Passage.no_http, 2),
    "another page with 200": (Passage.another_page, 1),
    "dripped": (Passage.dripped, 4),
}


@dataclass
class Dice:
    """Which request meets which fault."""

    seed: int
    #: Share of requests that meet one.
    rate: float
    _asked: Counter[str] = field(default_factory=Counter)

    def throw(self, endpoint: str) -> tuple[str | None, random.Random]:
        number = self._asked[endpoint]
        self._asked[endpoint] += 1
        rng = random.Random(f"{self.seed} {endpoint} {number}")
        if rng.random() >= self.rate:
            return None, rng
        names = list(FAULTS)
        return rng.choices(names, [FAULTS[name][1] for name in names])[0], rng


@dataclass
class Proxy:
    upstream: str
    dice: Dice
    #: Put over the server's answer to `client/config`.
    config: Mapping[str, Any]
    url: str = ""
    #: How many requests came, by endpoint; how many met which fault, by fault and by endpoint.
    requests: Counter[str] = field(default_factory=Counter)
    met: Counter[str] = field(default_factory=Counter)
    met_by: Counter[tuple[str, str]] = field(default_factory=Counter)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def serve(self, ready: Callable[[], None], stop: asyncio.Event) -> None:
        server = await asyncio.start_server(
            self._connected, "127.0.0.1", 0, limit=MOST_HEADERS, backlog=1024
        )
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ready()
        await stop.wait()
        server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._aside(self._conversation(reader, writer))

    def _aside(self, work: Coroutine[Any, Any, None]) -> None:
        async def quietly() -> None:
            with contextlib.suppress(HungUp, OSError, asyncio.IncompleteReadError):
                await work

        task = asyncio.get_running_loop().create_task(quietly())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _link(self) -> Link:
        place = urlsplit(self.upstream)
        assert place.hostname
        assert place.port
        return Link(place.hostname, place.port)

    async def _conversation(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        link = self._link()
        try:
            while True:
                asked = await read_asked(reader)
                name, rng = self.dice.throw(asked.endpoint)
                self.requests[asked.endpoint] += 1
                if name is not None:
                    self.met[name] += 1
                    self.met_by[asked.endpoint, name] += 1
                way = Passage.untouched if name is None else FAULTS[name][0]
                await way(Passage(asked, writer, link, rng, self._aside, self._link, self.config))
                await writer.drain()
        finally:
            link.close()
            writer.close()


@contextmanager
def in_front_of(
    url: str, *, seed: int = 0, rate: float = 0.0, config: Mapping[str, Any] | None = None
) -> Iterator[Proxy]:
    """The proxy in a thread of its own, until the block ends. Without a rate it harms nobody."""
    proxy = Proxy(url, Dice(seed, rate), config or {})
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    ready: Future[None] = Future()

    def run() -> None:
        try:
            loop.run_until_complete(proxy.serve(lambda: ready.set_result(None), stop))
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error)
            raise

    thread = threading.Thread(target=run, name="fault-proxy", daemon=True)
    thread.start()
    try:
        ready.result(10)
        yield proxy
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()
