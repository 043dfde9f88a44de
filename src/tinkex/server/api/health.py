"""Alive and able to answer."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tinkex.server.api.context import answer, context_of
from tinkex.wire.runs import HealthResponse

router = APIRouter(prefix="/api/v1", tags=["health"])


@router.get("/healthz")
async def healthz(request: Request) -> Response:
    """A 503 while nothing new can be stored, with what to do about it; reads go on meanwhile."""
    trouble = context_of(request).store.condition.trouble
    if trouble is not None:
        detail = f"{trouble.text} {trouble.advice}"
        return answer({"status": "degraded", "trouble": trouble.kind, "detail": detail}, 503)
    return answer(HealthResponse(status="ok"))
