"""
Telemetry: reports the start and end of a session, its errors, and how often it had to wait.

Reports contain named fields only (a type's name, a status, a category, locations in this package),
never messages, headers, bodies or data, except what users `log` themselves. They are sent in the
background: no call waits for them, failures are ignored, and a full queue drops events.
`TINKER_TELEMETRY=0` turns telemetry off.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import logging
import os
import platform
import traceback
import uuid
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, get_args

from tinkex.client.background_loop import after_fork
from tinkex.client.errors import TinkerError
from tinkex.client.http.retry import is_retryable, is_user_error
from tinkex.client.http.transport import Kind
from tinkex.client.http.typed_requests import Calls
from tinkex.client.settings import PROTOCOL_VERSION
from tinkex.wire.telemetry import (
    GenericEvent,
    SessionEndEvent,
    SessionStartEvent,
    Severity,
    TelemetryEvent,
    TelemetryResponse,
    TelemetrySendRequest,
    UnhandledExceptionEvent,
)

log = logging.getLogger("tinkex.telemetry")

MAX_EVENTS = 10_000
BATCH = 100
SEND_EVERY_S = 10.0
DEADLINE_S = 5.0
#: A rejected batch is sent again with the next one, up to this many times in total.
MAX_SENDS = 3
#: Time limit of the last send, at the end of a session.
FINAL_SEND_TIMEOUT_S = 1.0
#: Stack frames that an error event contains, from the innermost.
MAX_FRAMES = 20
#: Maximum size of a user's event data as JSON.
MAX_DATA_BYTES = 64 * 1024

_PACKAGE = Path(__file__).parents[2]


@functools.lru_cache(maxsize=1)
def process_uuid(pid: int) -> str:
    """One id per process; a forked child gets its own."""
    return str(uuid.uuid4())


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingEvent:
    """A recorded event; converted to its wire type only when it is sent."""

    kind: Callable[..., TelemetryEvent]
    fields: Mapping[str, Any]
    index: int
    severity: Severity
    at: datetime = field(default_factory=lambda: datetime.now(UTC))

    def event(self) -> TelemetryEvent:
        return self.kind(
            event_id=str(uuid.uuid4()),
            event_session_index=self.index,
            severity=self.severity,
            timestamp=self.at,
            **self.fields,
        )


class Telemetry:
    """The events of one session. Any thread records; the background loop sends."""

    def __init__(
        self, session_id: str, calls: Calls, clock: Callable[[], float] = monotonic
    ) -> None:
        self._session_id = session_id
        self._calls = calls
        self._clock = clock
        self._started = clock()
        self._indexes = itertools.count()
        # When full, the oldest events are dropped: the newest explain the current state.
        self._events: deque[PendingEvent] = deque(maxlen=MAX_EVENTS)
        #: Taken from the queue and not accepted yet, and how many times it was sent.
        self._batch: list[TelemetryEvent] = []
        self._sends = 0
        self._ended = False
        self._queue_states: Counter[str] = Counter()
        self._rate_limited = 0
        self._longest_wait_s = 0.0
        self._record(SessionStartEvent, "INFO", event="SESSION_START")
        _live.add(self)

    def _record(
        self, kind: Callable[..., TelemetryEvent], severity: Severity, **fields: Any
    ) -> None:
        self._events.append(
            PendingEvent(kind=kind, fields=fields, index=next(self._indexes), severity=severity)
        )

    def _record_generic(self, severity: Severity, name: str, data: Mapping[str, Any]) -> None:
        self._record(
            GenericEvent, severity, event="GENERIC_EVENT", event_name=name, event_data=data
        )

    # -- recording -------------------------------------------------------------------------------

    def log(
        self,
        event_name: str,
        event_data: Mapping[str, object] | None = None,
        severity: Severity = "INFO",
    ) -> bool:
        """
        Report an event of your own in this session. Never raises, never blocks.

        Returns whether it was accepted: the data must be JSON of at most 64 KiB.
        """
        if self._ended:
            return False
        try:
            # A copy through JSON, so that later changes have no effect.
            text = json.dumps(dict(event_data or {}), allow_nan=False)
            if len(text) > MAX_DATA_BYTES or severity not in get_args(Severity):
                raise ValueError(f"{len(text)} bytes at severity {severity!r}")
            self._record_generic(severity, str(event_name), json.loads(text))
        except (TypeError, ValueError, RecursionError) as error:
            log.debug("event %r was not accepted: %s", event_name, error)
            return False
        return True

    def record_error(self, error: BaseException, frames: TracebackType | None = None) -> None:
        """Record the type of an error and where it was raised, not its message."""
        status, category = getattr(error, "status_code", None), getattr(error, "category", None)
        if is_user_error(error):
            data = {
                "error_type": type(error).__name__,
                "status_code": status if isinstance(status, int) else None,
                "category": None if category is None else str(category),
            }
            self._record_generic("WARNING", "user_error", data)
        else:
            cause = f"status {status}" if isinstance(status, int) else f"category {category}"
            self._record(
                UnhandledExceptionEvent,
                "ERROR",
                event="UNHANDLED_EXCEPTION",
                error_type=type(error).__name__,
                error_message="" if status is None and category is None else cause,
                traceback=own_frames(frames or error.__traceback__),
            )

    def record_queue_state(self, queue_state: str) -> None:
        """Count a change of queue state, for the next batch."""
        if len(self._queue_states) < 16 or queue_state in self._queue_states:
            self._queue_states[queue_state[:64]] += 1

    def record_rate_limit(self, delay_s: float) -> None:
        """Count a 429, for the next batch."""
        self._rate_limited += 1
        self._longest_wait_s = max(self._longest_wait_s, delay_s)

    def _record_waits(self) -> None:
        if self._rate_limited:
            longest_s = round(self._longest_wait_s, 3)
            data = {"rate_limited": self._rate_limited, "longest_wait_s": longest_s}
            self._record_generic("INFO", "backpressure", data)
        if self._queue_states:
            self._record_generic("INFO", "queue_states", dict(self._queue_states))
        self._rate_limited, self._longest_wait_s = 0, 0.0
        self._queue_states.clear()

    # -- sending ---------------------------------------------------------------------------------

    async def send_regularly(self) -> None:
        while True:
            await asyncio.sleep(SEND_EVERY_S)
            await self._send()

    async def end(self) -> None:
        """Send the remaining events within a short time limit. Later calls have no effect."""
        if self._ended:
            return
        self._ended = True
        self._record_waits()
        self._record(
            SessionEndEvent,
            "INFO",
            event="SESSION_END",
            duration=str(timedelta(seconds=self._clock() - self._started)),
        )
        try:
            async with asyncio.timeout(FINAL_SEND_TIMEOUT_S):
                await self._send()
        except TimeoutError:
            log.debug("telemetry was not sent in time")

    async def _send(self) -> None:
        self._record_waits()
        while self._batch or self._events:
            if not self._batch:
                count = min(BATCH, len(self._events))
                self._batch = [self._events.popleft().event() for _ in range(count)]
                self._sends = 0
            self._sends += 1
            try:
                await self._calls.call(
                    "POST",
                    "telemetry",
                    TelemetrySendRequest(
                        events=self._batch,
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
                # The batch is sent again after `SEND_EVERY_S`, so no other delay is needed. It is
                # dropped after `MAX_SENDS`, or if the service rejects it.
                if self._sends >= MAX_SENDS or not is_retryable(error):
                    self._batch = []
                log.debug("telemetry was not sent: %s", error)
                return
            self._batch = []


def own_frames(frames: TracebackType | None) -> str:
    """Stack frames in this package only: no source lines, and no files of the user's program."""
    places = (
        (Path(frame.f_code.co_filename), line, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(frames)
    )
    ours = [
        f"{file.relative_to(_PACKAGE.parent).as_posix()}:{line} {name}"
        for file, line, name in places
        if file.is_relative_to(_PACKAGE)
    ]
    return "\n".join(ours[-MAX_FRAMES:])


_live: weakref.WeakSet[Telemetry] = weakref.WeakSet()


@after_fork
def _reset_after_fork() -> None:
    """In a forked child: these belong to sessions of the parent, which reports them."""
    _live.clear()


async def end_all() -> None:
    """At the end of the program: report the end of sessions that were not closed."""
    await asyncio.gather(*(each.end() for each in list(_live)), return_exceptions=True)
