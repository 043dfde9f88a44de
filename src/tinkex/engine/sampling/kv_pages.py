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

_HELD, _FREE, _RESERVED, _IDLE = 0, 1, 2, 3

#: Under which weights tokens were computed; pages of different versions never meet.
Version = str | None

#: So many free pages behind a sequence's own are kept for it. Fewer would scatter long sequences,
#: more would scatter everybody once most of the cache is reserved.
MAX_RESERVED_PAGES = 16


@dataclass(slots=True)
class Extent:
    """Pages that lie together."""

    first: int
    count: int


@dataclass(slots=True)
class PageTable:
    """The pages of one sequence, in the order of its tokens."""

    extents: list[Extent] = field(default_factory=list)
    #: The first so many extents belong to others too and are never written or lengthened.
    shared_extents: int = 0
    #: Free pages behind the last extent that others leave alone as long as they can.
    reserved: range = range(0)

    @property
    def page_count(self) -> int:
        return sum(extent.count for extent in self.extents)


@dataclass(slots=True, eq=False)
class _CachedPage:
    """A full page in the tree of known beginnings."""

    page: int
    #: Where it hangs: the children of the page before it, or the beginnings of a version.
    siblings: dict[tuple[int, ...], _CachedPage]
    tokens: tuple[int, ...]
    children: dict[tuple[int, ...], _CachedPage] = field(default_factory=dict)


