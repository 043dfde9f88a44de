"""The output projection of a rank: its part of the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tinkex.engine.model.lm_head import Chunk, Head, Softmax
from tinkex.engine.model.lora import AdapterSegment
from tinkex.engine.model.step_memory import logit_tokens
from tinkex.engine.model.targets import HEAD
from tinkex.engine.ranks.process_group import own_range, padded, without_padding
from tinkex.engine.ranks.shard import Shard

# t tokens of one chunk, V vocabulary of this rank, W whole vocabulary, K targets of a token


class ShardHead(Head):
    """
    The head whose softmax is over the vocabulary of all ranks.

    The largest logit, the sum of the exponentials and the logits of targets are reduced, so that
    training never has all logits in one place.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        shard: Shard,
        *,
        softcap: float | None = None,
    ) -> None:
        """`weight` has the rows of this rank, or all if it is the embedding."""
        self._group = shard.group
        division = shard.divisions[HEAD]
        ranks = shard.group.size
        self._ranges = [own_range(division.size, rank, ranks) for rank in range(ranks)]
        self._first, stop = self._ranges[shard.group.rank]
        if len(weight) == division.size:
            weight = weight[self._first : stop]
            bias = None if bias is None else bias[self._first : stop]
        super().__init__(weight, bias, softcap=softcap)
        self.vocab_size = division.size
        self.chunk_tokens = logit_tokens(weight.device.type, division.size)

    def logits(self, hidden_TH: Tensor, segments: Sequence[AdapterSegment] = ()) -> Tensor:
        return self.whole(super().logits(hidden_TH, segments))

    def whole(self, logits_tV: Tensor) -> Tensor:
        """The logits of the whole vocabulary on rank 0, which samples; of the part on the others."""
        lengths = [stop - start for start, stop in self._ranges]
        parts = self._group.gather(padded(logits_tV, max(lengths), 1))
        return without_padding(parts, lengths, 1) if parts else logits_tV

    def _local(self, targets_tK: Tensor) -> tuple[Tensor, Tensor]:
        """Columns of the targets here, and which of them this rank has."""
        local_tK = targets_tK - self._first
        own_tK = (local_tK >= 0) & (local_tK < len(self.weight_VH))
        return local_tK.clamp_(0, len(self.weight_VH) - 1), own_tK

    def _softmax(self, logits_tV: Tensor, targets_tK: Tensor) -> Softmax:
        largest_t1 = self._group.max_(logits_tV.amax(dim=1, keepdim=True))
        local_tK, own_tK = self._local(targets_tK)
        found_tK = (logits_tV.gather(1, local_tK) - largest_t1).where(own_tK, 0.0)
        powers_tV = logits_tV.sub_(largest_t1).exp_()
        # One sum for both.
        sums = self._group.sum_(torch.cat([powers_tV.sum(dim=1, keepdim=True), found_tK], dim=1))
        total_t = sums[:, 0].contiguous()
        return Softmax(sums[:, 1:] - total_t.log().unsqueeze(1), powers_tV, total_t)

    def _logits_gradient(
        self, softmax: Softmax, rows_u: Tensor | None, targets_tK: Tensor, g_tK: Tensor
    ) -> Tensor:
        values_tV, total_t = softmax.values_tV, softmax.total_t
        if rows_u is not None:
            values_tV, total_t = values_tV[rows_u], total_t[rows_u]
            targets_tK, g_tK = targets_tK[rows_u], g_tK[rows_u]
        local_tK, own_tK = self._local(targets_tK)
        dlogits_uV = values_tV.mul_(-g_tK.sum(dim=1, keepdim=True) / total_t.unsqueeze(1))
        return dlogits_uV.scatter_add_(1, local_tK, g_tK.where(own_tK, 0.0))

    def _backward(
        self,
        chunk: Chunk,
        targets_tK: Tensor,
        softmax: Softmax,
        g_tK: Tensor,
        capped_tV: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        gradient_tH, slope_t = super()._backward(chunk, targets_tK, softmax, g_tK, capped_tV)
        sums = self._group.sum_(torch.cat([gradient_tH, slope_t.unsqueeze(1)], dim=1))
        return sums[:, :-1], sums[:, -1]
