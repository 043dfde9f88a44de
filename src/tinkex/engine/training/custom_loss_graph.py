"""
Interprets custom losses: a graph from a request is checked, then run one node at a time.

The graph is untrusted. `custom_loss_parser` accepts only operations listed in `custom_loss_ops`.
Here every argument is checked against its signature (`custom_loss_arguments`), the size of every
result is checked before it is computed (`custom_loss_sizes`), and each run has limits on time and
elements.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tinkex.engine.training.custom_loss_arguments import Device, checked
from tinkex.engine.training.custom_loss_ops import Operation, checked_result
from tinkex.engine.training.custom_loss_parser import Ref, Slice, Step, check_inputs, parse_nodes
from tinkex.engine.training.custom_loss_sizes import (
    MAX_RANK,
    Refused,
    elements,
    shown,
    tensors_in,
)
from tinkex.wire.custom_loss import CustomLossGraph, CustomLossInput
from tinkex.wire.errors import UserFailure

__all__ = ["Graph"]

MAX_NAME = 256

#: Maximum elements of one value: this many, or MAX_GROWTH times those of the largest input.
MAX_VALUE_ELEMENTS = 8 * 2**20  # 64 MiB of float64
MAX_GROWTH = 64
#: Limits of a whole run, as multiples of the limit above. Autograd keeps everything written until
#: the backward pass; the elements read bound the time of that pass.
MAX_WRITTEN = 8
MAX_TOUCHED = 32


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Graph:
    """A custom loss that passed all checks without data. Made by `parse`."""

    name: str
    inputs: tuple[CustomLossInput, ...]
    _steps: tuple[Step, ...]
    _loss: str
    #: Metric name -> node name.
    _metrics: Mapping[str, str]

    @classmethod
    def parse(cls, name: str, inputs: Sequence[CustomLossInput], graph: CustomLossGraph) -> Graph:
        """Checks a graph. `UserFailure` names the node, the problem and what is allowed."""
        try:
            if len(name) > MAX_NAME:
                raise Refused(
                    f"its name has {len(name)} characters; at most {MAX_NAME} are allowed"
                )
            check_inputs(inputs)
            steps, loss, metrics = parse_nodes(inputs, graph.nodes)
        except Refused as refusal:
            raise UserFailure(f"custom loss {shown(name)}: {refusal}") from None
        return cls(name, tuple(inputs), steps, loss, metrics)

    def run(
        self,
        logprobs: Tensor,
        inputs: Mapping[str, Tensor],
        *,
        deadline_s: float | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """
        The loss of one datum, differentiable by `logprobs`, and its metrics.

        `logprobs` are those of the model; an input of that name is ignored. A run that takes longer
        than `deadline_s` seconds is refused. A loss that is not finite is returned unchanged: the
        optimizer step refuses its gradient with a better message.
        """
        return self._results(logprobs, inputs, _Deadline(deadline_s), watched=False)

    def value_and_gradient(
        self,
        logprobs: Tensor,
        inputs: Mapping[str, Tensor],
        *,
        deadline_s: float | None = None,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The loss, its derivative by each logprob, and the metrics, all within `deadline_s`."""
        leaf = logprobs.detach().requires_grad_()
        loss, metrics = self._results(leaf, inputs, _Deadline(deadline_s), watched=True)
        try:
            (gradient,) = torch.autograd.grad(loss, leaf, allow_unused=True)
        except torch.OutOfMemoryError:
            raise
        except (Refused, RuntimeError) as error:
            # For example, an in-place change of a value that its gradient needs.
            raise UserFailure(
                f"custom loss {shown(self.name)}: the backward pass failed: {_first_line(error)}"
            ) from None
        if gradient is None:
            gradient = torch.zeros_like(leaf)
        return loss.detach(), gradient, metrics

    def _results(
        self, logprobs: Tensor, inputs: Mapping[str, Tensor], deadline: _Deadline, *, watched: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        # Torch warns about unusual values (such as the deviation of one element) in the server's
        # log, where the user does not see it.
        with torch.set_grad_enabled(logprobs.requires_grad), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                values = self._run(logprobs, inputs, deadline, watched=watched)
                loss = _loss(values[self._loss], wants_gradient=logprobs.requires_grad)
                metrics = {
                    name: _metric(name, values[node], logprobs.device)
                    for name, node in self._metrics.items()
                }
            except Refused as refusal:
                raise UserFailure(f"custom loss {shown(self.name)}: {refusal}") from None
        return loss, metrics

    def _run(
        self, logprobs: Tensor, inputs: Mapping[str, Tensor], deadline: _Deadline, *, watched: bool
    ) -> dict[str, Any]:
        given = [logprobs, *(_input_tensor(declared, inputs) for declared in self.inputs[1:])]
        for declared, tensor in zip(self.inputs, given, strict=True):
            if tensor.dim() != declared.rank:
                raise Refused(
                    f"input {declared.name!r} has {tensor.dim()} dimensions; "
                    f"the loss expects {declared.rank}"
                )
        # The graph may write into them, but they may be views of the whole batch.
        given = [tensor.clone() for tensor in given]
        budget = _Budget(given)
        values: dict[str, Any] = {}
        waiting = iter(given)
        for step in self._steps:
            deadline.check(step.where)
            if step.operation is None:
                values[step.name] = next(waiting)
                continue
            result = _run_step(step, step.operation, values, budget, logprobs.device)
            values[step.name] = result
            if watched and isinstance(result, Tensor) and result.requires_grad:
                deadline.watch(result, step.where)
        return values

    def __repr__(self) -> str:
        inputs = ", ".join(declared.name for declared in self.inputs)
        return f"<Graph {self.name}({inputs}) of {len(self._steps)} nodes>"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300]


