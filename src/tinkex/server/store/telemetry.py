"""What clients tell about themselves: named fields only, cut to size, for a limited time."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from tinkex.server.store.database import Database
from tinkex.server.store.tables import telemetry
from tinkex.wire.scrubbing import scrubbed as without_secrets

# An SDK sends up to 100 at once.
MOST_EVENTS = 100
LONGEST_TEXT = 500

#: Everything else is dropped: official clients put whole request headers into `event_data`.
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

_INSERT = telemetry.insert()


def scrubbed(event: Mapping[str, Any]) -> dict[str, Any]:
    """The part of an event that may be kept: known fields, short, without keys and tokens."""
    kept: dict[str, Any] = {}
    for name in FIELDS:
        value = event.get(name)
        if isinstance(value, str):
            kept[name] = without_secrets(value[: 2 * LONGEST_TEXT])[:LONGEST_TEXT]
        elif isinstance(value, int) and abs(value) < 2**53:
            kept[name] = value
    return kept


class Telemetry:
    """The rows of what clients told."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def keep(self, events: Sequence[Any], *, owner: str, session_id: str, about: str) -> None:
        """Note, some time soon, what is worth it of a batch."""
        now_s = time.time()
        rows = [
            {
                "owner": owner,
                "session_id": without_secrets(session_id)[:120],
                "at_s": now_s,
                "event": {**scrubbed(event), "client": without_secrets(about)[:LONGEST_TEXT]},
            }
            for event in events[:MOST_EVENTS]
            if isinstance(event, Mapping)
        ]
        if rows:
            self._database.write_later(lambda connection: connection.execute(_INSERT, rows))

    async def of_session(self, session_id: str, *, owner: str) -> list[dict[str, Any]]:
        """What the client of a session told, in order."""
        statement = (
            sa.select(telemetry.c.event)
            .where(telemetry.c.session_id == session_id, telemetry.c.owner == owner)
            .order_by(telemetry.c.event_number)
        )
        return await self._database.read(
            lambda connection: [dict(row) for row in connection.execute(statement).scalars()]
        )
