"""How a sampling client insists: `RetryConfig` put to work. Knows nothing of HTTP or queues."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from time import monotonic

from tinkex.client.errors import APIConnectionError, APIStatusError, RequestFailedError
from tinkex.client.http.polling import QueueObserver
from tinkex.client.http.retry import RetryConfig, is_retryable, is_user_error
from tinkex.client.http.transport import Request

#: A sample that the server accepted and could not draw is tried again so often. It has no limit in
#: time: a server that always fails would otherwise be asked for two hours, with nobody told.
MOST_FAILED_DRAWS = 3


def starts_over(error: Exception, config: RetryConfig, failures: int, *, sent: bool) -> bool:
    """Whether a sample that failed is drawn again, under a new number."""
    if isinstance(error, RequestFailedError):
        return not is_user_error(error) and failures <= MOST_FAILED_DRAWS
    listed = isinstance(error, config.retryable_exceptions)
    if not sent:
        # Submitting has insisted already on what is retryable; insisting on top of that would
        # multiply the two.
        return listed and not is_retryable(error)
    if isinstance(error, APIStatusError):
        # 410: the result is gone, and can simply be drawn again.
        return listed or error.status_code == 410 or is_retryable(error)
    return listed


class RetryHandler:
    """The patience of one client: delays between attempts, and an end when nothing moves."""

    def __init__(self, config: RetryConfig) -> None:
        self.config = config
        self._seen = "nothing"
        self._last_success = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"RetryHandler({self.config!r})"

    def again_after_s(
        self, error: Exception, failures: int, *, sent: bool, rng: random.Random
    ) -> float | None:
        """Seconds until a failed sample is started over; None to let it fail."""
        self._seen = f"{type(error).__name__}: {error}"
        if not self.config.enable_retry_logic:
            return None
        if not starts_over(error, self.config, failures, sent=sent):
            return None
        return self.config.delay_s(failures, rng=rng)

    # -- progress --------------------------------------------------------------------------------

    def succeeded(self) -> None:
        self._last_success = monotonic()

    def watch(self, give_up: Callable[[Callable[[], Exception]], None], allowed: bool) -> None:
        """Something waits: from now on a sample must finish every so often."""
        if self._timer is None and allowed and self.config.enable_stuck_detection:
            self._last_success = monotonic()  # it was idle until now
            self._arm(self.config.progress_timeout, give_up)

    def rest(self) -> None:
        """Nothing waits any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def observing(self, observer: QueueObserver) -> QueueObserver:
        """The observer, and what it is told is remembered for the day nothing moves."""
        return _Noted(self, observer)

    def note(self, queue_state: str, reason: str | None) -> None:
        self._seen = f"queue state {queue_state}" + (f", {reason}" if reason else "")

    def _arm(self, delay_s: float, give_up: Callable[[Callable[[], Exception]], None]) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(delay_s, self._look, give_up)

    def _look(self, give_up: Callable[[Callable[[], Exception]], None]) -> None:
        self._timer = None
        left_s = self._last_success + self.config.progress_timeout - monotonic()
        if left_s > 0:
            self._arm(left_s, give_up)
        else:
            give_up(self._stuck)

    def _stuck(self) -> Exception:
        return APIConnectionError(
            Request(method="POST", url="asample"),
            f"No sample of this client finished for {self.config.progress_timeout:g} s, so all "
            "that wait are given up (RetryConfig.progress_timeout). Check the server, or allow "
            f"more time. Last seen: {self._seen}.",
        )


class _Noted:
    def __init__(self, handler: RetryHandler, observer: QueueObserver) -> None:
        self._handler = handler
        self._observer = observer

    def on_queue_state_change(self, queue_state: str, queue_state_reason: str | None) -> None:
        self._handler.note(queue_state, queue_state_reason)
        self._observer.on_queue_state_change(queue_state, queue_state_reason)
