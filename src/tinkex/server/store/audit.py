"""
Who changed what: rows that are added with the change, and never changed.

    audit.note(connection, owner=..., event="checkpoint.published", details={"tinker_path": ...})

inside the transaction that makes the change.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from tinkex.server.store.database import Database
from tinkex.server.store.schema import audit

#: What `GET audit?event_type=` may ask for, by the first word of an event.
TOPICS = {
    "checkpoint": "checkpoints",
    "project": "projects",
    "session": "sessions",
    "key": "organizations",
}
# Keeps one answer small enough to send; a day has one.
MOST_ENTRIES = 10_000

_INSERT = audit.insert()


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditEntry:
    at_s: float
    event: str
    details: Mapping[str, Any]


def note(connection: sa.Connection, *, owner: str, event: str, details: Mapping[str, Any]) -> None:
    """Add an entry inside a transaction. Never put a secret into the details."""
    connection.execute(
        _INSERT,
        {
            "owner": owner,
            "at_s": time.time(),
            "topic": TOPICS[event.partition(".")[0]],
            "event": event,
            "details": dict(details),
        },
    )


class Audit:
    """The rows of what was changed."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def note(self, *, owner: str, event: str, details: Mapping[str, Any]) -> None:
        """An entry of its own, for a change that is made elsewhere."""
        await self._database.write(
            lambda connection: note(connection, owner=owner, event=event, details=details)
        )

    async def entries(
        self, *, owner: str, topic: str | None, since_s: float, until_s: float
    ) -> list[AuditEntry]:
        """The owner's entries of a time, oldest first; the newest ones when there are too many."""
        statement = (
            sa.select(audit.c.at_s, audit.c.event, audit.c.details)
            .where(audit.c.owner == owner, audit.c.at_s >= since_s, audit.c.at_s < until_s)
            .order_by(audit.c.entry_id.desc())
            .limit(MOST_ENTRIES)
        )
        if topic is not None:
            statement = statement.where(audit.c.topic == topic)
        found = await self._database.read_report(
            lambda connection: [AuditEntry(**row._mapping) for row in connection.execute(statement)]
        )
        return found[::-1]
