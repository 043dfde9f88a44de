"""
Whether and when to try again, and the two loops that do it.

`retrying` repeats work on the event loop:

    Calls.with_retries               requests
    ResultPoller.fetch, SharedPoll   polls for results
    SampleQueue                      samples that the server accepted and then failed
    RestClient.export_session_trace  the wait for a trace
    recovering_async                 training runs

`retrying_in_thread` is the same for threads: file downloads, `recovering`, and the start of a local
server. Everything else here is pure: no clock, no sleep, no socket.

Repeated elsewhere: a request after a redirect (`HttpTransport`), once more with a new token after a
401 (`Calls`), and what runs at intervals: heartbeats, telemetry, the renewal of tokens and of the
server's configuration.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

from tinkex.client.errors import (
    APIConnectionError,
    APIError,
    APIResponseValidationError,
    APIStatusError,
)

T = TypeVar("T")

#: Longer Retry-After values are cut to this: a server with a wrong clock must not block a client
#: forever.
MAX_RETRY_AFTER_S = 24 * 3600.0
#: Damaged responses to one request that are retried.
MAX_GARBLED = 3
#: For a shared back-off, polls wait at most this long, and so do calls with a shorter `give_up_s`.
LONG_WAIT_S = 60.0


class NotYet(Exception):
    """Raised by an attempt whose result is not available yet: try again after `delay_s`."""

    def __init__(self, delay_s: float) -> None:
        super().__init__(delay_s)
        self.delay_s = delay_s


def _never(error: Exception) -> float | None:
    return None


async def retrying(
    attempt: Callable[[], Awaitable[T]],
    delay_after: Callable[[Exception], float | None] = _never,
) -> T:
    """
    Call `attempt` until it succeeds. `delay_after` gives the seconds to wait after an error.

    If that is None, the error is raised.
    """
    while True:
        try:
            return await attempt()
        except NotYet as pending:
            delay_s = pending.delay_s
        except Exception as error:
            after = delay_after(error)
            if after is None:
                raise
            delay_s = after
        await asyncio.sleep(delay_s)


def retrying_in_thread(
    attempt: Callable[[], T],
    delay_after: Callable[[Exception], float | None] = _never,
    sleep: Callable[[float], object] = time.sleep,
) -> T:
    """The same in a thread, with another way to `sleep` if the wait can be interrupted."""
    while True:
        try:
            return attempt()
        except NotYet as pending:
            delay_s = pending.delay_s
        except Exception as error:
            after = delay_after(error)
            if after is None:
                raise
            delay_s = after
        sleep(delay_s)


def exponential_delay_s(
    failures: int,
    *,
    first_s: float,
    max_s: float,
    jitter: float = 0.0,
    rng: random.Random | None = None,
) -> float:
    """
    Seconds to wait after so many `failures` (from 1).

    `first_s`, doubled with each failure up to `max_s`, and shortened at random by up to the share
    `jitter`, so that clients do not retry at the same time.
    """
    delay_s = min(first_s * 2.0 ** min(failures - 1, 30), max_s)
    return delay_s * (1 - jitter * (rng or random).random()) if jitter else delay_s


def is_retryable(error: BaseException) -> bool:
    """
    Whether a request may be retried; every layer uses this function.

    Connection errors, timeouts, damaged responses, 408, 409, 429 and 5xx.
    """
    if isinstance(error, APIConnectionError):
        return True
    if isinstance(error, APIResponseValidationError):
        return error.garbled
    if not isinstance(error, APIStatusError):
        return False
    verdict_header = error.response.headers.get("x-should-retry", "").strip().lower()
    if verdict_header in ("true", "false"):
        return verdict_header == "true"
    return error.status_code in (408, 409, 429) or error.status_code >= 500


def is_user_error(error: BaseException) -> bool:
    """
    Whether the request was wrong, rather than the service or the network (requirement E1).

    Checks the exception itself, then its cause, then its context. The first one that can be
    classified decides. 408, 409, 410 and 429 are not user errors (upstream counts some as such).
    """
    to_visit, seen = [error], set()
    while to_visit:
        link = to_visit.pop()
        if id(link) in seen:
            continue
        seen.add(id(link))
        if (found := _is_user_error_alone(link)) is not None:
            return found
        to_visit += [each for each in (link.__context__, link.__cause__) if each is not None]
    return False


def _is_user_error_alone(error: BaseException) -> bool | None:
    """Classifies one exception without its cause and context; None if that is not possible."""
    category = getattr(error, "category", None)
    if category is not None:
        return str(getattr(category, "value", category)) == "user"
    status = getattr(error, "status_code", None)
    if isinstance(status, int) and status >= 400:
        return status < 500 and status not in (408, 409, 410, 429)
    return False if isinstance(error, APIConnectionError) else None


def retry_after_s(headers: Mapping[str, str], *, now: datetime) -> float | None:
    """The delay that the server asks for, in any of its three forms; None if it has none."""
    seconds: float | None = None
    if (text := headers.get("retry-after-ms")) is not None:
        seconds = _number(text)
        seconds = None if seconds is None else seconds / 1000
    if seconds is None and (text := headers.get("retry-after")) is not None:
        seconds = _number(text)
        if seconds is None:
            seconds = _until(text, now)
    if seconds is None or not seconds > 0:
        return None
    return min(seconds, MAX_RETRY_AFTER_S)


def requested_delay_s(error: APIError, now: datetime) -> float | None:
    """The delay that the response asks for (Retry-After); None if it has none."""
    if isinstance(error, APIStatusError):
        return retry_after_s(error.response.headers, now=now)
    return None


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _until(text: str, now: datetime) -> float | None:
    from email.utils import parsedate_to_datetime

    try:
        then = parsedate_to_datetime(text)
    except (TypeError, ValueError):
        return None
    if then.tzinfo is None:  # "-0000" means UTC of unknown origin
        then = then.replace(tzinfo=UTC)
    return (then - now).total_seconds()


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Exponential delays with jitter, up to a total time. The server's Retry-After comes first."""

    first_delay_s: float = 0.5
    max_delay_s: float = 10.0
    jitter: float = 0.25
    #: No new attempt starts later than this after the first one.
    give_up_s: float = 300.0

    def delay_s(
        self,
        failures: int,
        error: BaseException,
        *,
        elapsed_s: float,
        now: datetime,
        rng: random.Random,
    ) -> float | None:
        """Seconds to wait after so many `failures` (from 1), or None to give up."""
        if not is_retryable(error):
            return None
        delay = None
        if isinstance(error, APIStatusError):
            delay = retry_after_s(error.response.headers, now=now)
        if delay is None:
            delay = exponential_delay_s(
                failures,
                first_s=self.first_delay_s,
                max_s=self.max_delay_s,
                jitter=self.jitter,
                rng=rng,
            )
        left = self.give_up_s - elapsed_s
        if left <= 0:
            return None
        # The last attempt is made at the deadline, not skipped before it.
        return min(delay, left)


