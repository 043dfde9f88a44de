"""Training passes: run in micro-batches through the base model, the output head and the loss.

A micro-batch may mix passes of different models, ranks and losses. They share the computation of
the base model, and each adds only to the gradient of its own adapter.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.adapters.adapters import TrainingAdapter
from tinkex.engine.device import deterministic_kernels
from tinkex.engine.model import model_experts
from tinkex.engine.model.base_model import BaseModel
from tinkex.engine.model.lm_head import Head, LossGradient
from tinkex.engine.model.lora import AdapterSegment
from tinkex.engine.model.vision_tower import ImageRows, SequencePart
from tinkex.engine.ranks.process_group import ProcessGroup, agreed
from tinkex.engine.training.batch import pack, pack_inputs
from tinkex.engine.training.expert_metrics import expert_metrics
from tinkex.engine.training.losses import (
    AnyLoss,
    Loss,
    LossValue,
    evaluate_loss,
    value_and_gradient,
)
from tinkex.engine.training.request_checks import CheckedDatum
from tinkex.wire.errors import UserFailure
from tinkex.wire.tensors import TensorData
from tinkex.wire.training import ForwardBackwardOutput

# T packed tokens of a batch, t of a part, N of one datum, K targets of a token, H hidden size

#: Time limits of custom losses, for one datum and for a whole request.
MAX_LOSS_S_PER_DATUM = 5.0
MAX_LOSS_S_PER_REQUEST = 60.0


class Pass:
    """
    The pass of one request: its waiting data and the results of the others.

    Sums are kept in float64 and gradients in float32, so the division into micro-batches changes
    the result only by rounding.
    """

    def __init__(
        self,
        model_id: str,
        loss: AnyLoss,
        data: Sequence[CheckedDatum],
        *,
        backward: bool,
        group: ProcessGroup | None = None,
    ) -> None:
        """With `group`, all ranks have this pass, and rank 0 evaluates a custom loss."""
        self._group = group
        self.model_id, self.loss, self.backward = model_id, loss, backward
        self.lengths = [len(datum.tokens_N) for datum in data]
        #: Why the request failed; its remaining data are not run.
        self.failure: UserFailure | None = None
        self._data = data
        self._taken = 0
        self._outputs: list[dict[str, TensorData]] = []
        self._sums = {"loss:sum": 0.0, "tokens:sum": 0.0}
        if backward:
            self._sums |= {"loss_tokens:sum": 0.0, "entropy:sum": 0.0}
        #: Metrics of custom losses: name -> sum over the data.
        self._custom: dict[str, float] = {}
        #: How often its tokens chose each expert of each layer; None for a dense model.
        self._expert_counts_LE: Tensor | None = None
        self._seconds_left = MAX_LOSS_S_PER_REQUEST

    @property
    def waiting(self) -> Sequence[int]:
        """Token counts of the data that have not run yet."""
        return [] if self.failure is not None else self.lengths[self._taken :]

    def take(self, count: int, adapter: TrainingAdapter) -> PassSlice:
        """Takes the next `count` data for a micro-batch."""
        data = self._data[self._taken : self._taken + count]
        self._taken += len(data)
        tokens = sum(len(datum.tokens_N) for datum in data)
        return PassSlice(owner=self, adapter=adapter, data=data, tokens=tokens)

    def output(self) -> ForwardBackwardOutput:
        if self.failure is not None:
            raise self.failure
        count = len(self._outputs)
        custom = {
            name: value / count if name.endswith(":mean") else value
            for name, value in self._custom.items()
        }
        return ForwardBackwardOutput(
            loss_fn_output_type="ArrayRecord",
            loss_fn_outputs=self._outputs,
            metrics=self._sums | custom | self._expert_metrics(),
        )

    def _expert_metrics(self) -> dict[str, float]:
        return {} if self._expert_counts_LE is None else expert_metrics(self._expert_counts_LE)

    def count_experts(self, counts_LE: Tensor) -> None:
        """Adds the choices of a micro-batch."""
        if self._expert_counts_LE is None:
            self._expert_counts_LE = torch.zeros_like(counts_LE)
        self._expert_counts_LE += counts_LE

    def evaluate(self, datum: CheckedDatum, logprobs_NK: Tensor) -> LossValue | None:
        """Evaluates a whole-datum loss. Returns None once the request has failed."""
        if self.failure is not None:
            return None
        # Custom losses run on the CPU, where an error is raised at once and belongs to this
        # request. A GPU reports errors later, when they can no longer be attributed.
        if not isinstance(self.loss, Loss):
            logprobs_NK = logprobs_NK.cpu()
        inputs = {
            name: torch.from_numpy(np.ascontiguousarray(values)).to(logprobs_NK.device)
            for name, values in datum.inputs_NK.items()
        }
        if isinstance(self.loss, Loss):
            loss_value = evaluate_loss(self.loss, logprobs_NK, inputs, backward=self.backward)
        else:
            began_s = time.monotonic()
            custom = self.loss
            try:
                # It has time limits, and other rounding must not decide a branch of its graph.
                loss_value = agreed(
                    self._group,
                    lambda: evaluate_loss(
                        custom,
                        logprobs_NK.reshape(datum.shape),
                        inputs,
                        backward=self.backward,
                        deadline_s=min(MAX_LOSS_S_PER_DATUM, self._seconds_left),
                    ),
                )
            except UserFailure as failure:
                self.failure = failure
                return None
            self._seconds_left -= time.monotonic() - began_s
        self._sums["loss:sum"] += loss_value.value
        for name, value in loss_value.metrics.items():
            self._custom[name] = self._custom.get(name, 0.0) + value
        return loss_value

    def record(self, results: TokenResults, data: Sequence[CheckedDatum]) -> None:
        """Records the results of a micro-batch for the next data of this pass."""
        start = 0
        for datum in data:
            stop = start + len(datum.tokens_N)
            own = results.logprobs_tK[start:stop, : datum.targets_NK.shape[1]].reshape(datum.shape)
            self._outputs.append({"logprobs": TensorData.from_torch(own)})
            start = stop
        self._sums["loss:sum"] += float(results.terms_t.sum())
        self._sums["tokens:sum"] += start
        if results.entropy_t is not None:
            counts_t = results.entropy_t.isfinite()
            self._sums["loss_tokens:sum"] += float(counts_t.sum())
            self._sums["entropy:sum"] += float(results.entropy_t[counts_t].sum(dtype=torch.float64))


@dataclass(frozen=True, kw_only=True, eq=False)
class PassSlice:
    """Data of one pass in a micro-batch."""

    owner: Pass
    adapter: TrainingAdapter
    data: Sequence[CheckedDatum]
    tokens: int


class TokenResults(NamedTuple):
    """Results of the tokens of a pass slice, on the CPU."""

    logprobs_tK: Tensor
    #: Float64 loss of each token; zero for whole-datum losses.
    terms_t: Tensor
    #: None for passes without gradients.
    entropy_t: Tensor | None


class HostCopies:
    """Copies of tensors on the host. A GPU makes them while it goes on with other work."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        self._copies = list(tensors)
        if tensors[0].is_cuda:
            # Pinned: only then does a copy not wait for the device.
            self._copies = [
                torch.empty_like(each, device="cpu", pin_memory=True).copy_(each, non_blocking=True)
                for each in tensors
            ]
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> Sequence[Tensor]:
        """Waits for the copies, not for later work."""
        if self._event is not None:
            self._event.synchronize()
        return self._copies


