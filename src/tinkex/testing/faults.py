"""Scripted responses and failures of the fake, and its record of requests."""

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
    """A scripted response, instead of the normal one."""

    status: int = 200
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Lost:
    """The connection fails before the request arrives or, with `after`, before the response."""

    after: bool = False
    #: The client sees a timeout instead of a connection reset.
    slow: bool = False

    def error(self) -> Unreachable:
        """The error that the client's transport raises."""
        return (
            DeadlineExceeded("no response in time")
            if self.slow
            else Unreachable("connection reset")
        )


class Hold:
    """Makes requests to one endpoint wait until `release()`."""

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
    """A request that the fake received."""

    method: str
    #: The path after /api/v1/.
    endpoint: str
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)
