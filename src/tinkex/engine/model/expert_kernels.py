"""Triton kernels of the experts of a decode step: nothing in them depends on a look of the host.

A slot is one expert of one row: slot `b · K + k` is expert `k` of row `b`. `group_kernel` sorts the
slots by expert. A program of the products has one expert and some outputs. It reads these outputs'
weights for tiles of the expert's slots, and gathers the rows of the tile. A program whose expert has
no slot ends at once.

An expert's number that is none of the layer's is taken for the nearest one: a router whose logits
are NaN may choose anything, but nothing is read or written outside of the lists.

As in `lora_kernels`, products of the rows of one adapter are selected: NaN in an adapter, in a row
or in its weights stays in this row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tinkex.engine.model.early_start import wait_for_inputs
from tinkex.engine.model.lora_kernels import expand_one, sum_parts

# M slots of one program, N outputs of one program, K experts of a row, R rank rounded up

#: What the programs of a product are made for. One row needs no sorting: its slots have different
#: experts. Of few slots most experts have none, so there is a program for each place in the sorted
#: slots, and only the first place of an expert works.
BY_SLOT, BY_PLACE, BY_EXPERT = (tl.constexpr(n) for n in range(3))


@triton.jit
def _expert_of(Index, slot, ok, EXPERTS: tl.constexpr):
    """The experts of slots; EXPERTS where not `ok`."""
    chosen = tl.load(Index + slot, mask=ok, other=0).to(tl.int32)
    return tl.where(ok, tl.minimum(tl.maximum(chosen, 0), EXPERTS - 1), EXPERTS)


@triton.jit(do_not_specialize=["slots"])
def group_kernel(
    Index,
    Starts,
    Order,
    slots,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The slots of one expert, ascending: Order[Starts[expert]] to before Order[Starts[expert + 1]]."""
    expert = tl.program_id(0)
    s = tl.arange(0, BLOCK)
    wait_for_inputs(EARLY)
    start = 0
    for first in range(0, slots, BLOCK):
        chosen = _expert_of(Index, first + s, first + s < slots, EXPERTS)
        start += tl.sum((chosen < expert).to(tl.int32), 0)
    tl.store(Starts + expert, start)
    for first in range(0, slots, BLOCK):
        chosen = _expert_of(Index, first + s, first + s < slots, EXPERTS)
        own = (chosen == expert).to(tl.int32)
        tl.store(Order + start + tl.cumsum(own, 0) - own, first + s, mask=own > 0)
        start += tl.sum(own, 0)
    if expert == EXPERTS - 1:
        tl.store(Starts + EXPERTS, start)


@triton.jit
def _work_of(Index, Starts, Order, at, EXPERTS: tl.constexpr, BY: tl.constexpr):
    """The expert of program `at`, and the places of its slots in `Order`."""
    if BY == BY_EXPERT:
        expert = at
        start = tl.load(Starts + expert)
        stop = tl.load(Starts + expert + 1)
    elif BY == BY_PLACE:
        expert = _expert_of(Index, tl.load(Order + at), True, EXPERTS)
        start = tl.load(Starts + expert)
        stop = tl.where(start == at, tl.load(Starts + expert + 1), start)
    else:
        expert = _expert_of(Index, at, True, EXPERTS)
        start = at
        stop = at + 1
    return expert, start, stop


@triton.jit
def _slots_at(Order, place, ok, BY: tl.constexpr):
    if BY == BY_SLOT:
        slot = tl.where(ok, place, 0)
    else:
        slot = tl.load(Order + place, mask=ok, other=0)
    return slot


