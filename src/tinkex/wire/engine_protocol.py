"""The socket protocol of web process and engine: length-prefixed messages of `frames.proto`."""

import struct
from typing import Protocol

from tinkex.wire.proto.frames_pb2 import Order, Report

#: Four bytes, little-endian.
LENGTH_PREFIX = struct.Struct("<I")
#: Failure category: a mixed micro-batch failed. The cause is unknown, so its requests run again one
#: by one.
SHARED_FAILURE = "shared_failure"
#: Failure category: the engine does not have the model.
MODEL_MISSING = "missing"
#: Exit status of an engine that lost its device.
DEVICE_LOST_STATUS = 70
#: Exit status of an engine of several ranks of which one was lost.
RANK_LOST_STATUS = 71


class _Message(Protocol):
    def SerializeToString(self) -> bytes: ...


def frame(message: _Message) -> bytes:
    """One message with its length prefix."""
    body = message.SerializeToString()
    return LENGTH_PREFIX.pack(len(body)) + body


def body_length(head: bytes) -> int:
    """The length in a prefix."""
    length: int = LENGTH_PREFIX.unpack(head)[0]
    return length


__all__ = [
    "DEVICE_LOST_STATUS",
    "LENGTH_PREFIX",
    "MODEL_MISSING",
    "RANK_LOST_STATUS",
    "SHARED_FAILURE",
    "Order",
    "Report",
    "body_length",
    "frame",
]
