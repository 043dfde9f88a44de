"""Finds `model_id` and `seq_id` in a body that did not parse, to record that step's failure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from pydantic_core import from_json

from tinkex.wire.limits import MIN_COUNTED_BYTES
from tinkex.wire.varint import BYTES, EIGHT_BYTES, FOUR_BYTES, VARINT, read_varint

__all__ = ["StepId", "step_id_in_json", "step_id_in_protobuf"]

_JSON_MODEL_ID = re.compile(rb'"model_id"\s*:\s*"([^"\\]{1,500})"')
_JSON_SEQ_ID = re.compile(rb'"seq_id"\s*:\s*(\d{1,10})\b')

#: Field numbers of `ForwardBackwardRequest`.
_MODEL_ID, _SEQ_ID, _FORWARD_ONLY = 1, 2, 6
#: Fields that are read at most: a body of many tiny fields must not cost much.
_MAX_FIELDS = 2**15
#: Bytes at each end of a large JSON body that are searched.
_END_BYTES = 4096


class StepId(NamedTuple):
    """Names one step of a model."""

    model_id: str
    seq_id: int
    forward_only: bool = False


def step_id_in_json(body: bytes) -> StepId | None:
    """The step of an invalid or partial JSON body."""
    if len(body) > MIN_COUNTED_BYTES:
        # It may have been rejected for its size in memory: do not parse it.
        return _search_json(body[:_END_BYTES] + b" " + body[-_END_BYTES:])
    try:
        value = from_json(body)
    except ValueError:
        return _search_json(body)
    if not isinstance(value, dict):
        return None
    model_id, seq_id = value.get("model_id"), value.get("seq_id")
    if not isinstance(model_id, str) or type(seq_id) is not int:
        return None
    return StepId(model_id, seq_id)


def _search_json(body: bytes) -> StepId | None:
    """Search for both ids; None if one has several values, because some may be part of the data."""
    model_ids, seq_ids = set(_JSON_MODEL_ID.findall(body)), set(_JSON_SEQ_ID.findall(body))
    if len(model_ids) != 1 or len(seq_ids) != 1:
        return None
    return StepId(model_ids.pop().decode(errors="replace"), int(seq_ids.pop()))


def step_id_in_protobuf(body: bytes) -> StepId | None:
    """The step of a protobuf pass, read up to the first invalid byte."""
    model_id, seq_id, forward_only = "", 0, False
    for field, value in _fields(body):
        if field == _MODEL_ID and isinstance(value, bytes):
            model_id = value.decode(errors="replace")
        elif field == _SEQ_ID and isinstance(value, int):
            seq_id = value
        elif field == _FORWARD_ONLY and isinstance(value, int):
            forward_only = bool(value)
    return StepId(model_id, seq_id, forward_only) if model_id and seq_id else None


def _fields(body: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Top-level fields of a message: the number of each, and its varint or bytes."""
    at = 0
    for _ in range(_MAX_FIELDS):
        if at >= len(body):
            return
        key, at = read_varint(body, at)
        field, wire_type = key >> 3, key & 7
        if at < 0 or not field:
            return
        value: int | bytes
        if wire_type == VARINT:
            value, at = read_varint(body, at)
            size = 0
        elif wire_type == BYTES:
            size, at = read_varint(body, at)
        else:
            size = {EIGHT_BYTES: 8, FOUR_BYTES: 4}.get(wire_type, -1)
        if at < 0 or size < 0 or at + size > len(body):
            return
        if wire_type != VARINT:
            # Examples may be large and are not needed.
            value = body[at : at + size] if field == _MODEL_ID else b""
        yield field, value
        at += size
