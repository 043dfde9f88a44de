"""
Writes training data as protobuf bytes directly, so that each array is copied only once.

A message object would copy every array two more times. `encode_datum` produces the same bytes as
the generated code, but only for text and dense tensors, which is nearly all training data.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from tinkex.wire.inputs import Datum
from tinkex.wire.prompt_chunks import EncodedTextChunk
from tinkex.wire.proto import tinkex_wire_pb2 as pb
from tinkex.wire.varint import encode_varint

if TYPE_CHECKING:
    import numpy.typing as npt

    #: Anything `b"".join` accepts; arrays are not copied before the join.
    Part = bytes | npt.NDArray[Any]

# Field tags; all have wire type 2 (length-delimited) except the last.
_REQUEST_DATA = b"\x1a"
_DATUM_INPUT = b"\x0a"
_DATUM_TENSORS = b"\x12"
_CHUNK_TEXT = _TEXT_TOKENS = _TENSOR_DENSE = _ENTRY_KEY = b"\x0a"
_ENTRY_VALUE = b"\x12"
_TENSOR_SHAPE = b"\x22"
_TENSOR_DTYPE = b"\x18"


def encode_datum(datum: Datum) -> list[Part] | None:
    """An entry of `data`, in parts to join; None if the generated code must encode the datum."""
    import numpy as np

    if datum.model_input_spans or datum.loss_fn_input_spans:
        return None
    parts: list[Part] = [b""]
    size = 0
    for chunk in datum.model_input.chunks:
        if not isinstance(chunk, EncodedTextChunk):
            return None
        tokens = np.ascontiguousarray(chunk.tokens_np, "<i4")
        head = _text_head(tokens.nbytes)
        parts += (head, tokens)
        size += len(head) + tokens.nbytes
    for name, tensor in sorted(datum.loss_fn_inputs.items()):
        if tensor.is_sparse:
            return None
        stored, number = _STORED[tensor.dtype]
        values = np.ascontiguousarray(tensor.values_np, stored)
        head, tail = _tensor_frame(name, values.nbytes, number, tuple(tensor.shape or ()))
        parts += (head, values, tail)
        size += len(head) + values.nbytes + len(tail)
    parts[0] = _REQUEST_DATA + encode_varint(size)
    return parts


def as_request_entry(datum: bytes) -> Sequence[Part]:
    """An entry of `data` for a datum that the generated code has encoded."""
    return _REQUEST_DATA + encode_varint(len(datum)), datum


_STORED = {"int64": ("<i8", pb.DTYPE_INT64), "float32": ("<f4", pb.DTYPE_FLOAT32)}


# A batch has few distinct lengths, so headers repeat.
@lru_cache(4096)
def _text_head(nbytes: int) -> bytes:
    # Protobuf omits an empty bytes field, unless it belongs to a oneof.
    tokens = _TEXT_TOKENS + encode_varint(nbytes) if nbytes else b""
    text = _CHUNK_TEXT + encode_varint(len(tokens) + nbytes) + tokens
    return _DATUM_INPUT + encode_varint(len(text) + nbytes) + text


@lru_cache(4096)
def _tensor_frame(
    name: str, nbytes: int, dtype: int, shape: tuple[int, ...]
) -> tuple[bytes, bytes]:
    sizes = b"".join(map(encode_varint, shape))
    tail = _TENSOR_DTYPE + encode_varint(dtype)
    if sizes:
        tail += _TENSOR_SHAPE + encode_varint(len(sizes)) + sizes
    dense = _TENSOR_DENSE + encode_varint(nbytes)
    text = name.encode()
    key = _ENTRY_KEY + encode_varint(len(text)) + text
    value = _ENTRY_VALUE + encode_varint(len(dense) + nbytes + len(tail)) + dense
    head = key + value
    return _DATUM_TENSORS + encode_varint(len(head) + nbytes + len(tail)) + head, tail
