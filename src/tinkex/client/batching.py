"""A batch cut into pieces that a server takes in one request each. Pure."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

from tinkex.client.http.backpressure import input_bytes
from tinkex.wire.inputs import Datum
from tinkex.wire.training import ForwardBackwardOutput


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


# MERGED: The results of a batch's chunks put back together. Pure.


log = logging.getLogger("tinkex.merge")

Reducer = Callable[[Sequence[float], Sequence[int]], float]


def _mean(values: Sequence[float], weights: Sequence[int]) -> float:
    total = sum(weights)
    if not total:  # chunks without outputs: nothing tells them apart
        return math.fsum(values) / len(values)
    return math.fsum(x * w for x, w in zip(values, weights, strict=True)) / total


def _hash2(values: Sequence[float], weights: Sequence[int]) -> float:
    return float(sum(int(x) % 2**64 for x in values) % 2**64)


def _hash_unordered(values: Sequence[float], weights: Sequence[int]) -> float:
    return float(hash(tuple(sorted(int(x) for x in values))))


#: What follows the colon of a metric's name -> how the chunks' values become one. The second
#: argument is the number of outputs of each chunk.
REDUCERS: dict[str, Reducer] = {
    "mean": _mean,
    "sum": lambda values, weights: math.fsum(values),
    "min": lambda values, weights: min(values),
    "max": lambda values, weights: max(values),
    "slack": lambda values, weights: max(values) - _mean(values, weights),
    "hash2": _hash2,
    "hash_unordered": _hash_unordered,
}


def merge(results: Sequence[ForwardBackwardOutput]) -> ForwardBackwardOutput:
    """One result for the whole batch: outputs in order, metrics reduced by their suffix."""
    if not results:
        return ForwardBackwardOutput(loss_fn_output_type="", loss_fn_outputs=[], metrics={})
    return ForwardBackwardOutput(
        loss_fn_output_type=results[0].loss_fn_output_type,
        loss_fn_outputs=[output for result in results for output in result.loss_fn_outputs],
        metrics=merge_metrics(
            [result.metrics for result in results],
            [len(result.loss_fn_outputs) for result in results],
        ),
    )


def merge_metrics(metrics: Sequence[dict[str, float]], weights: Sequence[int]) -> dict[str, float]:
    """
    The first chunk defines the keys; one that any other chunk lacks is left out, not zero-filled.

    A name whose suffix is not known, or that has none, cannot be reduced: it is kept when there
    is one chunk only, and left out otherwise.
    """
    merged: dict[str, float] = {}
    for name in metrics[0]:
        missing = [index for index, chunk in enumerate(metrics) if name not in chunk]
        if missing:
            log.debug("metric left out: %s is missing from chunks %s", name, missing)
            continue
        values = [chunk[name] for chunk in metrics]
        suffix = name.partition(":")[2]
        if suffix == "unique":
            merged[name] = values[0]
            merged.update({f"{name}_{i}": value for i, value in enumerate(values[1:], start=1)})
        elif suffix in REDUCERS:
            merged[name] = REDUCERS[suffix](values, weights)
        elif len(values) == 1:
            merged[name] = values[0]
        else:
            log.debug("metric left out: no rule to reduce %s", name)
    return merged
