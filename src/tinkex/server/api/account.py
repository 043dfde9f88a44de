"""The routes of an account: usage and cost, audit log, and the caller's own key."""

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import UTC, date, datetime, timedelta
from itertools import chain
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from tinkex.server.api.auth import authenticator_of, caller_of, owner_of
from tinkex.server.api.deps import context_of, json_response
from tinkex.server.api.errors import Refusal
from tinkex.server.api.response_limits import bounded, report
from tinkex.server.api.sessions import metadata_as_text
from tinkex.server.prices import HOURS_PER_MONTH, Prices
from tinkex.server.store.events import MAX_ENTRIES, AuditEntry
from tinkex.server.store.request_rows import CACHED, HOUR_S, SAMPLED, TRAINING
from tinkex.server.store.usage import StoredCheckpoint, UsageRow
from tinkex.wire.billing import (
    AuditLogEntry,
    AuditLogResponse,
    BillingEventInfo,
    BillingUsageEvent,
    BillingUsageResponse,
    BillingUsageSession,
    CheckpointBillingEvent,
    CurrentCheckpointStorageUsageItem,
    CurrentCheckpointStorageUsageResponse,
    SamplingPrefillBillingEvent,
    SamplingSampleBillingEvent,
    StorageBillingEvent,
    TrainingBillingEvent,
)
from tinkex.wire.errors import UserFailure

router = APIRouter(prefix="/api/v1", tags=["billing"])
audit_router = APIRouter(prefix="/api/v1", tags=["audit"])
key_router = APIRouter(prefix="/api/v1/auth", tags=["keys"])
unauthenticated_router = APIRouter(prefix="/api/unauthed", tags=["keys"])

GIGABYTE = 10**9
MILLION = 10**6

MAX_PERIOD = timedelta(days=14)
# Limits of one response. A stored checkpoint is one event per hour.
MAX_EVENTS = 25_000
MAX_CHECKPOINTS = 100_000
MAX_PROJECTS = 10_000
SHORTER_PERIOD = "Request a shorter time."

NO_LOGIN = (
    "this server has no browser login. Its administrator creates keys with `tinkex key create`; "
    "set TINKER_API_KEY to yours."
)

#: Session, project and base model.
_Group = tuple[str, str | None, str]
#: Hour, session, project and base model.
_HourGroup = tuple[int, str, str | None, str]
Topic = Literal["all", "checkpoints", "projects", "teams", "organizations"]


@router.get("/billing/usage/events")
@bounded(entries=MAX_EVENTS)
async def usage_events(
    request: Request,
    starting_on: Annotated[str, Query(description="RFC 3339, a whole UTC hour")],
    ending_before: Annotated[str, Query(description="RFC 3339, a whole UTC hour")],
) -> Response:
    """Per hour: tokens by session and base model, saved checkpoints, and their storage."""
    first = _hour("starting_on", starting_on)
    end = _hour("ending_before", ending_before)
    if not timedelta(0) < end - first <= MAX_PERIOD:
        raise _invalid_query(
            "ending_before",
            f"it is {end - first} after starting_on; 1 hour to {MAX_PERIOD.days} days are allowed.",
        )
    context = context_of(request)
    owner = owner_of(request)
    first_hour, end_hour = int(first.timestamp()) // HOUR_S, int(end.timestamp()) // HOUR_S
    usage = context.store.usage
    used = await usage.between(
        owner=owner, first_hour=first_hour, end_hour=end_hour, limit=MAX_EVENTS + 1
    )
    stored = await usage.stored(
        owner=owner,
        since_s=first_hour * HOUR_S,
        until_s=end_hour * HOUR_S,
        limit=MAX_CHECKPOINTS + 1,
    )
    if len(stored) > MAX_CHECKPOINTS:
        raise UserFailure(
            f"more than {MAX_CHECKPOINTS} checkpoints existed in this time, the maximum of one "
            f"response. {SHORTER_PERIOD}"
        )
    prices = Prices.parse(context.settings.prices)
    storage_rate = context.settings.price_gb_month or None
    now_s = time.time()

    def build() -> list[BillingUsageEvent]:
        events: list[BillingUsageEvent] = []
        for event in chain(
            (_token_event(one, prices, owner) for one in used),
            _storage_events(stored, first_hour, end_hour, now_s, storage_rate, owner),
        ):
            if len(events) == MAX_EVENTS:
                raise UserFailure(
                    f"there are more than {MAX_EVENTS} events in this time, the maximum of one "
                    f"response. {SHORTER_PERIOD}"
                )
            events.append(event)
        events.sort(key=lambda event: event.bucket_start)
        return events

    events = await context.store.build_report(build)
    sessions = sorted({event.session_id for event in events if event.session_id})
    metadata = await usage.metadata(sessions)
    return await report(
        request,
        lambda: BillingUsageResponse(
            data=events,
            sessions={
                one: BillingUsageSession(user_metadata=metadata_as_text(metadata.get(one)))
                for one in sessions
            },
            cost_data_through=datetime.fromtimestamp(int(now_s), UTC),
        ),
        advice=SHORTER_PERIOD,
    )


