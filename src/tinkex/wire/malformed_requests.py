"""Whose step a body was that could not be read: the model and the number, where they still show."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from pydantic_core import from_json

from tinkex.wire.limits import MIN_COUNTED_BYTES
from tinkex.wire.varint import BYTES, EIGHT_BYTES, FOUR_BYTES, VARINT, read_varint

__all__ = ["StepId", "step_id_in_json", "step_id_in_protobuf"]

_MODEL = re.compile(rb'"model_id"\s*:\s*"([^"\\]{1,500})"')
_NUMBER = re.compile(rb'"seq_id"\s*:\s*(\d{1,10})\b')

#: Field numbers of `ForwardBackwardRequest`.
_MODEL_ID, _SEQ_ID, _FORWARD_ONLY = 1, 2, 6
#: Of a body that is nothing but tiny fields, the rest is not looked at.
_MOST_FIELDS = 2**15
_END_BYTES = 4096


class StepId(NamedTuple):
    """A step of a model."""

    model_id: str
    seq_id: int
    forward_only: bool = False


def step_id_in_json(body: bytes) -> StepId | None:
    """From a JSON body that is unsound, or of which only the ends are left."""
    if len(body) > MIN_COUNTED_BYTES:
        # It may have been refused for what it would become: it is not read again.
        return _unique_matches(body[:_END_BYTES] + b" " + body[-_END_BYTES:])
    try:
        value = from_json(body)
    except ValueError:
        return _unique_matches(body)
    if not isinstance(value, dict):
        return None
    model_id, seq_id = value.get("model_id"), value.get("seq_id")
    if not isinstance(model_id, str) or type(seq_id) is not int:
        return None
    return StepId(model_id, seq_id)


def _unique_matches(body: bytes) -> StepId | None:
    """Only what is said once: a second one may be part of the data."""
    models, numbers = set(_MODEL.findall(body)), set(_NUMBER.findall(body))
    if len(models) != 1 or len(numbers) != 1:
        return None
    return StepId(models.pop().decode(errors="replace"), int(numbers.pop()))


def step_id_in_protobuf(body: bytes) -> StepId | None:
    """From the bytes of a pass, up to where they stop making sense."""
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
    """The top level of a message: the number of each field, and its varint or its bytes."""
    at = 0
    for _ in range(_MOST_FIELDS):
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
            # Examples may be large, and nothing in them is looked for.
            value = body[at : at + size] if field == _MODEL_ID else b""
        yield field, value
        at += size
