"""Pages of the key-value cache: who holds which, who shares them, and where they lie together.

A page holds the keys and values of a few tokens. Pages are handed out next to each other where that
is possible, because a CPU reads a run of neighbours in place and would have to copy scattered ones;
nothing depends on it. Knows nothing of tensors: rows are numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

_HELD, _FREE, _PROMISED = 0, 1, 2

#: So many free pages behind a sequence's own are kept for it. Fewer would scatter long sequences,
#: more would scatter everybody once most of the cache is promised.
GROWTH = 16


@dataclass(slots=True)
class Span:
    """Pages that lie together."""

    first: int
    count: int


@dataclass(slots=True)
class Holding:
    """The pages of one sequence, in the order of its tokens."""

    spans: list[Span] = field(default_factory=list)
    #: The first so many spans belong to others too and are never written or lengthened.
    shared_spans: int = 0
    #: Free pages behind the last span that others leave alone as long as they can.
    promised: range = range(0)

    @property
    def page_count(self) -> int:
        return sum(span.count for span in self.spans)


class Pages:
    """All pages of a cache. Not enough is an answer, not an error: callers wait or make room."""

    def __init__(self, count: int, size: int) -> None:
        self.count = count
        #: Tokens in a page.
        self.size = size
        self._state = bytearray([_FREE]) * count
        self._users = [0] * count
        self._available = count

    @property
    def available(self) -> int:
        return self._available

    def needed(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def open(self, count: int, *, most: int) -> Holding | None:
        """`count` new pages for a sequence that will never have more than `most`."""
        if count > self._available:
            return None
        holding = Holding()
        self._begin_span(holding, count, most)
        return holding

    def extend(self, holding: Holding, *, most: int) -> bool:
        """One more page at the end; False when there is none."""
        if not self._available:
            return False
        if not self._grow(holding):
            self._break_promise(holding)
            self._begin_span(holding, 1, most - holding.page_count)
        return True

    def fork(self, holding: Holding, page_count: int) -> Holding:
        """
        A second holding of the first `page_count` pages, to be extended with its own.

        From now on neither writes to these pages, and both have them in the same spans.
        """
        self._share(holding, page_count)
        spans, left = [], page_count
        for span in holding.spans:
            if not left:
                break
            spans.append(Span(span.first, span.count))
            left -= span.count
            for page in range(span.first, span.first + span.count):
                self._users[page] += 1
        return Holding(spans=spans, shared_spans=len(spans))

    def close(self, holding: Holding) -> None:
        """Gives the pages back; those that somebody else holds too stay held."""
        self._break_promise(holding)
        for span in holding.spans:
            for page in range(span.first, span.first + span.count):
                self._users[page] -= 1
                if not self._users[page]:
                    self._state[page] = _FREE
                    self._available += 1
        holding.spans = []

    def rows(self, holding: Holding, tokens: int) -> Iterator[tuple[int, int]]:
        """The runs of cache rows, (start, stop), that hold the first `tokens` tokens."""
        left = tokens
        for span in holding.spans:
            if left <= 0:
                return
            start = span.first * self.size
            length = min(left, span.count * self.size)
            yield start, start + length
            left -= length

    def row(self, holding: Holding, position: int) -> int:
        """The cache row of one token."""
        for span in holding.spans:
            capacity = span.count * self.size
            if position < capacity:
                return span.first * self.size + position
            position -= capacity
        raise IndexError(f"the holding has no page for the token {position} behind its end")

    def _share(self, holding: Holding, page_count: int) -> None:
        """Marks the first pages as shared, with a border between spans behind them."""
        shared = sum(span.count for span in holding.spans[: holding.shared_spans])
        shared = max(shared, page_count)
        spans: list[Span] = []
        begin = 0
        for span in holding.spans:
            inside = min(max(page_count - begin, 0), span.count)
            for first, count in ((span.first, inside), (span.first + inside, span.count - inside)):
                if count:
                    spans.append(Span(first, count))
                    begin += count
                    if begin == shared:
                        holding.shared_spans = len(spans)
        holding.spans = spans

    def _grow(self, holding: Holding) -> bool:
        """The last span one page longer, if the next page is not held."""
        if len(holding.spans) <= holding.shared_spans:
            return False
        span = holding.spans[-1]
        page = span.first + span.count
        if page >= self.count or self._state[page] == _HELD:
            return False
        if self._state[page] == _PROMISED and page not in holding.promised:
            return False
        self._take(page)
        span.count += 1
        holding.promised = range(page + 1, max(page + 1, holding.promised.stop))
        return True

    def _begin_span(self, holding: Holding, count: int, most: int) -> None:
        """`count` pages in as few spans as there are; the caller knows that they are there."""
        for wanted in (max(count, min(most, count + GROWTH)), count):
            first = self._state.find(bytes([_FREE]) * wanted)
            if first >= 0:
                for page in range(first, first + count):
                    self._take(page)
                holding.spans.append(Span(first, count))
                holding.promised = range(first + count, first + wanted)
                for page in holding.promised:
                    self._state[page] = _PROMISED
                return
        # What is free comes first, then what is promised, from the far end of the promise.
        for kind, find in ((_FREE, self._state.find), (_PROMISED, self._state.rfind)):
            while count and (page := find(kind)) >= 0:
                self._take(page)
                count -= 1
                last = holding.spans[-1] if len(holding.spans) > holding.shared_spans else None
                if last is not None and last.first + last.count == page:
                    last.count += 1
                else:
                    holding.spans.append(Span(page, 1))
        holding.promised = range(0)

    def _take(self, page: int) -> None:
        self._state[page] = _HELD
        self._users[page] = 1
        self._available -= 1

    def _break_promise(self, holding: Holding) -> None:
        for page in holding.promised:
            # Somebody in need may have taken it since.
            if self._state[page] == _PROMISED:
                self._state[page] = _FREE
        holding.promised = range(0)
