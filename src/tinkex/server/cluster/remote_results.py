"""
Results of requests that workers run, and the polls of one web process that wait for them.

A worker notifies all web processes of what it has committed, with small results. So a request may be
accepted at one web process and polled at another, and neither reads its row. What a lost notification
did not tell, and large results, are read from the database: the former within two seconds (`look`).
"""

import asyncio
import itertools
import logging
import math
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from tinkex.server.queued_request import Outcome, QueuedRequest
from tinkex.server.scheduler.fairness import Load
from tinkex.server.scheduler.result_waiters import (
    MAX_EVENTS_PER_POLL,
    NO_LOAD,
    STORAGE_RETRY_S,
    CompletionLog,
    Futures,
    Waiters,
    WakeEarly,
)
from tinkex.server.store import Completion, StorageError, Store
from tinkex.server.store.request_rows import issued_s

log = logging.getLogger("tinkex.server.cluster")

#: Requests that one statement reads.
BATCH = 500
#: Unfinished requests that one statement of a look compares with their rows. Of so many, each look also
#: reads where they wait; the next look takes the next ones.
LOOKED_AT = 2_000
#: Finished requests with large results that are remembered.
MAX_UNREAD = 20_000

#: A request as it is stored, and its result if that is small.
Row = tuple[QueuedRequest | None, bytes | None]


