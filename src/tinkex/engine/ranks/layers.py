"""The layers of a rank: where its sums with the other ranks are.

A block (attention, MLP) begins with layers that are divided by their outputs and ends with one that
is divided by its inputs. Forward, the ranks sum the block's result; backward, the gradient of its
input. Everything between is the work of one rank: its heads, its part of the MLP, and their keys
and values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tinkex.engine.model.experts import is_experts
from tinkex.engine.model.lora import LoraLinear
from tinkex.engine.ranks.process_group import ProcessGroup
from tinkex.engine.ranks.shard import Division, Shard


class _SumForward(torch.autograd.Function):
    """The sum over all ranks; each rank then has the gradient of the sum, which is its own."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: ProcessGroup) -> Tensor:
        return group.sum_(part.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _SumBackward(torch.autograd.Function):
    """The same tensor, whose gradient is the sum of those of all ranks."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, part: Tensor) -> tuple[Tensor, None]:
        return ctx.group.sum_(part.clone()), None


class _SumBoth(torch.autograd.Function):
    """The sum over all ranks, of which each rank uses a part: its gradient is that of all."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return group.sum_(part.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.group.sum_(gradient.clone()), None


class NormOverHeads(nn.Module):
    """The part of a rank of a root mean square norm over all heads."""

    #: Set when the ranks are connected.
    group: ProcessGroup

    def __init__(self, whole: Any, division: Division, rank: int, ranks: int) -> None:
        super().__init__()
        own = division.own_size(rank, ranks)
        self.weight = nn.Parameter(whole.weight.new_empty(own))
        self.eps = whole.variance_epsilon
        #: Numbers whose squares are summed: heads that several ranks have are in it several times.
        self.summed = own * ranks

    def forward(self, x: Tensor) -> Tensor:
        floats = x.float()
        squares = floats.square().sum(-1, keepdim=True)
        if squares.requires_grad:
            squares = _SumBoth.apply(squares, self.group)  # type: ignore[no-untyped-call]
        else:
            squares = self.group.sum_(squares)
        normed = floats * torch.rsqrt(squares / self.summed + self.eps)
        return (self.weight * normed).to(x.dtype)


class RowLinear(LoraLinear):
    """A linear layer that is divided by its inputs."""

    def __init__(self, whole: LoraLinear, group: ProcessGroup) -> None:
        super().__init__(whole, whole.name, whole.context, whole.projections)  # type: ignore[arg-type]
        self._group = group
        if group.rank and self.bias is not None:
            self._parameters["bias"] = None  # one rank adds it

    def forward(self, x: Tensor) -> Tensor:
        part = super().forward(x)
        if not part.requires_grad:
            return self._group.sum_(part)
        whole: Tensor = _SumForward.apply(part, self._group)  # type: ignore[no-untyped-call]
        return whole


def connect(layers: nn.Module, shard: Shard) -> None:
    """Makes the linear layers of a rank compute what one process would."""
    blocks: dict[str, nn.Module] = {}
    for path, module in list(layers.named_modules()):
        if is_experts(module):
            connect_experts(module, shard.group)
        if isinstance(module, NormOverHeads):
            module.group = shard.group
        if not isinstance(module, LoraLinear):
            continue
        # All projections of one layer are divided in the same way.
        division = next(filter(None, map(shard.divisions.get, module.projections)), None)
        if division is None:
            continue
        parent_path, _, leaf = path.rpartition(".")
        parent = layers.get_submodule(parent_path)
        blocks[parent_path] = parent
        if division.letter == "A":
            setattr(parent, leaf, RowLinear(module, shard.group))

    def sum_gradient(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x = args[0] if args else kwargs["hidden_states"]
        if not x.requires_grad:
            return args, kwargs
        summed = _SumBackward.apply(x, shard.group)  # type: ignore[no-untyped-call]
        if args:
            return (summed, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": summed}

    for block in blocks.values():
        block.register_forward_pre_hook(sum_gradient, with_kwargs=True)


def connect_experts(module: Any, group: ProcessGroup) -> None:
    """
    The same for the experts of a layer, of which each rank has a part of the width of each.

    All ranks use the choices and weights of rank 0's router, because near ties may round differently.
    """
    if group.rank:  # one rank adds the last bias
        own = module.tinkex_experts
        own.weights = own.weights._replace(down_bias_EH=None)

    def share(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        names = ("hidden_states", "top_k_index", "top_k_weights")
        x, index, weights = (*args, *(kwargs[name] for name in names[len(args) :]))
        own = weights.detach()
        weights = weights + (group.first(own) - own)
        if x.requires_grad or weights.requires_grad:
            x = _SumBackward.apply(x, group)  # type: ignore[no-untyped-call]
            weights = _SumBackward.apply(weights, group)  # type: ignore[no-untyped-call]
        return (x, group.first(index), weights), {}

    def sum_output(module: nn.Module, args: tuple[Any, ...], part: Tensor) -> Tensor:
        if not part.requires_grad:
            return group.sum_(part)
        whole: Tensor = _SumForward.apply(part, group)  # type: ignore[no-untyped-call]
        return whole

    module.register_forward_pre_hook(share, with_kwargs=True)
    module.register_forward_hook(sum_output)
