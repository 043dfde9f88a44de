"""Sessions: begin, beat, finish; and what a client is told before it begins."""

import hashlib

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tinkex.server.api.auth import caller_of
from tinkex.server.api.context import answer, context_of, describe, read_json
from tinkex.wire.dialect import Dialect
from tinkex.wire.errors import WireError
from tinkex.wire.runs import (
    ClientConfigRequest,
    CreateSessionRequest,
    CreateSessionResponse,
    FinishSessionRequest,
    GetServerCapabilitiesResponse,
    SessionHeartbeatRequest,
    SupportedModel,
)
from tinkex.wire.scrubbing import scrubbed

router = APIRouter(prefix="/api/v1", tags=["sessions"])

# As wide as the columns that hold them.
LONGEST_VERSION = 64
LONGEST_PROJECT = 200
LONGEST_DISPLAY_NAME = 500
# Clients send the end of a traceback, and must get rid of it whatever its length.
LONGEST_FINISH = 4_000


@router.post("/client/config", openapi_extra=dict(describe(ClientConfigRequest)))
async def client_config(request: Request) -> Response:
    asked = await read_json(request, ClientConfigRequest)
    dialect = Dialect.of(asked.sdk_version)
    flags = dialect.client_config()
    if context_of(request).settings.jwt and dialect.exchanges_tokens:
        flags["pjwt_auth_enabled"] = True
    return answer(flags)


@router.post("/client/dynamic_config", openapi_extra=dict(describe(ClientConfigRequest)))
async def client_dynamic_config(request: Request) -> Response:
    asked = await read_json(request, ClientConfigRequest)
    return answer(Dialect.of(asked.sdk_version).dynamic_config())


@router.get("/get_server_capabilities")
async def get_server_capabilities(request: Request) -> Response:
    served = context_of(request).executor.served
    models = [
        SupportedModel(
            model_name=model.name,
            max_context_length=model.max_context_length,
            trainable=True,
            sampleable=True,
        )
        for model in served
    ]
    return answer(GetServerCapabilitiesResponse(supported_models=models))


@router.post("/create_session", openapi_extra=dict(describe(CreateSessionRequest)))
async def create_session(request: Request) -> Response:
    asked = await read_json(request, CreateSessionRequest)
    _check_length("project_id", asked.project_id, LONGEST_PROJECT)
    _check_length("display_name", asked.display_name, LONGEST_DISPLAY_NAME)
    key = request.headers.get("x-idempotency-key")
    caller = caller_of(request)
    session = await context_of(request).store.runs.create_session(
        owner=caller.owner,
        sdk_version=asked.sdk_version[:LONGEST_VERSION],
        tags=list(asked.tags),
        user_metadata=asked.user_metadata or {},
        project_id=asked.project_id or caller.project_id,
        display_name=asked.display_name,
        idempotency_key=None if key is None else hashlib.sha256(key.encode()).hexdigest(),
    )
    return answer(CreateSessionResponse(session_id=session.session_id, type="create_session"))


def _check_length(name: str, text: str | None, longest: int) -> None:
    if text is not None and len(text) > longest:
        raise WireError.at((name,), f"{len(text)} characters; at most {longest} are allowed.")


@router.post("/session_heartbeat", openapi_extra=dict(describe(SessionHeartbeatRequest)))
async def session_heartbeat(request: Request) -> Response:
    asked = await read_json(request, SessionHeartbeatRequest)
    context = context_of(request)
    await context.open_session(request, asked.session_id)
    context.store.runs.seen(asked.session_id)
    return answer({"type": "session_heartbeat"})


@router.post("/sessions/{session_id}/finish", openapi_extra=dict(describe(FinishSessionRequest)))
async def finish_session(request: Request, session_id: str) -> Response:
    asked = await read_json(request, FinishSessionRequest)
    context = context_of(request)
    await context.session(request, session_id)
    detail = None if asked.detail is None else scrubbed(asked.detail)[:LONGEST_FINISH]
    await context.store.runs.finish_session(session_id, asked.reason.type, detail)
    context.forget_session(session_id)
    context.presence.left(session_id)
    return answer({})
