"""Triton kernels of a decode step on a GPU: one token of each sequence through one layer.

A row is one sequence. Rows that only fill a batch up have `last` = -1: they read nothing and write
to a spare page. Every masked load has a defined value, because unwritten memory may hold NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tinkex.engine.model.early_start import prefetch, wait_for_inputs
from tinkex.engine.model.lora_kernels import expand, prefetch_B, shrink_part, sum_parts

# M rows of one program, R rank rounded up, H query heads, K key heads, D head size


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
):
    m, k = tl.arange(0, M), tl.arange(0, BLOCK)
    n = block * N + tl.arange(0, N)
    ok, inside = m < rows, n < OUTPUTS
    PER: tl.constexpr = ((SIZE + SPLITS - 1) // SPLITS + BLOCK - 1) // BLOCK * BLOCK
    EVEN: tl.constexpr = (PER * SPLITS == SIZE) and (OUTPUTS % N == 0)
    at_W = W + n[None, :].to(tl.int64) * SIZE
    wait_for_inputs(EARLY)
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


@triton.jit(do_not_specialize=["rows", "target"])
def linear_kernel(
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
):
    """
    A few rows times a whole matrix: reads the matrix once, in as many programs as possible.

    With LORA the first programs compute the products with A of the same rows.
    """
    BLOCKS: tl.constexpr = (OUTPUTS + N - 1) // N
    at = tl.program_id(0)
    if LORA:
        OTHERS: tl.constexpr = PROJECTIONS * A_SPLITS
        if at < OTHERS:
            shrink_part(
                X, Slot, Parts, Base, Offsets, Ranks, rows, target,
                0, at % PROJECTIONS, at // PROJECTIONS,
                SIZE, TARGETS, PROJECTIONS, A_SPLITS, R, M, A_BLOCK, EARLY,
            )  # fmt: skip
        else:
            _linear_part(
                X, W, Bias, Y, rows, (at - OTHERS) % BLOCKS, (at - OTHERS) // BLOCKS,
                SIZE, OUTPUTS, SPLITS, BIAS, M, N, BLOCK, EARLY,
            )  # fmt: skip
    else:
        _linear_part(
            X, W, Bias, Y, rows, at % BLOCKS, at // BLOCKS,
            SIZE, OUTPUTS, SPLITS, BIAS, M, N, BLOCK, EARLY,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def add_norm_kernel(
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
    row = tl.program_id(0).to(tl.int64) * SIZE
    c = tl.arange(0, BLOCK)
    inside = c < SIZE
    w = tl.load(W + c, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(EARLY)
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


@triton.jit(do_not_specialize=["rows", "target"])
def add_expanded_norm_kernel(
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
    """`add_expanded_kernel` of some outputs and the sum with x; the last program computes the norms."""
    m = tl.arange(0, M)
    ok = m < rows
    slot = tl.load(Slot + m, mask=ok, other=-1)
    n = tl.program_id(0) * N + tl.arange(0, N)
    both = ok[:, None] & (n < SIZE)[None, :]
    c = tl.arange(0, BLOCK)
    w = tl.load(W + c, mask=c < SIZE, other=0.0)
    if EARLY:
        prefetch_B(slot, n, n < SIZE, target, Base, Offsets, Ranks, TARGETS)
    wait_for_inputs(EARLY)
    at = m[:, None].to(tl.int64) * SIZE + n[None, :]
    x = tl.load(X + at, mask=both, other=0.0).to(tl.float32)
    y = tl.load(Y + at, mask=both, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        y += tl.load(Y + part * rows * SIZE + at, mask=both, other=0.0)
    h = sum_parts(Parts, 0, m, slot >= 0, rows, 1, SPLITS, R)
    y = expand(
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


@triton.jit(do_not_specialize=["rows", "target", "table_stride", "spare"])
def heads_kernel(
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
            prefetch_B(slot, n, inside, target + j, Base, Offsets, Ranks, TARGETS)
            prefetch_B(slot, n + HALF, inside, target + j, Base, Offsets, Ranks, TARGETS)
    wait_for_inputs(EARLY)
    one = tl.load(Y + at, mask=both, other=0.0).to(tl.float32)
    two = tl.load(Y + at + HALF, mask=both, other=0.0).to(tl.float32)
    if LORA:
        h = sum_parts(Parts, j, m, slot >= 0, rows, 3, SPLITS, R)
        one = expand(
            h, slot, n, inside, target + j, Base, Offsets, Ranks, Scales, TARGETS, R, STEP, False,
            one,
        )  # fmt: skip
        two = expand(
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
    E: tl.constexpr,
    PAGE: tl.constexpr,
    N: tl.constexpr,
):
    """The N keys and values of a page from `start` on, which are in the cache or will be."""
    page = tl.load(Table + start // PAGE, mask=stop > 0, other=0).to(tl.int64)
    at = (page * PAGE + start % PAGE + tl.arange(0, N)) * K + key_head
    for line in tl.static_range(0, D, 64):
        prefetch(Keys + at * D + line)
    for line in tl.static_range(0, E, 64):
        prefetch(Values + at * E + line)


@triton.jit(do_not_specialize=["table_stride"])
def attend_kernel(
    Q,
    Keys,
    Values,
    Position,
    Last,
    Table,
    table_stride,
    Out,
    Lse,
    Sinks,
    scaling,
    softcap,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    E: tl.constexpr,
    WIDE: tl.constexpr,
    PAGE: tl.constexpr,
    N: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    CAPPED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """
    The query heads that share a key head, over one part of the sequence's keys.

    Keys are D wide and values E, in tiles of BLOCK and WIDE.
    """
    row, key_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.minimum(tl.load(Position + row), tl.load(Last + row)) + 1
    if WINDOW:
        # From the block of keys in which the window begins: a block is in one page.
        first = tl.maximum(length - WINDOW, 0)
        begin = first // N * N
        per = tl.cdiv(tl.cdiv(length - begin, SPLITS), N) * N
        start = begin + part * per
    else:
        per = tl.cdiv(tl.cdiv(length, SPLITS), N) * N
        start = part * per
    stop = tl.minimum(length, start + per)
    g, d, t = tl.arange(0, GROUP), tl.arange(0, BLOCK), tl.arange(0, N)
    e = tl.arange(0, WIDE)
    real, inside, valued = g[:, None] < G, d < D, e < E
    if EARLY:
        _prefetch_keys(
            Keys, Values, Table + row * table_stride, tl.where(start < stop, start, 0), stop,
            key_head, K, D, E, PAGE, N,
        )  # fmt: skip
    wait_for_inputs(EARLY)
    q = tl.load(
        Q + ((row * K + key_head) * G + g[:, None]) * D + d[None, :],
        mask=real & inside[None, :],
        other=0.0,
    )
    largest = tl.full([GROUP], -1e30, tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    out = tl.zeros([GROUP, WIDE], tl.float32)
    for s in range(start, stop, N):
        page = tl.load(Table + row * table_stride + s // PAGE).to(tl.int64)
        at = (page * PAGE + s % PAGE + t) * K + key_head
        ok = s + t < stop
        if WINDOW:
            ok = ok & (s + t >= first)
        k = tl.load(
            Keys + at[None, :] * D + d[:, None], mask=ok[None, :] & inside[:, None], other=0.0
        )
        score = tl.dot(q, k) * scaling
        if CAPPED:
            # softcap · tanh(score / softcap)
            score = softcap * (1 - 2 / (tl.exp(score * (2 / softcap)) + 1))
        score = tl.where(ok[None, :], score, -1e30)
        now = tl.maximum(largest, tl.max(score, 1))
        power, shift = tl.exp(score - now[:, None]), tl.exp(largest - now)
        v = tl.load(
            Values + at[:, None] * E + e[None, :], mask=ok[:, None] & valued[None, :], other=0.0
        )
        out = out * shift[:, None] + tl.dot(power.to(v.dtype), v)
        total = total * shift + tl.sum(power, 1)
        largest = now
    total = tl.maximum(total, 1e-30)
    out = out / total[:, None]
    if SPLITS == 1:
        if SINKS:
            sink = tl.load(Sinks + key_head * G + g, mask=g < G, other=0.0).to(tl.float32)
            out = out / (1 + tl.exp(sink - largest - tl.log(total)))[:, None]
        to = ((row * K + key_head) * G + g[:, None]) * E + e[None, :]
        tl.store(Out + to, out.to(Out.dtype.element_ty), mask=real & valued[None, :])
    else:
        line = ((row * K + key_head) * SPLITS + part) * GROUP + g
        tl.store(Out + line[:, None] * E + e[None, :], out, mask=valued[None, :])
        tl.store(Lse + line, largest + tl.log(total))


@triton.jit
def merge_kernel(
    Out,
    Lse,
    Y,
    Sinks,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    WIDE: tl.constexpr,
    SPLITS: tl.constexpr,
    SINKS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Combines the parts of a sequence by their log-sum-exp."""
    wait_for_inputs(EARLY)
    head, g = tl.program_id(0), tl.program_id(1)
    s, e = tl.arange(0, SPLITS), tl.arange(0, WIDE)
    line = (head * SPLITS + s) * GROUP + g
    lse = tl.load(Lse + line)
    weight = tl.exp(lse - tl.max(lse, 0))
    total = tl.sum(weight, 0)
    if SINKS:
        total += tl.exp(tl.load(Sinks + head % K * G + g).to(tl.float32) - tl.max(lse, 0))
    inside = e < E
    out = tl.load(Out + line[:, None] * E + e[None, :], mask=inside[None, :], other=0.0)
    y = tl.sum(out * weight[:, None], 0) / total
    tl.store(Y + (head * G + g) * E + e, y.to(Y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "target"])