class LossSegment(NamedTuple):
    """Adjacent tokens with the same per-token loss."""

    loss: Loss
    start: int
    stop: int
    inputs_tK: dict[str, Tensor]


def run_micro_batch(
    model: BaseModel,
    parts: Sequence[PassSlice],
    *,
    deterministic: bool = False,
    checkpoint: bool = False,
) -> None:
    """
    Runs one micro-batch. Either all parts have gradients or none has.

    With `checkpoint` its gradients take less memory and more time, where that is implemented.
    """
    # Equal losses and equal adapters become adjacent, so each needs one evaluation or product.
    # Whole-datum losses come last, so that the head computes all others together.
    parts = sorted(
        parts,
        key=lambda part: (
            part.owner.loss.whole_datum,
            part.owner.loss.name,
            part.owner.model_id,
        ),
    )
    backward = parts[0].owner.backward
    batch = pack([datum for part in parts for datum in part.data], model.device)
    segments = adapter_segments_of(parts)
    images = image_rows_of(model, parts)
    run_backward = None
    if backward:
        hidden_TH, run_backward = model.hidden_with_backward(
            batch.ids_T, batch.packing, segments, images, checkpoint=checkpoint
        )
    else:
        hidden_TH = model.hidden(batch.ids_T, batch.packing, segments, images)
    counts_PLE = model_experts.counted(model.experts, [part.tokens for part in parts])
    expert_counts = None if counts_PLE is None else HostCopies([counts_PLE])
    evaluator = LossEvaluator(model, parts, batch.targets_TK, backward=backward)
    gradient_TH = evaluator.run(hidden_TH, segments)
    # Before the backward pass: on a GPU results are then read while it runs.
    results = evaluator.results()
    if gradient_TH is not None and run_backward is not None:
        with deterministic_kernels(deterministic):
            run_backward(gradient_TH)
    distribute(results, parts)
    if expert_counts is not None:
        for part, counts_LE in zip(parts, expert_counts.read()[0], strict=True):
            part.owner.count_experts(counts_LE)


