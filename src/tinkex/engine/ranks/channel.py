"""The socket between rank 0 and another rank: calls and decisions one way, outcomes the other."""

from __future__ import annotations

import contextlib
import logging
import pickle
import queue
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

log = logging.getLogger("tinkex.engine.ranks")

#: Eight bytes before each message.
LENGTH = struct.Struct("<Q")


class Channel:
    """
    Sends and receives Python objects. Both ends are processes of one engine.

    `on_message` gets each message in the thread that reads, and `on_end` the end of the other
    process.
    """

    def __init__(
        self,
        connected: socket.socket,
        *,
        on_message: Callable[[Any], None],
        on_end: Callable[[], None],
    ) -> None:
        self._socket = connected
        self._on_message, self._on_end = on_message, on_end

    def start(self) -> None:
        threading.Thread(target=self._read, name="tinkex-ranks", daemon=True).start()

    def send(self, message: object) -> None:
        body = pickle.dumps(message)
        try:
            self._socket.sendall(LENGTH.pack(len(body)) + body)
        except OSError:
            self._on_end()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the other process has ended
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self) -> None:
        try:
            with self._socket.makefile("rb") as stream:
                while len(head := stream.read(LENGTH.size)) == LENGTH.size:
                    self._on_message(pickle.loads(stream.read(LENGTH.unpack(head)[0])))
        except OSError:
            pass  # the other process died
        except Exception:
            log.exception("a message of another rank cannot be read")
        finally:
            self._on_end()


class Inbox:
    """What rank 0 has sent: its calls, and its decisions in the middle of them."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()

    def put(self, message: tuple[str, Any]) -> None:
        self._messages.put(message)

    def next(self, kind: str) -> Any:
        """The next message, which must be of this kind: all ranks make the same calls."""
        found, value = self._messages.get()
        if found != kind:
            raise OutOfStep(f"rank 0 sent a {found} where this rank expected a {kind}")
        return value

    # Of `process_group.Decisions`.

    def hear(self) -> Any:
        return self.next("decision")

    def tell(self, value: object) -> None:
        raise OutOfStep("only rank 0 decides")


class OutOfStep(RuntimeError):
    """The ranks do not do the same."""
