"""
The routes that only the console needs: who is signed in, requests of a run, samplers, the state of
the server, usage by day, and keys. Everything else it reads from the same routes as all clients.

An administrator is whoever has a key that was created with `--admin`. Only they see other owners: in
the queue, in usage and in the list of keys. A server without keys has one owner, and no keys to manage.
"""

import time
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from tinkex.server.api.auth import Caller, authenticator_of, caller_of, owner_of
from tinkex.server.api.bodies import MessageRoute
from tinkex.server.api.deps import Context, context_of, json_response
from tinkex.server.api.errors import Refusal, not_found
from tinkex.server.api.futures import queue_state_of
from tinkex.server.api.operations import not_ready_reason
from tinkex.server.api.response_limits import Offset, bounded, report
from tinkex.server.api.runs_and_checkpoints import time_of
from tinkex.server.store import ApiKey, Status
from tinkex.server.store.console_reads import DayUsage, ListedSampler, RunRequest
from tinkex.server.store.request_rows import HOUR_S
from tinkex.wire.base import StrictModel
from tinkex.wire.errors import WireError
from tinkex.wire.proto.frames_pb2 import Stats

router = APIRouter(prefix="/api/v1/console", tags=["console"], route_class=MessageRoute)

MAX_ROWS = 500
Rows = Annotated[int, Query(ge=1, le=MAX_ROWS)]
MAX_DAYS = 90
MAX_USAGE_ROWS = 10_000
#: Owners with unfinished work that one answer lists, those with the most requests first.
MAX_OWNERS = 100
MAX_KEYS = 5_000
# The texts of a request's error, a model's name and a key.
MAX_ERROR_CHARACTERS = 1_000
MAX_KEY_TEXT = 200

NOT_ADMIN = (
    "only a key of an administrator may manage keys. `tinkex key create --admin` creates one."
)


class CreateKeyRequest(StrictModel):
    owner: str
    name: str = ""
    #: Days until it expires; None: never.
    expires_days: int | None = None
    admin: bool = False


@router.get("/session")
async def signed_in(request: Request) -> Response:
    """Who is signed in, and what this server is."""
    caller = caller_of(request)
    context = context_of(request)
    return json_response(
        {
            "owner": caller.owner,
            "key_id": caller.key_id,
            "key_name": caller.name,
            "needs_keys": caller.key_id is not None,
            "is_admin": _sees_all(caller),
            "manages_keys": caller.is_admin,
            "version": version("tinkex"),
            "models": [
                {"name": model.name, "max_context_length": model.max_context_length}
                for model in context.executor.served
            ],
        }
    )


def _sees_all(caller: Caller) -> bool:
    """Whether the caller may see all owners. Without keys there is one."""
    return caller.is_admin or caller.key_id is None


@router.get("/runs/{run}/requests")
@bounded(entries=MAX_ROWS)
async def list_requests_of_run(
    request: Request, run: str, limit: Rows = 100, offset: Offset = 0
) -> Response:
    """The requests of a run that the server still has, newest first, with what they wait for."""
    context = context_of(request)
    await context.model(request, run)
    found, total = await context.store.console_reads.requests(run, limit=limit, offset=offset)
    rows = [_request(context, one) for one in found]
    return await report(
        request,
        lambda: {"requests": rows, "total_count": total},
        advice="Request fewer with `limit`.",
    )


def _request(context: Context, one: RunRequest) -> dict[str, Any]:
    state = queue_state_of(context, one.request_id) if one.status == Status.WAITING else None
    return {
        "request_id": one.request_id,
        "seq_id": one.seq_id,
        "kind": one.kind,
        "status": one.status,
        "created_at": time_of(one.created_s),
        "finished_at": None if one.finished_s is None else time_of(one.finished_s),
        "tokens": one.tokens,
        "error": one.error and one.error[:MAX_ERROR_CHARACTERS],
        "category": one.category,
        "queue_state": None if state is None else state.state,
        "queue_state_reason": None if state is None else state.reason,
    }


@router.get("/samplers")
@bounded(entries=MAX_ROWS)
async def list_samplers(request: Request, limit: Rows = 100, offset: Offset = 0) -> Response:
    """The owner's samplers, newest first."""
    found, total = await context_of(request).store.console_reads.samplers(
        owner_of(request), limit=limit, offset=offset
    )
    return await report(
        request,
        lambda: {"samplers": [_sampler(one) for one in found], "total_count": total},
        advice="Request fewer with `limit`.",
    )


def _sampler(one: ListedSampler) -> dict[str, Any]:
    return {
        "sampler_id": one.sampling_session_id,
        "session_id": one.session_id,
        "base_model": one.base_model,
        "model_path": one.model_path,
        "created_at": time_of(one.created_s),
        "clients": one.clients + 1,
    }


# -- the server ----------------------------------------------------------------------------------


@router.get("/server")
async def get_server_state(request: Request) -> Response:
    """Engines with their memory, and the queue by owner."""
    return json_response(server_state(request, caller_of(request)))


def server_state(request: Request, caller: Caller) -> dict[str, Any]:
    """The state of the server as this caller may see it."""
    context = context_of(request)
    futures = context.futures
    loads = [
        (owner, load)
        for owner, load in futures.loads.items()
        if owner == caller.owner or _sees_all(caller)
    ]
    busiest = sorted(loads, key=lambda item: -item[1].requests)[:MAX_OWNERS]
    return {
        "time": datetime.now(UTC),
        "problem": not_ready_reason(request),
        "version": version("tinkex"),
        "requests_open": len(futures),
        "requests_waiting": futures.waiting,
        "owners_active": len(futures.loads),
        "owners": [
            {
                "owner": owner,
                "requests": load.requests,
                "tokens": load.tokens,
                "samples": load.samples,
            }
            for owner, load in busiest
        ],
        "engines": [
            _engine(context, model.name, engine)
            for model in context.executor.served
            for engine in model.engines
        ],
    }


