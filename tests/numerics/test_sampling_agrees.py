"""Sampling and training give the same logprobs, alone and in a batch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from numerics.helpers import (
    VOCABULARY,
    model_from,
    random_adapter,
    random_datum,
    request,
    sample,
    weighted,
    work,
)
from tinkex.engine import Engine, EngineSettings
from tinkex.wire.inputs import Datum, ModelInput
from tinkex.wire.sampling import SampleResponse
from tinkex.wire.tensors import TensorData
from tinkex.wire.training import AdamParams


def forward_logprobs(engine: Engine, model_id: str, tokens: list[int]) -> np.ndarray:
    """Logprobs of the tokens after the first, from a training pass."""
    datum = Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": np.array(tokens[1:])},
    )
    output = engine.run_pass(model_id, work([datum]), backward=False)
    return output.loss_fn_outputs[0]["logprobs"].to_numpy()


def assert_equal(one: SampleResponse, two: SampleResponse) -> None:
    for left, right in zip(one.sequences, two.sequences, strict=True):
        assert left.tokens == right.tokens
        assert left.stop_reason == right.stop_reason
        np.testing.assert_allclose(left.logprobs_np, right.logprobs_np, atol=1e-4)


@pytest.fixture
def adapter(engine: Engine, tmp_path: Path) -> Path:
    return random_adapter(engine, tmp_path / "adapter", seed=1)


def test_sampled_and_prompt_logprobs_equal_those_of_a_forward_pass(
    engine: Engine, adapter: Path
) -> None:
    """Cached decoding, token by token, against one pass over the whole sequence."""
    prompt = np.random.default_rng(1).integers(0, VOCABULARY, 21).tolist()
    (answer,) = sample(
        engine,
        [request(prompt, samples=3, max_tokens=50, seed=5, stop=[], prompt_logprobs=True)],
        [adapter],
    )
    model_id = model_from(engine, "m", adapter)
    try:
        for sequence in answer.sequences:
            expected = forward_logprobs(engine, model_id, prompt + sequence.tokens)
            assert np.isnan(answer.prompt_logprobs_np[0])
            np.testing.assert_allclose(answer.prompt_logprobs_np[1:], expected[:20], atol=1e-4)
            np.testing.assert_allclose(sequence.logprobs_np, expected[20:], atol=1e-4)
    finally:
        engine.drop(model_id)
    assert len({tuple(sequence.tokens) for sequence in answer.sequences}) == 3


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-4), ("bfloat16", 5e-2)])
@pytest.mark.parametrize("arch", ["qwen3", "llama"])
def test_sampled_logprobs_equal_those_of_a_forward_pass_with_and_without_cached_prefixes(
    models: dict[str, Path], tmp_path: Path, arch: str, dtype: str, most: float
) -> None:
    """Groups with a common prefix that arrive together, repeat, and continue their own samples."""
    engine = Engine(
        EngineSettings(name=arch, folder=models[arch], device="cpu", dtype=dtype, kv_tokens=4096)
    )
    adapter = random_adapter(engine, tmp_path / "adapter", seed=1)
    model_id = model_from(engine, "m", adapter)
    prompt = np.random.default_rng(1).integers(0, VOCABULARY, 37).tolist()
    gaps, found = [], []
    prompts = [[*prompt, number] for number in range(4)]
    for _ in range(3):
        requests = [
            request(prompt, samples=2, max_tokens=20, seed=seed, stop=[])
            for seed, prompt in enumerate(prompts)
        ]
        for asked, answer in zip(prompts, sample(engine, requests, [adapter] * 4), strict=True):
            found.append(answer.prompt_cache_hit_tokens)
            for sequence in answer.sequences:
                expected = forward_logprobs(engine, model_id, asked + sequence.tokens)
                gaps.append(np.abs(sequence.logprobs_np - expected[len(asked) - 1 :]))
            asked += answer.sequences[0].tokens
    assert found == [0, 32, 32, 32] + [48] * 4 + [64] * 4
    assert np.concatenate(gaps).max() < most
    assert np.concatenate(gaps).mean() < most / 10


def test_prefix_cache_and_preemption_change_no_token(
    engine: Engine, models: dict[str, Path], adapter: Path
) -> None:
    """The same seeds with a prefix cache, without one, and with a cache that is far too small."""
    rng = np.random.default_rng(8)
    shared = rng.integers(0, VOCABULARY, 40).tolist()
    requests = [
        request(
            shared[: 20 + 5 * i] + rng.integers(0, VOCABULARY, 3 * i).tolist(),
            samples=1 + i % 3,
            max_tokens=30 + 4 * i,
            seed=i,
            temperature=0.8,
            top_p=0.95,
            stop=[],
        )
        for i in range(6)
    ]
    adapters = [None, adapter] * 3

    def on(**options: Any) -> Engine:
        return Engine(
            EngineSettings(
                name="qwen3", folder=models["qwen3"], device="cpu", **{"kv_tokens": 4096, **options}
            )
        )

    expected = sample(on(prefix_cache=False), requests, adapters)
    assert {answer.prompt_cache_hit_tokens for answer in expected} == {0}
    engines = [engine, on(kv_tokens=16 * 16), on(kv_tokens=16 * 16, prefix_cache=False)]
    for one in engines:
        for _ in range(2):
            for mine, theirs in zip(sample(one, requests, adapters), expected, strict=True):
                assert_equal(mine, theirs)


def test_sampling_one_checkpoint_while_another_model_trains_leaves_both_as_they_were(
    engine: Engine, tmp_path: Path
) -> None:
    """Prompts long enough to be cached, sampled before, during and after the training."""
    sampled = random_adapter(engine, tmp_path / "a", seed=1)
    start = random_adapter(engine, tmp_path / "b", seed=2)
    prompt = np.random.default_rng(5).integers(0, VOCABULARY, 50).tolist()
    data = [weighted(np.random.default_rng(6), 20)]
    question = request(prompt, samples=2, max_tokens=20, seed=3, stop=[], prompt_logprobs=True)
    before = sample(engine, [question], [sampled])[0]

    def train(model_id: str, *, sampling: bool) -> list[float]:
        model_from(engine, model_id, start)
        losses = []
        for _ in range(4):
            losses.append(engine.run_pass(model_id, work(data), backward=True).metrics["loss:sum"])
            if sampling:
                during = sample(engine, [question], [sampled])[0]
                assert_equal(during, before)
                np.testing.assert_allclose(
                    during.prompt_logprobs_np, before.prompt_logprobs_np, atol=1e-4
                )
            engine.optim_step(model_id, AdamParams(learning_rate=1e-2))
        engine.save(model_id, tmp_path / f"{model_id}-end", optimizer=False)
        engine.drop(model_id)
        return losses

    assert train("quiet", sampling=False) == train("busy", sampling=True)
    assert_equal(sample(engine, [question], [sampled])[0], before)
    weights = [
        (tmp_path / f"{name}-end" / "adapter_model.safetensors").read_bytes()
        for name in ("quiet", "busy")
    ]
    assert weights[0] == weights[1]


def test_the_same_seed_gives_the_same_tokens_alone_and_in_a_batch(
    engine: Engine, adapter: Path, tmp_path: Path
) -> None:
    other = random_adapter(engine, tmp_path / "other", rank=8, seed=2)
    rng = np.random.default_rng(2)
    kinds = [
        (None, {"temperature": 1.0}),
        (adapter, {"temperature": 0.7, "samples": 4}),
        (other, {"top_k": 20}),
        (None, {"top_p": 0.8, "samples": 2}),
        (adapter, {"temperature": 0.0}),
        (other, {"temperature": 1.3, "top_k": 50, "top_p": 0.9}),
        (None, {}),
    ]
    requests = [
        request(
            rng.integers(0, VOCABULARY, 3 + 9 * i).tolist(),
            **{"seed": i, "max_tokens": 10 + 7 * i, "stop": [], **options},
        )
        for i, (_, options) in enumerate(kinds)
    ]
    together = sample(engine, requests, [adapter for adapter, _ in kinds])
    for one, (adapter_used, _), answer in zip(requests, kinds, together, strict=True):
        assert_equal(sample(engine, [one], [adapter_used])[0], answer)


def test_another_seed_and_another_sample_give_other_tokens(engine: Engine) -> None:
    options = {"samples": 3, "max_tokens": 24, "temperature": 1.0, "stop": []}
    requests = [request([1, 2, 3], seed=seed, **options) for seed in (1, 2)]
    drawn = [tuple(s.tokens) for answer in sample(engine, requests) for s in answer.sequences]
    assert len(set(drawn)) == 6


def test_preempted_sequences_continue_unchanged(engine: Engine, models: dict[str, Path]) -> None:
    """A cache of 11 pages, and four sequences that need 4 to 6 pages each."""
    crowded = Engine(
        EngineSettings(name="qwen3", folder=models["qwen3"], device="cpu", kv_tokens=11 * 16)
    )
    requests = [
        request([i + 1] * (8 + i), samples=1 + i % 2, max_tokens=50 + 8 * i, seed=i, stop=[])
        for i in range(4)
    ]
    for mine, theirs in zip(sample(crowded, requests), sample(engine, requests), strict=True):
        assert_equal(mine, theirs)


def test_a_prompt_prefilled_in_chunks_gives_the_same_result(
    engine: Engine, adapter: Path, models: dict[str, Path]
) -> None:
    chunked = Engine(
        EngineSettings(
            name="qwen3", folder=models["qwen3"], device="cpu", kv_tokens=512, max_batch_tokens=13
        )
    )
    rng = np.random.default_rng(3)
    requests = [
        request(
            rng.integers(0, VOCABULARY, length).tolist(),
            max_tokens=8,
            seed=1,
            stop=[],
            prompt_logprobs=True,
            topk_prompt_logprobs=3,
            target_prompt_logprobs=TensorData.from_numpy(rng.integers(-1, 9, (length - 1, 2))),
            prompt_alt_tokens_k=2,
        )
        for length in (5, 40, 33)
    ]
    adapters = [None, adapter, None]
    whole = sample(engine, requests, adapters)
    for mine, theirs in zip(sample(chunked, requests, adapters), whole, strict=True):
        assert_equal(mine, theirs)
        np.testing.assert_allclose(mine.prompt_logprobs_np, theirs.prompt_logprobs_np, atol=1e-4)
        np.testing.assert_allclose(
            mine.topk_prompt_logprobs_np.logprobs,
            theirs.topk_prompt_logprobs_np.logprobs,
            atol=1e-4,
        )
        np.testing.assert_allclose(
            mine.target_prompt_logprobs.to_numpy(),
            theirs.target_prompt_logprobs.to_numpy(),
            atol=1e-4,
        )
        assert mine.prompt_alt_tokens.tokens == theirs.prompt_alt_tokens.tokens


def test_a_saved_sampler_gives_the_same_results_while_training_continues(
    engine: Engine, tmp_path: Path
) -> None:
    rng = np.random.default_rng(4)
    data = [weighted(rng, 20)]
    model_id = model_from(engine, "m", random_adapter(engine, tmp_path / "start"))
    try:
        saved = tmp_path / "saved"
        engine.save(model_id, saved, optimizer=False)
        question = request([1, 2, 3], samples=2, max_tokens=20, seed=3, stop=[])
        before = sample(engine, [question], [saved])[0]
        engine.submit(99, question, adapter=saved)
        answers = []
        while engine.sampling:  # one training step between any two bursts
            answers += engine.advance()
            engine.run_pass(model_id, work(data), backward=True)
            engine.optim_step(model_id, AdamParams(learning_rate=1e-2))
        during, after = answers[0].outcome, sample(engine, [question], [saved])[0]
        assert before == during == after
        engine.save(model_id, tmp_path / "later", optimizer=False)
        assert sample(engine, [question], [tmp_path / "later"])[0] != before
    finally:
        engine.drop(model_id)


def test_sampling_leaves_training_as_it_was(engine: Engine, tmp_path: Path) -> None:
    start = random_adapter(engine, tmp_path / "start")
    data = [weighted(np.random.default_rng(6), 20)]

    def losses(model_id: str, *, sampling: bool) -> list[float]:
        model_from(engine, model_id, start)
        found = []
        for _ in range(4):
            found.append(engine.run_pass(model_id, work(data), backward=True).metrics["loss:sum"])
            if sampling:
                sample(engine, [request([5, 6], max_tokens=5)], [start])
            engine.optim_step(model_id, AdamParams(learning_rate=1e-2))
        engine.drop(model_id)
        return found

    assert losses("quiet", sampling=False) == losses("busy", sampling=True)


def test_samples_follow_the_model_s_distribution(engine: Engine) -> None:
    """Two thousand first tokens at a temperature: their mean logprob is the negative entropy."""
    prompt = [7, 8, 9]
    (answer,) = sample(
        engine, [request(prompt, samples=1000, max_tokens=1, seed=1, temperature=2.0, stop=[])]
    )
    drawn = np.array([sequence.logprobs_np[0] for sequence in answer.sequences])
    (table,) = sample(
        engine, [request(prompt, max_tokens=1, temperature=2.0, topk_sample_logprobs=VOCABULARY)]
    )
    logprobs = table.sequences[0].topk_logprobs_np.logprobs[0].astype(np.float64)
    entropy = -(np.exp(logprobs) * logprobs).sum()
    spread = np.sqrt((np.exp(logprobs) * (logprobs + entropy) ** 2).sum() / len(drawn))
    assert np.exp(logprobs).sum() == pytest.approx(1.0, abs=1e-5)
    assert abs(drawn.mean() + entropy) < 4 * spread


def test_a_bfloat16_model_stays_near_the_float32_one(
    engine: Engine, models: dict[str, Path], adapter: Path
) -> None:
    short = Engine(
        EngineSettings(
            name="qwen3", folder=models["qwen3"], device="cpu", dtype="bfloat16", kv_tokens=512
        )
    )
    prompt = np.random.default_rng(9).integers(0, VOCABULARY, 12).tolist()
    (answer,) = sample(
        short, [request(prompt, max_tokens=12, seed=1, stop=[], prompt_logprobs=True)], [adapter]
    )
    tokens = prompt + answer.sequences[0].tokens
    model_from(short, "m", adapter)
    expected = forward_logprobs(short, "m", tokens)
    # Within one number format sampling and training agree closely ...
    gaps = np.abs(
        np.concatenate([answer.prompt_logprobs_np[1:], answer.sequences[0].logprobs_np]) - expected
    )
    assert gaps.max() < 5e-2
    assert gaps.mean() < 5e-3
    # ... and the formats differ by rounding: logits of this model spread over 20 nats.
    model_from(engine, "m", adapter)
    exact = forward_logprobs(engine, "m", tokens)
    engine.drop("m")
    assert np.abs(expected - exact).mean() < 0.15
    losses = []
    data = [random_datum(np.random.default_rng(1), 16, weights=np.ones(16, np.float32))]
    for _ in range(12):
        losses.append(short.run_pass("m", work(data), backward=True).metrics["loss:sum"])
        short.optim_step("m", AdamParams(learning_rate=1e-2))
    assert losses[-1] < 0.5 * losses[0]
