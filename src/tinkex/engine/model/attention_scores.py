"""Attention with windows, sinks and soft caps, in plain products over blocks of queries.

Attention of most models is causal softmax and nothing else, for which there are faster functions
(`attention`). Some models do more. In a window layer a token sees only the last keys (Mistral,
Gemma, gpt-oss). A sink is a score without a value that takes part in the softmax, one for each head
(gpt-oss). A soft cap bounds scores by tanh (Gemma 2).

`attend_blocks` computes all of them, with any widths of keys and values, forward and backward. Its
memory does not grow with the square of the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# N sequences of equal lengths, H query heads, K key heads, G = H / K, t queries, L keys, D width of
# keys, E width of values

#: Queries of one block, and the most scores of a block that are computed at once.
BLOCK = 512
MAX_SCORES = {"cpu": 1 << 24, "cuda": 1 << 27}


class Scoring(NamedTuple):
    """How the attention of a layer makes probabilities of the products of queries and keys."""

    #: Factor of the products.
    scaling: float
    #: A token sees this many keys, its own included; None for all.
    window: int | None = None
    #: Scores are softcap · tanh(score / softcap).
    softcap: float | None = None
    #: [H]: scores that take part in the softmax and have no value.
    sinks: Tensor | None = None

    def is_plain(self, keys: int) -> bool:
        """Whether it is causal softmax alone, for sequences of this many keys."""
        return self.softcap is None and self.sinks is None and not self.slides(keys)

    def slides(self, keys: int) -> bool:
        """Whether some token of a sequence of this many keys does not see all before it."""
        return self.window is not None and self.window < keys

    def keys_read(self, queries: int, keys: int) -> int:
        """How many of the last keys the last `queries` tokens see together."""
        return keys if self.window is None else min(keys, queries + self.window - 1)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """
    The result of attention and the log-sum-exp of its scores, with a sink among the scores.

    `out` has one dimension more than `lse`, and `sinks` is broadcast to `lse`. The gradient by
    queries, keys and values is that of attention without sinks, with these two instead of its own.
    """
    if sinks is None:
        return out, lse
    both = torch.logaddexp(lse, sinks.to(lse.dtype))
    return out * (lse - both).exp().unsqueeze(-1).to(out.dtype), both


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def attend_blocks(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    """[N, H, t, D] over [N, K, L, D] and [N, K, L, E] to [N, H, t, E]: the queries are the last."""
    given = q.dtype
    if given in (torch.bfloat16, torch.float16):
        # The scores would be rounded, by more than the probabilities of flash attention.
        q, k, v = q.float(), k.float(), v.float()
    if torch.is_grad_enabled() and any(each.requires_grad for each in (q, k, v)):
        out: Tensor = _BlockFunction.apply(q, k, v, scoring)  # type: ignore[no-untyped-call]
    else:
        out, _ = _forward(q, k, v, scoring)
    return out.to(given)


class _Block(NamedTuple):
    """Queries `first` to `last` see keys `start` to `stop`, less those of the mask."""

    first: int
    last: int
    start: int
    stop: int
    hidden: Tensor


def _blocks(q: Tensor, k: Tensor, scoring: Scoring) -> Iterator[_Block]:
    sequences, heads, queries, _ = q.shape
    keys = k.shape[2]
    before = keys - queries
    read = scoring.keys_read(min(BLOCK, queries), keys)
    most = MAX_SCORES[q.device.type] // (sequences * heads * read)
    size = max(16, min(BLOCK, most))
    for first in range(0, queries, size):
        last = min(queries, first + size)
        stop = before + last
        start = stop - scoring.keys_read(last - first, stop)
        own = torch.arange(before + first, stop, device=q.device).unsqueeze(1)
        seen = torch.arange(start, stop, device=q.device)
        hidden = seen > own
        if scoring.window is not None:
            hidden |= seen <= own - scoring.window
        yield _Block(first, last, start, stop, hidden)


def _scores(q: Tensor, k: Tensor, block: _Block, scoring: Scoring) -> Tensor:
    """[N, K, G, t, L]"""
    sequences, heads, _, size = q.shape
    key_heads = k.shape[1]
    groups, queries = heads // key_heads, block.last - block.first
    grouped = q[:, :, block.first : block.last].reshape(sequences, key_heads, -1, size)
    products = (grouped * scoring.scaling) @ k[:, :, block.start : block.stop].mT
    scores = capped(products, scoring.softcap)
    return scores.view(sequences, key_heads, groups, queries, -1).masked_fill_(
        block.hidden, -torch.inf
    )


def _forward(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Also returns the log-sum-exp [N, H, t], with the sinks in it."""
    outs, lses = [], []
    for block in _blocks(q, k, scoring):
        scores = _scores(q, k, block, scoring)
        lse = torch.logsumexp(scores, dim=-1)
        if scoring.sinks is not None:
            sinks = scoring.sinks.to(lse.dtype).view(k.shape[1], -1, 1)
            lse = torch.logaddexp(lse, sinks)
        powers = (scores - lse.unsqueeze(-1)).exp_().flatten(2, 3)
        out = powers @ v[:, :, block.start : block.stop]
        outs.append(out.view(*q.shape[:2], -1, v.shape[3]))
        lses.append(lse.flatten(1, 2))
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


class _BlockFunction(torch.autograd.Function):
    """Keeps no scores: the backward pass computes them again."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        out, lse = _forward(q, k, v, scoring)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scoring = scoring
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        (g,), scoring = gradients, ctx.scoring
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        key_heads = k.shape[1]
        for block in _blocks(q, k, scoring):
            rows, columns = slice(block.first, block.last), slice(block.start, block.stop)
            # [N, K, G * t, ...]
            q_rows, g_rows, out_rows = (
                each[:, :, rows].reshape(len(q), key_heads, -1, each.shape[3])
                for each in (q, g, out)
            )
            scores = _scores(q, k, block, scoring).flatten(2, 3)
            lse_rows = lse[:, :, rows].reshape(len(q), key_heads, -1, 1)
            powers = (scores - lse_rows).exp_()
            dv[:, :, columns] += powers.mT @ g_rows
            slope = (g_rows * out_rows).sum(dim=-1, keepdim=True)
            ds = powers.mul_(g_rows @ v[:, :, columns].mT - slope)
            if scoring.softcap is not None:
                # Hidden scores are -inf, and their derivative is 0 already.
                bounded = scores.nan_to_num_(neginf=0.0).div_(scoring.softcap)
                ds *= 1 - bounded.square_()
            ds *= scoring.scaling
            dq[:, :, rows] = (ds @ k[:, :, columns]).view(*q.shape[:2], -1, q.shape[3])
            dk[:, :, columns] += ds.mT @ q_rows
        return dq, dk, dv, None


def pad_values(v: Tensor, width: int) -> Tensor:
    """Values as wide as keys: what flash attention needs. The additional numbers are 0."""
    return v if v.shape[-1] == width else F.pad(v, (0, width - v.shape[-1]))
