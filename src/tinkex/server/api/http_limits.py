"""
Heads of requests have an end, and so has everything else around bodies.

Uvicorn's quicker parser collects a head for as long as one is sent, and what follows a body in
pieces (trailers); and it takes in requests for as long as they come, while the first of them is
worked on. Anybody could fill the memory with these, without a key. Its slower parser has limits
itself, and is used where the quicker one is not installed.
"""

import asyncio
import enum
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


#: Bytes of the request line and all headers together; and of anything else that is no body.
MAX_HEAD_BYTES = 64 * 1024
#: Requests that a connection may send before the first of them is answered. Clients of this API
#: send one; whoever sends more has to be ready for a connection that closes (RFC 9112, 9.3.2).
MAX_PIPELINED = 32

_TOO_LONG = (
    "431 Request Header Fields Too Large",
    f"the head of this request is longer than the allowed {MAX_HEAD_BYTES} bytes; send less of it.",
)
_NO_HOST = ("400 Bad Request", "a request of HTTP/1.1 has one Host header, and no more than one.")
_ENCODING = (
    "400 Bad Request",
    "the one Transfer-Encoding that is known here is chunked; send that, or a Content-Length.",
)


def ambiguous_framing(
    headers: Sequence[tuple[bytes, bytes]], version: str
) -> tuple[str, str] | None:
    """
    Status and reason for a head that a proxy and this server could read in two ways.

    RFC 9112, 3.2 and 6.1. The names of headers are in lower case.
    """
    hosts = sum(name == b"host" for name, _ in headers)
    if hosts > 1 or (hosts == 0 and version == "1.1"):
        return _NO_HOST
    encodings = [value for name, value in headers if name == b"transfer-encoding"]
    if encodings and [value.strip().lower() for value in encodings] != [b"chunked"]:
        return _ENCODING
    return None


def limited_protocol() -> str | type[asyncio.Protocol]:
    """What `uvicorn.Config` takes as `http`."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        return "h11"

    class LimitedProtocol(HttpToolsProtocol):
        """Counts what arrives and is no body."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._in_head = True
            # Since a head was complete, a piece of a body came, or a request ended.
            self._unframed_bytes = 0
            self._refused = False

        def data_received(self, data: bytes) -> None:
            if self._refused:
                return
            # A body may come with its head, so that one piece alone decides nothing yet.
            if self._unframed_bytes > MAX_HEAD_BYTES:
                self._refuse(_TOO_LONG)
                return
            self._unframed_bytes += len(data)
            super().data_received(data)

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            # They hold this object: memory until the next look for garbage, which is rare.
            self.pipeline.clear()

        def on_message_begin(self) -> None:
            if not self._refused:
                self._in_head = True
                self._unframed_bytes = 0
                super().on_message_begin()

        def on_header(self, name: bytes, value: bytes) -> None:
            # What follows a body says nothing that is used here, and must not pass for a header.
            if self._in_head and not self._refused:
                super().on_header(name, value)

        def on_headers_complete(self) -> None:
            if self._refused:
                return
            self._in_head = False
            self._unframed_bytes = 0
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
                self._unframed_bytes = 0
                super().on_body(body)

        def on_message_complete(self) -> None:
            if not self._refused:
                self._in_head = True
                self._unframed_bytes = 0
                super().on_message_complete()

        def send_400_response(self, msg: str) -> None:
            # What follows a refused head is no request, and gets no answer of its own.
            if not self._refused:
                super().send_400_response(msg)

        def _refuse(self, reason: tuple[str, str]) -> None:
            self._refused = True
            # While another request is worked on, this would be read as its answer.
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


# MERGED: Connections that nobody uses do not stay: heads, bodies and answers have to move. Uvicorn closes a connection that is idle after an answer. It waits for ever for a first request, for the rest of a head or of a body, and for a reader of its answer; these have a limit here.


#: A body or an answer moves when this much of it does; a last piece may be smaller.
MIN_PROGRESS_BYTES = 4096
# A peer that is gone without a word (power, network) is noticed by the system after about this long.
DEAD_PEER_S = 60


#: In the scope of a request that waits: what to call when its client is gone. Asking the server for
#: that news, as ASGI has it, would take a task of its own for each of thousands of polls.
ON_DISCONNECT = "tinkex.on_disconnect"


class Phase(enum.Enum):
    """What a connection waits for."""

    HEAD = enum.auto()  # a request, or the rest of its head
    IDLE = enum.auto()  # the next request after an answer; uvicorn's to limit
    BODY = enum.auto()  # the rest of a body
    WORK = enum.auto()  # us
    ANSWER = enum.auto()  # a reader


class StallTimer:
    """How long one connection has been where it is. No clock, no sockets."""

    def __init__(self, *, head_s: float, stall_s: float) -> None:
        self._limit_s = {Phase.HEAD: head_s, Phase.BODY: stall_s, Phase.ANSWER: stall_s}
        self._state: tuple[Phase, int] | None = None
        self._since_s = 0.0
        self._moved = 0

    def is_over(self, phase: Phase, *, request: int, moved: int, now_s: float) -> bool:
        """Look at the connection: its phase, which request it is, and bytes moved in that phase."""
        place = (phase, request)
        steps = phase is not Phase.HEAD and moved - self._moved >= MIN_PROGRESS_BYTES
        if place != self._state or steps:
            self._state, self._since_s, self._moved = place, now_s, moved
        limit_s = self._limit_s.get(phase, 0.0)
        return 0 < limit_s <= now_s - self._since_s


def with_timeouts(
    base: "str | type[asyncio.Protocol]", *, head_s: float, stall_s: float
) -> type[asyncio.Protocol]:
    """Uvicorn's limited_protocol with these limits; 0 is none."""
    if isinstance(base, str):
        from uvicorn.protocols.http.h11_impl import H11Protocol

        base = H11Protocol
    limits = [limit_s for limit_s in (head_s, stall_s) if limit_s > 0]
    check_s = min(limits) / 4 if limits else 0.0

    # Both of uvicorn's protocols have the same parts that matter here.
    class TimeoutProtocol(cast("type[HttpToolsProtocol]", base)):  # type: ignore[misc]
        """Looks at itself every few seconds."""

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
            if waiting and (leave := self.cycle.scope.get(ON_DISCONNECT)) is not None:
                leave()
            self._unset_keepalive_if_required()
            if self._next_check is not None:
                self._next_check.cancel()
            # It holds this object, which holds it and the socket: memory until the next look for
            # garbage, which is rare.
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
            """Where this connection is, and how much has moved there."""
            over = self.cycle is None or self.cycle.response_complete
            unread = self.transport.get_write_buffer_size()
            # While it is paused, and when all is said, nothing is added to what is unread.
            if unread and (over or self.flow.write_paused):
                return Phase.ANSWER, -unread
            if not over:
                return (Phase.BODY if self.cycle.more_body else Phase.WORK), self._received
            return (Phase.HEAD if self.timeout_keep_alive_task is None else Phase.IDLE), 0

    return TimeoutProtocol


def _enable_keepalive(sock: Any) -> None:
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", DEAD_PEER_S // 2),
        ("TCP_KEEPINTVL", max(1, DEAD_PEER_S // 8)),
        ("TCP_KEEPCNT", 4),
        ("TCP_USER_TIMEOUT", DEAD_PEER_S * 1000),
    ):
        # Not every system has all of them.
        if (option := getattr(socket, name, None)) is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
