"""
An HTTP proxy on loopback that injects network faults.

It parses only as much HTTP/1.1 as it needs to find the ends of messages. The seed alone decides
whether the n-th request of an endpoint has a fault, and which, so a failed run can be repeated.
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

MAX_HEADER_BYTES = 2**16
MAX_DELAY_S = 0.2
SLOW_PIECES = 8
GARBAGE = b"\x16\x03\x01\x02\x00\x01\x00 is this HTTP?\r\n\r\n"
PAGE = b"<html><body>Back in a moment.</body></html>"


class ConnectionClosed(Exception):
    """The client, the server or the proxy has closed the connection."""


@dataclass(frozen=True)
class ClientRequest:
    head: bytes
    body: bytes

    @property
    def path(self) -> str:
        return self.head.split(b" ", 2)[1].decode()

    @property
    def endpoint(self) -> str:
        """The path without ids, so that requests of one kind are counted together."""
        parts = self.path.partition("?")[0].removeprefix("/api/v1/").split("/")
        if parts[0] in ("sessions", "samplers", "training_runs") and len(parts) > 1:
            parts[1] = "*"
        return "/".join(parts)


@dataclass
class ServerResponse:
    """A response whose body arrives in pieces."""

    head: bytes
    pieces: AsyncIterator[bytes]

    async def whole(self) -> bytes:
        return b"".join([piece async for piece in self.pieces])

    def with_length(self, change: Callable[[int], int]) -> bytes:
        """The head with a changed Content-Length, if it has one."""
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
        raise ConnectionClosed from error
    lines = [line.partition(b":") for line in head.split(b"\r\n")[1:] if line]
    return head, {name.lower(): value.strip() for name, _, value in lines}


async def read_request(reader: asyncio.StreamReader) -> ClientRequest:
    head, headers = await read_head(reader)
    assert b"transfer-encoding" not in headers, "the proxy does not support chunked requests"
    return ClientRequest(head, await reader.readexactly(int(headers.get(b"content-length", 0))))


class Upstream:
    """A connection to the server, opened on demand and again after the server closed it."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, request: ClientRequest) -> ServerResponse:
        if self._streams is None or self._streams[0].at_eof():
            self.close()
            self._streams = await asyncio.open_connection(*self._address, limit=MAX_HEADER_BYTES)
        reader, writer = self._streams
        writer.write(request.head + request.body)
        await writer.drain()
        head, headers = await read_head(reader)
        return ServerResponse(head, self._pieces(reader, headers))

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
            raise ConnectionClosed from error

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