#: What torch and Python raise for wrong arguments.
_ERRORS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def _run_step(
    step: Step,
    operation: Operation,
    values: Mapping[str, Any],
    budget: _Budget,
    device: torch.device,
) -> Any:
    args = [_resolve(arg, values, device) for arg in step.args]
    kwargs = {key: _resolve(arg, values, device) for key, arg in step.kwargs.items()}
    try:
        bound = checked(step.slots, (*args, *kwargs.values()))
        size = operation.size(**bound)
        kept = operation.kept(**bound) if operation.kept else 0
        work = operation.work(**bound) if operation.work else 0
        read = sum(tensor.numel() for tensor in tensors_in(bound.values()))
        budget.allow(size, kept, read + work)
        if operation.makes:
            kwargs["device"] = device
        result = checked_result(operation.call(*args, **kwargs))
        budget.spend(result)
    except torch.OutOfMemoryError:
        raise  # a failure of the server, not of the user
    except Refused as refusal:
        raise Refused(f"{step.where}: {refusal}") from None
    except _ERRORS as error:
        raise Refused(f"{step.where}: {_first_line(error)}") from None
    return result


def _resolve(arg: Any, values: Mapping[str, Any], device: torch.device) -> Any:
    kind = type(arg)  # runs for every argument of every datum: faster than pattern matching
    if kind is Ref:
        return values[arg.node]
    if kind is tuple or kind is list:
        return kind(_resolve(item, values, device) for item in arg)
    if kind is Slice:
        return slice(*(_resolve(part, values, device) for part in arg))
    return device if kind is Device else arg


# ---- limits, inputs and results -----------------------------------------------------------------


class _Deadline:
    """Time limit of one run, checked before each node and during the backward pass."""

    def __init__(self, limit_s: float | None) -> None:
        self._stop_at = math.inf if limit_s is None else time.monotonic() + limit_s

    def check(self, where: str) -> None:
        if time.monotonic() > self._stop_at:
            raise Refused(
                f"{where}: the time limit for one datum is exceeded; "
                "use fewer or smaller operations, or shorter data"
            )

    def watch(self, result: Tensor, where: str) -> None:
        """Checks the deadline when the gradient of `result` is computed."""
        if self._stop_at < math.inf:
            result.register_hook(lambda _: self.check(where))  # type: ignore[no-untyped-call]


class _Budget:
    """Elements that one run may still write, and those that it may still read, write or process."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        widest = max(tensor.numel() for tensor in inputs)
        self.largest = max(MAX_VALUE_ELEMENTS, MAX_GROWTH * widest)
        self._to_write = MAX_WRITTEN * self.largest
        self._to_touch = MAX_TOUCHED * self.largest

    def allow(self, size: int, kept: int, processed: int) -> None:
        """Called before an operation: refuses a result that would be too large."""
        if size > self.largest:
            raise Refused(
                f"the result would have {size} elements; at most {self.largest} are allowed"
            )
        self._to_touch -= size + kept + processed
        self._to_write -= kept
        if size > self._to_write or self._to_touch < 0:
            raise Refused(
                "the operations of the loss together read or write too many elements; "
                f"the limits for this datum are {MAX_TOUCHED * self.largest} read, written or "
                f"multiplied, and {MAX_WRITTEN * self.largest} written"
            )

    def spend(self, result: Any) -> None:
        for tensor in tensors_in((result,)):
            self._to_write -= tensor.numel()
            if (size := elements(tensor.shape)) > self.largest:
                # It takes no memory, but a later reduction over its empty dimension would.
                raise Refused(
                    f"the result has shape {list(tensor.shape)}, which counts as {size} elements "
                    f"(an empty dimension counts as one); at most {self.largest} are allowed"
                )
            if tensor.dim() > MAX_RANK:
                raise Refused(
                    f"the result has {tensor.dim()} dimensions; at most {MAX_RANK} are allowed"
                )


def _input_tensor(declared: CustomLossInput, inputs: Mapping[str, Tensor]) -> Tensor:
    tensor = inputs.get(declared.name)
    if tensor is None:
        has = ", ".join(sorted(inputs)) or "none"
        raise Refused(f"the datum has no input {declared.name!r}; it has {has}")
    return tensor


def _loss(value: Any, *, wants_gradient: bool) -> Tensor:
    if not isinstance(value, Tensor):
        raise Refused(f"the loss is a {type(value).__name__}; it must be a tensor with one element")
    if value.numel() != 1:
        raise Refused(
            f"the loss has shape {list(value.shape)}; it must be a single number: use sum()"
        )
    if not value.dtype.is_floating_point:
        raise Refused(f"the loss is of {value.dtype}; it must be a floating-point number")
    if wants_gradient and not value.requires_grad:
        raise Refused(
            "the loss has no gradient by the logprobs: "
            "it uses them only through detach(), comparisons or integers"
        )
    return value.reshape(())


def _metric(name: str, value: Any, device: torch.device) -> Tensor:
    if isinstance(value, int | float):
        return torch.tensor(float(value), device=device)
    if not isinstance(value, Tensor) or value.numel() != 1:
        shape = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise Refused(f"metric {name!r} is of {shape}; it must be a single number")
    return value.detach().reshape(())
