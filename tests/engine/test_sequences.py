"""Stop conditions of a sequence."""

from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tinkex.engine.sampling.sequences import Request, SampleSequence, SamplingConfig, Stops


def decode(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode(errors="replace")


def started(stops: Stops, max_new_tokens: int) -> SampleSequence:
    request = Request(
        ticket=0,
        adapter=None,
        prompt=[1],
        samples=1,
        max_new_tokens=max_new_tokens,
        sampling=SamplingConfig(temperature=1.0, top_k=None, top_p=None, seed=0),
        stops=stops,
    )
    return SampleSequence(request=request, index=0)


def drawn(text: str, stops: Stops, *, max_new_tokens: int = 100) -> SampleSequence:
    sequence = started(stops, max_new_tokens)
    for token in text.encode():
        sequence.append(token, -0.5, None)
        if sequence.stop_reason is not None:
            break
    return sequence


def test_a_stop_token_is_part_of_the_sequence() -> None:
    sequence = drawn("ab.cd", Stops(token_ids=frozenset(b".")))
    assert (bytes(sequence.tokens), sequence.stop_reason) == (b"ab.", "stop")
    assert len(sequence.logprobs) == 3


@pytest.mark.parametrize(
    ("text", "stop", "ends"),
    [
        ("one\n\nUser: two", "\n\nUser:", "one\n\nUser:"),
        ("aab", "ab", "aab"),  # the match starts at the second a
        ("say “stop” now", "“stop”", "say “stop”"),  # three bytes for each quotation mark
        ("🙂🙂🙃 end", "🙃", "🙂🙂🙃"),
        ("nothing here", "never", "nothing here"),
    ],
)
def test_a_stop_text_ends_with_the_token_that_completes_it(text: str, stop: str, ends: str) -> None:
    sequence = drawn(text, Stops(texts=(stop,), decode=decode))
    assert bytes(sequence.tokens).decode() == ends
    assert (sequence.stop_reason == "stop") == (stop in text)


def test_any_of_several_texts_stops() -> None:
    sequence = drawn("x = 1; y", Stops(texts=("\n", ";"), decode=decode))
    assert decode(sequence.tokens) == "x = 1;"


def test_without_stops_only_the_length_ends_a_sequence() -> None:
    sequence = drawn("abcdef", Stops(), max_new_tokens=4)
    assert (decode(sequence.tokens), sequence.stop_reason) == ("abcd", "length")


def test_a_stop_at_the_last_allowed_token_is_a_stop() -> None:
    sequence = drawn("ab.", Stops(token_ids=frozenset(b".")), max_new_tokens=3)
    assert sequence.stop_reason == "stop"


@given(
    text=st.text("ab.", min_size=1, max_size=30),
    burst=st.integers(1, 9),
    max_new_tokens=st.integers(1, 40),
    stops=st.sampled_from(
        [
            Stops(),
            Stops(token_ids=frozenset(b".x")),
            Stops(texts=("ab.", "bb"), decode=decode),
            Stops(token_ids=frozenset(b"x."), texts=("aa",), decode=decode),
        ]
    ),
)
def test_several_tokens_at_once_equal_one_by_one(
    text: str, burst: int, max_new_tokens: int, stops: Stops
) -> None:
    one_by_one = drawn(text, stops, max_new_tokens=max_new_tokens)
    at_once, appended = started(stops, max_new_tokens), 0
    tokens = list(text.encode())
    for begin in range(0, len(tokens), burst):
        if at_once.stop_reason is None:
            some = tokens[begin : begin + burst]
            appended += at_once.extend(some, [-0.5] * len(some))
    assert at_once.tokens == one_by_one.tokens
    assert at_once.logprobs == one_by_one.logprobs
    assert at_once.stop_reason == one_by_one.stop_reason
    assert appended == len(at_once.tokens)
