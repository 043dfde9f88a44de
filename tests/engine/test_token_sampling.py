"""Sampling tokens from logits."""

import math

import pytest
import torch

from tinkex.engine.sampling.sequences import SamplingConfig
from tinkex.engine.sampling.token_sampling import (
    SampleStep,
    cutoff_logit,
    gumbel_noise,
    gumbel_rows,
    noise_keys,
    sample_alternatives,
    sample_tokens,
    uniform_number,
)

CPU = torch.device("cpu")


def sampling(
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    top_logprobs: int = 0,
) -> SamplingConfig:
    return SamplingConfig(
        temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, top_logprobs=top_logprobs
    )


def logits_of(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities).log()


def draw_many(logits: torch.Tensor, how: SamplingConfig, count: int) -> torch.Tensor:
    rows = logits.repeat(count, 1)
    return torch.tensor(
        sample_tokens(rows, [SampleStep(how, 0, step) for step in range(count)]).tokens
    )


def test_temperature_zero_is_greedy_with_logprobs_at_temperature_one() -> None:
    sampled = sample_tokens(
        logits_of(0.2, 0.5, 0.3)[None], [SampleStep(sampling(temperature=0.0), 0, 0)]
    )
    assert sampled.tokens == [1]
    assert sampled.logprobs == [pytest.approx(math.log(0.5))]


def test_the_logprob_is_of_the_tempered_distribution_before_truncation() -> None:
    probabilities = [0.6, 0.3, 0.1]
    how = sampling(temperature=0.5, top_k=1)
    sampled = sample_tokens(logits_of(*probabilities)[None], [SampleStep(how, 0, 0)])
    squares = [p**2 for p in probabilities]  # temperature 1/2
    assert sampled.logprobs == [pytest.approx(math.log(squares[0] / sum(squares)))]


def test_sampled_tokens_have_the_right_frequencies() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03])
    tokens = draw_many(probabilities.log(), sampling(seed=3), 4000)
    counts = torch.bincount(tokens, minlength=5).double()
    expected = 4000 * probabilities.double()
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 23.5  # 4 degrees of freedom: exceeded by one in ten thousand seeds


def test_a_token_of_negligible_probability_is_never_sampled() -> None:
    """The noise has no outliers large enough to make up for forty nats."""
    logits = torch.full((20_000,), -40.0)
    logits[7] = 0.0
    assert set(draw_many(logits, sampling(seed=1), 300).tolist()) == {7}


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (None, None, {0, 1, 2, 3, 4}),
        (2, None, {0, 1}),
        (1, None, {0}),
        (9, None, {0, 1, 2, 3, 4}),
        (None, 0.5, {0}),  # reached by the first alone
        (None, 0.51, {0, 1}),
        (None, 0.9, {0, 1, 2}),
        (None, 1e-6, {0}),  # the most likely token is always kept
        (2, 0.7, {0, 1}),  # of what top_k kept, 0.5 / 0.75 is less than 0.7
        (2, 0.6, {0}),
    ],
)
def test_top_k_and_top_p_keep_the_most_likely_tokens(
    top_k: int | None, top_p: float | None, kept: set[int]
) -> None:
    logits = logits_of(0.5, 0.25, 0.15, 0.07, 0.03)
    cutoff = cutoff_logit(logits, sampling(top_k=top_k, top_p=top_p))
    found = set(range(5)) if cutoff is None else set((logits >= cutoff).nonzero()[:, 0].tolist())
    assert found == kept
    tokens = draw_many(logits, sampling(top_k=top_k, top_p=top_p), 300)
    assert set(tokens.tolist()) <= kept


def test_a_nucleus_wider_than_the_first_guess_is_found() -> None:
    logits = torch.zeros(4000)
    logits[:2000] += torch.linspace(0.02, 0.01, 2000)
    cutoff = cutoff_logit(logits, sampling(top_p=0.25))
    kept = int((logits >= cutoff).sum())
    assert kept == pytest.approx(1000, abs=12)


def test_noise_depends_on_seed_sample_step_and_token_alone() -> None:
    base = gumbel_noise(100, noise_keys(1, 2, 3), CPU)
    assert torch.equal(gumbel_noise(50, noise_keys(1, 2, 3), CPU), base[:50])
    for other in ((2, 2, 3), (1, 3, 3), (1, 2, 4), (1, 3, 2), (-1, 2, 3), (2**64 - 2, 2, 3)):
        assert not torch.isclose(gumbel_noise(100, noise_keys(*other), CPU), base).any()


