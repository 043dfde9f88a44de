"""The sampler: results and refused requests."""

import gc
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tinkex.engine import Engine, EngineSettings
from tinkex.engine.adapters.adapters import SamplerAdapter
from tinkex.engine.adapters.checkpoints import SavedAdapter, read_adapter
from tinkex.engine.model.base_model import BaseModel
from tinkex.engine.model.targets import make_layout
from tinkex.engine.sampling import sampler
from tinkex.engine.sampling.decode_graphs import Burst
from tinkex.engine.sampling.model_runner import ModelRunner
from tinkex.engine.sampling.scheduler import PrefillChunk
from tinkex.engine.sampling.sequences import SampleSequence
from tinkex.engine.sampling.token_sampling import SampleStep, sample_tokens
from tinkex.models.tokenizer import Tokenizer, load_tokenizer
from tinkex.wire.errors import UserFailure
from tinkex.wire.inputs import ModelInput
from tinkex.wire.sample_controls import SampleControls, StoredSampleRequest
from tinkex.wire.sampling import SampleRequest, SampleResponse, SamplingParams
from tinkex.wire.tensors import TensorData
from tinkex.wire.training import AdamOptimizerConfig, LoraConfig


@pytest.fixture(scope="session")
def tokenizer(tiny_folder: Path) -> Tokenizer:
    return load_tokenizer(tiny_folder)


def request(prompt: Sequence[int] = (1, 2, 3), **options: Any) -> SampleRequest:
    params = {
        name: options.pop(name) for name in list(options) if name in SamplingParams.model_fields
    }
    return SampleRequest(
        prompt=ModelInput.from_ints(list(prompt)),
        sampling_params=SamplingParams(**{"seed": 1, **params}),
        **options,
    )


def sample(engine: Engine, one: SampleRequest, adapter: Path | None = None) -> SampleResponse:
    engine.submit(1, one, adapter=adapter)
    finished = []
    while engine.sampling:
        finished += engine.advance()
    (only,) = finished
    assert not isinstance(only.outcome, Exception)
    return only.outcome


def tokens(engine: Engine, **options: Any) -> list[int]:
    return sample(engine, request(**options)).sequences[0].tokens


def test_the_same_seed_repeats_and_another_does_not(engine: Engine) -> None:
    first = tokens(engine, max_tokens=20, seed=4, stop=[])
    assert tokens(engine, max_tokens=20, seed=4, stop=[]) == first
    assert tokens(engine, max_tokens=20, seed=5, stop=[]) != first


def test_without_a_seed_samples_differ(engine: Engine) -> None:
    drawn = {tuple(tokens(engine, max_tokens=20, seed=None, stop=[])) for _ in range(3)}
    assert len(drawn) == 3


def test_greedy_sampling_takes_the_most_likely_token(engine: Engine) -> None:
    answer = sample(
        engine, request(max_tokens=10, temperature=0.0, stop=[], topk_sample_logprobs=2)
    ).sequences[0]
    assert answer.topk_logprobs_np is not None
    assert answer.tokens == answer.topk_logprobs_np.token_ids[:, 0].tolist()
    np.testing.assert_allclose(
        answer.logprobs_np, answer.topk_logprobs_np.logprobs[:, 0], atol=1e-6
    )
    assert answer.tokens == tokens(engine, max_tokens=10, top_k=1, stop=[])


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.9}, {"top_k": 3}])
@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-40, 1e-20, 9e-7])
def test_below_the_minimum_temperature_sampling_is_greedy(
    engine: Engine, temperature: float, cut: dict[str, Any]
) -> None:
    options = {"max_tokens": 6, "stop": [], "prompt_alt_tokens_k": 2}
    greedy = sample(engine, request(temperature=0.0, **options))
    found = sample(engine, request(temperature=temperature, **options, **cut))
    assert found == greedy