class Pages:
    """
    All pages of a cache. Not enough is an answer, not an error: callers wait or make room.

    At most `max_idle` pages are kept for beginnings that nobody uses; 0 remembers nothing.
    """

    def __init__(self, count: int, size: int, *, max_idle: int = 0) -> None:
        self.count = count
        #: Tokens in a page.
        self.size = size
        self._state = bytearray([_FREE]) * count
        self._users = [0] * count
        self._available = count
        self._max_idle = max_idle
        self._prefix_trees: dict[tuple[Version, str], dict[tuple[int, ...], _CachedPage]] = {}
        self._cached: dict[int, _CachedPage] = {}
        #: Remembered pages that nobody holds, the least recently used first.
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Pages that can be had, remembered ones that nobody holds included."""
        return self._available

    @property
    def caches_prefixes(self) -> bool:
        return self._max_idle > 0

    @property
    def idle(self) -> int:
        """Pages kept only because somebody may begin with the same tokens again."""
        return len(self._idle)

    def needed(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def fits(self, tokens: int) -> bool:
        """Whether a sequence of so many tokens could ever run."""
        return self.needed(tokens) <= self.count

    def allocate(
        self, count: int, *, max_pages: int, cached: Sequence[int] = ()
    ) -> PageTable | None:
        """
        `count` pages for a sequence that will never have more than `max_pages`.

        The first of them are the `known` ones, as `find` named them; the rest are new.
        """
        if self.pages_taken(count, cached) > self._available:
            return None
        page_table = PageTable()
        self._acquire(page_table, cached)
        if count > len(cached):
            self._add_extents(page_table, count - len(cached), max_pages - len(cached))
        return page_table

    def pages_taken(self, count: int, cached: Sequence[int]) -> int:
        """By how many fewer pages are available after `open` with the same arguments."""
        return count - sum(1 for page in cached if self._state[page] == _HELD)

    # -- known beginnings -------------------------------------------------------------------------

    def find(
        self, version: Version, tokens: Sequence[int], max_pages: int, *, owner: str = ""
    ) -> list[int]:
        """
        The remembered pages of the longest beginning of `tokens`, no more than `max_pages`.

        Only those of the same owner: a page that is found shows that somebody asked just this.
        """
        found: list[int] = []
        known = self._prefix_trees.get((version, owner))
        while known and len(found) < max_pages:
            begin = len(found) * self.size
            entry = known.get(tuple(tokens[begin : begin + self.size]))
            if entry is None:
                break
            found.append(entry.page)
            known = entry.children
        return found

    def insert(
        self, version: Version, tokens: Sequence[int], page_table: PageTable, *, owner: str = ""
    ) -> None:
        """
        The full pages of `tokens`, which lie computed in `page_table`, can be found from now on.

        Nobody writes to them any more. What is known already stays where it is.
        """
        if not self._max_idle:
            return
        beginnings = siblings = self._prefix_trees.setdefault((version, owner), {})
        pages = (
            p
            for extent in page_table.extents
            for p in range(extent.first, extent.first + extent.count)
        )
        for index, page in zip(range(len(tokens) // self.size), pages, strict=False):
            mine = tuple(tokens[index * self.size : (index + 1) * self.size])
            entry = siblings.get(mine)
            if entry is None:
                entry = siblings[mine] = _CachedPage(page, siblings, mine)
                self._cached[page] = entry
            siblings = entry.children
        if not beginnings:
            del self._prefix_trees[version, owner]

    def evict(self, version: Version) -> None:
        """Nothing computed under these weights will be asked for again."""
        for key in [key for key in self._prefix_trees if key[0] == version]:
            for entry in list(self._prefix_trees.pop(key).values()):
                self._remove(entry)

    def _acquire(self, page_table: PageTable, cached: Iterable[int]) -> None:
        for page in cached:
            self._users[page] += 1
            if self._state[page] == _IDLE:
                del self._idle[page]
                self._state[page] = _HELD
                self._available -= 1
            last = page_table.extents[-1] if page_table.extents else None
            if last is not None and last.first + last.count == page:
                last.count += 1
            else:
                page_table.extents.append(Extent(page, 1))
        page_table.shared_extents = len(page_table.extents)

    def _remove(self, entry: _CachedPage) -> None:
        """Forgets a page and whatever goes on from it; who holds one of them keeps it."""
        entry.siblings.pop(entry.tokens, None)
        leaving = [entry]
        while leaving:
            one = leaving.pop()
            leaving += one.children.values()
            del self._cached[one.page]
            if self._state[one.page] == _IDLE:
                del self._idle[one.page]
                self._state[one.page] = _FREE

    def _evict_idle(self, max_idle: int) -> None:
        while len(self._idle) > max(0, max_idle):
            self._remove(self._cached[next(iter(self._idle))])

    # -- pages of one sequence --------------------------------------------------------------------

    def extend(self, page_table: PageTable, *, max_pages: int) -> bool:
        """One more page at the end; False when there is none."""
        if not self._available:
            return False
        if not self._extend_in_place(page_table):
            self._release_reserved(page_table)
            self._add_extents(page_table, 1, max_pages - page_table.page_count)
        return True

    def fork(self, page_table: PageTable, page_count: int) -> PageTable:
        """
        A second page_table of the first `page_count` pages, to be extended with its own.

        From now on neither writes to these pages, and both have them in the same extents.
        """
        self._mark_shared(page_table, page_count)
        extents, left = [], page_count
        for extent in page_table.extents:
            if not left:
                break
            extents.append(Extent(extent.first, extent.count))
            left -= extent.count
            for page in range(extent.first, extent.first + extent.count):
                self._users[page] += 1
        return PageTable(extents=extents, shared_extents=len(extents))

    def release(self, page_table: PageTable) -> None:
        """Gives the pages back; those that somebody else holds too stay held."""
        self._release_reserved(page_table)
        # Backwards, so that the end of a beginning is forgotten before its start.
        for extent in reversed(page_table.extents):
            for page in reversed(range(extent.first, extent.first + extent.count)):
                self._users[page] -= 1
                if not self._users[page]:
                    self._available += 1
                    if page in self._cached:
                        self._state[page] = _IDLE
                        self._idle[page] = None
                    else:
                        self._state[page] = _FREE
        page_table.extents, page_table.shared_extents = [], 0
        self._evict_idle(self._max_idle)

    def slot_ranges(self, page_table: PageTable, tokens: int) -> Iterator[tuple[int, int]]:
        """The runs of cache rows, (start, stop), that hold the first `tokens` tokens."""
        left = tokens
        for extent in page_table.extents:
            if left <= 0:
                return
            start = extent.first * self.size
            length = min(left, extent.count * self.size)
            yield start, start + length
            left -= length

    def slot(self, page_table: PageTable, position: int) -> int:
        """The cache row of one token."""
        for extent in page_table.extents:
            capacity = extent.count * self.size
            if position < capacity:
                return extent.first * self.size + position
            position -= capacity
        raise IndexError(f"the page_table has no page for the token {position} behind its end")

    def _mark_shared(self, page_table: PageTable, page_count: int) -> None:
        """Marks the first pages as shared, with a border between extents behind them."""
        shared = sum(extent.count for extent in page_table.extents[: page_table.shared_extents])
        shared = max(shared, page_count)
        extents: list[Extent] = []
        begin = 0
        for extent in page_table.extents:
            inside = min(max(page_count - begin, 0), extent.count)
            for first, count in (
                (extent.first, inside),
                (extent.first + inside, extent.count - inside),
            ):
                if count:
                    extents.append(Extent(first, count))
                    begin += count
                    if begin == shared:
                        page_table.shared_extents = len(extents)
        page_table.extents = extents

    def _extend_in_place(self, page_table: PageTable) -> bool:
        """The last extent one page longer, if the next page is not held."""
        if len(page_table.extents) <= page_table.shared_extents:
            return False
        extent = page_table.extents[-1]
        page = extent.first + extent.count
        if page >= self.count or self._state[page] in (_HELD, _IDLE):
            return False
        if self._state[page] == _RESERVED and page not in page_table.reserved:
            return False
        self._claim(page)
        extent.count += 1
        page_table.reserved = range(page + 1, max(page + 1, page_table.reserved.stop))
        return True

    def _add_extents(self, page_table: PageTable, count: int, max_pages: int) -> None:
        """`count` pages in as few extents as there are; the caller knows that they are there."""
        roomy = max(count, min(max_pages, count + MAX_RESERVED_PAGES))
        if self._idle:
            # Room to grow is worth a few remembered pages, never all of them.
            room = count + min(roomy - count, len(self._idle) // 8)
            self._evict_idle(len(self._idle) - max(0, room - self._state.count(_FREE)))
        for wanted in (roomy, count):
            first = self._state.find(bytes([_FREE]) * wanted)
            if first >= 0:
                for page in range(first, first + count):
                    self._claim(page)
                page_table.extents.append(Extent(first, count))
                page_table.reserved = range(first + count, first + wanted)
                for page in page_table.reserved:
                    self._state[page] = _RESERVED
                return
        # What is free comes first, then what is reserved, from the far end of the promise.
        for kind, find in ((_FREE, self._state.find), (_RESERVED, self._state.rfind)):
            while count and (page := find(kind)) >= 0:
                self._claim(page)
                count -= 1
                last = (
                    page_table.extents[-1]
                    if len(page_table.extents) > page_table.shared_extents
                    else None
                )
                if last is not None and last.first + last.count == page:
                    last.count += 1
                else:
                    page_table.extents.append(Extent(page, 1))
        page_table.reserved = range(0)

    def _claim(self, page: int) -> None:
        self._state[page] = _HELD
        self._users[page] = 1
        self._available -= 1

    def _release_reserved(self, page_table: PageTable) -> None:
        for page in page_table.reserved:
            # Somebody in need may have taken it since.
            if self._state[page] == _RESERVED:
                self._state[page] = _FREE
        page_table.reserved = range(0)
