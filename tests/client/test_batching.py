"""Batches are split by size, and the results of their chunks are merged: every reducer."""

import math

import numpy as np
import pytest
import torch

from tinkex.client.batching import datum_bytes, merge, merge_metrics, split_batch
from tinkex.client.http.backpressure import input_bytes
from tinkex.types import (
    Datum,
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    ModelInput,
    TensorData,
)
from tinkex.wire.protobuf import encode_forward_backward_request


@pytest.mark.parametrize(
    ("name", "values", "weights", "expected"),
    [
        ("a:sum", [1.0, 2.0, 4.0], [1, 1, 1], {"a:sum": 7.0}),
        ("a:min", [3.0, 1.0], [1, 9], {"a:min": 1.0}),
        ("a:max", [3.0, 1.0], [1, 9], {"a:max": 3.0}),
        ("a:mean", [1.0, 4.0], [2, 1], {"a:mean": 2.0}),  # (2*1 + 1*4) / 3
        ("a:mean", [1.0, 4.0], [0, 0], {"a:mean": 2.5}),  # no outputs: unweighted, no crash
        ("a:slack", [1.0, 4.0], [2, 1], {"a:slack": 2.0}),  # 4 - 2
        ("a:slack", [3.0], [5], {"a:slack": 0.0}),  # one chunk has no slack
        ("a:unique", [1.0, 2.0, 3.0], [1, 1, 1], {"a:unique": 1, "a:unique_1": 2, "a:unique_2": 3}),
        ("a:hash2", [2.0**63, 2.0**63, 5.0], [1, 1, 1], {"a:hash2": 5.0}),  # mod 2**64
        ("a:hash2", [5.0, 2.0**63, 2.0**63], [1, 1, 1], {"a:hash2": 5.0}),  # in any order
        ("a:hash_unordered", [1.0, 2.0], [1, 1], {"a:hash_unordered": float(hash((1, 2)))}),
        ("a:odd", [1.0, 2.0], [1, 1], {}),  # no rule: dropped
        ("a", [1.0, 2.0], [1, 1], {}),  # no suffix: dropped, no crash
        ("a:b:sum", [1.0, 2.0], [1, 1], {}),
        ("a", [1.0], [1], {"a": 1.0}),  # nothing to reduce
    ],
)
def test_metrics_are_reduced_by_their_suffix(name, values, weights, expected):
    assert merge_metrics([{name: value} for value in values], weights) == expected


def test_a_metric_that_a_chunk_lacks_is_dropped_and_never_zero_filled(caplog):
    caplog.set_level("DEBUG", "tinkex")
    merged = merge_metrics([{"a:sum": 1.0, "b:sum": 2.0}, {"b:sum": 3.0, "c:sum": 9.0}], [1, 1])
    assert merged == {"b:sum": 5.0}
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("DEBUG", "metric dropped: a:sum is missing from chunks [1]")
    ]
    caplog.clear()
    assert merge_metrics([{"a:odd": 1.0}, {"a:odd": 2.0}], [1, 1]) == {}
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("DEBUG", "metric dropped: no rule to reduce a:odd")
    ]


def test_outputs_are_joined_in_order():
    def result(*values):
        outputs = [{"logprobs": TensorData(data=[v], dtype="float32")} for v in values]
        return ForwardBackwardOutput("ArrayRecord", outputs, {"loss:sum": float(sum(values))})

    merged = merge([result(1, 2), result(3)])
    assert [out["logprobs"].tolist() for out in merged.loss_fn_outputs] == [[1.0], [2.0], [3.0]]
    assert merged.loss_fn_output_type == "ArrayRecord"
    assert merged.metrics == {"loss:sum": 6.0}
    assert merge([]).loss_fn_outputs == []


@pytest.mark.parametrize(
    ("sizes", "pieces"),
    [
        ([], []),
        ([1], [(0, 1)]),
        ([4, 4, 4, 4], [(0, 2), (2, 4)]),  # 4 + 4 + 4 > 10
        ([5, 5, 5], [(0, 2), (2, 3)]),  # 10 fits exactly
        ([1, 1, 1, 1, 1], [(0, 3), (3, 5)]),  # three at most
        ([50, 1, 1], [(0, 1), (1, 3)]),  # too large: sent alone
        ([1, 50, 1], [(0, 1), (1, 2), (2, 3)]),
    ],
)
def test_a_batch_is_split_by_count_and_bytes(sizes, pieces):
    found = split_batch(sizes, max_count=3, max_bytes=10)
    assert [(piece.start, piece.stop) for piece in found] == pieces


def test_sizes_are_those_of_the_wire():
    datum = Datum(
        model_input=ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, math.pi]},
    )
    assert datum_bytes(datum) == 3 * 4 + 3 * 8 + 3 * 4
    assert input_bytes(datum.model_input, per_token=10) == 30


def test_a_sparse_tensor_counts_its_values_and_eight_bytes_for_each_index():
    dense = np.zeros((64, 512), dtype=np.float32)
    dense[::2, ::100] = 0.5
    rows, values = dense.shape[0], np.count_nonzero(dense)
    weights = TensorData.from_torch_sparse(torch.from_numpy(dense))
    assert weights.is_sparse
    datum = Datum(
        model_input=ModelInput.from_ints(range(64)),
        loss_fn_inputs={"target_tokens": np.arange(64), "weights": weights},
    )
    size = datum_bytes(datum)
    assert size == 64 * 4 + 64 * 8 + values * 4 + (rows + 1 + values) * 8
    # The lists are created on access; computing a size must not create them.
    for name in ("sparse_crow_indices", "sparse_col_indices"):
        with pytest.raises(AttributeError):
            object.__getattribute__(weights, name)
    request = ForwardBackwardRequest(
        ForwardBackwardInput(data=[datum], loss_fn="cross_entropy"), "m:train:0", 1
    )
    assert size == pytest.approx(len(encode_forward_backward_request(request)), abs=150)
