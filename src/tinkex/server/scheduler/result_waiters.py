"""
Results of requests, and the polls that wait for them.

- `Futures` holds the unfinished requests of this process and a cache of finished ones. A poll waits
  here and is woken by the commit of the result; nothing polls the database.
- `CompletionLog` does the same for clients that wait for many samples with one poll.
"""

import asyncio
import logging
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tinkex.server.queued_request import Kind, Outcome, QueuedRequest
from tinkex.server.request_metrics import Timings
from tinkex.server.scheduler.fairness import Load
from tinkex.server.store import Completion, Damaged, StorageError, Store
from tinkex.server.store.request_rows import issued_s
from tinkex.server.store.requests import ResultGone

log = logging.getLogger("tinkex.server.scheduler.result_waiters")

# Finished results are cached up to this size, because the client usually polls for them soon. Other
# results are read from the store.
CACHE_BYTES = 64 * 2**20
# The earliest time that a valid request id can contain: no server existed before 2025.
EARLIEST_REQUEST_S = 1735689600.0
# Limits of the events that `CompletionLog` caches. The database has all events, so those that are
# dropped from the cache are read from there.
MAX_CLIENTS = 4_000
MAX_EVENTS_PER_CLIENT = 20_000
UNREAD_TTL_S = 120.0
# If a client has more events than this, its next poll returns the following ones immediately.
MAX_EVENTS_PER_POLL = 1_000
# How long a poll is held when the database cannot be read.
STORAGE_RETRY_S = 1.0

NO_LOAD = Load()

#: Gets a function that ends a wait early: at a disconnect, or at the next token of a stream.
WakeEarly = Callable[[Callable[[], None]], None]


class UnknownRequest(LookupError):
    """No request has this id."""


class Waiters:
    """Coroutines that wait until an event, a timeout, or a disconnect. For one event loop."""

    __slots__ = ("_waiters",)

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def __len__(self) -> int:
        return len(self._waiters)

    def wake(self) -> None:
        for waiter in self._waiters:
            _wake_one(waiter)

    async def wait(self, timeout_s: float, wake_early: WakeEarly | None) -> None:
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        self._waiters.add(waiter)
        # One timer each and no task: thousands wait at the same time.
        timer = loop.call_later(timeout_s, _wake_one, waiter)
        if wake_early is not None:
            wake_early(lambda: _wake_one(waiter))
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiters.discard(waiter)


def _wake_one(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)


@dataclass(slots=True)
class _Unfinished:
    request: QueuedRequest
    #: When this process accepted it, or read it from the store after a restart.
    since_s: float
    #: Whether it counts as load of its owner, and in the metrics of this process.
    counted: bool = True
    #: Whether an engine got it.
    started: bool = False
    #: How many polls have begun to wait for it.
    polls: int = 0
    waiters: Waiters = field(default_factory=Waiters)