def mixed(value: int) -> int:
    """splitmix64, as published."""
    value = (value + 0x9E3779B97F4A7C15) % 2**64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)


def test_a_seed_gives_the_same_noise_in_every_version() -> None:
    """
    Computed again with Python's integers.

    Seeds repeat samples after an upgrade, and a GPU's kernel computes the same noise.
    """
    assert mixed(0) == 0xE220A8397B1DCDAF  # the first number of splitmix64 with seed 0
    keys = mixed(mixed(mixed(1) ^ 2) ^ 3)
    low, high = keys % 2**32, keys >> 32
    assert noise_keys(1, 2, 3) == (low, high)
    wanted = []
    for token in range(64):
        x = (token * 0x9E3779B1 + low) % 2**32
        x = ((x ^ (x >> 16)) * 0x85EBCA6B) % 2**32 ^ high
        x = (x ^ (x >> 13)) * 0xC2B2AE35 % 2**32
        x = (x ^ (x >> 16)) % 2**31
        wanted.append(-math.log(-math.log1p(-(x + 0.5) / 2**31)))
    found = gumbel_noise(64, noise_keys(1, 2, 3), CPU).tolist()
    assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5)


def test_noise_is_gumbel_distributed() -> None:
    noise = gumbel_noise(200_000, noise_keys(7, 0, 0), CPU).double()
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.015)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.04)
    assert torch.isfinite(noise).all()
    assert float(noise.max()) < 20


def test_neighbouring_seeds_and_steps_are_independent() -> None:
    rows = torch.stack(
        [gumbel_noise(4000, noise_keys(s, 0, t), CPU) for s in (0, 1) for t in (0, 1)]
    )
    correlation = torch.corrcoef(rows) - torch.eye(4)
    assert float(correlation.abs().max()) < 0.07


def test_top_logprobs_are_reported_if_requested() -> None:
    logits = logits_of(0.5, 0.2, 0.3).repeat(2, 1)
    sampled = sample_tokens(
        logits, [SampleStep(sampling(top_logprobs=2), 0, 0), SampleStep(sampling(), 0, 0)]
    )
    assert sampled.tops[0] is not None
    ids, logprobs = sampled.tops[0]
    assert ids == [0, 2]
    assert logprobs == [pytest.approx(math.log(0.5)), pytest.approx(math.log(0.3))]
    assert sampled.tops[1] is None


def test_noise_of_several_rows_is_that_of_each() -> None:
    keys = [noise_keys(1, 2, 3), noise_keys(4, 5, 6)]
    both = gumbel_rows(300, keys, CPU)
    for row, mine in zip(both, keys, strict=True):
        assert torch.equal(row, gumbel_noise(300, mine, CPU))


def test_alternatives_follow_the_distribution_and_repeat() -> None:
    sampling = SamplingConfig(temperature=1.0, top_k=1, top_p=None, seed=9)
    logits = torch.tensor([[0.0, math.log(3.0), float("-inf")], [5.0, 5.0, 5.0]])
    tokens, logprobs = sample_alternatives(logits, [7, 8], 4000, sampling)
    # Without top-k and top-p both possible tokens occur, the impossible one never does.
    assert set(tokens[0]) == {0, 1}
    assert abs((tokens[0] == 1).mean() - 0.75) < 0.03
    assert abs(logprobs[0][tokens[0] == 1] - math.log(0.75)).max() < 1e-5
    assert {0, 1, 2} == set(tokens[1])
    again, _ = sample_alternatives(logits[1:], [8], 4000, sampling)
    assert (again[0] == tokens[1]).all()
    elsewhere, _ = sample_alternatives(logits[1:], [9], 4000, sampling)
    assert (elsewhere[0] != tokens[1]).any()


def test_uniform_numbers_are_uniform() -> None:
    numbers = [uniform_number(3, j, 0) for j in range(20_000)]
    assert 0 <= min(numbers) < 0.001
    assert 0.999 < max(numbers) < 1
    assert abs(sum(numbers) / len(numbers) - 0.5) < 0.01
