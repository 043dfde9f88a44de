"""
Finds accepted requests that this process does not have, and takes them up.

At a start that is everything that an earlier process left. Later it is what was committed and then
not handed on, because a read failed or the connection ended in between.
"""

import asyncio
import logging
from collections.abc import Callable

from tinkex.server.dispatch.desk import Desk
from tinkex.server.store import RequestRow, StorageTrouble

log = logging.getLogger("tinkex.server.dispatch")

#: How often the number of waiting rows is compared with what is here.
LOOK_S = 5.0
#: Rows that are read at once, so that nothing else waits long for one reader or the event loop.
PIECE = 200


class Pickup:
    """A loop that runs until the server stops."""

    def __init__(self, desk: Desk, take: Callable[[RequestRow], None]) -> None:
        self._desk = desk
        self._take = take

    async def run(self) -> None:
        while not self._desk.closing:
            try:
                # One number from an index, while nothing is missing.
                if await self._desk.store.requests.count_waiting() > len(self._desk.taken):
                    await self.look()
            except StorageTrouble as error:
                log.info("waiting requests cannot be looked for now: %s", error)
            except Exception:
                log.exception("waiting requests could not be looked for; it is tried again")
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Take up what waits, a piece of each owner in turn, those who have least first."""
        requests = self._desk.store.requests
        places = dict.fromkeys(await requests.waiting_owners())
        while places and not self._desk.closing:
            for owner, after in list(places.items()):
                rows, last = await requests.waiting_of(owner, after=after, most=PIECE)
                for row in rows:
                    self._take(row)
                if last is None:
                    del places[owner]
                else:
                    places[owner] = last
