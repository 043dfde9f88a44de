"""Frames on a stream: a length of four bytes, then one message of `frames.proto`."""

import struct
from typing import Protocol

from tinkex.wire.proto.frames_pb2 import Order, Report

LENGTH = struct.Struct("<I")
#: Category of work that failed beside other work: whose fault it was is not known.
MUDDLED = "muddled"
#: Category of work on a model that the engine does not have.
MISSING = "missing"
#: What an engine whose web process is gone writes over the beginning of its roll.
LEFT = b"left "
#: Exit status of an engine that cannot use its device any more.
GAVE_OUT = 70


class _Message(Protocol):
    def SerializeToString(self) -> bytes: ...


def frame(message: _Message) -> bytes:
    """The bytes of one message, with its length in front."""
    body = message.SerializeToString()
    return LENGTH.pack(len(body)) + body


def body_length(head: bytes) -> int:
    """How many bytes follow these four."""
    length: int = LENGTH.unpack(head)[0]
    return length


__all__ = [
    "GAVE_OUT",
    "LEFT",
    "LENGTH",
    "MISSING",
    "MUDDLED",
    "Order",
    "Report",
    "body_length",
    "frame",
]
