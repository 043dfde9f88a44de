"""Triton kernels of LoRA products in a decode step: x Aᵀ of every row, and its product with B.

Rows with the same adapter are adjacent; `slots` says which adapter a row uses (-1: none), and the
adapter tables say where the matrices of an adapter are, so a change of adapters changes numbers in
tables and not the launches, which a CUDA graph records.

A tile may have rows of several adapters. Products with zeros for the rows of others are not enough:
0 times infinity is NaN, so a broken adapter would reach them. Results are selected, too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tinkex.engine.model.early_start import prefetch, wait_for_inputs

# M rows of one program, R rank rounded up


@triton.jit
def prefetch_A(
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
                prefetch(Base + offset + row[None, :] * SIZE + c[:, None])


@triton.jit
def prefetch_B(slot, n, inside, target, Base, Offsets, Ranks, TARGETS: tl.constexpr):
    """B of one of the adapters, for the outputs `n`."""
    g = tl.max(slot, 0)
    if g >= 0:
        rank = tl.load(Ranks + g * TARGETS + target)
        if rank > 0:
            offset = tl.load(Offsets + (g * TARGETS + target) * 2 + 1)
            prefetch(Base + offset + tl.where(inside, n, 0) * rank)


@triton.jit
def sum_parts(
    Parts, j, m, ok, rows, PROJECTIONS: tl.constexpr, SPLITS: tl.constexpr, R: tl.constexpr
):
    r = tl.arange(0, R)
    at = (j * rows + m[:, None]) * R + r[None, :]
    h = tl.load(Parts + at, mask=ok[:, None], other=0.0)
    for s in tl.static_range(1, SPLITS):
        h += tl.load(Parts + s * PROJECTIONS * rows * R + at, mask=ok[:, None], other=0.0)
    return h


@triton.jit
def expand(
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
    first = tl.min(tl.where(slot >= 0, slot, 1 << 30), 0)
    last = tl.max(slot, 0)
    for g in range(first, last + 1):
        total = expand_one(
            g, h, slot, n, inside, target, Base, Offsets, Ranks, Scales, TARGETS, R, STEP, EXACT,
            total,
        )  # fmt: skip
    return total


@triton.jit
def expand_one(
    g,
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
    """The same for the rows of adapter `g` alone."""
    r = tl.arange(0, R)
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
            product = tl.dot(own, b.to(tl.float32), input_precision="tf32x3")
        else:
            product = tl.dot(own.to(b.dtype), b)
        total += tl.where((slot == g)[:, None], product * scale, 0.0)
    return total


@triton.jit
def shrink_part(
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
        prefetch_A(last, part * PER, target + j, Base, Offsets, Ranks, SIZE, TARGETS, PER, R, BLOCK)
    wait_for_inputs(EARLY)
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
                h += tl.where(own[:, None], tl.dot(x, a), 0.0)
    at = ((part * PROJECTIONS + j) * rows + m[:, None]) * R + r[None, :]
    tl.store(Parts + at, h, mask=(m < rows)[:, None])


@triton.jit(do_not_specialize=["rows", "target"])
def shrink_kernel(
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
    shrink_part(
        X, Slot, Parts, Base, Offsets, Ranks, rows, target,
        tl.program_id(0), tl.program_id(1), tl.program_id(2),
        SIZE, TARGETS, PROJECTIONS, SPLITS, R, M, BLOCK, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "target"])
def add_expanded_kernel(
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
    m = tl.program_id(0) * M + tl.arange(0, M)
    slot = tl.load(Slot + m, mask=m < rows, other=-1)
    used = slot >= 0
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < SIZE
    if EARLY:
        prefetch_B(slot, n, inside, target, Base, Offsets, Ranks, TARGETS)
    wait_for_inputs(EARLY)
    if tl.max(slot, 0) >= 0:
        h = sum_parts(Parts, 0, m, used, rows, 1, SPLITS, R)
        at = m[:, None].to(tl.int64) * SIZE + n[None, :]
        ok = used[:, None] & inside[None, :]
        y = tl.load(Y + at, mask=ok, other=0.0).to(tl.float32)
        y = expand(
            h, slot, n, inside, target, Base, Offsets, Ranks, Scales, TARGETS, R, STEP, EXACT, y
        )
        tl.store(Y + at, y.to(Y.dtype.element_ty), mask=ok)
