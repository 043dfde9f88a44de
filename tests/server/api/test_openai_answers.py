"""Stop texts are cut from an answer, whatever the pieces it arrives in."""

import pytest

from tinkex.server.api.openai_answers import StopText


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
