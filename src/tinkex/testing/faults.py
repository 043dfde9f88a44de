"""What can be made to go wrong, and what the service saw."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tinkex.client.http.transport import DeadlineExceeded, Unreachable


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer of your choice, instead of the service's."""

    status: int = 200
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Lost:
    """The connection breaks: before the service saw the request, or after it did its work."""

    after: bool = False
    #: The client notices by waiting too long, rather than by a reset.
    slow: bool = False

    def error(self) -> Unreachable:
        """What the client's transport says of it."""
        return (
            DeadlineExceeded("no answer in time") if self.slow else Unreachable("connection reset")
        )


class Hold:
    """Requests to one endpoint wait here until they are released."""

    def __init__(self) -> None:
        #: Set once a request has arrived.
        self.arrived = threading.Event()
        self._released = False
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self._lock = threading.Lock()

    def release(self) -> None:
        with self._lock:
            self._released = True
            waiting, self._waiting = self._waiting, []
        for loop, event in waiting:
            loop.call_soon_threadsafe(event.set)

    async def wait(self) -> None:
        event = asyncio.Event()
        with self._lock:
            if self._released:
                return
            self._waiting.append((asyncio.get_running_loop(), event))
        self.arrived.set()
        await event.wait()


@dataclass(frozen=True)
class Seen:
    """A request as the service saw it."""

    method: str
    #: The path below /api/v1/.
    endpoint: str
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)
