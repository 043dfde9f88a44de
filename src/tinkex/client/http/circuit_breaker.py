"""
A circuit breaker: after several consecutive failures, requests fail immediately for a while.

Off unless `Settings.breaker` (`TINKEX_BREAKER=5/30`) enables it. There is one for each kind of
request in `ServiceLimits`; `Calls.with_retries` consults it. It reads a clock and never sleeps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Literal

from tinkex.client.errors import APIConnectionError, APIStatusError, TinkerError

if TYPE_CHECKING:
    from tinkex.client.http.transport import Request

State = Literal["closed", "open", "half-open"]

_ON = frozenset({"1", "true", "yes", "on"})
_OFF = frozenset({"0", "false", "no", "off"})


@dataclass(frozen=True, kw_only=True)
class BreakerPolicy:
    """When to stop sending requests to a service, and for how long."""

    #: Consecutive failed attempts that open the circuit.
    failures: int = 5
    #: Seconds until one attempt is allowed, to test whether the service is back.
    open_s: float = 30.0

    def __post_init__(self) -> None:
        if self.failures < 1 or not self.open_s > 0:
            raise TinkerError(
                f"A circuit breaker needs at least 1 failure and more than 0 seconds, not "
                f"{self.failures} failures and {self.open_s:g} s."
            )

    @classmethod
    def parse(cls, text: str) -> BreakerPolicy | None:
        """
        The policy that a text names.

        Args:
            text: `on`, `off`, or `FAILURES/SECONDS`.

        Returns:
            The policy; None for `off`.

        Raises:
            TinkerError: Any other text.

        Example:
            policy = tinkex.BreakerPolicy.parse("5/30")
        """
        word = text.strip().lower()
        if word in _OFF:
            return None
        if word in _ON:
            return cls()
        failures, _, seconds = word.partition("/")
        try:
            return cls(failures=int(failures), open_s=float(seconds))
        except ValueError:
            raise TinkerError(
                f"TINKEX_BREAKER={text!r} is neither on, off nor FAILURES/SECONDS such as 5/30."
            ) from None


class CircuitOpenError(APIConnectionError):
    """Not sent: the service failed too many times in a row. Says when requests are sent again."""

    #: Seconds until the next attempt is allowed.
    retry_in_s: float

    def __init__(self, request: Request, message: str, retry_in_s: float) -> None:
        super().__init__(request, message)
        self.retry_in_s = retry_in_s


def counts_as_failure(error: BaseException) -> bool:
    """Whether the error shows an unhealthy service. Rate limits and client errors do not."""
    if isinstance(error, APIStatusError):
        return error.status_code >= 500
    return isinstance(error, APIConnectionError)


class Breaker:
    """
    Closed until enough consecutive failures; then open; then half-open, with one attempt running.

    That attempt closes it, or opens it again.
    """

    def __init__(self, policy: BreakerPolicy, clock: Callable[[], float] = monotonic) -> None:
        self._policy = policy
        self._clock = clock
        self._failures = 0
        self._opened_at: float | None = None
        self._probe_since: float | None = None

    @property
    def state(self) -> State:
        if self._opened_at is None:
            return "closed"
        return "open" if self._left_s() > 0 else "half-open"

    def _left_s(self) -> float:
        if self._opened_at is None:
            return 0.0
        return max(0.0, self._opened_at + self._policy.open_s - self._clock())

    def blocked_s(self) -> float | None:
        """
        None if a request may be sent; otherwise the seconds until the next attempt.

        After None, the caller sends its request and reports the outcome.
        """
        if self._opened_at is None:
            return None
        if (left := self._left_s()) > 0:
            return left
        if self._probe_since is not None:
            # An attempt without a reported outcome (cancelled) does not block the circuit forever.
            left = self._probe_since + self._policy.open_s - self._clock()
            if left > 0:
                return left
        self._probe_since = self._clock()
        return None

    def succeeded(self) -> None:
        self._failures = 0
        self._opened_at = self._probe_since = None

    def failed(self, error: BaseException) -> None:
        if not counts_as_failure(error):
            self.succeeded()
            return
        self._failures += 1
        if self._opened_at is not None or self._failures >= self._policy.failures:
            self._opened_at = self._clock()
            self._probe_since = None
