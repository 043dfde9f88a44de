"""Pages: neighbours where possible, shared where asked, never lost."""

import random

import pytest

from tinkex.engine.sampling.kv_pages import GROWTH, Holding, Pages


def spans(holding: Holding) -> list[tuple[int, int]]:
    return [(span.first, span.count) for span in holding.spans]


def opened(pages: Pages, count: int, most: int | None = None) -> Holding:
    holding = pages.open(count, most=count if most is None else most)
    assert holding is not None
    return holding


def test_pages_of_a_sequence_lie_together_and_grow_in_place() -> None:
    pages = Pages(64, 16)
    first, second = opened(pages, 2, most=6), opened(pages, 3, most=3)
    for _ in range(4):
        assert pages.extend(first, most=6)
    assert spans(first) == [(0, 6)]
    assert spans(second) == [(6, 3)]


def test_a_promise_is_kept_only_as_long_as_there_are_other_pages() -> None:
    pages = Pages(4, 16)
    first = opened(pages, 1, most=4)
    second = opened(pages, 2, most=2)
    assert pages.available == 1
    assert spans(first) == [(0, 1)]
    assert sorted(page for f, n in spans(second) for page in range(f, f + n)) == [2, 3]
    assert pages.extend(first, most=4)
    assert spans(first) == [(0, 2)]
    assert not pages.extend(first, most=4)


def test_no_more_than_a_few_pages_are_promised() -> None:
    pages = Pages(200, 16)
    opened(pages, 1, most=200)
    assert spans(opened(pages, 1, most=200)) == [(1 + GROWTH, 1)]


def test_too_few_pages_are_an_answer_and_change_nothing() -> None:
    pages = Pages(3, 16)
    opened(pages, 2)
    assert pages.open(2, most=2) is None
    assert pages.available == 1


def test_scattered_pages_serve_when_no_run_is_left() -> None:
    pages = Pages(6, 16)
    holdings = [opened(pages, 1) for _ in range(6)]
    for index in (1, 3, 4):
        pages.close(holdings[index])
    assert spans(opened(pages, 3)) == [(1, 1), (3, 2)]


def test_forks_share_full_pages_until_the_last_holder_leaves() -> None:
    pages = Pages(8, 4)
    prompt = opened(pages, 3)
    forks = [pages.fork(prompt, 2) for _ in range(2)]
    assert spans(prompt) == [(0, 2), (2, 1)]
    assert prompt.shared_spans == 1
    pages.close(prompt)
    assert pages.available == 6
    assert pages.extend(forks[0], most=4)
    assert forks[0].page_count == 3
    pages.close(forks[0])
    assert pages.available == 6
    pages.close(forks[1])
    assert pages.available == 8


def test_rows_follow_the_spans() -> None:
    pages = Pages(6, 4)
    holdings = [opened(pages, 1) for _ in range(6)]
    pages.close(holdings[1])
    pages.close(holdings[4])
    scattered = opened(pages, 2)
    assert list(pages.rows(scattered, 6)) == [(4, 8), (16, 18)]
    assert [pages.row(scattered, position) for position in (0, 3, 4, 5)] == [4, 7, 16, 17]
    with pytest.raises(IndexError):
        pages.row(scattered, 8)


@pytest.mark.parametrize("seed", range(10))
def test_random_use_never_loses_or_doubles_a_page(seed: int) -> None:
    rng = random.Random(seed)
    pages = Pages(rng.randint(1, 60), 4)
    held: list[Holding] = []
    for _ in range(200):
        act = rng.random()
        if act < 0.35:
            count = rng.randint(1, 8)
            holding = pages.open(count, most=count + rng.randint(0, 30))
            if holding is not None:
                assert holding.page_count == count
                held.append(holding)
        elif act < 0.6 and held:
            holding = rng.choice(held)
            before = holding.page_count
            grew = pages.extend(holding, most=before + rng.randint(1, 30))
            assert holding.page_count == before + grew
        elif act < 0.75 and held:
            parent = rng.choice(held)
            shared = rng.randint(0, parent.page_count)
            held.append(pages.fork(parent, shared))
        elif held:
            pages.close(held.pop(rng.randrange(len(held))))
        used = {p for h in held for s in h.spans for p in range(s.first, s.first + s.count)}
        assert len(used) == pages.count - pages.available
        for holding in held:  # what is not shared belongs to one holding alone
            own = [
                p
                for s in holding.spans[holding.shared_spans :]
                for p in range(s.first, s.first + s.count)
            ]
            others = {
                p
                for other in held
                if other is not holding
                for s in other.spans
                for p in range(s.first, s.first + s.count)
            }
            assert not others.intersection(own)
    for holding in held:
        pages.close(holding)
    assert pages.available == pages.count
