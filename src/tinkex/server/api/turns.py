"""So many at once of each owner; the next ones wait. An owner without any takes no memory."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tinkex.server.store.database import REPORTERS

#: Lists, searches and reports of one owner.
REPORTS_AT_ONCE = 1


@dataclass(slots=True)
class _Held:
    places: asyncio.Semaphore
    #: Those who have a place, and those who wait for one.
    users: int = 0


class Turns:
    """Belongs to one event loop."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._held: dict[str, _Held] = {}

    def __len__(self) -> int:
        """Owners who have or want a place."""
        return len(self._held)

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        held = self._held.setdefault(owner, _Held(asyncio.Semaphore(self._at_once)))
        held.users += 1
        try:
            async with held.places:
                yield
        finally:
            held.users -= 1
            if not held.users:
                del self._held[owner]


class Reports:
    """Turns for lists and reports; over all owners, as many at once as there are threads for them."""

    def __init__(self) -> None:
        self._of_owner = Turns(REPORTS_AT_ONCE)
        self._all = asyncio.Semaphore(REPORTERS)

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        async with self._of_owner.turn(owner), self._all:
            yield
