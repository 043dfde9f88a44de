"""A sample while it grows: each token once, whatever is told twice, late or with a gap."""

import math

from hypothesis import given
from hypothesis import strategies as st

from tinkex.wire.partial_sample import PartialSample, PartialSampleReader, SampledTokens


def test_tokens_sent_again_after_a_restart_are_stored_once() -> None:
    growing = PartialSample()
    reader = PartialSampleReader(growing)
    assert growing.add(0, [1, 2, 3], [-1.0, -2.0, -3.0], start=0)
    assert reader.read_new() == [SampledTokens(0, [1, 2, 3], [-1.0, -2.0, -3.0])]
    assert not growing.add(0, [1, 2], [-1.0, -2.0], start=0)
    assert growing.add(0, [3, 4], [-3.0, -4.0], start=2)
    assert reader.read_new() == [SampledTokens(0, [4], [-4.0])]
    assert reader.read_new() == []


def test_tokens_after_a_gap_wait_for_the_whole_response() -> None:
    growing = PartialSample()
    assert not growing.add(0, [9], [-1.0], start=5)
    assert growing.count(0) == 0
    assert growing.add(0, [1, 2, 3, 4, 5, 9], [-1.0] * 6, start=0)
    assert growing.count(0) == 6


def test_a_late_reader_gets_everything_and_sequences_stay_separate() -> None:
    growing = PartialSample()
    growing.add(1, [5], [-0.5], start=0)
    growing.add(0, [6, 7], [-0.5, -0.25], start=0)
    growing.add(1, [8], [-0.125], start=1)
    assert PartialSampleReader(growing).read_new() == [
        SampledTokens(0, [6, 7], [-0.5, -0.25]),
        SampledTokens(1, [5, 8], [-0.5, -0.125]),
    ]


def test_a_service_that_records_no_logprobs_gives_nan() -> None:
    growing = PartialSample()
    growing.add(0, [1, 2], None, start=0)
    assert all(math.isnan(number) for number in growing.slice(0, 0, 2).logprobs)


@given(
    whole=st.lists(st.integers(0, 2**31 - 1), max_size=30),
    told=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=20),
    reads=st.sets(st.integers(0, 20)),
)
def test_any_pieces_of_one_sequence_read_at_any_time_give_it_once(
    whole: list[int], told: list[tuple[int, int]], reads: set[int]
) -> None:
    growing, seen = PartialSample(), list[int]()
    reader = PartialSampleReader(growing)
    for at, (start, length) in enumerate(told):
        piece = whole[start : start + length]
        growing.add(0, piece, [0.0] * len(piece), start=start)
        if at in reads:
            seen += [token for news in reader.read_new() for token in news.tokens]
    growing.add(0, whole, [0.0] * len(whole), start=0)
    seen += [token for news in reader.read_new() for token in news.tokens]
    assert seen == whole
