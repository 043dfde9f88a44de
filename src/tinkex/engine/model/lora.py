"""LoRA adapters as flat vectors, and the linear layer that adds them.

An adapter is one flat vector. Its layout (`targets`) says where A and B of every target begin, so an
optimizer step, a gradient norm or a copy is one operation over the whole adapter.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinkex.engine.model.matmul import add_mm_float32, linear
from tinkex.engine.model.targets import Layout, Placement

if TYPE_CHECKING:
    from tinkex.engine.model.decode_ops import LoraTables
    from tinkex.engine.model.experts import RoutedTokens

# T packed tokens, I inputs of a linear layer, O its outputs, R rank

#: LoRA alpha, independent of the rank: the scale is ALPHA / rank.
ALPHA = 32.0


def matrices(flat: Tensor, placement: Placement) -> tuple[Tensor, Tensor]:
    """A and B of one target as views of the flat vector."""
    offset_A, shape_A, offset_B, shape_B = placement
    A = flat[offset_A:][: math.prod(shape_A)].view(shape_A)
    B = flat[offset_B:][: math.prod(shape_B)].view(shape_B)
    return A, B


def initial_weights(layout: Layout, seed: int) -> Tensor:
    """
    Kaiming-uniform A and zero B, so that a new adapter changes nothing.

    Each A depends only on the seed and its name, so excluding the MLP does not change the initial
    weights of attention.
    """
    flat = torch.zeros(layout.size)
    for name, placement in layout.placements.items():
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        bound = (
            placement.shape_A[-1] ** -0.5
        )  # kaiming_uniform_ with a = sqrt(5), as in nn.Linear and PEFT
        matrices(flat, placement)[0].uniform_(-bound, bound, generator=generator)
    return flat


class Pair(NamedTuple):
    """
    The matrices of one adapter for one linear layer. Sampler adapters have no gradients.

    For a projection of experts one of the two has another dimension in front, for the experts.
    """

    A_RI: Tensor
    B_OR: Tensor
    scale: float
    grad_A_RI: Tensor | None
    grad_B_OR: Tensor | None


def make_pairs(
    layout: Layout, live: Tensor, *, scale: float, grad: Tensor | None = None
) -> dict[str, Pair]:
    pairs = {}
    for name, placement in layout.placements.items():
        grads = (None, None) if grad is None else matrices(grad, placement)
        pairs[name] = Pair(*matrices(live, placement), scale, *grads)
    return pairs


class AdapterSegment(NamedTuple):
    """Tokens `start` to `stop` of a packed pass use this adapter; others use the base model."""

    start: int
    stop: int
    pairs: Mapping[str, Pair]


def addresses(
    base: Tensor, targets: Sequence[str], pairs: Mapping[str, Pair]
) -> tuple[list[list[int]], list[int]]:
    """
    Rows of `LoraTables`: where (A, B) of each target are, in elements from `base`, and the ranks.

    Of a factor with a matrix for each expert, this is the first matrix; the others follow.
    """
    start, size = base.data_ptr(), base.element_size()
    offsets, ranks = [], []
    for name in targets:
        pair = pairs.get(name)
        if pair is None:
            offsets.append([0, 0])
            ranks.append(0)
        else:
            offsets.append([(m.data_ptr() - start) // size for m in (pair.A_RI, pair.B_OR)])
            ranks.append(pair.A_RI.shape[-2])
    return offsets, ranks


class RecordedAdapters(NamedTuple):
    """The adapters of a decode step that a graph records: addresses on the device, no segments."""

    #: None if no row has an adapter.
    tables: LoraTables | None
    #: The place of each projection in the tables.
    targets: Mapping[str, int]
    #: Used instead of what routers choose, by the name of the experts. For comparisons.
    routed: Mapping[str, RoutedTokens]


class AdapterContext(threading.local):
    """
    The adapter segments of the current pass: one object, shared by all layers.

    Each thread has its own values: steps are tried in the background while passes run.
    """

    def __init__(self) -> None:
        self.segments: Sequence[AdapterSegment] = ()
        #: Packed tokens of the pass; None outside of passes.
        self.tokens: int | None = None
        #: Used instead of the segments by a step that a graph records.
        self.recorded: RecordedAdapters | None = None


class WrongRows(RuntimeError):
    """
    A linear layer got other rows than the tokens of the pass, so adapters would be added to others.

    Code that gives each expert its own tokens would do this, for example.
    """


class Columns(NamedTuple):
    """
    Some outputs of a linear layer that makes several projections at once.

    The outputs are `blocks` of equal size, and these are `start` to `stop` of each block.
    """

    blocks: int
    start: int
    stop: int

    @property
    def outputs(self) -> int:
        return self.blocks * (self.stop - self.start)

    def of(self, weight_OI: Tensor) -> Tensor:
        """Their rows of the weights, as a view [blocks, stop - start, I]."""
        return weight_OI.view(self.blocks, -1, weight_OI.shape[1])[:, self.start : self.stop]

    def add(self, y_TO: Tensor, change_TC: Tensor) -> None:
        self._own(y_TO).add_(change_TC.view(len(y_TO), self.blocks, -1))

    def select(self, y_TO: Tensor) -> Tensor:
        return self._own(y_TO).flatten(1)

    def _own(self, y_TO: Tensor) -> Tensor:
        return y_TO.view(len(y_TO), self.blocks, -1)[:, :, self.start : self.stop]


class LoraSlice(NamedTuple):
    """The part of an adapter segment that concerns one linear layer."""

    start: int
    stop: int
    pair: Pair
    #: The outputs that the pair makes; None for all.
    columns: Columns | None = None


class LoraLinear(nn.Module):
    """
    A frozen linear layer that adds to each token the LoRA product of its adapter.

    If it makes several projections at once, each has a name and a pair of its own.
    """

    def __init__(
        self,
        base: nn.Linear,
        name: str,
        context: AdapterContext,
        projections: Mapping[str, Columns | None] | None = None,
    ) -> None:
        super().__init__()
        self.weight = base.weight
        self.bias = base.bias
        self.name = name
        self.context = context
        #: The names of its projections, with their outputs if there are several.
        self.projections = projections or {name: None}

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens = x.numel() // x.shape[-1], self.context.tokens
        if rows != tokens:
            raise WrongRows(f"{self.name} got {rows} rows in a pass of {tokens} tokens")
        if self.context.recorded is not None:
            return self._recorded(x, self.context.recorded)
        lora_slices = [
            lora_slice._replace(columns=columns)
            for name, columns in self.projections.items()
            for lora_slice in lora_slices_of(self.context.segments, name)
        ]
        if x.requires_grad:
            if not lora_slices:
                return F.linear(x, self.weight, self.bias)
            y: Tensor = _LoraFunction.apply(x, self.weight, self.bias, lora_slices)  # type: ignore[no-untyped-call]
            return y
        x_TI = x.reshape(-1, x.shape[-1])
        y_TO = linear(x_TI, self.weight, self.bias)
        if lora_slices:
            add_lora_slices(x_TI, y_TO, lora_slices)
        return y_TO.view(*x.shape[:-1], -1)

    def _recorded(self, x: Tensor, adapters: RecordedAdapters) -> Tensor:
        """The same with the adapters of tables."""
        from tinkex.engine.model import decode_ops as ops
        from tinkex.engine.model.early_start import FEW_ROWS

        x_BI = x.reshape(-1, x.shape[-1]).contiguous()
        tables, targets = adapters.tables, adapters.targets
        projections = [] if tables is None else [*self.projections.items()]
        if tables is not None and len(projections) == 1 and len(x_BI) <= FEW_ROWS:
            target = targets[projections[0][0]]
            y_BO, shrunk = ops.linear_and_shrink(x_BI, self.weight, self.bias, tables, target, 1)
            ops.add_expanded(y_BO, shrunk)
            return y_BO.view(*x.shape[:-1], -1)
        y_BO = ops.linear(x_BI, self.weight, self.bias)
        for name, columns in projections:
            assert tables is not None
            shrunk = ops.shrink(x_BI, tables, targets[name], 1)
            if columns is None:
                ops.add_expanded(y_BO, shrunk)
            else:
                change_BC = y_BO.new_zeros(len(y_BO), columns.outputs)
                ops.add_expanded(change_BC, shrunk)
                columns.add(y_BO, change_BC)
        return y_BO.view(*x.shape[:-1], -1)


def lora_slices_of(segments: Sequence[AdapterSegment], name: str) -> list[LoraSlice]:
    return [
        LoraSlice(start, stop, pair)
        for start, stop, pairs in segments
        if (pair := pairs.get(name)) is not None
    ]


def add_lora_slices(x_TI: Tensor, y_TO: Tensor, lora_slices: Sequence[LoraSlice]) -> None:
    """Adds the LoRA product of each slice to its tokens of `y_TO`, in place."""
    for start, stop, pair, columns in lora_slices:
        h_TR = x_TI[start:stop] @ pair.A_RI.t()
        _add_product(y_TO[start:stop], h_TR, pair, columns, scale=pair.scale)


def _add_product(
    y_tO: Tensor, h_tR: Tensor, pair: Pair, columns: Columns | None, *, scale: float
) -> None:
    if columns is None:
        y_tO.addmm_(h_tR, pair.B_OR.t(), alpha=scale)
    else:
        columns.add(y_tO, (h_tR * scale) @ pair.B_OR.t())


class _LoraFunction(torch.autograd.Function):
    """
    y = x Wᵀ + b + s (x Aᵀ) Bᵀ for each slice of tokens, with gradients of A and B but not of W.

    The matrix products accumulate the LoRA products in place, and the gradients are added directly
    to the adapter's flat float32 vector: autograd sees only x.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, lora_slices: list[LoraSlice]
    ) -> Tensor:
        x_TI = x.reshape(-1, x.shape[-1])
        y_TO = F.linear(x_TI, weight, bias)
        shrunk = []
        for start, stop, pair, columns in lora_slices:
            h_TR = (x_TI[start:stop] @ pair.A_RI.t()).mul_(pair.scale)
            _add_product(y_TO[start:stop], h_TR, pair, columns, scale=1.0)
            shrunk.append(h_TR)
        ctx.save_for_backward(x_TI, *shrunk)
        ctx.weight, ctx.lora_slices, ctx.shape = weight, lora_slices, x.shape
        return y_TO.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        x_TI, *shrunk = ctx.saved_tensors
        dy_TO = dy.reshape(-1, dy.shape[-1])
        dx_TI = dy_TO @ ctx.weight
        for (start, stop, pair, columns), h_TR in zip(ctx.lora_slices, shrunk, strict=True):
            dy_tO = dy_TO[start:stop] if columns is None else columns.select(dy_TO[start:stop])
            dh_tR = (dy_tO @ pair.B_OR).mul_(pair.scale)
            if pair.grad_A_RI is not None:
                add_mm_float32(pair.grad_A_RI, dh_tR.t(), x_TI[start:stop])
            if pair.grad_B_OR is not None:
                add_mm_float32(pair.grad_B_OR, dy_tO.t(), h_TR)
            dx_TI[start:stop].addmm_(dh_tR, pair.A_RI)
        return dx_TI.view(ctx.shape), None, None, None
