"""Products of the slots of each expert with the expert's matrix, for base weights and adapters.

A CPU multiplies in a loop over the experts that some token chose. A GPU multiplies all groups in one
call (`grouped_mm`), and nothing of it waits for the device: the sizes of the groups stay there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tinkex.engine.model.matmul import add_mm_float32

# T packed tokens, K experts of a token, S = T·K slots sorted by expert, E experts, N groups of slots

#: `grouped_mm` of a GPU needs rows of this many bytes or a multiple, and fewer groups than this.
ROW_BYTES = 16
MAX_GROUPS = 1023


class TokenRange(Protocol):
    """Tokens that use one adapter."""

    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...


class Routing(NamedTuple):
    """The slots of a pass, sorted by expert and then by token."""

    #: Of each slot: its place in [T, K], its token and its expert.
    order_S: Tensor
    tokens_S: Tensor
    experts_S: Tensor
    #: Where each slot of [T, K] is among the sorted ones.
    places_S: Tensor
    tokens: int
    experts: int

    @classmethod
    def of(cls, index_TK: Tensor, experts: int) -> Routing:
        tokens, each = index_TK.shape
        experts_S, order_S = index_TK.reshape(-1).sort(stable=True)
        places_S = torch.empty_like(order_S)
        places_S[order_S] = torch.arange(len(order_S), device=order_S.device)
        return cls(order_S, order_S // each, experts_S, places_S, tokens, experts)

    def ends(self, stops: Sequence[int]) -> Tensor:
        """
        Where each group of slots ends, [E · len(stops)], expert by expert.

        `stops` are the ascending ends of token ranges, the last one all tokens.
        """
        device = self.tokens_S.device
        if len(stops) == 1:
            wanted = torch.arange(self.experts, device=device)
            return torch.searchsorted(self.experts_S, wanted, right=True)
        keys_S = self.experts_S * self.tokens + self.tokens_S
        experts_E1 = torch.arange(self.experts, device=device).unsqueeze(1)
        wanted = experts_E1 * self.tokens + torch.tensor(stops, device=device)
        return torch.searchsorted(keys_S, wanted.reshape(-1))

    def summed(self, values_SX: Tensor, weights_TK: Tensor | None = None) -> Tensor:
        """The sum over the experts of each token [T, X], in a fixed order."""
        values_TKX = values_SX[self.places_S].view(self.tokens, -1, values_SX.shape[1])
        if weights_TK is not None:
            values_TKX = values_TKX * weights_TK.unsqueeze(2)
        return values_TKX.sum(dim=1)


class ExpertProducts:
    """Products in a loop over experts and adapters."""

    def __init__(self, routing: Routing, slices: Sequence[TokenRange]) -> None:
        self._routing, self._slices = routing, slices

    @staticmethod
    def of(
        routing: Routing, slices: Sequence[Any], like: Tensor, *, grouped: bool | None = None
    ) -> ExpertProducts:
        if grouped is None:
            grouped = like.is_cuda and like.dtype == torch.bfloat16
        return GroupedProducts(routing, slices) if grouped else ExpertProducts(routing, slices)

    def multiply(self, x_SI: Tensor, weights_EIO: Tensor) -> Tensor:
        """Each slot times the matrix of its expert."""
        y_SO = x_SI.new_empty(len(x_SI), weights_EIO.shape[2])
        start = 0
        for expert, stop in enumerate(self._expert_ends):
            if start < stop:
                torch.mm(x_SI[start:stop], weights_EIO[expert], out=y_SO[start:stop])
            start = stop
        return y_SO

    def add(self, y_SO: Tensor, x_SI: Tensor, matrices: Sequence[Tensor | None]) -> None:
        """
        Adds to each slot its product with the matrix of its adapter and expert.

        `matrices` has [E, inputs, outputs] or None for each slice. Columns beyond those of the
        matrix are zero for its slots, because other adapters may have larger ranks.
        """
        for at, expert, start, stop in self._groups:
            matrix_EIO = matrices[at]
            if matrix_EIO is not None:
                inputs, outputs = matrix_EIO.shape[1:]
                y_SO[start:stop, :outputs].addmm_(x_SI[start:stop, :inputs], matrix_EIO[expert])

    def add_outer(self, totals: Sequence[Tensor | None], left_SA: Tensor, right_SB: Tensor) -> None:
        """Adds leftᵀ right of the slots of each adapter and expert to `totals`, [E, A, B]."""
        for at, expert, start, stop in self._groups:
            total_EAB = totals[at]
            if total_EAB is not None:
                rows, columns = total_EAB.shape[1:]
                add_mm_float32(
                    total_EAB[expert],
                    left_SA[start:stop, :rows].t(),
                    right_SB[start:stop, :columns],
                )

    @cached_property
    def _expert_ends(self) -> list[int]:
        ends: list[int] = self._routing.ends([self._routing.tokens]).tolist()
        return ends

    @cached_property
    def _groups(self) -> list[tuple[int, int, int, int]]:
        """Slice, expert, first and last slot of every group that is not empty."""
        stops: list[int] = []
        owners: list[int | None] = []
        for at, each in enumerate(self._slices):
            stops += [each.start, each.stop]
            owners += [None, at]
        groups, start = [], 0
        for n, stop in enumerate(self._routing.ends([*stops, self._routing.tokens]).tolist()):
            expert, place = divmod(n, len(stops) + 1)
            owner = owners[place] if place < len(owners) else None
            if owner is not None and start < stop:
                groups.append((owner, expert, start, stop))
            start = stop
        return groups


class GroupedProducts(ExpertProducts):
    """The same in one call for all groups, or a few if there are many adapters or experts."""

    def multiply(self, x_SI: Tensor, weights_EIO: Tensor) -> Tensor:
        return grouped_mm(x_SI, weights_EIO, self._ends_of_experts)

    def add(self, y_SO: Tensor, x_SI: Tensor, matrices: Sequence[Tensor | None]) -> None:
        inputs = _padded(x_SI.shape[1], x_SI)
        outputs = _padded(y_SO.shape[1], y_SO)
        x_SI = F.pad(x_SI, (0, inputs - x_SI.shape[1]))
        for batch in self._batches:
            own = [None if at is None else matrices[at] for at in batch.owners]
            if all(each is None for each in own):
                continue
            only = own[0] if len(own) == 1 else None
            for call in self._calls(batch):
                if call.is_whole and only is not None and only.shape[1:] == (inputs, outputs):
                    stacked_NIO = only
                else:
                    stacked_NIO = x_SI.new_zeros(len(call.ends_N), inputs, outputs)
                    stacked_ENIO = call.own_groups(stacked_NIO, len(own))
                    for place, matrix in enumerate(own):
                        if matrix is not None:
                            rows, columns = matrix.shape[1:]
                            stacked_ENIO[:, place, :rows, :columns] = matrix[call.experts]
                y_SO += grouped_mm(x_SI, stacked_NIO, call.ends_N)[:, : y_SO.shape[1]]

    def add_outer(self, totals: Sequence[Tensor | None], left_SA: Tensor, right_SB: Tensor) -> None:
        left_SA, right_SB = (
            F.pad(each, (0, _padded(each.shape[1], each) - each.shape[1]))
            for each in (left_SA.contiguous(), right_SB)
        )
        for batch in self._batches:
            own = [None if at is None else totals[at] for at in batch.owners]
            if all(each is None for each in own):
                continue
            for call in self._calls(batch):
                found_NAB = grouped_mm(left_SA.t(), right_SB, call.ends_N)
                found_ENAB = call.own_groups(found_NAB, len(own))
                for place, total in enumerate(own):
                    if total is not None:
                        rows, columns = total.shape[1:]
                        total[call.experts] += found_ENAB[:, place, :rows, :columns]

    def _calls(self, batch: _Batch) -> Iterator[_Call]:
        """One call, or several with some of the experts each if there are too many groups."""
        each, experts = len(batch.owners), self._routing.experts
        if each * experts <= MAX_GROUPS:
            yield _Call(slice(0, experts), batch.ends_N, is_whole=True)
            return
        step = (MAX_GROUPS - 2) // each
        ends_N = F.pad(batch.ends_N, (1, 0))
        all_1 = ends_N.new_full((1,), len(self._routing.tokens_S))
        for first in range(0, experts, step):
            chosen = slice(first, min(first + step, experts))
            own_N = ends_N[first * each : chosen.stop * each + 1]
            yield _Call(chosen, torch.cat([own_N, all_1]), is_whole=False)

    @cached_property
    def _ends_of_experts(self) -> Tensor:
        return self._routing.ends([self._routing.tokens]).int()

    @cached_property
    def _batches(self) -> list[_Batch]:
        """The slices in as many calls as the number of groups of one call needs."""
        routing, slices = self._routing, self._slices
        if len(slices) == 1 and (slices[0].start, slices[0].stop) == (0, routing.tokens):
            return [_Batch([0], self._ends_of_experts)]
        most = MAX_GROUPS // routing.experts
        batches: list[_Batch] = []
        owners, stops = list[int | None](), list[int]()

        def finish() -> None:
            if stops and stops[-1] < routing.tokens:
                owners.append(None)
                stops.append(routing.tokens)
            if stops:
                batches.append(_Batch([*owners], routing.ends(stops).int()))

        for at, each in enumerate(slices):
            # A slice may need a range of other tokens before it, and the last one after it.
            if len(owners) + 3 > most:
                finish()
                owners.clear()
                stops.clear()
            if each.start > (stops[-1] if stops else 0):
                owners.append(None)
                stops.append(each.start)
            owners.append(at)
            stops.append(each.stop)
        finish()
        return batches


class _Batch(NamedTuple):
    """Ranges of tokens of one call: the slice of each, if any, and where their slots end."""

    owners: Sequence[int | None]
    ends_N: Tensor


class _Call(NamedTuple):
    """
    The groups of some experts.

    If these are not all, the slots of the experts before and after are a group each.
    """

    experts: slice
    ends_N: Tensor
    is_whole: bool

    def own_groups(self, values_NAB: Tensor, each: int) -> Tensor:
        """The groups of these experts as a view [experts, each, A, B]."""
        if not self.is_whole:
            values_NAB = values_NAB[1:-1]
        return values_NAB.view(-1, each, *values_NAB.shape[1:])


def grouped_mm(left: Tensor, right: Tensor, ends_N: Tensor) -> Tensor:
    multiply: Any = getattr(F, "grouped_mm", None) or torch._grouped_mm
    found: Tensor = multiply(left, right, offs=ends_N)
    return found


def _padded(size: int, like: Tensor) -> int:
    step = ROW_BYTES // like.element_size()
    return -(-size // step) * step
