"""Varints: the encoding of protobuf, and input that ends too early or is too long."""

import pytest

from tinkex.wire.varint import encode_varint, read_varint


@pytest.mark.parametrize(
    ("number", "encoded"),
    [(0, b"\x00"), (127, b"\x7f"), (128, b"\x80\x01"), (300, b"\xac\x02"), (2**63, None)],
)
def test_numbers_survive_encoding(number, encoded):
    data = encode_varint(number)

    assert encoded in (None, data)
    assert read_varint(b"\xff" + data + b"\x01", 1) == (number, len(data) + 1)
    assert read_varint(memoryview(data), 0) == (number, len(data))


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xff" * 20])
def test_a_truncated_or_too_long_varint_is_reported(data):
    assert read_varint(data, 0) == (0, -1)
