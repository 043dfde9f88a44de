"""Telemetry of clients: acknowledged, and not kept. Some of its events hold the API key."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tinkex.server.api.context import answer, context_of, describe
from tinkex.wire.telemetry import TelemetrySendRequest

router = APIRouter(prefix="/api/v1", tags=["telemetry"])


@router.post("/telemetry", openapi_extra=dict(describe(TelemetrySendRequest)))
async def telemetry(request: Request) -> Response:
    """
    Always accepted: a client that hears anything else repeats itself every second, for ever.

    The body is read to its end, so that the connection can be used again, and dropped.
    """
    left = context_of(request).settings.max_body_bytes
    async for part in request.stream():
        left -= len(part)
        if left < 0:
            break
    return answer({"status": "accepted"})
