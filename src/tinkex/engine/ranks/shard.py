"""Which part of each matrix a rank has: how adapters are cut, gathered, summed and measured.

A linear layer is divided by its outputs (`colwise` in the plans of transformers: queries, keys,
values, gate, up, and the head by vocabulary) or by its inputs (`rowwise`: the layers after them).
Its B or its A is divided in the same way; the other factor is whole, and equal on all ranks.

The gradient of a whole factor is a sum over the ranks. Each rank adds up its own part, and the
ranks sum them once for each optimizer step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tinkex.engine.model.lora import initial_weights, matrices
from tinkex.engine.model.targets import Layout, Target, make_layout
from tinkex.engine.ranks.process_group import (
    ProcessGroup,
    own_range,
    padded,
    without_padding,
)

Pairs = Mapping[str, tuple[Tensor, Tensor]]


class Division(NamedTuple):
    """How a linear layer is divided: by the columns of its A, or by the rows of its B."""

    letter: Literal["A", "B"]
    #: Whole inputs or outputs.
    size: int

    @property
    def dim(self) -> int:
        return -1 if self.letter == "A" else -2


class Shard:
    """The part of a model that one rank has. `divisions` have the names of the divided layers."""

    def __init__(self, group: ProcessGroup, divisions: Mapping[str, Division]) -> None:
        self.group = group
        self.divisions = divisions

    def range_of(self, division: Division, rank: int | None = None) -> tuple[int, int]:
        own = self.group.rank if rank is None else rank
        return own_range(division.size, own, self.group.size)

    # -- targets and layouts ----------------------------------------------------------------------

    def whole_targets(self, targets: Iterable[Target]) -> list[Target]:
        """The targets with the sizes of the whole model, from those of any rank."""
        return [
            self._sized(target, None if found is None else found.size)
            for target in targets
            for found in [self.divisions.get(target.name)]
        ]

    def own_targets(self, targets: Iterable[Target], rank: int | None = None) -> list[Target]:
        """The targets with the sizes of a rank: this one, unless another is named."""
        own = []
        for target in targets:
            division = self.divisions.get(target.name)
            if division is None:
                own.append(target)
            else:
                start, stop = self.range_of(division, rank)
                own.append(self._sized(target, stop - start))
        return own

    def _sized(self, target: Target, size: int | None) -> Target:
        if size is None:
            return target
        if self.divisions[target.name].letter == "A":
            return replace(target, inputs=size)
        return replace(target, outputs=size)

    # -- cutting ----------------------------------------------------------------------------------

    def own_pairs(self, pairs: Pairs) -> Pairs:
        """The parts of this rank of whole matrices, as views."""
        return {
            name: (self._cut(name, "A", A), self._cut(name, "B", B))
            for name, (A, B) in pairs.items()
        }

    def _cut(self, name: str, letter: str, matrix: Tensor) -> Tensor:
        division = self.divisions.get(name)
        if division is None or division.letter != letter:
            return matrix
        start, stop = self.range_of(division)
        return matrix.narrow(division.dim, start, stop - start)

    def initial_weights(self, targets: Sequence[Target], layout: Layout, seed: int) -> Tensor:
        """This rank's part of the weights that one process would begin with."""
        whole = make_layout(self.whole_targets(targets), layout.rank)
        drawn = initial_weights(whole, seed)
        pairs = {name: matrices(drawn, placement) for name, placement in whole.placements.items()}
        own = torch.zeros(layout.size)
        for name, cut in self.own_pairs(pairs).items():
            for mine, matrix in zip(matrices(own, layout.placements[name]), cut, strict=True):
                mine.copy_(matrix)
        return own

    # -- gathering --------------------------------------------------------------------------------

    def gather(self, flat: Tensor, targets: Sequence[Target], rank: int, *, sums: bool) -> Tensor:
        """
        The whole vector in host memory, on rank 0; empty on the others.

        `targets` are those of this rank, `rank` that of the adapter. With `sums`, factors that are
        whole on each rank are summed, as gradients need it.
        """
        whole_targets = self.whole_targets(targets)
        layouts = [
            make_layout(self.own_targets(whole_targets, each), rank)
            for each in range(self.group.size)
        ]
        longest = max(layout.size for layout in layouts)
        parts = self.group.gather(padded(flat.detach(), longest, 0))
        if not parts:
            return torch.empty(0)
        parts = [part.cpu() for part in parts]
        whole = make_layout(whole_targets, rank)
        found = torch.zeros(whole.size, dtype=flat.dtype)
        for name, placement in whole.placements.items():
            division = self.divisions.get(name)
            pairs = [
                matrices(part, layout.placements[name])
                for part, layout in zip(parts, layouts, strict=True)
            ]
            for at, (letter, matrix) in enumerate(
                zip("AB", matrices(found, placement), strict=True)
            ):
                of_ranks = [pair[at] for pair in pairs]
                if division is not None and division.letter == letter:
                    torch.cat(of_ranks, dim=division.dim, out=matrix)
                elif sums:
                    torch.sum(torch.stack(of_ranks), dim=0, out=matrix)
                else:
                    matrix.copy_(of_ranks[0])
        return found

    # -- gradients and norms ----------------------------------------------------------------------

    def sum_whole_factors(self, grad: Tensor, layout: Layout) -> None:
        """Makes the gradients of the factors that are whole on each rank complete, on all ranks."""
        parts = [grad[start:stop] for start, stop in self._ranges(layout, divided=False)]
        if not parts:
            return
        total = self.group.sum_(torch.cat(parts))
        for part, summed in zip(
            parts, torch.split(total, [len(part) for part in parts]), strict=True
        ):
            part.copy_(summed)

    def keep_once(self, grad: Tensor, layout: Layout) -> None:
        """Clears the gradients of whole factors on all ranks but one, so that their sum is one."""
        if self.group.rank:
            for start, stop in self._ranges(layout, divided=False):
                grad[start:stop].zero_()

    def own_parts(self, flat: Tensor, layout: Layout) -> list[Tensor]:
        """Views of all numbers, such that each of the whole vector is in those of one rank."""
        if not self.group.rank:
            return [flat]
        return [flat[start:stop] for start, stop in self._ranges(layout, divided=True)]

    def norm(self, own: float) -> float:
        """The Euclidean norm of the whole vector, from that of the own parts of each rank."""
        return math.sqrt(self.group.sum_of(own * own))

    def _ranges(self, layout: Layout, *, divided: bool) -> Iterator[tuple[int, int]]:
        for name, (offset_A, shape_A, offset_B, shape_B) in layout.placements.items():
            division = self.divisions.get(name)
            own = None if division is None else division.letter
            if (own == "A") == divided:
                yield offset_A, offset_A + math.prod(shape_A)
            if (own == "B") == divided:
                yield offset_B, offset_B + math.prod(shape_B)

    # -- whole matrices, for dimuon ---------------------------------------------------------------

    def alike(
        self, name: str, letter: str, shape: tuple[int, int]
    ) -> tuple[tuple[int, int], Division | None, Shard]:
        """The whole shape of a matrix, from that of its part, and how it is divided."""
        division = self.divisions.get(name)
        if division is None or division.letter != letter:
            return shape, None, self
        rows, columns = shape
        whole = (rows, division.size) if letter == "A" else (division.size, columns)
        return whole, division, self

    def whole_matrices(self, stack: Tensor, division: Division | None) -> Tensor:
        """Matrices [n, rows, columns] of which each rank has a part, as whole ones on all ranks."""
        if division is None:
            return stack
        ranges = [self.range_of(division, rank) for rank in range(self.group.size)]
        lengths = [stop - start for start, stop in ranges]
        parts = self.group.all_gather(padded(stack, max(lengths), division.dim))
        return without_padding(parts, lengths, division.dim)

    def own_matrices(self, stack: Tensor, division: Division | None) -> Tensor:
        if division is None:
            return stack
        start, stop = self.range_of(division)
        return stack.narrow(division.dim, start, stop - start)
