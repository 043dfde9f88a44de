"""Several ranks compute what one process computes, within rounding."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from custom_loss_examples import ppo
from numerics.helpers import (
    MAKERS,
    VOCABULARY,
    random_adapter,
    random_datum,
    request,
    sample,
    weighted,
    work,
)
from tinkex.client.loss_tracing import trace
from tinkex.engine import Engine
from tinkex.engine.adapters.checkpoints import to_peft_names, write
from tinkex.wire.errors import UserFailure
from tinkex.wire.sampling import SampleResponse
from tinkex.wire.tensors import TensorData
from tinkex.wire.training import AdamParams, DimuonParams, LoraConfig, optimizer_config_from

Pair = tuple[Engine, Engine]

#: Of the largest number of each kind.
TOLERANCE = 1e-5

PARAMS = {
    "adamw": AdamParams(learning_rate=1e-2, weight_decay=0.1, grad_clip_norm=1.0),
    "dimuon": DimuonParams(learning_rate=1e-2),
}


@pytest.fixture(
    params=[("qwen3", 2), ("tied", 2), ("qwen3", 4), ("hybrid", 4)],
    ids=lambda p: f"{p[0]}-{p[1]}",
)
def pair(request: Any, engine_of: Callable[[str, int], Engine]) -> Iterator[Pair]:
    """The same model on one rank and on several."""
    name, ranks = request.param
    engines = engine_of(name, 1), engine_of(name, ranks)
    yield engines
    for engine in engines:
        for model_id in [*engine._adapters._entries]:
            engine.drop(model_id)


def create(engine: Engine, model_id: str, optimizer: str = "adamw", rank: int = 4) -> None:
    engine.create(
        model_id, LoraConfig(rank=rank, seed=3), optimizer_config_from({"type": optimizer})
    )


def tensors(engine: Engine, model_id: str) -> dict[str, torch.Tensor]:
    """Weights, moments and gradients as a snapshot has them."""
    return {
        f"{name}:{prefix}{tensor}": matrix.clone()
        for name, file in engine.snapshot_files(model_id).items()
        for prefix, flat in file.flat.items()
        if file.layout is not None
        for tensor, matrix in to_peft_names(flat, file.layout).items()
    }


def assert_close(one: dict[str, Any], two: dict[str, Any]) -> None:
    """Each number, as a fraction of the largest of its file or kind."""
    assert one.keys() == two.keys()
    scale: dict[str, float] = {}
    for name, value in one.items():
        largest = float(abs(value).max()) if hasattr(value, "max") else abs(value)
        kind = name.partition(":")[0]
        scale[kind] = max(scale.get(kind, 1.0), largest)
    for name, value in one.items():
        gap = abs(value - two[name])
        gap = float(gap.max()) if hasattr(gap, "max") else gap
        assert gap <= TOLERANCE * scale[name.partition(":")[0]], (name, gap)


def outputs(engine: Engine, model_id: str, data: Any, *, backward: bool) -> dict[str, Any]:
    found = engine.run_pass(model_id, data, backward=backward)
    logprobs = {
        f"logprobs:{at}": each["logprobs"].to_numpy()
        for at, each in enumerate(found.loss_fn_outputs)
    }
    return {**logprobs, **{f"{name}:": value for name, value in found.metrics.items()}}


@pytest.mark.parametrize("optimizer", ["adamw", "dimuon"])
def test_losses_gradients_and_steps_are_those_of_one_rank(pair: Pair, optimizer: str) -> None:
    rng = np.random.default_rng(0)
    batches = [work([weighted(rng, length) for length in (9, 17, 5)]) for _ in range(3)]
    for engine in pair:
        create(engine, "m", optimizer)
    for batch in batches:
        assert_close(*(outputs(engine, "m", batch, backward=True) for engine in pair))
        assert_close(*(tensors(engine, "m") for engine in pair))
        assert_close(*(engine.optim_step("m", PARAMS[optimizer]) for engine in pair))
    one, two = (tensors(engine, "m") for engine in pair)
    assert_close(one, two)
    # The first weights are drawn whole from the seed, and are the same bits.
    for engine in pair:
        create(engine, "new")
    one, two = (tensors(engine, "new") for engine in pair)
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("loss", sorted(MAKERS))
def test_every_loss_is_that_of_one_rank(pair: Pair, loss: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    data = work([MAKERS[loss](rng, length) for length in (12, 7)], loss)
    adapter = random_adapter(pair[0], tmp_path / "adapter")
    for engine in pair:
        create(engine, "m")
        engine.load("m", adapter, optimizer=False)
    assert_close(*(outputs(engine, "m", data, backward=True) for engine in pair))
    assert_close(*(tensors(engine, "m") for engine in pair))
    assert_close(*(outputs(engine, "m", data, backward=False) for engine in pair))


def test_a_custom_loss_is_that_of_one_rank_and_fails_on_all(pair: Pair) -> None:
    rng = np.random.default_rng(2)
    traced = trace(ppo, dict.fromkeys(("logprobs", "old_logprobs", "advantages", "mask"), 1))
    data = [
        random_datum(
            rng,
            length,
            old_logprobs=rng.normal(-6.0, 0.5, length).astype(np.float32),
            advantages=rng.normal(size=length).astype(np.float32),
            mask=np.ones(length, np.float32),
        )
        for length in (8, 5)
    ]
    batch = work(data, "custom", loss_id="own")
    for engine in pair:
        create(engine, "m")
        engine.register_loss("own", "ppo", traced.inputs, traced.graph)
    assert_close(*(outputs(engine, "m", batch, backward=True) for engine in pair))
    assert_close(*(tensors(engine, "m") for engine in pair))
    missing = work(
        [random_datum(rng, 4, advantages=np.ones(4, np.float32))], "custom", loss_id="own"
    )
    for engine in pair:
        with pytest.raises(UserFailure):
            engine.run_pass("m", missing, backward=True)
        engine.drop_loss("own")


def test_samples_with_a_seed_are_those_of_one_rank(pair: Pair, tmp_path: Path) -> None:
    adapter = random_adapter(pair[0], tmp_path / "adapter", seed=1)
    prompt = np.random.default_rng(1).integers(0, VOCABULARY, 21).tolist()
    targets = TensorData.from_numpy(np.full((20, 2), 7, np.int64))
    requests = [
        request(prompt, samples=3, max_tokens=30, seed=5, stop=[], prompt_logprobs=True),
        request(prompt[:5], max_tokens=30, seed=6, stop=[], temperature=0.0),
        request(prompt[:9], max_tokens=30, seed=7, stop=[], top_p=0.8, topk_sample_logprobs=3),
        request(prompt, max_tokens=5, seed=8, stop=[], top_k=5, topk_prompt_logprobs=4),
        request(prompt, max_tokens=5, seed=9, target_prompt_logprobs=targets),
        request(prompt, max_tokens=5, seed=10, stop=[], prompt_alt_tokens_k=3),
    ]
    adapters = [None, adapter, adapter, adapter, None, adapter]
    for one, two in zip(*(sample(engine, requests, adapters) for engine in pair), strict=True):
        assert_same_sample(one, two)


def test_prompts_go_on_from_states_that_a_rank_has_kept(
    engine_of: Callable[[str, int], Engine], tmp_path: Path
) -> None:
    engines = engine_of("hybrid", 1), engine_of("hybrid", 4)
    adapter = random_adapter(engines[0], tmp_path / "adapter", seed=2)
    prompt = np.random.default_rng(5).integers(0, VOCABULARY, 40).tolist()
    found = []
    for engine in engines:
        sample(engine, [request(prompt, max_tokens=1, seed=1)], [adapter])
        longer = request([*prompt, 5, 6], samples=2, max_tokens=8, seed=2, stop=[])
        found += sample(engine, [longer], [adapter])
    assert [each.prompt_cache_hit_tokens for each in found] == [32, 32]
    assert_same_sample(*found)


def assert_same_sample(one: SampleResponse, two: SampleResponse) -> None:
    for mine, theirs in zip(one.sequences, two.sequences, strict=True):
        assert mine.tokens == theirs.tokens
        assert mine.stop_reason == theirs.stop_reason
        np.testing.assert_allclose(mine.logprobs_np, theirs.logprobs_np, atol=1e-4)
        if mine.topk_logprobs_np is not None:
            assert theirs.topk_logprobs_np is not None
            np.testing.assert_array_equal(
                mine.topk_logprobs_np.token_ids, theirs.topk_logprobs_np.token_ids
            )
    for mine_np, theirs_np in (
        (one.prompt_logprobs_np, two.prompt_logprobs_np),
        *(
            (each[0].to_numpy(), each[1].to_numpy())
            for each in [(one.target_prompt_logprobs, two.target_prompt_logprobs)]
            if each[0] is not None and each[1] is not None
        ),
    ):
        if mine_np is None:
            assert theirs_np is None
        else:
            np.testing.assert_allclose(mine_np, theirs_np, atol=1e-4)
    if one.prompt_alt_tokens is not None:
        assert two.prompt_alt_tokens is not None
        assert one.prompt_alt_tokens.tokens.tolist() == two.prompt_alt_tokens.tokens.tolist()


def test_a_checkpoint_of_any_number_of_ranks_goes_on_with_another(
    pair: Pair, tmp_path: Path
) -> None:
    """Also a snapshot in the middle of a batch, with its gradients."""
    rng = np.random.default_rng(3)
    before, middle, after = (work([weighted(rng, 11)]) for _ in range(3))
    first, second = pair
    for number, (source, target) in enumerate([(first, second), (second, first)]):
        model_id = f"m{number}"
        create(source, model_id)
        source.run_pass(model_id, before, backward=True)
        source.optim_step(model_id, PARAMS["adamw"])
        source.save(model_id, tmp_path / f"saved{number}", optimizer=True)
        source.run_pass(model_id, middle, backward=True)
        write(source.snapshot_files(model_id), tmp_path / f"snapshot{number}")
        target.restore(model_id, tmp_path / f"snapshot{number}")
        for engine in pair:
            engine.run_pass(model_id, after, backward=True)
        assert_close(*(engine.optim_step(model_id, PARAMS["adamw"]) for engine in pair))
        assert_close(*(tensors(engine, model_id) for engine in pair))
        create(target, f"loaded{number}")
        target.load(f"loaded{number}", tmp_path / f"saved{number}", optimizer=True)
    files = [
        sorted((path.name, path.stat().st_size) for path in (tmp_path / name).iterdir())
        for name in ("saved0", "saved1")
    ]
    assert files[0] == files[1]


def test_a_refused_step_changes_nothing_on_any_rank(pair: Pair) -> None:
    rng = np.random.default_rng(4)
    _, engine = pair
    create(engine, "m")
    engine.run_pass("m", work([weighted(rng, 9)]), backward=True)
    before = tensors(engine, "m")
    with pytest.raises(UserFailure, match="beyond the range"):
        engine.optim_step("m", AdamParams(learning_rate=1e38))
    assert_close(before, tensors(engine, "m"))
    assert np.isfinite(engine.optim_step("m", PARAMS["adamw"])["update_norm:mean"])
