"""Those who sleep until something happens, their time is up, or they are gone themselves."""

import asyncio
import logging
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tinkex.server.scheduler.fairness import Load
from tinkex.server.scheduler.step_queue import Kind
from tinkex.server.store import (
    Completion,
    Damaged,
    NewRequest,
    RequestRow,
    Status,
    StorageError,
    Store,
)
from tinkex.server.store.request_writes import issued_s
from tinkex.server.store.requests import ResultGone

#: Is given what wakes a sleeper, for when nobody is there any more who would hear of it.
Leaving = Callable[[Callable[[], None]], None]


class Sleepers:
    """Belongs to one event loop."""

    __slots__ = ("_waiters",)

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def __len__(self) -> int:
        return len(self._waiters)

    def wake(self) -> None:
        for waiter in self._waiters:
            _let_go(waiter)

    async def sleep(self, within_s: float, leaving: Leaving | None) -> None:
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        self._waiters.add(waiter)
        # One timer and no task for each: thousands sleep at once.
        timer = loop.call_later(within_s, _let_go, waiter)
        if leaving is not None:
            leaving(lambda: _let_go(waiter))
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiters.discard(waiter)


def _let_go(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)


# MERGED: Results that were promised: who waits for one sleeps, and is woken by the commit.


log = logging.getLogger("tinkex.server.scheduler.results")

# Finished results are kept in memory for the poll that is about to come; the rest are read back.
KEPT_BYTES = 64 * 2**20
# No server gave out a request before 2025.
FIRST_S = 1735689600.0

NOTHING = Load()


