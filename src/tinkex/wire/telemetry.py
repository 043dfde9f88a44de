"""Telemetry a client sends about itself."""

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
    #: Counts the events of a session from 0.
    event_session_index: int
    severity: Severity
    timestamp: RequestTime


class SessionEndEvent(LenientModel):
    #: A Python timedelta as text.
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
    #: Anything; official clients put request headers here, keys among them. Do not store it raw.
    event_data: dict[str, object] = Field(default={})


#: Told apart by the fields they have.
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
    #: Empty from clients before 0.24.
    process_uuid: str


class TelemetryResponse(LenientModel):
    status: Literal["accepted"]
