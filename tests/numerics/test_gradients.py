"""Losses, logprobs and LoRA gradients against a float64 reference model in plain PyTorch."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from numerics import reference
from numerics.helpers import (
    MAKERS,
    VOCABULARY,
    gradients,
    model_from,
    random_adapter,
    random_datum,
    weighted,
    work,
)
from tinkex.engine import Engine
from tinkex.wire.inputs import Datum
from tinkex.wire.tensors import TensorData

LENGTHS = (17, 5, 30, 1, 17)

EngineOn = Callable[[str], Engine]


def expected(
    model: reference.Reference, data: list[Datum], loss: str
) -> tuple[float, list[torch.Tensor]]:
    """The summed loss and each datum's logprobs; leaves the gradients in the model."""
    total = torch.zeros((), dtype=torch.float64)
    logprobs = []
    for datum in data:
        inputs = {
            name: torch.from_numpy(tensor.to_numpy()).to(
                torch.int64 if name == "target_tokens" else torch.float64
            )
            for name, tensor in datum.loss_fn_inputs.items()
        }
        targets = inputs.pop("target_tokens")
        everything = model.logprobs(datum.model_input.to_ints())
        own = everything.gather(1, targets.view(len(everything), -1)).view(targets.shape)
        logprobs.append(own.detach())
        total = total + reference.LOSSES[loss](own, inputs)
    total.backward()
    return float(total.detach()), logprobs


def check_everything(
    engine: Engine, folder: Path, data: list[Datum], loss: str, tmp_path: Path
) -> None:
    adapter = random_adapter(engine, tmp_path / "adapter")
    model_id = model_from(engine, "m", adapter)
    try:
        output = engine.run_pass(model_id, work(data, loss), backward=True)
        found = gradients(engine, model_id, tmp_path / "snapshot")
    finally:
        engine.drop(model_id)
    model = reference.Reference(folder, adapter)
    total, logprobs = expected(model, data, loss)
    assert output.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)
    for mine, theirs in zip(output.loss_fn_outputs, logprobs, strict=True):
        assert mine["logprobs"].to_numpy().shape == tuple(theirs.shape)
        np.testing.assert_allclose(mine["logprobs"].to_numpy(), theirs.numpy(), atol=1e-4)
    assert found.keys() == model.lora.keys()
    for name, leaf in model.lora.items():
        assert leaf.grad is not None
        error = (found[name].double() - leaf.grad).norm() / leaf.grad.norm()
        assert error <= 1e-5, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("arch", ["qwen3", "llama", "tied"])
def test_cross_entropy_and_its_gradients_equal_the_reference(
    arch: str, engine_on: EngineOn, models: dict[str, Path], tmp_path: Path
) -> None:
    rng = np.random.default_rng(1)
    data = [weighted(rng, length) for length in LENGTHS]
    check_everything(engine_on(arch), models[arch], data, "cross_entropy", tmp_path)


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_a_policy_loss_and_its_gradients_equal_the_reference(
    loss: str, engine: Engine, models: dict[str, Path], tmp_path: Path
) -> None:
    rng = np.random.default_rng(2)
    data = [MAKERS[loss](rng, length) for length in LENGTHS]
    check_everything(engine, models["qwen3"], data, loss, tmp_path)


def test_several_targets_for_a_token_equal_the_reference(
    engine: Engine, models: dict[str, Path], tmp_path: Path
) -> None:
    rng = np.random.default_rng(3)
    data = []
    for length, width in ((9, 3), (4, 1), (12, 5)):
        targets = rng.integers(0, VOCABULARY, (length, width))
        weights = rng.normal(size=(length, width)).astype(np.float32)
        data.append(random_datum(rng, length, target_tokens=targets, weights=weights))
    check_everything(engine, models["qwen3"], data, "cross_entropy", tmp_path)


