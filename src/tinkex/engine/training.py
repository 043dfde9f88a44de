"""One training pass: micro-batch by micro-batch through model, head and loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tinkex.engine.adapters import TrainingAdapter
from tinkex.engine.lora import Route
from tinkex.engine.losses import Loss, value_and_gradient
from tinkex.engine.model import BaseModel
from tinkex.engine.pack import Batch, Row, micro_batches, pack
from tinkex.wire.tensors import TensorData
from tinkex.wire.training import ForwardBackwardOutput


class Pass:
    """
    The pass of one request, in steps of one micro-batch, so that others can run in between.

    Sums are kept in float64 and gradients in float32, so how the rows are cut into micro-batches
    changes the result by rounding only.
    """

    def __init__(
        self,
        model: BaseModel,
        adapter: TrainingAdapter,
        loss: Loss,
        rows: Sequence[Row],
        *,
        backward: bool,
        max_tokens: int,
    ) -> None:
        self._model, self._adapter, self._loss = model, adapter, loss
        self._backward = backward
        self._batches: Iterator[list[Row]] = micro_batches(rows, max_tokens)
        self._outputs: list[dict[str, TensorData]] = []
        self._loss_sum = 0.0
        self._tokens = 0

    def step(self) -> bool:
        """Runs the next micro-batch; False when there is none left."""
        rows = next(self._batches, None)
        if rows is None:
            return False
        batch = pack(rows, self._model.device)
        logprobs_TK = self._run(batch).cpu()
        start = 0
        for row in rows:
            stop = start + len(row.tokens_N)
            mine = logprobs_TK[start:stop, : row.targets_NK.shape[1]].reshape(row.shape)
            self._outputs.append({"logprobs": TensorData.from_torch(mine)})
            start = stop
        self._tokens += start
        return True

    def output(self) -> ForwardBackwardOutput:
        return ForwardBackwardOutput(
            loss_fn_output_type="ArrayRecord",
            loss_fn_outputs=self._outputs,
            metrics={"loss:sum": self._loss_sum, "tokens:sum": float(self._tokens)},
        )

    def _run(self, batch: Batch) -> Tensor:
        routes = (Route(0, len(batch.ids_T), self._adapter.pairs),)
        hidden_TH = self._model.hidden(batch.ids_T, batch.packing, routes, gradients=self._backward)
        head = self._model.head
        if not self._backward:
            logprobs_TK = head.logprobs(hidden_TH, batch.targets_TK, routes)
            self._add_loss(self._loss.terms(logprobs_TK, batch.inputs_TK))
            return logprobs_TK

        def loss_gradient(rows: slice, logprobs_tK: Tensor) -> Tensor:
            inputs = {name: values[rows] for name, values in batch.inputs_TK.items()}
            terms_tK, gradient_tK = value_and_gradient(self._loss, logprobs_tK, inputs)
            self._add_loss(terms_tK)
            return gradient_tK

        logprobs_TK, gradient_TH = head.logprobs_and_gradient(
            hidden_TH.detach(), batch.targets_TK, routes, loss_gradient
        )
        hidden_TH.backward(gradient_TH)  # type: ignore[no-untyped-call]
        return logprobs_TK

    def _add_loss(self, terms_TK: Tensor) -> None:
        self._loss_sum += float(terms_TK.sum(dtype=torch.float64))