@router.get("/billing/usage/checkpoints/current")
@bounded(entries=MAX_PROJECTS)
async def current_storage(request: Request, project_id: str | None = None) -> Response:
    """Current storage of the owner's listed checkpoints, by project."""
    context = context_of(request)
    owner = owner_of(request)
    kept = await context.store.usage.current(
        owner=owner, project_id=project_id, now_s=time.time(), limit=MAX_PROJECTS + 1
    )
    if len(kept) > MAX_PROJECTS:
        raise UserFailure(
            f"there are checkpoints in more than {MAX_PROJECTS} projects, the maximum of one "
            "response. Request one `project_id`."
        )
    rate = context.settings.price_gb_month or None
    return await report(
        request,
        lambda: CurrentCheckpointStorageUsageResponse(
            effective_rate_usd_per_gigabyte_month=rate,
            data=[
                CurrentCheckpointStorageUsageItem(
                    project_id=one.project_id,
                    user_name=owner,
                    checkpoint_count=one.checkpoints,
                    size_bytes=one.size_bytes,
                    size_gigabytes=one.size_bytes / GIGABYTE,
                    estimated_monthly_cost_usd=(
                        None if rate is None else one.size_bytes / GIGABYTE * rate
                    ),
                )
                for one in kept
            ],
        ),
        advice="Request one `project_id`.",
    )


def _hour(name: str, text: str) -> datetime:
    """Parse a whole UTC hour. A `+` that a client did not escape arrives as a space."""
    try:
        moment = datetime.fromisoformat(text.strip().replace(" ", "+"))
    except ValueError:
        raise _invalid_query(
            name, f"{text[:60]!r} is not an RFC 3339 time such as 2026-11-15T10:00:00Z."
        ) from None
    if moment.tzinfo is None:
        raise _invalid_query(name, f"{text[:60]!r} has no time zone; end it with Z or +00:00.")
    try:
        moment = moment.astimezone(UTC)
    except OverflowError:
        raise _invalid_query(name, f"{text[:60]!r} is out of range.") from None
    if moment.minute or moment.second or moment.microsecond:
        raise _invalid_query(
            name, f"{text[:60]!r} is not a whole UTC hour, and usage is kept by the hour."
        )
    return moment


def _invalid_query(name: str, message: str) -> Refusal:
    return Refusal(422, [{"loc": ["query", name], "msg": message, "type": "value_error"}])


def _token_event(used: UsageRow, prices: Prices, owner: str) -> BillingUsageEvent:
    rate = prices.rate(used.base_model, used.what)
    return BillingUsageEvent(
        bucket_start=_hour_start(used.hour),
        bucket_end=_hour_start(used.hour + 1),
        base_model=used.base_model,
        user_id=owner,
        session_id=used.session_id or None,
        project_id=used.project_id,
        estimated_cost_usd=None if rate is None else used.amount / MILLION * rate,
        effective_rate_usd_per_million_tokens=rate,
        event_info=_info(used),
    )


def _info(used: UsageRow) -> BillingEventInfo:
    if used.what == TRAINING:
        return TrainingBillingEvent(token_count=used.amount)
    if used.what == SAMPLED:
        return SamplingSampleBillingEvent(token_count=used.amount)
    return SamplingPrefillBillingEvent(cached=used.what == CACHED, token_count=used.amount)


def _storage_events(
    stored: Iterable[StoredCheckpoint],
    first_hour: int,
    end_hour: int,
    now_s: float,
    rate: float | None,
    owner: str,
) -> Iterator[BillingUsageEvent]:
    """Saved checkpoints per hour, and gigabyte-hours of stored ones per hour."""
    saves: defaultdict[_HourGroup, int] = defaultdict(int)
    kept: defaultdict[_Group, _StorageByHour] = defaultdict(_StorageByHour)
    for one in stored:
        until_s = min(now_s, one.until_s or now_s, end_hour * HOUR_S)
        saved_in = int(one.since_s) // HOUR_S
        if saved_in >= first_hour:
            saves[saved_in, one.session_id, one.project_id, one.base_model] += 1
        since_s = max(one.since_s, first_hour * HOUR_S)
        kept[one.session_id, one.project_id, one.base_model].add(since_s, until_s, one.size_bytes)
    for hour_group, count in saves.items():
        yield _event(hour_group, owner, CheckpointBillingEvent(count=count))
    for group, storage in kept.items():
        for hour, byte_hours in storage.byte_hours():
            gigabyte_hours = byte_hours / GIGABYTE
            yield _event(
                (hour, *group),
                owner,
                StorageBillingEvent(gigabyte_hours=gigabyte_hours),
                cost=None if rate is None else gigabyte_hours / HOURS_PER_MONTH * rate,
                rate=rate,
            )


