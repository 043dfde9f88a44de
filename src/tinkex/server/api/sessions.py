"""Sessions: begin, beat, finish; and what a client is told before it begins."""

import hashlib
import json
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from tinkex.server.api.auth import caller_of, owner_of
from tinkex.server.api.deps import answer, context_of, describe, read_json
from tinkex.server.api.errors import Refusal, missing
from tinkex.server.api.report_limits import MOST_LISTED, bounded, report
from tinkex.server.scheduler.session_timeout import session_status
from tinkex.server.store.sessions import MAX_SPANS, CheckpointTotals, SessionDetails, Span
from tinkex.wire.base import StrictModel
from tinkex.wire.errors import UserFailure, WireError
from tinkex.wire.redaction import scrubbed
from tinkex.wire.runs import (
    ClientConfigRequest,
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
from tinkex.wire.sdk_versions import Dialect

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
    session = await context_of(request).store.sessions.create_session(
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
    context.store.sessions.mark_seen(asked.session_id)
    return answer({"type": "session_heartbeat"})


@router.post("/sessions/{session_id}/finish", openapi_extra=dict(describe(FinishSessionRequest)))
async def finish_session(request: Request, session_id: str) -> Response:
    asked = await read_json(request, FinishSessionRequest)
    context = context_of(request)
    await context.session(request, session_id)
    detail = None if asked.detail is None else scrubbed(asked.detail)[:LONGEST_FINISH]
    await context.store.sessions.finish_session(session_id, asked.reason.type, detail)
    context.forget_session(session_id)
    context.presence.left(session_id)
    return answer({})


# MERGED: Sessions of the past and present: lists, details, search, projects, and traces.


#: Where sessions are that named no project.
NO_PROJECT = "default"

MOST_ON_A_PAGE = 10_000
MOST_FOUND = 200
Limit = Annotated[int, Query(ge=0, le=MOST_ON_A_PAGE)]
Offset = Annotated[int, Query(ge=0, le=2**53)]
# `accessible`: also sessions in which others published a checkpoint, and of them only that.
Scope = Annotated[Literal["owned", "accessible"], Query()]


class SetSessionProjectRequest(StrictModel):
    project_id: str


@router.get("/sessions")
@bounded(entries=MOST_ON_A_PAGE)
async def list_sessions(
    request: Request, limit: Limit = 20, offset: Offset = 0, access_scope: Scope = "owned"
) -> Response:
    """Newest first."""
    found = await context_of(request).store.sessions.list_ids(
        owner=owner_of(request),
        published=access_scope == "accessible",
        limit=limit,
        offset=offset,
    )
    return await report(
        request, lambda: ListSessionsResponse(sessions=found), advice="Ask for fewer with `limit`."
    )


@router.post("/sessions/search", openapi_extra=dict(describe(SessionSearchRequest)))
@bounded(entries=MOST_FOUND)
async def search_sessions(request: Request) -> Response:
    """
    Newest first, page by page.

    One request looks at so many sessions and no more: a page may have few entries, or none, and a
    `next_cursor` to go on with. Only without a cursor it was the last.
    """
    asked = await read_json(request, SessionSearchRequest)
    owner = owner_of(request)
    sessions = context_of(request).store.sessions
    found = await sessions.search(
        owner=owner,
        published=not isinstance(asked.owner, OwnSearchOwner),
        session_id=asked.session_id,
        after=None if asked.cursor is None else _place(asked.cursor),
        wanted=lambda session: _is_wanted(session, asked),
        limit=asked.limit,
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
        advice="Ask for fewer with `limit`.",
    )


@router.get("/sessions/{session_id}")
@bounded(entries=2 * MOST_LISTED)
async def get_session(request: Request, session_id: str, access_scope: Scope = "owned") -> Response:
    session = await _session(request, session_id, published=access_scope == "accessible")
    runs, samplers = await context_of(request).store.sessions.contents(
        session_id, reader=owner_of(request), limit=MOST_LISTED + 1
    )
    if max(len(runs), len(samplers)) > MOST_LISTED:
        raise UserFailure(
            f"session {session_id} has more than {MOST_LISTED} training runs or samplers, which "
            "is the most of one answer. List runs with GET training_runs, page by page."
        )
    return await report(
        request,
        lambda: GetSessionResponse(
            training_run_ids=runs,
            sampler_ids=samplers,
            user_metadata=texts(session.user_metadata),
            display_name=session.display_name,
        ),
        advice="List runs with GET training_runs, page by page.",
    )


@router.put(
    "/sessions/{session_id}/project",
    status_code=204,
    openapi_extra=dict(describe(SetSessionProjectRequest)),
)
async def set_project(request: Request, session_id: str) -> Response:
    asked = await read_json(request, SetSessionProjectRequest)
    if not 1 <= len(asked.project_id) <= LONGEST_PROJECT:
        raise WireError.at(
            ("project_id",),
            f"{len(asked.project_id)} characters; 1 to {LONGEST_PROJECT} are allowed.",
        )
    session = await _session(request, session_id)
    context = context_of(request)
    await context.store.sessions.set_project(session_id, asked.project_id, owner=session.owner)
    context.forget_session(session_id)
    return Response(status_code=204)


@router.get("/sessions/{session_id}/trace_export")
async def trace_export(request: Request, session_id: str) -> Response:
    """A link to the trace; it is made when the link is opened, so it is ready at once."""
    await _session(request, session_id)
    context = context_of(request)
    path = _trace_path(session_id)
    query = context.signer.sign(path, lasts_s=context.settings.link_s)
    base = context.settings.public_url.rstrip("/") or str(request.base_url).rstrip("/")
    return answer(TraceExportResponse(status="ready", url=f"{base}{path}?{query}"))


async def _traced(request: Request) -> str:
    """
    Whose session a link is about: the link says nothing of who opens it.

    A link that is not good is refused here, before it costs a read or its owner's turn.
    """
    context, session_id = context_of(request), request.path_params["session_id"]
    query = request.query_params
    if not context.signer.opens(_trace_path(session_id), query["expires"], query["signature"]):
        raise Refusal(
            403, "this link has expired, or is not one of this server. Ask for a new one."
        )
    session = await context.store.sessions.session(session_id)
    return "" if session is None else session.owner


@router.get("/signed/traces/{session_id}")
# Each span begins and ends; each track has a name.
@bounded(entries=3 * MAX_SPANS, owner=_traced)
async def trace(request: Request, session_id: str, expires: str, signature: str) -> Response:
    """What such a link leads to: one line of time for each model and sampler of a session."""
    spans = await context_of(request).store.sessions.spans(session_id)
    now_s = time.time()
    return await report(
        request,
        lambda: {"traceEvents": [*_trace_events(spans, now_s=now_s)], "displayTimeUnit": "ms"},
        advice="The trace of a shorter session fits.",
        headers={"Content-Disposition": f'attachment; filename="{session_id}.json"'},
    )


def texts(metadata: Mapping[str, Any] | None) -> dict[str, str] | None:
    """Any JSON was taken in; what goes out is text."""
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
        raise missing("session", session_id, "Create one with create_session.")
    return session


def _is_wanted(session: SessionDetails, asked: SessionSearchRequest) -> bool:
    if isinstance(asked.owner, UserSearchOwner) and session.owner not in asked.owner.owner_urns:
        return False
    if asked.project_ids is not None and (session.project_id or NO_PROJECT) not in (
        asked.project_ids
    ):
        return False
    if asked.display_name is not None and (
        asked.display_name.lower() not in (session.display_name or "").lower()
    ):
        return False
    known = texts(session.user_metadata) or {}
    if any(known.get(key) != value for key, value in asked.user_metadata.items()):
        return False
    if asked.statuses is None:
        return True
    status = session_status(session)
    return any(_has_status(status, query) for query in asked.statuses)


def _has_status(status: SessionStatus, query: SessionStatusQuery) -> bool:
    if status.type != query.type:
        return False
    if isinstance(query, ClientFinishedSessionStatusQuery) and query.reasons is not None:
        return isinstance(status, ClientSessionFinished) and status.reason.type in query.reasons
    return True


def _summary(session: SessionDetails, holdings: CheckpointTotals) -> SessionSummary:
    return SessionSummary(
        session_id=session.session_id,
        created_at=_moment(session.position),
        owner=session.owner,
        project_id=session.project_id or NO_PROJECT,
        status=session_status(session),
        checkpoints_count=holdings.checkpoints,
        display_name=session.display_name,
        user_metadata=texts(session.user_metadata),
        checkpoint_storage_bytes=holdings.size_bytes,
    )


def _cursor(place: tuple[int, str]) -> SessionSearchCursor:
    return SessionSearchCursor(last_created_at=_moment(place), last_session_id=place[1])


def _moment(place: tuple[int, str]) -> datetime:
    microseconds, _ = place
    return datetime.fromtimestamp(microseconds // 1_000_000, UTC).replace(
        microsecond=microseconds % 1_000_000
    )


def _place(cursor: SessionSearchCursor) -> tuple[int, str]:
    moment = cursor.last_created_at.astimezone(UTC)
    whole = int(moment.replace(microsecond=0).timestamp())
    return whole * 1_000_000 + moment.microsecond, cursor.last_session_id


def _trace_path(session_id: str) -> str:
    return f"/api/v1/signed/traces/{session_id}"


def _trace_events(spans: Iterable[Span], *, now_s: float) -> Iterable[dict[str, Any]]:
    """Chrome's trace format, which Perfetto reads: each model or sampler as a process."""
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
        told = {"request_id": span.request_id, "seq_id": span.seq_id, "status": span.status}
        # Pairs, not whole slices: requests of one model overlap while they wait.
        yield {**common, "ph": "b", "ts": span.created_s * 1e6, "args": told}
        yield {**common, "ph": "e", "ts": (span.finished_s or now_s) * 1e6}
