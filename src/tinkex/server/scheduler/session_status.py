"""
The status of sessions: active, timed out, failed, or finished.

A client sends heartbeats while it runs. A session without one for the grace period is marked as
timed out, and its models leave the engine's memory; nothing is deleted. The next heartbeat or step
removes the mark, and the models are rebuilt on demand. Only a session that its own client finished
cannot continue.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from tinkex.server.retry import PeriodicTask
from tinkex.server.store import Store
from tinkex.wire.sessions import (
    ClientSessionFinished,
    ClientSessionFinishErrored,
    ClientSessionFinishInterrupted,
    ClientSessionFinishSuccess,
    SessionActive,
    SessionCancelled,
    SessionFailed,
)
from tinkex.wire.text_format import format_utc

if TYPE_CHECKING:
    from tinkex.server.scheduler.scheduler_port import SchedulerPort

log = logging.getLogger("tinkex.server.scheduler.session_status")

# How often sessions are checked; more often when the grace period is short.
CHECK_INTERVAL_S = 30.0

_FINISH_REASONS = {
    "success": ClientSessionFinishSuccess,
    "errored": ClientSessionFinishErrored,
    "interrupted": ClientSessionFinishInterrupted,
}


class SessionTimes(Protocol):
    """The columns of a session's row that decide its status."""

    @property
    def seen_s(self) -> float: ...
    @property
    def finished_s(self) -> float | None: ...
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def finish_detail(self) -> str | None: ...
    @property
    def lapsed_s(self) -> float | None: ...
    @property
    def failure(self) -> Mapping[str, Any] | None: ...


def session_status(
    row: SessionTimes,
) -> SessionActive | SessionCancelled | SessionFailed | ClientSessionFinished:
    """The status with its reason. Finished comes before failed, failed before timed out."""
    if row.finished_s is not None:
        reason = _FINISH_REASONS.get(row.finish_reason or "", ClientSessionFinishInterrupted)()
        return ClientSessionFinished(reason=reason, detail=row.finish_detail)
    if row.failure is not None:
        return SessionFailed.model_validate(row.failure)
    if row.lapsed_s is not None:
        return SessionCancelled(
            detail=f"the client has sent nothing since {format_utc(row.seen_s)}. The session continues when the "
            "client comes back."
        )
    return SessionActive()


class SessionTimeouts:
    """Marks sessions without heartbeats. Call `start` before use, `close` after."""

    def __init__(
        self,
        store: Store,
        scheduler: "SchedulerPort",
        *,
        grace_s: float,
        shared: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """With `shared`, other web processes hear of these sessions too; their rows decide then."""
        self._shared = shared
        self._store = store
        self._scheduler = scheduler
        self._grace_s = grace_s
        self._clock = clock
        self.timed_out: set[str] = set()
        #: When sessions last sent a request, for clients that send no heartbeats.
        self.last_request_s: dict[str, float] = {}
        #: The leases of the programs of sessions, for `tinkex.local`.
        self.leases: dict[str, str] = {}
        #: When a session was last finished; at first, the start of this process.
        self._last_finish_s = time.monotonic()
        self._task = PeriodicTask()

    async def start(self) -> None:
        self.timed_out = set(await self._store.sessions.timed_out_sessions())
        self._task.start(
            self.check,
            self._interval_s,
            what="the check for session timeouts",
            log=log,
            # After an outage of the server itself, every session gets the whole grace period.
            after_s=self._grace_s,
        )

    async def close(self) -> None:
        await self._task.close()

    def begin(self, session_id: str, lease: str | None) -> None:
        """A session was created, by a program with this lease."""
        self.last_request_s[session_id] = time.monotonic()
        if lease is not None:
            self.leases[session_id] = lease

    def alive(self, within_s: float) -> list[str]:
        """The sessions whose clients sent something within this time."""
        oldest_s = time.monotonic() - within_s
        return [one for one, at_s in self.last_request_s.items() if at_s >= oldest_s]

    @property
    def idle_s(self) -> float:
        """How long no session has sent anything."""
        newest_s = max(self.last_request_s.values(), default=0.0)
        return time.monotonic() - max(newest_s, self._last_finish_s)

    def revive(self, session_id: str) -> None:
        """The client of a session that timed out sent something."""
        self.timed_out.discard(session_id)
        self._store.sessions.mark_active(session_id)
        log.info("session %s is active again", session_id)

    async def changed(self, session_ids: Sequence[str]) -> None:
        """Another web process may have marked these sessions: their next request removes it."""
        alive = set(self.alive(2 * self._interval_s))
        for session_id in await self._store.sessions.timed_out_sessions(session_ids):
            if session_id in alive:
                # It sent a request here, which the other one did not know of.
                self._store.sessions.mark_active(session_id)
            else:
                self.timed_out.add(session_id)

    def finish(self, session_id: str) -> None:
        """The client of a session finished it."""
        self.last_request_s.pop(session_id, None)
        self.leases.pop(session_id, None)
        self._last_finish_s = time.monotonic()
        self.timed_out.discard(session_id)
        self._scheduler.unload_session(session_id)

    @property
    def _interval_s(self) -> float:
        return min(CHECK_INTERVAL_S, self._grace_s / 2)

    async def check(self) -> None:
        """Mark the sessions whose grace period is over, and unload their models."""
        now_s = self._clock()
        if self._shared:
            # Requests at this process count for all. Another one writes down its own within two
            # intervals.
            await self._store.sessions.mark_all_active(self.alive(2 * self._interval_s), now_s)
            now_s -= 2 * self._interval_s
        oldest_s = time.monotonic() - self._grace_s
        self.last_request_s = {
            session_id: at_s for session_id, at_s in self.last_request_s.items() if at_s >= oldest_s
        }
        self.leases = {
            session_id: lease
            for session_id, lease in self.leases.items()
            if session_id in self.last_request_s
        }
        # Rows outlive this process, so their times are of the system clock.
        silent = await self._store.sessions.inactive_sessions(now_s - self._grace_s)
        timed_out = [one for one in silent if one not in self.last_request_s]
        if not timed_out:
            return
        await self._store.sessions.mark_timed_out(timed_out, before_s=now_s - self._grace_s)
        for session_id in timed_out:
            # A request may have come while the mark was written.
            if session_id in self.last_request_s:
                self._store.sessions.mark_active(session_id)
                continue
            self.timed_out.add(session_id)
            self._scheduler.unload_session(session_id)
            log.info("session %s timed out after %.0f s", session_id, self._grace_s)
