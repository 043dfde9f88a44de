"""What clients tell about themselves: named fields only, cut to size, for a limited time."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from tinkex.server.store.database import Database
from tinkex.server.store.schema import telemetry
from tinkex.wire.redaction import redact

# An SDK sends up to 100 at once.
MOST_EVENTS = 100
LONGEST_TEXT = 500
#: Characters that are kept for one owner in an hour: a busy client says a tenth of it.
MOST_AN_HOUR = 16 * 2**20
HOUR_S = 3600

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
            kept[name] = redact(value[: 2 * LONGEST_TEXT])[:LONGEST_TEXT]
        elif isinstance(value, int) and abs(value) < 2**53:
            kept[name] = value
    return kept


class Telemetry:
    """The rows of what clients told."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._hour = 0
        self._kept: Counter[str] = Counter()

    def keep(self, events: Sequence[Any], *, owner: str, session_id: str, about: str) -> None:
        """Note, some time soon, what is worth it of a batch; nothing while room is short."""
        if self._database.condition.trouble is not None:
            return
        now_s = time.time()
        rows = [
            {
                "owner": owner,
                "session_id": redact(session_id)[:120],
                "at_s": now_s,
                "event": {**scrubbed(event), "client": redact(about)[:LONGEST_TEXT]},
            }
            for event in events[:MOST_EVENTS]
            if isinstance(event, Mapping)
        ]
        rows = rows[: self._that_fit(owner, rows, hour=int(now_s // HOUR_S))]
        if rows:
            self._database.write_later(lambda connection: connection.execute(_INSERT, rows))

    def _that_fit(self, owner: str, rows: Sequence[Mapping[str, Any]], *, hour: int) -> int:
        """How many of these rows are still kept in this hour: the disk is everybody's."""
        if hour != self._hour:
            self._hour = hour
            self._kept.clear()
        for number, row in enumerate(rows):
            size = sum(len(str(value)) for value in row["event"].values())
            if self._kept[owner] + size > MOST_AN_HOUR:
                return number
            self._kept[owner] += size
        return len(rows)

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
