"""
Which samples of a sampling client have finished: its poll sleeps until the next one does.

The log is in the database, written with each result. Its newest part is here as well, from the
first poll of a client on, so that a poll that follows another reads nothing from disk.
"""

import asyncio
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from tinkex.server.sleepers import Leaving, Sleepers
from tinkex.server.store import Completion, StorageTrouble, Store

# What nobody reads any more is dropped, and read from the database should it be asked for.
MOST_LOGS = 4_000
MOST_EVENTS = 20_000
UNREAD_S = 120.0
# In one answer; the next poll, from its cursor on, gets the next ones at once.
MOST_TOLD = 1_000
# How long a poll is held that the database cannot answer.
TROUBLE_S = 1.0

_Client = tuple[str, int]


@dataclass(slots=True)
class _Tail:
    """Every event of one client after `floor`."""

    floor: int
    events: list[Completion] = field(default_factory=list)
    #: Who sleeps until the next event, and how many use this at all.
    sleepers: Sleepers = field(default_factory=Sleepers)
    waiting: int = 0
    read_s: float = 0.0

    def after(self, cursor: int) -> list[Completion]:
        return self.events[bisect_right(self.events, cursor, key=_position) :]

    def seen(self, cursor: int) -> None:
        """The client has these: should it ask again, the database has them too."""
        if known := bisect_right(self.events, cursor, key=_position):
            self.floor = self.events[known - 1].position
            del self.events[:known]


def _position(event: Completion) -> int:
    return event.position


class Completions:
    """The logs of this process. Nothing here polls."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._tails: OrderedDict[_Client, _Tail] = OrderedDict()
        #: Position of the newest event that was told here; earlier ones are in the database.
        self._newest = 0
        self._closing = False

    async def start(self) -> None:
        self._newest = await self._store.requests.last_position()

    def add(self, event: Completion) -> None:
        """
        The event is on disk: wake who waits for it.

        Commits are told in their order, so nothing older can come after this.
        """
        self._newest = max(self._newest, event.position)
        client = (event.sampling_session_id, event.clone_id)
        tail = self._tails.get(client)
        if tail is None:
            return
        tail.events.append(event)
        tail.sleepers.wake()
        if len(tail.events) > MOST_EVENTS and not tail.waiting:
            del self._tails[client]

    async def after(
        self,
        sampling_session_id: str,
        clone_id: int,
        *,
        cursor: int,
        within_s: float,
        leaving: Leaving | None = None,
    ) -> Sequence[Completion]:
        """
        The client's next events after a position, once there is one; none when time is up.

        `leaving` is given what ends the wait at once, for when nobody is there any more.
        """
        tail = self._tail((sampling_session_id, clone_id))
        tail.waiting += 1
        try:
            older = await self._older(tail, sampling_session_id, clone_id, cursor)
            tail.seen(cursor)
            if len(older) == MOST_TOLD:  # there may be more of these before those here
                return older
            if older or tail.events or within_s <= 0 or self._closing:
                return [*older, *tail.events[: MOST_TOLD - len(older)]]
            await tail.sleepers.sleep(within_s, leaving)
        except StorageTrouble:
            # Nothing may be told before what cannot be read now. The client asks again from the
            # same place, and not at once.
            await asyncio.sleep(min(within_s, TROUBLE_S))
            return []
        finally:
            tail.waiting -= 1
            tail.read_s = time.monotonic()
        return tail.after(cursor)[:MOST_TOLD]

    async def _older(
        self, tail: _Tail, sampling_session_id: str, clone_id: int, cursor: int
    ) -> list[Completion]:
        """What is only in the database of what the client has not seen; the first of it."""
        older: list[Completion] = []
        floor = cursor
        # Another poll of the same client may have moved events there in the meantime.
        while floor < tail.floor:
            floor = tail.floor
            older = await self._store.requests.completions(
                sampling_session_id, clone_id, after=cursor, up_to=floor, most=MOST_TOLD
            )
        return older

    def release(self) -> None:
        """The server is stopping: let every waiting poll go, it comes back to the next one."""
        self._closing = True
        for tail in self._tails.values():
            tail.sleepers.wake()

    def _tail(self, client: _Client) -> _Tail:
        tail = self._tails.get(client)
        if tail is None:
            self._drop_unread()
            tail = _Tail(floor=self._newest, read_s=time.monotonic())
            self._tails[client] = tail
        self._tails.move_to_end(client)
        return tail

    def _drop_unread(self) -> None:
        """Logs of clients that are gone, and those read longest ago when there are too many."""
        fresh_s = time.monotonic() - UNREAD_S
        too_many = len(self._tails) + 1 - MOST_LOGS
        gone: list[_Client] = []
        for client, tail in self._tails.items():
            if tail.read_s > fresh_s and len(gone) >= too_many:
                break
            if not tail.waiting:
                gone.append(client)
        for client in gone:
            del self._tails[client]
