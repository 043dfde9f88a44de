"""Dimuon against its formula in float64, matrix by matrix."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from numerics.helpers import gradients, weighted, work
from tinkex.engine import Engine
from tinkex.engine.adapters.adapters import TrainingAdapter
from tinkex.engine.adapters.checkpoints import write
from tinkex.engine.model.lora import matrices
from tinkex.engine.model.targets import Layout, Target
from tinkex.engine.training.optimizer import optimizer_step, orthogonalized
from tinkex.wire.errors import UserFailure
from tinkex.wire.training import (
    AdamOptimizerConfig,
    AdamParams,
    DimuonOptimizerConfig,
    DimuonParams,
    LoraConfig,
    OptimizerConfig,
)


def reference_update(momentum: torch.Tensor) -> torch.Tensor:
    """0.2·sqrt(max(rows, columns)) times the momentum after five Newton-Schulz steps."""
    rows, columns = momentum.shape
    x = momentum / momentum.norm()
    if rows > columns:
        x = x.t()
    for _ in range(5):
        square = x @ x.t()
        x = 3.4445 * x - 4.7750 * square @ x + 2.0315 * square @ square @ x
    if rows > columns:
        x = x.t()
    return 0.2 * math.sqrt(max(rows, columns)) * x


def adapter(optimizer: str = "dimuon") -> TrainingAdapter:
    targets = [
        Target(name="wide", kind="mlp", inputs=24, outputs=16, group="wide"),
        Target(name="tall", kind="mlp", inputs=16, outputs=40, group="tall"),
        Target(name="twin", kind="attn", inputs=24, outputs=16, group="twin"),
        # B has a matrix for each expert.
        Target(
            name="w1",
            kind="mlp",
            inputs=24,
            outputs=16,
            group="w1",
            experts=3,
            shared="A",
        ),
    ]
    made = TrainingAdapter(
        lora=LoraConfig(rank=4),
        targets=targets,
        seed=1,
        model_dtype=torch.float32,
        device=torch.device("cpu"),
        optimizer=optimizer,
    )
    made.master.normal_(generator=torch.Generator().manual_seed(9))
    return made


def each_matrix(flat: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """Views of all matrices, of experts one by one."""
    both = [tensor for p in layout.placements.values() for tensor in matrices(flat, p)]
    return [each for tensor in both for each in tensor.reshape(-1, *tensor.shape[-2:])]


@pytest.mark.parametrize(
    "params",
    [
        DimuonParams(learning_rate=1e-2),
        DimuonParams(learning_rate=1e-3, beta1=0.0),
        DimuonParams(learning_rate=1e-2, beta1=0.5, grad_clip_norm=1.0),
    ],
    ids=["defaults", "no momentum", "clipped"],
)
def test_twenty_steps_equal_the_rule_in_float64(params: DimuonParams) -> None:
    ours = adapter()
    weights = [each.double().clone() for each in each_matrix(ours.master, ours.layout)]
    assert len(weights) == 6 + 1 + 3
    momenta = [torch.zeros_like(weight) for weight in weights]
    generator = torch.Generator().manual_seed(4)
    for step in range(20):
        gradient = torch.randn(ours.grad.shape, generator=generator) * 10.0 ** (step % 5 - 3)
        ours.grad.copy_(gradient)
        norm = float(gradient.double().norm())
        scale = min(1.0, params.grad_clip_norm / (norm + 1e-6)) if params.grad_clip_norm else 1.0
        for place, own in enumerate(each_matrix(scale * gradient.double(), ours.layout)):
            momenta[place] = params.beta1 * momenta[place] + (1 - params.beta1) * own
            weights[place] -= params.learning_rate * reference_update(momenta[place])
        report = optimizer_step(ours, params)
        assert report.grad_norm == pytest.approx(norm, rel=1e-6)
        assert report.update_norm > 0
        for wanted, found in zip(weights, each_matrix(ours.master, ours.layout), strict=True):
            assert (found - wanted).norm() <= 1e-5 * wanted.norm()
    assert not ours.grad.any()


def test_an_update_is_nearly_orthogonal_and_of_adams_size() -> None:
    stack = torch.randn(3, 8, 200, generator=torch.Generator().manual_seed(1)) * 1e-9
    found = orthogonalized(stack)
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.6
    assert values.max() < 1.3
    rms = (0.2 * math.sqrt(200) * found).square().mean().sqrt()
    assert 0.12 < float(rms) < 0.26
    assert not orthogonalized(torch.zeros(1, 4, 8)).any()


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    ours = adapter()
    before = ours.master.clone()
    ours.grad.fill_(math.inf)
    with pytest.raises(UserFailure, match=r"step 1 was not taken"):
        optimizer_step(ours, DimuonParams(learning_rate=1e-2))
    assert torch.equal(ours.master, before)
    assert ours.step == 0


@pytest.mark.parametrize(
    ("rate", "size"), [(1e37, 1.0), (1e38, 1.0), (3e38, 1.0), (1e-3, 1e19), (1e-3, 1e30)]
)
def test_a_step_is_finite_or_refused_and_changes_nothing(rate: float, size: float) -> None:
    ours = adapter()
    for sign in (1, -1, 1):
        ours.grad.normal_(generator=torch.Generator().manual_seed(1)).mul_(sign * size)
        before = {name: getattr(ours, name).clone() for name in ("master", "m", "grad")}
        steps = ours.step
        try:
            report = optimizer_step(ours, DimuonParams(learning_rate=rate))
        except UserFailure:
            assert ours.step == steps
            for name, old in before.items():
                assert torch.equal(getattr(ours, name), old), name
        else:
            assert math.isfinite(report.update_norm)
            assert ours.master.isfinite().all()
            assert ours.m.isfinite().all()


def test_families_do_not_mix() -> None:
    with pytest.raises(UserFailure, match=r"created with the dimuon optimizer.*Send DimuonParams"):
        optimizer_step(adapter(), AdamParams())
    with pytest.raises(UserFailure, match=r"created with the adamw optimizer.*Send AdamParams"):
        optimizer_step(adapter("adamw"), DimuonParams(learning_rate=1e-3))


@pytest.fixture
def made_models(engine: Engine) -> Iterator[list[str]]:
    made: list[str] = []
    yield made
    for model_id in made:
        engine.drop(model_id)


def created(engine: Engine, made_models: list[str], optimizer: OptimizerConfig) -> str:
    model_id = f"model-{len(made_models)}"
    engine.create(model_id, LoraConfig(rank=4, seed=1), optimizer)
    made_models.append(model_id)
    return model_id


def test_state_is_saved_loaded_and_kept_in_snapshots(
    engine: Engine, made_models: list[str], tmp_path: Path
) -> None:
    rng = np.random.default_rng(3)
    data = [weighted(rng, 12)]
    params = DimuonParams(learning_rate=1e-2)
    first = created(engine, made_models, DimuonOptimizerConfig())
    losses = []
    for _ in range(6):
        losses.append(engine.run_pass(first, work(data), backward=True).metrics["loss:sum"])
        engine.optim_step(first, params)
    assert losses[-1] < losses[0]
    engine.save(first, tmp_path / "saved", optimizer=True)
    engine.run_pass(first, work(data), backward=True)
    write(engine.snapshot_files(first), tmp_path / "snapshot")
    second = created(engine, made_models, DimuonOptimizerConfig())
    engine.load(second, tmp_path / "saved", optimizer=True)
    engine.run_pass(second, work(data), backward=True)
    made_models.append("third")
    engine.restore("third", tmp_path / "snapshot")
    for model_id in (first, second, "third"):
        engine.optim_step(model_id, params)
    outputs = [engine.run_pass(m, work(data), backward=False) for m in (first, second, "third")]
    assert outputs[0].loss_fn_outputs == outputs[1].loss_fn_outputs == outputs[2].loss_fn_outputs
    with pytest.raises(UserFailure, match=r"Send DimuonParams"):
        engine.optim_step("third", AdamParams())


def test_state_of_another_family_is_refused_and_weights_alone_are_not(
    engine: Engine, made_models: list[str], tmp_path: Path
) -> None:
    dimuon = created(engine, made_models, DimuonOptimizerConfig())
    adamw = created(engine, made_models, AdamOptimizerConfig())
    engine.save(dimuon, tmp_path / "dimuon", optimizer=True)
    engine.save(adamw, tmp_path / "adamw", optimizer=True)
    with pytest.raises(UserFailure, match=r"state is of dimuon.*created with adamw"):
        engine.load(adamw, tmp_path / "dimuon", optimizer=True)
    with pytest.raises(UserFailure, match=r"state is of adamw.*created with dimuon"):
        engine.load(dimuon, tmp_path / "adamw", optimizer=True)
    engine.load(adamw, tmp_path / "dimuon", optimizer=False)
    assert not any(g.any() for g in gradients(engine, adamw, tmp_path / "after").values())


def test_a_step_beyond_float32_is_refused_and_changes_nothing() -> None:
    for rate in (1e308, 3e38):
        ours = adapter()
        ours.grad.normal_(generator=torch.Generator().manual_seed(1))
        before = {name: getattr(ours, name).clone() for name in ("master", "m", "grad")}
        with pytest.raises(UserFailure, match="learning_rate"):
            optimizer_step(ours, DimuonParams(learning_rate=rate))
        assert ours.step == 0
        for name, old in before.items():
            assert torch.equal(getattr(ours, name), old), name
