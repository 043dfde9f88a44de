"""
Heads of requests have an end: so many bytes, then a 431 and a closed connection.

Uvicorn's quicker parser collects a head for as long as one is sent. Its slower one has a limit
itself, and is used where the quicker one is not installed.
"""

import asyncio
from typing import Any

#: Bytes of the request line and all headers together.
LONGEST_HEAD = 64 * 1024

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
        """Counts what arrives until a head is complete."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._in_head = True
            self._head_bytes = 0
            self._refused = False

        def data_received(self, data: bytes) -> None:
            if self._refused:
                return
            if self._in_head:
                self._head_bytes += len(data)
                # A body may come with its head, so that one piece alone decides nothing yet.
                if self._head_bytes - len(data) > LONGEST_HEAD:
                    self._refuse()
                    return
            super().data_received(data)

        def on_message_begin(self) -> None:
            self._in_head = True
            self._head_bytes = 0
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._in_head = False
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if size > LONGEST_HEAD:
                self._refuse()
            else:
                super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            if not self._refused:
                super().on_body(body)

        def on_message_complete(self) -> None:
            if not self._refused:
                super().on_message_complete()
                self._in_head = True
                self._head_bytes = 0

        def _refuse(self) -> None:
            self._refused = True
            head = (
                b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
                b"content-type: text/plain; charset=utf-8\r\n"
                b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(_REFUSAL)
            )
            self.transport.write(head + _REFUSAL)
            self.transport.close()

    return Bounded
