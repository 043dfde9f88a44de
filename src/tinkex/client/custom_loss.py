"""
Custom losses: computed by the client between two passes, or traced and run by the server.

In the client: a forward pass returns logprobs, and autograd differentiates the loss with respect
to each of them. A `cross_entropy` pass computes the sum of -weight * logprob; with the negative
derivatives as weights it adds exactly the gradient of the custom loss.
"""

from __future__ import annotations

import contextvars
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Concatenate, TypeAlias, TypeVar, Union

from tinkex.client import loss_tracing, user_warnings, validation
from tinkex.client.batching import merge
from tinkex.client.futures import Promise
from tinkex.client.http.polling import ExpectedResult
from tinkex.client.observe.queue_states import QueueLog
from tinkex.client.submission import Accepted, StepSubmitter, pass_parts, pass_result
from tinkex.extras import needs
from tinkex.wire.custom_loss import (
    CreateCustomLossRequest,
    CreateCustomLossResponse,
    CustomLossInput,
    CustomLossInputRank,
)
from tinkex.wire.inputs import Datum
from tinkex.wire.tensors import TensorData
from tinkex.wire.training import ForwardBackwardOutput

if TYPE_CHECKING:
    import torch
    from torch import fx

    from tinkex.client.connection import Connection
    from tinkex.client.session import Session
    from tinkex.client.training import TrainingClient

T = TypeVar("T")

#: The loss of one datum: `fn(logprobs, *inputs)` returns a scalar, and scalars by metric name.
PerDatumLossFn: TypeAlias = Callable[
    Concatenate["torch.Tensor", ...], tuple["torch.Tensor", Mapping[str, "torch.Tensor"]]
]
#: The loss of a batch: `fn(data, logprobs)` with a tensor of logprobs for each datum.
CustomLossFnV1: TypeAlias = Callable[
    [list[Datum], list["torch.Tensor"]], tuple["torch.Tensor", Mapping[str, Any]]
]
CustomLoss: TypeAlias = Union[CustomLossFnV1, "LossHandle"]


@dataclass(frozen=True)
class LossHandle:
    """A traced loss, for the training clients of the session that created it."""

    name: str
    #: The inputs of each datum. The first, `logprobs`, is computed by the model.
    inputs: tuple[CustomLossInput, ...]
    session_id: str
    graph: fx.GraphModule = field(repr=False)
    #: The server's id of the loss; None if it runs in the client.
    loss_id: str | None = None

    @property
    def key(self) -> str:
        """Equal for losses that compute the same function."""
        return loss_tracing.digest(self.graph, self.inputs)

    @property
    def input_names(self) -> tuple[str, ...]:
        """The `loss_fn_inputs` that the loss reads."""
        return tuple(each.name for each in self.inputs[1:])


def need_torch() -> None:
    with needs("A custom loss"):
        import torch  # noqa: F401


# -- making a handle -----------------------------------------------------------------------------


def create(
    holder: Session, fn: PerDatumLossFn, input_ranks: Mapping[str, CustomLossInputRank]
) -> Promise[LossHandle]:
    """Trace the loss now, and upload it if the server runs custom losses."""
    need_torch()
    traced = loss_tracing.trace(fn, input_ranks)
    key = loss_tracing.digest(traced.module, traced.inputs)
    if key in holder.losses:
        raise ValueError(
            f"custom loss {traced.name!r}: this session already has the same loss, created as "
            f"{holder.losses[key]!r}. Use the handle of the first create_custom_loss()."
        )
    holder.losses[key] = traced.name

    async def work() -> LossHandle:
        try:
            connection, session_id = await holder.open()
            loss_id = None
            if connection.config.custom_loss_server_side:
                loss_id = await _upload(holder, connection, session_id, traced)
        except BaseException:
            holder.losses.pop(key, None)  # allows another attempt
            raise
        return LossHandle(traced.name, traced.inputs, session_id, traced.module, loss_id)

    return holder.run(work())


