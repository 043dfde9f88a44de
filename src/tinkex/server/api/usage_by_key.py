"""The route that reports usage by API key."""

import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from tinkex.server.api.auth import caller_of
from tinkex.server.api.deps import context_of
from tinkex.server.api.response_limits import bounded, report
from tinkex.server.prices import Prices
from tinkex.server.store.keys import key_state
from tinkex.server.store.request_rows import CACHED, HOUR_S, PREFILL, SAMPLED, TRAINING
from tinkex.server.store.usage import KeyLabel, KeyUsage
from tinkex.wire.billing import UsageByKeyItem, UsageByKeyResponse
from tinkex.wire.errors import UserFailure

router = APIRouter(prefix="/api/v1", tags=["billing"])

MILLION = 10**6
#: Counts in one response: one for each owner, key, base model and kind of tokens.
MAX_COUNTS = 20_000
MAX_DAYS = 90


@router.get("/billing/usage/keys")
@bounded(entries=MAX_COUNTS)
async def usage_by_key(
    request: Request, days: Annotated[int, Query(ge=1, le=MAX_DAYS)] = 30
) -> Response:
    """Tokens of the last days by key and base model; for administrators, of all owners."""
    caller, context = caller_of(request), context_of(request)
    used: list[KeyUsage] = []
    keys: dict[int, KeyLabel] = {}
    if caller.key_id is not None:
        used, keys = await context.store.usage.by_key(
            owner=None if caller.is_admin else caller.owner,
            first_hour=(int(time.time()) // (24 * HOUR_S) - days + 1) * 24,
            limit=MAX_COUNTS + 1,
        )
    if len(used) > MAX_COUNTS:
        raise UserFailure(
            f"there are more than {MAX_COUNTS} counts in this time, the maximum of one response. "
            "Request fewer `days`."
        )
    prices = Prices.parse(context.settings.prices)
    return await report(
        request,
        lambda: UsageByKeyResponse(data=list(_by_key(used, keys, prices, time.time()))),
        advice="Request fewer `days`.",
    )


def _by_key(
    used: Iterable[KeyUsage], keys: Mapping[int, KeyLabel], prices: Prices, now_s: float
) -> Iterator[UsageByKeyItem]:
    """One item for each owner, key and base model; the rows come in this order."""
    for (owner, key_id, base_model), rows in groupby(
        used, lambda one: (one.owner, one.key_id, one.base_model)
    ):
        key = keys.get(key_id)
        amounts = {row.what: row.amount for row in rows}
        rates = {what: prices.rate(base_model, what) for what in amounts}
        costs = [amount / MILLION * (rates[what] or 0.0) for what, amount in amounts.items()]
        yield UsageByKeyItem(
            owner=owner,
            key_id=key_id or None,
            hint=key and key.hint,
            name=key and key.name,
            state=key and key_state(key, now_s),
            base_model=base_model,
            training=amounts.get(TRAINING, 0),
            sampled=amounts.get(SAMPLED, 0),
            prefill=amounts.get(PREFILL, 0),
            cached=amounts.get(CACHED, 0),
            estimated_cost_usd=None if None in rates.values() else sum(costs),
        )
