"""The protobuf messages of the protocol, under the official client's module name."""

from tinkex.wire.proto.tinkex_wire_pb2 import *  # noqa: F403 - every message, as generated