class Futures:
    """The unfinished requests of this process, and recent results."""

    def __init__(self, store: Store, *, retention_s: float = 3600.0) -> None:
        self._store = store
        #: Results are stored for at least this long.
        self._retention_s = retention_s
        self._unfinished: dict[str, _Unfinished] = {}
        self._loads: dict[str, Load] = {}
        self._cache: OrderedDict[str, QueuedRequest] = OrderedDict()
        self._cache_bytes = 0
        #: The server is stopping: polls return immediately.
        self.closing = False
        self.timings = Timings()
        #: Set while there are unfinished requests.
        self.busy = asyncio.Event()
        self.completion_log = CompletionLog(store)

    def track(self, request: QueuedRequest, *, counted: bool = True) -> None:
        """
        This process will finish the request, or hear that it is finished.

        One that another process accepted is not `counted`: that one counts it.
        """
        if request.request_id in self._unfinished:
            return
        self._unfinished[request.request_id] = _Unfinished(request, time.monotonic(), counted)
        if counted:
            self._loads[request.owner] = self._loads.get(request.owner, NO_LOAD) + load_of(request)
        self.busy.set()

    def _track_unknown(self, request: QueuedRequest) -> None:
        """A poll waits for a request that this process did not know."""
        self.track(request)

    def untrack_model(self, model_id: str) -> None:
        """Another process finishes the requests of this model."""
        for unfinished in list(self._unfinished.values()):
            if unfinished.request.model_id == model_id:
                self._pop(unfinished.request)

    def untrack(self, request: QueuedRequest) -> None:
        """Another process finishes the request."""
        self._pop(request)

    def _pop(self, request: QueuedRequest) -> _Unfinished | None:
        """Remove a request that is finished, or that another process finishes."""
        unfinished = self._unfinished.pop(request.request_id, None)
        if unfinished is not None and unfinished.counted:
            self._loads[request.owner] -= load_of(unfinished.request)
            if not self._loads[request.owner].requests:
                del self._loads[request.owner]
        if not self._unfinished:
            self.busy.clear()
        return unfinished

    def started(self, request: QueuedRequest) -> None:
        """An engine gets the request now; a later attempt does not count."""
        unfinished = self._unfinished.get(request.request_id)
        if unfinished is not None and not unfinished.started:
            unfinished.started = True
            waited_s = time.monotonic() - unfinished.since_s
            self.timings.queue_s[request.kind.value].observe(waited_s)

    def finish(self, request: QueuedRequest, event: Completion | None = None) -> None:
        """Its outcome is stored, with this event: wake the polls that wait for them."""
        if (unfinished := self._pop(request)) is not None:
            if unfinished.counted:
                waited_s = time.monotonic() - unfinished.since_s
                self.timings.finish(request.kind.value, request.outcome, waited_s)
            unfinished.request = request
            unfinished.waiters.wake()
        self._cache_result(request)
        # After the result: a client that reads the event fetches the result immediately.
        if event is not None:
            self.completion_log.add(event)

    async def wait(
        self,
        request_id: str,
        *,
        owner: str,
        within_s: float,
        wake_early: WakeEarly | None = None,
    ) -> QueuedRequest:
        """The request; without an outcome if it is not finished within the time."""
        if (cached := self._cache.get(request_id)) is not None:
            if cached.owner != owner:
                raise UnknownRequest(request_id)
            return cached
        unfinished = self._unfinished.get(request_id)
        if unfinished is None:
            found = await self._read(request_id, owner)
            if found.outcome is not None:
                return found
            # The scheduler has not picked it up yet, and will.
            unfinished = self._unfinished[request_id]
        if unfinished.request.owner != owner:
            raise UnknownRequest(request_id)
        unfinished.polls += 1
        if within_s > 0 and not self.closing:
            await unfinished.waiters.wait(within_s, wake_early)
        return unfinished.request

    @property
    def loads(self) -> Mapping[str, Load]:
        """The accepted and unfinished work of each owner."""
        return self._loads

    def load(self, owner: str) -> Load:
        return self._loads.get(owner, NO_LOAD)

    @property
    def accepted(self) -> int:
        """The number of accepted and unfinished requests of all owners."""
        return len(self._unfinished)

    async def refresh_loads(self) -> None:
        """Make `load` exact; other processes may have finished requests."""

    def is_cached(self, request_id: str) -> bool:
        """Whether it is finished and its result is in memory."""
        return request_id in self._cache

    def poll_count(self, request_id: str) -> int:
        """How many polls have begun to wait for an unfinished request."""
        unfinished = self._unfinished.get(request_id)
        return 0 if unfinished is None else unfinished.polls

    def is_polled(self, request_id: str) -> bool:
        """Whether a poll waits for an unfinished request now."""
        unfinished = self._unfinished.get(request_id)
        return unfinished is not None and bool(unfinished.waiters)

    def unfinished_request(self, request_id: str) -> QueuedRequest | None:
        unfinished = self._unfinished.get(request_id)
        return None if unfinished is None else unfinished.request

    def base_models(self) -> set[str]:
        """The base models of all unfinished requests."""
        return {one.request.base_model for one in self._unfinished.values()}

    @property
    def waiting(self) -> int:
        """The number of unfinished requests that no engine got yet."""
        return sum(not one.started for one in self._unfinished.values())

    def __len__(self) -> int:
        """The number of unfinished requests."""
        return len(self._unfinished)

    def release(self) -> None:
        """The server is stopping: end all polls; clients poll again at the next start."""
        self.closing = True
        for unfinished in self._unfinished.values():
            unfinished.waiters.wake()
        self.completion_log.release()

    def forget(self, request_ids: Iterable[str]) -> None:
        """Their results were deleted from the store."""
        for request_id in request_ids:
            if (dropped := self._cache.pop(request_id, None)) is not None:
                self._cache_bytes -= _weight(dropped)

    async def _row(self, request_id: str) -> tuple[QueuedRequest | None, bytes | None]:
        """A request as it is stored, and its result if that was read with it."""
        return await self._store.requests.get(request_id), None

    async def _read(self, request_id: str, owner: str) -> QueuedRequest:
        request, result = await self._row(request_id)
        if request is None and _may_be_deleted(request_id, self._retention_s):
            raise ResultGone(request_id)
        if request is None or request.owner != owner:
            raise UnknownRequest(request_id)
        if request.outcome is None:
            # It may have finished since it was read.
            if (cached := self._cache.get(request_id)) is not None:
                return cached
            self._track_unknown(request)
            return request
        if request.outcome.error is None:
            try:
                if result is None:
                    result = await self._store.requests.result(request_id)
                request.outcome = replace(request.outcome, result=result)
            except Damaged as damaged:
                log.error("%s", damaged)
                text = f"{damaged}. The work was done."
                request.outcome = Outcome(error=text, category="server")
        self._cache_result(request)
        return request

    def _cache_result(self, request: QueuedRequest) -> None:
        if request.request_id in self._cache:
            return
        self._cache[request.request_id] = request
        self._cache_bytes += _weight(request)
        while self._cache_bytes > CACHE_BYTES:
            _, dropped = self._cache.popitem(last=False)
            self._cache_bytes -= _weight(dropped)
            self._dropped(dropped.request_id)

    def _dropped(self, request_id: str) -> None:
        """This result is not cached any more."""


