"""Mixed micro-batches give each model the results of running alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.test_custom_loss_graph import declared, to_wire
from numerics.helpers import MAKERS, gradients, model_from, random_adapter, random_datum, work
from tinkex.engine import Engine
from tinkex.engine.training.batch_mixer import BatchMixer, ModelQueue
from tinkex.wire.custom_loss import CustomLossGraph
from tinkex.wire.errors import UserFailure
from tinkex.wire.inputs import Datum

LENGTHS = (12, 3, 25, 9)


def ppo_written_out(logprobs, old_logprobs, advantages):
    ratio = torch.exp(logprobs - old_logprobs)
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()
    return loss, {"custom/ratio:mean": ratio.mean(), "custom/ratio:sum": ratio.sum()}


def cross_entropy_written_out(logprobs, weights):
    loss = -(logprobs * weights).sum()
    return loss, {"custom/loss:sum": loss}


def fails_on_long_data(logprobs, weights):
    return (logprobs * weights.reshape(3)).sum(), {}


def register(engine: Engine, loss_id: str, fn: Any, ranks: dict[str, int]) -> str:
    graph = CustomLossGraph.model_validate(to_wire(fn))
    engine.register_loss(loss_id, fn.__name__, declared(ranks), graph)
    return loss_id


def custom_twin(datum: Datum) -> Datum:
    """The same datum with the input names of the custom loss."""
    inputs = dict(datum.loss_fn_inputs)
    inputs["old_logprobs"] = inputs.pop("logprobs")
    return Datum(model_input=datum.model_input, loss_fn_inputs=inputs)


def flat(found: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([found[name].flatten() for name in sorted(found)])


def close(found: torch.Tensor, wanted: torch.Tensor, share: float = 1e-5) -> bool:
    return bool((found - wanted).norm() <= share * wanted.norm())


@pytest.fixture
def cases(engine: Engine, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Eight models: every built-in loss, several targets for a token, and a custom loss."""
    register(engine, "ppo", ppo_written_out, {"logprobs": 1, "old_logprobs": 1, "advantages": 1})
    rng = np.random.default_rng(21)
    works = {
        loss: work([make(rng, length) for length in LENGTHS], loss) for loss, make in MAKERS.items()
    }
    targets = rng.integers(0, 400, (11, 4))
    weights = rng.normal(size=(11, 4)).astype(np.float32)
    works["wide"] = work([random_datum(rng, 11, target_tokens=targets, weights=weights)])
    twins = [custom_twin(MAKERS["ppo"](rng, length)) for length in LENGTHS]
    works["custom"] = work(twins, "custom", loss_id="ppo")
    for seed, name in enumerate(works):
        model_from(
            engine, name, random_adapter(engine, tmp_path / name, rank=1 + 2 * seed, seed=seed)
        )
    yield works
    for name in works:
        engine.drop(name)