async def _upload(
    holder: Session, connection: Connection, session_id: str, traced: loss_tracing.Traced
) -> str:
    created = await holder.submit(
        connection,
        "create_custom_loss",
        CreateCustomLossRequest(
            session_id=session_id,
            custom_loss_seq_id=holder.next_loss_number(),
            name=traced.name,
            inputs=list(traced.inputs),
            graph=traced.graph,
        ),
        ExpectedResult(request_type="CreateCustomLoss", answer=CreateCustomLossResponse),
        observer=QueueLog(
            f"Creation of the loss {traced.name}", telemetry=lambda: holder.telemetry
        ),
    )
    return created.loss_id


# -- a step with a custom loss -------------------------------------------------------------------


def start(
    client: TrainingClient,
    steps: StepSubmitter,
    data: Sequence[Datum],
    loss_fn: CustomLoss,
    loss_type_input: str | None,
) -> Promise[Promise[ForwardBackwardOutput]]:
    """
    Start a step with a custom loss. The outer future resolves to the future of the step.

    It resolves once the loss is computed, not earlier: the function may read variables that its
    caller changes afterwards, and a failing loss must be known before `optim_step` is called.
    """
    need_torch()
    if loss_type_input is not None:
        user_warnings.warn(
            "loss_type_input is deprecated: a custom loss always gets logprobs.",
            DeprecationWarning,
        )
        if loss_type_input != "logprobs":
            raise ValueError(f"loss_type_input is {loss_type_input!r}; only 'logprobs' exists.")
    given = validation.examples(data)
    data = [validation.snapshot(datum) for datum in given]
    if isinstance(loss_fn, LossHandle):
        _check_fits(loss_fn, client.holder.session_id, data)
        if loss_fn.loss_id is not None:
            started: Promise[Promise[ForwardBackwardOutput]] = Promise()
            started.finish(client.forward_backward(data, "custom", {"loss_id": loss_fn.loss_id}))
            return started
        return _run_locally(client.model_id, steps, data, data, _summed(loss_fn))
    if not callable(loss_fn):
        raise TypeError(
            f"loss_fn is a {type(loss_fn).__name__}; it must be a function of (data, logprobs), or "
            "a LossHandle from create_custom_loss()."
        )
    return _run_locally(client.model_id, steps, given, data, loss_fn)


def _run_locally(
    model_id: str,
    steps: StepSubmitter,
    given: list[Datum],
    data: list[Datum],
    loss_fn: CustomLossFnV1,
) -> Promise[Promise[ForwardBackwardOutput]]:
    """
    Run both passes, and the loss between them, as one step.

    The loss gets the `given` objects, since it may identify them by `id()`. The passes send `data`,
    a snapshot that the caller cannot change.
    """
    forward = pass_parts(
        model_id,
        [_for_cross_entropy(index, datum) for index, datum in enumerate(data)],
        forward_only=True,
    )
    context = contextvars.copy_context()
    computed: list[Computed] = []
    started: Promise[Promise[ForwardBackwardOutput]] = Promise()

    def loss(logprobs: list[TensorData]) -> Computed:
        with steps.running_loss():
            return compute(loss_fn, given, logprobs)

    async def send(promise: Promise[ForwardBackwardOutput]) -> tuple[Connection, list[Accepted]]:
        passed = await steps.fetch(*await steps.send(forward), pass_result("Forward"))
        logprobs = _logprobs(merge(passed).loss_fn_outputs, len(data))
        computed.append(await _on_a_thread(lambda: context.run(loss, logprobs)))
        weighted = [
            _for_cross_entropy(index, datum, weights)
            for index, (datum, weights) in enumerate(zip(data, computed[0].weights, strict=True))
        ]
        started.finish(promise)
        return await steps.send(pass_parts(model_id, weighted, forward_only=False))

    promise = steps.submit_with(
        send,
        pass_result("ForwardBackward"),
        lambda results: computed[0].with_loss(merge(results)),
    )
    promise.add_done_callback(lambda done: started.fail(done.exception() or _not_computed()))
    return started


