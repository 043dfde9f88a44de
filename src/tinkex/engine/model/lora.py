"""LoRA adapters: their layout in a flat vector, and the linear layer that adds them.

An adapter is one flat vector. The layout says where A and B of every target begin, so an optimizer
step, a gradient norm or a copy is one operation over the whole adapter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tinkex.engine.model.matmul import add_mm_float32, linear

# T packed tokens, I inputs of a linear layer, O its outputs, R rank

#: LoRA alpha, independent of the rank: the scale is ALPHA / rank.
ALPHA = 32.0

TargetKind = Literal["attn", "mlp", "unembed"]

#: Matrices begin at multiples of this many elements: 16 bytes in bfloat16, which GPU kernels need.
ALIGNMENT = 8


@dataclass(frozen=True, kw_only=True)
class Target:
    """A linear layer of the base model that can be adapted."""

    #: The module's path in the model, such as `model.layers.0.self_attn.q_proj`.
    name: str
    kind: TargetKind
    inputs: int
    outputs: int
    #: Targets of one group read the same input. Their A matrices are adjacent, so that one product
    #: can project the input for all of them.
    group: str


class Placement(NamedTuple):
    """Offsets and shapes of the two matrices of a target in the flat vector."""

    offset_A: int
    shape_A: tuple[int, int]
    offset_B: int
    shape_B: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Layout:
    rank: int
    size: int
    placements: Mapping[str, Placement]


def make_layout(targets: Iterable[Target], rank: int) -> Layout:
    groups: dict[str, list[Target]] = {}
    for target in targets:
        groups.setdefault(target.group, []).append(target)
    placements: dict[str, Placement] = {}
    end = 0
    for members in groups.values():
        starts_A: dict[str, int] = {}
        for target in members:
            starts_A[target.name] = end
            end += rank * target.inputs
        end = aligned(end)
        for target in members:
            shape_A, shape_B = (rank, target.inputs), (target.outputs, rank)
            placements[target.name] = Placement(starts_A[target.name], shape_A, end, shape_B)
            end = aligned(end + target.outputs * rank)
    return Layout(rank=rank, size=end, placements=placements)


def aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def matrices(flat: Tensor, placement: Placement) -> tuple[Tensor, Tensor]:
    """A and B of one target as views of the flat vector."""
    A = flat[placement.offset_A :][: placement.shape_A[0] * placement.shape_A[1]].view(
        placement.shape_A
    )
    B = flat[placement.offset_B :][: placement.shape_B[0] * placement.shape_B[1]].view(
        placement.shape_B
    )
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
            placement.shape_A[1] ** -0.5
        )  # kaiming_uniform_ with a = sqrt(5), as in nn.Linear and PEFT
        matrices(flat, placement)[0].uniform_(-bound, bound, generator=generator)
    return flat


class Pair(NamedTuple):
    """The matrices of one adapter for one linear layer. Sampler adapters have no gradients."""

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


class AdapterContext:
    """The adapter segments of the current pass: one object, shared by all layers."""

    def __init__(self) -> None:
        self.segments: Sequence[AdapterSegment] = ()


class LoraSlice(NamedTuple):
    """The part of an adapter segment that concerns one linear layer."""

    start: int
    stop: int
    pair: Pair


class LoraLinear(nn.Module):
    """A frozen linear layer that adds to each token the LoRA product of its adapter."""

    def __init__(self, base: nn.Linear, name: str, context: AdapterContext) -> None:
        super().__init__()
        self.weight = base.weight
        self.bias = base.bias
        self.name = name
        self.context = context

    def forward(self, x: Tensor) -> Tensor:
        lora_slices = lora_slices_of(self.context.segments, self.name)
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


def lora_slices_of(segments: Sequence[AdapterSegment], name: str) -> list[LoraSlice]:
    return [
        LoraSlice(start, stop, pair)
        for start, stop, pairs in segments
        if (pair := pairs.get(name)) is not None
    ]


def add_lora_slices(x_TI: Tensor, y_TO: Tensor, lora_slices: Sequence[LoraSlice]) -> None:
    """Adds the LoRA product of each slice to its tokens of `y_TO`, in place."""
    for start, stop, pair in lora_slices:
        h_TR = x_TI[start:stop] @ pair.A_RI.t()
        y_TO[start:stop].addmm_(h_TR, pair.B_OR.t(), alpha=pair.scale)


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
        for start, stop, pair in lora_slices:
            h_TR = (x_TI[start:stop] @ pair.A_RI.t()).mul_(pair.scale)
            y_TO[start:stop].addmm_(h_TR, pair.B_OR.t())
            shrunk.append(h_TR)
        ctx.save_for_backward(x_TI, *shrunk)
        ctx.weight, ctx.lora_slices, ctx.shape = weight, lora_slices, x.shape
        return y_TO.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        x_TI, *shrunk = ctx.saved_tensors
        dy_TO = dy.reshape(-1, dy.shape[-1])
        dx_TI = dy_TO @ ctx.weight
        for (start, stop, pair), h_TR in zip(ctx.lora_slices, shrunk, strict=True):
            dy_tO = dy_TO[start:stop]
            dh_tR = (dy_tO @ pair.B_OR).mul_(pair.scale)
            if pair.grad_A_RI is not None:
                add_mm_float32(pair.grad_A_RI, dh_tR.t(), x_TI[start:stop])
            if pair.grad_B_OR is not None:
                add_mm_float32(pair.grad_B_OR, dy_tO.t(), h_TR)
            dx_TI[start:stop].addmm_(dh_tR, pair.A_RI)
        return dx_TI.view(ctx.shape), None, None, None