@triton.jit
def _product(
    X,
    row,
    ok,
    W,
    n,
    inside,
    SIZE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    W_IN: tl.constexpr,
    W_OUT: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The rows `row` of X times the outputs `n` of one matrix, whose strides are W_IN and W_OUT."""
    k = tl.arange(0, BLOCK)
    EVEN: tl.constexpr = (SIZE % BLOCK == 0) and (OUTPUTS % N == 0)
    at_X = X + row[:, None].to(tl.int64) * SIZE
    at_W = W + n[None, :].to(tl.int64) * W_OUT
    y = tl.zeros([M, N], tl.float32)
    for step in range(0, SIZE, BLOCK):
        c = step + k
        if EVEN:
            x = tl.load(at_X + c[None, :], mask=ok[:, None], other=0.0)
            w = tl.load(at_W + c[:, None].to(tl.int64) * W_IN)
        else:
            x = tl.load(at_X + c[None, :], mask=ok[:, None] & (c < SIZE)[None, :], other=0.0)
            w = tl.load(
                at_W + c[:, None].to(tl.int64) * W_IN,
                mask=inside[None, :] & (c < SIZE)[:, None],
                other=0.0,
            )
        y = tl.dot(x, w, y)
    return y


@triton.jit(do_not_specialize=["rows", "target"])
def expert_in_kernel(
    X,
    W,
    Bias,
    Y,
    Index,
    Starts,
    Order,
    rows,
    Slot,
    Parts,
    Base,
    Offsets,
    Ranks,
    Scales,
    target,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    W_EXPERT: tl.constexpr,
    W_IN: tl.constexpr,
    W_OUT: tl.constexpr,
    BIAS: tl.constexpr,
    BY: tl.constexpr,
    LORA: tl.constexpr,
    PROJECTIONS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TARGETS: tl.constexpr,
    SPLITS: tl.constexpr,
    R: tl.constexpr,
    STEP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """
    The first projection of every slot: Y [slots, OUTPUTS] with the biases and the LoRA products.

    The outputs are PROJECTIONS projections of equal size, one after another or in turns.
    """
    INNER: tl.constexpr = OUTPUTS // PROJECTIONS
    n = tl.program_id(0) * N + tl.arange(0, N)
    inside = n < OUTPUTS
    wait_for_inputs(EARLY)
    expert, start, stop = _work_of(Index, Starts, Order, tl.program_id(1), EXPERTS, BY)
    at_W = W + expert.to(tl.int64) * W_EXPERT
    for first in range(start, stop, M):
        place = first + tl.arange(0, M)
        ok = place < stop
        s = _slots_at(Order, place, ok, BY)
        row = s // K
        y = _product(X, row, ok, at_W, n, inside, SIZE, OUTPUTS, W_IN, W_OUT, M, N, BLOCK)
        if BIAS:
            bias = tl.load(Bias + expert * OUTPUTS + n, mask=inside, other=0.0)
            y += bias.to(tl.float32)[None, :]
        if LORA:
            slot = tl.load(Slot + row, mask=ok, other=-1)
            for j in tl.static_range(PROJECTIONS):
                if INTERLEAVED:
                    local = n // PROJECTIONS
                    own = inside & (n % PROJECTIONS == j)
                else:
                    local = n - j * INNER
                    own = inside & (local >= 0) & (local < INNER)
                if tl.sum(own.to(tl.int32), 0) > 0:
                    h = sum_parts(Parts, j, row, slot >= 0, rows, PROJECTIONS, SPLITS, R)
                    y = _expand_present(
                        h, slot, expert * INNER + tl.where(own, local, 0), own, target + j,
                        Base, Offsets, Ranks, Scales, TARGETS, R, STEP, y,
                    )  # fmt: skip
        at = s[:, None].to(tl.int64) * OUTPUTS + n[None, :]
        tl.store(Y + at, y.to(Y.dtype.element_ty), mask=ok[:, None] & inside[None, :])


@triton.jit
def _expand_present(
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
    total,
):
    """`expand` for slots of which most adapters may have none: it reads the others' matrices only."""
    first = tl.min(tl.where(slot >= 0, slot, 1 << 30), 0)
    last = tl.max(slot, 0)
    for g in range(first, last + 1):
        if tl.sum((slot == g).to(tl.int32), 0) > 0:
            total = expand_one(
                g, h, slot, n, inside, target, Base, Offsets, Ranks, Scales, TARGETS, R, STEP,
                False, total,
            )  # fmt: skip
    return total


@triton.jit
def _shrink_slots(
    X,
    s,
    slot,
    expert,
    target,
    Base,
    Offsets,
    Ranks,
    SIZE: tl.constexpr,
    TARGETS: tl.constexpr,
    R: tl.constexpr,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """x A of each slot, where every expert has an A of its own."""
    r, k = tl.arange(0, R), tl.arange(0, BLOCK)
    h = tl.zeros([M, R], tl.float32)
    first = tl.min(tl.where(slot >= 0, slot, 1 << 30), 0)
    last = tl.max(slot, 0)
    for g in range(first, last + 1):
        own = slot == g
        rank = tl.load(Ranks + g * TARGETS + target)
        if (rank > 0) & (tl.sum(own.to(tl.int32), 0) > 0):
            offset = tl.multiple_of(tl.load(Offsets + (g * TARGETS + target) * 2), 8)
            A = Base + offset + (expert * rank).to(tl.int64) * SIZE
            for step in range(0, SIZE, BLOCK):
                c = step + k
                x = tl.load(
                    X + s[:, None].to(tl.int64) * SIZE + c[None, :],
                    mask=own[:, None] & (c < SIZE)[None, :],
                    other=0.0,
                )
                a = tl.load(
                    A + r[None, :] * SIZE + c[:, None],
                    mask=(r[None, :] < rank) & (c < SIZE)[:, None],
                    other=0.0,
                )
                h += tl.where(own[:, None], tl.dot(x, a), 0.0)
    return h


@triton.jit(do_not_specialize=["rows", "target"])
def expert_down_kernel(
    X,
    W,
    Bias,
    Y,
    Index,
    Starts,
    Order,
    RouterWeights,
    rows,
    Slot,
    Shrunk,
    Base,
    Offsets,
    Ranks,
    target,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    W_EXPERT: tl.constexpr,
    W_IN: tl.constexpr,
    W_OUT: tl.constexpr,
    BIAS: tl.constexpr,
    BY: tl.constexpr,
    LORA: tl.constexpr,
    TARGETS: tl.constexpr,
    R: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """
    The down projection of X [slots, SIZE] times the router's weights: float32 Y [K, rows, OUTPUTS].

    With LORA the first program of each expert makes the products with its A instead, with the same
    weights: Shrunk [K, rows, R]. The sums over K are those of each row, in a fixed order.
    """
    block = tl.program_id(0)
    wait_for_inputs(EARLY)
    expert, start, stop = _work_of(Index, Starts, Order, tl.program_id(1), EXPERTS, BY)
    at_W = W + expert.to(tl.int64) * W_EXPERT
    for first in range(start, stop, M):
        place = first + tl.arange(0, M)
        ok = place < stop
        s = _slots_at(Order, place, ok, BY)
        to = ((s % K) * rows + s // K).to(tl.int64)
        weight = tl.load(RouterWeights + s, mask=ok, other=0.0).to(tl.float32)
        if LORA and block == 0:
            slot = tl.load(Slot + s // K, mask=ok, other=-1)
            h = _shrink_slots(
                X, s, slot, expert, target, Base, Offsets, Ranks, SIZE, TARGETS, R, M, BLOCK
            )
            at_h = to[:, None] * R + tl.arange(0, R)[None, :]
            tl.store(Shrunk + at_h, h * weight[:, None], mask=ok[:, None])
        else:
            n = (block - LORA) * N + tl.arange(0, N)
            inside = n < OUTPUTS
            y = _product(X, s, ok, at_W, n, inside, SIZE, OUTPUTS, W_IN, W_OUT, M, N, BLOCK)
            if BIAS:
                bias = tl.load(Bias + expert * OUTPUTS + n, mask=inside, other=0.0)
                y += bias.to(tl.float32)[None, :]
            at_y = to[:, None] * OUTPUTS + n[None, :]
            tl.store(Y + at_y, y * weight[:, None], mask=ok[:, None] & inside[None, :])