def _not_computed() -> RuntimeError:
    return RuntimeError("The step ended before its loss was computed.")


def _for_cross_entropy(index: int, datum: Datum, weights: TensorData | None = None) -> Datum:
    """The datum reduced to what `cross_entropy` reads."""
    targets = datum.loss_fn_inputs.get("target_tokens")
    if targets is None:
        raise ValueError(
            f"data[{index}] has no target_tokens, so there are no logprobs for a custom loss. "
            f"Its loss_fn_inputs are {sorted(datum.loss_fn_inputs)}."
        )
    if weights is None:
        weights = datum.loss_fn_inputs.get("weights") or _zeros(targets)
    return Datum(
        model_input=datum.model_input,
        loss_fn_inputs={"target_tokens": targets, "weights": weights},
        model_input_spans=datum.model_input_spans,
        loss_fn_input_spans=datum.loss_fn_input_spans,
    )


def _zeros(like: TensorData) -> TensorData:
    import numpy as np

    return TensorData(data=np.zeros(like.size, dtype=np.float32), dtype="float32", shape=like.shape)


def _logprobs(outputs: Sequence[Mapping[str, TensorData]], count: int) -> list[TensorData]:
    found = [output["logprobs"] for output in outputs if "logprobs" in output]
    if len(found) != count:
        raise ValueError(
            f"The server returned logprobs for {len(found)} of {count} datums; a custom loss needs "
            "them all."
        )
    return found


async def _on_a_thread(work: Callable[[], T]) -> T:
    """
    Run `work` on a new thread.

    The loop's thread pool has other work, which a long loss would delay. The thread is a daemon, so
    that an endless loss does not keep the program from exiting.
    """
    outcome: Promise[T] = Promise()

    def run() -> None:
        try:
            outcome.finish(work())
        except Exception as error:  # noqa: BLE001 (raised where it is awaited)
            outcome.fail(error)
        except BaseException as error:  # noqa: BLE001 (an exit() in a loss is not the loop's end)
            outcome.fail(RuntimeError(f"The custom loss ended with {error!r}."))

    threading.Thread(target=run, name="tinkex-loss", daemon=True).start()
    return await outcome


# -- the loss and its derivative -----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Computed:
    """The value and derivatives of a custom loss at given logprobs."""

    loss: float
    metrics: Mapping[str, float]
    #: For each datum, the negative derivative of the loss with respect to its logprobs.
    weights: Sequence[TensorData]

    def with_loss(self, output: ForwardBackwardOutput) -> ForwardBackwardOutput:
        """The server's result of the second pass, with the value and metrics of this loss."""
        metrics = {**output.metrics, **self.metrics, "loss:sum": self.loss}
        if "loss:sum" in output.metrics:
            metrics["surrogate_loss:sum"] = output.metrics["loss:sum"]
        return ForwardBackwardOutput(
            loss_fn_output_type=output.loss_fn_output_type,
            loss_fn_outputs=output.loss_fn_outputs,
            metrics=metrics,
        )


def compute(
    loss_fn: CustomLossFnV1, data: Sequence[Datum], logprobs: Sequence[TensorData]
) -> Computed:
    """Call the user's function and differentiate its result. Raises `ValueError` if it cannot."""
    with needs("A custom loss"):
        import torch

    leaves = [each.to_torch().requires_grad_() for each in logprobs]
    with torch.enable_grad():
        loss, metrics = _checked(loss_fn(list(data), list(leaves)))
        # Not torch.autograd.grad: a loss may have parameters of its own, which need gradients too.
        loss.sum().backward()  # type: ignore[no-untyped-call]
    return Computed(
        loss=float(loss.detach().sum()),
        metrics=metrics,
        weights=[_weights(index, leaf.grad) for index, leaf in enumerate(leaves)],
    )