def _engine(context: Context, base_model: str, engine: str) -> dict[str, Any]:
    facts, stats = context.executor.facts(engine), context.executor.stats(engine)
    return {
        "engine": engine,
        "base_model": base_model,
        "state": "up" if stats is not None else "down",
        "waiting_for": context.executor.waiting_for(engine),
        "device": facts.device if facts else None,
        "dtype": facts.dtype if facts else None,
        "device_bytes": facts.device_bytes if facts else None,
        "stats": None if stats is None else _stats(stats),
    }


def _stats(stats: Stats) -> dict[str, int]:
    return {field.name: getattr(stats, field.name) for field in Stats.DESCRIPTOR.fields}


# -- usage ---------------------------------------------------------------------------------------


@router.get("/usage")
@bounded(entries=MAX_USAGE_ROWS)
async def get_usage_by_day(
    request: Request, days: Annotated[int, Query(ge=1, le=MAX_DAYS)] = 30
) -> Response:
    """Tokens by day, base model and kind; for administrators, of all owners."""
    caller = caller_of(request)
    today = int(time.time()) // (24 * HOUR_S)
    found = await context_of(request).store.console_reads.usage_by_day(
        None if _sees_all(caller) else caller.owner,
        first_hour=(today - days + 1) * 24,
        limit=MAX_USAGE_ROWS + 1,
    )
    return await report(
        request,
        lambda: {
            "usage": [_usage(one) for one in found[:MAX_USAGE_ROWS]],
            "is_complete": len(found) <= MAX_USAGE_ROWS,
        },
        advice="Request fewer `days`.",
    )


def _usage(one: DayUsage) -> dict[str, Any]:
    day = datetime.fromtimestamp(one.day * 24 * HOUR_S, UTC).date()
    return {
        "owner": one.owner,
        "day": day.isoformat(),
        "base_model": one.base_model,
        "what": one.what,
        "tokens": int(one.amount),
    }


# -- keys ----------------------------------------------------------------------------------------


@router.get("/keys")
@bounded(entries=MAX_KEYS)
async def list_keys(request: Request) -> Response:
    """The keys of the caller's owner, newest first; for administrators, all."""
    caller = caller_of(request)
    found: Iterable[ApiKey] = ()
    if caller.key_id is not None:
        found = await context_of(request).store.keys.of_owner(
            None if caller.is_admin else caller.owner, limit=MAX_KEYS
        )
    now_s = time.time()
    return await report(
        request,
        lambda: {"keys": [_key(one, now_s) for one in found]},
        advice="There are too many keys for one answer; `tinkex key list` shows all.",
    )


@router.post("/keys")
async def create_key_of_owner(request: Request, message: CreateKeyRequest) -> Response:
    """A new key. The answer is the only one that contains it."""
    _require_admin(request)
    for name, text in (("owner", message.owner), ("name", message.name)):
        if len(text) > MAX_KEY_TEXT or not text.isprintable():
            raise WireError.at(
                (name,), f"it must be printable text of at most {MAX_KEY_TEXT} characters."
            )
    if not message.owner.strip():
        raise WireError.at(("owner",), "it is empty.")
    expires_s = None
    if message.expires_days is not None:
        if not 1 <= message.expires_days <= 3650:
            raise WireError.at(("expires_days",), "1 to 3650 days are allowed.")
        expires_s = time.time() + timedelta(days=message.expires_days).total_seconds()
    key, secret = await context_of(request).store.keys.create(
        owner=message.owner, name=message.name, expires_s=expires_s, is_admin=message.admin
    )
    return json_response({**_key(key, time.time()), "key": secret})


@router.delete("/keys/{key_id}", status_code=204)
async def revoke_key_of_owner(request: Request, key_id: str) -> Response:
    """Revoke a key of any owner; it is refused within two seconds."""
    _require_admin(request)
    keys = context_of(request).store.keys
    number = int(key_id) if key_id.isdecimal() and len(key_id) < 10 else 0
    if await keys.by_id(number) is None:
        raise not_found("key", key_id, "The console's page of keys lists all.")
    await keys.revoke(number)
    authenticator_of(request).forget()
    return Response(status_code=204)


def _require_admin(request: Request) -> None:
    caller = caller_of(request)
    if caller.key_id is None:
        raise Refusal(
            403,
            "a server without keys accepts everyone on this machine, so nobody may create a key "
            "here. `tinkex key create` creates the first one.",
        )
    if not caller.is_admin:
        raise Refusal(403, NOT_ADMIN)
    if caller.by_token and not caller.by_cookie:
        # A token is valid for an hour; a key that it creates may be valid forever.
        raise Refusal(
            403, "a token cannot manage keys. Send the API key itself (tml-…), or sign in with it."
        )


def _key(key: ApiKey, now_s: float) -> dict[str, Any]:
    return {
        "key_id": key.key_id,
        "hint": key.hint,
        "owner": key.owner,
        "name": key.name,
        "project_id": key.project_id,
        "is_admin": key.is_admin,
        "limits": dict(key.limits),
        "created_at": time_of(key.created_s),
        "used_at": None if key.used_s is None else time_of(key.used_s),
        "expires_at": None if key.expires_s is None else time_of(key.expires_s),
        "state": key.state(now_s),
    }
