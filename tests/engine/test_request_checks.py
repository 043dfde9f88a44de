"""Checks of training requests, and their error messages."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tinkex.engine.training.batch import count_fitting
from tinkex.engine.training.request_checks import Limits, check_request
from tinkex.wire.errors import UserFailure
from tinkex.wire.inputs import Datum, EncodedTextChunk, ImageChunk, ModelInput
from tinkex.wire.tensors import TensorData
from tinkex.wire.training import ForwardBackwardInput

LIMITS = Limits(vocab_size=100, max_context_length=8)

PNG = b"\x89PNG\r\n\x1a\n"


def datum(tokens: Any = (1, 2, 3), **inputs: Any) -> Datum:
    prompt = tokens if isinstance(tokens, ModelInput) else ModelInput.from_ints(list(tokens))
    return Datum(
        model_input=prompt,
        loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0], **inputs},
    )


def policy(**inputs: Any) -> Datum:
    return Datum(
        model_input=ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={
            "target_tokens": [2, 3, 4],
            "logprobs": [-1.0, -1.0, -1.0],
            "advantages": [1.0, 0.0, -1.0],
            **inputs,
        },
    )


def work(data: list[Datum], loss: str = "cross_entropy", config: Any = None) -> Any:
    return ForwardBackwardInput._of(data, loss, config)


def without(made: Datum, name: str) -> Datum:
    inputs = {key: value for key, value in made.loss_fn_inputs.items() if key != name}
    return Datum(model_input=made.model_input, loss_fn_inputs=inputs)


IMAGE = ModelInput(
    chunks=[
        EncodedTextChunk(tokens=[1, 2]),
        ImageChunk(data=PNG, format="png", expected_tokens=1),
    ]
)

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "unknown loss": (
        lambda: work([datum()], "stable_reinforce"),
        r"loss_fn 'stable_reinforce' is not supported.*Supported: cross_entropy.*gspo, custom",
    ),
    "custom loss without an id": (
        lambda: work([datum()], "custom"),
        "it must have only `loss_id`",
    ),
    "custom loss that is not there": (
        lambda: work([datum()], "custom", {"loss_id": "nothing"}),
        "there is no custom loss 'nothing' in this session. Create it with create_custom_loss",
    ),
    "gspo without a mask": (
        lambda: work([policy()], "gspo"),
        "'sequence_ratio_mask' is missing; loss 'gspo' needs",
    ),
    "gspo with a mask of nothing": (
        lambda: work([policy(sequence_ratio_mask=[0.0, 0.0, 0.0])], "gspo"),
        "is 0.0 everywhere, so the sequence has no ratio",
    ),
    "gspo with half a mask": (
        lambda: work([policy(sequence_ratio_mask=[0.0, 0.5, 1.0])], "gspo"),
        "contains 0.5; allowed are 1.0, which includes a token in the sequence ratio",
    ),
    "unknown config": (
        lambda: work([policy()], "ppo", {"clip_ratio": 0.2}),
        r"'clip_ratio' is unknown to loss 'ppo'.*clip_low_threshold, clip_high_threshold",
    ),
    "config for a loss without any": (
        lambda: work([datum()], "cross_entropy", {"beta": 1.0}),
        r"'beta' is unknown to loss 'cross_entropy'. Its keys: none",
    ),
    "text as config": (
        lambda: work([policy()], "dro", {"beta": "big"}),
        "beta must be a finite number, not 'big'",
    ),
    "crossed bounds": (
        lambda: work([policy()], "ppo", {"clip_low_threshold": 1.5}),
        r"clip_low_threshold 1.5 is above clip_high_threshold 1.2",
    ),
    "no data": (lambda: work([]), "`data` is empty"),
    "empty datum": (
        lambda: work([datum(), datum(())]),
        r"data\[1\].model_input: is empty",
    ),
    "too long": (
        lambda: work([datum(range(9))]),
        r"data\[0\].model_input: has 9 tokens; the model's context is 8",
    ),
    "image": (lambda: work([datum(IMAGE)]), r"data\[0\].model_input: this model reads text only"),
    "token outside": (
        lambda: work([datum((1, 100, 3))]),
        r"token 100 at position 1 is outside the vocabulary; allowed ids are 0 to 99",
    ),
    "target outside": (
        lambda: work([datum(), datum(target_tokens=[2, -100, 4])]),
        r"data\[1\].loss_fn_inputs.target_tokens: token -100 at position 1",
    ),
    "no targets": (
        lambda: work([without(datum(), "target_tokens")]),
        r"data\[0\].loss_fn_inputs.target_tokens: is missing",
    ),
    "float targets": (
        lambda: work([datum(target_tokens=np.ones(3, np.float32))]),
        "target_tokens: has dtype float32; token ids are int64",
    ),
    "too few targets": (
        lambda: work([datum(target_tokens=[2, 3])]),
        r"target_tokens: has shape \[2\] for 3 input tokens",
    ),
    "2-D targets of a policy loss": (
        lambda: work([policy(target_tokens=np.ones((3, 2), np.int64))], "ppo"),
        r"has shape \[3, 2\]; loss 'ppo' takes one target for each token",
    ),
    "weights of another length": (
        lambda: work([datum(weights=[1.0, 1.0])]),
        r"data\[0\].loss_fn_inputs.weights: has shape \[2\] and target_tokens \[3\]",
    ),
    "weights of another shape": (
        lambda: work([datum(target_tokens=np.ones((3, 2), np.int64))]),
        r"weights: has shape \[3\] and target_tokens \[3, 2\]",
    ),
    "weights that are no numbers": (
        lambda: work([datum(weights=[1.0, float("nan"), 1.0])]),
        "weights: contains nan; only finite numbers",
    ),
    "missing weights": (
        lambda: work([without(datum(), "weights")]),
        "'weights' is missing; loss 'cross_entropy' needs target_tokens and weights",
    ),
    "missing advantages": (
        lambda: work([without(policy(), "advantages")], "importance_sampling"),
        "'advantages' is missing",
    ),
    "foreign input": (
        lambda: work([policy(weights=[1.0, 1.0, 1.0])], "importance_sampling"),
        "'weights' is not an input of loss 'importance_sampling'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_invalid_request_is_refused_with_the_reason(case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(UserFailure, match=message):
        check_request(make(), LIMITS, backward=True)


def test_a_forward_pass_without_weights_counts_every_token_once() -> None:
    _, (row,) = check_request(work([without(datum(), "weights")]), LIMITS, backward=False)
    assert row.inputs_NK["weights"].tolist() == [[1.0], [1.0], [1.0]]


def test_config_comes_as_a_number_or_for_each_token() -> None:
    data = [policy(), policy(clip_low_threshold=[0.1, 0.2, 0.3])]
    _, rows = check_request(work(data, "ppo", {"clip_high_threshold": 3.0}), LIMITS, backward=True)
    low = [row.inputs_NK["clip_low_threshold"][:, 0].tolist() for row in rows]
    assert low == [pytest.approx([0.8] * 3), pytest.approx([0.1, 0.2, 0.3])]
    assert rows[1].inputs_NK["clip_high_threshold"][:, 0].tolist() == [3.0] * 3


def test_a_missing_sparse_target_is_token_zero_with_weight_zero() -> None:
    sparse = {"shape": [3, 5], "sparse_crow_indices": [0, 1, 1, 1], "sparse_col_indices": [2]}
    made = datum(
        target_tokens=TensorData(data=[42], dtype="int64", **sparse),
        weights=TensorData(data=[0.5], dtype="float32", **sparse),
    )
    _, (row,) = check_request(work([made]), LIMITS, backward=True)
    assert row.shape == (3, 5)
    assert row.targets_NK.sum() == row.targets_NK[0, 2] == 42
    assert row.inputs_NK["weights"].sum() == row.inputs_NK["weights"][0, 2] == 0.5


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "batches"),
    [
        ([3, 3, 3], 6, [[3, 3], [3]]),
        ([3, 3, 3], 9, [[3, 3, 3]]),
        ([2, 9, 2], 4, [[2], [9], [2]]),  # longer than a batch: runs alone
        ([9], 1, [[9]]),
    ],
)
def test_micro_batches_take_what_fits_in_order(
    lengths: list[int], max_tokens: int, batches: list[list[int]]
) -> None:
    found = []
    while lengths:
        count = count_fitting(lengths, max_tokens)
        found.append(lengths[:count])
        lengths = lengths[count:]
    assert found == batches
