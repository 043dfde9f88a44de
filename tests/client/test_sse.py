"""Server-sent events (H11): any chunk boundaries, multi-line data, comments, BOM; read once."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tinkex.client.http.sse import Consumed, EventDecoder, EventStream, ServerSentEvent


def decode(*chunks: bytes) -> list[ServerSentEvent]:
    decoder = EventDecoder()
    return [event for chunk in chunks for event in decoder.feed(chunk)]


async def chunked(chunks: Sequence[bytes]) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


def test_an_event_has_a_name_an_id_a_wait_and_data() -> None:
    (event,) = decode(b'event: token\nid: 7\nretry: 1500\ndata: {"a": [1]}\n\n')
    assert event == ServerSentEvent("token", '{"a": [1]}', "7", 1500)
    assert event.json() == {"a": [1]}


def test_lines_of_data_are_joined_and_one_space_is_cut() -> None:
    (event,) = decode(b"data: one\ndata:two\ndata:  three\ndata\n\n")
    assert event.data == "one\ntwo\n three\n"
    assert event.event is None


def test_comments_and_unknown_fields_are_ignored() -> None:
    assert decode(b": keep-alive\n\n:\n\ncolour: red\ndata: x\n\n: more\n\n") == [
        ServerSentEvent(data="x")
    ]


def test_a_byte_order_mark_is_cut_off_at_the_beginning_only() -> None:
    assert [e.data for e in decode("\ufeffdata: a\n\ndata: \ufeffb\n\n".encode())] == [
        "a",
        "\ufeffb",
    ]


def test_an_id_stays_until_the_next_one_and_an_empty_one_clears_it() -> None:
    events = decode(
        b"id: 1\ndata: a\n\ndata: b\n\nid: 2\n\ndata: c\n\nid: x\0y\ndata: d\n\nid\ndata: e\n\n"
    )
    assert [event.id for event in events] == ["1", "1", "2", "2", None]


def test_a_name_and_a_wait_are_for_one_event_only() -> None:
    events = decode(b"event: done\nretry: 5\ndata: a\n\ndata: b\n\nretry: soon\ndata: c\n\n")
    assert [(event.event, event.retry) for event in events] == [
        ("done", 5),
        (None, None),
        (None, None),
    ]


def test_events_without_data_and_unfinished_events_are_dropped() -> None:
    assert decode(b"event: empty\n\ndata: unfinished\n") == []
    assert decode(b"data:\n\n") == [ServerSentEvent(data="")]


def test_all_three_line_endings_count_and_no_others() -> None:
    text = "data: a\u2028b\x0bc\r\rdata: d\r\n\r\ndata: e\n\n"
    assert [event.data for event in decode(text.encode())] == ["a\u2028b\x0bc", "d", "e"]


def test_a_carriage_return_ends_its_line_at_once() -> None:
    decoder = EventDecoder()
    assert decoder.feed(b"data: a\r\n\r") == [ServerSentEvent(data="a")]
    assert decoder.feed(b"\n") == []
    assert decoder.feed(b"data: b\r\n\r\n") == [ServerSentEvent(data="b")]


def test_invalid_bytes_affect_only_themselves() -> None:
    assert decode(b"data: a\xffb\n\ndata: c\n\n") == [
        ServerSentEvent(data="a\ufffdb"),
        ServerSentEvent(data="c"),
    ]


_LINES = st.sampled_from(
    [
        "data: Zürich 東京 🙂",
        "data",
        "data:x",
        "event: token",
        "id: ä1",
        "id",
        "retry: 10",
        ": hm",
        "",
        "",
        "\ufeffdata: y",
    ]
)


@given(
    lines=st.lists(st.tuples(_LINES, st.sampled_from(["\n", "\r\n", "\r"])), max_size=20),
    mark=st.booleans(),
    cuts=st.lists(st.integers(0, 400), max_size=30),
)
@example(lines=[("data: 🙂", "\r\n"), ("", "\r\n")], mark=True, cuts=list(range(40)))
def test_the_size_of_the_pieces_makes_no_difference(
    lines: list[tuple[str, str]], mark: bool, cuts: list[int]
) -> None:
    whole = ("\ufeff" * mark + "".join(line + end for line, end in lines)).encode()
    edges = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    pieces = [whole[a:b] for a, b in itertools.pairwise(edges)]
    assert decode(*pieces) == decode(whole)
    assert decode(*(bytes([byte]) for byte in whole)) == decode(whole)


@given(
    texts=st.lists(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n")), max_size=8
    )
)
def test_encoded_events_are_decoded_again(texts: list[str]) -> None:
    encoded = "".join(f"event: x\ndata: {text}\n\n" for text in texts).encode()
    assert [event.data for event in decode(encoded)] == texts


def test_a_second_read_of_a_stream_is_an_error() -> None:
    async def twice() -> None:
        stream = EventStream(chunked([b"data: a\n\nda", b"ta: b\n\n"]))
        assert [event.data async for event in stream] == ["a", "b"]
        with pytest.raises(Consumed, match="already been read"):
            [event async for event in stream]

    asyncio.run(twice())


@pytest.mark.parametrize("digits", [18, 19, 4300, 4301, 100_000])
def test_a_number_of_any_length_is_not_an_error(digits):
    (event,) = decode(b"retry: " + digits * b"9" + b"\ndata: a\n\n")
    assert event.data == "a"
    assert event.retry == (int(digits * "9") if digits <= 18 else None)
