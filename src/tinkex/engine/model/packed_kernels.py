"""Triton kernels for packed tokens on a GPU: norms, rotation, SwiGLU, softmax, LoRA products.

Each kernel reads and writes its tensors once, where torch has a pass over memory for each
operation. Results are rounded where transformers' code rounds, so that both compute the same
numbers. The backward kernels compute again what is cheap to compute, so it need not be kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinkex.engine.model.kernel_launch import Launcher

# T packed tokens, H hidden size, V vocabulary, R rank rounded up, P projections of one input

#: Tokens that one program handles.
TOKENS = 64
#: Columns that one program handles.
COLUMNS = 128
#: Logits that one program reads at a time.
LOGITS = 4096


# -- norms ----------------------------------------------------------------------------------------


@Launcher
@triton.jit
def _add_norm(X, Y, W, Sum, Out, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * SIZE
    c = tl.arange(0, BLOCK)
    inside = c < SIZE
    x = tl.load(X + row + c, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(Y + row + c, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(Sum.dtype.element_ty)
        tl.store(Sum + row + c, rounded, mask=inside)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
    w = tl.load(W + c, mask=inside, other=0.0).to(tl.float32)
    normed = (x * scale).to(Out.dtype.element_ty).to(tl.float32) * w
    tl.store(Out + row + c, normed.to(Out.dtype.element_ty), mask=inside)


@Launcher
@triton.jit
def _norm_backward(
    X, W, Gradient, Residual, Dx, Out, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Dx = Residual + the gradient of the norm by x; Out is the norm itself."""
    row = tl.program_id(0).to(tl.int64) * SIZE
    c = tl.arange(0, BLOCK)
    inside = c < SIZE
    x = tl.load(X + row + c, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(W + c, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(Gradient + row + c, mask=inside, other=0.0).to(tl.float32) * w
    scale = tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
    unit = x * scale
    normed = unit.to(Out.dtype.element_ty).to(tl.float32) * w
    dx = scale * (g - unit * (tl.sum(g * unit, 0) / SIZE))
    if ADD:
        dx += tl.load(Residual + row + c, mask=inside, other=0.0).to(tl.float32)
    tl.store(Dx + row + c, dx.to(Dx.dtype.element_ty), mask=inside)
    tl.store(Out + row + c, normed.to(Out.dtype.element_ty), mask=inside)


# -- heads ----------------------------------------------------------------------------------------


@Launcher
@triton.jit(do_not_specialize=["tokens"])
def _rotate(
    Y, Q, Keys, QNorm, KNorm, Cos, Sin, eps, tokens,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
    M: tl.constexpr,
):  # fmt: skip
    """The norm and the rotation of one head of q or k."""
    HALF: tl.constexpr = D // 2
    dtype: tl.constexpr = Y.dtype.element_ty
    head = tl.program_id(1)
    m = tl.program_id(0) * M + tl.arange(0, M)
    d = tl.arange(0, BLOCK)
    inside = d < HALF
    both = (m < tokens)[:, None] & inside[None, :]
    at = m[:, None].to(tl.int64) * ((H + 2 * K) * D) + head * D + d[None, :]
    one = tl.load(Y + at, mask=both, other=0.0).to(tl.float32)
    two = tl.load(Y + at + HALF, mask=both, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(one * one, 1) + tl.sum(two * two, 1)) / D + eps)[:, None]
        weight = QNorm if head < H else KNorm
        w_one = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)[None, :]
        w_two = tl.load(weight + HALF + d, mask=inside, other=0.0).to(tl.float32)[None, :]
        one = ((one * scale).to(dtype).to(tl.float32) * w_one).to(dtype).to(tl.float32)
        two = ((two * scale).to(dtype).to(tl.float32) * w_two).to(dtype).to(tl.float32)
    angle = m[:, None] * HALF + d[None, :]
    cos = tl.load(Cos + angle, mask=both, other=0.0).to(tl.float32)
    sin = tl.load(Sin + angle, mask=both, other=0.0).to(tl.float32)
    first = (one * cos).to(dtype).to(tl.float32) - (two * sin).to(dtype).to(tl.float32)
    second = (two * cos).to(dtype).to(tl.float32) + (one * sin).to(dtype).to(tl.float32)
    if head < H:
        to = Q + (m[:, None].to(tl.int64) * H + head) * D + d[None, :]
    else:
        to = Keys + (m[:, None].to(tl.int64) * K + head - H) * D + d[None, :]
    tl.store(to, first.to(dtype), mask=both)
    tl.store(to + HALF, second.to(dtype), mask=both)


