"""Regularizers against their closed forms, and their sum as a custom loss."""

import math
import sys

import numpy as np
import pytest
import torch

from tinkex import regularizers as reg
from tinkex import types

X = [np.array([-0.5, -2.0, -1.0]), np.array([-3.0, -0.25, -1.5])]
#: Two positions with three targets each, and a reference for them.
ROWS = np.log([[0.5, 0.3, 0.1], [0.2, 0.2, 0.4]])
OTHER = np.log([[0.25, 0.25, 0.25], [0.1, 0.6, 0.2]])


def batch(*logprobs, loss=None, **inputs):
    leaves = [torch.tensor(each, dtype=torch.float32, requires_grad=True) for each in logprobs]
    data = [
        types.Datum(
            types.ModelInput.from_ints([1]), {name: values[i] for name, values in inputs.items()}
        )
        for i in range(len(leaves))
    ]
    return reg.Batch(data=data, logprobs=leaves, loss=(loss or total)(leaves))


def total(leaves):
    return -sum(each.sum() for each in leaves)


def shares(logprobs, temperature=1.0):
    scaled = np.exp(logprobs / temperature)
    return scaled / scaled.sum(axis=-1, keepdims=True)


def kl(a, b):
    return float((a * np.log(a / b)).sum())


def value(regularizer, seen):
    found = regularizer(seen)
    assert found.shape == ()
    return found.item()


def test_l1_l2_and_their_mixture():
    flat = np.concatenate(X)
    l1, l2 = np.abs(flat).sum(), np.square(flat).sum()
    assert value(reg.L1(), batch(*X)) == pytest.approx(l1)
    assert value(reg.L2(), batch(*X)) == pytest.approx(l2)
    assert value(reg.ElasticNet(0.3), batch(*X)) == pytest.approx(0.3 * l1 + 0.7 * l2)
    assert value(reg.L1(-1.0), batch(*X)) == pytest.approx(np.abs(flat + 1).sum())
    assert value(reg.L2(-1.0), batch(*X)) == pytest.approx(np.square(flat + 1).sum())


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_entropy_of_the_targets_of_each_position(temperature):
    p = shares(ROWS, temperature)
    expected = -(p * np.log(p)).sum()
    assert value(reg.Entropy(temperature), batch(ROWS)) == pytest.approx(expected)


def test_entropy_is_largest_for_equal_logprobs_and_needs_several_targets():
    assert value(reg.Entropy(), batch(np.zeros((2, 4)))) == pytest.approx(2 * math.log(4))
    with pytest.raises(ValueError, match=r"data\[0\] has one target per position"):
        reg.Entropy()(batch(X[0]))


def test_kl_in_both_directions_and_their_mean_over_several_targets():
    p, q = shares(ROWS), shares(OTHER)
    seen = batch(ROWS, reference_logprobs=[OTHER])
    assert value(reg.KL("reverse"), seen) == pytest.approx(kl(p, q), rel=1e-5)
    assert value(reg.KL("forward"), seen) == pytest.approx(kl(q, p), rel=1e-5)
    both = (kl(p, q) + kl(q, p)) / 2
    assert value(reg.KL("symmetric"), seen) == pytest.approx(both, rel=1e-5)
    same = batch(ROWS, q=[ROWS])
    assert value(reg.KL("reverse", reference="q"), same) == pytest.approx(0, abs=1e-6)


def test_kl_of_one_target_is_the_estimate_whose_mean_is_the_kl():
    """The expectation over tokens sampled from the model."""
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    for direction, expected in (("reverse", kl(p, q)), ("forward", kl(q, p))):
        each = [
            value(reg.KL(direction), batch([np.log(a)], reference_logprobs=[[np.log(b)]]))
            for a, b in zip(p, q, strict=True)
        ]
        assert min(each) >= 0
        assert float(p @ each) == pytest.approx(expected, rel=1e-5)


def test_the_gradient_of_kl_is_that_of_its_formula():
    seen = batch(ROWS, reference_logprobs=[OTHER])
    reg.KL("forward")(seen).backward()
    # d/dx of KL(q, softmax(x)) is softmax(x) - q.
    np.testing.assert_allclose(
        seen.logprobs[0].grad.numpy(), shares(ROWS) - shares(OTHER), atol=1e-6
    )


def test_consistency_of_adjacent_or_given_pairs():
    apart = X[0] - X[1]
    assert value(reg.Consistency(), batch(*X)) == pytest.approx(np.square(apart).mean())
    absolute = reg.Consistency("absolute", pairs=[(0, 2)])
    assert value(absolute, batch(X[0], X[0], X[1])) == pytest.approx(np.abs(apart).mean())
    with pytest.raises(ValueError, match="3 datums cannot be paired"):
        reg.Consistency()(batch(X[0], X[0], X[1]))
    with pytest.raises(ValueError, match=r"data\[0\] and data\[1\] have logprobs of shape"):
        reg.Consistency()(batch(X[0], X[1][:2]))


