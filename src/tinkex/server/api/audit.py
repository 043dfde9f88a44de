"""The audit log: what was changed on this server by its owner's keys."""

import time
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from tinkex.server.api.auth import owner_of
from tinkex.server.api.context import context_of
from tinkex.server.api.reports import bounded, report
from tinkex.server.store.audit import MOST_ENTRIES, AuditEntry
from tinkex.wire.billing import AuditLogEntry, AuditLogResponse

router = APIRouter(prefix="/api/v1", tags=["audit"])

Topic = Literal["all", "checkpoints", "projects", "teams", "organizations"]


@router.get("/audit")
@bounded(entries=MOST_ENTRIES)
async def audit(
    request: Request,
    event_type: Annotated[Topic, Query()] = "all",
    day: Annotated[date | None, Query(description="of UTC; left out: all that is kept")] = None,
) -> Response:
    """Oldest first."""
    since_s, until_s = 0.0, time.time() + 1
    if day is not None:
        begins = datetime(day.year, day.month, day.day, tzinfo=UTC)
        since_s = begins.timestamp()
        until_s = since_s + timedelta(days=1).total_seconds()
    found = await context_of(request).store.audit.entries(
        owner=owner_of(request),
        topic=None if event_type == "all" else event_type,
        since_s=since_s,
        until_s=until_s,
    )
    return await report(
        request,
        lambda: AuditLogResponse(entries=[_entry(entry) for entry in found]),
        advice="Ask about one `day`, or one `event_type`.",
    )


def _entry(entry: AuditEntry) -> AuditLogEntry:
    return AuditLogEntry(
        timestamp=datetime.fromtimestamp(entry.at_s, UTC),
        event=entry.event,
        event_details=dict(entry.details),
        model_id=entry.details.get("model_id"),
        tinker_path=entry.details.get("tinker_path"),
    )
