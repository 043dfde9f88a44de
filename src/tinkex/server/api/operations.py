"""The routes for operating a server: health, readiness, and client telemetry."""

import json
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tinkex.server.api.auth import owner_of
from tinkex.server.api.bodies import MessageRoute, read_body
from tinkex.server.api.deps import context_of, describe_body, json_response
from tinkex.server.api.errors import Refusal
from tinkex.wire.client_config import HealthResponse
from tinkex.wire.errors import WireError
from tinkex.wire.telemetry import TelemetrySendRequest

router = APIRouter(prefix="/api/v1", tags=["health"], route_class=MessageRoute)
telemetry_router = APIRouter(prefix="/api/v1", tags=["telemetry"], route_class=MessageRoute)

# Larger telemetry batches are dropped.
MAX_TELEMETRY_BYTES = 1024 * 1024


@router.get("/healthz")
async def healthz(request: Request) -> Response:
    """A 503 with advice while nothing new can be stored; reads still work then."""
    problem = context_of(request).store.health.problem
    if problem is not None:
        detail = f"{problem.text} {problem.advice}"
        return json_response({"status": "degraded", "trouble": problem.kind, "detail": detail}, 503)
    return json_response(HealthResponse(status="ok"))


async def readyz(request: Request) -> Response:
    """A 503 with the reason until the server can accept work, and whenever it cannot."""
    if (reason := not_ready_reason(request)) is not None:
        return json_response({"status": "not ready", "reason": reason}, 503)
    return json_response({"status": "ready"})


def not_ready_reason(request: Request) -> str | None:
    """Why the server cannot accept work now; None if it can."""
    context = context_of(request)
    if (problem := context.store.health.problem) is not None:
        return f"{problem.text} {problem.advice}"
    if context.futures.closing:
        return "the server is stopping"
    starting: str | None = request.app.state.starting
    return starting


@telemetry_router.post("/telemetry", dependencies=[describe_body(TelemetrySendRequest)])
async def telemetry(request: Request) -> Response:
    """Always accepted: after any other answer, clients retry every second, forever."""
    try:
        body = await read_body(request)
    except (Refusal, WireError):
        body = b""
    if context_of(request).settings.telemetry_kept_s > 0 and len(body) <= MAX_TELEMETRY_BYTES:
        _store_telemetry(request, body)
    return json_response({"status": "accepted"})


def _store_telemetry(request: Request, body: bytes) -> None:
    try:
        batch: Any = json.loads(body)
    except (ValueError, RecursionError):
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
