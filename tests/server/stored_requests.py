"""Queries of a store that several tests share."""

from tinkex.server.store import RequestRow, Store


async def unfinished(store: Store) -> list[RequestRow]:
    """Requests that were accepted and not finished, grouped by owner, the oldest first."""
    rows: list[RequestRow] = []
    for owner in await store.requests.waiting_owners():
        rows += (await store.requests.waiting_of(owner, after=None, limit=10_000))[0]
    return rows
