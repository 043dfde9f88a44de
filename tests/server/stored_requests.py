"""Queries of a store that several tests share."""

from tinkex.server.queued_request import QueuedRequest
from tinkex.server.store import Store


async def unfinished(store: Store) -> list[QueuedRequest]:
    """Requests that were accepted and not finished, grouped by owner, the oldest first."""
    rows: list[QueuedRequest] = []
    for owner in await store.requests.waiting_owners():
        rows += (await store.requests.waiting_of(owner, after=None, limit=10_000))[0]
    return rows


async def is_new(store: Store, request: QueuedRequest) -> bool:
    """Accept a request; False if it repeats an earlier one."""
    return await store.requests.accept(request) is request