def test_orthogonality_is_the_squared_cosine():
    cosine = X[0] @ X[1] / np.linalg.norm(X[0]) / np.linalg.norm(X[1])
    assert value(reg.Orthogonality(), batch(*X)) == pytest.approx(cosine**2)
    assert value(reg.Orthogonality(), batch([-1.0, 0.0], [0.0, -2.0])) == 0.0
    assert value(reg.Orthogonality(), batch(X[0], X[0], X[0])) == pytest.approx(3.0)


def test_the_gradient_penalty_and_its_own_gradient():
    def squares(leaves):
        return sum(each.square().sum() for each in leaves)

    seen = batch(*X, loss=squares)
    norm = 2 * np.linalg.norm(np.concatenate(X))  # the gradient of x^2 is 2x
    penalty = reg.GradientPenalty(target=1.0)(seen)
    assert penalty.item() == pytest.approx((norm - 1) ** 2, rel=1e-5)
    penalty.backward()
    # 2 (norm - 1) * d norm / dx, and norm = 2 |x|
    expected = 2 * (norm - 1) * 2 * X[0] / np.linalg.norm(np.concatenate(X))
    np.testing.assert_allclose(seen.logprobs[0].grad.numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: reg.ElasticNet(1.5), "l1_ratio is 1.5"),
        (lambda: reg.Entropy(0.0), "temperature is 0.0"),
        (lambda: reg.KL("sideways"), "direction is 'sideways'"),
        (lambda: reg.Consistency("cubic"), "distance is 'cubic'"),
        (lambda: reg.regularized(total, reg.L1(), reg.L1()), "called 'l1'"),
        (lambda: reg.regularized(total, reg.Term(reg.L1(), name="a:b")), "without ':'"),
        (lambda: reg.regularized(total, reg.Term(reg.L1(), name="base")), "not 'base'"),
    ],
)
def test_wrong_settings_are_refused_with_what_is_allowed(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_a_missing_or_misshapen_reference_is_named():
    with pytest.raises(ValueError, match=r"data\[0\] has no 'reference_logprobs'"):
        reg.KL()(batch(X[0]))
    with pytest.raises(ValueError, match=r"has shape \(2,\), but the logprobs have \(3,\)"):
        reg.KL()(batch(X[0], reference_logprobs=[X[0][:2]]))


def test_a_regularized_loss_is_the_sum_and_says_what_each_part_adds(service):
    def base(data, logprobs):
        return -sum(each.sum() for each in logprobs), {"mine:sum": 1.0}

    def own(batch):
        return torch.stack([each.exp().sum() for each in batch.logprobs]).sum()

    training = service.create_lora_training_client("fake/model")
    datum = types.Datum(
        types.ModelInput.from_ints([1, 2]),
        {"target_tokens": [2, 3], "reference_logprobs": [-1.0, -2.0]},
    )
    loss = reg.regularized(base, reg.Term(reg.L2(), weight=0.5), reg.Term(reg.KL(), 0.1), own)

    metrics = training.forward_backward_custom([datum, datum], loss).result(5).metrics

    parts = {name: metrics[f"regularizer/{name}:sum"] for name in ("base", "l2", "kl", "own")}
    expected = parts["base"] + 0.5 * parts["l2"] + 0.1 * parts["kl"] + parts["own"]
    assert metrics["loss:sum"] == pytest.approx(expected, rel=1e-6)
    assert metrics["mine:sum"] == 1.0
    assert metrics["gradient_norm/base:mean"] == pytest.approx(2.0)  # four times -1
    assert metrics["gradient_norm/l2:mean"] == pytest.approx(math.sqrt(parts["l2"]), rel=1e-6)
    assert all(name.count(":") == 1 for name in metrics)


def test_gradient_norms_may_be_left_out_and_a_term_may_be_constant():
    def constant(batch):
        return torch.tensor(2.0)

    leaves = [torch.zeros(3, requires_grad=True)]
    loss, metrics = reg.regularized(lambda _, x: (x[0].sum(), {}), constant)([], leaves)
    assert loss.item() == 2.0
    assert metrics["gradient_norm/constant:mean"] == 0.0
    without = reg.regularized(lambda _, x: (x[0].sum(), {}), constant, gradient_norms=False)
    assert list(without([], leaves)[1]) == ["regularizer/base:sum", "regularizer/constant:sum"]


def test_m3_without_torch_the_error_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"needs torch.*tinkex\[engine\]"):
        reg.regularized(total)
