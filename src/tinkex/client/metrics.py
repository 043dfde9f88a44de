"""Counts, levels and times of every client in this process: cheap to keep, read as one plain dict."""

from __future__ import annotations

import math
import os
import threading
from collections import defaultdict
from typing import Any

__all__ = ["Histogram", "Metrics", "here", "metrics_snapshot", "reset_metrics"]

#: An octave of time is cut into so many buckets: a percentile is off by 6 % at most.
_PARTS = 8
_OCTAVES = 40  # from 1 µs to 12 days
#: Names come from our own code and the protocol, so there are few; this is a backstop.
MOST_NAMES = 1000
OTHER = "other"


class Histogram:
    """Times, of which only how many fell between two bounds is kept."""

    __slots__ = ("_buckets", "count", "most", "total")

    def __init__(self) -> None:
        self._buckets = [0] * (_PARTS * (_OCTAVES + 1))
        self.count = 0
        self.total = 0.0
        self.most = 0.0

    def observe(self, seconds: float) -> None:
        fraction, octave = math.frexp(max(seconds, 1e-6) * 1e6)
        place = octave * _PARTS + int(fraction * 2 * _PARTS) - 2 * _PARTS
        self._buckets[min(place, len(self._buckets) - 1)] += 1
        self.count += 1
        self.total += seconds
        self.most = max(self.most, seconds)

    def percentile(self, share: float) -> float:
        """What `share` of all observations do not exceed."""
        wanted, seen = share * self.count, 0
        for place, count in enumerate(self._buckets):
            seen += count
            if count and seen >= wanted:
                octave, part = divmod(place, _PARTS)
                middle = (_PARTS + part + 0.5) / _PARTS * 2.0**octave * 1e-6
                return min(middle, self.most)
        return 0.0

    def snapshot(self) -> dict[str, float]:
        return {
            "count": self.count,
            "mean": self.total / self.count if self.count else 0.0,
            "p50": self.percentile(0.50),
            "p95": self.percentile(0.95),
            "p99": self.percentile(0.99),
            "max": self.most,
        }


class Metrics:
    """
    Three kinds of figures in families: `count("retries", "asample")` is `retries.asample`.

    One lock and no more than a few dictionary look-ups each: about a microsecond.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._levels: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._times: defaultdict[tuple[str, str], Histogram] = defaultdict(Histogram)

    def count(self, family: str, name: str, amount: float = 1) -> None:
        with self._lock:
            self._counters[_bounded(self._counters, family, name)] += amount

    def change(self, family: str, name: str, amount: float) -> None:
        """Something begins (+1) or ends (-1)."""
        with self._lock:
            self._levels[_bounded(self._levels, family, name)] += amount

    def observe(self, family: str, name: str, seconds: float) -> None:
        with self._lock:
            self._times[_bounded(self._times, family, name)].observe(seconds)

    def asked(self, endpoint: str, sent_bytes: int) -> None:
        """A request leaves."""
        with self._lock:
            self._counters[_bounded(self._counters, "requests", endpoint)] += 1
            self._counters[_bounded(self._counters, "bytes_sent", endpoint)] += sent_bytes
            self._levels[_bounded(self._levels, "requests_in_flight", endpoint)] += 1

    def answered(self, endpoint: str, status: str, received_bytes: int, seconds: float) -> None:
        """Its answer is here, or it is known that none will come."""
        with self._lock:
            self._counters[_bounded(self._counters, "bytes_received", endpoint)] += received_bytes
            self._counters[_bounded(self._counters, "statuses", status)] += 1
            self._levels[_bounded(self._levels, "requests_in_flight", endpoint)] -= 1
            self._times[_bounded(self._times, "request", endpoint)].observe(seconds)

    # -- reading ---------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        with self._lock:
            return {
                "counters": {".".join(key): value for key, value in sorted(self._counters.items())},
                "gauges": {".".join(key): value for key, value in sorted(self._levels.items())},
                "latency_s": {
                    ".".join(key): times.snapshot() for key, times in sorted(self._times.items())
                },
            }

    def family(self, family: str) -> dict[str, float]:
        """The counters, or else the levels, of one family by name."""
        with self._lock:
            for figures in (self._counters, self._levels):
                if found := {
                    name: value for (kind, name), value in figures.items() if kind == family
                }:
                    return found
        return {}

    def reset(self) -> None:
        """Forget counts and times. Levels stay: what is in flight is so all the same."""
        with self._lock:
            self._counters.clear()
            self._times.clear()


def _bounded(known: dict[tuple[str, str], Any], family: str, name: str) -> tuple[str, str]:
    key = (family, name)
    return key if key in known or len(known) < MOST_NAMES else (family, OTHER)


here = Metrics()


def _forget() -> None:
    """In a forked child: the counts are the parent's, and its lock may be held."""
    here.__init__()  # type: ignore[misc]  # the object is referred to everywhere


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget)


def metrics_snapshot() -> dict[str, Any]:
    """
    What the clients of this process have done: `counters`, `gauges` and `latency_s`.

    Names are `family.name`: `requests.asample`, `operations_done.sample`. What each means:
    docs/guides/observing.md.
    """
    return here.snapshot()


def reset_metrics() -> None:
    """Start counting anew; gauges stay, being levels."""
    here.reset()
