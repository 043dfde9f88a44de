"""Stop texts are cut from an answer, whatever the pieces it arrives in; numbers are those of JSON."""

import pytest

from tinkex.server.api.openai_answers import IMPOSSIBLE, StopText, event_of, token_logprobs


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("stops", "text", "shown"),
    [
        (["END"], "a ENEND b", "a EN"),
        (["\n\n", "x"], "one\ntwo\n\nthree x", "one\ntwo"),
        (["aab"], "aaaab", "aa"),
        (["zz"], "no stop z", "no stop z"),
        ([], "anything", "anything"),
    ],
)
def test_a_text_ends_before_its_stop(stops: list[str], text: str, shown: str, size: int) -> None:
    stop = StopText(stops)
    parts = [stop.add(text[at : at + size]) for at in range(0, len(text), size)]
    assert "".join(parts) + stop.end() == shown


def test_an_infinite_logprob_is_a_number_of_json() -> None:
    (one,) = token_logprobs([5], [float("-inf")], [[(6, float("nan"))]])
    assert (one.logprob, one.tops) == (IMPOSSIBLE, [(6, IMPOSSIBLE)])
    (unknown,) = token_logprobs([5], None, None)
    assert (unknown.logprob, unknown.tops) == (None, [])
    assert event_of({"a": 1}) == b'data: {"a":1}\n\n'
