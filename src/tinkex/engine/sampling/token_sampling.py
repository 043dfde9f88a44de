"""Samples tokens from logits: biases, penalties, temperature, top-k, top-p, reproducible noise.

The sampled token has the largest logit + noise (Gumbel-max). The noise of a token is a hash of the
request's seed, the sample's index, the step and the token id, so other sequences in the batch and
the order of events do not change the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinkex.engine.device import SAMPLING_PROFILES
from tinkex.engine.sampling.sequences import SamplingConfig

if TYPE_CHECKING:
    from tinkex.engine.sampling.guides import Guide

# S sequences (rows of logits), V vocabulary

_MASK64 = (1 << 64) - 1


class SampleStep(NamedTuple):
    """The sequence and step that one row of logits belongs to."""

    sampling: SamplingConfig
    #: Index of the sample in its request.
    sample: int
    #: Index of the token in the sample.
    step: int
    #: The tokens of the sequence so far, for penalties.
    tokens: Sequence[int] = ()
    #: Which tokens may be sampled; None: any.
    guide: Guide | None = None


@dataclass(frozen=True, kw_only=True)
class SampledTokens:
    tokens: list[int]
    #: At the temperature of the request (1 if greedy), after biases and penalties, before top-k,
    #: top-p and the guide.
    logprobs: list[float]
    #: (token ids, logprobs) of the most likely tokens, if requested.
    tops: list[tuple[list[int], list[float]] | None]


def sample_tokens(logits_SV: Tensor, steps: Sequence[SampleStep]) -> SampledTokens:
    """Samples one token for each row. Overwrites the logits."""
    for at, step in enumerate(steps):
        if step.sampling.changes_logits:
            change_logits(logits_SV[at], step.sampling, step.tokens)
    temperatures = [step.sampling.temperature or 1.0 for step in steps]
    if any(temperature != 1.0 for temperature in temperatures):
        logits_SV.div_(torch.tensor(temperatures, device=logits_SV.device).unsqueeze(1))
    lse_S1 = logits_SV.logsumexp(dim=1, keepdim=True)
    tokens_S = torch.empty(len(steps), dtype=torch.int64, device=logits_SV.device)
    plain = []
    for at, step in enumerate(steps):
        how = step.sampling
        if how.is_truncated or how.temperature == 0 or step.guide is not None:
            tokens_S[at] = _sample_one(logits_SV[at], step)
        else:
            plain.append(at)
    profile = SAMPLING_PROFILES[logits_SV.device.type]
    block = max(1, profile.noise_block // logits_SV.shape[1])
    for begin in range(0, len(plain), block):
        rows = plain[begin : begin + block]
        keys = [noise_keys(d.sampling.seed, d.sample, d.step) for d in (steps[at] for at in rows)]
        noise_sV = gumbel_rows(logits_SV.shape[1], keys, logits_SV.device)
        tokens_S[rows] = noise_sV.add_(logits_SV[rows]).argmax(dim=1)
    logprobs_S = (logits_SV.gather(1, tokens_S.unsqueeze(1)) - lse_S1).squeeze(1)
    return SampledTokens(
        tokens=tokens_S.tolist(),
        logprobs=logprobs_S.tolist(),
        tops=[
            top_tokens(logits_SV[at] - lse_S1[at], step.sampling.top_logprobs)
            for at, step in enumerate(steps)
        ],
    )


def _sample_one(logits_V: Tensor, step: SampleStep) -> Tensor:
    sampling = step.sampling
    if step.guide is not None:
        allowed_V = step.guide.allowed_V().to(logits_V.device)
        logits_V = logits_V.masked_fill(~allowed_V, float("-inf"))
    if sampling.temperature == 0:
        return logits_V.argmax()
    noise_V = gumbel_noise(
        len(logits_V), noise_keys(sampling.seed, step.sample, step.step), logits_V.device
    )
    scores_V = noise_V.add_(logits_V)
    cutoff = cutoff_logit(logits_V, sampling)
    if cutoff is not None:
        scores_V.masked_fill_(logits_V < cutoff, float("-inf"))
    return scores_V.argmax()


def change_logits(logits_V: Tensor, sampling: SamplingConfig, tokens: Sequence[int]) -> None:
    """Adds biases, and subtracts penalties for tokens that the sequence already has."""
    device = logits_V.device
    if sampling.bias_tokens:
        ids = torch.tensor(sampling.bias_tokens, device=device)
        logits_V.index_add_(0, ids, torch.tensor(sampling.biases, device=device).to(logits_V.dtype))
    if tokens and (sampling.presence_penalty or sampling.frequency_penalty):
        ids, counts = torch.unique(torch.tensor(tokens, device=device), return_counts=True)
        penalties = sampling.presence_penalty + sampling.frequency_penalty * counts
        logits_V.index_add_(0, ids, -penalties.to(logits_V.dtype))


def top_tokens(logprobs_V: Tensor, count: int) -> tuple[list[int], list[float]] | None:
    if not count:
        return None
    values, ids = logprobs_V.topk(count)
    return ids.tolist(), values.tolist()


# -- top-k and top-p ------------------------------------------------------------------------------

#: This many most likely tokens nearly always contain the nucleus, and finding them is much cheaper
#: than sorting all.
NUCLEUS_GUESS = 512


def cutoff_logit(logits_V: Tensor, sampling: SamplingConfig) -> Tensor | None:
    """
    The smallest logit that may be sampled; None without top-k and top-p.

    First the top_k most likely tokens are kept, then the fewest of them whose share of the kept
    probability reaches top_p. Ties with the last kept token are kept too.
    """
    cutoff = None
    size = len(logits_V)
    if sampling.top_k is not None and sampling.top_k < size:
        kept = logits_V.topk(sampling.top_k).values
        cutoff = kept[-1]
        total = kept.logsumexp(dim=0)
    elif sampling.top_p is not None:
        kept = logits_V.topk(min(NUCLEUS_GUESS, size)).values
        total = logits_V.logsumexp(dim=0)
    if sampling.top_p is None:
        return cutoff
    reached = (kept - total).exp().cumsum(dim=0)
    if cutoff is None and reached[-1] < sampling.top_p and len(kept) < size:
        kept = logits_V.sort(descending=True).values
        reached = (kept - total).exp().cumsum(dim=0)
    # Token i is kept if the tokens before it do not reach top_p; the first is always kept.
    before = torch.searchsorted(reached, sampling.top_p, side="left")
    return kept[torch.clamp(before, max=len(kept) - 1)]


# -- alternatives ---------------------------------------------------------------------------------

#: Used instead of a sample index, so that alternatives share no noise with samples.
_ALTERNATIVES = 1 << 40


def sample_alternatives(
    logits_tV: Tensor, sources: Sequence[int], count: int, sampling: SamplingConfig
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """
    Samples `count` independent tokens for each source, without top-k and top-p.

    Each sample looks up one uniform number, a hash of seed, source and sample index, in the
    cumulative probabilities: much cheaper than noise for every token.
    """
    tokens = np.empty((len(sources), count), np.int64)
    logprobs = np.empty((len(sources), count), np.float32)
    for at, source in enumerate(sources):
        logprobs_V = (logits_tV[at] / (sampling.temperature or 1.0)).log_softmax(dim=0)
        if sampling.temperature == 0:
            drawn = logprobs_V.argmax().expand(count)
        else:
            reached_V = logprobs_V.exp().cumsum(dim=0, dtype=torch.float64)
            uniform = torch.tensor(
                [uniform_number(sampling.seed, _ALTERNATIVES + j, source) for j in range(count)],
                dtype=torch.float64,
                device=reached_V.device,
            )
            drawn = torch.searchsorted(reached_V, uniform * reached_V[-1], right=True)
            drawn.clamp_(max=len(reached_V) - 1)
        tokens[at] = drawn.cpu().numpy()
        logprobs[at] = logprobs_V[drawn].cpu().numpy()
    return tokens, logprobs


def uniform_number(seed: int, index: int, step: int) -> float:
    """A number in [0, 1) with 53 bits."""
    low, high = noise_keys(seed, index, step)
    return (high << 21 | low >> 11) * 2.0**-53


# -- noise ----------------------------------------------------------------------------------------


def noise_keys(seed: int, index: int, step: int) -> tuple[int, int]:
    """Two 32-bit keys for one row."""
    state = _mixed(sample_key(seed, index) ^ step)
    return state & 0xFFFFFFFF, state >> 32


@lru_cache(maxsize=4096)
def sample_key(seed: int, index: int) -> int:
    """64 bits for one sample of a request. A GPU mixes them with the step itself."""
    return _mixed(_mixed(seed & _MASK64) ^ index)


def _mixed(value: int) -> int:
    """splitmix64: every input bit changes about half of the output bits."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def gumbel_noise(size: int, keys: tuple[int, int], device: torch.device) -> Tensor:
    """Noise for one row of logits."""
    return gumbel_rows(size, [keys], device)[0]


def gumbel_rows(size: int, keys: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """Float32 noise for token ids 0 to size - 1: the murmur3 finalizer over id and row keys."""
    keys_S2 = torch.tensor(
        [(_int32(low), _int32(high)) for low, high in keys], dtype=torch.int32, device=device
    )
    x = torch.arange(size, dtype=torch.int32, device=device).mul_(_int32(0x9E3779B1))
    x = x + keys_S2[:, :1]
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_int32(0x85EBCA6B))
    x.bitwise_xor_(keys_S2[:, 1:])
    x.bitwise_xor_((x >> 13).bitwise_and_(0x7FFFF)).mul_(_int32(0xC2B2AE35))
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
    # Uniform in (0, 1), from 31 bits. Float32 is finest near 0, where the largest noise comes from,
    # which decides the result. Below 1, so that the noise is always finite.
    uniform = x.bitwise_and_(0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-31)
    return uniform.clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_().log_().neg_()


def _int32(value: int) -> int:
    """The same 32 bits as a signed integer."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value
