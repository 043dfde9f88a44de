"""Triton kernels of recurrent layers in a decode step: one token of each sequence.

Each reads the state of a row from its slot and writes it to another or the same, once: in plain
torch the states of a layer would be copied some ten times, and copies of all would take memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# B rows, C channels of the convolution, W inputs of it that are kept, H heads, K heads of keys, D width
# of keys, E width of values

#: Channels, and numbers of a state, of one program.
CHANNELS = 256
NUMBERS = 4096


@triton.jit
def _convolve(
    X,
    Pool,
    Reads,
    Writes,
    Weight,
    Bias,
    Out,
    x_stride,
    C: tl.constexpr,
    W: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < C
    before = Pool + (tl.load(Reads + row) * C + c) * W
    after = Pool + (tl.load(Writes + row) * C + c) * W
    x = tl.load(X + row * x_stride + c, mask=inside, other=0.0)
    total = x.to(tl.float32) * tl.load(Weight + c * (W + 1) + W, mask=inside, other=0.0).to(
        tl.float32
    )
    for at in tl.static_range(W):
        kept = tl.load(before + at, mask=inside, other=0.0)
        weight = tl.load(Weight + c * (W + 1) + at, mask=inside, other=0.0)
        total += kept.to(tl.float32) * weight.to(tl.float32)
        if at:
            tl.store(after + at - 1, kept, mask=inside)
    tl.store(after + W - 1, x.to(Pool.dtype.element_ty), mask=inside)
    if BIAS:
        total += tl.load(Bias + c, mask=inside, other=0.0).to(tl.float32)
    # Rounded before the activation, as in transformers.
    total = total.to(Out.dtype.element_ty).to(tl.float32)
    total = total / (1 + tl.exp(-total))
    tl.store(Out + row * C + c, total.to(Out.dtype.element_ty), mask=inside)


def convolve(
    x_BC: Tensor,
    pool: Tensor,
    reads_B: Tensor,
    writes_B: Tensor,
    weight_C1W: Tensor,
    bias_C: Tensor | None,
) -> Tensor:
    """silu of the causal convolution of each row with its last inputs in `pool` [slots, C, W]."""
    rows, channels = x_BC.shape
    out = x_BC.new_empty(rows, channels)
    _convolve[(rows, triton.cdiv(channels, CHANNELS))](
        x_BC, pool, reads_B, writes_B, weight_C1W, weight_C1W if bias_C is None else bias_C, out,
        x_BC.stride(0), channels, pool.shape[2], bias_C is not None, CHANNELS,
        num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _advance(
    Pool,
    Reads,
    Writes,
    Query,
    Key,
    Value,
    Decay,
    Gain,
    Out,
    scale,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    E: tl.constexpr,
    WIDE: tl.constexpr,
    AT_D: tl.constexpr,
    AT_E: tl.constexpr,
    DELTA: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d, e = tl.arange(0, BLOCK), tl.program_id(2) * WIDE + tl.arange(0, WIDE)
    inside, valued = d < D, e < E
    both = inside[:, None] & valued[None, :]
    at = d[:, None] * AT_D + e[None, :] * AT_E
    key_head = (row * K + head // (H // K)) * D + d
    k = tl.load(Key + key_head, mask=inside, other=0.0).to(tl.float32)
    q = tl.load(Query + key_head, mask=inside, other=0.0).to(tl.float32)
    if DELTA:
        k = k * tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
        q = q * tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * scale
    v = tl.load(Value + (row * H + head) * E + e, mask=valued, other=0.0).to(tl.float32)
    state = tl.load(Pool + (tl.load(Reads + row) * H + head) * D * E + at, mask=both, other=0.0)
    state = state * tl.exp(tl.load(Decay + row * H + head))
    if DELTA:
        v -= tl.sum(state * k[:, None], 0)
    v *= tl.load(Gain + row * H + head).to(tl.float32)
    state += k[:, None] * v[None, :]
    tl.store(Pool + (tl.load(Writes + row) * H + head) * D * E + at, state, mask=both)
    out = tl.sum(state * q[:, None], 0)
    tl.store(Out + (row * H + head) * E + e, out.to(Out.dtype.element_ty), mask=valued)


def advance(
    pool: Tensor,
    reads_B: Tensor,
    writes_B: Tensor,
    *,
    query_BKD: Tensor,
    key_BKD: Tensor,
    value_BHE: Tensor,
    decay_BH: Tensor,
    gain_BH: Tensor,
    delta: bool,
) -> Tensor:
    """
    The matrices of `pool` with a token more, and what its queries read, [B, H, E].

    Matrices are decayed by exp(decay), and take in keys times values times gain. With `delta`, which
    is the gated delta rule, keys and queries are normed, values are less what the matrix has of the
    key, and matrices are [D, E]; without it, which is Mamba 2, they are [E, D].
    """
    rows, heads, width = value_BHE.shape
    key_heads, size = key_BKD.shape[1:]
    block = max(16, triton.next_power_of_2(size))
    wide = max(16, min(triton.next_power_of_2(width), NUMBERS // block))
    out = torch.empty_like(value_BHE, memory_format=torch.contiguous_format)
    _advance[(rows, heads, triton.cdiv(width, wide))](
        pool, reads_B, writes_B, query_BKD.contiguous(), key_BKD.contiguous(),
        value_BHE.contiguous(), decay_BH.contiguous(), gain_BH.contiguous(), out, size**-0.5,
        heads, key_heads, size, block, width, wide, *((width, 1) if delta else (1, size)), delta,
        num_warps=4,
    )  # fmt: skip
    return out
