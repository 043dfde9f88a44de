"""Pages are contiguous if possible, can be shared, and are never lost."""

import random

import pytest

from tinkex.engine.sampling.kv_pages import MAX_RESERVED_PAGES, Pages, PageTable


def extents(page_table: PageTable) -> list[tuple[int, int]]:
    return [(extent.first, extent.count) for extent in page_table.extents]


def allocated(pages: Pages, count: int, max_pages: int | None = None) -> PageTable:
    page_table = pages.allocate(count, max_pages=count if max_pages is None else max_pages)
    assert page_table is not None
    return page_table


def test_pages_of_a_sequence_are_contiguous_and_extended_in_place() -> None:
    pages = Pages(64, 16)
    first, second = allocated(pages, 2, max_pages=6), allocated(pages, 3, max_pages=3)
    for _ in range(4):
        assert pages.extend(first, max_pages=6)
    assert extents(first) == [(0, 6)]
    assert extents(second) == [(6, 3)]


def test_reserved_pages_are_used_only_if_no_others_are_free() -> None:
    pages = Pages(4, 16)
    first = allocated(pages, 1, max_pages=4)
    second = allocated(pages, 2, max_pages=2)
    assert pages.available == 1
    assert extents(first) == [(0, 1)]
    assert sorted(page for f, n in extents(second) for page in range(f, f + n)) == [2, 3]
    assert pages.extend(first, max_pages=4)
    assert extents(first) == [(0, 2)]
    assert not pages.extend(first, max_pages=4)


def test_the_number_of_reserved_pages_is_limited() -> None:
    pages = Pages(200, 16)
    allocated(pages, 1, max_pages=200)
    assert extents(allocated(pages, 1, max_pages=200)) == [(1 + MAX_RESERVED_PAGES, 1)]


def test_a_failed_allocation_changes_nothing() -> None:
    pages = Pages(3, 16)
    allocated(pages, 2)
    assert pages.allocate(2, max_pages=2) is None
    assert pages.available == 1


def test_scattered_pages_are_used_if_no_contiguous_range_is_free() -> None:
    pages = Pages(6, 16)
    page_tables = [allocated(pages, 1) for _ in range(6)]
    for index in (1, 3, 4):
        pages.release(page_tables[index])
    assert extents(allocated(pages, 3)) == [(1, 1), (3, 2)]


def test_forks_share_full_pages_until_the_last_user_releases_them() -> None:
    pages = Pages(8, 4)
    prompt = allocated(pages, 3)
    forks = [pages.fork(prompt, 2) for _ in range(2)]
    assert extents(prompt) == [(0, 2), (2, 1)]
    assert prompt.shared_extents == 1
    pages.release(prompt)
    assert pages.available == 6
    assert pages.extend(forks[0], max_pages=4)
    assert forks[0].page_count == 3
    pages.release(forks[0])
    assert pages.available == 6
    pages.release(forks[1])
    assert pages.available == 8


def test_slots_follow_the_extents() -> None:
    pages = Pages(6, 4)
    page_tables = [allocated(pages, 1) for _ in range(6)]
    pages.release(page_tables[1])
    pages.release(page_tables[4])
    scattered = allocated(pages, 2)
    assert list(pages.slot_ranges(scattered, 6)) == [(4, 8), (16, 18)]
    assert [pages.slot(scattered, position) for position in (0, 3, 4, 5)] == [4, 7, 16, 17]
    with pytest.raises(IndexError):
        pages.slot(scattered, 8)


@pytest.mark.parametrize("seed", range(10))
def test_random_use_never_loses_or_duplicates_a_page(seed: int) -> None:
    rng = random.Random(seed)
    pages = Pages(rng.randint(1, 60), 4)
    held: list[PageTable] = []
    for _ in range(200):
        act = rng.random()
        if act < 0.35:
            count = rng.randint(1, 8)
            page_table = pages.allocate(count, max_pages=count + rng.randint(0, 30))
            if page_table is not None:
                assert page_table.page_count == count
                held.append(page_table)
        elif act < 0.6 and held:
            page_table = rng.choice(held)
            before = page_table.page_count
            grew = pages.extend(page_table, max_pages=before + rng.randint(1, 30))
            assert page_table.page_count == before + grew
        elif act < 0.75 and held:
            parent = rng.choice(held)
            shared = rng.randint(0, parent.page_count)
            held.append(pages.fork(parent, shared))
        elif held:
            pages.release(held.pop(rng.randrange(len(held))))
        used = {p for h in held for s in h.extents for p in range(s.first, s.first + s.count)}
        assert len(used) == pages.count - pages.available
        for page_table in held:  # pages that are not shared belong to one page table
            assert page_table.page_count == sum(count for _, count in extents(page_table))
            own = [
                p
                for s in page_table.extents[page_table.shared_extents :]
                for p in range(s.first, s.first + s.count)
            ]
            others = {
                p
                for other in held
                if other is not page_table
                for s in other.extents
                for p in range(s.first, s.first + s.count)
            }
            assert not others.intersection(own)
    for page_table in held:
        pages.release(page_table)
    assert pages.available == pages.count
