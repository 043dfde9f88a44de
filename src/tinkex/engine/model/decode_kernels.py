"""Triton kernels of a decode step on a GPU: one token of each sequence through one layer.

A row is one sequence. Rows with the same adapter are adjacent; `slots` says which adapter a row
uses (-1: none), and the adapter tables say where the matrices of an adapter are, so a change of
adapters changes numbers in tables and not the launches, which a CUDA graph records.

Rows that only fill a batch up have `last` = -1: they read nothing and write to a spare page.
Every masked load has a defined value, because unwritten memory may hold NaN.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

# B rows, R rank rounded up, P projections that read the same input, H query heads, K key heads,
# D head size, V vocabulary

#: The smallest tile of rows of a matrix product.
ROWS = 16
#: Keys that one program reads at a time.
KEYS = 64
#: Logits that one program samples from.
SAMPLE_BLOCK = 4096
#: Up to this many rows `linear` is faster than the matrix products of torch.
FEW_ROWS = 16
#: Up to this many rows one program may compute the norms of all.
NORM_ROWS = 4


@dataclass
class Options:
    """How a decode step of few rows is launched."""

    #: Products with A in the launch of the base product.
    fused_shrink: bool = False
    #: Parts of an attention are merged by the program that finishes last.
    fused_merge: bool = False
    #: Products with B of o and down in the launch of the next norm.
    fused_expand: bool = False
    #: A kernel starts before the one before it has ended, and waits for it only before it reads its
    #: results. 1: when that kernel computes; 2: even when that kernel itself still waits.
    early_start: int = 0
    #: Bytes of weights that a kernel which starts early brings to the L2 cache while it waits.
    prefetch: int = 0

    def __post_init__(self) -> None:
        for setting in filter(None, os.environ.get("TINKEX_DECODE_OPTIONS", "").split(",")):
            name, _, value = setting.partition("=")
            setattr(self, name, type(getattr(self, name))(int(value)))


OPTIONS = Options()


def early_start(rows: int, device: torch.device, lora: LoraTables | None) -> int:
    """Of a step: 0 where the GPU cannot, or where kernels run beside each other."""
    if rows > FEW_ROWS or device.type != "cuda" or torch.version.hip is not None:
        return 0
    if lora is not None and not OPTIONS.fused_shrink:
        return 0
    return OPTIONS.early_start if torch.cuda.get_device_capability(device)[0] >= 9 else 0


@dataclass(frozen=True, kw_only=True)
class LoraTables:
    """Where the matrices of the adapters are, for the layers of one recorded step."""

    #: Addresses are counted in elements from here: a pointer that the compiler knows as aligned.
    base: Tensor
    #: int64 [slots, targets, 2]: A and B of each target.
    offsets: Tensor
    #: int32 [slots, targets]; 0 if the adapter does not change this target.
    ranks: Tensor
    #: float32 [slots]
    scales: Tensor
    #: int32 [B]: the adapter of each row; -1 for the base model.
    slots_B: Tensor
    #: The largest rank, rounded up to a power of two, at least 16.
    rank: int
    #: A number that divides every rank: 8, which allows wide loads, or 1.
    rank_step: int
    #: Rows of one program. Few rows need many programs; many rows should read adapters rarely.
    tile: int = ROWS
    #: Parts of a product with A, which are added up later. None: as many as suit the rows.
    parts: int | None = None


@dataclass(frozen=True, kw_only=True)
class Shrunk:
    """x Aᵀ of every row for projections that read the same input, as sums over parts of x."""

    tables: LoraTables
    #: Index of the first projection among the targets.
    target: int
    #: float32 [parts, P, B, R]
    parts: Tensor


# -- parts of kernels -----------------------------------------------------------------------------
#
# A kernel with EARLY may start while the one before it runs. Until `_wait_for_inputs` it reads only
# what no kernel of the step writes (weights, adapters, and the fields of the rows, which the last
# kernel of a step changes), and it writes nothing. Every kernel waits, so the end of a kernel is
# the end of all before it. The first kernel of a step does not start early.


@triton.jit
def _let_next_start(EARLY: tl.constexpr):
    if EARLY == 2:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _wait_for_inputs(EARLY: tl.constexpr):
    if EARLY:
        tl.extra.cuda.gdc_wait()
    if EARLY == 1:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _prefetch(pointers):
    """Brings the 128 bytes at each pointer to the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // dummy $0",
        "=r,l",
        [pointers],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _prefetch_A(
    slot,
    start,
    target,
    Base,
    Offsets,
    Ranks,
    SIZE: tl.constexpr,
    TARGETS: tl.constexpr,
    PER: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A of one adapter, for PER inputs from `start` on."""
    if slot >= 0:
        rank = tl.load(Ranks + slot * TARGETS + target)
        if rank > 0:
            offset = tl.load(Offsets + (slot * TARGETS + target) * 2)
            row = tl.minimum(tl.arange(0, R), rank - 1)
            for step in tl.static_range(0, PER, BLOCK):
                c = tl.minimum(start + step + tl.arange(0, BLOCK // 64) * 64, SIZE - 1)
                _prefetch(Base + offset + row[None, :] * SIZE + c[:, None])


@triton.jit
def _prefetch_B(slot, n, inside, target, Base, Offsets, Ranks, TARGETS: tl.constexpr):
    """B of one of the adapters, for the outputs `n`."""
    g = tl.max(slot, 0)
    if g >= 0:
        rank = tl.load(Ranks + g * TARGETS + target)
        if rank > 0:
            offset = tl.load(Offsets + (g * TARGETS + target) * 2 + 1)
            _prefetch(Base + offset + tl.where(inside, n, 0) * rank)


@triton.jit
def _prefetch_keys(
    Keys,
    Values,
    Table,
    start,
    stop,
    key_head,
    K: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    N: tl.constexpr,
):
    """The N keys and values of a page from `start` on, which are in the cache or will be."""
    page = tl.load(Table + start // PAGE, mask=stop > 0, other=0).to(tl.int64)
    at = ((page * PAGE + start % PAGE + tl.arange(0, N)) * K + key_head) * D
    for line in tl.static_range(0, D, 64):
        _prefetch(Keys + at + line)
        _prefetch(Values + at + line)


@triton.jit
def _is_last(Counter, count):
    """
    Whether all other programs that count here have stored their results.

    The counter is 0 before and after.
    """
    # The barrier orders the stores of all threads before the addition, which one thread makes.
    tl.debug_barrier()
    last = tl.atomic_add(Counter, 1, sem="acq_rel") == count - 1
    if last:
        tl.store(Counter, 0)
    tl.debug_barrier()
    return last


@triton.jit
def _sum_parts(
    Parts, j, m, ok, rows, PROJECTIONS: tl.constexpr, SPLITS: tl.constexpr, R: tl.constexpr
):
    r = tl.arange(0, R)
    at = (j * rows + m[:, None]) * R + r[None, :]
    h = tl.load(Parts + at, mask=ok[:, None], other=0.0)
    for s in tl.static_range(1, SPLITS):
        h += tl.load(Parts + s * PROJECTIONS * rows * R + at, mask=ok[:, None], other=0.0)
    return h


@triton.jit
def _expand(
    h,
    slot,
    n,
    inside,
    target,
    Base,
    Offsets,
    Ranks,
    Scales,
    TARGETS: tl.constexpr,
    R: tl.constexpr,
    STEP: tl.constexpr,
    EXACT: tl.constexpr,
    total,
):
    """Adds the LoRA product of every row for the outputs `n` to `total`."""
    r = tl.arange(0, R)
    first = tl.min(tl.where(slot >= 0, slot, 1 << 30), 0)
    last = tl.max(slot, 0)
    for g in range(first, last + 1):
        rank = tl.multiple_of(tl.load(Ranks + g * TARGETS + target), STEP)
        if rank > 0:
            offset = tl.multiple_of(tl.load(Offsets + (g * TARGETS + target) * 2 + 1), 8)
            scale = tl.load(Scales + g)
            b = tl.load(
                Base + offset + n[None, :] * rank + r[:, None],
                mask=(r[:, None] < rank) & inside[None, :],
                other=0.0,
            )
            own = tl.where((slot == g)[:, None], h, 0.0)
            if EXACT:
                total += tl.dot(own, b.to(tl.float32), input_precision="tf32x3") * scale
            else:
                total += tl.dot(own.to(b.dtype), b) * scale
    return total


@triton.jit
def _merge_heads(
    Out,
    Lse,
    Y,
    key_head,
    first,
    HEADS: tl.constexpr,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Combines the parts of some query heads of a key head by their log-sum-exp."""
    s, d = tl.arange(0, SPLITS), tl.arange(0, BLOCK)
    g = first + tl.arange(0, HEADS)
    line = (key_head * SPLITS + s[:, None]) * GROUP + g[None, :]
    # Not from the L1 cache: other multiprocessors may have written this in the same launch.
    lse = tl.load(Lse + line, cache_modifier=".cg")
    weight = tl.exp(lse - tl.max(lse, 0)[None, :])
    ok = (g < G)[:, None] & (d < D)[None, :]
    out = tl.load(
        Out + line[:, :, None] * D + d[None, None, :],
        mask=ok[None, :, :],
        other=0.0,
        cache_modifier=".cg",
    )
    y = tl.sum(out * weight[:, :, None], 0) / tl.sum(weight, 0)[:, None]
    to = (key_head * G + g[:, None]) * D + d[None, :]
    tl.store(Y + to, y.to(Y.dtype.element_ty), mask=ok)


# -- kernels --------------------------------------------------------------------------------------


@triton.jit
def _linear_part(
    X,
    W,
    Bias,
    Y,
    rows,
    block,
    part,
    SIZE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    BIAS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
    AHEAD: tl.constexpr,
):
    m, k = tl.arange(0, M), tl.arange(0, BLOCK)
    n = block * N + tl.arange(0, N)
    ok, inside = m < rows, n < OUTPUTS
    PER: tl.constexpr = ((SIZE + SPLITS - 1) // SPLITS + BLOCK - 1) // BLOCK * BLOCK
    EVEN: tl.constexpr = (PER * SPLITS == SIZE) and (OUTPUTS % N == 0)
    at_W = W + n[None, :].to(tl.int64) * SIZE
    if EARLY:
        # Within the matrix also where this program has fewer inputs or outputs.
        at_first = W + tl.minimum(n, OUTPUTS - 1)[None, :].to(tl.int64) * SIZE
        for piece in tl.static_range(0, AHEAD * BLOCK // 64):
            _prefetch(at_first + tl.minimum(part * PER + piece * 64, SIZE - 1))
    _wait_for_inputs(EARLY)
    y = tl.zeros([M, N], tl.float32)
    for step in range(0, PER, BLOCK):
        c = part * PER + step + k
        if EVEN:
            x = tl.load(X + m[:, None] * SIZE + c[None, :], mask=ok[:, None], other=0.0)
            w = tl.load(at_W + c[:, None])
        else:
            x = tl.load(
                X + m[:, None] * SIZE + c[None, :],
                mask=ok[:, None] & (c < SIZE)[None, :],
                other=0.0,
            )
            w = tl.load(at_W + c[:, None], mask=inside[None, :] & (c < SIZE)[:, None], other=0.0)
        y = tl.dot(x, w, y)
    if BIAS:
        y += tl.load(Bias + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    at = (part * rows + m[:, None]) * OUTPUTS + n[None, :]
    tl.store(Y + at, y.to(Y.dtype.element_ty), mask=ok[:, None] & inside[None, :])


@triton.jit
def _shrink_part(
    X,
    Slot,
    Parts,
    Base,
    Offsets,
    Ranks,
    rows,
    target,
    block,
    j,
    part,
    SIZE: tl.constexpr,
    TARGETS: tl.constexpr,
    PROJECTIONS: tl.constexpr,
    SPLITS: tl.constexpr,
    R: tl.constexpr,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    m = block * M + tl.arange(0, M)
    slot = tl.load(Slot + m, mask=m < rows, other=-1)
    r, k = tl.arange(0, R), tl.arange(0, BLOCK)
    PER: tl.constexpr = ((SIZE + SPLITS - 1) // SPLITS + BLOCK - 1) // BLOCK * BLOCK
    h = tl.zeros([M, R], tl.float32)
    first = tl.min(tl.where(slot >= 0, slot, 1 << 30), 0)
    last = tl.max(slot, 0)
    if EARLY:
        _prefetch_A(
            last, part * PER, target + j, Base, Offsets, Ranks, SIZE, TARGETS, PER, R, BLOCK
        )
    _wait_for_inputs(EARLY)
    for g in range(first, last + 1):
        rank = tl.load(Ranks + g * TARGETS + target + j)
        if rank > 0:
            offset = tl.multiple_of(tl.load(Offsets + (g * TARGETS + target + j) * 2), 8)
            own = slot == g
            for step in range(0, PER, BLOCK):
                c = part * PER + step + k
                inside = c < SIZE
                x = tl.load(
                    X + m[:, None].to(tl.int64) * SIZE + c[None, :],
                    mask=own[:, None] & inside[None, :],
                    other=0.0,
                )
                a = tl.load(
                    Base + offset + r[None, :] * SIZE + c[:, None],
                    mask=(r[None, :] < rank) & inside[:, None],
                    other=0.0,
                )
                h += tl.dot(x, a)
    at = ((part * PROJECTIONS + j) * rows + m[:, None]) * R + r[None, :]
    tl.store(Parts + at, h, mask=(m < rows)[:, None])


@triton.jit(do_not_specialize=["rows", "target"])
def _linear(
    X,
    W,
    Bias,
    Y,
    rows,
    Slot,
    Parts,
    Base,
    Offsets,
    Ranks,
    target,
    SIZE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    BIAS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    LORA: tl.constexpr,
    TARGETS: tl.constexpr,
    PROJECTIONS: tl.constexpr,
    A_SPLITS: tl.constexpr,
    R: tl.constexpr,
    A_BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """
    A few rows times a whole matrix: reads the matrix once, in as many programs as possible.

    With LORA the first programs compute the products with A of the same rows.
    """
    _let_next_start(EARLY)
    BLOCKS: tl.constexpr = (OUTPUTS + N - 1) // N
    at = tl.program_id(0)
    if LORA:
        OTHERS: tl.constexpr = PROJECTIONS * A_SPLITS
        if at < OTHERS:
            _shrink_part(
                X, Slot, Parts, Base, Offsets, Ranks, rows, target,
                0, at % PROJECTIONS, at // PROJECTIONS,
                SIZE, TARGETS, PROJECTIONS, A_SPLITS, R, M, A_BLOCK, EARLY,
            )  # fmt: skip
        else:
            _linear_part(
                X, W, Bias, Y, rows, (at - OTHERS) % BLOCKS, (at - OTHERS) // BLOCKS,
                SIZE, OUTPUTS, SPLITS, BIAS, M, N, BLOCK, EARLY, AHEAD,
            )  # fmt: skip
    else:
        _linear_part(
            X, W, Bias, Y, rows, at % BLOCKS, at // BLOCKS,
            SIZE, OUTPUTS, SPLITS, BIAS, M, N, BLOCK, EARLY, AHEAD,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _add_norm(
    X,
    Y,
    W,
    Out,
    eps,
    rows,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    _let_next_start(EARLY)
    row = tl.program_id(0).to(tl.int64) * SIZE
    c = tl.arange(0, BLOCK)
    inside = c < SIZE
    w = tl.load(W + c, mask=inside, other=0.0).to(tl.float32)
    _wait_for_inputs(EARLY)
    x = tl.load(X + row + c, mask=inside, other=0.0).to(tl.float32)
    if PARTS:
        y = tl.load(Y + row + c, mask=inside, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            y += tl.load(Y + part * rows * SIZE + row + c, mask=inside, other=0.0)
        rounded = (x + y.to(X.dtype.element_ty).to(tl.float32)).to(X.dtype.element_ty)
        tl.store(X + row + c, rounded, mask=inside)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
    # Rounded before the weight, as in transformers.
    normed = (x * scale).to(Out.dtype.element_ty).to(tl.float32) * w
    tl.store(Out + row + c, normed.to(Out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "target"])
def _add_expanded_norm(
    X,
    Y,
    W,
    Out,
    eps,
    rows,
    Slot,
    Parts,
    Base,
    Offsets,
    Ranks,
    Scales,
    target,
    Counter,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    TARGETS: tl.constexpr,
    SPLITS: tl.constexpr,
    R: tl.constexpr,
    STEP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    EARLY: tl.constexpr,
):
    """`_add_expanded` of some outputs and the sum with x; the last program computes the norms."""
    _let_next_start(EARLY)
    m = tl.arange(0, M)
    ok = m < rows
    slot = tl.load(Slot + m, mask=ok, other=-1)
    n = tl.program_id(0) * N + tl.arange(0, N)
    both = ok[:, None] & (n < SIZE)[None, :]
    c = tl.arange(0, BLOCK)
    w = tl.load(W + c, mask=c < SIZE, other=0.0)
    if EARLY:
        _prefetch_B(slot, n, n < SIZE, target, Base, Offsets, Ranks, TARGETS)
    _wait_for_inputs(EARLY)
    at = m[:, None].to(tl.int64) * SIZE + n[None, :]
    x = tl.load(X + at, mask=both, other=0.0).to(tl.float32)
    y = tl.load(Y + at, mask=both, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        y += tl.load(Y + part * rows * SIZE + at, mask=both, other=0.0)
    h = _sum_parts(Parts, 0, m, slot >= 0, rows, 1, SPLITS, R)
    y = _expand(
        h, slot, n, n < SIZE, target, Base, Offsets, Ranks, Scales, TARGETS, R, STEP, False, y
    )
    x += y.to(X.dtype.element_ty).to(tl.float32)
    tl.store(X + at, x.to(X.dtype.element_ty), mask=both)
    if _is_last(Counter, tl.num_programs(0)):
        for row in range(rows):
            # Not from the L1 cache: other multiprocessors wrote this.
            x_row = tl.load(X + row * SIZE + c, mask=c < SIZE, other=0.0, cache_modifier=".cg")
            x_row = x_row.to(tl.float32)
            scale = tl.rsqrt(tl.sum(x_row * x_row, 0) / SIZE + eps)
            normed = (x_row * scale).to(Out.dtype.element_ty).to(tl.float32) * w.to(tl.float32)
            tl.store(Out + row * SIZE + c, normed.to(Out.dtype.element_ty), mask=c < SIZE)


@triton.jit(do_not_specialize=["rows", "target"])
def _shrink(
    X,
    Slot,
    Parts,
    Base,
    Offsets,
    Ranks,
    rows,
    target,
    SIZE: tl.constexpr,
    TARGETS: tl.constexpr,
    PROJECTIONS: tl.constexpr,
    SPLITS: tl.constexpr,
    R: tl.constexpr,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    _shrink_part(
        X, Slot, Parts, Base, Offsets, Ranks, rows, target,
        tl.program_id(0), tl.program_id(1), tl.program_id(2),
        SIZE, TARGETS, PROJECTIONS, SPLITS, R, M, BLOCK, 0,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "target"])
def _add_expanded(
    Y,
    Slot,
    Parts,
    Base,
    Offsets,
    Ranks,
    Scales,
    rows,
    target,
    SIZE: tl.constexpr,
    TARGETS: tl.constexpr,
    SPLITS: tl.constexpr,
    R: tl.constexpr,
    STEP: tl.constexpr,
    EXACT: tl.constexpr,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    _let_next_start(EARLY)
    m = tl.program_id(0) * M + tl.arange(0, M)
    slot = tl.load(Slot + m, mask=m < rows, other=-1)
    used = slot >= 0
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < SIZE
    if EARLY:
        _prefetch_B(slot, n, inside, target, Base, Offsets, Ranks, TARGETS)
    _wait_for_inputs(EARLY)
    if tl.max(slot, 0) >= 0:
        h = _sum_parts(Parts, 0, m, used, rows, 1, SPLITS, R)
        at = m[:, None].to(tl.int64) * SIZE + n[None, :]
        ok = used[:, None] & inside[None, :]
        y = tl.load(Y + at, mask=ok, other=0.0).to(tl.float32)
        y = _expand(
            h, slot, n, inside, target, Base, Offsets, Ranks, Scales, TARGETS, R, STEP, EXACT, y
        )
        tl.store(Y + at, y.to(Y.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["rows", "target", "table_stride", "spare"])
def _heads(
    Y,
    Q,
    Keys,
    Values,
    QNorm,
    KNorm,
    Frequencies,
    Position,
    Last,
    Table,
    table_stride,
    spare,
    eps,
    rope_scale,
    rows,
    target,
    Slot,
    Parts,
    Base,
    Offsets,
    Ranks,
    Scales,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    NORM: tl.constexpr,
    LORA: tl.constexpr,
    TARGETS: tl.constexpr,
    SPLITS: tl.constexpr,
    R: tl.constexpr,
    STEP: tl.constexpr,
    M: tl.constexpr,
    PAGED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One head of q, k or v: LoRA, norm, rotation; q goes to a tensor, k and v to the cache."""
    _let_next_start(EARLY)
    HALF: tl.constexpr = D // 2
    head = tl.program_id(1)
    m = tl.program_id(0) * M + tl.arange(0, M)
    ok = m < rows
    d = tl.arange(0, BLOCK)
    inside = d < HALF
    both = ok[:, None] & inside[None, :]
    at = m[:, None].to(tl.int64) * ((H + 2 * K) * D) + head * D + d[None, :]
    position = tl.load(Position + m, mask=ok, other=0)
    if LORA:
        slot = tl.load(Slot + m, mask=ok, other=-1)
        j = (head >= H).to(tl.int32) + (head >= H + K).to(tl.int32)
        n = (head - tl.where(j == 0, 0, tl.where(j == 1, H, H + K))) * D + d
        if EARLY:
            _prefetch_B(slot, n, inside, target + j, Base, Offsets, Ranks, TARGETS)
            _prefetch_B(slot, n + HALF, inside, target + j, Base, Offsets, Ranks, TARGETS)
    _wait_for_inputs(EARLY)
    one = tl.load(Y + at, mask=both, other=0.0).to(tl.float32)
    two = tl.load(Y + at + HALF, mask=both, other=0.0).to(tl.float32)
    if LORA:
        h = _sum_parts(Parts, j, m, slot >= 0, rows, 3, SPLITS, R)
        one = _expand(
            h, slot, n, inside, target + j, Base, Offsets, Ranks, Scales, TARGETS, R, STEP, False,
            one,
        )  # fmt: skip
        two = _expand(
            h, slot, n + HALF, inside, target + j, Base, Offsets, Ranks, Scales, TARGETS, R, STEP,
            False, two,
        )  # fmt: skip
        one = one.to(Y.dtype.element_ty).to(tl.float32)
        two = two.to(Y.dtype.element_ty).to(tl.float32)
    if head < H + K:
        if NORM:
            size = tl.sum(one * one, 1) + tl.sum(two * two, 1)
            scale = tl.rsqrt(size / D + eps)[:, None]
            weight = QNorm if head < H else KNorm
            w_one = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)[None, :]
            w_two = tl.load(weight + HALF + d, mask=inside, other=0.0).to(tl.float32)[None, :]
            one = (one * scale).to(Y.dtype.element_ty).to(tl.float32) * w_one
            two = (two * scale).to(Y.dtype.element_ty).to(tl.float32) * w_two
            one = one.to(Y.dtype.element_ty).to(tl.float32)
            two = two.to(Y.dtype.element_ty).to(tl.float32)
        frequency = tl.load(Frequencies + d, mask=inside, other=0.0)
        angle = position[:, None].to(tl.float32) * frequency[None, :]
        cos = (tl.cos(angle) * rope_scale).to(Y.dtype.element_ty).to(tl.float32)
        sin = (tl.sin(angle) * rope_scale).to(Y.dtype.element_ty).to(tl.float32)
        # Rounded after each operation, as in transformers.
        dtype: tl.constexpr = Y.dtype.element_ty
        rotated = (one * cos).to(dtype).to(tl.float32) - (two * sin).to(dtype).to(tl.float32)
        two = (two * cos).to(dtype).to(tl.float32) + (one * sin).to(dtype).to(tl.float32)
        one = rotated
    if head < H:
        to = (m[:, None].to(tl.int64) * H + head) * D + d[None, :]
        tl.store(Q + to, one.to(Q.dtype.element_ty), mask=both)
        tl.store(Q + to + HALF, two.to(Q.dtype.element_ty), mask=both)
    else:
        if PAGED:
            last = tl.load(Last + m, mask=ok, other=-1)
            page = tl.load(
                Table + m * table_stride + position // PAGE,
                mask=ok & (position <= last),
                other=spare,
            )
            where = (page * PAGE + position % PAGE).to(tl.int64)[:, None]
        else:
            where = tl.load(Table + m, mask=ok, other=0).to(tl.int64)[:, None]
        cache = Keys if head < H + K else Values
        key_head = tl.where(head < H + K, head - H, head - H - K)
        where = (where * K + key_head) * D + d[None, :]
        tl.store(cache + where, one.to(Keys.dtype.element_ty), mask=both)
        tl.store(cache + where + HALF, two.to(Keys.dtype.element_ty), mask=both)


@triton.jit(do_not_specialize=["table_stride"])
def _attend(
    Q,
    Keys,
    Values,
    Position,
    Last,
    Table,
    table_stride,
    Out,
    Lse,
    Y,
    Counters,
    scaling,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    MERGE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The query heads that share a key head, over one part of the sequence's keys."""
    _let_next_start(EARLY)
    row, key_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.minimum(tl.load(Position + row), tl.load(Last + row)) + 1
    per = tl.cdiv(tl.cdiv(length, SPLITS), N) * N
    start = part * per
    stop = tl.minimum(length, start + per)
    g, d, t = tl.arange(0, GROUP), tl.arange(0, BLOCK), tl.arange(0, N)
    real, inside = g[:, None] < G, d < D
    if EARLY:
        _prefetch_keys(
            Keys, Values, Table + row * table_stride, tl.where(start < stop, start, 0), stop,
            key_head, K, D, PAGE, N,
        )  # fmt: skip
    _wait_for_inputs(EARLY)
    q = tl.load(
        Q + ((row * K + key_head) * G + g[:, None]) * D + d[None, :],
        mask=real & inside[None, :],
        other=0.0,
    )
    largest = tl.full([GROUP], -1e30, tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    out = tl.zeros([GROUP, BLOCK], tl.float32)
    for s in range(start, stop, N):
        page = tl.load(Table + row * table_stride + s // PAGE).to(tl.int64)
        at = (page * PAGE + s % PAGE + t) * K + key_head
        ok = s + t < stop
        k = tl.load(
            Keys + at[None, :] * D + d[:, None], mask=ok[None, :] & inside[:, None], other=0.0
        )
        score = tl.where(ok[None, :], tl.dot(q, k) * scaling, -1e30)
        now = tl.maximum(largest, tl.max(score, 1))
        power, shift = tl.exp(score - now[:, None]), tl.exp(largest - now)
        v = tl.load(
            Values + at[:, None] * D + d[None, :], mask=ok[:, None] & inside[None, :], other=0.0
        )
        out = out * shift[:, None] + tl.dot(power.to(v.dtype), v)
        total = total * shift + tl.sum(power, 1)
        largest = now
    total = tl.maximum(total, 1e-30)
    out = out / total[:, None]
    if SPLITS == 1:
        to = ((row * K + key_head) * G + g[:, None]) * D + d[None, :]
        tl.store(Out + to, out.to(Out.dtype.element_ty), mask=real & inside[None, :])
    else:
        line = ((row * K + key_head) * SPLITS + part) * GROUP + g
        tl.store(Out + line[:, None] * D + d[None, :], out, mask=inside[None, :])
        tl.store(Lse + line, largest + tl.log(total))
        if MERGE:
            head = row * K + key_head
            if _is_last(Counters + head, SPLITS):
                _merge_heads(Out, Lse, Y, head, 0, MERGE, G, GROUP, D, BLOCK, SPLITS)


@triton.jit
def _merge(
    Out,
    Lse,
    Y,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
):
    _let_next_start(EARLY)
    _wait_for_inputs(EARLY)
    _merge_heads(
        Out, Lse, Y, tl.program_id(0), tl.program_id(1), 1, G, GROUP, D, BLOCK, SPLITS
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "target"])
def _swiglu(
    Y,
    Out,
    Slot,
    Parts,
    Base,
    Offsets,
    Ranks,
    Scales,
    rows,
    target,
    SIZE: tl.constexpr,
    LORA: tl.constexpr,
    TARGETS: tl.constexpr,
    SPLITS: tl.constexpr,
    R: tl.constexpr,
    STEP: tl.constexpr,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    _let_next_start(EARLY)
    m = tl.program_id(0) * M + tl.arange(0, M)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok, inside = m < rows, n < SIZE
    both = ok[:, None] & inside[None, :]
    at = m[:, None].to(tl.int64) * (2 * SIZE) + n[None, :]
    if LORA:
        slot = tl.load(Slot + m, mask=ok, other=-1)
        if EARLY:
            _prefetch_B(slot, n, inside, target, Base, Offsets, Ranks, TARGETS)
            _prefetch_B(slot, n, inside, target + 1, Base, Offsets, Ranks, TARGETS)
    _wait_for_inputs(EARLY)
    gate = tl.load(Y + at, mask=both, other=0.0).to(tl.float32)
    up = tl.load(Y + at + SIZE, mask=both, other=0.0).to(tl.float32)
    if LORA:
        h = _sum_parts(Parts, 0, m, slot >= 0, rows, 2, SPLITS, R)
        gate = _expand(
            h, slot, n, inside, target, Base, Offsets, Ranks, Scales, TARGETS, R, STEP, False, gate
        )
        h = _sum_parts(Parts, 1, m, slot >= 0, rows, 2, SPLITS, R)
        up = _expand(
            h, slot, n, inside, target + 1, Base, Offsets, Ranks, Scales, TARGETS, R, STEP, False,
            up,
        )  # fmt: skip
        gate = gate.to(Y.dtype.element_ty).to(tl.float32)
        up = up.to(Y.dtype.element_ty).to(tl.float32)
    act = (gate / (1 + tl.exp(-gate))).to(Y.dtype.element_ty).to(tl.float32)
    to = m[:, None].to(tl.int64) * SIZE + n[None, :]
    tl.store(Out + to, (act * up).to(Out.dtype.element_ty), mask=both)


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


# -- launches -------------------------------------------------------------------------------------


def _launch(early: int) -> dict[str, bool]:
    return {"launch_pdl": True} if early else {}


def linear(
    x_BI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None = None,
    *,
    parts: bool = False,
    early: int = 0,
) -> Tensor:
    """
    A linear layer for any number of rows.

    With `parts` the result may be float32 [parts, B, O], to be added up by `add_norm`.
    """
    if len(x_BI) > FEW_ROWS:
        return F.linear(x_BI, weight_OI, bias_O)
    return _few_rows_linear(x_BI, weight_OI, bias_O, None, parts, early)


def linear_and_shrink(
    x_BI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    tables: LoraTables,
    target: int,
    projections: int,
    *,
    parts: bool = False,
    early: int = 0,
) -> tuple[Tensor, Shrunk]:
    """`linear` and `shrink` of few rows in one launch."""
    shrunk = _empty_shrunk(x_BI, tables, target, projections)
    return _few_rows_linear(x_BI, weight_OI, bias_O, shrunk, parts, early), shrunk


def _few_rows_linear(
    x_BI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    shrunk: Shrunk | None,
    parts: bool,
    early: int,
) -> Tensor:
    rows, size = x_BI.shape
    outputs = len(weight_OI)
    # Enough programs to fill the GPU, and outputs of a program as many as then possible.
    splits, block = 1, 128
    while parts and bias_O is None and outputs // 64 * splits < 128 and size // splits >= 4 * block:
        splits *= 2
    width = next((n for n in (64, 32) if outputs // n * splits >= 128), 16)
    y = torch.empty(
        (splits, rows, outputs) if parts else (rows, outputs),
        dtype=torch.float32 if parts else x_BI.dtype,
        device=x_BI.device,
    )
    programs = triton.cdiv(outputs, width) * splits
    steps = triton.cdiv(size, splits * block)
    ahead = min(steps, OPTIONS.prefetch // (programs * width * block * 2))
    tables = None if shrunk is None else shrunk.tables
    a_splits, projections = (1, 1) if shrunk is None else shrunk.parts.shape[:2]
    _linear[(programs + (0 if shrunk is None else a_splits * projections),)](
        x_BI, weight_OI, x_BI if bias_O is None else bias_O, y, rows,
        *(
            (x_BI, x_BI, x_BI, x_BI, x_BI, 0)
            if shrunk is None or tables is None
            else (
                tables.slots_B, shrunk.parts, tables.base, tables.offsets, tables.ranks,
                shrunk.target,
            )
        ),
        size, outputs, splits, bias_O is not None, ROWS, width, block,
        shrunk is not None,
        1 if tables is None else tables.ranks.shape[1],
        projections, a_splits,
        16 if tables is None else tables.rank,
        _input_block(tables),
        early, ahead if early else 0,
        num_warps=4, num_stages=4, **_launch(early),
    )  # fmt: skip
    return y


def add_norm(
    x_BH: Tensor,
    y: Tensor | None,
    weight_H: Tensor,
    eps: float,
    *,
    shrunk: Shrunk | None = None,
    counters: Tensor | None = None,
    early: int = 0,
) -> Tensor:
    """
    x += y in place, then RMS norm. `y` is [B, H], or the parts of a sum [parts, B, H].

    First adds the LoRA products of `shrunk` to y; in the same launch if there are `counters`.
    """
    rows, size = x_BH.shape
    out = torch.empty_like(x_BH)
    parts = 0 if y is None else 1 if y.dim() == 2 else len(y)
    block = triton.next_power_of_2(size)
    if y is not None and shrunk is not None:
        if counters is not None and rows <= NORM_ROWS:
            tables, width = shrunk.tables, 64
            _add_expanded_norm[(triton.cdiv(size, width),)](
                x_BH, y, weight_H, out, eps, rows, tables.slots_B, shrunk.parts, tables.base,
                tables.offsets, tables.ranks, tables.scales, shrunk.target, counters, size, block,
                parts, tables.ranks.shape[1], len(shrunk.parts), tables.rank, tables.rank_step,
                ROWS, width, early,
                num_warps=min(8, max(4, block // 512)), **_launch(early),
            )  # fmt: skip
            return out
        add_expanded(y, shrunk, early=early)
    _add_norm[(rows,)](
        x_BH, x_BH if y is None else y, weight_H, out, eps, rows, size, block, parts, early,
        num_warps=min(16, max(1, block // 512)), **_launch(early),
    )  # fmt: skip
    return out


def shrink(x_BI: Tensor, tables: LoraTables, target: int, projections: int) -> Shrunk:
    rows, size = x_BI.shape
    shrunk = _empty_shrunk(x_BI, tables, target, projections)
    splits = len(shrunk.parts)
    _shrink[(triton.cdiv(rows, tables.tile), projections, splits)](
        x_BI, tables.slots_B, shrunk.parts, tables.base, tables.offsets, tables.ranks, rows,
        target, size, tables.ranks.shape[1], projections, splits, tables.rank, tables.tile,
        _input_block(tables),
        num_warps=4,
    )  # fmt: skip
    return shrunk


def _empty_shrunk(x_BI: Tensor, tables: LoraTables, target: int, projections: int) -> Shrunk:
    rows, size = x_BI.shape
    # Many parts are fast for few rows; for many rows they are much to read again.
    blocks = triton.cdiv(rows, tables.tile)
    splits, most = 1, tables.parts or max(4, min(16, 128 // (blocks * projections)))
    while 2 * splits <= most and size // (2 * splits) >= _input_block(tables):
        splits *= 2
    parts = torch.empty(
        splits, projections, rows, tables.rank, dtype=torch.float32, device=x_BI.device
    )
    return Shrunk(tables=tables, target=target, parts=parts)


def _input_block(tables: LoraTables | None) -> int:
    return 128 if tables is None or tables.rank <= 64 else 64


def _tile(shrunk: Shrunk | None) -> int:
    return ROWS if shrunk is None else shrunk.tables.tile


def _warps(tile: int) -> int:
    return max(4, tile // 8)


def _output_block(tables: LoraTables | None) -> int:
    return 128 if tables is None or tables.rank <= 64 else 64


def add_expanded(y_BO: Tensor, shrunk: Shrunk, *, exact: bool = False, early: int = 0) -> None:
    """
    Adds the LoRA products to y in place, or to the first part of a sum.

    With `exact` in float32 precision, for logits.
    """
    tables = shrunk.tables
    rows, size = y_BO.shape[-2:]
    block, tile = _output_block(tables), _tile(shrunk)
    _add_expanded[(triton.cdiv(rows, tile), triton.cdiv(size, block))](
        y_BO, tables.slots_B, shrunk.parts, tables.base, tables.offsets, tables.ranks,
        tables.scales, rows, shrunk.target, size, tables.ranks.shape[1], len(shrunk.parts),
        tables.rank, tables.rank_step, exact, tile, block, early,
        num_warps=_warps(tile), **_launch(early),
    )  # fmt: skip


def heads(
    y_BO: Tensor,
    *,
    keys: Tensor,
    values: Tensor,
    query_heads: int,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    frequencies: Tensor,
    rope_scale: float,
    positions_B: Tensor,
    shrunk: Shrunk | None,
    last_B: Tensor | None = None,
    table: Tensor | None = None,
    page: int = 0,
    spare: int = 0,
    slots_B: Tensor | None = None,
    early: int = 0,
) -> Tensor:
    """
    Writes keys and values to the cache and returns the queries [B, H, D].

    Where to write: the page of `table` with the position, or the cache slot `slots_B` of each row.
    """
    if slots_B is not None:
        table, last_B = slots_B, slots_B
    assert table is not None
    assert last_B is not None
    tile = _tile(shrunk)
    rows, (key_heads, size) = len(y_BO), keys.shape[1:]
    q = torch.empty(rows, query_heads, size, dtype=y_BO.dtype, device=y_BO.device)
    tables = None if shrunk is None else shrunk.tables
    dummy = frequencies
    _heads[(triton.cdiv(rows, tile), query_heads + 2 * key_heads)](
        y_BO, q, keys, values, *(norms or (frequencies, frequencies)), frequencies, positions_B,
        last_B, table, table.stride(0), spare, eps, rope_scale, rows,
        0 if shrunk is None else shrunk.target,
        *(
            (dummy, dummy, dummy, dummy, dummy, dummy)
            if shrunk is None or tables is None
            else (
                tables.slots_B, shrunk.parts, tables.base, tables.offsets, tables.ranks,
                tables.scales,
            )
        ),
        query_heads, key_heads, size, max(16, triton.next_power_of_2(size // 2)), page,
        norms is not None, shrunk is not None,
        1 if tables is None else tables.ranks.shape[1],
        1 if shrunk is None else len(shrunk.parts),
        16 if tables is None else tables.rank,
        1 if tables is None else tables.rank_step,
        tile, slots_B is None, early,
        num_warps=_warps(tile), **_launch(early),
    )  # fmt: skip
    return q


def attention_splits(rows: int, key_heads: int) -> int:
    """Parts into which the keys of a sequence are divided, so that few sequences fill the GPU."""
    splits = 1
    while splits < 16 and rows * key_heads * splits < 264:
        splits *= 2
    return splits


def attend(
    q_BHD: Tensor,
    *,
    keys: Tensor,
    values: Tensor,
    positions_B: Tensor,
    last_B: Tensor,
    table: Tensor,
    page: int,
    scaling: float,
    splits: int | None = None,
    counters: Tensor | None = None,
    early: int = 0,
) -> Tensor:
    """
    Attention of one query of each sequence over its cached keys, page by page.

    `counters`, zeros for each row and key head, let the same launch merge the parts of the keys.
    """
    rows, query_heads, size = q_BHD.shape
    key_heads = keys.shape[1]
    groups = query_heads // key_heads
    padded = max(16, triton.next_power_of_2(groups))
    block = max(16, triton.next_power_of_2(size))
    splits = attention_splits(rows, key_heads) if splits is None else splits
    y = torch.empty_like(q_BHD)
    out, lse = y, y
    if splits > 1:
        shape = (rows, key_heads, splits, padded)
        out = torch.empty(*shape, size, dtype=torch.float32, device=q_BHD.device)
        lse = torch.empty(shape, dtype=torch.float32, device=q_BHD.device)
    _attend[(rows, key_heads, splits)](
        q_BHD, keys, values, positions_B, last_B, table, table.stride(0), out, lse, y,
        positions_B if counters is None else counters, scaling,
        groups, padded, key_heads, size, block, page, min(KEYS, page), splits,
        0 if counters is None else triton.next_power_of_2(groups), early,
        num_warps=4, **_launch(early),
    )  # fmt: skip
    if splits > 1 and counters is None:
        _merge[(rows * key_heads, groups)](
            out, lse, y, groups, padded, size, block, splits, early,
            num_warps=4, **_launch(early),
        )  # fmt: skip
    return y


def swiglu(y_BO: Tensor, shrunk: Shrunk | None, *, early: int = 0) -> Tensor:
    """silu(gate) * up, with the LoRA products of both added first."""
    rows, size = len(y_BO), y_BO.shape[1] // 2
    out = torch.empty(rows, size, dtype=y_BO.dtype, device=y_BO.device)
    tables = None if shrunk is None else shrunk.tables
    block, tile = _output_block(tables), _tile(shrunk)
    _swiglu[(triton.cdiv(rows, tile), triton.cdiv(size, block))](
        y_BO, out,
        *(
            (y_BO, y_BO, y_BO, y_BO, y_BO, y_BO)
            if shrunk is None or tables is None
            else (
                tables.slots_B, shrunk.parts, tables.base, tables.offsets, tables.ranks,
                tables.scales,
            )
        ),
        rows, 0 if shrunk is None else shrunk.target, size, shrunk is not None,
        1 if tables is None else tables.ranks.shape[1],
        1 if shrunk is None else len(shrunk.parts),
        16 if tables is None else tables.rank,
        1 if tables is None else tables.rank_step,
        tile, block, early,
        num_warps=_warps(tile), **_launch(early),
    )  # fmt: skip
    return out


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