@pytest.mark.parametrize(("max_tokens", "chunk_tokens"), [(10_000, None), (60, 7), (20, None)])
def test_a_mixed_batch_gives_each_model_what_it_gets_alone(
    engine: Engine,
    cases: dict[str, Any],
    tmp_path: Path,
    max_tokens: int,
    chunk_tokens: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = {}
    for name, asked in cases.items():
        output = engine.run_pass(name, asked, backward=True)
        alone[name] = output, flat(gradients(engine, name, tmp_path / f"{name}-alone"))
        engine.clear_gradients(name)
    passes = {name: engine.begin_pass(name, asked, backward=True) for name, asked in cases.items()}
    if chunk_tokens is not None:  # chunks of the head that contain several models and losses
        monkeypatch.setattr(engine.model.head, "chunk_tokens", chunk_tokens)
    mixer, batches = BatchMixer(), 0
    while queues := [
        ModelQueue(model_id=name, backward=True, lengths=running.waiting)
        for name, running in passes.items()
        if running.waiting
    ]:
        cuts = mixer.next_batch(queues, max_tokens)
        engine.run_micro_batch([(passes[name], rows) for name, rows in cuts])
        batches += 1
    assert (batches == 1) == (max_tokens == 10_000)
    for name, running in passes.items():
        output, gradient = alone[name]
        found = running.output()
        assert found.metrics == pytest.approx(output.metrics, rel=1e-4, abs=1e-5), name
        for mine, theirs in zip(found.loss_fn_outputs, output.loss_fn_outputs, strict=True):
            mine_N, theirs_N = mine["logprobs"].to_numpy(), theirs["logprobs"].to_numpy()
            assert mine_N.shape == theirs_N.shape
            np.testing.assert_allclose(mine_N, theirs_N, atol=2e-5)
        assert close(flat(gradients(engine, name, tmp_path / name / "mixed")), gradient), name


def test_forward_passes_mix_too_and_leave_no_gradient(
    engine: Engine, cases: dict[str, Any], tmp_path: Path
) -> None:
    alone = {name: engine.run_pass(name, asked, backward=False) for name, asked in cases.items()}
    passes = [engine.begin_pass(name, asked, backward=False) for name, asked in cases.items()]
    engine.run_micro_batch([(running, len(running.waiting)) for running in passes])
    for running in passes:
        metrics = running.output().metrics
        assert metrics == pytest.approx(alone[running.model_id].metrics, rel=1e-4, abs=1e-5)
        found = gradients(engine, running.model_id, tmp_path / f"{running.model_id}-after")
        assert not flat(found).any()


@pytest.mark.parametrize(
    ("loss", "fn", "ranks"),
    [
        ("ppo", ppo_written_out, {"logprobs": 1, "old_logprobs": 1, "advantages": 1}),
        ("cross_entropy", cross_entropy_written_out, {"logprobs": 1, "weights": 1}),
    ],
)
def test_a_custom_loss_equals_the_built_in_one(
    loss: str, fn: Any, ranks: dict[str, int], engine: Engine, tmp_path: Path
) -> None:
    register(engine, loss, fn, ranks)
    rng = np.random.default_rng(22)
    data = [MAKERS[loss](rng, length) for length in LENGTHS]
    twins = [custom_twin(d) for d in data] if loss == "ppo" else data
    model_id = model_from(engine, "m", random_adapter(engine, tmp_path / "adapter"))
    found = []
    for asked in (work(data, loss), work(twins, "custom", loss_id=loss)):
        output = engine.run_pass(model_id, asked, backward=True)
        found.append((output, flat(gradients(engine, model_id, tmp_path / asked.loss_fn))))
        engine.clear_gradients(model_id)
    engine.drop(model_id)
    (built_in, gradient), (custom, own) = found
    assert custom.metrics["loss:sum"] == pytest.approx(built_in.metrics["loss:sum"], rel=1e-5)
    assert close(own, gradient)
    assert custom.metrics["entropy:sum"] == pytest.approx(built_in.metrics["entropy:sum"], rel=1e-4)
    assert all(name.count(":") == 1 for name in custom.metrics)
    if loss == "ppo":
        ratios = [
            np.exp(out["logprobs"].to_numpy() - datum.loss_fn_inputs["logprobs"].to_numpy())
            for datum, out in zip(data, custom.loss_fn_outputs, strict=True)
        ]
        # A mean is over the data, each with its own value.
        means, sums = [r.mean() for r in ratios], [r.sum() for r in ratios]
        assert custom.metrics["custom/ratio:mean"] == pytest.approx(np.mean(means), rel=1e-4)
        assert custom.metrics["custom/ratio:sum"] == pytest.approx(np.sum(sums), rel=1e-4)


def test_a_custom_loss_that_fails_on_its_data_fails_alone(engine: Engine, tmp_path: Path) -> None:
    register(engine, "three", fails_on_long_data, {"logprobs": 1, "weights": 1})
    rng = np.random.default_rng(23)
    good = work([MAKERS["cross_entropy"](rng, 7)])
    bad = work([MAKERS["cross_entropy"](rng, n) for n in (3, 4)], "custom", loss_id="three")
    model_from(engine, "good", random_adapter(engine, tmp_path / "a"))
    model_from(engine, "bad", random_adapter(engine, tmp_path / "b", seed=1))
    alone = engine.run_pass("good", good, backward=True)
    engine.clear_gradients("good")
    passes = [engine.begin_pass(n, w, backward=True) for n, w in (("bad", bad), ("good", good))]
    engine.run_micro_batch([(running, len(running.waiting)) for running in passes])
    try:
        with pytest.raises(UserFailure, match=r"custom loss 'fails_on_long_data': node"):
            passes[0].output()
        assert not passes[0].waiting
        assert passes[1].output().metrics == pytest.approx(alone.metrics, rel=1e-5)
    finally:
        engine.drop("good")
        engine.drop("bad")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"old_logprobs": None}, r"data\[0\].loss_fn_inputs: 'old_logprobs' is missing"),
        ({"old_logprobs": np.zeros((5, 2), np.float32)}, r"has shape \[5, 2\]; custom loss"),
        ({"target_tokens": np.ones((5, 2), np.int64)}, r"takes one target for each token"),
    ],
)
def test_data_that_does_not_fit_a_custom_loss_is_refused(
    change: dict[str, Any], message: str, engine: Engine, tmp_path: Path
) -> None:
    register(engine, "ppo", ppo_written_out, {"logprobs": 1, "old_logprobs": 1, "advantages": 1})
    datum = custom_twin(MAKERS["ppo"](np.random.default_rng(1), 5))
    inputs = {**datum.loss_fn_inputs, **change}
    given = {name: value for name, value in inputs.items() if value is not None}
    wrong = Datum(model_input=datum.model_input, loss_fn_inputs=given)
    model_id = model_from(engine, "m", random_adapter(engine, tmp_path / "adapter"))
    try:
        with pytest.raises(UserFailure, match=message):
            engine.run_pass(model_id, work([wrong], "custom", loss_id="ppo"), backward=True)
    finally:
        engine.drop(model_id)
