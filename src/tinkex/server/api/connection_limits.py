"""
Limits on HTTP connections that uvicorn does not have.

uvicorn buffers headers, trailers and pipelined requests without limit, and waits forever for a
first request, for the rest of a request, and for a client that does not read its response.

`LimitedProtocol` stands between the transport and uvicorn's protocol. It parses the requests
itself, refuses what is too long before uvicorn sees it, and closes connections that make no
progress. It uses uvicorn's protocol through asyncio's interface, and relies on three more facts about
it: `app_state` becomes the state of each request, its parser is as lenient as this one, and
`connection_lost(None)` stops its timers. `ReportingApp` reports what the application does with a
request:

    http = partial(LimitedProtocol, HttpToolsProtocol, head_s=30, stall_s=60)
    uvicorn.Config(ReportingApp(app), http=http)
"""

import asyncio
import contextlib
import enum
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import httptools
from starlette.types import ASGIApp, Receive, Scope, Send

#: Bytes of the request line and headers together; also of anything else that is not a body.
MAX_HEAD_BYTES = 64 * 1024
#: Requests that a connection may send before the first response. Clients of this API send one. A
#: client that pipelines must expect the connection to close (RFC 9112, 9.3.2).
MAX_PIPELINED = 32
#: A body or a response makes progress when this many bytes of it move; a last piece may be smaller.
MIN_PROGRESS_BYTES = 4096
# TCP keep-alive detects a peer that vanished (power, network) after about this long.
DEAD_PEER_S = 60

#: Key in the state of a request: the `LimitedProtocol` of its connection.
CONNECTION = "tinkex.connection"

_TOO_LONG = (
    "431 Request Header Fields Too Large",
    f"the head of this request is longer than the allowed {MAX_HEAD_BYTES} bytes; send less.",
)
_NO_HOST = ("400 Bad Request", "an HTTP/1.1 request must have exactly one Host header.")
_ENCODING = (
    "400 Bad Request",
    "the only supported Transfer-Encoding is chunked; send that, or a Content-Length.",
)


def ambiguous_framing(
    headers: Sequence[tuple[bytes, bytes]], version: str
) -> tuple[str, str] | None:
    """
    Status and reason for headers that a proxy and this server could read differently.

    RFC 9112, 3.2 and 6.1. Header names are in lower case.
    """
    hosts = sum(name == b"host" for name, _ in headers)
    if hosts > 1 or (hosts == 0 and version == "1.1"):
        return _NO_HOST
    encodings = [value for name, value in headers if name == b"transfer-encoding"]
    if encodings and [value.strip().lower() for value in encodings] != [b"chunked"]:
        return _ENCODING
    return None


