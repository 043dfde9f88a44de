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
from tinkex.engine.model.step_memory import logit_tokens
from tinkex.engine.model.targets import HEAD

# T packed tokens, t tokens of one chunk, H hidden size, V vocabulary, K targets of a token, R rank

#: Maps a span of tokens and their logprobs [t, K] to the derivative of the loss by each logprob.
LossGradient = Callable[[slice, Tensor], Tensor]


class Chunk(NamedTuple):
    span: slice
    hidden_tH: Tensor
    #: Float32. The receiver may overwrite them.
    logits_tV: Tensor
    lora_slices: Sequence[LoraSlice]


class Softmax(NamedTuple):
    """Logprobs [t, K] of the targets, and what the gradient needs of the softmax."""

    logprobs_tK: Tensor
    #: exp(logit - largest) on a CPU, where the exponentials are most of the work; else the logits.
    values_tV: Tensor
    #: [t]: the divisor of these values, or the log-sum-exp of the logits.
    total_t: Tensor


class HeadGradient(NamedTuple):
    logprobs_TK: Tensor
    #: Derivative of the loss by the hidden states, in their format.
    gradient_TH: Tensor
    #: Entropy of the predicted distribution in nats, for tokens of which exactly one target has a
    #: gradient; otherwise NaN.
    entropy_T: Tensor


