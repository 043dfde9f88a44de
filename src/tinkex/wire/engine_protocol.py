"""Frames on a stream: a length of four bytes, then one message of `frames.proto`."""

import struct
from typing import Protocol

from tinkex.wire.proto.frames_pb2 import Order, Report

LENGTH_PREFIX = struct.Struct("<I")
#: Category of work that failed beside other work: whose fault it was is not known.
SHARED_FAILURE = "muddled"
#: Category of work on a model that the engine does not have.
MODEL_MISSING = "missing"
#: What an engine whose web process is gone writes over the beginning of its roll.
CLEAN_EXIT = b"left "
#: Exit status of an engine that cannot use its device any more.
DEVICE_LOST_STATUS = 70


class _Message(Protocol):
    def SerializeToString(self) -> bytes: ...


def frame(message: _Message) -> bytes:
    """The bytes of one message, with its length in front."""
    body = message.SerializeToString()
    return LENGTH_PREFIX.pack(len(body)) + body


def body_length(head: bytes) -> int:
    """How many bytes follow these four."""
    length: int = LENGTH_PREFIX.unpack(head)[0]
    return length


__all__ = [
    "CLEAN_EXIT",
    "DEVICE_LOST_STATUS",
    "LENGTH_PREFIX",
    "MODEL_MISSING",
    "SHARED_FAILURE",
    "Order",
    "Report",
    "body_length",
    "frame",
]
