"""Alive and able to answer."""

import json
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tinkex.server.api.auth import owner_of
from tinkex.server.api.deps import answer, context_of, describe
from tinkex.wire.codec import decompress
from tinkex.wire.errors import WireError
from tinkex.wire.runs import HealthResponse
from tinkex.wire.telemetry import TelemetrySendRequest

router = APIRouter(prefix="/api/v1", tags=["health"])


@router.get("/healthz")
async def healthz(request: Request) -> Response:
    """A 503 while nothing new can be stored, with what to do about it; reads go on meanwhile."""
    problem = context_of(request).store.health.problem
    if problem is not None:
        detail = f"{problem.text} {problem.advice}"
        return answer({"status": "degraded", "trouble": problem.kind, "detail": detail}, 503)
    return answer(HealthResponse(status="ok"))


# MERGED: Telemetry of clients: always acknowledged, and kept without what must not be kept.


telemetry_router = APIRouter(prefix="/api/v1", tags=["telemetry"])

# Larger batches are not looked at.
MOST_BYTES = 1024 * 1024


@telemetry_router.post("/telemetry", openapi_extra=dict(describe(TelemetrySendRequest)))
async def telemetry(request: Request) -> Response:
    """
    Always accepted: a client that hears anything else repeats itself every second, for ever.

    The body is read to its end, so that the connection can be used again.
    """
    settings = context_of(request).settings
    left = settings.max_body_bytes
    body = bytearray()
    async for part in request.stream():
        left -= len(part)
        if left < 0:
            break
        if len(body) <= MOST_BYTES:
            body += part
    if settings.telemetry_kept_s > 0 and len(body) <= MOST_BYTES:
        _keep(request, bytes(body))
    return answer({"status": "accepted"})


def _keep(request: Request, body: bytes) -> None:
    encoding = request.headers.get("content-encoding")
    try:
        batch: Any = json.loads(decompress(body, encoding, max_bytes=MOST_BYTES))
    except (WireError, ValueError, RecursionError):
        return
    if not isinstance(batch, dict) or not isinstance(events := batch.get("events"), list):
        return
    about = f"{batch.get('sdk_version')} {batch.get('platform')}"
    context_of(request).store.telemetry.record(
        events,
        owner=owner_of(request),
        session_id=str(batch.get("session_id")),
        about=about,
    )