def swiglu_kernel(
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
    m = tl.program_id(0) * M + tl.arange(0, M)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok, inside = m < rows, n < SIZE
    both = ok[:, None] & inside[None, :]
    at = m[:, None].to(tl.int64) * (2 * SIZE) + n[None, :]
    if LORA:
        slot = tl.load(Slot + m, mask=ok, other=-1)
        if EARLY:
            prefetch_B(slot, n, inside, target, Base, Offsets, Ranks, TARGETS)
            prefetch_B(slot, n, inside, target + 1, Base, Offsets, Ranks, TARGETS)
    wait_for_inputs(EARLY)
    gate = tl.load(Y + at, mask=both, other=0.0).to(tl.float32)
    up = tl.load(Y + at + SIZE, mask=both, other=0.0).to(tl.float32)
    if LORA:
        h = sum_parts(Parts, 0, m, slot >= 0, rows, 2, SPLITS, R)
        gate = expand(
            h, slot, n, inside, target, Base, Offsets, Ranks, Scales, TARGETS, R, STEP, False, gate
        )
        h = sum_parts(Parts, 1, m, slot >= 0, rows, 2, SPLITS, R)
        up = expand(
            h, slot, n, inside, target + 1, Base, Offsets, Ranks, Scales, TARGETS, R, STEP, False,
            up,
        )  # fmt: skip
        gate = gate.to(Y.dtype.element_ty).to(tl.float32)
        up = up.to(Y.dtype.element_ty).to(tl.float32)
    act = (gate / (1 + tl.exp(-gate))).to(Y.dtype.element_ty).to(tl.float32)
    to = m[:, None].to(tl.int64) * SIZE + n[None, :]
    tl.store(Out + to, (act * up).to(Out.dtype.element_ty), mask=both)
