"""
What a client says while it waits.

One line when something has waited for `Settings.wait_notice_s`: what it waits for, how long it will,
and how to stop. One more when it goes on. All requests to one service that wait for the same cause
share these lines: 200 requests to a dead server give one.

`WaitLog` decides what is said and when: no clock, no timer, no output. `Waiting` is its driver, with
one timer while something waits; `ThreadedWaiting` is the one of downloads. Requests that succeed at
once touch neither.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

log = logging.getLogger("tinkex.waiting")

QUIET_S = 60.0
MAX_REASON_CHARS = 300
HOW_TO_STOP = "Ctrl-C stops; TINKEX_WAIT_NOTICE_S=off hides this line."


@dataclass(frozen=True, slots=True)
class Limit:
    """Until when a request waits, and the setting that decides it."""

    #: On the clock of the client; infinite if there is no limit.
    ends_at: float = math.inf
    setting: str = ""

    def text(self, now: float) -> str:
        name = f" ({self.setting})" if self.setting else ""
        if self.ends_at == math.inf:
            return f"without a time limit{name}"
        return f"for {_duration(max(0.0, self.ends_at - now))} more{name}"


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a request waits. Requests with the same `key` share their lines."""

    key: str
    #: Who or what waits, or is waited for: `http://127.0.0.1:8000`, `Training of m`.
    subject: str
    reason: str
    #: What stands between the two in the line.
    joint: str = ":"
    #: What the client does in the meantime, and what follows the subject when the wait is over.
    does: str = "Trying"
    over: str = "answers again"
    #: Seconds after a line in which a new wait for the same cause is not mentioned. Under load,
    #: requests of one service begin and end to wait all the time.
    quiet_s: float = QUIET_S


@dataclass(eq=False, slots=True)
class _Wait:
    """All requests that wait for one cause."""

    #: The cause as given last.
    cause: Cause
    since: float
    notice_at: float
    #: What waits, by request: its subject and limit.
    requests: dict[object, tuple[str, Limit]] = field(default_factory=dict)
    #: Whether the line about this cause was written.
    said: bool = False
    #: Whether there was a line about an earlier cause of the same wait.
    announced: bool = False


class WaitLog:
    """The waits of one service. Times are given by the caller."""

    def __init__(self) -> None:
        #: By the key of the cause.
        self._waits: dict[str, _Wait] = {}
        self._keys: dict[object, str] = {}
        #: By key: until when a line was the last one, and when a wait was last over.
        self._quiet_until: dict[str, float] = {}
        self._over_at: dict[str, float] = {}

    def wait(
        self, request: object, cause: Cause, limit: Limit, *, since: float, notice_s: float
    ) -> float:
        """
        A request waits, since `since`. Called again when its cause or limit changes.

        Returns when there may be something to say; infinite if it is said already.
        """
        announced = False
        if self._keys.get(request, cause.key) != cause.key:
            announced = self.leave(request)
        since = max(since, self._over_at.get(cause.key, -math.inf))
        notice_at = max(since + notice_s, self._quiet_until.get(cause.key, -math.inf))
        wait = self._waits.get(cause.key)
        if wait is None:
            wait = self._waits[cause.key] = _Wait(cause, since, notice_at)
        wait.cause = cause
        wait.since = min(wait.since, since)
        wait.notice_at = min(wait.notice_at, notice_at)
        wait.announced = wait.announced or announced
        wait.requests[request] = (cause.subject, limit)
        self._keys[request] = cause.key
        return math.inf if wait.said else wait.notice_at

    def over(self, request: object, now: float) -> str | None:
        """The request goes on. The line to write, if there was one about its wait."""
        key = self._keys.get(request)
        if key is None:
            return None
        # What waits for the same cause goes on too. If it does not, it waits anew.
        wait = self._waits.pop(key)
        for each in wait.requests:
            del self._keys[each]
        self._over_at[key] = now
        if not (wait.said or wait.announced):
            return None
        return f"{_subject(wait)} {wait.cause.over} after {_duration(now - wait.since)}."

    def leave(self, request: object) -> bool:
        """
        The request waits no longer, without success: its error says the rest.

        Returns whether there was a line about its wait, which no other request shares.
        """
        key = self._keys.pop(request, None)
        if key is None:
            return False
        wait = self._waits[key]
        del wait.requests[request]
        if wait.requests:
            return False
        del self._waits[key]
        return wait.said or wait.announced

    def due(self, now: float) -> tuple[list[str], float]:
        """The lines to write now, and when there may be something to say again."""
        lines, next_at = [], math.inf
        for key, wait in self._waits.items():
            if wait.said:
                continue
            if now < wait.notice_at:
                next_at = min(next_at, wait.notice_at)
                continue
            self._quiet_until[key] = now + wait.cause.quiet_s
            wait.said = True
            if any(
                other.said and other is not wait and other.cause.reason == wait.cause.reason
                for other in self._waits.values()
            ):
                wait.said, wait.notice_at = False, math.inf  # another line says the same
            else:
                lines.append(_line(wait, now))
        return lines, next_at


