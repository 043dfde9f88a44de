"""Why requests wait, for whoever wants to know: callbacks of users, and what is paused now."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

__all__ = ["QueueState", "Watch", "on_queue_state", "paused", "publish"]

log = logging.getLogger("tinkex.queue")

#: Subjects that are remembered as paused, at most.
MAX_SUBJECTS = 1000


@dataclass(frozen=True, kw_only=True)
class QueueState:
    """What the service says about something that waits."""

    #: What waits, in words: "Training of <model id>", "Sampling from <sampler id>".
    subject: str
    #: `active`, `paused_rate_limit`, `paused_capacity`, or what else a service may say.
    state: str
    #: The service's words, or ours for a state it did not explain; None while active.
    reason: str | None


Callback = Callable[[QueueState], None]


class Watch:
    """A registered callback: `stop()` it, or leave the `with` block."""

    def __init__(self, callback: Callback) -> None:
        self._callback = callback

    def __call__(self, state: QueueState) -> None:
        try:
            self._callback(state)
        except Exception:
            log.exception("a queue-state callback failed; the request goes on")

    def stop(self) -> None:
        with _lock:
            if self in _watches:
                _watches.remove(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


_lock = threading.Lock()
_watches: list[Watch] = []
_paused: dict[str, QueueState] = {}


def _reset_after_fork() -> None:
    """In a forked child: nothing of ours waits here, and the lock may be held."""
    global _lock
    _lock = threading.Lock()
    _paused.clear()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_reset_after_fork)


def on_queue_state(callback: Callback) -> Watch:
    """
    Call `callback` with a `QueueState` whenever the state or reason of something changes.

        with tinkex.on_queue_state(lambda state: print(state.subject, state.reason)):
            ...

    Holds for every client of the process, until `stop()` or the end of the block. It is called on
    the client's own thread: be quick, and never wait for a tinkex result there.
    """
    watch = Watch(callback)
    with _lock:
        _watches.append(watch)
    return watch


def publish(state: QueueState) -> None:
    """Tell everybody."""
    with _lock:
        _paused.pop(state.subject, None)
        if state.state != "active":
            _paused[state.subject] = state
            if len(_paused) > MAX_SUBJECTS:
                del _paused[next(iter(_paused))]
        watches = list(_watches)
    for watch in watches:
        watch(state)


def paused() -> list[QueueState]:
    """What waits for a reason at this moment."""
    with _lock:
        return list(_paused.values())
