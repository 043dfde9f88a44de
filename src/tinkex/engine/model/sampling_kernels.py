"""Triton kernels that sample the tokens of a decode step, with the noise of `token_sampling`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# B rows, V vocabulary

#: Logits that one program samples from.
SAMPLE_BLOCK = 4096


@triton.jit
def _sample_block(
    Logits,
    Temperature,
    Key,
    Step,
    Best,
    Token,
    Logit,
    Largest,
    Total,
    key_stride,
    V: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best token of one block of the vocabulary, and the block's log-sum-exp."""
    row, block = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(Temperature + row)
    n = block * BLOCK + tl.arange(0, BLOCK)
    inside = n < V
    logit = tl.load(Logits + row.to(tl.int64) * V + n, mask=inside, other=float("-inf"))
    logit = logit / tl.where(temperature == 0, 1.0, temperature)
    largest = tl.max(logit, 0)
    total = tl.sum(tl.exp(logit - largest), 0)
    # The noise of `token_sampling`: splitmix64 of the row's key and the step, then murmur3.
    low = tl.load(Key + row).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(Key + key_stride + row).to(tl.uint32, bitcast=True).to(tl.uint64)
    state = ((high << 32) | low) ^ tl.load(Step + row).to(tl.uint64)
    state += 0x9E3779B97F4A7C15
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    state = state ^ (state >> 31)
    x = n.to(tl.uint32) * 0x9E3779B1 + (state & 0xFFFFFFFF).to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = x ^ (state >> 32).to(tl.uint32)
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    x = x ^ (x >> 16)
    uniform = ((x & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10
    uniform = tl.minimum(uniform, 0.999999940395355224609375)
    # -log1p(-uniform), exact for small numbers too.
    rest = 1.0 - uniform
    near = rest == 1.0
    wait = tl.where(near, uniform, -tl.log(rest) * uniform / tl.where(near, 1.0, 1.0 - rest))
    score = tl.where(temperature == 0, logit, logit - tl.log(wait))
    score = tl.where(inside, score, float("-inf"))
    best, at = tl.max(score, 0, return_indices=True)
    line = row * WIDTH + block
    tl.store(Best + line, best)
    tl.store(Token + line, tl.minimum(block * BLOCK + at, V - 1))
    tl.store(Logit + line, tl.sum(tl.where(n == block * BLOCK + at, logit, 0.0), 0))
    tl.store(Largest + line, largest)
    tl.store(Total + line, total)


@triton.jit(do_not_specialize=["ring_stride"])
def _sample_row(
    Best,
    Token,
    Logit,
    Largest,
    Total,
    Ids,
    Position,
    Step,
    Tick,
    RingTokens,
    RingLogprobs,
    ring_stride,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The token of a row and its logprob; prepares the row for its next step."""
    row = tl.program_id(0)
    b = tl.arange(0, BLOCK)
    inside = b < BLOCKS
    line = row * WIDTH + b
    best = tl.load(Best + line, mask=inside, other=float("-inf"))
    largest = tl.load(Largest + line, mask=inside, other=float("-inf"))
    total = tl.load(Total + line, mask=inside, other=0.0)
    _, at = tl.max(best, 0, return_indices=True)
    # With NaN among them it may be behind the last block, where no token is written.
    at = tl.minimum(at, BLOCKS - 1)
    token = tl.load(Token + row * WIDTH + at)
    logit = tl.load(Logit + row * WIDTH + at)
    top = tl.max(largest, 0)
    lse = top + tl.log(tl.sum(total * tl.exp(largest - top), 0))
    tick = tl.load(Tick + row)
    advances = tick >= 0
    tl.store(RingTokens + tick * ring_stride + row, token, mask=advances)
    tl.store(RingLogprobs + tick * ring_stride + row, logit - lse, mask=advances)
    tl.store(Ids + row, token, mask=advances)
    tl.store(Position + row, tl.load(Position + row) + 1, mask=advances)
    tl.store(Step + row, tl.load(Step + row) + 1, mask=advances)
    tl.store(Tick + row, tick + 1, mask=advances)


def sample(
    logits_BV: Tensor,
    *,
    temperatures_B: Tensor,
    keys_2B: Tensor,
    steps_B: Tensor,
    ids_B: Tensor,
    positions_B: Tensor,
    ticks_B: Tensor,
    ring_tokens: Tensor,
    ring_logprobs: Tensor,
) -> None:
    """
    Samples a token for every row, writes it to the ring, and prepares the next step.

    A row whose tick is negative stays as it is: its next step computes the same again.
    """
    rows, vocabulary = logits_BV.shape
    blocks = triton.cdiv(vocabulary, SAMPLE_BLOCK)
    # A multiple of 16 keeps every tensor aligned: kernels are compiled for each alignment.
    width = triton.cdiv(blocks, 16) * 16
    floats = torch.empty(4, rows, width, dtype=torch.float32, device=logits_BV.device)
    tokens = torch.empty(rows, width, dtype=torch.int32, device=logits_BV.device)
    best, logit, largest, total = floats.unbind()
    _sample_block[(rows, blocks)](
        logits_BV, temperatures_B, keys_2B, steps_B, best, tokens, logit, largest, total,
        keys_2B.stride(0), vocabulary, width, SAMPLE_BLOCK,
        num_warps=8,
    )  # fmt: skip
    _sample_row[(rows,)](
        best, tokens, logit, largest, total, ids_B, positions_B, steps_B, ticks_B, ring_tokens,
        ring_logprobs, ring_tokens.stride(0), blocks, width, triton.next_power_of_2(blocks),
        num_warps=1,
    )  # fmt: skip
