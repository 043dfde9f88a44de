"""Pages of the KV cache: page tables of sequences, sharing of pages, and the prefix cache.

A page holds the keys and values of `size` tokens, one slot each. Pages of a sequence are allocated
contiguously if possible, because a CPU reads a contiguous range in place but must copy scattered
pages; correctness does not depend on it.

The prefix cache finds a full page by all tokens from the start of the sequence to the end of the
page. Sequences with the same prefix and the same weights share its pages and do not compute them
again. Cached pages that no sequence uses are idle; the least recently used are evicted when pages
are needed. This module handles page numbers only; the sampler has the tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tinkex.engine.sampling.state_slots import StateSlots

_USED, _FREE, _RESERVED, _IDLE = 0, 1, 2, 3

#: The weights that computed the keys and values of a page: the folder of a sampler adapter, or None
#: for the base model. Sequences share pages only if they use the same weights.
WeightsId = str | None

#: Free pages reserved after those of a sequence. With fewer, long sequences would not stay
#: contiguous. With more, most of the cache would be reserved, and no sequence would be contiguous.
MAX_RESERVED_PAGES = 16


@dataclass(slots=True)
class Extent:
    """Contiguous pages."""

    first: int
    count: int


@dataclass(slots=True)
class PageTable:
    """The pages of one sequence, in the order of its tokens."""

    extents: list[Extent] = field(default_factory=list)
    #: The first `shared_extents` of `extents` have pages that other sequences share. They are never
    #: written or extended.
    shared_extents: int = 0
    #: Free pages after the last extent. Other sequences use them only if nothing else is free.
    reserved: range = range(0)
    #: Number of pages in all extents.
    page_count: int = 0

    def add_page(self, page: int) -> None:
        """Adds a page at the end: to the last extent if it follows it and may be extended."""
        last = self.extents[-1] if len(self.extents) > self.shared_extents else None
        if last is not None and last.first + last.count == page:
            last.count += 1
            self.page_count += 1
        else:
            self.add_extent(page, 1)

    def add_extent(self, first: int, count: int) -> None:
        self.extents.append(Extent(first, count))
        self.page_count += count


@dataclass(slots=True, eq=False)
class _CachedPage:
    """A full page in the tree of cached prefixes."""

    page: int
    #: The dict that contains it: the children of the previous page, or the roots of a prefix tree.
    siblings: dict[tuple[int, ...], _CachedPage]
    tokens: tuple[int, ...]
    children: dict[tuple[int, ...], _CachedPage] = field(default_factory=dict)
    #: The slot of the kept state of recurrent layers after this page.
    state: int | None = None

    def forget_state(self) -> None:
        self.state = None


class Pages:
    """
    All pages of a KV cache. If too few pages are available, methods return None or False.

    At most `max_idle` idle pages are kept for the prefix cache; 0 disables it.
    """

    def __init__(
        self, count: int, size: int, *, max_idle: int = 0, states: StateSlots | None = None
    ) -> None:
        self.count = count
        #: Of models with recurrent layers.
        self.states = states
        #: Tokens in a page.
        self.size = size
        self._state = bytearray([_FREE]) * count
        self._users = [0] * count
        self._available = count
        self._max_idle = max_idle
        self._prefix_trees: dict[tuple[WeightsId, str], dict[tuple[int, ...], _CachedPage]] = {}
        self._cached: dict[int, _CachedPage] = {}
        #: Cached pages that no sequence uses, least recently used first.
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Pages that can be allocated, including idle cached pages."""
        return self._available

    @property
    def caches_prefixes(self) -> bool:
        return self._max_idle > 0

    @property
    def idle(self) -> int:
        """Number of cached pages that no sequence uses."""
        return len(self._idle)

    def needed(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def fits(self, tokens: int) -> bool:
        """Whether the whole cache can hold a sequence of this many tokens."""
        return self.needed(tokens) <= self.count

    def allocate(
        self, count: int, *, max_pages: int, cached: Sequence[int] = ()
    ) -> PageTable | None:
        """
        Allocates `count` pages for a sequence that will never have more than `max_pages`.

        The first are the `cached` pages, as returned by `find`; the others are new.
        """
        if self.pages_taken(count, cached) > self._available:
            return None
        page_table = PageTable()
        self._acquire(page_table, cached)
        if count > len(cached):
            self._add_extents(page_table, count - len(cached), max_pages - len(cached))
        return page_table

    def pages_taken(self, count: int, cached: Sequence[int]) -> int:
        """By how many pages `allocate` with the same arguments reduces `available`."""
        return count - sum(1 for page in cached if self._state[page] == _USED)

    # -- prefix cache -----------------------------------------------------------------------------

    def find(
        self, weights_id: WeightsId, tokens: Sequence[int], max_pages: int, *, owner: str = ""
    ) -> list[int]:
        """
        The cached pages of the longest cached prefix of `tokens`, at most `max_pages`.

        Only pages of the same owner: a cache hit would reveal the prompts of other owners.
        """
        found: list[int] = []
        entries = self._prefix_trees.get((weights_id, owner))
        while entries and len(found) < max_pages:
            begin = len(found) * self.size
            entry = entries.get(tuple(tokens[begin : begin + self.size]))
            if entry is None:
                break
            found.append(entry.page)
            entries = entry.children
        return found

    def insert(
        self,
        weights_id: WeightsId,
        tokens: Sequence[int],
        page_table: PageTable,
        *,
        owner: str = "",
    ) -> None:
        """
        Adds the full, computed pages of `tokens` to the prefix cache.

        These pages are never written again. Tokens that are cached already keep their page.
        """
        if not self._max_idle:
            return
        roots = siblings = self._prefix_trees.setdefault((weights_id, owner), {})
        pages = (
            p
            for extent in page_table.extents
            for p in range(extent.first, extent.first + extent.count)
        )
        for index, page in zip(range(len(tokens) // self.size), pages, strict=False):
            # If a page of the table is cached, then for these tokens: no need to look them up.
            entry = self._cached.get(page)
            if entry is None:
                key = tuple(tokens[index * self.size : (index + 1) * self.size])
                entry = siblings.get(key)
                if entry is None:
                    entry = siblings[key] = _CachedPage(page, siblings, key)
                    self._cached[page] = entry
            siblings = entry.children
        if not roots:
            del self._prefix_trees[weights_id, owner]

    def last_state(self, cached: Sequence[int]) -> tuple[int, int | None]:
        """How many of these cached pages come before the last kept state, and its slot."""
        for count in range(len(cached), 0, -1):
            state = self._cached[cached[count - 1]].state
            if state is not None:
                return count, state
        return 0, None

    def keep_state(
        self, weights_id: WeightsId, tokens: Sequence[int], *, owner: str = ""
    ) -> int | None:
        """
        A slot for the state after these tokens, which are full cached pages.

        None if there is one already, if the pages are not cached, or if no slot is free.
        """
        count = len(tokens) // self.size
        cached = self.find(weights_id, tokens, count, owner=owner)
        if self.states is None or not count or len(cached) < count:
            return None
        entry = self._cached[cached[-1]]
        if entry.state is None:
            entry.state = self.states.keep(entry.forget_state)
            return entry.state
        return None

    def evict(self, weights_id: WeightsId) -> None:
        """Removes all pages computed with these weights from the prefix cache."""
        for key in [key for key in self._prefix_trees if key[0] == weights_id]:
            for entry in list(self._prefix_trees.pop(key).values()):
                self._remove(entry)

    def _acquire(self, page_table: PageTable, cached: Iterable[int]) -> None:
        for page in cached:
            self._users[page] += 1
            if self._state[page] == _IDLE:
                del self._idle[page]
                self._state[page] = _USED
                self._available -= 1
            page_table.add_page(page)
        page_table.shared_extents = len(page_table.extents)

    def _remove(self, entry: _CachedPage) -> None:
        """Removes a page and all its descendants from the cache. Sequences keep pages they use."""
        entry.siblings.pop(entry.tokens, None)
        removed = [entry]
        while removed:
            one = removed.pop()
            removed += one.children.values()
            del self._cached[one.page]
            if one.state is not None and self.states is not None:
                self.states.release(one.state)
            if self._state[one.page] == _IDLE:
                del self._idle[one.page]
                self._state[one.page] = _FREE

    def _evict_idle(self, max_idle: int) -> None:
        while len(self._idle) > max(0, max_idle):
            self._remove(self._cached[next(iter(self._idle))])

    # -- pages of one sequence --------------------------------------------------------------------

    def extend(self, page_table: PageTable, *, max_pages: int) -> bool:
        """Adds one page at the end. Returns False if no page is available."""
        if not self._available:
            return False
        if not self._extend_in_place(page_table):
            self._release_reserved(page_table)
            self._add_extents(page_table, 1, max_pages - page_table.page_count)
        return True

    def fork(self, page_table: PageTable, page_count: int) -> PageTable:
        """
        A second page table that shares the first `page_count` pages.

        Neither table may write to the shared pages. Both have them in the same extents.
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
        return PageTable(extents=extents, shared_extents=len(extents), page_count=page_count)

    def release(self, page_table: PageTable) -> None:
        """Releases all pages; pages that other sequences share stay in use."""
        self._release_reserved(page_table)
        # In reverse order, so that the end of a prefix is evicted before its start.
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
        page_table.extents, page_table.shared_extents, page_table.page_count = [], 0, 0
        self._evict_idle(self._max_idle)

    def slot_ranges(self, page_table: PageTable, tokens: int) -> Iterator[tuple[int, int]]:
        """The contiguous slot ranges (start, stop) of the first `tokens` tokens."""
        left = tokens
        for extent in page_table.extents:
            if left <= 0:
                return
            start = extent.first * self.size
            length = min(left, extent.count * self.size)
            yield start, start + length
            left -= length

    def slot(self, page_table: PageTable, position: int) -> int:
        """The cache slot of the token at `position` of its sequence."""
        left = position
        for extent in page_table.extents:
            capacity = extent.count * self.size
            if left < capacity:
                return extent.first * self.size + left
            left -= capacity
        raise IndexError(
            f"position {position} is outside the page table, which has slots for "
            f"{position - left} tokens"
        )

    def _mark_shared(self, page_table: PageTable, page_count: int) -> None:
        """Marks the first pages as shared, and splits the extent in which they end."""
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
        """Extends the last extent by one page if the next page is free or reserved for it."""
        if len(page_table.extents) <= page_table.shared_extents:
            return False
        extent = page_table.extents[-1]
        page = extent.first + extent.count
        if page >= self.count or self._state[page] in (_USED, _IDLE):
            return False
        if self._state[page] == _RESERVED and page not in page_table.reserved:
            return False
        self._claim(page)
        page_table.add_page(page)
        page_table.reserved = range(page + 1, max(page + 1, page_table.reserved.stop))
        return True

    def _add_extents(self, page_table: PageTable, count: int, max_pages: int) -> None:
        """Adds `count` pages in as few extents as possible. They must be available."""
        with_reserve = max(count, min(max_pages, count + MAX_RESERVED_PAGES))
        if self._idle:
            # Evict a few idle pages for a reservation, but never all of them.
            room = count + min(with_reserve - count, len(self._idle) // 8)
            self._evict_idle(len(self._idle) - max(0, room - self._state.count(_FREE)))
        for wanted in (with_reserve, count):
            first = self._state.find(bytes([_FREE]) * wanted)
            if first >= 0:
                for page in range(first, first + count):
                    self._claim(page)
                page_table.add_extent(first, count)
                page_table.reserved = range(first + count, first + wanted)
                for page in page_table.reserved:
                    self._state[page] = _RESERVED
                return
        # Free pages first, then reserved ones, from the end of a reservation.
        for kind, find in ((_FREE, self._state.find), (_RESERVED, self._state.rfind)):
            while count and (page := find(kind)) >= 0:
                self._claim(page)
                count -= 1
                page_table.add_page(page)
        page_table.reserved = range(0)

    def _claim(self, page: int) -> None:
        self._state[page] = _USED
        self._users[page] = 1
        self._available -= 1

    def _release_reserved(self, page_table: PageTable) -> None:
        for page in page_table.reserved:
            # Another sequence may have claimed it.
            if self._state[page] == _RESERVED:
                self._state[page] = _FREE
        page_table.reserved = range(0)
