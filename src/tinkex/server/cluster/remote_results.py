"""
Results of requests that workers run, and the polls of one web process that wait for them.

A worker notifies all web processes of what it has committed. They read it from the database if a poll
waits for it. What a lost notification did not tell is found within a second (`look`).
"""

import asyncio
import logging
import time
from collections import Counter, defaultdict
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

log = logging.getLogger("tinkex.server.cluster")

#: Requests that one statement reads.
BATCH = 500
#: Unfinished requests that one look compares with their rows; the next look takes the next ones.
MAX_LOOKED_AT = 2_000


class RemoteFutures(Futures):
    """The requests that this web process accepted, or that its polls wait for."""

    def __init__(self, store: Store, *, retention_s: float) -> None:
        super().__init__(store, retention_s=retention_s)
        self.completion_log: RemoteCompletionLog = RemoteCompletionLog(store)
        #: Called when a request is finished, or unknown by now.
        self.on_finished: Callable[[str], None] = lambda _: None
        self._to_read: dict[str, None] = {}
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
        found = await super().wait(
            request_id, owner=owner, within_s=within_s, wake_early=wake_early
        )
        if found.outcome is None and request_id not in self._unfinished:
            # It was finished meanwhile, without its result.
            return await self._read(request_id, owner)
        return found

    def heard(self, request_ids: Iterable[str]) -> None:
        """These requests are finished, or may be."""
        self._to_read.update((one, None) for one in request_ids if one in self._unfinished)
        if self._to_read and self._reading is None:
            self._reading = asyncio.create_task(self._read_all())

    async def _read_all(self) -> None:
        try:
            while self._to_read:
                some = list(self._to_read)[:BATCH]
                for one in some:
                    del self._to_read[one]
                await self._read_finished(some)
        except StorageError as error:
            log.info("results cannot be read now; they are looked for again: %s", error)
        finally:
            self._reading = None

    async def _read_finished(self, request_ids: Sequence[str]) -> None:
        polled = [one for one in request_ids if self.is_polled(one)]
        found = await self._store.requests.finished(request_ids, with_results=polled)
        for request_id in request_ids:
            request, result = found.get(request_id, (None, None))
            if request is not None and request.outcome is None:
                continue  # it still waits
            self._finished(request_id, request, result)

    def _finished(
        self, request_id: str, request: QueuedRequest | None, result: bytes | None
    ) -> None:
        known = self.unfinished_request(request_id)
        if known is None:
            return
        self.on_finished(request_id)
        if request is None or request.outcome is None:
            # Its row is deleted: the next poll says so.
            if (gone := self._pop(known)) is not None:
                gone.waiters.wake()
            return
        if request.outcome.error is None and result is None:
            # It is large, or nobody waited for it: a poll reads it in its own task (`wait`), so that
            # it does not hold up other results.
            if (unread := self._pop(known)) is not None:
                if unread.counted:
                    waited_s = time.monotonic() - unread.since_s
                    self.timings.finish(request.kind.value, request.outcome, waited_s)
                unread.waiters.wake()
            return
        if result is not None:
            request.outcome = Outcome(result=result)
        self.finish(request)

    async def look(self) -> None:
        """What lost notifications did not tell: finished requests, new events, loads."""
        held = list(self._unfinished)
        if held:
            start = self._position % len(held)
            self._position = start + MAX_LOOKED_AT
            some = (held[start:] + held[:start])[:MAX_LOOKED_AT]
            ended, abandoned, homes = await self._store.requests.look_at(some)
            for request_id, home in homes.items():
                if (request := self.unfinished_request(request_id)) is not None:
                    request.home = home  # another worker may have it now
            self.heard(ended)
            if kept := [one for one in abandoned if self.is_polled(one)]:
                await self._store.workers.keep(kept)
        await self.completion_log.look()
        await self._read_loads()

    def _track_unknown(self, request: QueuedRequest) -> None:
        self.track(request, counted=False)

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