class RemoteFutures(Futures):
    """The requests that this web process accepted, or that its polls wait for."""

    def __init__(self, store: Store, *, retention_s: float) -> None:
        super().__init__(store, retention_s=retention_s)
        self.completion_log: RemoteCompletionLog = RemoteCompletionLog(store)
        #: Called when a request is finished, or unknown by now.
        self.on_finished: Callable[[str], None] = lambda _: None
        #: Since when this process hears notifications, by the system clock.
        self.listening_since_s: Callable[[], float] = lambda: math.inf
        #: Polls of requests that this process expects to hear of.
        self._expecting: defaultdict[str, Waiters] = defaultdict(Waiters)
        #: The requests of those that waited at the last look.
        self._expected: set[str] = set()
        #: Finished requests whose results were not in the notification.
        self._unread: OrderedDict[str, None] = OrderedDict()
        #: When the newest request was accepted whose end this process has forgotten.
        self._forgotten_s = -math.inf
        #: Requests whose rows are read next, with those who wait for them.
        self._to_read: dict[str, asyncio.Future[Row] | None] = {}
        self._reading: asyncio.Task[None] | None = None
        self._position = 0
        #: What other processes accepted, by owner, at the last look.
        self._others: Mapping[str, Load] = {}
        self._load_reads = 0
        self._load_lock = asyncio.Lock()

    # -- results -----------------------------------------------------------------------------------

    async def wait(
        self,
        request_id: str,
        *,
        owner: str,
        within_s: float,
        wake_early: WakeEarly | None = None,
    ) -> QueuedRequest:
        if within_s > 0 and self._expects(request_id):
            # Its row would only say that it waits. The owner is checked as soon as it is known.
            began_s = time.monotonic()
            waiters = self._expecting[request_id]
            try:
                await waiters.wait(within_s, wake_early)
            finally:
                if not waiters:
                    self._expecting.pop(request_id, None)
            within_s = max(within_s - (time.monotonic() - began_s), 0.0)
        found = await super().wait(
            request_id, owner=owner, within_s=within_s, wake_early=wake_early
        )
        if found.outcome is None and request_id not in self._unfinished:
            # It was finished meanwhile, without its result.
            return await self._read(request_id, owner)
        return found

    def _expects(self, request_id: str) -> bool:
        """
        Whether this process has not heard of a request, and will if it exists.

        It was accepted elsewhere, after this process began to listen, and is not forgotten since.
        """
        if request_id in self._cache or request_id in self._unfinished or self.closing:
            return False
        accepted_s = issued_s(request_id)
        return (
            request_id not in self._unread
            and accepted_s is not None
            and accepted_s > max(self.listening_since_s(), self._forgotten_s)
        )

    def heard(self, request: QueuedRequest, *, is_complete: bool) -> None:
        """A request is finished. Without a complete outcome, those who poll it read its row."""
        self.on_finished(request.request_id)
        if is_complete:
            self.finish(request)
        elif request.request_id not in self._cache:
            self._finished_unread(request)
        if (waiters := self._expecting.get(request.request_id)) is not None:
            waiters.wake()

    def _finished_unread(self, request: QueuedRequest) -> None:
        """
        A request is finished, and its result is not known here.

        A poll reads it in its own task (`wait`), so that a large one does not hold up others.
        """
        if (unread := self._pop(request)) is not None:
            if unread.counted:
                waited_s = time.monotonic() - unread.since_s
                self.timings.finish(request.kind.value, request.outcome, waited_s)
            unread.waiters.wake()
        self._unread[request.request_id] = None
        if len(self._unread) > MAX_UNREAD:
            self._dropped(self._unread.popitem(last=False)[0])

    def _dropped(self, request_id: str) -> None:
        self._forgotten_s = max(self._forgotten_s, issued_s(request_id) or -math.inf)

    async def _row(self, request_id: str) -> Row:
        self._unread.pop(request_id, None)
        if (row := self._to_read.get(request_id)) is None:
            row = self._to_read[request_id] = asyncio.get_running_loop().create_future()
        self._start_reading()
        return await asyncio.shield(row)

    def _start_reading(self) -> None:
        if self._to_read and self._reading is None:
            self._reading = asyncio.create_task(self._read_all())

    async def _read_all(self) -> None:
        """Read all rows that are wanted; those that are wanted meanwhile are read together next."""
        some: dict[str, asyncio.Future[Row] | None] = {}
        try:
            while self._to_read:
                some = dict(itertools.islice(self._to_read.items(), BATCH))
                for request_id in some:
                    del self._to_read[request_id]
                wanted = [
                    one for one, row in some.items() if row is not None or self.is_polled(one)
                ]
                found = await self._store.requests.finished(list(some), with_results=wanted)
                for request_id, row in some.items():
                    one = found.get(request_id, (None, None))
                    self._was_read(request_id, *one)
                    if row is not None and not row.done():
                        row.set_result(one)
        except Exception as error:
            if isinstance(error, StorageError):
                log.info("results cannot be read now; they are looked for again: %s", error)
            else:
                log.exception("results cannot be read")
            for row in (*some.values(), *self._to_read.values()):
                if row is not None and not row.done():
                    row.set_exception(error)
                    row.exception()  # its poll may have ended: that is no error of its own
            self._to_read.clear()
        finally:
            self._reading = None

    def _was_read(
        self, request_id: str, request: QueuedRequest | None, result: bytes | None
    ) -> None:
        """Finish a request that this process knows, if its row says that it is finished."""
        known = self.unfinished_request(request_id)
        if known is None or (request is not None and request.outcome is None):
            return
        self.on_finished(request_id)
        if request is None or request.outcome is None:
            # Its row is deleted: the next poll says so.
            if (gone := self._pop(known)) is not None:
                gone.waiters.wake()
        elif request.outcome.error is None and result is None:
            self._finished_unread(request)
        else:
            if result is not None:
                request.outcome = Outcome(result=result)
            self.finish(request)

    async def look(self) -> None:
        """What lost notifications did not tell: finished requests, new events, loads."""
        # Polls that have not heard of their requests read the rows together. Not those that began since
        # the last look: most of them hear in time.
        for request_id in self._expected & self._expecting.keys():
            self._expecting[request_id].wake()
        self._expected = set(self._expecting)
        held = list(self._unfinished)
        if held:
            start = self._position % len(held)
            self._position = start + LOOKED_AT
            held = held[start:] + held[:start]
            ended, abandoned, homes = await self._store.requests.look_at(held[:LOOKED_AT])
            for request_id, home in homes.items():
                if (request := self.unfinished_request(request_id)) is not None:
                    request.home = home  # another worker may have it now
            for first in range(LOOKED_AT, len(held), LOOKED_AT):
                some = await self._store.requests.news_of(held[first : first + LOOKED_AT])
                ended += some[0]
                abandoned += some[1]
            self._to_read.update((one, self._to_read.get(one)) for one in ended)
            self._start_reading()
            if kept := [one for one in abandoned if self.is_polled(one)]:
                await self._store.workers.keep(kept)
        await self.completion_log.look()
        await self._read_loads()

    def release(self) -> None:
        super().release()
        for waiters in self._expecting.values():
            waiters.wake()

    def _track_unknown(self, request: QueuedRequest) -> None:
        self.track(request, counted=False)
        if request.request_id in self._unread:
            # It was finished while its row was read.
            self._to_read.setdefault(request.request_id, None)
            self._start_reading()

    # -- loads of owners ---------------------------------------------------------------------------

    async def _read_loads(self) -> None:
        own = dict(self._loads)
        self._others = {
            owner: _others(own.get(owner, NO_LOAD), *total)
            for owner, total in (await self._store.requests.loads()).items()
        }

    async def refresh_loads(self) -> None:
        """Read the loads again: a request is about to be refused. Those that wait share a read."""
        wanted = self._load_reads + 1
        async with self._load_lock:
            if self._load_reads < wanted:
                self._load_reads = wanted
                await self._read_loads()

    @property
    def loads(self) -> Mapping[str, Load]:
        return {owner: self.load(owner) for owner in {*self._loads, *self._others}}

    def load(self, owner: str) -> Load:
        return self._loads.get(owner, NO_LOAD) + self._others.get(owner, NO_LOAD)

    @property
    def accepted(self) -> int:
        return sum(load.requests for load in self.loads.values())


