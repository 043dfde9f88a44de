"""The routes of sessions: configuration, create, heartbeat, finish, lists, search and traces."""

import hashlib
import json
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tinkex.local.registry import LEASE_HEADER
from tinkex.server.api.auth import caller_of, owner_of
from tinkex.server.api.bodies import MessageRoute
from tinkex.server.api.deps import context_of, json_response
from tinkex.server.api.errors import Refusal, not_found
from tinkex.server.api.response_limits import (
    MAX_PAGE_SIZE,
    MAX_REPORT_ENTRIES,
    Access,
    Offset,
    PageSize,
    bounded,
    report,
)
from tinkex.server.scheduler.session_status import session_status
from tinkex.server.store.sessions import MAX_SPANS, CheckpointTotals, SessionDetails, Span
from tinkex.wire.base import StrictModel
from tinkex.wire.client_config import ClientConfigRequest
from tinkex.wire.errors import UserFailure, WireError
from tinkex.wire.redaction import redact
from tinkex.wire.sdk_versions import SdkVersion
from tinkex.wire.sessions import (
    ClientFinishedSessionStatusQuery,
    ClientSessionFinished,
    CreateSessionRequest,
    CreateSessionResponse,
    FinishSessionRequest,
    GetServerCapabilitiesResponse,
    GetSessionResponse,
    ListSessionsResponse,
    OwnSearchOwner,
    SessionHeartbeatRequest,
    SessionSearchCursor,
    SessionSearchRequest,
    SessionSearchResponse,
    SessionStatus,
    SessionStatusQuery,
    SessionSummary,
    SupportedModel,
    TraceExportResponse,
    UserSearchOwner,
)

router = APIRouter(prefix="/api/v1", tags=["sessions"], route_class=MessageRoute)

# The sizes of the database columns.
MAX_VERSION_LENGTH = 64
MAX_PROJECT_LENGTH = 200
MAX_DISPLAY_NAME_LENGTH = 500
MAX_LEASE_LENGTH = 64
# Clients send a traceback of any length here; the rest is cut off.
MAX_FINISH_DETAIL_LENGTH = 4_000

#: The project of sessions without one.
NO_PROJECT = "default"

MAX_SEARCH_PAGE_SIZE = 200


class SetSessionProjectRequest(StrictModel):
    project_id: str


@router.post("/client/config")
async def client_config(request: Request, message: ClientConfigRequest) -> Response:
    dialect = SdkVersion.of(message.sdk_version)
    flags = dialect.client_config()
    if context_of(request).settings.jwt and dialect.exchanges_tokens:
        flags["pjwt_auth_enabled"] = True
    return json_response(flags)


@router.post("/client/dynamic_config")
async def client_dynamic_config(request: Request, message: ClientConfigRequest) -> Response:
    return json_response(SdkVersion.of(message.sdk_version).dynamic_config())


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
    return json_response(GetServerCapabilitiesResponse(supported_models=models))


@router.post("/create_session")
async def create_session(request: Request, message: CreateSessionRequest) -> Response:
    _check_length("project_id", message.project_id, MAX_PROJECT_LENGTH)
    _check_length("display_name", message.display_name, MAX_DISPLAY_NAME_LENGTH)
    key = request.headers.get("x-idempotency-key")
    caller = caller_of(request)
    context = context_of(request)
    session = await context.store.sessions.create_session(
        owner=caller.owner,
        sdk_version=message.sdk_version[:MAX_VERSION_LENGTH],
        tags=list(message.tags),
        user_metadata=message.user_metadata or {},
        project_id=message.project_id or caller.project_id,
        display_name=message.display_name,
        idempotency_key=None if key is None else hashlib.sha256(key.encode()).hexdigest(),
    )
    lease = request.headers.get(LEASE_HEADER)
    context.session_timeouts.begin(session.session_id, lease and lease[:MAX_LEASE_LENGTH])
    return json_response(
        CreateSessionResponse(session_id=session.session_id, type="create_session")
    )


def _check_length(name: str, text: str | None, max_length: int) -> None:
    if text is not None and len(text) > max_length:
        raise WireError.at((name,), f"{len(text)} characters; at most {max_length} are allowed.")


@router.post("/session_heartbeat")
async def session_heartbeat(request: Request, message: SessionHeartbeatRequest) -> Response:
    context = context_of(request)
    await context.open_session(request, message.session_id)
    context.store.sessions.mark_seen(message.session_id)
    return json_response({"type": "session_heartbeat"})


