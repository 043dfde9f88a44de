"""
Heads of requests have an end, and so has everything else around bodies.

Uvicorn's quicker parser collects a head for as long as one is sent, and what follows a body in
pieces (trailers); and it takes in requests for as long as they come, while the first of them is
worked on. Anybody could fill the memory with these, without a key. Its slower parser has limits
itself, and is used where the quicker one is not installed.
"""

import asyncio
from typing import Any

#: Bytes of the request line and all headers together; and of anything else that is no body.
LONGEST_HEAD = 64 * 1024
#: Requests that a connection may send before the first of them is answered. Clients of this API
#: send one; whoever sends more has to be ready for a connection that closes (RFC 9112, 9.3.2).
MOST_AHEAD = 32

_REFUSAL = (
    f"the head of this request is longer than the {LONGEST_HEAD} bytes that are allowed. "
    "Send less in the address and in headers."
).encode()


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
                self._refuse()
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
            if size > LONGEST_HEAD or len(self.pipeline) >= MOST_AHEAD:
                self._refuse()
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

        def _refuse(self) -> None:
            self._refused = True
            # While another request is worked on, this would be read as its answer.
            earlier: Any = self.cycle  # None before the first request, whatever its type says
            if earlier is None or earlier.response_complete:
                head = (
                    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
                    b"content-type: text/plain; charset=utf-8\r\n"
                    b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(_REFUSAL)
                )
                self.transport.write(head + _REFUSAL)
            self.pipeline.clear()
            self.transport.close()

    return Bounded
