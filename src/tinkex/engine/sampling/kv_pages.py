"""Pages of the key-value cache: who holds which, who shares them, and what they can be found by.

A page holds the keys and values of a few tokens. Pages are handed out next to each other where that
is possible, because a CPU reads a run of neighbours in place and would have to copy scattered ones;
nothing depends on it. A full page can be remembered by the tokens that led to it: whoever begins
with the same tokens under the same weights holds it too and computes nothing for it. Remembered
pages that nobody holds stay until somebody needs the room, the least recently used going first.
Knows nothing of tensors: rows are numbers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

_HELD, _FREE, _PROMISED, _IDLE = 0, 1, 2, 3

#: Under which weights tokens were computed; pages of different versions never meet.
Version = str | None

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


@dataclass(slots=True, eq=False)
class _Remembered:
    """A full page in the tree of known beginnings."""

    page: int
    #: Where it hangs: the children of the page before it, or the beginnings of a version.
    siblings: dict[tuple[int, ...], _Remembered]
    tokens: tuple[int, ...]
    children: dict[tuple[int, ...], _Remembered] = field(default_factory=dict)


class Pages:
    """
    All pages of a cache. Not enough is an answer, not an error: callers wait or make room.

    At most `most_idle` pages are kept for beginnings that nobody uses; 0 remembers nothing.
    """

    def __init__(self, count: int, size: int, *, most_idle: int = 0) -> None:
        self.count = count
        #: Tokens in a page.
        self.size = size
        self._state = bytearray([_FREE]) * count
        self._users = [0] * count
        self._available = count
        self._most_idle = most_idle
        self._beginnings: dict[tuple[Version, str], dict[tuple[int, ...], _Remembered]] = {}
        self._remembered: dict[int, _Remembered] = {}
        #: Remembered pages that nobody holds, the least recently used first.
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Pages that can be had, remembered ones that nobody holds included."""
        return self._available

    @property
    def remembers(self) -> bool:
        return self._most_idle > 0

    @property
    def idle(self) -> int:
        """Pages kept only because somebody may begin with the same tokens again."""
        return len(self._idle)

    def needed(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def fits(self, tokens: int) -> bool:
        """Whether a sequence of so many tokens could ever run."""
        return self.needed(tokens) <= self.count

    def open(self, count: int, *, most: int, known: Sequence[int] = ()) -> Holding | None:
        """
        `count` pages for a sequence that will never have more than `most`.

        The first of them are the `known` ones, as `find` named them; the rest are new.
        """
        if self.taken(count, known) > self._available:
            return None
        holding = Holding()
        self._hold(holding, known)
        if count > len(known):
            self._begin_span(holding, count - len(known), most - len(known))
        return holding

    def taken(self, count: int, known: Sequence[int]) -> int:
        """By how many fewer pages are available after `open` with the same arguments."""
        return count - sum(1 for page in known if self._state[page] == _HELD)

    # -- known beginnings -------------------------------------------------------------------------

    def find(
        self, version: Version, tokens: Sequence[int], most: int, *, owner: str = ""
    ) -> list[int]:
        """
        The remembered pages of the longest beginning of `tokens`, no more than `most`.

        Only those of the same owner: a page that is found shows that somebody asked just this.
        """
        found: list[int] = []
        known = self._beginnings.get((version, owner))
        while known and len(found) < most:
            begin = len(found) * self.size
            entry = known.get(tuple(tokens[begin : begin + self.size]))
            if entry is None:
                break
            found.append(entry.page)
            known = entry.children
        return found

    def remember(
        self, version: Version, tokens: Sequence[int], holding: Holding, *, owner: str = ""
    ) -> None:
        """
        The full pages of `tokens`, which lie computed in `holding`, can be found from now on.

        Nobody writes to them any more. What is known already stays where it is.
        """
        if not self._most_idle:
            return
        beginnings = siblings = self._beginnings.setdefault((version, owner), {})
        pages = (p for span in holding.spans for p in range(span.first, span.first + span.count))
        for index, page in zip(range(len(tokens) // self.size), pages, strict=False):
            mine = tuple(tokens[index * self.size : (index + 1) * self.size])
            entry = siblings.get(mine)
            if entry is None:
                entry = siblings[mine] = _Remembered(page, siblings, mine)
                self._remembered[page] = entry
            siblings = entry.children
        if not beginnings:
            del self._beginnings[version, owner]

    def forget(self, version: Version) -> None:
        """Nothing computed under these weights will be asked for again."""
        for key in [key for key in self._beginnings if key[0] == version]:
            for entry in list(self._beginnings.pop(key).values()):
                self._drop(entry)

    def _hold(self, holding: Holding, known: Iterable[int]) -> None:
        for page in known:
            self._users[page] += 1
            if self._state[page] == _IDLE:
                del self._idle[page]
                self._state[page] = _HELD
                self._available -= 1
            last = holding.spans[-1] if holding.spans else None
            if last is not None and last.first + last.count == page:
                last.count += 1
            else:
                holding.spans.append(Span(page, 1))
        holding.shared_spans = len(holding.spans)

    def _drop(self, entry: _Remembered) -> None:
        """Forgets a page and whatever goes on from it; who holds one of them keeps it."""
        entry.siblings.pop(entry.tokens, None)
        leaving = [entry]
        while leaving:
            one = leaving.pop()
            leaving += one.children.values()
            del self._remembered[one.page]
            if self._state[one.page] == _IDLE:
                del self._idle[one.page]
                self._state[one.page] = _FREE

    def _evict(self, most_idle: int) -> None:
        while len(self._idle) > max(0, most_idle):
            self._drop(self._remembered[next(iter(self._idle))])

    # -- pages of one sequence --------------------------------------------------------------------

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
        # Backwards, so that the end of a beginning is forgotten before its start.
        for span in reversed(holding.spans):
            for page in reversed(range(span.first, span.first + span.count)):
                self._users[page] -= 1
                if not self._users[page]:
                    self._available += 1
                    if page in self._remembered:
                        self._state[page] = _IDLE
                        self._idle[page] = None
                    else:
                        self._state[page] = _FREE
        holding.spans, holding.shared_spans = [], 0
        self._evict(self._most_idle)

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
        if page >= self.count or self._state[page] in (_HELD, _IDLE):
            return False
        if self._state[page] == _PROMISED and page not in holding.promised:
            return False
        self._take(page)
        span.count += 1
        holding.promised = range(page + 1, max(page + 1, holding.promised.stop))
        return True

    def _begin_span(self, holding: Holding, count: int, most: int) -> None:
        """`count` pages in as few spans as there are; the caller knows that they are there."""
        roomy = max(count, min(most, count + GROWTH))
        if self._idle:
            # Room to grow is worth a few remembered pages, never all of them.
            room = count + min(roomy - count, len(self._idle) // 8)
            self._evict(len(self._idle) - max(0, room - self._state.count(_FREE)))
        for wanted in (roomy, count):
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
