"""
Limits on HTTP connections that uvicorn does not have.

Sizes (`limited_protocol`): uvicorn's httptools parser buffers headers, trailers and pipelined
requests without limit. A client could fill the memory with them, without a key. The h11 parser,
used where httptools is not installed, has limits of its own.

Timeouts (`with_timeouts`): uvicorn closes a connection that is idle after a response. But it
waits forever for a first request, for the rest of a request, and for a client that does not read
its response.
"""

import asyncio
import enum
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


#: Bytes of the request line and headers together; also of anything else that is not a body.
MAX_HEAD_BYTES = 64 * 1024
#: Requests that a connection may send before the first response. Clients of this API send one. A
#: client that pipelines must expect the connection to close (RFC 9112, 9.3.2).
MAX_PIPELINED = 32
#: A body or a response makes progress when this many bytes of it move; a last piece may be smaller.
MIN_PROGRESS_BYTES = 4096
# TCP keep-alive detects a peer that vanished (power, network) after about this long.
DEAD_PEER_S = 60

#: Key in the request scope: a function to call when the client disconnects. Waiting for ASGI's
#: disconnect message instead would need a task for each of thousands of polls.
ON_DISCONNECT = "tinkex.on_disconnect"

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


def limited_protocol() -> str | type[asyncio.Protocol]:
    """Uvicorn's HTTP protocol with size limits, for `uvicorn.Config(http=...)`."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        return "h11"

    class LimitedProtocol(HttpToolsProtocol):
        """Counts the received bytes that are not part of a body."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._in_head = True
            # Bytes since the last complete head, piece of a body, or end of a request.
            self._overhead_bytes = 0
            self._refused = False

        def data_received(self, data: bytes) -> None:
            if self._refused:
                return
            # Check before adding: a body may arrive in one piece with its head.
            if self._overhead_bytes > MAX_HEAD_BYTES:
                self._refuse(_TOO_LONG)
                return
            self._overhead_bytes += len(data)
            super().data_received(data)

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            # Break reference cycles with this object: garbage collections are rare.
            self.pipeline.clear()

        def on_message_begin(self) -> None:
            if not self._refused:
                self._in_head = True
                self._overhead_bytes = 0
                super().on_message_begin()

        def on_header(self, name: bytes, value: bytes) -> None:
            # Trailers are not used, and must not be taken for headers.
            if self._in_head and not self._refused:
                super().on_header(name, value)

        def on_headers_complete(self) -> None:
            if self._refused:
                return
            self._in_head = False
            self._overhead_bytes = 0
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            version = self.parser.get_http_version()
            if size > MAX_HEAD_BYTES or len(self.pipeline) >= MAX_PIPELINED:
                self._refuse(_TOO_LONG)
            elif (fault := ambiguous_framing(self.headers, version)) is not None:
                self._refuse(fault)
            else:
                super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            if not self._refused:
                self._overhead_bytes = 0
                super().on_body(body)

        def on_message_complete(self) -> None:
            if not self._refused:
                self._in_head = True
                self._overhead_bytes = 0
                super().on_message_complete()

        def send_400_response(self, msg: str) -> None:
            # Bytes after a refused head are not a request and get no response.
            if not self._refused:
                super().send_400_response(msg)

        def _refuse(self, reason: tuple[str, str]) -> None:
            self._refused = True
            # While an earlier request is running, this would be read as its response.
            earlier: Any = self.cycle  # None before the first request, whatever its type says
            if earlier is None or earlier.response_complete:
                status, text = reason
                head = (
                    f"HTTP/1.1 {status}\r\ncontent-type: text/plain; charset=utf-8\r\n"
                    f"connection: close\r\ncontent-length: {len(text)}\r\n\r\n"
                )
                self.transport.write((head + text).encode())
            self.pipeline.clear()
            self.transport.close()

    return LimitedProtocol


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


def with_timeouts(
    base: "str | type[asyncio.Protocol]", *, head_s: float, stall_s: float
) -> type[asyncio.Protocol]:
    """A uvicorn protocol with timeouts; 0 is no limit."""
    if isinstance(base, str):
        from uvicorn.protocols.http.h11_impl import H11Protocol

        base = H11Protocol
    limits = [limit_s for limit_s in (head_s, stall_s) if limit_s > 0]
    check_s = min(limits) / 4 if limits else 0.0

    # Both protocols of uvicorn have the attributes that are used here.
    class TimeoutProtocol(cast("type[HttpToolsProtocol]", base)):  # type: ignore[misc]
        """Checks its own progress every few seconds."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._stall_timer = StallTimer(head_s=head_s, stall_s=stall_s)
            self._received = 0
            self._requests = 0
            self._last: object = None
            self._next_check: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            _enable_keepalive(transport.get_extra_info("socket"))
            self._check()

        def data_received(self, data: bytes) -> None:
            self._received += len(data)
            super().data_received(data)

        def connection_lost(self, exc: Exception | None) -> None:
            waiting = self.cycle is not None and not self.cycle.response_complete
            super().connection_lost(exc)
            if waiting and (on_disconnect := self.cycle.scope.get(ON_DISCONNECT)) is not None:
                on_disconnect()
            self._unset_keepalive_if_required()
            if self._next_check is not None:
                self._next_check.cancel()
            # Break the reference cycle with the parser: garbage collections are rare.
            self.__dict__.pop("parser", None)

        def _check(self) -> None:
            if not check_s:
                return
            phase, moved = self._phase()
            if self.cycle is not self._last:
                self._last = self.cycle
                self._requests += 1
            now_s = self.loop.time()
            if self._stall_timer.is_over(phase, request=self._requests, moved=moved, now_s=now_s):
                self.transport.abort()
                return
            self._next_check = self.loop.call_later(check_s, self._check)

        def _phase(self) -> tuple[Phase, int]:
            """The phase of this connection, and the bytes moved in it."""
            answered = self.cycle is None or self.cycle.response_complete
            unread = self.transport.get_write_buffer_size()
            # While writing is paused, and after the response, nothing is added to the write buffer.
            if unread and (answered or self.flow.write_paused):
                return Phase.ANSWER, -unread
            if not answered:
                return (Phase.BODY if self.cycle.more_body else Phase.WORK), self._received
            return (Phase.HEAD if self.timeout_keep_alive_task is None else Phase.IDLE), 0

    return TimeoutProtocol


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
