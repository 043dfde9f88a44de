"""Queue states of waiting requests: user callbacks, and what is paused now."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from tinkex.client.background_loop import after_fork

if TYPE_CHECKING:
    from tinkex.client.observe.telemetry import Telemetry

__all__ = [
    "QueueLog",
    "QueueObserver",
    "QueueState",
    "Watch",
    "on_queue_state",
    "paused",
    "publish",
    "queue_reason",
    "subject_of",
]

log = logging.getLogger("tinkex.queue")

#: Maximum number of paused subjects that are kept.
MAX_SUBJECTS = 1000
#: For servers that send a state without a reason.
QUEUE_REASONS = {
    "paused_rate_limit": "a rate limit of this account was reached",
    "paused_capacity": "the service is short of capacity",
}


@dataclass(frozen=True, kw_only=True)
class QueueState:
    """Why the service lets a request wait."""

    #: What waits: "Training of <model id>", "Sampling from <sampler id>".
    subject: str
    #: `active`, `paused_rate_limit`, `paused_capacity`, or another state of the service.
    state: str
    #: The service's reason, or a default one if it sent none; None while active.
    reason: str | None


Callback = Callable[[QueueState], None]


class Watch:
    """A registered callback: call `stop()`, or leave the `with` block."""

    def __init__(self, callback: Callback) -> None:
        self._callback = callback

    def __call__(self, state: QueueState) -> None:
        try:
            self._callback(state)
        except Exception:
            log.exception("a queue-state callback failed; the request continues")

    def stop(self) -> None:
        with _lock:
            if self in _watches:
                _watches.remove(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


_lock = threading.Lock()
_watches: list[Watch] = []
_paused: dict[str, QueueState] = {}


@after_fork
def _reset_after_fork() -> None:
    """In a forked child: nothing waits here, and the lock may be held."""
    global _lock
    _lock = threading.Lock()
    _paused.clear()


def on_queue_state(callback: Callback) -> Watch:
    """
    Call a function whenever the server lets requests of this process wait, or no longer.

    Args:
        callback: Gets a `QueueState`. It is called on the client's thread: return quickly, and
            never wait for a tinkex result there.

    Returns:
        A context that ends with its block, or with `stop()`.

    Example:
        with tinkex.on_queue_state(lambda state: print(state.subject, state.reason)):
            training.forward_backward(data, "cross_entropy").result()
    """
    watch = Watch(callback)
    with _lock:
        _watches.append(watch)
    return watch


def publish(state: QueueState) -> None:
    """Store the state, and call all callbacks."""
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
    """Everything that is paused now."""
    with _lock:
        return list(_paused.values())


class QueueObserver(Protocol):
    """Notified when the queue state of a request changes."""

    def on_queue_state_change(self, queue_state: str, queue_state_reason: str | None) -> None: ...


def subject_of(observer: object) -> str:
    """What waits, in the words of the log: `Training of m`."""
    return str(getattr(observer, "subject", "A request"))


def queue_reason(state: str, reason: str | None) -> str:
    """The reason that the service gave, or a default one."""
    unnamed = f"queue state {state[:64]!r}, without a reason"
    return reason or QUEUE_REASONS.get(state, unnamed)


class QueueLog:
    """
    The default observer: publishes changes of the queue state to `on_queue_state` callbacks.

    They are also counted in the telemetry of the session.
    """

    def __init__(
        self, subject: str, *, telemetry: Callable[[], Telemetry | None] = lambda: None
    ) -> None:
        self.subject = subject
        self._telemetry = telemetry
        self._known: tuple[str, str | None] = ("active", None)

    def on_queue_state_change(self, queue_state: str, queue_state_reason: str | None) -> None:
        reason = None
        if queue_state != "active":
            reason = queue_reason(queue_state, queue_state_reason)
        if (queue_state, reason) != self._known:
            self._known = (queue_state, reason)
            if telemetry := self._telemetry():
                telemetry.record_queue_state(queue_state)
            publish(QueueState(subject=self.subject, state=queue_state, reason=reason))
