"""Which part of each matrix a rank has: how adapters are cut, gathered, summed and measured.

A linear layer is divided by its outputs (`colwise` in the plans of transformers: queries, keys,
values, gate, up, and the head by vocabulary) or by its inputs (`rowwise`: the layers after them).
Its B or its A is divided in the same way; the other factor is whole, and equal on all ranks. If
there are more ranks than key heads, several ranks have the same head, and so the same part.

The gradient of what several ranks have is a sum over them. Each rank adds up its own part, and the
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
)

Pairs = Mapping[str, tuple[Tensor, Tensor]]


class Section(NamedTuple):
    """Adjacent rows or columns of which each rank has one part."""

    size: int
    #: In how many equal parts; None: one for each rank. If there are fewer, ranks that follow each
    #: other have the same one.
    parts: int | None = None

    def own_range(self, rank: int, ranks: int) -> tuple[int, int]:
        if self.parts is None:
            return own_range(self.size, rank, ranks)
        return own_range(self.size, rank * self.parts // ranks, self.parts)

    def is_first(self, rank: int, ranks: int) -> bool:
        """Whether no rank before this one has the same part."""
        return self.parts is None or rank * self.parts % ranks < self.parts


class Division(NamedTuple):
    """How a linear layer is divided: by the columns of its A, or by the rows of its B."""

    letter: Literal["A", "B"]
    #: Whole inputs or outputs: one section, or several for a layer that makes several projections.
    sections: tuple[Section, ...]

    @classmethod
    def of(cls, letter: Literal["A", "B"], *sizes: int) -> Division:
        """In sections of these sizes, of which each rank has a part of its own."""
        return cls(letter, tuple(map(Section, sizes)))

    @property
    def size(self) -> int:
        return sum(section.size for section in self.sections)

    @property
    def dim(self) -> int:
        return -1 if self.letter == "A" else -2

    def ranges(self, rank: int, ranks: int) -> list[tuple[int, int]]:
        """Which rows or columns of the whole a rank has, in their order."""
        found, at = [], 0
        for section in self.sections:
            start, stop = section.own_range(rank, ranks)
            found.append((at + start, at + stop))
            at += section.size
        return found

    def own_size(self, rank: int, ranks: int) -> int:
        return sum(stop - start for start, stop in self.ranges(rank, ranks))


class _Piece(NamedTuple):
    """Adjacent numbers in the vector of a rank that are in one section."""

    start: int
    stop: int
    section: Section


class Shard:
    """The part of a model that one rank has. `divisions` have the names of the divided layers."""

    def __init__(self, group: ProcessGroup, divisions: Mapping[str, Division]) -> None:
        self.group = group
        self.divisions = divisions

    def ranges_of(self, division: Division) -> list[tuple[int, int]]:
        """Which rows or columns of a whole matrix this rank has."""
        return division.ranges(self.group.rank, self.group.size)

    def cut(self, whole: Tensor, division: Division) -> Tensor:
        """The part of this rank: a view, if it is one range."""
        dim = division.dim
        parts = [whole.narrow(dim, start, stop - start) for start, stop in self.ranges_of(division)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)

    def joined(
        self, whole: Tensor, parts: Sequence[Tensor], division: Division, *, sums: bool = False
    ) -> Tensor:
        """
        Fills a whole matrix from those of all ranks.

        With `sums`, it begins with zeros, and what several ranks have is summed.
        """
        for rank, part in enumerate(parts):
            at = 0
            for start, stop in division.ranges(rank, self.group.size):
                target = whole.narrow(division.dim, start, stop - start)
                own = part.narrow(division.dim, at, stop - start)
                if sums:
                    target.add_(own)
                else:
                    target.copy_(own)
                at += stop - start
        return whole

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
                at = self.group.rank if rank is None else rank
                own.append(self._sized(target, division.own_size(at, self.group.size)))
        return own

    def _sized(self, target: Target, size: int | None) -> Target:
        if size is None:
            return target
        if self.divisions[target.name].letter == "A":
            return replace(target, inputs=size)
        return replace(target, outputs=size)

    # -- cutting ----------------------------------------------------------------------------------

    def own_pairs(self, pairs: Pairs) -> Pairs:
        """The parts of this rank of whole matrices, as views where they are one range."""
        return {
            name: (self._cut(name, "A", A), self._cut(name, "B", B))
            for name, (A, B) in pairs.items()
        }

    def _cut(self, name: str, letter: str, matrix: Tensor) -> Tensor:
        division = self.divisions.get(name)
        if division is None or division.letter != letter:
            return matrix
        return self.cut(matrix, division)

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

        `targets` are those of this rank, `rank` that of the adapter. With `sums`, what several
        ranks have is summed, as gradients need it.
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
            pairs = [
                matrices(part, layout.placements[name])
                for part, layout in zip(parts, layouts, strict=True)
            ]
            for at, (letter, matrix) in enumerate(
                zip("AB", matrices(found, placement), strict=True)
            ):
                of_ranks = [pair[at] for pair in pairs]
                division = self.divisions.get(name)
                if division is None or division.letter != letter:
                    # Each rank has all columns.
                    division = Division("A", (Section(matrix.shape[-1], parts=1),))
                self.joined(matrix, of_ranks, division, sums=sums)
        return found

    # -- gradients and norms ----------------------------------------------------------------------

    def sum_shared(self, grad: Tensor, layout: Layout) -> None:
        """Makes the gradients of what several ranks have complete, on all of them."""
        shared = [
            (grad[start:stop], section.parts)
            for start, stop, section in self._pieces(layout)
            if section.parts is not None
        ]
        if not shared:
            return
        placed = [self._placed(own, parts) for own, parts in shared]
        total = self.group.sum_(torch.cat(placed))
        sums = torch.split(total, [len(each) for each in placed])
        for (own, parts), summed in zip(shared, sums, strict=True):
            own.copy_(summed.view(parts, -1)[self.group.rank * parts // self.group.size])

    def _placed(self, own: Tensor, parts: int) -> Tensor:
        """A section with zeros for the parts of other ranks."""
        if parts == 1:
            return own
        whole = own.new_zeros(parts, len(own))
        whole[self.group.rank * parts // self.group.size] = own
        return whole.flatten()

    def keep_once(self, grad: Tensor, layout: Layout) -> None:
        """Clears the gradients of what several ranks have on all but one, so that they sum to one."""
        for start, stop, section in self._pieces(layout):
            if not section.is_first(self.group.rank, self.group.size):
                grad[start:stop].zero_()

    def own_parts(self, flat: Tensor, layout: Layout) -> list[Tensor]:
        """Views of all numbers, such that each of the whole vector is in those of one rank."""
        if not self.group.rank:
            return [flat]
        return [
            flat[start:stop]
            for start, stop, section in self._pieces(layout)
            if section.is_first(self.group.rank, self.group.size)
        ]

    def norm(self, own: float) -> float:
        """The Euclidean norm of the whole vector, from that of the own parts of each rank."""
        return math.sqrt(self.group.sum_of(own * own))

    def _pieces(self, layout: Layout) -> Iterator[_Piece]:
        """All numbers of this rank's vector."""
        for name, (offset_A, shape_A, offset_B, shape_B) in layout.placements.items():
            division = self.divisions.get(name)
            for letter, start, shape in (("A", offset_A, shape_A), ("B", offset_B, shape_B)):
                stop = start + math.prod(shape)
                if division is None or division.letter != letter:
                    yield _Piece(start, stop, Section(stop - start, parts=1))
                elif len(division.sections) == 1:
                    yield _Piece(start, stop, division.sections[0])
                else:  # of a B, whose rows follow each other
                    for section in division.sections:
                        first, last = section.own_range(self.group.rank, self.group.size)
                        end = start + (last - first) * shape[-1]
                        yield _Piece(start, end, section)
                        start = end

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
        ranks = range(self.group.size)
        longest = max(division.own_size(rank, self.group.size) for rank in ranks)
        parts = self.group.all_gather(padded(stack, longest, division.dim))
        shape = list(stack.shape)
        shape[division.dim] = division.size
        return self.joined(stack.new_empty(shape), parts, division)

    def own_matrices(self, stack: Tensor, division: Division | None) -> Tensor:
        if division is None:
            return stack
        return self.cut(stack, division)
