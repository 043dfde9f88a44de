"""Alive and able to answer."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tinkex.server.api.context import answer
from tinkex.wire.runs import HealthResponse

router = APIRouter(prefix="/api/v1", tags=["health"])


@router.get("/healthz")
async def healthz(_request: Request) -> Response:
    return answer(HealthResponse(status="ok"))
