"""Splits a batch into requests of limited size, and merges their results. Pure functions."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

from tinkex.client.http.backpressure import input_bytes
from tinkex.wire.inputs import Datum
from tinkex.wire.training import ForwardBackwardOutput

log = logging.getLogger("tinkex.merge")

Reducer = Callable[[Sequence[float], Sequence[int]], float]


def datum_bytes(datum: Datum) -> int:
    """Approximate size of a datum as protobuf."""
    size = input_bytes(datum.model_input)
    for tensor in datum.loss_fn_inputs.values():
        size += tensor.nbytes  # includes the indices of a sparse tensor, 8 bytes each
    return size


def split_batch(sizes: Sequence[int], *, max_count: int, max_bytes: int) -> list[slice]:
    """
    Split a batch whose datums have these sizes, in order and greedily.

    A datum larger than `max_bytes` is sent alone; a datum is never split.
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


def _mean(values: Sequence[float], weights: Sequence[int]) -> float:
    total = sum(weights)
    if not total:  # no chunk has outputs: weigh all equally
        return math.fsum(values) / len(values)
    return math.fsum(x * w for x, w in zip(values, weights, strict=True)) / total


def _hash2(values: Sequence[float], weights: Sequence[int]) -> float:
    return float(sum(int(x) % 2**64 for x in values) % 2**64)


def _hash_unordered(values: Sequence[float], weights: Sequence[int]) -> float:
    return float(hash(tuple(sorted(int(x) for x in values))))


#: Suffix of a metric's name -> how to combine the values of the chunks. The second argument is the
#: number of outputs of each chunk.
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
    The first chunk defines the keys. A metric that another chunk lacks is dropped, not zero-filled.

    A metric without a known suffix cannot be reduced: it is kept if there is one chunk, and dropped
    otherwise.
    """
    merged: dict[str, float] = {}
    for name in metrics[0]:
        missing = [index for index, chunk in enumerate(metrics) if name not in chunk]
        if missing:
            log.debug("metric dropped: %s is missing from chunks %s", name, missing)
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
            log.debug("metric dropped: no rule to reduce %s", name)
    return merged
