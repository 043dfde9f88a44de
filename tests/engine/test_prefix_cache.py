"""The prefix cache: pages are found by their tokens, shared while used, and evicted."""

import hypothesis.strategies as st
from hypothesis import given, settings

from tinkex.engine.sampling.kv_pages import Pages, PageTable, WeightsId

SIZE = 2


def pages_of(page_table: PageTable) -> list[int]:
    return [
        p for extent in page_table.extents for p in range(extent.first, extent.first + extent.count)
    ]


def computed(pages: Pages, weights_id: WeightsId, tokens: list[int]) -> PageTable:
    """The pages of some tokens after a prefill."""
    known = pages.find(weights_id, tokens, (len(tokens) - 1) // SIZE)
    page_table = pages.allocate(pages.needed(len(tokens)), max_pages=50, cached=known)
    assert page_table is not None
    pages.insert(weights_id, tokens, page_table)
    return page_table


def test_full_pages_are_found_by_their_token_prefix() -> None:
    pages = Pages(16, SIZE, max_idle=16)
    held = computed(pages, "a", [1, 2, 3, 4, 5])
    first, second, _ = pages_of(held)
    assert pages.find("a", [1, 2, 3, 4, 5, 6], 9) == [first, second]
    assert pages.find("a", [1, 2, 3, 4, 5, 6], 1) == [first]
    assert pages.find("a", [1, 2, 9, 4], 9) == [first]
    assert pages.find("a", [9, 2, 3, 4], 9) == []
    assert pages.find("b", [1, 2, 3, 4], 9) == []
    assert pages.find(None, [1, 2, 3, 4], 9) == []


def test_a_cached_page_is_shared_and_stays_idle_after_its_last_user() -> None:
    pages = Pages(8, SIZE, max_idle=8)
    one = computed(pages, None, [1, 2, 3, 4])
    two = computed(pages, None, [1, 2, 3, 4])
    assert pages_of(two)[0] == pages_of(one)[0]
    # The last token is always computed again, so its page is not shared.
    assert pages_of(two)[1] != pages_of(one)[1]
    assert pages.available == 5
    pages.release(one)
    pages.release(two)
    assert pages.available == 8
    assert pages.idle == 2
    assert len(pages.find(None, [1, 2, 3, 4], 2)) == 2


def test_the_least_recently_used_prefix_is_evicted_from_its_end() -> None:
    pages = Pages(6, SIZE, max_idle=6)
    for tokens in ([1, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3]):
        pages.release(computed(pages, None, tokens))
    pages.release(computed(pages, None, [1, 1, 5]))  # uses the start of the first prefix again
    room = pages.allocate(3, max_pages=3)
    assert room is not None
    found = [len(pages.find(None, [n] * 4, 2)) for n in (1, 2, 3)]
    assert found == [1, 0, 2]


def test_the_number_of_idle_pages_is_limited() -> None:
    pages = Pages(10, SIZE, max_idle=3)
    pages.release(computed(pages, None, [1] * 10))
    assert pages.idle == 3
    assert len(pages.find(None, [1] * 10, 5)) == 3
    off = Pages(10, SIZE)
    off.release(computed(off, None, [1] * 10))
    assert (off.idle, off.find(None, [1] * 10, 5)) == (0, [])


def test_pages_of_evicted_weights_are_no_longer_found() -> None:
    pages = Pages(10, SIZE, max_idle=10)
    held = computed(pages, "a", [1, 2, 3, 4])
    pages.release(computed(pages, "a", [1, 2, 7, 8]))
    pages.release(computed(pages, "b", [1, 2, 3, 4]))
    pages.evict("a")
    pages.evict("never there")
    assert pages.find("a", [1, 2, 3, 4], 2) == []
    assert len(pages.find("b", [1, 2, 3, 4], 2)) == 2
    assert pages.idle == 2
    assert pages_of(held)
    pages.release(held)
    assert pages.idle == 2
    assert pages.available == 10


def test_cached_pages_of_a_prefix_are_not_evicted_for_its_new_pages() -> None:
    pages = Pages(4, SIZE, max_idle=4)
    pages.release(computed(pages, None, [1, 1, 2, 2, 3, 3, 4, 4]))
    known = pages.find(None, [1, 1, 2, 2, 9, 9, 9, 9], 2)
    page_table = pages.allocate(4, max_pages=4, cached=known)
    assert page_table is not None
    assert pages_of(page_table)[:2] == known
    assert len(set(pages_of(page_table))) == 4
    assert pages.available == 0
    assert pages.allocate(1, max_pages=1) is None


class ReferencePages:
    """A simple model of the pages: the content and the users of each page."""

    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        #: (weights_id, all tokens up to the page's end) of every page that was computed.
        self.content: dict[int, tuple[WeightsId, tuple[int, ...]]] = {}
        self.held: list[tuple[WeightsId, list[int], PageTable]] = []

    def begin(self, weights_id: WeightsId, tokens: list[int]) -> None:
        pages = self.pages
        known = pages.find(weights_id, tokens, (len(tokens) - 1) // SIZE)
        for index, page in enumerate(known):
            assert self.content[page] == (weights_id, tuple(tokens[: (index + 1) * SIZE]))
        count = pages.needed(len(tokens))
        before, taken = pages.available, pages.pages_taken(count, known)
        page_table = pages.allocate(count, max_pages=count + 3, cached=known)
        assert (page_table is None) == (taken > before)
        if page_table is None:
            return
        assert pages.available == before - taken
        assert pages_of(page_table)[: len(known)] == known
        self.held.append((weights_id, tokens, page_table))
        self.write(len(self.held) - 1, len(known))

    def write(self, at: int, first: int) -> None:
        """Computes the pages from `first` on; no other page table may use them."""
        weights_id, tokens, page_table = self.held[at]
        others = {p for n, (_, _, h) in enumerate(self.held) if n != at for p in pages_of(h)}
        for index in range(first, page_table.page_count):
            page = pages_of(page_table)[index]
            assert page not in others
            self.content[page] = (weights_id, tuple(tokens[: (index + 1) * SIZE]))
        self.pages.insert(weights_id, tokens, page_table)

    def grow(self, at: int, more: list[int]) -> None:
        _, tokens, page_table = self.held[at]
        begun = len(tokens) // SIZE
        tokens += more
        while self.pages.needed(len(tokens)) > page_table.page_count:
            if not self.pages.extend(page_table, max_pages=page_table.page_count + 4):
                assert self.pages.available == 0
                del tokens[page_table.page_count * SIZE :]
                break
        self.write(at, begun)

    def check(self) -> None:
        used = {page for _, _, page_table in self.held for page in pages_of(page_table)}
        assert self.pages.available == self.pages.count - len(used)
        for weights_id, tokens, page_table in self.held:
            for index, page in enumerate(pages_of(page_table)[: len(tokens) // SIZE]):
                assert self.content[page] == (weights_id, tuple(tokens[: (index + 1) * SIZE]))


WEIGHTS_IDS = st.sampled_from([None, "a"])
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=12)
ACTS = st.one_of(
    st.tuples(st.just("begin"), WEIGHTS_IDS, TOKENS),
    st.tuples(st.just("grow"), st.integers(0, 99), TOKENS),
    st.tuples(st.just("end"), st.integers(0, 99)),
    st.tuples(st.just("evict"), WEIGHTS_IDS),
)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 24), st.integers(0, 24), st.lists(ACTS, max_size=40))
def test_cached_pages_always_have_the_content_they_are_found_by(
    count: int, max_idle: int, acts: list[tuple]
) -> None:
    pages = Pages(count, SIZE, max_idle=max_idle)
    reference = ReferencePages(pages)
    for act, *arguments in acts:
        if act == "begin":
            weights_id, tokens = arguments
            reference.begin(weights_id, list(tokens))
        elif act == "evict":
            pages.evict(arguments[0])
            assert pages.find(arguments[0], [0, 0, 0], 1) == []
        elif reference.held:
            at = arguments[0] % len(reference.held)
            if act == "grow":
                reference.grow(at, list(arguments[1]))
            else:
                pages.release(reference.held.pop(at)[2])
        assert pages.idle <= max_idle
        reference.check()
    for _, _, page_table in reference.held:
        pages.release(page_table)
    assert pages.available == count
    pages.evict(None)
    pages.evict("a")
    assert pages.idle == 0


def test_a_cached_prefix_is_found_only_by_its_owner() -> None:
    """A cache hit would reveal to one owner the prompts of another."""
    pages = Pages(16, SIZE, max_idle=16)
    tokens = [1, 2, 3, 4]
    page_table = pages.allocate(2, max_pages=2)
    assert page_table
    pages.insert("a", tokens, page_table, owner="alice")
    assert len(pages.find("a", tokens, 2, owner="alice")) == 2
    assert pages.find("a", tokens, 2, owner="bob") == pages.find("a", tokens, 2) == []
    pages.evict("a")
    assert pages.find("a", tokens, 2, owner="alice") == []