def test_sparse_targets_give_what_dense_ones_give(engine: Engine, tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    targets = np.zeros((20, 8), np.int64)
    weights = np.zeros((20, 8), np.float32)
    targets[3, 2], weights[3, 2] = 17, 0.5
    targets[11, 7], weights[11, 7] = 301, -2.0
    weights[12, 0] = 1.0  # of token 0, which a sparse tensor does not list
    dense = random_datum(rng, 20, target_tokens=targets, weights=weights)
    sparse = Datum(
        model_input=dense.model_input,
        loss_fn_inputs={
            "target_tokens": TensorData.from_torch_sparse(torch.from_numpy(targets)),
            "weights": TensorData.from_torch_sparse(torch.from_numpy(weights)),
        },
    )
    assert sparse.loss_fn_inputs["target_tokens"].is_sparse
    model_id = model_from(engine, "m", random_adapter(engine, tmp_path / "adapter"))
    try:
        one = engine.run_pass(model_id, work([dense]), backward=False)
        two = engine.run_pass(model_id, work([sparse]), backward=False)
    finally:
        engine.drop(model_id)
    assert one.metrics == two.metrics
    assert one.loss_fn_outputs == two.loss_fn_outputs


def slope_data(loss: str) -> tuple[list[Datum], dict[str, float]]:
    """Data for which the gradient of a loss is the slope of its value, and the loss config."""
    rng = np.random.default_rng(5)
    data, config = [MAKERS[loss](rng, 12)], {}
    inputs = dict(data[0].loss_fn_inputs)
    if loss == "cispo":  # the clipped ratio is a constant: its gradient is stopped, its slope zero
        config = {"clip_low_threshold": 0.1, "clip_high_threshold": 0.2}
        inputs["logprobs"] = np.full(12, -20.0, np.float32)
    if loss == "gspo":  # one advantage for the sequence: then the two agree in sum
        inputs["advantages"] = 0.7 * inputs["sequence_ratio_mask"].to_numpy()
        config = {"clip_low_threshold": 0.0, "clip_high_threshold": 100.0}
    return [Datum(model_input=data[0].model_input, loss_fn_inputs=inputs)], config


@pytest.mark.parametrize("loss", MAKERS)
def test_a_gradient_agrees_with_finite_differences(
    loss: str, engine: Engine, tmp_path: Path
) -> None:
    """One direction through all weights at once; float32 allows three digits."""
    from safetensors.torch import load_file, save_file

    data, config = slope_data(loss)
    asked = work(data, loss, **config)
    adapter = random_adapter(engine, tmp_path / "adapter")
    weights = load_file(adapter / "adapter_model.safetensors")
    generator = torch.Generator().manual_seed(0)
    direction = {n: torch.randn(t.shape, generator=generator) for n, t in weights.items()}

    def loss_at(step: float, folder: str) -> float:
        moved = model_from(engine, "moved", adapter)
        engine.save(moved, tmp_path / folder, optimizer=False)
        save_file(
            {n: weights[n] + step * direction[n] for n in weights},
            tmp_path / folder / "adapter_model.safetensors",
        )
        engine.load(moved, tmp_path / folder, optimizer=False)
        value = engine.run_pass(moved, asked, backward=False).metrics["loss:sum"]
        engine.drop(moved)
        return value

    step = 1e-3
    slope = (loss_at(step, "up") - loss_at(-step, "down")) / (2 * step)
    model_id = model_from(engine, "m", adapter)
    engine.run_pass(model_id, asked, backward=True)
    found = gradients(engine, model_id, tmp_path / "snapshot")
    engine.drop(model_id)
    assert sum(float((found[n] * direction[n]).sum()) for n in found) == pytest.approx(
        slope, rel=2e-2
    )


def test_entropy_is_that_of_the_predicted_distribution(
    engine: Engine, models: dict[str, Path], tmp_path: Path
) -> None:
    """Over the tokens that have a gradient; computed without another pass over the vocabulary."""
    rng = np.random.default_rng(6)
    data = [weighted(rng, length) for length in (17, 5, 30)]
    adapter = random_adapter(engine, tmp_path / "adapter")
    model_id = model_from(engine, "m", adapter)
    try:
        metrics = engine.run_pass(model_id, work(data), backward=True).metrics
    finally:
        engine.drop(model_id)
    model = reference.Reference(models["qwen3"], adapter)
    entropies = []
    for datum in data:
        logprobs = model.logprobs(datum.model_input.to_ints()).detach()
        counts = datum.loss_fn_inputs["weights"].to_numpy() != 0
        entropies.append(-(logprobs.exp() * logprobs).sum(dim=1)[torch.from_numpy(counts)])
    every = torch.cat(entropies)
    assert metrics["loss_tokens:sum"] == len(every)
    assert metrics["entropy:sum"] == pytest.approx(float(every.sum()), rel=1e-4)
    assert metrics["tokens:sum"] == 52
