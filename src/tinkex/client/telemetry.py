"""
What a client reports about itself: that a session began and ended, and which errors it met.

Named fields only (a type's name, a status, a category), never messages, headers, bodies or data.
Sent in the background: no call waits for it, no failure of it reaches anybody, and what does not
fit into the queue is dropped. `TINKER_TELEMETRY=0` switches it off.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import os
import platform
import uuid
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from time import monotonic
from typing import Any

from tinkex.client.calls import Calls
from tinkex.client.errors import TinkerError
from tinkex.client.retry import is_user_error
from tinkex.client.settings import PROTOCOL_VERSION
from tinkex.client.transport import Kind
from tinkex.wire.telemetry import (
    GenericEvent,
    SessionEndEvent,
    SessionStartEvent,
    Severity,
    TelemetryEvent,
    TelemetryResponse,
    TelemetrySendRequest,
)

log = logging.getLogger("tinkex.telemetry")

MOST_EVENTS = 1_000
BATCH = 100
SEND_EVERY_S = 10.0
DEADLINE_S = 5.0
#: At the end of a session, this long and no longer.
LAST_SEND_S = 1.0


@functools.lru_cache(maxsize=1)
def process_uuid(pid: int) -> str:
    """One for each process; a forked child is another."""
    return str(uuid.uuid4())


class Telemetry:
    """The events of one session. Belongs to the background loop."""

    def __init__(self, session_id: str, clock: Callable[[], float] = monotonic) -> None:
        self._session_id = session_id
        self._clock = clock
        self._started = clock()
        self._numbers = itertools.count()
        # The oldest go first when it is full: the newest explain what is happening now.
        self._events: deque[TelemetryEvent] = deque(maxlen=MOST_EVENTS)
        self._events.append(SessionStartEvent(event="SESSION_START", **self._common("INFO")))

    def _common(self, severity: Severity) -> dict[str, Any]:
        return {
            "event_id": str(uuid.uuid4()),
            "event_session_index": next(self._numbers),
            "severity": severity,
            "timestamp": datetime.now(UTC),
        }

    def note_error(self, error: BaseException) -> None:
        """Remember that an operation failed, and how; not with which words."""
        category = getattr(error, "category", None)
        status = getattr(error, "status_code", None)
        user = is_user_error(error)
        self._events.append(
            GenericEvent(
                event="GENERIC_EVENT",
                event_name="user_error" if user else "operation_failed",
                event_data={
                    "error_type": type(error).__name__,
                    "status_code": status if isinstance(status, int) else None,
                    "category": None if category is None else str(category),
                },
                **self._common("WARNING" if user else "ERROR"),
            )
        )

    async def send_regularly(self, calls: Calls) -> None:
        while True:
            await asyncio.sleep(SEND_EVERY_S)
            await self._send(calls)

    async def end(self, calls: Calls) -> None:
        """Send what is left, if that works at once."""
        self._events.append(
            SessionEndEvent(
                event="SESSION_END",
                duration=str(timedelta(seconds=self._clock() - self._started)),
                **self._common("INFO"),
            )
        )
        try:
            async with asyncio.timeout(LAST_SEND_S):
                await self._send(calls)
        except TimeoutError:
            log.debug("telemetry was not taken in time")

    async def _send(self, calls: Calls) -> None:
        while self._events:
            batch = [self._events.popleft() for _ in range(min(BATCH, len(self._events)))]
            try:
                await calls.call(
                    "POST",
                    "telemetry",
                    TelemetrySendRequest(
                        events=batch,
                        platform=platform.system(),
                        sdk_version=PROTOCOL_VERSION,
                        session_id=self._session_id,
                        process_uuid=process_uuid(os.getpid()),
                    ),
                    answer=TelemetryResponse,
                    kind=Kind.TELEMETRY,
                    deadline_s=DEADLINE_S,
                    give_up_s=0.0,
                )
            except TinkerError as error:
                # Dropped, not queued again: a service that does not want it is not asked twice.
                log.debug("telemetry was not taken: %s", error)
                return
