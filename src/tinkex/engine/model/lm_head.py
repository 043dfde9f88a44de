"""The output projection, chunk by chunk: logprobs of given tokens and the gradient of any loss.

Logits of a whole batch never exist. Each chunk of rows is projected once in float32; the loss says
how it changes with each logprob, and that is all the backward pass needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tinkex.engine.model.lora import AdapterSegment, LoraSlice, lora_slices_of
from tinkex.engine.model.matmul import add_mm_float32, linear, mm_float32

# T packed tokens, t tokens of one chunk, H hidden size, V vocabulary, K targets of one token, R rank

#: The output projection as PEFT names it; also the name of its low-rank pair.
HEAD = "lm_head"

#: Most bytes of float32 logits that are alive at once.
CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}

#: Rows start..stop and their logprobs [t, K] in; the loss's derivative by each logprob out.
LossGradient = Callable[[slice, Tensor], Tensor]


class Chunk(NamedTuple):
    span: slice
    hidden_tH: Tensor
    #: Float32, fresh: the receiver may overwrite them.
    logits_tV: Tensor
    lora_slices: Sequence[LoraSlice]


class HeadGradient(NamedTuple):
    logprobs_TK: Tensor
    #: The loss's derivative by the hidden states, in their format.
    gradient_TH: Tensor
    #: Of the predicted distribution, in nats; NaN but where one target of a token has a gradient.
    entropy_T: Tensor


class Head:
    def __init__(self, weight_VH: Tensor, bias_V: Tensor | None) -> None:
        # A CPU multiplies in float32 whatever the base's format is: bfloat16 logits would lose
        # what importance ratios are made of, and converting at every step costs more than this copy.
        keep = weight_VH.dtype if weight_VH.is_cuda else torch.float32
        self.weight_VH = weight_VH.detach().to(keep)
        self.bias_V = None if bias_V is None else bias_V.detach().float()
        self.vocab_size = weight_VH.shape[0]
        self.chunk_tokens = max(16, CHUNK_BYTES[weight_VH.device.type] // (4 * self.vocab_size))

    def logits(self, hidden_TH: Tensor, segments: Sequence[AdapterSegment] = ()) -> Tensor:
        return self._project(hidden_TH.to(self.weight_VH.dtype), lora_slices_of(segments, HEAD))

    def chunks(self, hidden_TH: Tensor, segments: Sequence[AdapterSegment]) -> Iterator[Chunk]:
        hidden_TH = hidden_TH.to(self.weight_VH.dtype)
        whole = lora_slices_of(segments, HEAD)
        for start in range(0, len(hidden_TH), self.chunk_tokens):
            rows = slice(start, min(start + self.chunk_tokens, len(hidden_TH)))
            lora_slices = [
                LoraSlice(max(s.start, rows.start) - start, min(s.stop, rows.stop) - start, s.pair)
                for s in whole
                if s.start < rows.stop and s.stop > rows.start
            ]
            hidden_tH = hidden_TH[rows]
            yield Chunk(rows, hidden_tH, self._project(hidden_tH, lora_slices), lora_slices)

    def logprobs(
        self, hidden_TH: Tensor, targets_TK: Tensor, segments: Sequence[AdapterSegment]
    ) -> Tensor:
        """Log-probabilities [T, K] of the target tokens."""
        logprobs_TK = torch.empty(targets_TK.shape, device=hidden_TH.device)
        for chunk in self.chunks(hidden_TH, segments):
            logprobs_TK[chunk.span] = gathered(chunk.logits_tV, targets_TK[chunk.span])[0]
        return logprobs_TK

    def logprobs_and_gradient(
        self,
        hidden_TH: Tensor,
        targets_TK: Tensor,
        segments: Sequence[AdapterSegment],
        loss_gradient: LossGradient,
    ) -> HeadGradient:
        """
        The same logprobs, and the loss's gradient by the hidden states.

        The gradients of the segments' output pairs are added to their adapters on the way. A loss
        that must see more than one chunk's logprobs asks `logprobs` for them first and gives the
        derivatives it found then: the logits are made twice, and still one chunk at a time.
        """
        logprobs_TK = torch.empty(targets_TK.shape, device=hidden_TH.device)
        gradient_TH = torch.zeros_like(hidden_TH)
        entropy_T = torch.empty(len(hidden_TH), device=hidden_TH.device)
        for chunk in self.chunks(hidden_TH, segments):
            targets_tK = targets_TK[chunk.span]
            logprobs_tK, total_t1 = gathered(chunk.logits_tV, targets_tK)
            logprobs_TK[chunk.span] = logprobs_tK
            g_tK = loss_gradient(chunk.span, logprobs_tK)
            gradient_tH, slope_t = self._backward(chunk, targets_tK, total_t1, g_tK)
            gradient_TH[chunk.span] = gradient_tH
            # dL/dlogits = onehot·g - softmax·Σg, and its product with the logits is the slope:
            # solved for the mean logit, that is the entropy without a pass over the vocabulary.
            found_t = (slope_t - (g_tK * logprobs_tK).sum(dim=1)) / g_tK.sum(dim=1)
            # Several derivatives of one token may cancel, and the quotient would be noise.
            entropy_T[chunk.span] = found_t.where((g_tK != 0).sum(dim=1) == 1, math.nan)
        return HeadGradient(logprobs_TK, gradient_TH, entropy_T)

    def _project(self, hidden_tH: Tensor, lora_slices: Sequence[LoraSlice]) -> Tensor:
        if hidden_tH.dtype == torch.float32:
            logits_tV = linear(hidden_tH, self.weight_VH)
        else:
            logits_tV = mm_float32(hidden_tH, self.weight_VH.t())
        if self.bias_V is not None:
            logits_tV += self.bias_V
        for start, stop, pair in lora_slices:
            h_tR = mm_float32(hidden_tH[start:stop], pair.A_RI.t().to(hidden_tH.dtype))
            add_mm_float32(
                logits_tV[start:stop], h_tR.mul_(pair.scale), pair.B_OR.t().to(torch.float32)
            )
        return logits_tV

    def _backward(
        self, chunk: Chunk, targets_tK: Tensor, total_t1: Tensor, g_tK: Tensor
    ) -> tuple[Tensor, Tensor]:
        """
        dL/dhidden of one chunk, and each row's Σ dL/dlogit · logit.

        From g = dL/dlogp: dL/dlogits = onehot·g - softmax·Σg.
        """
        # Prompt tokens have weight zero in most batches: leave their rows out of both products.
        used = (g_tK != 0).any(dim=1)
        everything = bool(used.all())
        powers_uV, targets_uK, total_u1, g_uK = chunk.logits_tV, targets_tK, total_t1, g_tK
        if not everything:
            powers_uV, targets_uK = powers_uV[used], targets_uK[used]
            total_u1, g_uK = total_u1[used], g_uK[used]
        dlogits_uV = powers_uV.mul_(-g_uK.sum(dim=1, keepdim=True) / total_u1)
        dlogits_uV.scatter_add_(1, targets_uK, g_uK)
        dhidden_uH = mm_float32(dlogits_uV.to(self.weight_VH.dtype), self.weight_VH)
        gradient_tH = dhidden_uH
        if not everything:
            gradient_tH = dhidden_uH.new_zeros(chunk.hidden_tH.shape)
            gradient_tH[used] = dhidden_uH
        if chunk.lora_slices:
            self._backward_lora_slices(chunk, used, dlogits_uV, gradient_tH)
        # The logits are linear in the hidden states but for the bias.
        slope_t = (chunk.hidden_tH * gradient_tH).sum(dim=1)
        if self.bias_V is not None:
            slope_t[used] += dlogits_uV @ self.bias_V
        return gradient_tH, slope_t

    def _backward_lora_slices(
        self, chunk: Chunk, used_t: Tensor, dlogits_uV: Tensor, gradient_tH: Tensor
    ) -> None:
        rows_u = used_t.nonzero().squeeze(1)
        for start, stop, pair in chunk.lora_slices:
            mine = (rows_u >= start) & (rows_u < stop)
            rows_m = rows_u[mine]
            dlogits_mV = dlogits_uV if len(rows_m) == len(rows_u) else dlogits_uV[mine]
            hidden_mH = chunk.hidden_tH[rows_m].float()
            A_RH, B_VR = pair.A_RI.float(), pair.B_OR.float()
            dh_mR = (dlogits_mV @ B_VR).mul_(pair.scale)
            if pair.grad_A_RI is not None:
                pair.grad_A_RI.addmm_(dh_mR.t(), hidden_mH)
            if pair.grad_B_OR is not None:
                h_mR = (hidden_mH @ A_RH.t()).mul_(pair.scale)
                pair.grad_B_OR.addmm_(dlogits_mV.t(), h_mR)
            gradient_tH.index_add_(0, rows_m, (dh_mR @ A_RH).to(gradient_tH.dtype))


def gathered(logits_tV: Tensor, targets_tK: Tensor) -> tuple[Tensor, Tensor]:
    """
    Logprobs [t, K] of the targets, and what the softmax divides by [t, 1].

    Leaves exp(logit - largest) where the logits were: with the divisor that is the softmax, which
    the gradient needs, and exponentials are most of the work.
    """
    largest_t1 = logits_tV.amax(dim=1, keepdim=True)
    own_tK = logits_tV.gather(1, targets_tK) - largest_t1
    total_t1 = logits_tV.sub_(largest_t1).exp_().sum(dim=1, keepdim=True)
    return own_tK - total_t1.log(), total_t1
