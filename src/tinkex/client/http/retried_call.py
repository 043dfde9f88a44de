"""Repeats one request of `Calls` after failures. `retry` decides whether and when."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Generic, TypeVar

from tinkex.client.errors import (
    APIConnectionError,
    APIError,
    APIResponseValidationError,
    APIStatusError,
)
from tinkex.client.http.circuit_breaker import CircuitOpenError
from tinkex.client.http.retry import (
    LONG_WAIT_S,
    MAX_GARBLED,
    RetryPolicy,
    requested_delay_s,
    retrying,
)
from tinkex.client.http.transport import Kind, Request
from tinkex.client.observe import instrumentation
from tinkex.client.observe.waiting import Cause, Limit

if TYPE_CHECKING:
    from tinkex.client.http.typed_requests import Calls

log = logging.getLogger("tinkex.calls")

T = TypeVar("T")


class RetriedCall(Generic[T]):
    """One call of `Calls.with_retries`: its attempts, and what the user is told between them."""

    def __init__(
        self,
        calls: Calls,
        attempt_once: Callable[[], Awaitable[T]],
        *,
        path: str,
        kind: Kind,
        give_up_s: float | None,
        rate_limit_wait_s: float | None,
        rate_limit_ends: Callable[[], Limit],
    ) -> None:
        self._calls = calls
        self._attempt_once = attempt_once
        self._path = path
        self._kind = kind
        #: How long it is retried, and the setting that says so.
        self._retry_s = calls.settings.give_up_s if give_up_s is None else give_up_s
        self._setting = "TINKEX_GIVE_UP_S" if give_up_s is None else ""
        self._rate_limit_wait_s = rate_limit_wait_s
        self._rate_limit_ends = rate_limit_ends
        self._breaker = calls.breaker(kind)
        self._started = calls.clock()
        self._attempts = 0
        #: Responses that could not be decoded.
        self._garbled = 0
        #: Whether `limits.waiting` knows this call.
        self._waits = False

    async def run(self) -> T:
        calls = self._calls
        if not calls.reached and self._retry_s:
            # A server may also keep a connection waiting, instead of refusing it.
            ends_at = self._started + min(self._retry_s, calls.settings.first_contact_s)
            self._wait(calls.no_answer("no answer yet"), Limit(ends_at, "TINKEX_FIRST_CONTACT_S"))
        try:
            answer = await retrying(self._attempt, self._delay_after)
        except BaseException:
            if self._waits:
                calls.limits.waiting.leave(self)
            raise
        if self._waits:
            calls.limits.waiting.over(self)
        return answer

    async def _attempt(self) -> T:
        self._attempts += 1
        if self._calls.limits.backoff.left_s > 0:
            await self._wait_for_backoff()
        if self._breaker is None:
            return await self._attempt_once()
        if (left_s := self._breaker.blocked_s()) is not None:
            raise self._circuit_open(left_s)
        try:
            answer = await self._attempt_once()
        except APIError as error:
            self._breaker.failed(error)
            raise
        self._breaker.succeeded()
        return answer

    def _delay_after(self, error: Exception) -> float | None:
        """Seconds until the next attempt; None if this error is final."""
        if not isinstance(error, APIError) or isinstance(error, CircuitOpenError):
            return None
        self._garbled += isinstance(error, APIResponseValidationError)
        if self._garbled > MAX_GARBLED:
            return None
        calls = self._calls
        now = datetime.now(UTC)
        status = error.status_code if isinstance(error, APIStatusError) else None
        if status == 402 and self._retry_s:
            pause = calls.limits.billing.pause_s()
            if pause is not None:
                self._wait(calls.cause(error), Limit(calls.limits.billing.ends_at))
            return pause
        requested = requested_delay_s(error, now)
        if status == 429 and self._rate_limit_wait_s is not None:
            calls.note_rate_limit(self._path, error, requested or self._rate_limit_wait_s)
            return 0.0  # the next attempt waits for the shared back-off
        if not calls.reached and self._retry_s > calls.settings.first_contact_s:
            self._retry_s = calls.settings.first_contact_s
            self._setting = "TINKEX_FIRST_CONTACT_S"
        elapsed = calls.clock() - self._started
        delay = RetryPolicy(give_up_s=self._retry_s).delay_s(
            self._attempts, error, elapsed_s=elapsed, now=now, rng=calls.rng
        )
        if delay is None:
            if isinstance(error, APIConnectionError) and self._attempts > 1:
                gave_up = f"gave up after {self._attempts} attempts in {elapsed:.0f} s."
                error.explain(
                    f"{error.summary.rstrip('.')}; {gave_up}",
                    details=error.details,
                    hint=error.hint,
                )
            return None
        if status == 429:
            calls.note_rate_limit(self._path, error, requested or delay)
        self._wait(calls.cause(error), Limit(self._started + self._retry_s, self._setting))
        instrumentation.METRICS.count("retries", instrumentation.endpoint(self._path))
        log.debug("attempt %d of %s failed; retrying in %.2f s", self._attempts, self._path, delay)
        return delay

    def _wait(self, cause: Cause, limit: Limit) -> None:
        self._waits = True
        self._calls.limits.waiting.wait(
            self, cause, limit, since=self._started, notice_s=self._calls.settings.wait_notice_s
        )

    async def _wait_for_backoff(self) -> None:
        """Wait because another request was told to: all with the same limits share that."""
        limits, began = self._calls.limits, self._calls.clock()
        time_s = max(self._retry_s, LONG_WAIT_S) - (began - self._started)
        limit = Limit(began + time_s, self._setting)
        # A call that does not treat 429 as a failure may wait without limit.
        if self._rate_limit_wait_s is not None:
            time_s, limit = math.inf, self._rate_limit_ends()
        self._wait(limits.busy, limit)
        await limits.backoff.wait(time_s)
        instrumentation.METRICS.observe("wait", "backoff", self._calls.clock() - began)

    def _circuit_open(self, left_s: float) -> CircuitOpenError:
        root = self._calls.root
        return CircuitOpenError(
            Request(method="POST", url=f"{root}/api/v1/{self._path}", kind=self._kind),
            f"Connection error. {self._path} was not sent: {root} failed too many "
            f"{self._kind.value} requests in a row (Settings.breaker). Requests are sent again in "
            f"{left_s:.0f} s; retry then, or look at the server's log.",
            left_s,
        )
