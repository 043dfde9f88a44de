"""A partial sample stores each token once, even if pieces repeat, arrive late or leave a gap."""

import math

from hypothesis import given
from hypothesis import strategies as st

from tinkex.wire.partial_sample import PartialSample, PartialSampleReader, SampledTokens


def test_tokens_sent_again_after_a_restart_are_stored_once() -> None:
    sample = PartialSample()
    reader = PartialSampleReader(sample)
    assert sample.add(0, [1, 2, 3], [-1.0, -2.0, -3.0], start=0)
    assert reader.read_new() == [SampledTokens(0, [1, 2, 3], [-1.0, -2.0, -3.0])]
    assert not sample.add(0, [1, 2], [-1.0, -2.0], start=0)
    assert sample.add(0, [3, 4], [-3.0, -4.0], start=2)
    assert reader.read_new() == [SampledTokens(0, [4], [-4.0])]
    assert reader.read_new() == []


def test_tokens_after_a_gap_wait_for_the_whole_response() -> None:
    sample = PartialSample()
    assert not sample.add(0, [9], [-1.0], start=5)
    assert sample.count(0) == 0
    assert sample.add(0, [1, 2, 3, 4, 5, 9], [-1.0] * 6, start=0)
    assert sample.count(0) == 6


def test_a_late_reader_gets_everything_and_sequences_stay_separate() -> None:
    sample = PartialSample()
    sample.add(1, [5], [-0.5], start=0)
    sample.add(0, [6, 7], [-0.5, -0.25], start=0)
    sample.add(1, [8], [-0.125], start=1)
    assert PartialSampleReader(sample).read_new() == [
        SampledTokens(0, [6, 7], [-0.5, -0.25]),
        SampledTokens(1, [5, 8], [-0.5, -0.125]),
    ]


def test_a_service_that_records_no_logprobs_gives_nan() -> None:
    sample = PartialSample()
    sample.add(0, [1, 2], None, start=0)
    assert all(math.isnan(number) for number in sample.slice(0, 0, 2).logprobs)


@given(
    whole=st.lists(st.integers(0, 2**31 - 1), max_size=30),
    pieces=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=20),
    reads=st.sets(st.integers(0, 20)),
)
def test_any_pieces_of_one_sequence_read_at_any_time_give_it_once(
    whole: list[int], pieces: list[tuple[int, int]], reads: set[int]
) -> None:
    sample, seen = PartialSample(), list[int]()
    reader = PartialSampleReader(sample)
    for at, (start, length) in enumerate(pieces):
        piece = whole[start : start + length]
        sample.add(0, piece, [0.0] * len(piece), start=start)
        if at in reads:
            seen += [token for news in reader.read_new() for token in news.tokens]
    sample.add(0, whole, [0.0] * len(whole), start=0)
    seen += [token for news in reader.read_new() for token in news.tokens]
    assert seen == whole
