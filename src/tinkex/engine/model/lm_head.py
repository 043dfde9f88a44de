"""The output projection in chunks: logprobs of target tokens, and the gradient of any loss.

The logits of a whole batch never exist. Each chunk of tokens is projected once in float32. The loss
provides its derivative by each logprob, which is all that the backward pass needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tinkex.engine.model.lora import AdapterSegment, LoraSlice, lora_slices_of
from tinkex.engine.model.matmul import add_mm_float32, linear, mm_float32

# T packed tokens, t tokens of one chunk, H hidden size, V vocabulary, K targets of a token, R rank

#: PEFT's name of the output projection, and of its LoRA pair.
HEAD = "lm_head"

#: Maximum bytes of float32 logits of one chunk.
CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}

#: Maps a span of tokens and their logprobs [t, K] to the derivative of the loss by each logprob.
LossGradient = Callable[[slice, Tensor], Tensor]


class Chunk(NamedTuple):
    span: slice
    hidden_tH: Tensor
    #: Float32. The receiver may overwrite them.
    logits_tV: Tensor
    lora_slices: Sequence[LoraSlice]


class HeadGradient(NamedTuple):
    logprobs_TK: Tensor
    #: Derivative of the loss by the hidden states, in their format.
    gradient_TH: Tensor
    #: Entropy of the predicted distribution in nats, for tokens of which exactly one target has a
    #: gradient; otherwise NaN.
    entropy_T: Tensor


class Head:
    def __init__(self, weight_VH: Tensor, bias_V: Tensor | None) -> None:
        # On a CPU the product is always in float32: bfloat16 logits are too coarse for importance
        # ratios, and this copy is cheaper than converting the weight at every step.
        keep = weight_VH.dtype if weight_VH.is_cuda else torch.float32
        self.weight_VH = weight_VH.detach().to(keep)
        self.bias_V = None if bias_V is None else bias_V.detach().float()
        self.vocab_size = weight_VH.shape[0]
        self.chunk_tokens = max(16, CHUNK_BYTES[weight_VH.device.type] // (4 * self.vocab_size))

    def logits(self, hidden_TH: Tensor, segments: Sequence[AdapterSegment] = ()) -> Tensor:
        return self._project(hidden_TH.to(self.weight_VH.dtype), lora_slices_of(segments, HEAD))

    def write_logits(self, hidden_TH: Tensor, out_TV: Tensor) -> None:
        """The logits of the base model, into memory that stays where it is."""
        mm_float32(hidden_TH, self.weight_VH.t(), out=out_TV)
        if self.bias_V is not None:
            out_TV += self.bias_V

    def chunks(self, hidden_TH: Tensor, segments: Sequence[AdapterSegment]) -> Iterator[Chunk]:
        hidden_TH = hidden_TH.to(self.weight_VH.dtype)
        whole = lora_slices_of(segments, HEAD)
        for start in range(0, len(hidden_TH), self.chunk_tokens):
            span = slice(start, min(start + self.chunk_tokens, len(hidden_TH)))
            lora_slices = [
                LoraSlice(max(s.start, span.start) - start, min(s.stop, span.stop) - start, s.pair)
                for s in whole
                if s.start < span.stop and s.stop > span.start
            ]
            hidden_tH = hidden_TH[span]
            yield Chunk(span, hidden_tH, self._project(hidden_tH, lora_slices), lora_slices)

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
        The logprobs, and the gradient of the loss by the hidden states.

        Also adds the gradients of the output LoRA pairs to their adapters. A loss that needs the
        logprobs of several chunks calls `logprobs` first and provides the derivatives here. The
        logits are then computed twice, still one chunk at a time.
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
            # dL/dlogits = onehot·g - softmax·Σg, and its product with the logits is the slope.
            # Solved for the mean logit, this gives the entropy without another computation over
            # the vocabulary.
            found_t = (slope_t - (g_tK * logprobs_tK).sum(dim=1)) / g_tK.sum(dim=1)
            # With several derivatives for one token, their sum may be near zero, and the quotient
            # would be inaccurate.
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
        dL/dhidden of one chunk, and Σ dL/dlogit · logit of each token.

        From g = dL/dlogp: dL/dlogits = onehot·g - softmax·Σg.
        """
        # Prompt tokens have weight zero in most batches: exclude them from both products.
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
        # Except for the bias, the logits are linear in the hidden states.
        slope_t = (chunk.hidden_tH * gradient_tH).sum(dim=1)
        if self.bias_V is not None:
            slope_t[used] += dlogits_uV @ self.bias_V
        return gradient_tH, slope_t

    def _backward_lora_slices(
        self, chunk: Chunk, used_t: Tensor, dlogits_uV: Tensor, gradient_tH: Tensor
    ) -> None:
        tokens_u = used_t.nonzero().squeeze(1)
        for start, stop, pair in chunk.lora_slices:
            mine = (tokens_u >= start) & (tokens_u < stop)
            tokens_m = tokens_u[mine]
            dlogits_mV = dlogits_uV if len(tokens_m) == len(tokens_u) else dlogits_uV[mine]
            hidden_mH = chunk.hidden_tH[tokens_m].float()
            A_RH, B_VR = pair.A_RI.float(), pair.B_OR.float()
            dh_mR = (dlogits_mV @ B_VR).mul_(pair.scale)
            if pair.grad_A_RI is not None:
                pair.grad_A_RI.addmm_(dh_mR.t(), hidden_mH)
            if pair.grad_B_OR is not None:
                h_mR = (hidden_mH @ A_RH.t()).mul_(pair.scale)
                pair.grad_B_OR.addmm_(dlogits_mV.t(), h_mR)
            gradient_tH.index_add_(0, tokens_m, (dh_mR @ A_RH).to(gradient_tH.dtype))


def gathered(logits_tV: Tensor, targets_tK: Tensor) -> tuple[Tensor, Tensor]:
    """
    Logprobs [t, K] of the targets, and the divisor [t, 1] of the softmax.

    Overwrites the logits with exp(logit - largest). Divided by the divisor this is the softmax,
    which the gradient needs; the exponentials are most of the work.
    """
    largest_t1 = logits_tV.amax(dim=1, keepdim=True)
    own_tK = logits_tV.gather(1, targets_tK) - largest_t1
    total_t1 = logits_tV.sub_(largest_t1).exp_().sum(dim=1, keepdim=True)
    return own_tK - total_t1.log(), total_t1
