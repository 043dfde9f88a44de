"""The operations of a decode step and of prefill on a GPU: functions that launch Triton kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from tinkex.engine.model import decode_kernels, lora_kernels
from tinkex.engine.model.attention_scores import Scoring
from tinkex.engine.model.early_start import FEW_ROWS, launch_options

# B rows, R rank rounded up, P projections that read the same input, I inputs, O outputs, H query
# heads or hidden size, D head size

#: The smallest tile of rows of a matrix product.
ROWS = 16
#: Keys that one program reads at a time.
KEYS = 64
#: Up to this many rows one program computes the norms of all, after products with B.
NORM_ROWS = 4


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
    #: int32 [1]: 0 between launches. With it `add_norm` of few rows computes products with B in
    #: its own launch. Steps that run at the same time must have their own.
    counter: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Shrunk:
    """x Aᵀ of every row for projections that read the same input, as sums over parts of x."""

    tables: LoraTables
    #: Index of the first projection among the targets.
    target: int
    #: float32 [parts, P, B, R]
    parts: Tensor


def linear(
    x_BI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None = None,
    *,
    parts: bool = False,
    early: bool = False,
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
    early: bool = False,
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
    early: bool,
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
    tables = None if shrunk is None else shrunk.tables
    a_splits, projections = (1, 1) if shrunk is None else shrunk.parts.shape[:2]
    decode_kernels.linear_kernel[(programs + (0 if shrunk is None else a_splits * projections),)](
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
        early,
        num_warps=4, num_stages=4, **launch_options(early),
    )  # fmt: skip
    return y


def add_norm(
    x_BH: Tensor,
    y: Tensor | None,
    weight_H: Tensor,
    eps: float,
    *,
    shrunk: Shrunk | None = None,
    early: bool = False,
) -> Tensor:
    """
    x += y in place, then RMS norm. `y` is [B, H], or the parts of a sum [parts, B, H].

    First adds the LoRA products of `shrunk` to y.
    """
    rows, size = x_BH.shape
    out = torch.empty_like(x_BH)
    parts = 0 if y is None else 1 if y.dim() == 2 else len(y)
    block = triton.next_power_of_2(size)
    if y is not None and shrunk is not None:
        tables, width = shrunk.tables, 64
        if tables.counter is not None and rows <= NORM_ROWS:
            decode_kernels.add_expanded_norm_kernel[(triton.cdiv(size, width),)](
                x_BH, y, weight_H, out, eps, rows, tables.slots_B, shrunk.parts, tables.base,
                tables.offsets, tables.ranks, tables.scales, shrunk.target, tables.counter, size,
                block, parts, tables.ranks.shape[1], len(shrunk.parts), tables.rank, tables.rank_step,
                ROWS, width, early,
                num_warps=min(8, max(4, block // 512)), **launch_options(early),
            )  # fmt: skip
            return out
        add_expanded(y, shrunk, early=early)
    decode_kernels.add_norm_kernel[(rows,)](
        x_BH, x_BH if y is None else y, weight_H, out, eps, rows, size, block, parts, early,
        num_warps=min(16, max(1, block // 512)), **launch_options(early),
    )  # fmt: skip
    return out


def shrink(x_BI: Tensor, tables: LoraTables, target: int, projections: int) -> Shrunk:
    rows, size = x_BI.shape
    shrunk = _empty_shrunk(x_BI, tables, target, projections)
    splits = len(shrunk.parts)
    lora_kernels.shrink_kernel[(triton.cdiv(rows, tables.tile), projections, splits)](
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


def add_expanded(y_BO: Tensor, shrunk: Shrunk, *, exact: bool = False, early: bool = False) -> None:
    """
    Adds the LoRA products to y in place, or to the first part of a sum.

    With `exact` in float32 precision, for logits.
    """
    tables = shrunk.tables
    rows, size = y_BO.shape[-2:]
    block, tile = _output_block(tables), _tile(shrunk)
    lora_kernels.add_expanded_kernel[(triton.cdiv(rows, tile), triton.cdiv(size, block))](
        y_BO, tables.slots_B, shrunk.parts, tables.base, tables.offsets, tables.ranks,
        tables.scales, rows, shrunk.target, size, tables.ranks.shape[1], len(shrunk.parts),
        tables.rank, tables.rank_step, exact, tile, block, early,
        num_warps=_warps(tile), **launch_options(early),
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
    early: bool = False,
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
    decode_kernels.heads_kernel[(triton.cdiv(rows, tile), query_heads + 2 * key_heads)](
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
        num_warps=_warps(tile), **launch_options(early),
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
    scoring: Scoring,
    splits: int | None = None,
    early: bool = False,
) -> Tensor:
    """
    Attention of one query of each sequence over its cached keys, page by page.

    Values may have another width than keys; the result has theirs.
    """
    rows, query_heads, size = q_BHD.shape
    key_heads, width = values.shape[1:]
    groups = query_heads // key_heads
    padded = max(16, triton.next_power_of_2(groups))
    block, wide = (max(16, triton.next_power_of_2(each)) for each in (size, width))
    # Tiles of wider keys and values would not fit the GPU's fast memory.
    tile = min(KEYS if max(block, wide) <= 256 else KEYS // 2, page)
    splits = attention_splits(rows, key_heads) if splits is None else splits
    y = q_BHD.new_empty(rows, query_heads, width)
    out, lse, sinks = y, y, y if scoring.sinks is None else scoring.sinks
    if splits > 1:
        shape = (rows, key_heads, splits, padded)
        out = torch.empty(*shape, width, dtype=torch.float32, device=q_BHD.device)
        lse = torch.empty(shape, dtype=torch.float32, device=q_BHD.device)
    decode_kernels.attend_kernel[(rows, key_heads, splits)](
        q_BHD, keys, values, positions_B, last_B, table, table.stride(0), out, lse,
        sinks, scoring.scaling, scoring.softcap or 0.0, groups, padded, key_heads, size, block,
        width, wide, page, tile, splits, scoring.window or 0, scoring.sinks is not None,
        scoring.softcap is not None, early,
        num_warps=4, **launch_options(early),
    )  # fmt: skip
    if splits > 1:
        decode_kernels.merge_kernel[(rows * key_heads, groups)](
            out, lse, y, sinks, groups, padded, key_heads, width, wide, splits,
            scoring.sinks is not None, early,
            num_warps=4, **launch_options(early),
        )  # fmt: skip
    return y


def swiglu(y_BO: Tensor, shrunk: Shrunk | None, *, early: bool = False) -> Tensor:
    """silu(gate) * up, with the LoRA products of both added first."""
    rows, size = len(y_BO), y_BO.shape[1] // 2
    out = torch.empty(rows, size, dtype=y_BO.dtype, device=y_BO.device)
    tables = None if shrunk is None else shrunk.tables
    block, tile = _output_block(tables), _tile(shrunk)
    decode_kernels.swiglu_kernel[(triton.cdiv(rows, tile), triton.cdiv(size, block))](
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
        num_warps=_warps(tile), **launch_options(early),
    )  # fmt: skip
    return out


def _input_block(tables: LoraTables | None) -> int:
    return 128 if tables is None or tables.rank <= 64 else 64


def _output_block(tables: LoraTables | None) -> int:
    return 128 if tables is None or tables.rank <= 64 else 64


def _tile(shrunk: Shrunk | None) -> int:
    return ROWS if shrunk is None else shrunk.tables.tile


def _warps(tile: int) -> int:
    return max(4, tile // 8)
