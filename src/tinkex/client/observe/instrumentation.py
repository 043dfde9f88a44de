"""
Metrics and traces of the clients in this process.

`METRICS` holds counters, gauges and histograms; `Operation` measures one operation of the user.
With `TINKEX_OTEL=1` or `Settings.otel` (extra `otel`) both are exported to OpenTelemetry, through
the providers that the program configures. This is the only module that imports opentelemetry.
"""

from __future__ import annotations

import asyncio
import functools
import math
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from tinkex.client.background_loop import after_fork
from tinkex.client.errors import TinkerError
from tinkex.extras import MissingExtra, needs

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Observation
    from opentelemetry.trace import Span as OtelSpan

__all__ = ["METRICS", "Histogram", "Metrics", "metrics_snapshot", "reset_metrics"]


#: Buckets per power of two: a percentile is off by at most 6 %.
_PARTS = 8
_OCTAVES = 40  # from 1 µs to 12 days
#: Maximum number of metric names; further names are counted as `OTHER`. Names come from this
#: package and the protocol, so only a defect can reach the limit.
MAX_NAMES = 1000
OTHER = "other"


class Histogram:
    """Durations, kept as counts per bucket."""

    __slots__ = ("_buckets", "count", "largest", "total")

    def __init__(self) -> None:
        self._buckets = [0] * (_PARTS * (_OCTAVES + 1))
        self.count = 0
        self.total = 0.0
        self.largest = 0.0

    def observe(self, seconds: float) -> None:
        fraction, octave = math.frexp(max(seconds, 1e-6) * 1e6)
        bucket = octave * _PARTS + int(fraction * 2 * _PARTS) - 2 * _PARTS
        self._buckets[min(bucket, len(self._buckets) - 1)] += 1
        self.count += 1
        self.total += seconds
        self.largest = max(self.largest, seconds)

    def percentile(self, share: float) -> float:
        """The value that `share` of all observations do not exceed."""
        wanted, counted = share * self.count, 0
        for bucket, count in enumerate(self._buckets):
            counted += count
            if count and counted >= wanted:
                octave, part = divmod(bucket, _PARTS)
                middle = (_PARTS + part + 0.5) / _PARTS * 2.0**octave * 1e-6
                return min(middle, self.largest)
        return 0.0

    def snapshot(self) -> dict[str, float]:
        return {
            "count": self.count,
            "mean": self.total / self.count if self.count else 0.0,
            "p50": self.percentile(0.50),
            "p95": self.percentile(0.95),
            "p99": self.percentile(0.99),
            "max": self.largest,
        }