def image_rows_of(model: BaseModel, parts: Sequence[PassSlice]) -> list[ImageRows]:
    """The features of all images in a micro-batch; kept for the model that is trained."""
    if model.vision is None:
        return []
    return model.vision.rows(
        SequencePart(datum.images, 0, len(datum.tokens_N), f"model {part.owner.model_id}")
        for part in parts
        for datum in part.data
    )


def adapter_segments_of(parts: Sequence[PassSlice]) -> list[AdapterSegment]:
    """The tokens of each adapter; adjacent parts of one adapter are one segment."""
    segments: list[AdapterSegment] = []
    start = 0
    for part in parts:
        stop, pairs = start + part.tokens, part.adapter.pairs
        if segments and segments[-1].pairs is pairs:
            segments[-1] = segments[-1]._replace(stop=stop)
        else:
            segments.append(AdapterSegment(start, stop, pairs))
        start = stop
    return segments


def segments_between(
    segments: Sequence[AdapterSegment], start: int, stop: int
) -> list[AdapterSegment]:
    """The segments of tokens `start` to `stop`, with positions relative to `start`."""
    return [
        AdapterSegment(
            max(segment.start, start) - start, min(segment.stop, stop) - start, segment.pairs
        )
        for segment in segments
        if segment.start < stop and segment.stop > start
    ]