def load_of(request: QueuedRequest) -> Load:
    """The load that a request adds to its owner."""
    samples = request.sequences if request.kind is Kind.SAMPLE else 0
    return Load(requests=1, tokens=request.tokens, samples=samples)


def _may_be_deleted(request_id: str, retention_s: float) -> bool:
    """Whether this may be a request whose row was deleted after its retention time."""
    at_s = issued_s(request_id)
    return at_s is not None and EARLIEST_REQUEST_S < at_s < time.time() - retention_s


def _weight(request: QueuedRequest) -> int:
    # The fixed part bounds the number of very small results.
    return (len(request.outcome.result) if request.outcome else 0) + 1024


_Client = tuple[str, int]


@dataclass(slots=True)
class _RecentEvents:
    """The newest events of one client: all after the position `floor`."""

    #: None until the log was read once.
    floor: int | None = None
    events: list[Completion] = field(default_factory=list)
    waiters: Waiters = field(default_factory=Waiters)
    #: Number of polls that use these events now.
    polls: int = 0
    read_s: float = 0.0

    def after(self, cursor: int) -> list[Completion]:
        return self.events[bisect_right(self.events, cursor, key=_position) :]

    def acknowledge(self, cursor: int) -> None:
        """Drop the events that the client has received; the database keeps them."""
        if known := bisect_right(self.events, cursor, key=_position):
            self.floor = self.events[known - 1].position
            del self.events[:known]