class UnknownRequest(LookupError):
    """No request has this id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settled:
    """A finished request: its result, or why there is none."""

    request_id: str
    owner: str
    kind: Kind
    session_id: str | None
    result: bytes = b""
    error: str | None = None
    category: str | None = None


@dataclass(slots=True)
class _Promise:
    owner: str
    base_model: str
    load: Load
    settled: Settled | None = None
    #: How often somebody has begun to wait for it, and who waits now.
    asked: int = 0
    sleepers: Sleepers = field(default_factory=Sleepers)


class Futures:
    """The promises of this process. Nothing here polls."""

    def __init__(self, store: Store, *, kept_s: float = 3600.0) -> None:
        self._store = store
        #: Results are kept at least this long.
        self._kept_s = kept_s
        self._open: dict[str, _Promise] = {}
        self._loads: dict[str, Load] = {}
        self._kept: OrderedDict[str, Settled] = OrderedDict()
        self._kept_bytes = 0
        #: The server is stopping: nothing is waited for any more.
        self.closing = False
        #: The same events once more, for clients that wait for many at once.
        self.completions = Completions(store)

    async def start(self) -> None:
        await self.completions.start()

    def expect(self, row: RequestRow) -> None:
        """This process will settle that request."""
        if row.request_id in self._open:
            return
        load = load_of(row)
        self._open[row.request_id] = _Promise(owner=row.owner, base_model=row.base_model, load=load)
        self._loads[row.owner] = self.load(row.owner) + load

    @property
    def loads(self) -> Mapping[str, Load]:
        """What each owner has accepted and not finished."""
        return self._loads

    def load(self, owner: str) -> Load:
        """What of an owner is accepted and not finished."""
        return self._loads.get(owner, NOTHING)

    def settle(self, settled: Settled) -> None:
        """The result is on disk: wake everybody who waits for it."""
        promise = self._open.pop(settled.request_id, None)
        if promise is not None:
            promise.settled = settled
            promise.sleepers.wake()
            self._loads[promise.owner] -= promise.load
            if not self._loads[promise.owner].requests:
                del self._loads[promise.owner]
        self._keep(settled)

    async def wait(
        self,
        request_id: str,
        *,
        owner: str,
        within_s: float,
        leaving: Leaving | None = None,
    ) -> Settled | None:
        """
        The finished request, or None when it is not finished by then.

        `leaving` is given what ends the wait at once, for when nobody is there any more.
        """
        if (kept := self._kept.get(request_id)) is not None:
            return self._owned(kept, owner)
        promise = self._open.get(request_id)
        if promise is None:
            settled = await self._read(request_id, owner)
            if settled is not None:
                return settled
            # It waits, and nobody here has taken it up yet; that follows.
            promise = self._open[request_id]
        if promise.owner != owner:
            raise UnknownRequest(request_id)
        promise.asked += 1
        if within_s <= 0 or self.closing:
            return promise.settled
        await promise.sleepers.sleep(within_s, leaving)
        return promise.settled

    def is_kept(self, request_id: str) -> bool:
        """Whether it was finished, and its result is still here."""
        return request_id in self._kept

    def asked(self, request_id: str) -> int:
        """How often somebody has begun to wait for an open request."""
        promise = self._open.get(request_id)
        return 0 if promise is None else promise.asked

    def awaited(self, request_id: str) -> bool:
        """Whether somebody waits for an open request now."""
        promise = self._open.get(request_id)
        return promise is not None and bool(promise.sleepers)

    def base_model(self, request_id: str) -> str | None:
        """What an open request computes on."""
        promise = self._open.get(request_id)
        return None if promise is None else promise.base_model

    def __len__(self) -> int:
        """Requests that are not finished."""
        return len(self._open)

    def release(self) -> None:
        """The server is stopping: let every waiting poll go, it comes back to the next one."""
        self.closing = True
        for promise in self._open.values():
            promise.sleepers.wake()
        self.completions.release()

    async def _read(self, request_id: str, owner: str) -> Settled | None:
        row = await self._store.requests.get(request_id)
        if row is None and _is_old(request_id, self._kept_s):
            raise ResultGone(request_id)
        if row is None or row.owner != owner:
            raise UnknownRequest(request_id)
        if row.status is Status.WAITING:
            # It may have been finished since it was read.
            if (kept := self._kept.get(request_id)) is None:
                self.expect(row)
            return kept
        result = b""
        if row.status is Status.DONE:
            try:
                result = await self._store.requests.result(request_id)
            except Damaged as damaged:
                log.error("%s", damaged)
                row = replace(row, error=f"{damaged}. The work was done.", category="server")
        settled = settled_from(row, result)
        self._keep(settled)
        return settled

    def forget(self, request_ids: Iterable[str]) -> None:
        """Their results have been deleted."""
        for request_id in request_ids:
            if (dropped := self._kept.pop(request_id, None)) is not None:
                self._kept_bytes -= _weight(dropped)

    def _owned(self, settled: Settled, owner: str) -> Settled:
        if settled.owner != owner:
            raise UnknownRequest(settled.request_id)
        return settled

    def _keep(self, settled: Settled) -> None:
        if settled.request_id in self._kept:
            return
        self._kept[settled.request_id] = settled
        self._kept_bytes += _weight(settled)
        while self._kept_bytes > KEPT_BYTES:
            _, dropped = self._kept.popitem(last=False)
            self._kept_bytes -= _weight(dropped)


def load_of(request: NewRequest | RequestRow) -> Load:
    """What a request adds to its owner's account."""
    samples = request.sequences if request.kind == Kind.SAMPLE else 0
    return Load(requests=1, tokens=request.tokens, samples=samples)


def _is_old(request_id: str, kept_s: float) -> bool:
    """Whether this may be a request whose row has been deleted."""
    at_s = issued_s(request_id)
    return at_s is not None and FIRST_S < at_s < time.time() - kept_s


def settled_from(row: RequestRow, result: bytes) -> Settled:
    return Settled(
        request_id=row.request_id,
        owner=row.owner,
        kind=Kind(row.kind),
        session_id=row.session_id,
        result=result,
        error=row.error,
        category=row.category,
    )


def _weight(settled: Settled) -> int:
    # The object itself counts too: a flood of tiny results is bounded by it.
    return len(settled.result) + 1024


# MERGED: Which samples of a sampling client have finished: its poll sleeps until the next one does. The log is in the database, written with each result. Its newest part is here as well, from the first poll of a client on, so that a poll that follows another reads nothing from disk.


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
        except StorageError:
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
                sampling_session_id, clone_id, after=cursor, up_to=floor, limit=MOST_TOLD
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
