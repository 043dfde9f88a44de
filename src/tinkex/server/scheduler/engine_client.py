"""
Isolates requests that crash an engine, by counting attempts.

When an engine ends by itself, everything it was running is lost. This counts as one attempt for each
of these requests, and they run again: most crashes are not caused by a request. After two such
attempts a request is isolated: it runs alone or, if there are many such requests, in small groups. If
the engine ends while a request runs alone, that request fails, and the counts of the others are reset.

Counts are stored when an engine ends, so they survive the web process. `web_crash` counts for a web
process that crashes together with its engines.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from tinkex.server.scheduler.web_crash import CrashFiles

#: A request that was lost this many times, the last time alone, fails.
MAX_ATTEMPTS = 3
#: A request that was lost this many times is isolated.
ISOLATE_AFTER = MAX_ATTEMPTS - 1
#: Up to this many isolated requests run one by one; more run in this many groups at first.
MAX_SINGLY = 16
GROUPS = 8


def group_size(isolated: int, attempts: int) -> int:
    """How many of this many isolated requests run together after this many attempts."""
    if isolated <= MAX_SINGLY:
        return 1
    return max(1, int(isolated / GROUPS ** (attempts - ISOLATE_AFTER + 1)))


def after_web_crash(
    attempts: Mapping[str, int], isolated: frozenset[str]
) -> tuple[dict[str, int], str | None]:
    """
    The new counts of an engine's waiting requests, and the request that must fail if it is known.

    `isolated` are the isolated requests that were running. Nothing runs beside them. If there are
    none, any request may have crashed the web process, so all of them count.
    """
    running = [request_id for request_id in attempts if request_id in isolated]
    counted = {request_id: attempts[request_id] + 1 for request_id in running or attempts}
    if len(running) == 1 and counted[running[0]] >= MAX_ATTEMPTS:
        return {}, running[0]
    return {**{one: count for one, count in attempts.items() if count}, **counted}, None


@dataclass(slots=True, eq=False)
class Attempt:
    """One step batch of a model, or one sample, on an engine."""

    request_ids: Sequence[str]
    #: The largest number of earlier attempts of its requests.
    earlier: int
    #: Whether nothing else was on the engine at any time during this attempt.
    alone: bool = True
    #: Set when it may run; None if it never had to wait.
    admitted: asyncio.Event | None = None

    @property
    def is_isolated(self) -> bool:
        return self.earlier >= ISOLATE_AFTER


class CrashIsolation:
    """Admits attempts to one engine, in order of arrival."""

    def __init__(self, files: CrashFiles | None = None) -> None:
        self._files = files
        self._attempts: dict[str, int] = {}
        #: The request that crashed the last web process, until it has failed. It must not run.
        self.culprit: str | None = None
        self._running: set[Attempt] = set()
        self._isolated_running = 0
        #: In order of arrival.
        self._waiting: dict[Attempt, None] = {}
        self._isolated_waiting = 0
        self._held: set[str] = set()

    @contextlib.asynccontextmanager
    async def attempt(self, *request_ids: str) -> AsyncIterator[Attempt]:
        """Wait until these requests may run on the engine; they may run inside the `with` block."""
        attempt = Attempt(request_ids, max(map(self.attempts, request_ids), default=0))
        self._waiting[attempt] = None
        self._isolated_waiting += attempt.is_isolated
        self._admit()
        try:
            if attempt in self._waiting:
                attempt.admitted = asyncio.Event()
                self._held.update(request_ids)
                await attempt.admitted.wait()
                self._held.difference_update(request_ids)
            yield attempt
        finally:
            self._leave(attempt)

    def count(self, request_id: str, attempt: Attempt, attempts: int) -> bool:
        """Count lost attempts of a request; True if the request ended the engine."""
        total = self._attempts[request_id] = self.attempts(request_id) + attempts
        ended_engine = attempt.alone and total >= MAX_ATTEMPTS
        if ended_engine:
            # It ended the engine the other times too.
            self._attempts.clear()
        return ended_engine

    def attempts(self, request_id: str) -> int:
        """How often this request was lost."""
        return self._attempts.get(request_id, 0)

    @property
    def counts(self) -> Mapping[str, int]:
        return self._attempts

    def restore(self, attempts: Mapping[str, int], culprit: str | None) -> None:
        """Set the counts of an earlier process, and the request that it found to crash engines."""
        self._attempts = dict(attempts)
        self.culprit = culprit

    def is_held(self, request_id: str) -> bool:
        """Whether it waits because of an isolated request, or because it is one."""
        return request_id in self._held

    def forget(self, request_id: str) -> None:
        """The request is finished."""
        self._attempts.pop(request_id, None)
        if request_id == self.culprit:
            self.culprit = None

    def _admit(self) -> None:
        # Strictly in order, so neither isolated requests nor the others wait forever.
        while self._waiting and self._may_start(attempt := next(iter(self._waiting))):
            del self._waiting[attempt]
            self._isolated_waiting -= attempt.is_isolated
            if self._running:
                attempt.alone = False
                # With several running, all have lost the flag already.
                if len(self._running) == 1:
                    next(iter(self._running)).alone = False
            self._running.add(attempt)
            self._isolated_running += attempt.is_isolated
            if attempt.is_isolated and self._files is not None:
                self._files.add(attempt.request_ids)
            if attempt.admitted is not None:
                attempt.admitted.set()

    def _may_start(self, attempt: Attempt) -> bool:
        if not attempt.is_isolated:
            return not self._isolated_running
        if len(self._running) > self._isolated_running:
            return False
        isolated = self._isolated_running + self._isolated_waiting
        return len(self._running) < group_size(isolated, attempt.earlier)

    def _leave(self, attempt: Attempt) -> None:
        self._held.difference_update(attempt.request_ids)
        if attempt in self._running:
            self._running.discard(attempt)
            self._isolated_running -= attempt.is_isolated
            if attempt.is_isolated and self._files is not None:
                self._files.remove(attempt.request_ids)
        else:
            del self._waiting[attempt]
            self._isolated_waiting -= attempt.is_isolated
        self._admit()
