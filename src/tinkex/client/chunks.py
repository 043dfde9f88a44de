"""A batch cut into pieces that a server takes in one request each. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tinkex.wire.inputs import Datum, DmelChunk, EncodedTextChunk, ImageChunk, ModelInput


def input_bytes(model_input: ModelInput, *, per_token: int = 4) -> int:
    """About how many bytes the input has on the wire: 4 for a token in protobuf, 10 in JSON."""
    size = 0
    for chunk in model_input.chunks:
        if isinstance(chunk, EncodedTextChunk):
            size += per_token * chunk.length
        elif isinstance(chunk, ImageChunk):
            size += len(chunk.data)
        elif isinstance(chunk, DmelChunk):
            size += len(chunk.dmel)
        else:
            size += len(chunk.location)
    return size


def datum_bytes(datum: Datum) -> int:
    """About how many bytes a datum has as protobuf."""
    size = input_bytes(datum.model_input)
    for tensor in datum.loss_fn_inputs.values():
        size += tensor.nbytes  # with the indices of a sparse tensor, 8 bytes each
    return size


def cut(sizes: Sequence[int], *, max_count: int, max_bytes: int) -> list[slice]:
    """
    Where to cut a batch whose datums have these sizes, in order and greedily.

    A datum larger than `max_bytes` travels alone; none is ever split.
    """
    pieces: list[slice] = []
    first = used = 0
    for index, size in enumerate(sizes):
        if index > first and (used + size > max_bytes or index - first >= max_count):
            pieces.append(slice(first, index))
            first, used = index, 0
        used += size
    if len(sizes) > first:
        pieces.append(slice(first, len(sizes)))
    return pieces