class RequestReader:
    """Follows the requests of one connection, and finds the ones to refuse. Pure: no sockets."""

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        # As in uvicorn: both must find the same requests.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
        #: Status and reason, once something is refused.
        self.refusal: tuple[str, str] | None = None
        #: Requests whose head is complete and that the application has not finished.
        self.unanswered = 0
        #: Number of headers of each request that the application has not started.
        self.header_counts: deque[int] = deque()
        #: Whether the last request is incomplete, and whether its head is complete.
        self.in_request = False
        self.in_body = False
        self._url_bytes = 0
        self._headers: list[tuple[bytes, bytes]] = []
        # Bytes since the last complete head, piece of a body, or end of a request.
        self._overhead_bytes = 0

    def feed(self, data: bytes) -> None:
        # Check before adding: a body may arrive in one piece with its head.
        if self._overhead_bytes > MAX_HEAD_BYTES:
            self.refusal = _TOO_LONG
            return
        self._overhead_bytes += len(data)
        # uvicorn finds the same errors and answers them; it ignores upgrades.
        with contextlib.suppress(httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._parser.feed_data(data)

    def close(self) -> None:
        """Break the reference cycle with the parser: garbage collections are rare."""
        del self._parser

    def on_message_begin(self) -> None:
        self.in_request = True
        self._overhead_bytes = self._url_bytes = 0
        self._headers = []

    def on_url(self, url: bytes) -> None:
        self._url_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.in_body:  # otherwise it is a trailer
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.in_body = True
        self._overhead_bytes = 0
        if self.refusal is not None:
            return
        size = self._url_bytes + sum(len(name) + len(value) + 4 for name, value in self._headers)
        if size > MAX_HEAD_BYTES or self.unanswered > MAX_PIPELINED:
            self.refusal = _TOO_LONG
        else:
            version = self._parser.get_http_version()
            self.refusal = ambiguous_framing(self._headers, version)
        if self.refusal is None:
            self.unanswered += 1
            self.header_counts.append(len(self._headers))

    def on_body(self, body: bytes) -> None:
        self._overhead_bytes = 0

    def on_message_complete(self) -> None:
        self.in_request = self.in_body = False
        self._overhead_bytes = 0


class Phase(enum.Enum):
    """What a connection waits for."""

    HEAD = enum.auto()  # a request, or the rest of its headers
    IDLE = enum.auto()  # the next request after a response; uvicorn limits this
    BODY = enum.auto()  # the rest of a body
    WORK = enum.auto()  # the server
    ANSWER = enum.auto()  # the client, to read the response


class StallTimer:
    """How long one connection has made no progress. Pure: no clock, no sockets."""

    def __init__(self, *, head_s: float, stall_s: float) -> None:
        self._limit_s = {Phase.HEAD: head_s, Phase.BODY: stall_s, Phase.ANSWER: stall_s}
        self._state: tuple[Phase, int] | None = None
        self._since_s = 0.0
        self._moved = 0

    def is_over(self, phase: Phase, *, request: int, moved: int, now_s: float) -> bool:
        """
        Whether the connection has exceeded the limit of its phase.

        `request` is the number of the current request, `moved` the bytes moved in this phase.
        """
        state = (phase, request)
        progress = phase is not Phase.HEAD and moved - self._moved >= MIN_PROGRESS_BYTES
        if state != self._state or progress:
            self._state, self._since_s, self._moved = state, now_s, moved
        limit_s = self._limit_s.get(phase, 0.0)
        return 0 < limit_s <= now_s - self._since_s


class LimitedProtocol(asyncio.Protocol):
    """Limits one connection. `make_inner` makes the protocol that serves it; 0 is no limit."""

    def __init__(
        self,
        make_inner: Callable[..., asyncio.Protocol],
        *,
        head_s: float,
        stall_s: float,
        app_state: dict[str, Any],
        **options: Any,
    ) -> None:
        # The state of each request is a copy of this.
        self._app_state = {**app_state, CONNECTION: self}
        self._inner = make_inner(app_state=self._app_state, **options)
        self._reader = RequestReader()
        self._stall_timer = StallTimer(head_s=head_s, stall_s=stall_s)
        limits = [limit_s for limit_s in (head_s, stall_s) if limit_s > 0]
        self._check_s = min(limits) / 4 if limits else 0.0
        self._next_check: asyncio.TimerHandle | None = None
        self._transport: Any = None
        self._requests = 0
        self._received = 0
        self._is_idle = False
        self._write_paused = False
        #: Called when the client disconnects before its response. Waiting for ASGI's disconnect
        #: message instead would need a task for each of thousands of polls.
        self.on_disconnect: Callable[[], None] | None = None
        self.disconnected = False

    # What the application reports.

    def request_started(self) -> int | None:
        """The number of headers of the request, without trailers."""
        self._requests += 1
        counts = self._reader.header_counts
        return counts.popleft() if counts else None

    def request_finished(self) -> None:
        self._reader.unanswered -= 1
        self._is_idle = not self._reader.unanswered and not self._reader.in_request
        self.on_disconnect = None

    # What the transport reports.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        _enable_keepalive(transport.get_extra_info("socket"))
        self._inner.connection_made(transport)
        if self._check_s:
            self._check()

    def data_received(self, data: bytes) -> None:
        if self._reader.refusal is not None:
            return
        self._received += len(data)
        self._is_idle = False
        self._reader.feed(data)
        if self._reader.refusal is None:
            self._inner.data_received(data)
        else:
            self._refuse(*self._reader.refusal)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._write_paused = True
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._write_paused = False
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._next_check is not None:
            self._next_check.cancel()
        # With an error, uvicorn would not stop its keep-alive timer, which holds the connection.
        self._inner.connection_lost(None)
        self.disconnected = True
        if self.on_disconnect is not None:
            self.on_disconnect()
        # Break reference cycles: garbage collections are rare.
        self._app_state.clear()
        self._reader.close()

    def _refuse(self, status: str, reason: str) -> None:
        # While an earlier request is running, this would be read as its response.
        if not self._reader.unanswered:
            head = (
                f"HTTP/1.1 {status}\r\ncontent-type: text/plain; charset=utf-8\r\n"
                f"connection: close\r\ncontent-length: {len(reason)}\r\n\r\n"
            )
            self._transport.write((head + reason).encode())
        self._transport.close()

    def _check(self) -> None:
        """Abort the connection if it made no progress for too long; else check again later."""
        loop = asyncio.get_running_loop()
        phase, moved = self._phase()
        if self._stall_timer.is_over(phase, request=self._requests, moved=moved, now_s=loop.time()):
            self._transport.abort()
        else:
            self._next_check = loop.call_later(self._check_s, self._check)

    def _phase(self) -> tuple[Phase, int]:
        """The phase of this connection, and the bytes moved in it."""
        unanswered = self._reader.unanswered
        unread = self._transport.get_write_buffer_size()
        # While writing is paused, and after the response, nothing is added to the write buffer.
        if unread and (self._write_paused or not unanswered):
            return Phase.ANSWER, -unread
        if unanswered:
            return (Phase.BODY if self._reader.in_body else Phase.WORK), self._received
        return (Phase.IDLE if self._is_idle else Phase.HEAD), 0


class ReportingApp:
    """Middleware that tells the connection of a request when the application starts and ends."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = connection_of(scope)
        if connection is None:
            await self._app(scope, receive, send)
            return
        # uvicorn appends trailers to the headers of the request.
        scope["headers"] = scope["headers"][: connection.request_started()]
        try:
            await self._app(scope, receive, send)
        finally:
            connection.request_finished()


def connection_of(scope: Scope) -> LimitedProtocol | None:
    """The connection of a request; None for what is not a request of a `LimitedProtocol`."""
    connection: LimitedProtocol | None = scope.get("state", {}).get(CONNECTION)
    return connection


def _enable_keepalive(sock: Any) -> None:
    """Detect peers that vanished without closing the connection."""
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", DEAD_PEER_S // 2),
        ("TCP_KEEPINTVL", max(1, DEAD_PEER_S // 8)),
        ("TCP_KEEPCNT", 4),
        ("TCP_USER_TIMEOUT", DEAD_PEER_S * 1000),
    ):
        # Not every platform has all of these options.
        if (option := getattr(socket, name, None)) is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