def _subject(wait: _Wait) -> str:
    subjects = list(dict.fromkeys(subject for subject, _ in wait.requests.values()))
    more = f" (and {len(subjects) - 1} more)" if len(subjects) > 1 else ""
    return subjects[0] + more


def _line(wait: _Wait, now: float) -> str:
    """`http://h: connection refused. Trying for 27 s more (TINKEX_FIRST_CONTACT_S). …`"""
    reason = " ".join(wait.cause.reason.split()).rstrip(".")
    if len(reason) > MAX_REASON_CHARS:
        reason = f"{reason[:MAX_REASON_CHARS]}..."
    longest: dict[str, Limit] = {}
    for _, limit in wait.requests.values():
        if limit.setting not in longest or limit.ends_at > longest[limit.setting].ends_at:
            longest[limit.setting] = limit
    limits = ", or ".join(
        limit.text(now) for limit in sorted(longest.values(), key=lambda each: each.ends_at)
    )
    return f"{_subject(wait)}{wait.cause.joint} {reason}. {wait.cause.does} {limits}. {HOW_TO_STOP}"


def _duration(seconds: float) -> str:
    if seconds < 600:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min"


class ThreadedWaiting:
    """Writes the lines of work that threads retry: at an attempt, not by a timer."""

    def __init__(self, notice_s: float | None) -> None:
        self._notice_s = notice_s
        self._log = WaitLog()
        self._lock = threading.Lock()

    def wait(self, request: object, cause: Cause, limit: Limit, *, since: float) -> None:
        if self._notice_s is None:
            return
        with self._lock:
            self._log.wait(request, cause, limit, since=since, notice_s=self._notice_s)
            lines, _ = self._log.due(monotonic())
        for line in lines:
            log.warning("%s", line)

    def over(self, request: object) -> None:
        with self._lock:
            line = self._log.over(request, monotonic())
        if line is not None:
            log.warning("%s", line)

    def leave(self, request: object) -> None:
        with self._lock:
            self._log.leave(request)


class Waiting:
    """Writes the lines of one service. Belongs to one event loop."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._log = WaitLog()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf

    def wait(
        self,
        request: object,
        cause: Cause,
        limit: Limit,
        *,
        since: float,
        notice_s: float | None,
    ) -> None:
        """`request` waits; call `over` or `leave` with the same object at the end."""
        if notice_s is not None and log.isEnabledFor(logging.WARNING):
            self._set_timer(self._log.wait(request, cause, limit, since=since, notice_s=notice_s))

    def over(self, request: object) -> None:
        """The request was answered."""
        line = self._log.over(request, self._clock())
        if line is not None:
            log.warning("%s", line)

    def leave(self, request: object) -> None:
        """The request failed, or was cancelled."""
        self._log.leave(request)

    def _set_timer(self, at: float) -> None:
        if at >= self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = asyncio.get_running_loop().call_later(
            max(0.0, at - self._clock()), self._speak
        )

    def _speak(self) -> None:
        self._timer, self._timer_at = None, math.inf
        lines, next_at = self._log.due(self._clock())
        for line in lines:
            log.warning("%s", line)
        self._set_timer(next_at)
