"""
The routes of local administration, for programs of the user who runs the server.

They need the token in the server's file (`tinkex.local.registry`), which only that user can read.
"""

import hmac

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tinkex.local.control import ALIVE_S
from tinkex.local.registry import TOKEN_HEADER
from tinkex.server.api.auth import authenticator_of
from tinkex.server.api.bodies import MessageRoute
from tinkex.server.api.deps import context_of, json_response
from tinkex.server.api.errors import Refusal
from tinkex.server.api.operations import not_ready_reason
from tinkex.server.local_models import CannotAdd, LocalModels

router = APIRouter(prefix="/api/v1/local", route_class=MessageRoute, tags=["local"])

# Sessions that the status lists.
MAX_SESSIONS = 100


def check_token(request: Request) -> None:
    """Refuse requests without the token of this server."""
    administration = request.app.state.administration
    given = request.headers.get(TOKEN_HEADER, "")
    if administration is None or not hmac.compare_digest(
        given.encode(), administration.token.encode()
    ):
        raise Refusal(
            403,
            "this route is for `tinkex ps`, `status`, `stop` and base_url='local' of the user who "
            "runs the server.",
        )


@router.post("/models")
async def add_model(request: Request, model: str) -> Response:
    """
    Serve one more model, a NAME, FOLDER or NAME=FOLDER, and load it.

    It is downloaded first if this machine does not have it.
    """
    check_token(request)
    local_models: LocalModels | None = request.app.state.local_models
    if local_models is None:
        served = " ".join(one.name for one in context_of(request).executor.served)
        raise Refusal(
            400,
            f"this server was started by `tinkex serve`, and serves what it was given: {served}. "
            f"Stop it, and start it with both: tinkex serve {served} {model}",
        )
    try:
        added = await local_models.add(model, context_of(request).scheduler)
    except CannotAdd as error:
        raise Refusal(400, str(error)) from error
    return json_response({"name": added.name})


@router.get("/status")
async def status(request: Request) -> Response:
    """What the server does, and for whom."""
    check_token(request)
    context = context_of(request)
    local_models: LocalModels | None = request.app.state.local_models
    timeouts = context.session_timeouts
    sessions = []
    for session_id in timeouts.alive(ALIVE_S)[:MAX_SESSIONS]:
        session = await context.store.sessions.session(session_id)
        sessions.append(
            {
                "session_id": session_id,
                "sdk_version": None if session is None else session.sdk_version,
                "lease": timeouts.leases.get(session_id),
            }
        )
    return json_response(
        {
            "problem": not_ready_reason(request),
            "keys": await authenticator_of(request).needs_keys(),
            "models": [
                {
                    "name": model.name,
                    "replicas": model.replicas,
                    "loaded": any(
                        context.executor.stats(engine) is not None for engine in model.engines
                    ),
                    # Only of a local server. `tinkex demo` kills the engine of its own.
                    "processes": local_models.processes(model) if local_models else [],
                }
                for model in context.executor.served
            ],
            "open_requests": len(context.futures),
            "idle_s": timeouts.idle_s,
            "sessions": sessions,
        }
    )
