"""The optimizers over one adapter's flat vectors: AdamW, and dimuon for whole matrices.

Both clip by the global norm first, refuse a gradient that is not finite and a step whose result would
not be, and leave the gradient at zero.
A step takes no memory that grows with the adapter: what it needs beside the vectors is made for a
part of them at a time, and fits what is reserved for logits, which nobody needs during a step. One
whose numbers may leave float32 is tried on copies of the parts first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tinkex.engine.adapters.adapters import TrainingAdapter
from tinkex.engine.model.lora import Layout, matrices
from tinkex.wire.errors import UserFailure
from tinkex.wire.training import AdamParams, DimuonParams, OptimParams

#: As torch.nn.utils.clip_grad_norm_ has it: the scale is limit / (norm + CLIP_EPS), at most 1.
CLIP_EPS = 1e-6

#: With eps 0 a weight without a gradient would become 0 / 0, and every A has none in the first
#: step. Below this float32 has no numbers to spare.
MIN_EPS = 1e-30

#: Weights, moments and the numbers that scale them are float32.
MAX_FLOAT32 = torch.finfo(torch.float32).max
#: Below these bounds no step can leave float32, so most steps need not be tried first.
SAFE_UPDATE = 1e30
SAFE_GRADIENT = 1e15


#: Elements of a vector of which a norm or a denominator is made at a time: 128 MB in float64. A norm
#: in one part has the bits it always had, so this is more than most adapters have.
PART_ELEMENTS = 2**24
#: The same for dimuon, which works with about six copies of the matrices.
STACK_ELEMENTS = 2**22


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


#: What each family of optimizers is stepped with.
PARAMS = {"adamw": AdamParams, "dimuon": DimuonParams}


def check_params(family: str, params: object) -> AdamParams | DimuonParams:
    """The parameters of a step of this family, within their ranges."""
    wanted = PARAMS[family]
    if not isinstance(params, wanted):
        kind = "adamw" if isinstance(params, AdamParams) else getattr(params, "type", "unknown")
        raise UserFailure(
            f"this model was created with the {family} optimizer; parameters of type {kind!r} do "
            f"not fit. Send {wanted.__name__}."
        )
    where = "adam_params" if family == "adamw" else "optimizer_params"
    for name, low, high in (
        ("learning_rate", 0.0, MAX_FLOAT32),
        ("beta1", 0.0, 1.0),
        ("beta2", 0.0, 1.0),
        ("eps", MIN_EPS, MAX_FLOAT32),
        ("weight_decay", 0.0, MAX_FLOAT32),
        ("grad_clip_norm", 0.0, math.inf),
    ):
        value = getattr(params, name, None)
        if value is not None and not (math.isfinite(value) and low <= value < high):
            raise UserFailure(
                f"{where}.{name} is {value}; it must be at least {low:g} and below {high:g}."
            )
    return params


def optimizer_step(adapter: TrainingAdapter, params: OptimParams) -> StepReport:
    """
    One step from the accumulated gradient, which is zero afterwards.

    Without a gradient it is a step with a zero gradient: moments decay and weight decay applies,
    as in torch. A gradient that is not finite is refused, and so is a step after which a weight or
    a moment would not be: everything stays as it was, the gradient included.
    """
    checked = check_params(adapter.optimizer, params)
    grad_norm = norm(adapter.grad)
    if not math.isfinite(grad_norm):
        raise UserFailure(
            f"the gradient is not finite ({grad_norm}), so optimizer step {adapter.step + 1} was "
            "not taken and the weights are unchanged. Look for extreme weights or advantages in "
            "the batches before it."
        )
    scale = 1.0
    if checked.grad_clip_norm > 0:
        scale = min(1.0, checked.grad_clip_norm / (grad_norm + CLIP_EPS))
    if _may_overflow(adapter, checked, grad_norm) and not _stays_finite(adapter, checked, scale):
        raise _too_large(checked, grad_norm)
    if scale != 1.0:
        adapter.grad.mul_(scale)
    adapter.step += 1
    if isinstance(checked, AdamParams):
        update_weights(
            adapter.master, adapter.grad, adapter.m, adapter.v, step=adapter.step, params=checked
        )
    else:
        update_matrices(adapter.master, adapter.grad, adapter.m, adapter.layout, params=checked)
    update_norm = norm(torch.sub(adapter.master, adapter.grad, out=adapter.grad))
    adapter.grad.zero_()
    adapter.refresh_live()
    return StepReport(
        grad_norm=grad_norm, update_norm=update_norm, learning_rate=checked.learning_rate
    )


def _may_overflow(
    adapter: TrainingAdapter, params: AdamParams | DimuonParams, grad_norm: float
) -> bool:
    """Whether the step has to be tried first; `UserFailure` for factors that float32 cannot hold."""
    if isinstance(params, AdamParams):
        factor = params.learning_rate / (1 - params.beta1 ** (adapter.step + 1))
        decay = params.learning_rate * params.weight_decay
        moment = float(torch.linalg.vector_norm(adapter.m, ord=math.inf))
        largest = max(grad_norm, moment) / params.eps
    else:
        placements = adapter.layout.placements.values()
        widest = max(max(*placement.shape_A, *placement.shape_B) for placement in placements)
        factor = params.learning_rate * UPDATE_RMS * math.sqrt(widest)
        decay, largest = 0.0, 1.0
    if max(factor, decay) >= MAX_FLOAT32:
        raise _too_large(params, grad_norm)
    return factor * largest >= SAFE_UPDATE or decay > 2 or grad_norm >= SAFE_GRADIENT


def _stays_finite(
    adapter: TrainingAdapter, params: AdamParams | DimuonParams, scale: float
) -> bool:
    """Whether a step's weights, moments and change are finite. Changes nothing."""
    grad, weights, m = adapter.grad, adapter.master, adapter.m
    if isinstance(params, AdamParams):
        for parts in zip(
            *(torch.split(each, PART_ELEMENTS // 4) for each in (weights, grad, m, adapter.v)),
            strict=True,
        ):
            new, old, *moments = (part.clone() for part in parts)
            old.mul_(scale)
            update_weights(new, old, *moments, step=adapter.step + 1, params=params)
            if not _are_finite(new, *moments, old.sub_(new)):
                return False
        return True
    for shape, (momenta, targets, grads) in _by_shape(adapter.layout, m, weights, grad):
        momentum = torch.stack(momenta).lerp_(torch.stack(grads).mul_(scale), 1 - params.beta1)
        old = torch.stack(targets)
        new = old.sub(orthogonalized(momentum), alpha=_step_length(params, shape))
        if not _are_finite(new, momentum, old.sub_(new)):
            return False
    return True


def _are_finite(*tensors: Tensor) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def _too_large(params: AdamParams | DimuonParams, grad_norm: float) -> UserFailure:
    return UserFailure(
        f"this optimizer step would make weights that float32 cannot hold (beyond {MAX_FLOAT32:.2g}): "
        f"learning_rate {params.learning_rate:g}, norm of the gradient {grad_norm:g}. No step was "
        "taken and the weights are unchanged. Use a smaller learning rate; 1e-5 to 1e-3 are usual."
    )


def norm(flat: Tensor) -> float:
    """The Euclidean norm, added up in float64; torch makes a float64 copy of what it is given."""
    parts = [
        torch.linalg.vector_norm(part, dtype=torch.float64)
        for part in torch.split(flat, PART_ELEMENTS)
    ]
    return float(parts[0] if len(parts) == 1 else torch.linalg.vector_norm(torch.stack(parts)))


def update_weights(
    weights: Tensor, grad: Tensor, m: Tensor, v: Tensor, *, step: int, params: AdamParams
) -> None:
    """
    torch.optim.AdamW's update: moments, decay, bias correction, eps.

    Leaves the weights as they were where the gradient was: nobody needs it any more.
    """
    m.lerp_(grad, 1 - params.beta1)
    v.mul_(params.beta2).addcmul_(grad, grad, value=1 - params.beta2)
    grad.copy_(weights)
    if params.weight_decay:
        weights.mul_(1 - params.learning_rate * params.weight_decay)
    correction_m = 1 - params.beta1**step
    correction_v = 1 - params.beta2**step
    for w, m_part, v_part in zip(
        *(torch.split(each, PART_ELEMENTS) for each in (weights, m, v)), strict=True
    ):
        # eps is added to the corrected root, so its size does not depend on the step.
        denominator = v_part.sqrt().div_(math.sqrt(correction_v)).add_(params.eps)
        w.addcdiv_(m_part, denominator, value=-params.learning_rate / correction_m)


# -- dimuon ---------------------------------------------------------------------------------------

#: Of the quintic a·s + b·s³ + c·s⁵ that drives every singular value s towards 1, as in Muon.
QUINTIC = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5

#: The root mean square of an update at learning rate 1. AdamW's is about this, so learning rates
#: that are right for AdamW are right here too.
UPDATE_RMS = 0.2

#: Only a momentum of zeros is smaller.
MIN_NORM = 1e-30


def update_matrices(
    weights: Tensor, grad: Tensor, m: Tensor, layout: Layout, *, params: DimuonParams
) -> None:
    """
    Muon's update for every A and B by itself: M <- beta1·M + (1 - beta1)·G, W <- W - lr·s·O(M).

    O takes the singular values to about 1, so every direction that the momentum has moves by the
    same amount; s = 0.2·sqrt(max(rows, columns)) makes the update's root mean square 0.2. Leaves the
    weights as they were where the gradient was, as AdamW's does.
    """
    m.lerp_(grad, 1 - params.beta1)
    grad.copy_(weights)
    for shape, (momenta, targets) in _by_shape(layout, m, weights):
        step = _step_length(params, shape)
        for target, update in zip(targets, orthogonalized(torch.stack(momenta)), strict=True):
            target.sub_(update, alpha=step)


def _step_length(params: DimuonParams, shape: tuple[int, int]) -> float:
    return params.learning_rate * UPDATE_RMS * math.sqrt(max(shape))


def orthogonalized(stack: Tensor) -> Tensor:
    """Each matrix of [n, rows, columns] with its singular values taken to about 1."""
    a, b, c = QUINTIC
    tall = stack.shape[1] > stack.shape[2]
    x: Tensor = stack.mT if tall else stack
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=MIN_NORM)
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if tall else x


def _by_shape(
    layout: Layout, *vectors: Tensor
) -> Iterator[tuple[tuple[int, int], list[list[Tensor]]]]:
    """
    The same matrices of each vector, those of one shape together.

    Layers are alike, and one product serves many.
    """
    groups: dict[tuple[int, int], list[tuple[Tensor, ...]]] = {}
    for placement in layout.placements.values():
        for same in zip(*(matrices(vector, placement) for vector in vectors), strict=True):
            groups.setdefault((same[0].shape[0], same[0].shape[1]), []).append(same)
    for shape, members in groups.items():
        count = max(1, STACK_ELEMENTS // (shape[0] * shape[1]))
        for start in range(0, len(members), count):
            yield shape, [list(each) for each in zip(*members[start : start + count], strict=True)]