class LossEvaluator:
    """Evaluates head and losses on the hidden states of one micro-batch."""

    def __init__(
        self, model: BaseModel, parts: Sequence[PassSlice], targets_TK: Tensor, *, backward: bool
    ) -> None:
        self._head: Head = model.head
        self._targets_TK, self._backward = targets_TK, backward
        self._per_token = [part for part in parts if not part.owner.loss.whole_datum]
        self._whole_datum = [part for part in parts if part.owner.loss.whole_datum]
        self._loss_segments = loss_segments_of(self._per_token, model.device)
        #: Tokens before this index have per-token losses.
        self._split = sum(part.tokens for part in self._per_token)
        self._logprobs_TK = torch.empty(targets_TK.shape, device=model.device)
        self._terms_T = torch.zeros(len(targets_TK), dtype=torch.float64, device=model.device)
        self._entropy_T = torch.empty(len(targets_TK), device=model.device)

    def run(self, hidden_TH: Tensor, segments: Sequence[AdapterSegment]) -> Tensor | None:
        """Returns the gradient with respect to the hidden states; None for a forward pass."""
        gradients = []
        if self._per_token:
            gradients.append(self._run_per_token(hidden_TH, segments))
        if self._whole_datum:
            gradients.append(self._run_whole_datum(hidden_TH, segments))
        if not self._backward:
            return None
        return gradients[0] if len(gradients) == 1 else torch.cat(gradients)

    def results(self) -> HostCopies:
        """The results of all tokens, in the order of the fields of `TokenResults`."""
        results = [self._logprobs_TK, self._terms_T]
        return HostCopies([*results, self._entropy_T] if self._backward else results)

    def _run_per_token(self, hidden_TH: Tensor, segments: Sequence[AdapterSegment]) -> Tensor:
        span = slice(0, self._split)
        segments = segments_between(segments, span.start, span.stop)
        hidden_tH, targets_tK = hidden_TH[span], self._targets_TK[span]
        if self._backward:
            return self._run_head(span, hidden_tH, segments, self._per_token_gradient)
        self._logprobs_TK[span] = self._head.logprobs(hidden_tH, targets_tK, segments)
        for loss, start, stop, inputs_tK in self._loss_segments:
            width = next(iter(inputs_tK.values())).shape[1]
            terms_tK = loss.terms(self._logprobs_TK[start:stop, :width], inputs_tK)
            self._terms_T[start:stop] = terms_tK.sum(dim=1, dtype=torch.float64)
        return hidden_tH

    def _per_token_gradient(self, chunk: slice, logprobs_tK: Tensor) -> Tensor:
        """dL/dlogp of one chunk, which may overlap several loss segments."""
        g_tK = torch.zeros_like(logprobs_tK)
        for loss, first, last, inputs_tK in self._loss_segments:
            start, stop = max(first, chunk.start), min(last, chunk.stop)
            if start >= stop:
                continue
            inputs = {
                name: values[start - first : stop - first] for name, values in inputs_tK.items()
            }
            width = next(iter(inputs.values())).shape[1]
            own = slice(start - chunk.start, stop - chunk.start)
            terms_tK, gradient_tK = value_and_gradient(loss, logprobs_tK[own, :width], inputs)
            self._terms_T[start:stop] = terms_tK.sum(dim=1, dtype=torch.float64)
            g_tK[own, :width] = gradient_tK
        return g_tK

    def _run_whole_datum(self, hidden_TH: Tensor, segments: Sequence[AdapterSegment]) -> Tensor:
        """Computes all logprobs, then the losses, then runs the head with their derivatives."""
        span = slice(self._split, len(hidden_TH))
        segments = segments_between(segments, span.start, span.stop)
        hidden_tH, targets_tK = hidden_TH[span], self._targets_TK[span]
        logprobs_tK = self._head.logprobs(hidden_tH, targets_tK, segments)
        self._logprobs_TK[span] = logprobs_tK
        g_tK = torch.zeros_like(logprobs_tK)
        start = 0
        for part in self._whole_datum:
            for datum in part.data:
                own = slice(start, start + len(datum.tokens_N))
                width = datum.targets_NK.shape[1]
                loss_value = part.owner.evaluate(datum, logprobs_tK[own, :width])
                if loss_value is not None and loss_value.gradient is not None:
                    g_tK[own, :width] = loss_value.gradient.reshape(-1, width)
                start = own.stop
        if not self._backward:
            return hidden_tH
        return self._run_head(span, hidden_tH, segments, lambda chunk, _: g_tK[chunk])

    def _run_head(
        self,
        span: slice,
        hidden_tH: Tensor,
        segments: Sequence[AdapterSegment],
        loss_gradient: LossGradient,
    ) -> Tensor:
        logprobs_tK, gradient_tH, entropy_t = self._head.logprobs_and_gradient(
            hidden_tH, self._targets_TK[span], segments, loss_gradient
        )
        self._logprobs_TK[span] = logprobs_tK
        self._entropy_T[span] = entropy_t
        return gradient_tH


def distribute(results: HostCopies, parts: Sequence[PassSlice]) -> None:
    """Gives each pass the results of its tokens."""
    logprobs_TK, terms_T, *entropy = results.read()
    start = 0
    for part in parts:
        span = slice(start, start + part.tokens)
        entropy_t = entropy[0][span] if entropy else None
        part.owner.record(TokenResults(logprobs_TK[span], terms_T[span], entropy_t), part.data)
        start = span.stop


def loss_segments_of(parts: Sequence[PassSlice], device: torch.device) -> list[LossSegment]:
    """Joins adjacent parts with the same loss, together with their loss inputs."""
    loss_segments: list[LossSegment] = []
    start = 0
    data: list[CheckedDatum] = []
    for index, part in enumerate(parts):
        data.extend(part.data)
        loss = part.owner.loss
        next_loss = parts[index + 1].owner.loss if index + 1 < len(parts) else None
        if next_loss is loss:
            continue
        assert isinstance(loss, Loss)
        stop = start + sum(len(datum.tokens_N) for datum in data)
        loss_segments.append(LossSegment(loss, start, stop, pack_inputs(data, device)))
        start, data = stop, []
    return loss_segments
