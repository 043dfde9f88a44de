"""A histogram with fixed buckets, for the metrics page. One observation takes well under 1 µs."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence


class Histogram:
    """Counts values up to each bound. Not thread-safe: use it on one event loop."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        #: One for each bound, and one for larger values.
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def buckets(self) -> Iterator[tuple[str, int]]:
        """Each bound as text, and how many values were at most that large."""
        total = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            yield ("+Inf" if bound == float("inf") else f"{bound:g}"), total
