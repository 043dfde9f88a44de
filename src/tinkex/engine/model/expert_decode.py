"""The experts of a decode step on a GPU: functions that launch Triton kernels.

The kernels find the experts of a row, its adapter and its matrices in tables on the device, so a
CUDA graph can record them. Grids and shapes depend on the numbers of rows and experts alone, and
sums have a fixed order.

A layer must read the weights of the experts that some row chose, once: 3 · H · I numbers of each
with a gate. Beside them it reads and writes small tensors: the gathered rows, O numbers of a slot
between the projections, and H float32 numbers of a slot that `add_norm` adds up. For every adapter
of some row it reads the shared factors once, and the factors of the experts that its rows chose.

Launches: the sorting of the slots (not for one row), the first projection, the gate (one kernel
for silu(gate) · up, else what the family's code launches) and the down projection. With adapters
there is one more for the products with A of w1 and w3, and the caller adds B of w2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from tinkex.engine.model import decode_ops, expert_kernels
from tinkex.engine.model.decode_ops import LoraTables, Shrunk
from tinkex.engine.model.early_start import launch_options
from tinkex.engine.model.experts import ExpertWeights

# B rows, K experts of a row, S = B·K slots, E experts, H hidden size, I inner size of an expert, O
# outputs of its first projection, R rank rounded up

#: Programs that fill a GPU about twice.
PROGRAMS = 264
#: Slots that one program of the sorting reads at a time.
SORTED = 1024


def run_experts(
    x_BH: Tensor,
    index_BK: Tensor,
    weights_BK: Tensor,
    weights: ExpertWeights,
    lora: LoraTables | None,
    targets: Mapping[str, int],
    *,
    early: bool = False,
) -> Tensor:
    """
    The sum of the experts of each row [B, H], with the adapters of `lora`.

    `targets` has the places of w1, w3 and w2 in the tables; that of w3 is next to that of w1.
    """
    parts_KBH, shrunk = expert_parts(
        x_BH, index_BK, weights_BK, weights, lora, targets, early=early
    )
    y_BH = parts_KBH.sum(dim=0).to(x_BH.dtype)
    if shrunk is not None:
        decode_ops.add_expanded(y_BH, shrunk, early=early)
    return y_BH


def expert_parts(
    x_BH: Tensor,
    index_BK: Tensor,
    weights_BK: Tensor,
    weights: ExpertWeights,
    lora: LoraTables | None,
    targets: Mapping[str, int],
    *,
    early: bool = False,
) -> tuple[Tensor, Shrunk | None]:
    """
    The same as float32 [K, B, H], to be added up, and what B of w2 multiplies.

    `add_norm` takes both.
    """
    slots = _Slots.of(index_BK.contiguous(), len(weights.in_EHO), early)
    gate_up_SO = _first_projection(x_BH, slots, weights, lora, targets, early)
    if weights.swiglu:
        act_SI = decode_ops.swiglu(gate_up_SO, None, early=early)
    else:
        act_SI = weights.gate(gate_up_SO).contiguous()
    return _down_projection(act_SI, slots, weights_BK.contiguous(), weights, lora, targets, early)


class _Slots(NamedTuple):
    """The slots of a step, sorted by expert, and how the programs of a product share them."""

    index_BK: Tensor
    starts: Tensor
    order: Tensor
    by: int
    #: Programs for each block of outputs; no more of them have work.
    groups: int
    #: Slots that a program computes at a time.
    tile: int

    @classmethod
    def of(cls, index_BK: Tensor, experts: int, early: bool) -> _Slots:
        count = index_BK.numel()
        if len(index_BK) == 1:
            by = expert_kernels.BY_SLOT.value
            return cls(index_BK, index_BK, index_BK, by, count, decode_ops.ROWS)
        by = (expert_kernels.BY_PLACE if count <= experts else expert_kernels.BY_EXPERT).value
        starts, order = (
            torch.empty(size, dtype=torch.int32, device=index_BK.device)
            for size in (experts + 1, count)
        )
        expert_kernels.group_kernel[(experts,)](
            index_BK, starts, order, count, experts,
            min(SORTED, triton.next_power_of_2(count)), early,
            num_warps=4, **launch_options(early),
        )  # fmt: skip
        # Twice the average, so that most experts are read once.
        tile = triton.next_power_of_2(max(1, 2 * count // experts))
        tile = max(decode_ops.ROWS, min(64, tile))
        return cls(index_BK, starts, order, by, min(count, experts), tile)


def _first_projection(
    x_BH: Tensor,
    slots: _Slots,
    weights: ExpertWeights,
    lora: LoraTables | None,
    targets: Mapping[str, int],
    early: bool,
) -> Tensor:
    rows, each = slots.index_BK.shape
    experts, size, outputs = weights.in_EHO.shape
    projections = len(weights.columns)
    assert projections == 1 or not targets or targets["w3"] == targets["w1"] + 1
    shrunk = None if lora is None else decode_ops.shrink(x_BH, lora, targets["w1"], projections)
    y_SO = torch.empty(rows * each, outputs, dtype=x_BH.dtype, device=x_BH.device)
    width = _width(outputs, slots.groups, weights.in_EHO)
    expert_kernels.expert_in_kernel[(triton.cdiv(outputs, width), slots.groups)](
        x_BH, weights.in_EHO, x_BH if weights.in_bias_EO is None else weights.in_bias_EO, y_SO,
        slots.index_BK, slots.starts, slots.order, rows,
        *(
            (y_SO, y_SO, y_SO, y_SO, y_SO, y_SO, 0)
            if lora is None or shrunk is None
            else (
                lora.slots_B, shrunk.parts, lora.base, lora.offsets, lora.ranks, lora.scales,
                shrunk.target,
            )
        ),
        experts, each, size, outputs, *weights.in_EHO.stride(), weights.in_bias_EO is not None,
        slots.by, lora is not None, projections, weights.columns["w1"].step == 2,
        1 if lora is None else lora.ranks.shape[1],
        1 if shrunk is None else len(shrunk.parts),
        16 if lora is None else lora.rank,
        1 if lora is None else lora.rank_step,
        slots.tile, width, _block(size), early,
        num_warps=4, num_stages=4, **launch_options(early),
    )  # fmt: skip
    return y_SO


def _down_projection(
    act_SI: Tensor,
    slots: _Slots,
    weights_BK: Tensor,
    weights: ExpertWeights,
    lora: LoraTables | None,
    targets: Mapping[str, int],
    early: bool,
) -> tuple[Tensor, Shrunk | None]:
    rows, each = slots.index_BK.shape
    experts, size, outputs = weights.down_EIH.shape
    y_KBH = torch.empty(each, rows, outputs, dtype=torch.float32, device=act_SI.device)
    shrunk = None
    if lora is not None:
        parts = torch.empty(each, 1, rows, lora.rank, dtype=torch.float32, device=act_SI.device)
        shrunk = Shrunk(tables=lora, target=targets["w2"], parts=parts)
    width = _width(outputs, slots.groups, weights.down_EIH)
    blocks = triton.cdiv(outputs, width) + (lora is not None)
    expert_kernels.expert_down_kernel[(blocks, slots.groups)](
        act_SI, weights.down_EIH,
        act_SI if weights.down_bias_EH is None else weights.down_bias_EH, y_KBH,
        slots.index_BK, slots.starts, slots.order, weights_BK, rows,
        *(
            (y_KBH, y_KBH, y_KBH, y_KBH, y_KBH, 0)
            if lora is None or shrunk is None
            else (
                lora.slots_B, shrunk.parts, lora.base, lora.offsets, lora.ranks, shrunk.target,
            )
        ),
        experts, each, size, outputs, *weights.down_EIH.stride(), weights.down_bias_EH is not None,
        slots.by, lora is not None,
        1 if lora is None else lora.ranks.shape[1],
        16 if lora is None else lora.rank,
        slots.tile, width, 64 if lora is not None and lora.rank > 64 else _block(size), early,
        num_warps=4, num_stages=4, **launch_options(early),
    )  # fmt: skip
    return y_KBH, shrunk


def _width(outputs: int, groups: int, weights_EIO: Tensor) -> int:
    """
    Outputs of one program: as many as fill the GPU.

    If the outputs of an input are adjacent in memory, a program reads at least 64 bytes of them.
    """
    widths = (64, 32) if weights_EIO.stride(2) == 1 else (64, 32, 16)
    return next((n for n in widths if outputs // n * groups >= PROGRAMS), widths[-1])


def _block(size: int) -> int:
    """Inputs that a program reads at a time. Multiples of it are read without masks."""
    return 128 if size % 128 == 0 else 64
