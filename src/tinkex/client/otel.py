"""
Spans and metrics for OpenTelemetry (extra `otel`), where `TINKEX_OTEL=1` or `Settings.otel` asks.

The only place that imports opentelemetry, and only then. Where the figures go is up to the
program, which sets the providers; without any, all of this does nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tinkex.client import metrics
from tinkex.client.errors import TinkerError
from tinkex.extras import MissingExtra, needs

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Observation
    from opentelemetry.trace import Span as OtelSpan

#: Families of `metrics` that are exported as they are, and the kind of instrument for each.
_COUNTERS = ("requests", "retries", "rate_limited", "bytes_sent", "bytes_received")
_LEVELS = ("requests_in_flight", "operations_in_flight", "samples_waiting")


class Span:
    """One operation as a trace shows it."""

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
            # Its kind, not its words: these may quote what was sent.
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
            raise TinkerError(f"{error}. Or switch it off.") from error
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
        for family in _LEVELS:
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
        """Add `traceparent` (and what else the program's propagators send)."""
        self._propagate.inject(headers)


def _observed(family: str, options: CallbackOptions) -> Iterable[Observation]:
    with needs("TINKEX_OTEL (Settings.otel)"):
        from opentelemetry.metrics import Observation

    key = "operation" if family.startswith("operations") else "endpoint"
    return [Observation(value, {key: name}) for name, value in metrics.here.family(family).items()]


@functools.cache
def tracing() -> Tracing:
    """Made once. Raises `TinkerError` where the extra is missing."""
    return Tracing()