def _others(own: Load, requests: int, tokens: int, samples: int) -> Load:
    """What other processes accepted of a total. Own requests may have been finished since."""
    return Load(
        requests=max(requests - own.requests, 0),
        tokens=max(tokens - own.tokens, 0),
        samples=max(samples - own.samples, 0),
    )


class RemoteCompletionLog(CompletionLog):
    """Events of samples that workers finish. They are read from the database for each poll."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        #: Of samplers with a poll.
        self._waiters: defaultdict[str, Waiters] = defaultdict(Waiters)
        self._polls: Counter[str] = Counter()
        #: The newest position that a poll has read.
        self._newest: dict[str, int] = {}

    def add(self, event: Completion) -> None:
        raise NotImplementedError("workers add events")

    def heard(self, sampling_session_ids: Iterable[str]) -> None:
        """These samplers have new events."""
        for one in sampling_session_ids:
            if (waiters := self._waiters.get(one)) is not None:
                waiters.wake()

    async def after(
        self,
        sampling_session_id: str,
        clone_id: int,
        *,
        cursor: int,
        within_s: float,
        wake_early: WakeEarly | None = None,
    ) -> Sequence[Completion]:
        until_s = time.monotonic() + within_s
        waiters = self._waiters[sampling_session_id]
        self._polls[sampling_session_id] += 1
        left = False

        def gone(wake: Callable[[], None]) -> None:
            def leave() -> None:
                nonlocal left
                left = True
                wake()

            if wake_early is not None:
                wake_early(leave)

        try:
            while True:
                # Before the read: an event that is committed during it wakes this poll.
                waiting = asyncio.ensure_future(
                    waiters.wait(max(until_s - time.monotonic(), 0.0), gone)
                )
                try:
                    events, newest = await self._store.requests.completions(
                        sampling_session_id, clone_id, after=cursor, limit=MAX_EVENTS_PER_POLL
                    )
                    self._newest[sampling_session_id] = newest
                    if events or left or self._closing or time.monotonic() >= until_s:
                        return events
                    await waiting
                finally:
                    waiting.cancel()
        except StorageError:
            # The client polls again from the same cursor; the sleep prevents a tight loop.
            await asyncio.sleep(min(within_s, STORAGE_RETRY_S))
            return []
        finally:
            self._polls[sampling_session_id] -= 1
            if not self._polls[sampling_session_id]:
                for known in (self._polls, self._waiters, self._newest):
                    known.pop(sampling_session_id, None)

    async def look(self) -> None:
        """Wake polls whose samplers have events that no notification told of."""
        held = dict(self._newest)
        if held:
            newest = await self._store.requests.newest_events(list(held))
            self.heard(one for one, position in newest.items() if position > held[one])

    def release(self) -> None:
        super().release()
        self.heard(list(self._waiters))