class Head:
    def __init__(
        self, weight_VH: Tensor, bias_V: Tensor | None, *, softcap: float | None = None
    ) -> None:
        """With `softcap` logits are softcap · tanh(logit / softcap)."""
        # On a CPU the product is always in float32: bfloat16 logits are too coarse for importance
        # ratios, and this copy is cheaper than converting the weight at every step.
        keep = weight_VH.dtype if weight_VH.is_cuda else torch.float32
        self.weight_VH = weight_VH.detach().to(keep)
        self.bias_V = None if bias_V is None else bias_V.detach().float()
        self.softcap = softcap
        self.vocab_size = weight_VH.shape[0]
        self.chunk_tokens = logit_tokens(weight_VH.device.type, self.vocab_size)
        #: Whether the softmax and its gradient are one kernel each. Set when they are compiled.
        self.fused = False

    def logits(self, hidden_TH: Tensor, segments: Sequence[AdapterSegment] = ()) -> Tensor:
        return self._project(hidden_TH.to(self.weight_VH.dtype), lora_slices_of(segments, HEAD))

    def whole(self, logits_tV: Tensor) -> Tensor:
        """The logits of the whole vocabulary, of which a rank has a part (`ranks.head`)."""
        return logits_tV

    def write_logits(self, hidden_TH: Tensor, out_TV: Tensor) -> None:
        """The logits of the base model without a soft cap, into memory that stays where it is."""
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
            softmax = self._softmax(chunk.logits_tV, targets_TK[chunk.span])
            logprobs_TK[chunk.span] = softmax.logprobs_tK
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
            capped_tV = None if self.softcap is None else chunk.logits_tV.clone()
            softmax = self._softmax(chunk.logits_tV, targets_tK)
            logprobs_tK = softmax.logprobs_tK
            logprobs_TK[chunk.span] = logprobs_tK
            g_tK = loss_gradient(chunk.span, logprobs_tK)
            gradient_tH, slope_t = self._backward(chunk, targets_tK, softmax, g_tK, capped_tV)
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
        for start, stop, pair, _ in lora_slices:
            h_tR = mm_float32(hidden_tH[start:stop], pair.A_RI.t().to(hidden_tH.dtype))
            h_tR = h_tR.mul_(pair.scale).to(self._format)
            add_mm_float32(logits_tV[start:stop], h_tR, pair.B_OR.t().to(self._format))
        if self.softcap is not None:
            logits_tV.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits_tV

    @property
    def _format(self) -> torch.dtype:
        """Of the factors of LoRA products: a GPU multiplies float32 many times slower."""
        return torch.bfloat16 if self.fused else torch.float32

    def _softmax(self, logits_tV: Tensor, targets_tK: Tensor) -> Softmax:
        """May overwrite the logits."""
        if self.fused:
            from tinkex.engine.model.packed_kernels import log_sum_exp

            lse_t = log_sum_exp(logits_tV)
            logprobs_tK = logits_tV.gather(1, targets_tK) - lse_t.unsqueeze(1)
            return Softmax(logprobs_tK, logits_tV, lse_t)
        largest_t1 = logits_tV.amax(dim=1, keepdim=True)
        own_tK = logits_tV.gather(1, targets_tK) - largest_t1
        powers_tV = logits_tV.sub_(largest_t1).exp_()
        total_t = powers_tV.sum(dim=1)
        return Softmax(own_tK - total_t.log().unsqueeze(1), powers_tV, total_t)

    def _logits_gradient(
        self, softmax: Softmax, rows_u: Tensor | None, targets_tK: Tensor, g_tK: Tensor
    ) -> Tensor:
        """
        dL/dlogits of some rows, or of all: onehot·g - softmax·Σg, from g = dL/dlogp.

        May overwrite the values of the softmax.
        """
        values_tV, total_t = softmax.values_tV, softmax.total_t
        if self.fused:
            from tinkex.engine.model.packed_kernels import logits_gradient

            if rows_u is None:
                rows_u = torch.arange(len(values_tV), device=values_tV.device)
            return logits_gradient(
                values_tV, rows_u, total_t, targets_tK, g_tK, self.weight_VH.dtype
            )
        if rows_u is not None:
            values_tV, total_t = values_tV[rows_u], total_t[rows_u]
            targets_tK, g_tK = targets_tK[rows_u], g_tK[rows_u]
        dlogits_uV = values_tV.mul_(-g_tK.sum(dim=1, keepdim=True) / total_t.unsqueeze(1))
        return dlogits_uV.scatter_add_(1, targets_tK, g_tK)

    def _backward(
        self,
        chunk: Chunk,
        targets_tK: Tensor,
        softmax: Softmax,
        g_tK: Tensor,
        capped_tV: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """
        dL/dhidden of one chunk, and Σ dL/dlogit · logit of each token.

        `capped_tV` are the logits of a head with a soft cap.
        """
        # Prompt tokens have weight zero in most batches: exclude them from both products.
        used_u = (g_tK != 0).any(dim=1).nonzero().squeeze(1)
        everything = len(used_u) == len(g_tK)
        dlogits_uV = self._logits_gradient(
            softmax, None if everything else used_u, targets_tK, g_tK
        )
        capped_slope_u = None
        if capped_tV is not None and self.softcap is not None:
            capped_uV = capped_tV if everything else capped_tV[used_u]
            capped_slope_u = (dlogits_uV * capped_uV).sum(dim=1)
            # The derivative by the logits before the cap, of which the rest is made.
            dlogits_uV = dlogits_uV * (1 - (capped_uV / self.softcap).square_())
        gradient_tH = mm_float32(dlogits_uV.to(self.weight_VH.dtype), self.weight_VH)
        if not everything:
            used = gradient_tH
            gradient_tH = used.new_zeros(chunk.hidden_tH.shape)
            gradient_tH[used_u] = used
        if chunk.lora_slices:
            self._backward_lora_slices(chunk, used_u, dlogits_uV, gradient_tH)
        if capped_slope_u is not None:
            slope_t = capped_slope_u.new_zeros(len(g_tK))
            slope_t[used_u] = capped_slope_u
            return gradient_tH, slope_t
        # Except for the bias, the logits are linear in the hidden states.
        slope_t = (chunk.hidden_tH * gradient_tH).sum(dim=1)
        if self.bias_V is not None:
            slope_t[used_u] += dlogits_uV.float() @ self.bias_V
        return gradient_tH, slope_t

    def _backward_lora_slices(
        self, chunk: Chunk, used_u: Tensor, dlogits_uV: Tensor, gradient_tH: Tensor
    ) -> None:
        form = self._format
        for start, stop, pair, _ in chunk.lora_slices:
            tokens_m, dlogits_mV = used_u, dlogits_uV
            if (start, stop) != (0, len(chunk.hidden_tH)):
                mine = (used_u >= start) & (used_u < stop)
                tokens_m, dlogits_mV = used_u[mine], dlogits_uV[mine]
            hidden_mH = chunk.hidden_tH[tokens_m].to(form)
            A_RH, B_VR = pair.A_RI.to(form), pair.B_OR.to(form)
            dh_mR = mm_float32(dlogits_mV, B_VR).mul_(pair.scale).to(form)
            if pair.grad_A_RI is not None:
                add_mm_float32(pair.grad_A_RI, dh_mR.t(), hidden_mH)
            if pair.grad_B_OR is not None:
                h_mR = mm_float32(hidden_mH, A_RH.t()).mul_(pair.scale).to(form)
                add_mm_float32(pair.grad_B_OR, dlogits_mV.t(), h_mR)
            gradient_tH.index_add_(0, tokens_m, mm_float32(dh_mR, A_RH).to(gradient_tH.dtype))
