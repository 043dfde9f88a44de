"""What was used, and what it would cost: tokens really counted, prices from settings."""

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from tinkex.server.api.auth import owner_of
from tinkex.server.api.context import answer, context_of
from tinkex.server.api.errors import Refusal
from tinkex.server.api.history import texts
from tinkex.server.prices import HOURS_A_MONTH, Prices
from tinkex.server.store.tally import CACHED, HOUR_S, SAMPLED, TRAINING
from tinkex.server.store.usage import Stored, Used
from tinkex.wire.billing import (
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

router = APIRouter(prefix="/api/v1", tags=["billing"])

LONGEST = timedelta(days=14)
GIGABYTE = 10**9
MILLION = 10**6

_Place = tuple[int, str, str | None, str]


@router.get("/billing/usage/events")
async def usage_events(
    request: Request,
    starting_on: Annotated[str, Query(description="RFC 3339, a whole UTC hour")],
    ending_before: Annotated[str, Query(description="RFC 3339, a whole UTC hour")],
) -> Response:
    """Hour by hour: tokens by session and base model, checkpoints, and their storage."""
    first = _hour("starting_on", starting_on)
    end = _hour("ending_before", ending_before)
    if not timedelta(0) < end - first <= LONGEST:
        raise _wrong(
            "ending_before",
            f"it is {end - first} after starting_on; one hour to {LONGEST.days} days are allowed.",
        )
    context = context_of(request)
    owner = owner_of(request)
    first_hour, end_hour = int(first.timestamp()) // HOUR_S, int(end.timestamp()) // HOUR_S
    usage = context.store.usage
    used = await usage.between(owner=owner, first_hour=first_hour, end_hour=end_hour)
    stored = await usage.stored(owner=owner, since_s=first_hour * HOUR_S, until_s=end_hour * HOUR_S)
    prices = Prices.parse(context.settings.prices)
    storage_rate = context.settings.price_gb_month or None
    now_s = time.time()
    events = [
        *(_token_event(one, prices, owner) for one in used),
        *_storage_events(stored, first_hour, end_hour, now_s, storage_rate, owner),
    ]
    events.sort(key=lambda event: event.bucket_start)
    sessions = sorted({event.session_id for event in events if event.session_id})
    said = await usage.metadata(sessions)
    return answer(
        BillingUsageResponse(
            data=events,
            sessions={
                one: BillingUsageSession(user_metadata=texts(said.get(one))) for one in sessions
            },
            cost_data_through=datetime.fromtimestamp(int(now_s), UTC),
        )
    )


@router.get("/billing/usage/checkpoints/current")
async def current_storage(request: Request, project_id: str | None = None) -> Response:
    """What the owner's checkpoints take now, by project: those that are in the lists."""
    context = context_of(request)
    owner = owner_of(request)
    stored = await context.store.usage.current(owner=owner, now_s=time.time())
    sizes: defaultdict[str | None, list[int]] = defaultdict(list)
    for one in stored:
        if project_id is None or one.project_id == project_id:
            sizes[one.project_id].append(one.size_bytes)
    rate = context.settings.price_gb_month or None
    items = [
        CurrentCheckpointStorageUsageItem(
            project_id=project,
            user_name=owner,
            checkpoint_count=len(found),
            size_bytes=sum(found),
            size_gigabytes=sum(found) / GIGABYTE,
            estimated_monthly_cost_usd=None if rate is None else sum(found) / GIGABYTE * rate,
        )
        for project, found in sorted(sizes.items(), key=lambda item: item[0] or "")
    ]
    return answer(
        CurrentCheckpointStorageUsageResponse(
            effective_rate_usd_per_gigabyte_month=rate, data=items
        )
    )


def _hour(name: str, text: str) -> datetime:
    """A whole UTC hour; a `+` that a client left as it is arrives as a space."""
    try:
        moment = datetime.fromisoformat(text.strip().replace(" ", "+"))
    except ValueError:
        raise _wrong(
            name, f"{text[:60]!r} is not an RFC 3339 time such as 2026-11-15T10:00:00Z."
        ) from None
    if moment.tzinfo is None:
        raise _wrong(name, f"{text[:60]!r} names no time zone; end it with Z or +00:00.")
    try:
        moment = moment.astimezone(UTC)
    except OverflowError:
        raise _wrong(name, f"{text[:60]!r} is out of reach.") from None
    if moment.minute or moment.second or moment.microsecond:
        raise _wrong(name, f"{text[:60]!r} is not a whole UTC hour, and usage is kept by the hour.")
    return moment


def _wrong(name: str, message: str) -> Refusal:
    return Refusal(422, [{"loc": ["query", name], "msg": message, "type": "value_error"}])


def _token_event(used: Used, prices: Prices, owner: str) -> BillingUsageEvent:
    rate = prices.rate(used.base_model, used.what)
    return BillingUsageEvent(
        bucket_start=_moment(used.hour),
        bucket_end=_moment(used.hour + 1),
        base_model=used.base_model,
        user_id=owner,
        session_id=used.session_id or None,
        project_id=used.project_id,
        estimated_cost_usd=None if rate is None else used.amount / MILLION * rate,
        effective_rate_usd_per_million_tokens=rate,
        event_info=_info(used),
    )


def _info(used: Used) -> BillingEventInfo:
    if used.what == TRAINING:
        return TrainingBillingEvent(token_count=used.amount)
    if used.what == SAMPLED:
        return SamplingSampleBillingEvent(token_count=used.amount)
    return SamplingPrefillBillingEvent(cached=used.what == CACHED, token_count=used.amount)


def _storage_events(
    stored: Iterable[Stored],
    first_hour: int,
    end_hour: int,
    now_s: float,
    rate: float | None,
    owner: str,
) -> Iterator[BillingUsageEvent]:
    """Saves by the hour they were made in, and gigabyte-hours by the hours they lasted."""
    saves: defaultdict[_Place, int] = defaultdict(int)
    byte_hours: defaultdict[_Place, float] = defaultdict(float)
    for one in stored:
        until_s = min(now_s, one.until_s or now_s, end_hour * HOUR_S)
        made_in = int(one.since_s) // HOUR_S
        if made_in >= first_hour:
            saves[made_in, one.session_id, one.project_id, one.base_model] += 1
        for hour in range(max(first_hour, made_in), -int(-until_s // HOUR_S)):
            lasted_s = min(until_s, (hour + 1) * HOUR_S) - max(one.since_s, hour * HOUR_S)
            if lasted_s > 0:
                place = (hour, one.session_id, one.project_id, one.base_model)
                byte_hours[place] += one.size_bytes * lasted_s / HOUR_S
    for place, count in saves.items():
        yield _event(place, owner, CheckpointBillingEvent(count=count))
    for place, amount in byte_hours.items():
        gigabyte_hours = amount / GIGABYTE
        yield _event(
            place,
            owner,
            StorageBillingEvent(gigabyte_hours=gigabyte_hours),
            cost=None if rate is None else gigabyte_hours / HOURS_A_MONTH * rate,
            rate=rate,
        )


def _event(
    place: _Place,
    owner: str,
    info: BillingEventInfo,
    *,
    cost: float | None = None,
    rate: float | None = None,
) -> BillingUsageEvent:
    hour, session_id, project_id, base_model = place
    return BillingUsageEvent(
        bucket_start=_moment(hour),
        bucket_end=_moment(hour + 1),
        base_model=base_model,
        user_id=owner,
        session_id=session_id,
        project_id=project_id,
        estimated_cost_usd=cost,
        effective_rate_usd_per_gigabyte_month=rate,
        event_info=info,
    )


def _moment(hour: int) -> datetime:
    return datetime.fromtimestamp(hour * HOUR_S, UTC)