@Launcher
@triton.jit(do_not_specialize=["tokens"])
def _rotate_backward(
    Y, Dq, Dk, Dv, QNorm, KNorm, Cos, Sin, eps, tokens,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
    M: tl.constexpr,
):  # fmt: skip
    """Replaces one head of q, k or v in Y by its gradient."""
    HALF: tl.constexpr = D // 2
    head = tl.program_id(1)
    m = tl.program_id(0) * M + tl.arange(0, M)
    d = tl.arange(0, BLOCK)
    inside = d < HALF
    both = (m < tokens)[:, None] & inside[None, :]
    at = m[:, None].to(tl.int64) * ((H + 2 * K) * D) + head * D + d[None, :]
    if head < H:
        source = Dq + (m[:, None].to(tl.int64) * H + head) * D + d[None, :]
    elif head < H + K:
        source = Dk + (m[:, None].to(tl.int64) * K + head - H) * D + d[None, :]
    else:
        source = Dv + (m[:, None].to(tl.int64) * K + head - H - K) * D + d[None, :]
    first = tl.load(source, mask=both, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=both, other=0.0).to(tl.float32)
    if head < H + K:
        angle = m[:, None] * HALF + d[None, :]
        cos = tl.load(Cos + angle, mask=both, other=0.0).to(tl.float32)
        sin = tl.load(Sin + angle, mask=both, other=0.0).to(tl.float32)
        turned = first * cos + second * sin
        second = second * cos - first * sin
        first = turned
        if NORM:
            one = tl.load(Y + at, mask=both, other=0.0).to(tl.float32)
            two = tl.load(Y + at + HALF, mask=both, other=0.0).to(tl.float32)
            scale = tl.rsqrt((tl.sum(one * one, 1) + tl.sum(two * two, 1)) / D + eps)[:, None]
            weight = QNorm if head < H else KNorm
            first *= tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)[None, :]
            second *= tl.load(weight + HALF + d, mask=inside, other=0.0).to(tl.float32)[None, :]
            one, two = one * scale, two * scale
            mean = ((tl.sum(first * one, 1) + tl.sum(second * two, 1)) / D)[:, None]
            first = scale * (first - one * mean)
            second = scale * (second - two * mean)
    tl.store(Y + at, first.to(Y.dtype.element_ty), mask=both)
    tl.store(Y + at + HALF, second.to(Y.dtype.element_ty), mask=both)


# -- SwiGLU ---------------------------------------------------------------------------------------