@pytest.mark.parametrize("temperature", [1e-6, 1e-3, 0.1, 10.0, 1e10, 1e38, 1e39, 1e308])
def test_every_temperature_gives_finite_logprobs(engine: Engine, temperature: float) -> None:
    answer = sample(
        engine,
        request(
            temperature=temperature,
            max_tokens=6,
            stop=[],
            topk_sample_logprobs=4,
            prompt_alt_tokens_k=2,
        ),
    )
    (sequence,) = answer.sequences
    assert np.isfinite(sequence.logprobs_np).all()
    assert np.isfinite(sequence.topk_logprobs_np.logprobs).all()
    assert answer.prompt_alt_tokens is not None
    assert np.isfinite(answer.prompt_alt_tokens.logprobs.to_numpy()[1:]).all()


def test_a_step_that_does_not_fit_in_memory_is_repeated_in_smaller_steps(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [
        request(prompt=range(at, at + 150), max_tokens=12, seed=at, stop=[], prompt_logprobs=True)
        for at in range(6)
    ]
    alone = [sample(engine, each) for each in requests]
    assert engine._sampler is not None
    runner, scheduler = engine._sampler._runner, engine._sampler.scheduler
    prefill, decode = runner.prefill, runner.decode
    full = torch.OutOfMemoryError("out of memory")

    def small_prefill(chunks: Sequence[PrefillChunk]) -> Any:
        if sum(chunk.stop - chunk.start for chunk in chunks) > 200:
            raise full
        return prefill(chunks)

    def small_decode(sequences: Sequence[SampleSequence]) -> torch.Tensor:
        if len(sequences) > 2:
            raise full
        return decode(sequences)

    monkeypatch.setattr(runner, "prefill", small_prefill)
    monkeypatch.setattr(runner, "decode", small_decode)
    try:
        for ticket, each in enumerate(requests):
            engine.submit(ticket, each, adapter=None)
        found = {}
        while engine.sampling:
            for finished in engine.advance():
                assert isinstance(finished.outcome, SampleResponse), finished.outcome
                found[finished.ticket] = finished.outcome
        for ticket, expected in enumerate(alone):
            assert found[ticket].sequences[0].tokens == expected.sequences[0].tokens
            np.testing.assert_allclose(
                found[ticket].prompt_logprobs_np, expected.prompt_logprobs_np, atol=1e-4
            )

        # What does not fit alone is refused with the numbers, and the next request is served.
        monkeypatch.setattr(runner, "prefill", lambda _: throw(full))
        engine.submit(7, requests[0], adapter=None)
        (finished,) = [one for _ in range(20) for one in engine.advance()]
        assert isinstance(finished.outcome, UserFailure)
        assert "even alone" in str(finished.outcome)
        assert "are free" in str(finished.outcome)
        monkeypatch.setattr(runner, "prefill", prefill)
        assert sample(engine, requests[1]).sequences[0].tokens == alone[1].sequences[0].tokens
        assert scheduler._divisor > 1
        monkeypatch.setattr(sampler, "SMALL_STEPS_S", -1.0)
        for _ in range(10):
            engine.advance()
        assert scheduler._divisor == 1
    finally:
        scheduler._divisor = 1


def throw(error: Exception) -> Any:
    raise error


class EmulatedBursts:
    """Does on the CPU what a GPU does in one go: several steps of sequences, sampled without the host.

    Sequences that need the host stay at their position.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner, self._head = runner, runner._model.head
        self.looks: list[tuple[int, int]] = []

    def start(self, sequences: Sequence[SampleSequence], steps: int) -> Burst:
        self.looks.append((len(sequences), steps))
        free = [at for at, s in enumerate(sequences) if not s.request.sampling.needs_host]
        ring = torch.zeros(2, steps, len(sequences), dtype=torch.int32)
        kept = [list(s.tokens) for s in sequences]
        for step in range(steps):
            logits = self._head.logits(self._runner.decode(sequences))
            drawn = sample_tokens(
                logits[free],
                [
                    SampleStep(s.request.sampling, s.index, len(s.tokens))
                    for s in (sequences[at] for at in free)
                ],
            )
            ring[0, step, free] = torch.tensor(drawn.tokens, dtype=torch.int32)
            ring[1, step, free] = torch.tensor(drawn.logprobs).view(torch.int32)
            for at, token in zip(free, drawn.tokens, strict=True):
                if len(sequences[at].tokens) < sequences[at].request.max_new_tokens:
                    sequences[at].tokens.append(token)
        for sequence, tokens in zip(sequences, kept, strict=True):
            sequence.tokens[:] = tokens
        return Burst(logits, ring)


def test_sequences_that_need_the_host_run_beside_bursts_of_the_others(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [
        request(prompt=(at, 2, 3), max_tokens=21, seed=at, stop=[], topk_sample_logprobs=at == 0)
        for at in range(9)
    ]
    controls = SampleControls(bias_tokens=[5, 6], biases=[4.0, 3.0])
    # A GPU adds biases by itself.
    requests[1] = StoredSampleRequest(**requests[1].model_dump(), controls=controls)
    alone = [sample(engine, each).sequences[0] for each in requests]
    assert engine._sampler is not None
    runner = engine._sampler._runner
    bursts = EmulatedBursts(runner)
    monkeypatch.setattr(ModelRunner, "decode_steps", 8)
    monkeypatch.setattr(runner, "start_burst", bursts.start)
    for ticket, each in enumerate(requests):
        engine.submit(ticket, each, adapter=None)
    found = {}
    while engine.sampling:
        for finished in engine.advance():
            assert not isinstance(finished.outcome, Exception)
            found[finished.ticket] = finished.outcome.sequences[0]
    for ticket, expected in enumerate(alone):
        assert found[ticket].tokens == expected.tokens
        np.testing.assert_allclose(found[ticket].logprobs_np, expected.logprobs_np, atol=1e-5)
    # One of nine needs the host: the others get eight tokens for each look, and it gets one.
    assert bursts.looks[:3] == [(9, 8)] * 3
    assert set(bursts.looks[3:]) == {(1, 1)}
    assert found[0].topk_logprobs_np is not None


def test_samples_of_a_request_differ_and_come_in_order(engine: Engine) -> None:
    several = sample(engine, request(num_samples=5, max_tokens=12, stop=[])).sequences
    assert len({tuple(sequence.tokens) for sequence in several}) == 5
    # The first of several samples equals a single sample.
    assert several[0].tokens == tokens(engine, max_tokens=12, stop=[])


def test_a_stop_token_is_included_and_is_the_stop_reason(engine: Engine) -> None:
    free = tokens(engine, max_tokens=20, stop=[])
    at = free.index(free[7])
    answer = sample(engine, request(max_tokens=20, stop=[free[7]])).sequences[0]
    assert answer.tokens == free[: at + 1]
    assert answer.stop_reason == "stop"
    assert answer.logprobs is not None
    assert len(answer.logprobs) == at + 1


def test_a_stop_text_ends_with_the_token_that_completes_it(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    free = tokens(engine, max_tokens=40, stop=[])
    text = tokenizer.decode(free)
    stop = text[len(text) // 2 :][:3]
    answer = sample(engine, request(max_tokens=40, stop=stop)).sequences[0]
    assert answer.stop_reason == "stop"
    assert answer.tokens == free[: len(answer.tokens)]
    assert stop in tokenizer.decode(answer.tokens)
    assert stop not in tokenizer.decode(answer.tokens[:-1])
    assert answer == sample(engine, request(max_tokens=40, stop=["never there", stop])).sequences[0]


def test_without_stop_the_end_of_a_turn_stops_and_an_empty_list_never_does(
    tiny_folder: Path, engine: Engine
) -> None:
    (eos,) = engine.model.eos_token_ids
    # With 400 tokens in the vocabulary, an end token within 2000 samples is almost certain.
    by_default = sample(engine, request(max_tokens=1900, temperature=3.0)).sequences[0]
    assert by_default.tokens[-1] == eos
    assert by_default.stop_reason == "stop"
    length = len(by_default.tokens)
    never = sample(engine, request(max_tokens=length + 5, temperature=3.0, stop=[])).sequences[0]
    assert never.tokens[:length] == by_default.tokens
    assert (len(never.tokens), never.stop_reason) == (length + 5, "length")
    # A stop text is added to the model's end tokens; token ids replace them.
    by_text = sample(engine, request(max_tokens=1900, temperature=3.0, stop="nothing like it"))
    assert by_text.sequences[0].tokens == by_default.tokens
    absent = next(token for token in range(400) if token not in never.tokens)
    by_id = sample(engine, request(max_tokens=length + 5, temperature=3.0, stop=[absent]))
    assert by_id.sequences[0].tokens == never.tokens


def test_no_max_tokens_means_up_to_the_context(engine: Engine) -> None:
    answer = sample(engine, request([5] * 2040, stop=[])).sequences[0]
    assert (len(answer.tokens), answer.stop_reason) == (8, "length")


def test_prompt_logprobs_begin_with_none(engine: Engine) -> None:
    answer = sample(
        engine,
        request([4, 5, 6, 7], max_tokens=1, prompt_logprobs=True, topk_prompt_logprobs=400),
    )
    assert answer.prompt_logprobs is not None
    assert answer.prompt_logprobs[0] is None
    assert answer.topk_prompt_logprobs is not None
    assert answer.topk_prompt_logprobs[0] is None
    for position, token in enumerate([5, 6, 7], start=1):
        row = answer.topk_prompt_logprobs[position]
        assert row is not None
        assert dict(row)[token] == pytest.approx(answer.prompt_logprobs[position], abs=1e-5)
        assert [pair[1] for pair in row] == sorted((pair[1] for pair in row), reverse=True)


def test_prompt_logprobs_can_be_limited_to_the_last_positions(engine: Engine) -> None:
    prompt = list(range(10))
    options = {"max_tokens": 1, "prompt_logprobs": True, "topk_prompt_logprobs": 2}
    whole = sample(engine, request(prompt, **options))
    last = sample(engine, request(prompt, **options, prompt_logprobs_last_n=3))
    assert last.prompt_logprobs is not None
    assert whole.prompt_logprobs is not None
    assert last.prompt_logprobs[:7] == [None] * 7
    assert last.prompt_logprobs[7:] == pytest.approx(whole.prompt_logprobs[7:], abs=1e-5)
    assert last.topk_prompt_logprobs is not None
    assert last.topk_prompt_logprobs[:7] == [None] * 7
    assert None not in last.topk_prompt_logprobs[7:]


def all_logprobs(engine: Engine, prompt: list[int]) -> np.ndarray:
    """[prompt length - 1, vocabulary]: row i predicts position i + 1."""
    answer = sample(engine, request(prompt, max_tokens=1, topk_prompt_logprobs=400))
    table = answer.topk_prompt_logprobs_np
    assert table is not None
    found = np.empty((len(prompt), 400), np.float32)
    np.put_along_axis(found, table.token_ids, table.logprobs, axis=1)
    return found[1:]


def test_target_tokens_are_scored_at_their_positions(engine: Engine) -> None:
    prompt = list(range(40, 60))
    expected = all_logprobs(engine, prompt)
    targets = np.full((19, 3), -1)
    targets[4], targets[18, 1] = [7, 399, 0], 5
    dense = sample(
        engine, request(prompt, max_tokens=1, target_prompt_logprobs=TensorData.from_numpy(targets))
    ).target_prompt_logprobs
    assert dense is not None
    scored = dense.to_numpy()
    assert scored.shape == (19, 3)
    assert (np.isnan(scored) == (targets == -1)).all()
    np.testing.assert_allclose(scored[4], expected[4, [7, 399, 0]], atol=1e-5)
    np.testing.assert_allclose(scored[18, 1], expected[18, 5], atol=1e-5)
    sparse = TensorData(
        data=[7, 399, 0, 5],
        dtype="int64",
        shape=[19, 3],
        sparse_crow_indices=[0] * 5 + [3] * 14 + [4],
        sparse_col_indices=[0, 1, 2, 1],
    )
    answer = sample(engine, request(prompt, max_tokens=1, target_prompt_logprobs=sparse))
    listed = answer.target_prompt_logprobs
    assert listed is not None
    assert listed.shape == [19, 3]
    assert listed.sparse_crow_indices == sparse.sparse_crow_indices
    assert listed.sparse_col_indices == sparse.sparse_col_indices
    np.testing.assert_allclose(listed.data, [*scored[4], scored[18, 1]], atol=1e-5)


def test_the_last_positions_alone_limit_neither_targets_nor_alternatives(engine: Engine) -> None:
    prompt = list(range(10))
    answer = sample(
        engine,
        request(
            prompt,
            max_tokens=1,
            prompt_logprobs=True,
            prompt_logprobs_last_n=2,
            target_prompt_logprobs=TensorData.from_numpy(np.full((9, 1), 3)),
            prompt_alt_tokens_k=2,
        ),
    )
    assert answer.prompt_logprobs is not None
    assert answer.prompt_logprobs[:8] == [None] * 8
    assert None not in answer.prompt_logprobs[8:]
    assert answer.target_prompt_logprobs is not None
    assert not np.isnan(answer.target_prompt_logprobs.to_numpy()).any()
    assert answer.prompt_alt_tokens is not None
    assert answer.prompt_alt_tokens.tokens.shape == [9, 2]


def test_alternatives_are_sampled_at_every_position(engine: Engine) -> None:
    prompt = list(range(100, 112))
    expected = all_logprobs(engine, prompt).astype(np.float64)
    asked = request(prompt, max_tokens=1, prompt_alt_tokens_k=300, seed=3)
    answer = sample(engine, asked)
    alt = answer.prompt_alt_tokens
    assert alt is not None
    tokens, logprobs = alt.tokens.to_numpy(), alt.logprobs.to_numpy()
    assert tokens.dtype == np.int64
    assert tokens.shape == logprobs.shape == (11, 300)
    np.testing.assert_allclose(
        logprobs, np.take_along_axis(expected, tokens, axis=1), atol=1e-4, rtol=0
    )
    # The mean logprob of samples is the negative entropy, within four standard errors.
    probabilities = np.exp(expected)
    entropy = -(probabilities * expected).sum(axis=1)
    spread = np.sqrt((probabilities * (expected + entropy[:, None]) ** 2).sum(axis=1) / 300)
    assert (np.abs(logprobs.mean(axis=1) + entropy) < 4 * spread).all()
    assert sample(engine, asked).prompt_alt_tokens == alt
    other = sample(engine, request(prompt, max_tokens=1, prompt_alt_tokens_k=300, seed=4))
    assert other.prompt_alt_tokens != alt


def test_alternatives_follow_the_temperature(engine: Engine) -> None:
    prompt = list(range(100, 106))
    expected = all_logprobs(engine, prompt)
    greedy = sample(
        engine, request(prompt, max_tokens=1, temperature=0.0, prompt_alt_tokens_k=3)
    ).prompt_alt_tokens
    assert greedy is not None
    assert (greedy.tokens.to_numpy() == expected.argmax(axis=1)[:, None]).all()
    warm = sample(
        engine, request(prompt, max_tokens=1, temperature=2.0, prompt_alt_tokens_k=5)
    ).prompt_alt_tokens
    assert warm is not None
    tempered = expected / 2 - np.log(np.exp(expected / 2).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(
        warm.logprobs.to_numpy(),
        np.take_along_axis(tempered, warm.tokens.to_numpy(), axis=1),
        atol=1e-4,
    )


def test_cached_prefix_tokens_are_reused_and_reported(engine: Engine) -> None:
    prompt = list(range(200, 270))
    first = sample(engine, request(prompt, max_tokens=40, stop=[]))
    assert first.prompt_cache_hit_tokens == 0
    again = sample(engine, request(prompt, max_tokens=40, stop=[]))
    assert again.prompt_cache_hit_tokens == 64
    assert again.sequences[0].tokens == first.sequences[0].tokens
    # The next turn of a conversation also reuses the sampled tokens.
    turn = prompt + first.sequences[0].tokens + [9] * 7
    assert sample(engine, request(turn, max_tokens=1)).prompt_cache_hit_tokens == 96
    assert sample(engine, request(prompt[1:], max_tokens=1)).prompt_cache_hit_tokens == 0


def test_a_prefix_of_one_owner_is_not_found_by_another(engine: Engine) -> None:
    prompt = list(range(120, 160))
    found = []
    for owner in ("alice", "bob", "alice"):
        engine.submit(1, request(prompt, max_tokens=1), adapter=None, owner=owner)
        while engine.sampling:
            for finished in engine.advance():
                assert isinstance(finished.outcome, SampleResponse)
                found.append(finished.outcome.prompt_cache_hit_tokens)
    assert found == [0, 0, 32]


def test_a_prompt_with_logprobs_is_computed_from_the_first_needed_token(engine: Engine) -> None:
    prompt = list(range(300, 364))
    whole = sample(engine, request(prompt, max_tokens=1, prompt_logprobs=True))
    again = sample(engine, request(prompt, max_tokens=1, prompt_logprobs=True))
    assert again.prompt_cache_hit_tokens == 0
    last = sample(
        engine, request(prompt, max_tokens=1, prompt_logprobs=True, prompt_logprobs_last_n=20)
    )
    # Position 44 is predicted by token 43, so the first two pages of 16 may come from the cache.
    assert last.prompt_cache_hit_tokens == 32
    assert whole.prompt_logprobs is not None
    assert last.prompt_logprobs is not None
    assert last.prompt_logprobs[44:] == pytest.approx(whole.prompt_logprobs[44:], abs=1e-4)
    target = np.full((63, 1), -1)
    target[50] = 3
    scored = sample(
        engine, request(prompt, max_tokens=1, target_prompt_logprobs=TensorData.from_numpy(target))
    )
    assert scored.prompt_cache_hit_tokens == 48
    assert (
        sample(engine, request(prompt, max_tokens=1, prompt_alt_tokens_k=1)).prompt_cache_hit_tokens
        == 0
    )


def test_simultaneous_requests_share_their_prefix(engine: Engine) -> None:
    prompt = list(range(7, 90))
    for ticket in range(4):
        engine.submit(ticket, request(prompt, max_tokens=4, seed=ticket), adapter=None)
    finished = []
    while engine.sampling:
        finished += engine.advance()
    found = [
        one.outcome.prompt_cache_hit_tokens for one in sorted(finished, key=lambda f: f.ticket)
    ]
    assert found == [0, 80, 80, 80]


def test_a_prompt_of_one_token_has_no_logprobs(engine: Engine) -> None:
    answer = sample(engine, request([9], max_tokens=1, prompt_logprobs=True))
    assert answer.prompt_logprobs == [None]


def test_without_a_request_there_are_no_prompt_logprobs(engine: Engine) -> None:
    answer = sample(engine, request(max_tokens=1))
    assert answer.prompt_logprobs_np is None
    assert answer.topk_prompt_logprobs_np is None
    assert answer.sequences[0].topk_logprobs_np is None


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "context": (
        {"prompt": [1] * 2000, "max_tokens": 100},
        r"2000 tokens and max_tokens 100 are 2100.*context is 2048.*at most 48",
    ),
    "full context": (
        {"prompt": [1] * 2048, "max_tokens": None},
        "2048 tokens and fills the context of 2048",
    ),
    "empty prompt": ({"prompt": []}, "prompt: is empty"),
    "token": ({"prompt": [1, 400]}, "token 400 at position 1 is outside the vocabulary"),
    "max_tokens": ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
    "samples": ({"num_samples": 0}, "num_samples is 0"),
    "temperature": ({"temperature": -1.0}, "temperature is -1.0"),
    "top_k": ({"top_k": 0}, "top_k is 0; use -1 for all tokens"),
    "top_p": ({"top_p": 0.0}, r"top_p is 0.0; it must be in \(0, 1\]"),
    "stop token": ({"stop": [401]}, "stop contains token 401"),
    "stop text": ({"stop": ["a", ""]}, "stop contains an empty text"),
    "top of samples": ({"topk_sample_logprobs": 401}, "topk_sample_logprobs is 401"),
    "top of prompt": ({"topk_prompt_logprobs": -1}, "topk_prompt_logprobs is -1"),
    "last n alone": ({"prompt_logprobs_last_n": 1}, "needs prompt_logprobs = true"),
    "last n": (
        {"prompt_logprobs": True, "prompt_logprobs_last_n": 3},
        "prompt_logprobs_last_n is 3; allowed for this prompt are 1 to 2",
    ),
    "targets of another length": (
        {"target_prompt_logprobs": TensorData(data=[1, 2, 3], dtype="int64", shape=[3, 1])},
        r"int64 of shape \[3, 1\]; for this prompt it must be int64 of shape \[2, K\]",
    ),
    "targets of one dimension": (
        {"target_prompt_logprobs": TensorData(data=[1, 2], dtype="int64", shape=[2])},
        r"it must be int64 of shape \[2, K\]",
    ),
    "targets as numbers": (
        {"target_prompt_logprobs": TensorData(data=[1.0, 2.0], dtype="float32", shape=[2, 1])},
        "target_prompt_logprobs is float32",
    ),
    "target": (
        {"target_prompt_logprobs": TensorData(data=[1, 400], dtype="int64", shape=[2, 1])},
        "contains token 400; allowed ids are 0 to 399, and -1 for cells that request nothing",
    ),
    "no target": (
        {"target_prompt_logprobs": TensorData(data=[-1, -1], dtype="int64", shape=[2, 1])},
        "contains no token",
    ),
    "alternatives": ({"prompt_alt_tokens_k": 401}, "prompt_alt_tokens_k is 401"),
    "stability": ({"record_stability_info": True}, "record_stability_info is not supported"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_invalid_request_is_refused_at_submission(engine: Engine, case: str) -> None:
    options, message = REFUSED[case]
    with pytest.raises(UserFailure, match=message):
        engine.submit(1, request(**{"max_tokens": 5, **options}), adapter=None)
    assert not engine.sampling


def test_a_request_larger_than_the_cache_is_refused_with_the_sizes(tiny_folder: Path) -> None:
    small = Engine(EngineSettings(name="t", folder=tiny_folder, device="cpu", kv_tokens=64))
    with pytest.raises(UserFailure, match=r"room for 70 tokens; the server's KV cache holds 64"):
        small.submit(1, request([1] * 40, max_tokens=30), adapter=None)
    assert len(tokens(small, prompt=[1] * 40, max_tokens=24, stop=[])) == 24


def test_an_adapter_of_another_model_is_refused(engine: Engine, tmp_path: Path) -> None:
    engine.submit(1, request(), adapter=tmp_path)
    engine.submit(2, request(max_tokens=3), adapter=None)
    outcomes = {}
    while engine.sampling:
        outcomes |= {finished.ticket: finished.outcome for finished in engine.advance()}
    assert isinstance(outcomes[1], UserFailure)
    assert "has no adapter_config.json" in str(outcomes[1])
    assert isinstance(outcomes[2], SampleResponse)


@pytest.mark.parametrize("limit", ["count", "bytes", "half of the adapters"])
def test_idle_adapters_are_dropped_and_loaded_again(
    engine: Engine, tiny_folder: Path, tmp_path: Path, limit: str
) -> None:
    two = 2 * 4 * make_layout(engine.model.targets, 2).size
    limits = {
        "count": {"idle_adapters": 2},
        "bytes": {"idle_adapter_bytes": two},
        # The rest is for a model in training while its adapters are saved.
        "half of the adapters": {"adapter_bytes": 2 * two + 100},
    }
    settings = EngineSettings(
        name="t", folder=tiny_folder, device="cpu", kv_tokens=256, **limits[limit]
    )
    engine = Engine(settings)
    folders = []
    for seed in range(4):
        engine.create("m", LoraConfig(rank=2, seed=seed), AdamOptimizerConfig())
        engine.save("m", tmp_path / str(seed), optimizer=False)
        engine.drop("m")
        folders.append(tmp_path / str(seed))
    asked = request(list(range(40)), max_tokens=3)
    answers = [sample(engine, asked, folder) for folder in folders]
    assert [answer.prompt_cache_hit_tokens for answer in answers] == [0] * 4
    assert sample(engine, asked, folders[3]).prompt_cache_hit_tokens == 32
    assert engine._sampler is not None
    assert list(engine._sampler._adapters) == [str(folder) for folder in folders[2:]]
    # Its pages were evicted with the adapter, so the prompt is computed again.
    again = sample(engine, request(list(range(40)), max_tokens=3), folders[0])
    assert again.prompt_cache_hit_tokens == 0
    assert again == answers[0]


def test_a_running_sample_does_not_wait_for_the_adapter_of_another(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.create("m", LoraConfig(rank=2, seed=1), AdamOptimizerConfig())
    engine.save("m", tmp_path / "saved", optimizer=False)
    engine.drop("m")
    expected = sample(engine, request(max_tokens=5), tmp_path / "saved")
    assert engine._sampler is not None
    engine._sampler.drop_adapter(str(tmp_path / "saved"))
    released = threading.Event()

    def slow(folder: Path, known: Iterable[str]) -> SavedAdapter:
        assert released.wait(30)
        return read_adapter(folder, known)

    monkeypatch.setattr(sampler.checkpoints, "read_adapter", slow)
    engine.submit(1, request(max_tokens=40, stop=[]), adapter=None)
    engine.advance()
    engine.submit(2, request(max_tokens=5), adapter=tmp_path / "saved")
    finished = []
    while not finished:
        finished += engine.advance()
    assert [one.ticket for one in finished] == [1]
    assert engine.advance(wait_for_reads=False) == []  # training can continue
    assert not released.is_set()
    assert engine.awaited_read is not None
    engine.submit(3, request(max_tokens=2, stop=[]), adapter=None)
    assert engine.awaited_read is None  # a new request may need no disk
    assert [one.ticket for one in engine.advance()] == [3]
    threading.Timer(0.3, released.set).start()
    began_s = time.monotonic()
    while not released.is_set():
        assert engine.advance() == []
    assert time.monotonic() - began_s > 0.2  # without other work, one call waits for the read
    while engine.sampling:
        finished += engine.advance()
    assert finished[1].outcome == expected


def test_a_canceled_request_frees_the_adapter_read_for_it(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.create("m", LoraConfig(rank=2, seed=1), AdamOptimizerConfig())
    engine.save("m", tmp_path / "saved", optimizer=False)
    engine.drop("m")
    began, released = threading.Event(), threading.Event()
    read: list[weakref.ref[SamplerAdapter]] = []
    reading = sampler.read_sampler_adapter

    def slow(model: BaseModel, folder: Path) -> SamplerAdapter:
        began.set()
        assert released.wait(30)
        adapter = reading(model, folder)
        read.append(weakref.ref(adapter))
        return adapter

    monkeypatch.setattr(sampler, "read_sampler_adapter", slow)
    for ticket in (1, 2):
        engine.submit(ticket, request(max_tokens=5), adapter=tmp_path / "saved")
    engine.advance(wait_for_reads=False)
    assert began.wait(30)
    engine.cancel(1)
    assert engine._sampler is not None
    assert engine._sampler._loading is not None  # the second request needs it
    engine.cancel(2)
    assert not engine.sampling
    released.set()
    engine._sampler._reader.submit(gc.collect).result(30)
    assert [adapter() for adapter in read] == [None]


def test_a_canceled_request_gets_no_result(engine: Engine) -> None:
    engine.submit(1, request(max_tokens=200, stop=[]), adapter=None)
    engine.submit(2, request(max_tokens=20, stop=[], seed=3), adapter=None)
    engine.advance()
    engine.cancel(1)
    finished = []
    while engine.sampling:
        finished += engine.advance()
    assert [one.ticket for one in finished] == [2]
    engine.cancel(77)


def test_a_burst_ends_when_a_request_finishes(engine: Engine) -> None:
    engine.submit(1, request(max_tokens=1, stop=[]), adapter=None)
    engine.submit(2, request(max_tokens=100, stop=[]), adapter=None)
    assert [one.ticket for one in engine.advance()] == [1]
    engine.cancel(2)


def test_a_failing_step_fails_its_requests_and_sampling_continues(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(engine.model, "hidden", None)
        engine.submit(1, request(max_tokens=5), adapter=None)
        (finished,) = engine.advance()
    assert isinstance(finished.outcome, TypeError)
    assert not engine.sampling
    assert len(tokens(engine, max_tokens=5, stop=[])) == 5
