"""Protobuf varints and wire types, for code that handles its bytes without the generated parser."""

from __future__ import annotations

from typing import Final

__all__ = ["BYTES", "EIGHT_BYTES", "FOUR_BYTES", "VARINT", "encode_varint", "read_varint"]

# The low three bits of a field's key.
VARINT: Final = 0
EIGHT_BYTES: Final = 1
BYTES: Final = 2
FOUR_BYTES: Final = 5


def encode_varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def read_varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """The number at `at` and the offset after it; (0, -1) if it is truncated or too long."""
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    return 0, -1