@dataclass
class Exchange:
    """One request and its response. Each method of a fault handles the request with that fault."""

    request: ClientRequest
    client: asyncio.StreamWriter
    upstream: Upstream
    rng: random.Random
    in_background: Callable[[Coroutine[Any, Any, None]], None]
    new_upstream: Callable[[], Upstream]
    config: Mapping[str, Any]

    async def forward(self) -> ServerResponse:
        answer = await self.upstream.send(self.request)
        if self.config and self.request.endpoint == "client/config":
            body = json.dumps(json.loads(await answer.whole()) | dict(self.config)).encode()
            head = answer.with_length(lambda _: len(body))
            return ServerResponse(head, _single(body))
        return answer

    async def respond(self, head: bytes, pieces: AsyncIterator[bytes]) -> None:
        self.client.write(head)
        async for piece in pieces:
            self.client.write(piece)
            await self.client.drain()

    async def untouched(self) -> None:
        answer = await self.forward()
        await self.respond(answer.head, answer.pieces)

    # -- faults ----------------------------------------------------------------------------------

    async def delayed(self) -> None:
        await asyncio.sleep(self.rng.random() * MAX_DELAY_S)
        await self.untouched()

    async def reset_before(self) -> None:
        self._reset()

    async def reset_after(self) -> None:
        await (await self.forward()).whole()
        self._reset()

    async def cut_short(self) -> None:
        answer = await self.forward()
        pieces = [piece async for piece in answer.pieces]
        body = b"".join(pieces)
        self.client.write(answer.head + body[: self.rng.randrange(len(body) or 1)])
        await self.client.drain()
        self._close()

    async def sent_twice(self) -> None:
        async def again() -> None:
            upstream = self.new_upstream()
            try:
                await (await upstream.send(self.request)).whole()
            finally:
                upstream.close()

        self.in_background(again())
        await self.untouched()

    async def answered_408(self) -> None:
        await self._fail(408, "Request Timeout")

    async def answered_409(self) -> None:
        await self._fail(409, "Conflict")

    async def answered_429_with_milliseconds(self) -> None:
        await self._fail(429, "Too Many Requests", "retry-after-ms: 20")

    async def answered_429_with_seconds(self) -> None:
        await self._fail(429, "Too Many Requests", "Retry-After: 0.03")

    async def answered_429_with_a_date(self) -> None:
        then = format_datetime(datetime.now(UTC) + timedelta(seconds=1), usegmt=True)
        await self._fail(429, "Too Many Requests", f"Retry-After: {then}")

    async def answered_500(self) -> None:
        await self._fail(500, "Internal Server Error")

    async def answered_502(self) -> None:
        await self._fail(502, "Bad Gateway")

    async def answered_503(self) -> None:
        await self._fail(503, "Service Unavailable", "Retry-After: 0.05")

    async def length_too_long(self) -> None:
        answer = await self.forward()
        await self.respond(answer.with_length(lambda size: size + 10), answer.pieces)
        self._close()

    async def length_too_short(self) -> None:
        answer = await self.forward()
        # The whole body is sent; its rest stays on the connection.
        await self.respond(answer.with_length(lambda size: size - 1 - size // 3), answer.pieces)

    async def half_closed(self) -> None:
        await (await self.forward()).whole()
        self.client.write_eof()
        await asyncio.sleep(0.05)
        self._close()

    async def not_http(self) -> None:
        self.client.write(GARBAGE)

    async def html_page(self) -> None:
        await (await self.forward()).whole()
        await self._respond_with(200, "OK", PAGE, "Content-Type: text/html")

    async def sent_slowly(self) -> None:
        answer = await self.forward()
        self.client.write(answer.head)
        async for piece in answer.pieces:
            size = len(piece) // SLOW_PIECES + 1
            for start in range(0, len(piece), size):
                self.client.write(piece[start : start + size])
                await asyncio.sleep(0.005)

    # -- helpers ---------------------------------------------------------------------------------

    async def _fail(self, status: int, reason: str, *headers: str) -> None:
        """Responds instead of the server; in half the cases the server has processed the request."""
        if self.rng.random() < 0.5:
            await (await self.forward()).whole()
        body = self.rng.choice([b"", PAGE, b'{"detail":"not now"}'])
        await self._respond_with(status, reason, body, *headers)

    async def _respond_with(self, status: int, reason: str, body: bytes, *headers: str) -> None:
        lines = [f"HTTP/1.1 {status} {reason}", f"Content-Length: {len(body)}", *headers]
        self.client.write("\r\n".join([*lines, "", ""]).encode() + body)
        await self.client.drain()

    def _reset(self) -> None:
        self.client.transport.abort()
        raise ConnectionClosed

    def _close(self) -> None:
        self.client.close()
        raise ConnectionClosed


async def _single(piece: bytes) -> AsyncIterator[bytes]:
    yield piece


#: All faults with their relative frequencies.
FAULTS: dict[str, tuple[Callable[[Exchange], Coroutine[Any, Any, None]], int]] = {
    "delayed": (Exchange.delayed, 4),
    "reset before the server": (Exchange.reset_before, 4),
    "reset after the server": (Exchange.reset_after, 4),
    "cut short": (Exchange.cut_short, 4),
    "sent twice": (Exchange.sent_twice, 4),
    "408": (Exchange.answered_408, 2),
    "409": (Exchange.answered_409, 2),
    "429, Retry-After-Ms": (Exchange.answered_429_with_milliseconds, 2),
    "429, Retry-After in seconds": (Exchange.answered_429_with_seconds, 2),
    "429, Retry-After as a date": (Exchange.answered_429_with_a_date, 1),
    "500": (Exchange.answered_500, 2),
    "502": (Exchange.answered_502, 2),
    "503": (Exchange.answered_503, 2),
    "Content-Length too long": (Exchange.length_too_long, 2),
    "Content-Length too short": (Exchange.length_too_short, 2),
    "half-closed": (Exchange.half_closed, 2),
    "not HTTP": (Exchange.not_http, 2),
    "HTML page with 200": (Exchange.html_page, 1),
    "sent slowly": (Exchange.sent_slowly, 4),
}


@dataclass
class FaultSchedule:
    """Decides which request has which fault."""

    seed: int
    #: Share of requests with a fault.
    rate: float
    _counts: Counter[str] = field(default_factory=Counter)

    def next_fault(self, endpoint: str) -> tuple[str | None, random.Random]:
        number = self._counts[endpoint]
        self._counts[endpoint] += 1
        rng = random.Random(f"{self.seed} {endpoint} {number}")
        if rng.random() >= self.rate:
            return None, rng
        names = list(FAULTS)
        return rng.choices(names, [FAULTS[name][1] for name in names])[0], rng


@dataclass
class Proxy:
    upstream: str
    schedule: FaultSchedule
    #: Merged into the server's response to `client/config`.
    config: Mapping[str, Any]
    url: str = ""
    #: Number of requests by endpoint; of faults by name, and by endpoint and name.
    requests: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    faults_by_endpoint: Counter[tuple[str, str]] = field(default_factory=Counter)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def serve(self, ready: Callable[[], None], stop: asyncio.Event) -> None:
        server = await asyncio.start_server(
            self._accept, "127.0.0.1", 0, limit=MAX_HEADER_BYTES, backlog=1024
        )
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ready()
        await stop.wait()
        server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._in_background(self._serve_connection(reader, writer))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        async def run() -> None:
            with contextlib.suppress(ConnectionClosed, OSError, asyncio.IncompleteReadError):
                await work

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _connect(self) -> Upstream:
        address = urlsplit(self.upstream)
        assert address.hostname
        assert address.port
        return Upstream(address.hostname, address.port)

    async def _serve_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        upstream = self._connect()
        try:
            while True:
                request = await read_request(reader)
                name, rng = self.schedule.next_fault(request.endpoint)
                self.requests[request.endpoint] += 1
                if name is not None:
                    self.faults[name] += 1
                    self.faults_by_endpoint[request.endpoint, name] += 1
                handle = Exchange.untouched if name is None else FAULTS[name][0]
                await handle(
                    Exchange(
                        request,
                        writer,
                        upstream,
                        rng,
                        self._in_background,
                        self._connect,
                        self.config,
                    )
                )
                await writer.drain()
        finally:
            upstream.close()
            writer.close()


@contextmanager
def fault_proxy(
    url: str, *, seed: int = 0, rate: float = 0.0, config: Mapping[str, Any] | None = None
) -> Iterator[Proxy]:
    """Runs the proxy in a thread until the block ends. With rate 0 it injects no faults."""
    proxy = Proxy(url, FaultSchedule(seed, rate), config or {})
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
