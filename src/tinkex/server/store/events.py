"""
Event rows: the audit log of changes, and the telemetry that clients send.

    events.note_audit(connection, owner=..., event="checkpoint.published", details={...})

inside the transaction that makes the change.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from tinkex.server.store.database import Database, every, execute
from tinkex.server.store.schema import audit, telemetry
from tinkex.wire.redaction import redact as without_secrets

#: The values of `GET audit?event_type=`, by the first word of an event.
TOPICS = {
    "checkpoint": "checkpoints",
    "project": "projects",
    "session": "sessions",
    "key": "organizations",
}
# Maximum number of entries in one response, which covers one day.
MAX_ENTRIES = 10_000

_INSERT_AUDIT = audit.insert()


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditEntry:
    at_s: float
    event: str
    details: Mapping[str, Any]


def note_audit(
    connection: sa.Connection, *, owner: str, event: str, details: Mapping[str, Any]
) -> None:
    """Add an entry inside a transaction. The details must not contain secrets."""
    connection.execute(
        _INSERT_AUDIT,
        {
            "owner": owner,
            "at_s": time.time(),
            "topic": TOPICS[event.partition(".")[0]],
            "event": event,
            "details": dict(details),
        },
    )


class Audit:
    """The audit log."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def note(self, *, owner: str, event: str, details: Mapping[str, Any]) -> None:
        """Add an entry for a change outside the database."""
        await self._database.write(
            lambda connection: note_audit(connection, owner=owner, event=event, details=details)
        )

    async def entries(
        self, *, owner: str, topic: str | None, since_s: float, until_s: float
    ) -> list[AuditEntry]:
        """The owner's entries in a time range, oldest first; at most the newest MAX_ENTRIES."""
        statement = (
            sa.select(audit.c.at_s, audit.c.event, audit.c.details)
            .where(audit.c.owner == owner, audit.c.at_s >= since_s, audit.c.at_s < until_s)
            .order_by(audit.c.entry_id.desc())
            .limit(MAX_ENTRIES)
        )
        if topic is not None:
            statement = statement.where(audit.c.topic == topic)
        found = await self._database.read_report(every(AuditEntry, statement))
        return found[::-1]


# SDKs send up to 100 at once.
MAX_EVENTS = 100
MAX_TEXT = 500
#: Characters stored for one owner in an hour; a busy client sends a tenth of it.
MAX_CHARACTERS_PER_HOUR = 16 * 2**20
HOUR_S = 3600

#: The stored fields. Others are dropped: official clients put request headers into `event_data`.
FIELDS = (
    "event",
    "event_id",
    "event_session_index",
    "event_name",
    "severity",
    "timestamp",
    "duration",
    "error_type",
    "error_message",
)

_INSERT_TELEMETRY = telemetry.insert()


def scrubbed(event: Mapping[str, Any]) -> dict[str, Any]:
    """The part of an event that is stored: known fields, truncated, without keys and tokens."""
    stored: dict[str, Any] = {}
    for name in FIELDS:
        value = event.get(name)
        if isinstance(value, str):
            stored[name] = without_secrets(value[: 2 * MAX_TEXT])[:MAX_TEXT]
        elif isinstance(value, int) and abs(value) < 2**53:
            stored[name] = value
    return stored


class Telemetry:
    """The telemetry rows."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._hour = 0
        self._stored_characters: Counter[str] = Counter()

    def record(self, events: Sequence[Any], *, owner: str, session_id: str, about: str) -> None:
        """Store a batch with a deferred write; dropped while storage has a problem."""
        if self._database.health.problem is not None:
            return
        now_s = time.time()
        rows = [
            {
                "owner": owner,
                "session_id": without_secrets(session_id)[:120],
                "at_s": now_s,
                "event": {**scrubbed(event), "client": without_secrets(about)[:MAX_TEXT]},
            }
            for event in events[:MAX_EVENTS]
            if isinstance(event, Mapping)
        ]
        rows = rows[: self._count_allowed(owner, rows, hour=int(now_s // HOUR_S))]
        if rows:
            self._database.write_deferred(execute(_INSERT_TELEMETRY, rows))

    def _count_allowed(self, owner: str, rows: Sequence[Mapping[str, Any]], *, hour: int) -> int:
        """How many of these rows fit into the owner's limit for this hour."""
        if hour != self._hour:
            self._hour = hour
            self._stored_characters.clear()
        for number, row in enumerate(rows):
            size = sum(len(str(value)) for value in row["event"].values())
            if self._stored_characters[owner] + size > MAX_CHARACTERS_PER_HOUR:
                return number
            self._stored_characters[owner] += size
        return len(rows)

    async def of_session(self, session_id: str, *, owner: str) -> list[dict[str, Any]]:
        """The telemetry of a session, in order."""
        statement = (
            sa.select(telemetry.c.event)
            .where(telemetry.c.session_id == session_id, telemetry.c.owner == owner)
            .order_by(telemetry.c.event_number)
        )
        return await self._database.read(
            lambda connection: [dict(row) for row in connection.execute(statement).scalars()]
        )
