"""Low-rank adapters: where each matrix lies in a flat vector, and the linear layer that adds them.

An adapter is one flat vector. A layout says where the A and B of every target begin, so a step of
the optimizer, a gradient norm or a copy is one operation over the whole adapter.
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

#: The same at every rank: the scale is ALPHA / rank.
ALPHA = 32.0

TargetKind = Literal["attn", "mlp", "unembed"]

#: Matrices begin at multiples of this many elements: 16 bytes in bfloat16, as GPU kernels want.
ALIGNMENT = 8


@dataclass(frozen=True, kw_only=True)
class Target:
    """A linear layer of the base model that an adapter may add to."""

    #: The module's path in the model, such as `model.layers.0.self_attn.q_proj`.
    name: str
    kind: TargetKind
    inputs: int
    outputs: int
    #: Targets with the same group read the same input, and their A's lie side by side: one
    #: product can shrink the input for all of them.
    group: str


class Place(NamedTuple):
    """Where the two matrices of a target begin in the flat vector, and their shapes."""

    offset_A: int
    shape_A: tuple[int, int]
    offset_B: int
    shape_B: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Layout:
    rank: int
    size: int
    places: Mapping[str, Place]


def make_layout(targets: Iterable[Target], rank: int) -> Layout:
    groups: dict[str, list[Target]] = {}
    for target in targets:
        groups.setdefault(target.group, []).append(target)
    places: dict[str, Place] = {}
    end = 0
    for members in groups.values():
        starts_A: dict[str, int] = {}
        for target in members:
            starts_A[target.name] = end
            end += rank * target.inputs
        end = aligned(end)
        for target in members:
            shape_A, shape_B = (rank, target.inputs), (target.outputs, rank)
            places[target.name] = Place(starts_A[target.name], shape_A, end, shape_B)
            end = aligned(end + target.outputs * rank)
    return Layout(rank=rank, size=end, places=places)


def aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def matrices(flat: Tensor, place: Place) -> tuple[Tensor, Tensor]:
    """A and B of one target as views of the flat vector."""
    A = flat[place.offset_A :][: place.shape_A[0] * place.shape_A[1]].view(place.shape_A)
    B = flat[place.offset_B :][: place.shape_B[0] * place.shape_B[1]].view(place.shape_B)
    return A, B


def initial_weights(layout: Layout, seed: int) -> Tensor:
    """
    A uniform as Kaiming has it, B zero: the adapter begins as no change at all.

    Each A depends on the seed and its own name only, so leaving out the MLP does not change what
    attention begins with.
    """
    flat = torch.zeros(layout.size)
    for name, place in layout.places.items():
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        bound = place.shape_A[1] ** -0.5  # kaiming_uniform_ with a = sqrt(5), as nn.Linear and PEFT
        matrices(flat, place)[0].uniform_(-bound, bound, generator=generator)
    return flat


class Pair(NamedTuple):
    """What a linear layer needs of one adapter. Gradients are None for adapters that only run."""

    A_RI: Tensor
    B_OR: Tensor
    scale: float
    grad_A_RI: Tensor | None
    grad_B_OR: Tensor | None


def make_pairs(
    layout: Layout, live: Tensor, *, scale: float, grad: Tensor | None = None
) -> dict[str, Pair]:
    pairs = {}
    for name, place in layout.places.items():
        grads = (None, None) if grad is None else matrices(grad, place)
        pairs[name] = Pair(*matrices(live, place), scale, *grads)
    return pairs


class Route(NamedTuple):
    """Rows `start` to `stop` of a packed batch use these pairs; rows of no route are the base's."""

    start: int
    stop: int
    pairs: Mapping[str, Pair]


class Routing:
    """The routes of the pass that is running, if one is: one object, shared by all layers."""

    def __init__(self) -> None:
        self.routes: Sequence[Route] = ()


class Share(NamedTuple):
    """A route as one linear layer sees it."""

    start: int
    stop: int
    pair: Pair


class LoraLinear(nn.Module):
    """A frozen linear layer that adds to each row what the row's adapter says."""

    def __init__(self, base: nn.Linear, name: str, routing: Routing) -> None:
        super().__init__()
        self.weight = base.weight
        self.bias = base.bias
        self.name = name
        self.routing = routing

    def forward(self, x: Tensor) -> Tensor:
        shares = shares_of(self.routing.routes, self.name)
        if x.requires_grad:
            if not shares:
                return F.linear(x, self.weight, self.bias)
            y: Tensor = _LoraFunction.apply(x, self.weight, self.bias, shares)  # type: ignore[no-untyped-call]
            return y
        x_TI = x.reshape(-1, x.shape[-1])
        y_TO = linear(x_TI, self.weight, self.bias)
        if shares:
            add_shares(x_TI, y_TO, shares)
        return y_TO.view(*x.shape[:-1], -1)


def shares_of(routes: Sequence[Route], name: str) -> list[Share]:
    return [
        Share(start, stop, pair)
        for start, stop, pairs in routes
        if (pair := pairs.get(name)) is not None
    ]


def add_shares(x_TI: Tensor, y_TO: Tensor, shares: Sequence[Share]) -> None:
    """Adds each share's low-rank product to its rows of `y_TO`, in place."""
    for start, stop, pair in shares:
        h_TR = x_TI[start:stop] @ pair.A_RI.t()
        y_TO[start:stop].addmm_(h_TR, pair.B_OR.t(), alpha=pair.scale)


class _LoraFunction(torch.autograd.Function):
    """
    y = x Wᵀ + b + s (x Aᵀ) Bᵀ row range by row range, with gradients of A and B but none of W.

    The low-rank products are accumulated by the matrix products themselves, and the gradients go
    straight into the adapter's flat float32 vector: autograd sees only x.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, shares: list[Share]
    ) -> Tensor:
        x_TI = x.reshape(-1, x.shape[-1])
        y_TO = F.linear(x_TI, weight, bias)
        shrunk = []
        for start, stop, pair in shares:
            h_TR = (x_TI[start:stop] @ pair.A_RI.t()).mul_(pair.scale)
            y_TO[start:stop].addmm_(h_TR, pair.B_OR.t())
            shrunk.append(h_TR)
        ctx.save_for_backward(x_TI, *shrunk)
        ctx.weight, ctx.shares, ctx.shape = weight, shares, x.shape
        return y_TO.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        x_TI, *shrunk = ctx.saved_tensors
        dy_TO = dy.reshape(-1, dy.shape[-1])
        dx_TI = dy_TO @ ctx.weight
        for (start, stop, pair), h_TR in zip(ctx.shares, shrunk, strict=True):
            dy_tO = dy_TO[start:stop]
            dh_tR = (dy_tO @ pair.B_OR).mul_(pair.scale)
            if pair.grad_A_RI is not None:
                add_mm_float32(pair.grad_A_RI, dh_tR.t(), x_TI[start:stop])
            if pair.grad_B_OR is not None:
                add_mm_float32(pair.grad_B_OR, dy_tO.t(), h_TR)
            dx_TI[start:stop].addmm_(dh_tR, pair.A_RI)
        return dx_TI.view(ctx.shape), None, None, None