class Metrics:
    """
    Counters, gauges and histograms in families: `count("retries", "asample")` is `retries.asample`.

    Each call takes one lock and a few dictionary lookups: about a microsecond.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._gauges: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._times: defaultdict[tuple[str, str], Histogram] = defaultdict(Histogram)

    def count(self, family: str, name: str, amount: float = 1) -> None:
        with self._lock:
            self._counters[_bounded(self._counters, family, name)] += amount

    def change(self, family: str, name: str, amount: float) -> None:
        """Change a gauge: +1 at the start, -1 at the end."""
        with self._lock:
            self._gauges[_bounded(self._gauges, family, name)] += amount

    def observe(self, family: str, name: str, seconds: float) -> None:
        with self._lock:
            self._times[_bounded(self._times, family, name)].observe(seconds)

    def request_started(self, endpoint: str, sent_bytes: int) -> None:
        """A request is being sent."""
        with self._lock:
            self._counters[_bounded(self._counters, "requests", endpoint)] += 1
            self._counters[_bounded(self._counters, "bytes_sent", endpoint)] += sent_bytes
            self._gauges[_bounded(self._gauges, "requests_in_flight", endpoint)] += 1

    def request_finished(
        self, endpoint: str, status: str, received_bytes: int, seconds: float
    ) -> None:
        """The response has arrived, or the request has failed."""
        with self._lock:
            self._counters[_bounded(self._counters, "bytes_received", endpoint)] += received_bytes
            self._counters[_bounded(self._counters, "statuses", status)] += 1
            self._gauges[_bounded(self._gauges, "requests_in_flight", endpoint)] -= 1
            self._times[_bounded(self._times, "request", endpoint)].observe(seconds)

    # -- reading ---------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        with self._lock:
            return {
                "counters": {".".join(key): value for key, value in sorted(self._counters.items())},
                "gauges": {".".join(key): value for key, value in sorted(self._gauges.items())},
                "latency_s": {
                    ".".join(key): times.snapshot() for key, times in sorted(self._times.items())
                },
            }

    def family(self, family: str) -> dict[str, float]:
        """The counters, or else the gauges, of one family by name."""
        with self._lock:
            for figures in (self._counters, self._gauges):
                if found := {
                    name: value for (kind, name), value in figures.items() if kind == family
                }:
                    return found
        return {}

    def reset(self) -> None:
        """Clear counters and histograms. Gauges stay: they count what is still in flight."""
        with self._lock:
            self._counters.clear()
            self._times.clear()


def _bounded(known: dict[tuple[str, str], Any], family: str, name: str) -> tuple[str, str]:
    key = (family, name)
    return key if key in known or len(known) < MAX_NAMES else (family, OTHER)


METRICS = Metrics()


@after_fork
def _reset_after_fork() -> None:
    """In a forked child: the counts belong to the parent, and its lock may be held."""
    METRICS.__init__()  # type: ignore[misc]  # the object is referred to everywhere


def metrics_snapshot() -> dict[str, Any]:
    """
    The metrics of all clients in this process.

    Returns:
        `counters`, `gauges` and `latency_s`, each by name, such as `requests.asample` or
        `operations_done.sample`; see docs/guides/observing.md.

    Example:
        print(tinkex.metrics_snapshot()["counters"])
    """
    return METRICS.snapshot()


def reset_metrics() -> None:
    """
    Clear counters and latencies of this process; gauges stay.

    Example:
        tinkex.reset_metrics()
    """
    METRICS.reset()


# -- OpenTelemetry -------------------------------------------------------------------------------

#: Families of `METRICS` that are exported, by kind of instrument.
_COUNTERS = ("requests", "retries", "rate_limited", "bytes_sent", "bytes_received")
_GAUGES = ("requests_in_flight", "operations_in_flight", "samples_waiting")


class Span:
    """The trace span of one operation."""

    __slots__ = ("_durations", "_inner", "_name")

    def __init__(self, name: str, inner: OtelSpan, durations: Any) -> None:
        self._name = name
        self._inner = inner
        self._durations = durations

    @contextmanager
    def current(self) -> Iterator[None]:
        with needs("TINKEX_OTEL (Settings.otel)"):
            from opentelemetry import context, trace

        token = context.attach(trace.set_span_in_context(self._inner))
        try:
            yield
        finally:
            context.detach(token)

    def end(self, outcome: str, error: BaseException | None, seconds: float) -> None:
        with needs("TINKEX_OTEL (Settings.otel)"):
            from opentelemetry.trace import Status, StatusCode

        attributes = {"operation": self._name, "outcome": outcome}
        self._durations.record(seconds, attributes)
        self._inner.set_attribute("tinkex.outcome", outcome)
        if outcome == "failed":
            # The type, not the message, which may quote what was sent.
            self._inner.set_attribute("error.type", type(error).__name__)
            self._inner.set_status(Status(StatusCode.ERROR))
        self._inner.end()


class Tracing:
    """The tracer and the instruments of this process."""

    def __init__(self) -> None:
        try:
            with needs("TINKEX_OTEL (Settings.otel)"):
                from opentelemetry import metrics as meters
                from opentelemetry import propagate, trace
        except MissingExtra as error:
            raise TinkerError(f"{error}. Or turn it off.") from error
        self._propagate = propagate
        self._tracer = trace.get_tracer("tinkex")
        meter = meters.get_meter("tinkex")
        self._durations = meter.create_histogram(
            "tinkex.operation.duration", unit="s", description="operations, call to result"
        )
        for family in _COUNTERS:
            meter.create_observable_counter(
                f"tinkex.{family}", callbacks=[functools.partial(_observed, family)]
            )
        for family in _GAUGES:
            meter.create_observable_up_down_counter(
                f"tinkex.{family}", callbacks=[functools.partial(_observed, family)]
            )

    def begin(self, name: str, about: str) -> Span:
        with needs("TINKEX_OTEL (Settings.otel)"):
            from opentelemetry.trace import SpanKind

        inner = self._tracer.start_span(
            f"tinkex.{name}", kind=SpanKind.CLIENT, attributes={"tinkex.subject": about}
        )
        return Span(name, inner, self._durations)

    def inject(self, headers: dict[str, str]) -> None:
        """Add `traceparent` (and what the program's other propagators send)."""
        self._propagate.inject(headers)


def _observed(family: str, options: CallbackOptions) -> Iterable[Observation]:
    with needs("TINKEX_OTEL (Settings.otel)"):
        from opentelemetry.metrics import Observation

    key = "operation" if family.startswith("operations") else "endpoint"
    return [Observation(value, {key: name}) for name, value in METRICS.family(family).items()]


@functools.cache
def tracing() -> Tracing:
    """Created once. Raises `TinkerError` if the extra is missing."""
    return Tracing()


# -- operations ----------------------------------------------------------------------------------

T = TypeVar("T")


class Operation:
    """One operation of the user: counted and traced from its start to the end of its task."""

    __slots__ = ("_metrics", "_name", "_span", "_started")

    def __init__(self, name: str, tracing: Tracing | None, about: str) -> None:
        self._name = name
        self._started = monotonic()
        self._span: Span | None = None if tracing is None else tracing.begin(name, about)
        self._metrics = METRICS
        self._metrics.change("operations_in_flight", name, 1)

    def current(self) -> AbstractContextManager[None]:
        """Tasks created inside belong to this operation, and so do their requests."""
        return nullcontext() if self._span is None else self._span.current()

    def run(self, make: Callable[[], asyncio.Task[T]]) -> asyncio.Task[T]:
        """Create the task. If that fails, the operation has failed."""
        try:
            with self.current():
                task = make()
        except BaseException as error:
            self.end(error)
            raise
        # A callback, not code in the task: a task cancelled before its start never runs any.
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self.end(asyncio.CancelledError() if task.cancelled() else task.exception())

    def end(self, error: BaseException | None) -> None:
        taken_s = monotonic() - self._started
        outcome = "done" if error is None else "failed"
        if isinstance(error, asyncio.CancelledError):
            outcome = "cancelled"
        self._metrics.change("operations_in_flight", self._name, -1)
        self._metrics.count(f"operations_{outcome}", self._name)
        self._metrics.observe("operation", self._name, taken_s)
        if self._span is not None:
            self._span.end(outcome, error, taken_s)


def operations_in_flight() -> bool:
    """Whether an operation of any client in this process is in progress."""
    return any(count > 0 for count in METRICS.family("operations_in_flight").values())


@contextmanager
def measured(name: str, tracing: Tracing | None, about: str) -> Iterator[None]:
    """Context manager form of `Operation`, for code that runs inside one coroutine."""
    operation = Operation(name, tracing, about)
    try:
        with operation.current():
            yield
    except BaseException as error:
        operation.end(error)
        raise
    operation.end(None)


@lru_cache(maxsize=100)
def operation_name(request_type: str) -> str:
    """`ForwardBackward`, the server's name, is `forward_backward` for users."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", request_type).lower()


def endpoint(path: str) -> str:
    """The metric name of a path: its first segment, without ids."""
    return path.partition("?")[0].partition("/")[0]
