"""
Clients that went away: their models leave the engine's memory, and come back when they do.

A client beats every few seconds while it lives. A session that was silent for the grace period is
marked, with a reason, and nothing else of it is touched: the next beat, or the next step, takes
the mark away. Only a session that its own client finished is over for good.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Protocol

from tinkex.server.scheduler.scheduler import Dispatcher
from tinkex.server.store import Store
from tinkex.wire.runs import (
    ClientSessionFinished,
    ClientSessionFinishErrored,
    ClientSessionFinishInterrupted,
    ClientSessionFinishSuccess,
    SessionActive,
    SessionCancelled,
    SessionFailed,
)

log = logging.getLogger("tinkex.server.scheduler.session_timeout")

# Looked at this often, or more often when the grace period is short.
LOOKED_S = 30.0

_REASONS = {
    "success": ClientSessionFinishSuccess,
    "errored": ClientSessionFinishErrored,
    "interrupted": ClientSessionFinishInterrupted,
}


class SessionTimes(Protocol):
    """What of a session's row says how it stands."""

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
    """How a session stands, and why. What its client said counts most, silence least."""
    if row.finished_s is not None:
        reason = _REASONS.get(row.finish_reason or "", ClientSessionFinishInterrupted)()
        return ClientSessionFinished(reason=reason, detail=row.finish_detail)
    if row.failure is not None:
        return SessionFailed.model_validate(row.failure)
    if row.lapsed_s is not None:
        heard = datetime.fromtimestamp(row.seen_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return SessionCancelled(
            detail=f"the client has not been heard of since {heard}. The session goes on when it "
            "comes back."
        )
    return SessionActive()


class Presence:
    """Watches sessions fall silent and come back. `start` before, `close` after."""

    def __init__(
        self,
        store: Store,
        dispatcher: Dispatcher,
        *,
        grace_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._dispatcher = dispatcher
        self._grace_s = grace_s
        self._clock = clock
        self._lapsed: set[str] = set()
        #: Sessions that asked for work lately, for clients that do not beat.
        self._active: dict[str, float] = {}
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._lapsed = set(await self._store.sessions.lapsed_sessions())
        self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    def heard(self, session_id: str) -> None:
        """The client of a session is there."""
        self._active[session_id] = time.monotonic()
        if session_id in self._lapsed:
            self._lapsed.discard(session_id)
            self._store.sessions.mark_active(session_id)
            log.info("session %s is back", session_id)

    def left(self, session_id: str) -> None:
        """The client of a session said that it is done."""
        self._active.pop(session_id, None)
        self._lapsed.discard(session_id)
        self._dispatcher.free_session(session_id)

    async def look(self) -> None:
        """Mark who has been silent for too long, and free what they hold in memory."""
        oldest_s = time.monotonic() - self._grace_s
        self._active = {
            session_id: heard_s
            for session_id, heard_s in self._active.items()
            if heard_s >= oldest_s
        }
        # Rows outlive this process, so they have moments of the system clock.
        silent = await self._store.sessions.inactive_sessions(self._clock() - self._grace_s)
        gone = [session_id for session_id in silent if session_id not in self._active]
        if not gone:
            return
        await self._store.sessions.mark_lapsed(gone)
        for session_id in gone:
            # It may have come back while the mark was written.
            if session_id in self._active:
                self._store.sessions.mark_active(session_id)
                continue
            self._lapsed.add(session_id)
            self._dispatcher.free_session(session_id)
            log.info("session %s was silent for %.0f s", session_id, self._grace_s)

    async def _watch(self) -> None:
        # After a pause of the server itself everybody gets the whole grace period.
        await asyncio.sleep(self._grace_s)
        while True:
            try:
                await self.look()
            except Exception:
                log.exception("silent sessions could not be looked for")
            await asyncio.sleep(min(LOOKED_S, self._grace_s / 2))
