"""
Heads of requests have an end, and so has everything else around bodies.

Uvicorn's quicker parser collects a head for as long as one is sent, and what follows a body in
pieces (trailers); and it takes in requests for as long as they come, while the first of them is
worked on. Anybody could fill the memory with these, without a key. Its slower parser has limits
itself, and is used where the quicker one is not installed.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

#: Bytes of the request line and all headers together; and of anything else that is no body.
LONGEST_HEAD = 64 * 1024
#: Requests that a connection may send before the first of them is answered. Clients of this API
#: send one; whoever sends more has to be ready for a connection that closes (RFC 9112, 9.3.2).
MOST_AHEAD = 32

_TOO_LONG = (
    "431 Request Header Fields Too Large",
    f"the head of this request is longer than the allowed {LONGEST_HEAD} bytes; send less of it.",
)
_NO_HOST = ("400 Bad Request", "a request of HTTP/1.1 has one Host header, and no more than one.")
_ENCODING = (
    "400 Bad Request",
    "the one Transfer-Encoding that is known here is chunked; send that, or a Content-Length.",
)


def fault_of(headers: Sequence[tuple[bytes, bytes]], version: str) -> tuple[str, str] | None:
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


def protocol() -> str | type[asyncio.Protocol]:
    """What `uvicorn.Config` takes as `http`."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        return "h11"

    class Bounded(HttpToolsProtocol):
        """Counts what arrives and is no body."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._in_head = True
            # Since a head was complete, a piece of a body came, or a request ended.
            self._around_bytes = 0
            self._refused = False

        def data_received(self, data: bytes) -> None:
            if self._refused:
                return
            # A body may come with its head, so that one piece alone decides nothing yet.
            if self._around_bytes > LONGEST_HEAD:
                self._refuse(_TOO_LONG)
                return
            self._around_bytes += len(data)
            super().data_received(data)

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            # They hold this object: memory until the next look for garbage, which is rare.
            self.pipeline.clear()

        def on_message_begin(self) -> None:
            if not self._refused:
                self._in_head = True
                self._around_bytes = 0
                super().on_message_begin()

        def on_header(self, name: bytes, value: bytes) -> None:
            # What follows a body says nothing that is used here, and must not pass for a header.
            if self._in_head and not self._refused:
                super().on_header(name, value)

        def on_headers_complete(self) -> None:
            if self._refused:
                return
            self._in_head = False
            self._around_bytes = 0
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            version = self.parser.get_http_version()
            if size > LONGEST_HEAD or len(self.pipeline) >= MOST_AHEAD:
                self._refuse(_TOO_LONG)
            elif (fault := fault_of(self.headers, version)) is not None:
                self._refuse(fault)
            else:
                super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            if not self._refused:
                self._around_bytes = 0
                super().on_body(body)

        def on_message_complete(self) -> None:
            if not self._refused:
                self._in_head = True
                self._around_bytes = 0
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

    return Bounded
