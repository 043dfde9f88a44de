"""A loss is a sum, linear in its weights, however the data are split."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from numerics.helpers import MAKERS, gradients, model_from, random_adapter, weighted, work
from tinkex.engine import Engine
from tinkex.wire.inputs import Datum

LENGTHS = (12, 3, 25, 9)


class Bench:
    """One model, and its gradient after any list of passes."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine, self.folder = engine, folder
        self.model_id = model_from(engine, "m", random_adapter(engine, folder / "adapter"))
        self._count = 0

    def run(self, *batches: list[Datum], loss: str = "cross_entropy") -> tuple[float, torch.Tensor]:
        total = 0.0
        for batch in batches:
            output = self.engine.run_pass(self.model_id, work(batch, loss), backward=True)
            total += output.metrics["loss:sum"]
        self._count += 1
        found = gradients(self.engine, self.model_id, self.folder / f"snapshot-{self._count}")
        self.engine.clear_gradients(self.model_id)
        return total, torch.cat([found[name].flatten() for name in sorted(found)])


@pytest.fixture
def bench(engine: Engine, tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(engine, tmp_path)
    yield bench
    engine.drop(bench.model_id)


@pytest.fixture
def data() -> list[Datum]:
    rng = np.random.default_rng(7)
    return [weighted(rng, length) for length in LENGTHS]


def reweighted(datum: Datum, factor: float) -> Datum:
    return rescaled(datum, "weights", factor)


def rescaled(datum: Datum, name: str, factor: float) -> Datum:
    inputs = dict(datum.loss_fn_inputs)
    inputs[name] = inputs[name].to_numpy() * np.float32(factor)
    return Datum(model_input=datum.model_input, loss_fn_inputs=inputs)


def assert_same(found: tuple[float, torch.Tensor], wanted: tuple[float, torch.Tensor]) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=1e-5)
    assert (found[1] - wanted[1]).norm() <= 1e-5 * wanted[1].norm()


@pytest.mark.parametrize("factor", [2.0, -1.0, 0.25])
def test_scaled_weights_scale_loss_and_gradient(
    bench: Bench, data: list[Datum], factor: float
) -> None:
    total, gradient = bench.run(data)
    assert_same(
        bench.run([reweighted(datum, factor) for datum in data]),
        (factor * total, factor * gradient),
    )


def test_a_repeated_datum_counts_twice(bench: Bench, data: list[Datum]) -> None:
    total, gradient = bench.run(data)
    assert_same(bench.run(data + data), (2 * total, 2 * gradient))


def test_a_datum_and_its_negative_cancel(bench: Bench, data: list[Datum]) -> None:
    _, gradient = bench.run(data)
    total, nothing = bench.run(data, [reweighted(datum, -1.0) for datum in data])
    assert total == pytest.approx(0.0, abs=1e-4)
    assert nothing.norm() <= 1e-5 * gradient.norm()


def test_splitting_a_batch_over_requests_changes_nothing(bench: Bench, data: list[Datum]) -> None:
    assert_same(bench.run(data[:1], data[1:3], data[3:]), bench.run(data))


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_policy_losses_are_sums_too(bench: Bench, loss: str) -> None:
    rng = np.random.default_rng(8)
    data = [MAKERS[loss](rng, length) for length in LENGTHS]
    whole = bench.run(data, loss=loss)
    assert_same(bench.run(data[:2], data[2:], loss=loss), whole)
    assert_same(bench.run(data + data, loss=loss), (2 * whole[0], 2 * whole[1]))


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "gspo"])
def test_twice_the_advantages_are_twice_the_loss(bench: Bench, loss: str) -> None:
    """For losses that are linear in the advantages; dro has a term without them."""
    rng = np.random.default_rng(9)
    data = [MAKERS[loss](rng, length) for length in LENGTHS]
    total, gradient = bench.run(data, loss=loss)
    doubled = [rescaled(datum, "advantages", 2.0) for datum in data]
    assert_same(bench.run(doubled, loss=loss), (2 * total, 2 * gradient))


@pytest.mark.parametrize("loss", ["importance_sampling", "cispo"])
def test_opposite_advantages_cancel(bench: Bench, loss: str) -> None:
    """For losses that do not depend on the sign of the advantages."""
    rng = np.random.default_rng(10)
    data = [MAKERS[loss](rng, length) for length in LENGTHS]
    _, gradient = bench.run(data, loss=loss)
    opposite = [rescaled(datum, "advantages", -1.0) for datum in data]
    _, nothing = bench.run(data, opposite, loss=loss)
    assert nothing.norm() <= 1e-5 * gradient.norm()


@pytest.mark.parametrize("max_tokens", [1, 13, 28])
def test_smaller_micro_batches_change_nothing(
    bench: Bench, data: list[Datum], max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = bench.run(data)
    monkeypatch.setattr(bench.engine, "max_batch_tokens", max_tokens)
    assert_same(bench.run(data), whole)


def test_packed_logprobs_equal_those_of_each_datum_alone(bench: Bench, data: list[Datum]) -> None:
    together = bench.engine.run_pass(bench.model_id, work(data), backward=False)
    for datum, mine in zip(data, together.loss_fn_outputs, strict=True):
        alone = bench.engine.run_pass(bench.model_id, work([datum]), backward=False)
        np.testing.assert_allclose(
            mine["logprobs"].to_numpy(), alone.loss_fn_outputs[0]["logprobs"].to_numpy(), atol=2e-5
        )


def test_smaller_chunks_of_the_head_change_nothing(
    bench: Bench, data: list[Datum], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = bench.run(data)
    monkeypatch.setattr(bench.engine.model.head, "chunk_tokens", 7)
    assert_same(bench.run(data), whole)


def test_a_forward_pass_leaves_no_gradient(bench: Bench, data: list[Datum]) -> None:
    bench.engine.run_pass(bench.model_id, work(data), backward=False)
    _, gradient = bench.run()
    assert not gradient.any()


def test_switched_off_layers_have_no_part_in_the_others_gradients(
    engine: Engine, data: list[Datum], tmp_path: Path
) -> None:
    """New adapters change nothing, so an adapter on the MLP does not affect attention gradients."""
    from tinkex.wire.training import AdamOptimizerConfig, LoraConfig

    everything = LoraConfig(rank=4, seed=3)
    attention = LoraConfig(rank=4, seed=3, train_mlp=False, train_unembed=False)
    found = []
    for name, lora in (("all", everything), ("attention", attention)):
        engine.create(name, lora, AdamOptimizerConfig())
        engine.run_pass(name, work(data), backward=True)
        found.append(gradients(engine, name, tmp_path / name))
        engine.drop(name)
    assert {name.split(".")[5] for name in found[1]} == {"self_attn"}
    for name, gradient in found[1].items():
        torch.testing.assert_close(gradient, found[0][name])