@dataclass(unsafe_hash=True)
class RetryConfig:
    """How a `SamplingClient` retries. Every field is applied, and survives pickling."""

    #: Samples of one client that may run at the same time; None leaves it to the server's limit.
    max_connections: int | None = 1000
    #: Seconds without any finished sample before all waiting samples fail.
    progress_timeout: float = 120 * 60
    retry_delay_base: float = 0.5
    retry_delay_max: float = 10.0
    jitter_factor: float = 0.25
    enable_retry_logic: bool = True
    enable_stuck_detection: bool = True
    #: More exceptions to retry; HTTP statuses are decided by `is_retryable`.
    retryable_exceptions: tuple[type[Exception], ...] = (TimeoutError, APIConnectionError)

    def __post_init__(self) -> None:
        if self.max_connections is not None and self.max_connections <= 0:
            raise ValueError(
                f"max_connections is {self.max_connections}; it must be above zero, "
                "or None for no client-side limit."
            )
        if not self.progress_timeout > 0:
            raise ValueError(
                f"progress_timeout is {self.progress_timeout}; it must be above zero (seconds). "
                "Set enable_stuck_detection=False to wait without a limit."
            )
        for name in ("retry_delay_base", "retry_delay_max", "jitter_factor"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be zero or more.")

    def delay_s(self, failures: int, *, rng: random.Random) -> float:
        """
        Seconds before a sample is retried.

        Args:
            failures: How often it failed, from 1.
            rng: Source of the random part.

        Returns:
            The seconds.

        Example:
            import random

            pause_s = tinkex.RetryConfig().delay_s(3, rng=random.Random(0))
        """
        delay = exponential_delay_s(
            failures, first_s=self.retry_delay_base, max_s=self.retry_delay_max
        )
        delay += delay * self.jitter_factor * rng.uniform(-1, 1)
        return min(max(delay, 0.0), self.retry_delay_max)