def _position(event: Completion) -> int:
    return event.position


class CompletionLog:
    """
    Which samples of a sampling client have finished, in order.

    The log is in the database, written with each result. After the first poll of a client, its
    newest events are also cached here, so later polls do not read the database.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._recent: OrderedDict[_Client, _RecentEvents] = OrderedDict()
        self._closing = False

    def add(self, event: Completion) -> None:
        """The event is stored: wake its polls. Called in the order of the commits."""
        client = (event.sampling_session_id, event.clone_id)
        recent = self._recent.get(client)
        if recent is None or (recent.floor is not None and event.position <= recent.floor):
            return  # a poll reads it from the database
        recent.events.append(event)
        recent.waiters.wake()
        if len(recent.events) > MAX_EVENTS_PER_CLIENT and not recent.polls:
            del self._recent[client]

    async def after(
        self,
        sampling_session_id: str,
        clone_id: int,
        *,
        cursor: int,
        within_s: float,
        wake_early: WakeEarly | None = None,
    ) -> Sequence[Completion]:
        """The client's next events after the cursor; waits for one, and is empty at the timeout."""
        recent = self._recent_events((sampling_session_id, clone_id))
        recent.polls += 1
        try:
            older = await self._older(recent, sampling_session_id, clone_id, cursor)
            recent.acknowledge(cursor)
            if len(older) == MAX_EVENTS_PER_POLL:  # the database may have more of them
                return older
            # Another poll may have read and cached a part of what this one read.
            newer = recent.after(older[-1].position if older else cursor)
            if older or newer or within_s <= 0 or self._closing:
                return [*older, *newer[: MAX_EVENTS_PER_POLL - len(older)]]
            await recent.waiters.wait(within_s, wake_early)
        except StorageError:
            # Later events must not be sent before the ones that cannot be read now. The client
            # polls again from the same cursor; the sleep prevents a tight loop.
            await asyncio.sleep(min(within_s, STORAGE_RETRY_S))
            return []
        finally:
            recent.polls -= 1
            recent.read_s = time.monotonic()
        return recent.after(cursor)[:MAX_EVENTS_PER_POLL]

    async def _older(
        self, recent: _RecentEvents, sampling_session_id: str, clone_id: int, cursor: int
    ) -> list[Completion]:
        """The first events after the cursor that are only in the database."""
        older: list[Completion] = []
        read_to = cursor
        # Another poll of the same client may have moved the floor in the meantime.
        while recent.floor is None or read_to < recent.floor:
            floor = recent.floor
            older, newest = await self._store.requests.completions(
                sampling_session_id, clone_id, after=cursor, up_to=floor, limit=MAX_EVENTS_PER_POLL
            )
            if recent.floor is None:
                # Events that were added meanwhile may also be in what was read.
                recent.acknowledge(newest)
                recent.floor = newest
            read_to = newest if floor is None else floor
        return older

    def release(self) -> None:
        """The server is stopping: end all polls; clients poll again at the next start."""
        self._closing = True
        for recent in self._recent.values():
            recent.waiters.wake()

    def _recent_events(self, client: _Client) -> _RecentEvents:
        recent = self._recent.get(client)
        if recent is None:
            self._drop_unread()
            recent = _RecentEvents(read_s=time.monotonic())
            self._recent[client] = recent
        self._recent.move_to_end(client)
        return recent

    def _drop_unread(self) -> None:
        """Drop the events of clients that did not poll recently, or of the least recent if full."""
        fresh_s = time.monotonic() - UNREAD_TTL_S
        too_many = len(self._recent) + 1 - MAX_CLIENTS
        unread: list[_Client] = []
        for client, recent in self._recent.items():
            if recent.read_s > fresh_s and len(unread) >= too_many:
                break
            if not recent.polls:
                unread.append(client)
        for client in unread:
            del self._recent[client]