def _checked(answer: Any) -> tuple[torch.Tensor, dict[str, float]]:
    with needs("A custom loss"):
        import torch

    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise ValueError(
            f"The custom loss returned a {type(answer).__name__}; it must return a pair: the loss, "
            "a tensor, and a dict of metrics."
        )
    loss, metrics = answer
    if not isinstance(loss, torch.Tensor):
        raise ValueError(  # noqa: TRY004 (every wrong answer of a loss is one kind of error)
            f"The custom loss is a {type(loss).__name__}; it must be a torch.Tensor."
        )
    if loss.numel() != 1:
        raise ValueError(f"The custom loss has shape {tuple(loss.shape)}; it must be one number.")
    if not loss.requires_grad:
        raise ValueError(
            "The custom loss has no gradient: it does not depend on the logprobs it was given, or "
            "was detached from them (.item(), .detach(), numpy)."
        )
    if not isinstance(metrics, Mapping):
        raise ValueError(  # noqa: TRY004 (as above)
            f"The metrics are a {type(metrics).__name__}; they must be a dict."
        )
    try:
        return loss, {str(name): _number(value) for name, value in metrics.items()}
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"Every metric must be one number: {error}") from error


def _number(value: Any) -> float:
    # Torch warns when a tensor that requires grad is converted to a number.
    return float(value.detach() if hasattr(value, "detach") else value)


def _weights(index: int, gradient: torch.Tensor | None) -> TensorData:
    if gradient is None:
        raise ValueError(
            f"The custom loss has no gradient for data[{index}]: it does not use the logprobs of "
            "that datum. Leave the datum out, or add `0 * logprobs[i].sum()`."
        )
    if not bool(gradient.isfinite().all()):
        raise ValueError(
            f"The gradient of the custom loss for data[{index}] is not finite everywhere; the "
            "step was not sent."
        )
    return TensorData.from_torch(-gradient)


# -- handles -------------------------------------------------------------------------------------


def _check_fits(handle: LossHandle, session_id: str | None, data: Sequence[Datum]) -> None:
    if handle.session_id != session_id:
        raise ValueError(
            f"The loss {handle.name!r} belongs to session {handle.session_id}, this client to "
            f"{session_id}. Create it with the ServiceClient that this client comes from."
        )
    for index, datum in enumerate(data):
        for wanted in handle.inputs:
            # The logprobs have the shape of the targets.
            name = "target_tokens" if wanted.name == "logprobs" else wanted.name
            tensor = datum.loss_fn_inputs.get(name)
            if tensor is None:
                raise ValueError(
                    f"data[{index}] has no {name!r}, which the loss {handle.name!r} needs. Its "
                    f"loss_fn_inputs are {sorted(datum.loss_fn_inputs)}."
                )
            rank = 1 if tensor.shape is None else len(tensor.shape)
            if rank != wanted.rank:
                raise ValueError(
                    f"data[{index}]: {name!r} has rank {rank}; the loss {handle.name!r} was "
                    f"created for rank {wanted.rank}."
                )


def _summed(handle: LossHandle) -> CustomLossFnV1:
    """The loss of a handle over a batch: summed over datums; metrics are summed or averaged."""

    def loss_fn(
        data: list[Datum], logprobs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        with needs("A custom loss"):
            import torch

        losses = []
        values: dict[str, list[float]] = {}
        for datum, leaf in zip(data, logprobs, strict=True):
            inputs = [datum.loss_fn_inputs[name].to_torch() for name in handle.input_names]
            # A copy: the loss may modify its arguments, and a leaf tensor cannot be modified.
            loss, metrics = handle.graph(leaf.clone(), *inputs)
            losses.append(loss.reshape(()))
            for name, value in metrics.items():
                values.setdefault(name, []).append(_number(value))
        return torch.stack(losses).sum(), {
            name: math.fsum(each) / (len(each) if name.endswith(":mean") else 1)
            for name, each in values.items()
        }

    return loss_fn