@router.post("/sessions/{session_id}/finish")
async def finish_session(
    request: Request, message: FinishSessionRequest, session_id: str
) -> Response:
    context = context_of(request)
    await context.session(request, session_id)
    detail = None if message.detail is None else redact(message.detail)[:MAX_FINISH_DETAIL_LENGTH]
    await context.store.sessions.finish_session(session_id, message.reason.type, detail)
    context.forget_session(session_id)
    context.session_timeouts.finish(session_id)
    return json_response({})


@router.get("/sessions")
@bounded(entries=MAX_PAGE_SIZE)
async def list_sessions(
    request: Request, limit: PageSize = 20, offset: Offset = 0, access_scope: Access = "owned"
) -> Response:
    """Newest first."""
    found = await context_of(request).store.sessions.list_ids(
        owner=owner_of(request),
        published=access_scope == "accessible",
        limit=limit,
        offset=offset,
    )
    return await report(
        request, lambda: ListSessionsResponse(sessions=found), advice="Request fewer with `limit`."
    )


@router.post("/sessions/search")
@bounded(entries=MAX_SEARCH_PAGE_SIZE)
async def search_sessions(request: Request, message: SessionSearchRequest) -> Response:
    """
    Newest first, in pages.

    One request examines a limited number of sessions: a page may have few entries, or none, and
    still a `next_cursor`. A page without a cursor is the last.
    """
    owner = owner_of(request)
    sessions = context_of(request).store.sessions
    found = await sessions.search(
        owner=owner,
        published=not isinstance(message.owner, OwnSearchOwner),
        session_id=message.session_id,
        after=None if message.cursor is None else _position(message.cursor),
        wanted=lambda session: _matches(session, message),
        limit=message.limit,
    )
    holdings = await sessions.checkpoint_totals(
        [one.session_id for one in found.sessions], reader=owner, now_s=time.time()
    )
    return await report(
        request,
        lambda: SessionSearchResponse(
            sessions=[_summary(one, holdings[one.session_id]) for one in found.sessions],
            next_cursor=None if found.next is None else _cursor(found.next),
        ),
        advice="Request fewer with `limit`.",
    )


@router.get("/sessions/{session_id}")
@bounded(entries=2 * MAX_REPORT_ENTRIES)
async def get_session(
    request: Request, session_id: str, access_scope: Access = "owned"
) -> Response:
    session = await _session(request, session_id, published=access_scope == "accessible")
    runs, samplers = await context_of(request).store.sessions.contents(
        session_id, reader=owner_of(request), limit=MAX_REPORT_ENTRIES + 1
    )
    if max(len(runs), len(samplers)) > MAX_REPORT_ENTRIES:
        raise UserFailure(
            f"session {session_id} has more than {MAX_REPORT_ENTRIES} training runs or samplers, "
            "the maximum of one response. List runs with GET training_runs, page by page."
        )
    return await report(
        request,
        lambda: GetSessionResponse(
            training_run_ids=runs,
            sampler_ids=samplers,
            user_metadata=metadata_as_text(session.user_metadata),
            display_name=session.display_name,
        ),
        advice="List runs with GET training_runs, page by page.",
    )


@router.put("/sessions/{session_id}/project", status_code=204)
async def set_project(
    request: Request, message: SetSessionProjectRequest, session_id: str
) -> Response:
    if not 1 <= len(message.project_id) <= MAX_PROJECT_LENGTH:
        raise WireError.at(
            ("project_id",),
            f"{len(message.project_id)} characters; 1 to {MAX_PROJECT_LENGTH} are allowed.",
        )
    session = await _session(request, session_id)
    context = context_of(request)
    await context.store.sessions.set_project(session_id, message.project_id, owner=session.owner)
    context.forget_session(session_id)
    return Response(status_code=204)


@router.get("/sessions/{session_id}/trace_export")
async def trace_export(request: Request, session_id: str) -> Response:
    """A signed link to the trace, which is built when the link is opened."""
    await _session(request, session_id)
    context = context_of(request)
    path = _trace_path(session_id)
    query = context.signer.sign(path, lasts_s=context.settings.link_s)
    base = context.settings.public_url.rstrip("/") or str(request.base_url).rstrip("/")
    return json_response(TraceExportResponse(status="ready", url=f"{base}{path}?{query}"))


async def _trace_owner(request: Request) -> str:
    """
    The owner of the session of a link; the link itself carries no key.

    An invalid link is refused here, before it costs a read or the owner's report slot.
    """
    context, session_id = context_of(request), request.path_params["session_id"]
    query = request.query_params
    if not context.signer.verifies(_trace_path(session_id), query["expires"], query["signature"]):
        raise Refusal(
            403, "this link has expired, or was not made by this server. Request a new one."
        )
    session = await context.store.sessions.session(session_id)
    return "" if session is None else session.owner


