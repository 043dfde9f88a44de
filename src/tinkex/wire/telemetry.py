"""Telemetry events of clients."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import Field

from tinkex.wire.base import LenientModel, RequestTime, StrictModel

__all__ = [
    "EventType",
    "GenericEvent",
    "SessionEndEvent",
    "SessionStartEvent",
    "Severity",
    "TelemetryBatch",
    "TelemetryEvent",
    "TelemetryResponse",
    "TelemetrySendRequest",
    "UnhandledExceptionEvent",
]

EventType = Literal["SESSION_START", "SESSION_END", "UNHANDLED_EXCEPTION", "GENERIC_EVENT"]

Severity = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]


class SessionStartEvent(LenientModel):
    event: EventType
    event_id: str
    #: Number of this event in its session, from 0.
    event_session_index: int
    severity: Severity
    timestamp: RequestTime


class SessionEndEvent(LenientModel):
    #: A Python timedelta as a string.
    duration: str
    event: EventType
    event_id: str
    event_session_index: int
    severity: Severity
    timestamp: RequestTime


class UnhandledExceptionEvent(LenientModel):
    error_message: str
    error_type: str
    event: EventType
    event_id: str
    event_session_index: int
    severity: Severity
    timestamp: RequestTime
    traceback: str | None = None


class GenericEvent(LenientModel):
    event: EventType
    event_id: str
    event_name: str
    event_session_index: int
    severity: Severity
    timestamp: RequestTime
    #: Official clients put request headers here, including API keys: redact before storing.
    event_data: dict[str, object] = Field(default={})


#: The type of an event follows from its fields.
TelemetryEvent: TypeAlias = (
    SessionStartEvent | SessionEndEvent | UnhandledExceptionEvent | GenericEvent
)


class TelemetryBatch(LenientModel):
    events: list[TelemetryEvent]
    platform: str
    sdk_version: str
    session_id: str
    process_uuid: str


class TelemetrySendRequest(StrictModel):
    events: list[TelemetryEvent]
    platform: str
    sdk_version: str
    session_id: str
    #: Empty for clients before 0.24.
    process_uuid: str


class TelemetryResponse(LenientModel):
    status: Literal["accepted"]