class _StorageByHour:
    """Byte-hours of checkpoints per hour. Adding a checkpoint takes constant time."""

    def __init__(self) -> None:
        #: Byte-hours of the partial hours, in which a checkpoint was added or deleted.
        self._partial: defaultdict[int, float] = defaultdict(float)
        #: Change of the number and bytes of checkpoints from this full hour on.
        self._changes: defaultdict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))

    def add(self, since_s: float, until_s: float, size_bytes: int) -> None:
        if until_s <= since_s:
            return
        first, last = int(since_s // HOUR_S), int(until_s // HOUR_S)
        if first == last:
            self._partial[first] += size_bytes * (until_s - since_s) / HOUR_S
            return
        self._partial[first] += size_bytes * ((first + 1) * HOUR_S - since_s) / HOUR_S
        if until_s > last * HOUR_S:
            self._partial[last] += size_bytes * (until_s - last * HOUR_S) / HOUR_S
        for hour, sign in ((first + 1, 1), (last, -1)):
            count, size = self._changes[hour]
            self._changes[hour] = (count + sign, size + sign * size_bytes)

    def byte_hours(self) -> Iterator[tuple[int, float]]:
        """The hours with stored checkpoints, each with its byte-hours."""
        count = size = 0
        hours = self._partial.keys() | self._changes.keys()
        for hour in range(min(hours), max(hours) + 1) if hours else ():
            count_change, size_change = self._changes.get(hour, (0, 0))
            count, size = count + count_change, size + size_change
            if count or hour in self._partial:
                yield hour, size + self._partial.get(hour, 0.0)


def _event(
    group: _HourGroup,
    owner: str,
    info: BillingEventInfo,
    *,
    cost: float | None = None,
    rate: float | None = None,
) -> BillingUsageEvent:
    hour, session_id, project_id, base_model = group
    return BillingUsageEvent(
        bucket_start=_hour_start(hour),
        bucket_end=_hour_start(hour + 1),
        base_model=base_model,
        user_id=owner,
        session_id=session_id,
        project_id=project_id,
        estimated_cost_usd=cost,
        effective_rate_usd_per_gigabyte_month=rate,
        event_info=info,
    )


def _hour_start(hour: int) -> datetime:
    return datetime.fromtimestamp(hour * HOUR_S, UTC)


@audit_router.get("/audit")
@bounded(entries=MAX_ENTRIES)
async def audit(
    request: Request,
    event_type: Annotated[Topic, Query()] = "all",
    day: Annotated[date | None, Query(description="UTC; omitted: all kept entries")] = None,
) -> Response:
    """Oldest first."""
    since_s, until_s = 0.0, time.time() + 1
    if day is not None:
        begins = datetime(day.year, day.month, day.day, tzinfo=UTC)
        since_s = begins.timestamp()
        until_s = since_s + timedelta(days=1).total_seconds()
    found = await context_of(request).store.audit.entries(
        owner=owner_of(request),
        topic=None if event_type == "all" else event_type,
        since_s=since_s,
        until_s=until_s,
    )
    return await report(
        request,
        lambda: AuditLogResponse(entries=[_entry(entry) for entry in found]),
        advice="Request one `day`, or one `event_type`.",
    )


def _entry(entry: AuditEntry) -> AuditLogEntry:
    return AuditLogEntry(
        timestamp=datetime.fromtimestamp(entry.at_s, UTC),
        event=entry.event,
        event_details=dict(entry.details),
        model_id=entry.details.get("model_id"),
        tinker_path=entry.details.get("tinker_path"),
    )


@key_router.post("/token")
async def exchange(request: Request) -> Response:
    """Exchange the key of this request for a token that expires."""
    caller = caller_of(request)
    if caller.by_token:
        raise Refusal(
            400, "a token cannot be exchanged for another token. Send the API key itself (tml-…)."
        )
    now_s = time.time()
    claims = {
        "sub": f"tml:user:{caller.owner}",
        "org_id": caller.project_id or "tinkex",
        "email": "",
        "key_id": caller.key_id or 0,
        "iat": int(now_s),
        "exp": int(now_s + context_of(request).settings.jwt_s),
    }
    return json_response({"jwt": authenticator_of(request).tokens.make(claims)})


@key_router.get("/apikey/me")
async def key_info(request: Request) -> Response:
    caller = caller_of(request)
    return json_response(
        {
            "key_id": caller.key_id or 0,
            "name": caller.name,
            "note": ""
            if caller.key_id
            else "this server has no keys: all requests belong to `local`",
            "details": {
                "org_details": {"name": caller.project_id or "tinkex"},
                "user_details": {"email": caller.owner},
            },
        }
    )


@key_router.delete("/apikey/me")
async def revoke_key(request: Request) -> Response:
    """Revoke the key of this request; it is refused from the next request on."""
    caller = caller_of(request)
    if caller.by_token:
        # A token is valid for an hour; revoking the key is permanent.
        raise Refusal(
            403,
            "a token cannot revoke its key. Send the API key itself (tml-…), or ask the "
            "administrator of this server: `tinkex key revoke`.",
        )
    if caller.key_id is not None:
        await context_of(request).store.keys.revoke(caller.key_id)
        authenticator_of(request).forget()
    return json_response({})


@key_router.post("/apikey")
async def create_key(_request: Request) -> Response:
    raise Refusal(403, NO_LOGIN)


@unauthenticated_router.get("/auth-config")
async def login_config(_request: Request) -> Response:
    raise Refusal(404, NO_LOGIN)