@router.get("/signed/traces/{session_id}")
# Two events per span, and a name per track.
@bounded(entries=3 * MAX_SPANS, owner=_trace_owner)
async def trace(request: Request, session_id: str, expires: str, signature: str) -> Response:
    """The trace of a session: one track per model and sampler."""
    spans = await context_of(request).store.sessions.spans(session_id)
    now_s = time.time()
    return await report(
        request,
        lambda: {"traceEvents": [*_trace_events(spans, now_s=now_s)], "displayTimeUnit": "ms"},
        advice="Only shorter sessions have a trace.",
        headers={"Content-Disposition": f'attachment; filename="{session_id}.json"'},
    )


def metadata_as_text(metadata: Mapping[str, Any] | None) -> dict[str, str] | None:
    """Metadata may be any JSON; the protocol returns strings."""
    if metadata is None:
        return None
    return {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in metadata.items()
    }


async def _session(request: Request, session_id: str, *, published: bool = False) -> SessionDetails:
    session = await context_of(request).store.sessions.details(
        session_id, reader=owner_of(request), published=published
    )
    if session is None:
        raise not_found("session", session_id, "Create one with create_session.")
    return session


def _matches(session: SessionDetails, message: SessionSearchRequest) -> bool:
    if isinstance(message.owner, UserSearchOwner) and session.owner not in message.owner.owner_urns:
        return False
    if message.project_ids is not None and (session.project_id or NO_PROJECT) not in (
        message.project_ids
    ):
        return False
    if message.display_name is not None and (
        message.display_name.lower() not in (session.display_name or "").lower()
    ):
        return False
    known = metadata_as_text(session.user_metadata) or {}
    if any(known.get(key) != value for key, value in message.user_metadata.items()):
        return False
    if message.statuses is None:
        return True
    status = session_status(session)
    return any(_has_status(status, query) for query in message.statuses)


def _has_status(status: SessionStatus, query: SessionStatusQuery) -> bool:
    if status.type != query.type:
        return False
    if isinstance(query, ClientFinishedSessionStatusQuery) and query.reasons is not None:
        return isinstance(status, ClientSessionFinished) and status.reason.type in query.reasons
    return True


def _summary(session: SessionDetails, holdings: CheckpointTotals) -> SessionSummary:
    return SessionSummary(
        session_id=session.session_id,
        created_at=_created_at(session.position),
        owner=session.owner,
        project_id=session.project_id or NO_PROJECT,
        status=session_status(session),
        checkpoints_count=holdings.checkpoints,
        display_name=session.display_name,
        user_metadata=metadata_as_text(session.user_metadata),
        checkpoint_storage_bytes=holdings.size_bytes,
    )


def _cursor(position: tuple[int, str]) -> SessionSearchCursor:
    return SessionSearchCursor(last_created_at=_created_at(position), last_session_id=position[1])


def _created_at(position: tuple[int, str]) -> datetime:
    microseconds, _ = position
    return datetime.fromtimestamp(microseconds // 1_000_000, UTC).replace(
        microsecond=microseconds % 1_000_000
    )


def _position(cursor: SessionSearchCursor) -> tuple[int, str]:
    moment = cursor.last_created_at.astimezone(UTC)
    seconds = int(moment.replace(microsecond=0).timestamp())
    return seconds * 1_000_000 + moment.microsecond, cursor.last_session_id


def _trace_path(session_id: str) -> str:
    return f"/api/v1/signed/traces/{session_id}"


def _trace_events(spans: Iterable[Span], *, now_s: float) -> Iterable[dict[str, Any]]:
    """Chrome's trace format, which Perfetto reads, with a process per model or sampler."""
    tracks: dict[str, int] = {}
    for span in spans:
        if span.track not in tracks:
            tracks[span.track] = len(tracks) + 1
            yield {
                "name": "process_name",
                "ph": "M",
                "pid": tracks[span.track],
                "args": {"name": span.track},
            }
        common = {
            "name": span.kind,
            "cat": span.kind,
            "id": span.request_id,
            "pid": tracks[span.track],
            "tid": 1,
        }
        arguments = {"request_id": span.request_id, "seq_id": span.seq_id, "status": span.status}
        # Begin and end events, not slices: waiting requests of one model overlap.
        yield {**common, "ph": "b", "ts": span.created_s * 1e6, "args": arguments}
        yield {**common, "ph": "e", "ts": (span.finished_s or now_s) * 1e6}
