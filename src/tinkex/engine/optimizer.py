"""AdamW over one flat vector, with decoupled decay and clipping by the global norm."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tinkex.engine.adapters import TrainingAdapter
from tinkex.wire.errors import UserFailure
from tinkex.wire.training import AdamParams

#: As torch.nn.utils.clip_grad_norm_ has it: the scale is limit / (norm + CLIP_EPS), at most 1.
CLIP_EPS = 1e-6

#: With eps 0 a weight without a gradient would become 0 / 0, and every A has none in the first
#: step. Below this float32 has no numbers to spare.
SMALLEST_EPS = 1e-30


@dataclass(frozen=True, kw_only=True)
class StepReport:
    #: Of the accumulated gradient, before clipping.
    grad_norm: float
    #: Of the change of the weights.
    update_norm: float
    learning_rate: float

    def metrics(self) -> dict[str, float]:
        return {
            "grad_norm:mean": self.grad_norm,
            "update_norm:mean": self.update_norm,
            "learning_rate:mean": self.learning_rate,
        }


def check_params(params: object) -> AdamParams:
    if not isinstance(params, AdamParams):
        kind = getattr(params, "type", type(params).__name__)
        raise UserFailure(
            f"this model was created with the adamw optimizer; parameters of type {kind!r} do "
            "not fit. Send AdamParams."
        )
    for name, low, high in (
        ("learning_rate", 0.0, math.inf),
        ("beta1", 0.0, 1.0),
        ("beta2", 0.0, 1.0),
        ("eps", SMALLEST_EPS, math.inf),
        ("weight_decay", 0.0, math.inf),
        ("grad_clip_norm", 0.0, math.inf),
    ):
        value = getattr(params, name)
        if not (math.isfinite(value) and low <= value < high):
            raise UserFailure(
                f"adam_params.{name} is {value}; it must be at least {low:g} and below {high:g}."
            )
    return params


def adamw_step(adapter: TrainingAdapter, params: AdamParams) -> StepReport:
    """
    One step from the accumulated gradient, which is zero afterwards.

    Without a gradient it is a step with a zero gradient: moments decay and weight decay applies,
    as in torch. A gradient that is not finite is refused and everything stays as it was, the
    gradient included.
    """
    grad_norm = float(torch.linalg.vector_norm(adapter.grad, dtype=torch.float64))
    if not math.isfinite(grad_norm):
        raise UserFailure(
            f"the gradient is not finite ({grad_norm}), so optimizer step {adapter.step + 1} was "
            "not taken and the weights are unchanged. Look for extreme weights or advantages in "
            "the batches before it."
        )
    if params.grad_clip_norm > 0:
        adapter.grad.mul_(min(1.0, params.grad_clip_norm / (grad_norm + CLIP_EPS)))
    before = adapter.master.clone()
    adapter.step += 1
    update_weights(
        adapter.master, adapter.grad, adapter.m, adapter.v, step=adapter.step, params=params
    )
    adapter.grad.zero_()
    adapter.refresh_live()
    moved = torch.linalg.vector_norm(adapter.master - before, dtype=torch.float64)
    return StepReport(
        grad_norm=grad_norm, update_norm=float(moved), learning_rate=params.learning_rate
    )


def update_weights(
    weights: Tensor, grad: Tensor, m: Tensor, v: Tensor, *, step: int, params: AdamParams
) -> None:
    """torch.optim.AdamW's update, in the same order: decay, moments, bias correction, eps."""
    if params.weight_decay:
        weights.mul_(1 - params.learning_rate * params.weight_decay)
    m.lerp_(grad, 1 - params.beta1)
    v.mul_(params.beta2).addcmul_(grad, grad, value=1 - params.beta2)
    correction_m = 1 - params.beta1**step
    correction_v = 1 - params.beta2**step
    # eps is added to the corrected root, so its size does not depend on the step.
    denominator = v.sqrt().div_(math.sqrt(correction_v)).add_(params.eps)
    weights.addcdiv_(m, denominator, value=-params.learning_rate / correction_m)