@Launcher
@triton.jit
def _swiglu(Y, Out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < SIZE
    gate = tl.load(Y + row * (2 * SIZE) + c, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(Y + row * (2 * SIZE) + SIZE + c, mask=inside, other=0.0).to(tl.float32)
    act = (gate / (1 + tl.exp(-gate))).to(Y.dtype.element_ty).to(tl.float32)
    tl.store(Out + row * SIZE + c, (act * up).to(Out.dtype.element_ty), mask=inside)


@Launcher
@triton.jit
def _swiglu_backward(Y, Gradient, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Replaces gate and up in Y by their gradients, and the gradient by the product itself."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < SIZE
    at = Y + row * (2 * SIZE) + c
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + SIZE, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(Gradient + row * SIZE + c, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1 / (1 + tl.exp(-gate))
    act = (gate * sigmoid).to(Y.dtype.element_ty).to(tl.float32)
    tl.store(Gradient + row * SIZE + c, (act * up).to(Gradient.dtype.element_ty), mask=inside)
    tl.store(at + SIZE, (g * act).to(Y.dtype.element_ty), mask=inside)
    slope = sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(at, (g * up * slope).to(Y.dtype.element_ty), mask=inside)


# -- softmax of the logits ------------------------------------------------------------------------


@Launcher
@triton.jit
def _log_sum_exp(Logits, Out, V: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        logit = tl.load(Logits + row.to(tl.int64) * V + start + c, mask=start + c < V, other=-1e30)
        now = tl.maximum(largest, logit)
        total = total * tl.exp(largest - now) + tl.exp(logit - now)
        largest = now
    top = tl.max(largest, 0)
    tl.store(Out + row, top + tl.log(tl.sum(total * tl.exp(largest - top), 0)))


@Launcher
@triton.jit(do_not_specialize=["count"])
def _logits_gradient(
    Logits, Rows, Lse, Targets, G, Out, count, V: tl.constexpr, BLOCK: tl.constexpr
):
    """onehot·g - softmax·Σg for one row of the output."""
    line = tl.program_id(0)
    row = tl.load(Rows + line)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < V
    logit = tl.load(Logits + row.to(tl.int64) * V + c, mask=inside, other=float("-inf"))
    power = tl.exp(logit - tl.load(Lse + row))
    total = 0.0
    own = tl.zeros([BLOCK], tl.float32)
    for k in range(count):
        g = tl.load(G + row * count + k)
        total += g
        own += tl.where(c == tl.load(Targets + row * count + k), g, 0.0)
    found = own - power * total
    tl.store(Out + line.to(tl.int64) * V + c, found.to(Out.dtype.element_ty), mask=inside)


# -- LoRA products of several adapters ------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LoraTables:
    """Where the matrices of several adapters are, and which tokens use them."""

    #: Addresses of weights and gradients are counted in elements from these two.
    base: Tensor
    grad_base: Tensor
    #: int64 [slots, targets, 4]: A, B, and the gradients of A and B.
    offsets: Tensor
    #: int32 [slots, targets]; 0 if the adapter does not change this target.
    ranks: Tensor
    #: float32 [slots]
    scales: Tensor
    #: int32 [slots, spans, 2]: the tokens of each slot; unused spans are empty.
    spans: Tensor
    #: int32 [tiles, 3]: first token, end, slot. A tile has at most TOKENS tokens of one slot.
    tiles: Tensor
    #: The largest rank, rounded up to a power of two, at least 16.
    rank: int
    #: A number that divides every rank: 8, which allows wide loads, or 1.
    rank_step: int


@Launcher
@triton.jit(do_not_specialize=["target", "targets"])
def _shrink(
    X, Out, Base, Offsets, Ranks, Scales, Tiles, target, targets, stride, column, size, width,
    R: tl.constexpr, STEP: tl.constexpr, BACKWARD: tl.constexpr, M: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """scale · x Aᵀ, or scale · dy B, of the tokens of one tile for one projection."""
    tile, j = tl.program_id(0), tl.program_id(1)
    start, stop = tl.load(Tiles + tile * 3), tl.load(Tiles + tile * 3 + 1)
    slot = tl.load(Tiles + tile * 3 + 2)
    at = slot * targets + target + j
    rank = tl.multiple_of(tl.load(Ranks + at), STEP)
    offset = tl.multiple_of(tl.load(Offsets + at * 4 + (1 if BACKWARD else 0)), 8)
    m, r, k = start + tl.arange(0, M), tl.arange(0, R), tl.arange(0, BLOCK)
    ok = (m < stop)[:, None]
    h = tl.zeros([M, R], tl.float32)
    if rank > 0:
        line = X + m[:, None].to(tl.int64) * stride + column
        for step in range(0, size, BLOCK):
            c = step + k
            inside = c < size
            x = tl.load(line + c[None, :], mask=ok & inside[None, :], other=0.0)
            if BACKWARD:
                where = c[:, None] * rank + r[None, :]
            else:
                where = r[None, :] * size + c[:, None]
            w = tl.load(
                Base + offset + where, mask=(r < rank)[None, :] & inside[:, None], other=0.0
            )
            h = tl.dot(x, w, h)
    h *= tl.load(Scales + slot)
    to = m[:, None].to(tl.int64) * width + j * R + r[None, :]
    tl.store(Out + to, h.to(Out.dtype.element_ty), mask=ok)


@Launcher
@triton.jit(do_not_specialize=["target", "targets"])
def _expand(
    Y, Shrunk, Base, Offsets, Ranks, Tiles, target, targets, stride, column, size, width,
    PROJECTIONS: tl.constexpr, R: tl.constexpr, STEP: tl.constexpr, BACKWARD: tl.constexpr,
    M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y += h Bᵀ for one projection, or dx += Σ dh A over the projections of one input."""
    tile = tl.program_id(0)
    start, stop = tl.load(Tiles + tile * 3), tl.load(Tiles + tile * 3 + 1)
    slot = tl.load(Tiles + tile * 3 + 2)
    m, r = start + tl.arange(0, M), tl.arange(0, R)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok, inside = (m < stop)[:, None], n < size
    at = Y + m[:, None].to(tl.int64) * stride + column + n[None, :]
    y = tl.load(at, mask=ok & inside[None, :], other=0.0).to(tl.float32)
    for j in tl.static_range(PROJECTIONS):
        entry = slot * targets + target + j
        rank = tl.multiple_of(tl.load(Ranks + entry), STEP)
        if rank > 0:
            offset = tl.multiple_of(tl.load(Offsets + entry * 4 + (0 if BACKWARD else 1)), 8)
            h = tl.load(
                Shrunk + m[:, None].to(tl.int64) * width + j * R + r[None, :],
                mask=ok,
                other=0.0,
            )
            if BACKWARD:
                where = r[:, None] * size + n[None, :]
            else:
                where = n[None, :] * rank + r[:, None]
            w = tl.load(
                Base + offset + where, mask=(r < rank)[:, None] & inside[None, :], other=0.0
            )
            y = tl.dot(h, w, y)
    tl.store(at, y.to(Y.dtype.element_ty), mask=ok & inside[None, :])


@Launcher
@triton.jit(do_not_specialize=["target", "targets"])
def _weight_gradient(
    X, Shrunk, GradBase, Offsets, Ranks, Spans, target, targets, stride, column, size, width,
    R: tl.constexpr, STEP: tl.constexpr, SPANS: tl.constexpr, OF_B: tl.constexpr, M: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """dA += dhᵀ x for one projection, or dB += dyᵀ h, over all tokens of one adapter."""
    slot, j = tl.program_id(0), tl.program_id(2)
    entry = slot * targets + target + j
    rank = tl.multiple_of(tl.load(Ranks + entry), STEP)
    if rank > 0:
        n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        r, t = tl.arange(0, R), tl.arange(0, M)
        inside = n < size
        total = tl.zeros([BLOCK, R], tl.float32)
        for span in tl.static_range(SPANS):
            start = tl.load(Spans + (slot * SPANS + span) * 2)
            stop = tl.load(Spans + (slot * SPANS + span) * 2 + 1)
            for begin in range(start, stop, M):
                m = begin + t
                ok = m < stop
                x = tl.load(
                    X + m[None, :].to(tl.int64) * stride + column + n[:, None],
                    mask=ok[None, :] & inside[:, None],
                    other=0.0,
                )
                h = tl.load(
                    Shrunk + m[:, None].to(tl.int64) * width + j * R + r[None, :],
                    mask=ok[:, None],
                    other=0.0,
                )
                total = tl.dot(x, h, total)
        offset = tl.load(Offsets + entry * 4 + (3 if OF_B else 2))
        if OF_B:
            where = n[:, None] * rank + r[None, :]
        else:
            where = r[None, :] * size + n[:, None]
        mask = inside[:, None] & (r < rank)[None, :]
        at = GradBase + offset + where
        tl.store(at, tl.load(at, mask=mask, other=0.0) + total, mask=mask)


# -- launches -------------------------------------------------------------------------------------


def _warps(block: int) -> int:
    return min(16, max(1, block // 512))


def add_norm(
    x_TH: Tensor, y_TH: Tensor | None, weight_H: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """x + y, and its RMS norm. Without `y` the first is `x` itself."""
    tokens, size = x_TH.shape
    total = x_TH if y_TH is None else torch.empty_like(x_TH)
    out = torch.empty_like(x_TH)
    block = triton.next_power_of_2(size)
    _add_norm.launch(
        (tokens, 1, 1),
        x_TH, x_TH if y_TH is None else y_TH, weight_H, total, out, eps, size, block,
        y_TH is not None, num_warps=_warps(block),
    )  # fmt: skip
    return total, out


def norm_backward(
    x_TH: Tensor, weight_H: Tensor, eps: float, gradient_TH: Tensor, residual_TH: Tensor | None
) -> tuple[Tensor, Tensor]:
    """
    The gradient by x, with the residual gradient added, and the norm, which was not kept.

    They replace the residual gradient and the gradient in memory.
    """
    tokens, size = x_TH.shape
    dx = torch.empty_like(x_TH) if residual_TH is None else residual_TH
    block = triton.next_power_of_2(size)
    _norm_backward.launch(
        (tokens, 1, 1),
        x_TH, weight_H, gradient_TH, dx, dx, gradient_TH, eps, size, block,
        residual_TH is not None, num_warps=_warps(block),
    )  # fmt: skip
    return dx, gradient_TH


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """What the rotation needs to know of a layer and of the positions of the tokens."""

    query_heads: int
    key_heads: int
    size: int
    #: Weights of the norms of queries and keys, if the model has them.
    norms: tuple[Tensor, Tensor] | None
    eps: float
    #: [T, size / 2], in the format of the model.
    cos: Tensor
    sin: Tensor


def rotate(qkv_TO: Tensor, shape: HeadShape) -> tuple[Tensor, Tensor]:
    """Queries [T, heads, size] and keys after norm and rotation."""
    tokens, size = len(qkv_TO), shape.size
    q, k = (
        torch.empty(tokens, heads, size, dtype=qkv_TO.dtype, device=qkv_TO.device)
        for heads in (shape.query_heads, shape.key_heads)
    )
    _rotate.launch(
        (triton.cdiv(tokens, 16), shape.query_heads + shape.key_heads, 1),
        qkv_TO, q, k, *(shape.norms or (shape.cos, shape.cos)), shape.cos, shape.sin, shape.eps,
        tokens, shape.query_heads, shape.key_heads, size,
        max(16, triton.next_power_of_2(size // 2)), shape.norms is not None, 16,
        num_warps=2,
    )  # fmt: skip
    return q, k


def rotate_backward(qkv_TO: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, shape: HeadShape) -> Tensor:
    """The gradient by the projections q, k and v, which it replaces in memory."""
    tokens, size = len(qkv_TO), shape.size
    dq, dk, dv = dq.contiguous(), dk.contiguous(), dv.contiguous()
    _rotate_backward.launch(
        (triton.cdiv(tokens, 16), shape.query_heads + 2 * shape.key_heads, 1),
        qkv_TO, dq, dk, dv, *(shape.norms or (shape.cos, shape.cos)), shape.cos, shape.sin,
        shape.eps, tokens, shape.query_heads, shape.key_heads, size,
        max(16, triton.next_power_of_2(size // 2)), shape.norms is not None, 16,
        num_warps=2,
    )  # fmt: skip
    return qkv_TO


def swiglu(gate_up_TO: Tensor) -> Tensor:
    """silu(gate) * up."""
    tokens, size = len(gate_up_TO), gate_up_TO.shape[1] // 2
    out = torch.empty(tokens, size, dtype=gate_up_TO.dtype, device=gate_up_TO.device)
    block = min(2048, triton.next_power_of_2(size))
    _swiglu.launch((tokens, triton.cdiv(size, block), 1), gate_up_TO, out, size, block, num_warps=4)
    return out


def swiglu_backward(gate_up_TO: Tensor, gradient_TI: Tensor) -> tuple[Tensor, Tensor]:
    """
    The gradient by gate and up, and silu(gate) * up, which was not kept.

    They replace the arguments in memory.
    """
    tokens, size = gradient_TI.shape
    block = min(2048, triton.next_power_of_2(size))
    _swiglu_backward.launch(
        (tokens, triton.cdiv(size, block), 1), gate_up_TO, gradient_TI, size, block, num_warps=4
    )
    return gate_up_TO, gradient_TI


def log_sum_exp(logits_TV: Tensor) -> Tensor:
    """The logarithm of the softmax's divisor [T]."""
    tokens, size = logits_TV.shape
    out = torch.empty(tokens, dtype=torch.float32, device=logits_TV.device)
    _log_sum_exp.launch((tokens, 1, 1), logits_TV, out, size, LOGITS, num_warps=8)
    return out


def logits_gradient(
    logits_TV: Tensor, rows_u: Tensor, lse_T: Tensor, targets_TK: Tensor, g_TK: Tensor,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """dL/dlogits [u, V] of some rows, from g = dL/dlogp: onehot·g - softmax·Σg."""
    size, targets = logits_TV.shape[1], targets_TK.shape[1]
    out = torch.empty(len(rows_u), size, dtype=dtype, device=logits_TV.device)
    _logits_gradient.launch(
        (len(rows_u), triton.cdiv(size, LOGITS), 1),
        logits_TV, rows_u, lse_T, targets_TK.contiguous(), g_TK.contiguous(), out, targets, size,
        LOGITS, num_warps=8,
    )  # fmt: skip
    return out


def _lora_block(tables: LoraTables) -> int:
    """Columns of a tile: a large rank leaves less fast memory for them."""
    return COLUMNS if tables.rank <= 64 else 64 if tables.rank <= 128 else 32


def _lora_stages(tables: LoraTables) -> int:
    return 4 if tables.rank <= 64 else 3 if tables.rank <= 128 else 2


def shrink(x_TI: Tensor, tables: LoraTables, target: int, projections: int) -> Tensor:
    """
    scale · x Aᵀ [T, P · R] of every projection that reads x.

    Rows of tokens without an adapter are not written.
    """
    tokens, size = x_TI.shape
    width = projections * tables.rank
    out = torch.empty(tokens, width, dtype=x_TI.dtype, device=x_TI.device)
    _shrink.launch(
        (len(tables.tiles), projections, 1),
        x_TI, out, tables.base, tables.offsets, tables.ranks, tables.scales, tables.tiles, target,
        tables.ranks.shape[1], x_TI.stride(0), 0, size, width, tables.rank, tables.rank_step,
        False, TOKENS, 64, num_warps=4, num_stages=_lora_stages(tables),
    )  # fmt: skip
    return out


def expand(
    y_TO: Tensor, h_TPR: Tensor, tables: LoraTables, target: int, sizes: Sequence[int]
) -> None:
    """Adds h Bᵀ to the columns of each projection of y, which have these sizes."""
    column, block = 0, _lora_block(tables)
    for j, size in enumerate(sizes):
        _expand.launch(
            (len(tables.tiles), triton.cdiv(size, block), 1),
            y_TO, h_TPR[:, j * tables.rank :], tables.base, tables.offsets, tables.ranks,
            tables.tiles, target + j, tables.ranks.shape[1], y_TO.stride(0), column, size,
            h_TPR.shape[1], 1, tables.rank, tables.rank_step, False, TOKENS, block, num_warps=4,
        )  # fmt: skip
        column += size


def shrink_gradient(dy_TO: Tensor, tables: LoraTables, target: int, sizes: Sequence[int]) -> Tensor:
    """scale · dy B [T, P · R] of every projection."""
    tokens, width = len(dy_TO), len(sizes) * tables.rank
    out = torch.empty(tokens, width, dtype=dy_TO.dtype, device=dy_TO.device)
    column = 0
    for j, size in enumerate(sizes):
        _shrink.launch(
            (len(tables.tiles), 1, 1),
            dy_TO, out[:, j * tables.rank :], tables.base, tables.offsets, tables.ranks,
            tables.scales, tables.tiles, target + j, tables.ranks.shape[1], dy_TO.stride(0),
            column, size, width, tables.rank, tables.rank_step, True, TOKENS, 64,
            num_warps=4, num_stages=_lora_stages(tables),
        )  # fmt: skip
        column += size
    return out


def expand_gradient(
    dx_TI: Tensor, dh_TPR: Tensor, tables: LoraTables, target: int, projections: int
) -> None:
    """Adds dh A of all projections to dx."""
    size, block = dx_TI.shape[1], _lora_block(tables)
    _expand.launch(
        (len(tables.tiles), triton.cdiv(size, block), 1),
        dx_TI, dh_TPR, tables.base, tables.offsets, tables.ranks, tables.tiles, target,
        tables.ranks.shape[1], dx_TI.stride(0), 0, size, dh_TPR.shape[1], projections, tables.rank,
        tables.rank_step, True, TOKENS, block, num_warps=4,
    )  # fmt: skip


def add_weight_gradients(
    x_TI: Tensor,
    h_TPR: Tensor,
    dy_TO: Tensor,
    dh_TPR: Tensor,
    tables: LoraTables,
    target: int,
    sizes: Sequence[int],
) -> None:
    """Adds dhᵀ x to the gradients of A, and dyᵀ h to those of B, of every projection."""
    width, targets = h_TPR.shape[1], tables.ranks.shape[1]
    slots, spans = tables.spans.shape[:2]
    size, block = x_TI.shape[1], _lora_block(tables)
    _weight_gradient.launch(
        (slots, triton.cdiv(size, block), len(sizes)),
        x_TI, dh_TPR, tables.grad_base, tables.offsets, tables.ranks, tables.spans, target,
        targets, x_TI.stride(0), 0, size, width, tables.rank, tables.rank_step, spans, False,
        TOKENS, block, num_warps=4, num_stages=min(3, _lora_stages(tables)),
    )  # fmt: skip
    column = 0
    for j, outputs in enumerate(sizes):
        _weight_gradient.launch(
            (slots, triton.cdiv(outputs, block), 1),
            dy_TO, h_TPR[:, j * tables.rank :], tables.grad_base, tables.offsets, tables.ranks,
            tables.spans, target + j, targets, dy_TO.stride(0), column, outputs, width,
            tables.rank, tables.rank_step, spans, True, TOKENS, block, num_warps=4,
            num_stages=min(3, _lora_stages(tables)),
        )  # fmt: skip
        column += outputs
