"""The optimizers AdamW and dimuon, which update the flat vectors of an adapter in place.

AdamW updates every weight by itself, dimuon every matrix as a whole. Both first clip the gradient
by its global norm, refuse a gradient or a result that is not finite, and reset the gradient to zero
at the end.

The vectors are processed in parts, so the temporary memory of a step does not grow with the
adapter. It fits the memory reserved for logits, which is unused during a step. If a step might
overflow float32, it is first computed on copies, so that a refused step changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tinkex.engine.adapters.adapters import TrainingAdapter
from tinkex.engine.model.lora import matrices
from tinkex.engine.model.targets import Layout
from tinkex.wire.errors import UserFailure
from tinkex.wire.training import AdamParams, DimuonParams, OptimParams

if TYPE_CHECKING:
    from tinkex.engine.ranks.shard import Division, Shard

#: As in torch.nn.utils.clip_grad_norm_: the scale is limit / (norm + CLIP_EPS), at most 1.
CLIP_EPS = 1e-6

#: Minimum eps of AdamW. With eps 0, a weight whose gradients were all zero would change by 0 / 0.
#: In the first step this is the case for every A, because B is zero. Values below this minimum are
#: too close to the smallest float32.
MIN_EPS = 1e-30

#: Limit of weights, moments and their scale factors, which are all float32.
MAX_FLOAT32 = torch.finfo(torch.float32).max
#: Below these bounds no step can overflow float32, so most steps are not computed on copies first.
SAFE_UPDATE = 1e30
SAFE_GRADIENT = 1e15


#: Elements of a vector that are processed at a time: 128 MB in float64. A norm that is summed in
#: several parts has other last bits. Most adapters are smaller than this, so their norms are those
#: of one sum.
PART_ELEMENTS = 2**24
#: The same for dimuon, which needs about six copies of the matrices.
STACK_ELEMENTS = 2**22


@dataclass(frozen=True, kw_only=True)
class StepReport:
    #: Norm of the accumulated gradient, before clipping.
    grad_norm: float
    #: Norm of the change of the weights.
    update_norm: float
    learning_rate: float

    def metrics(self) -> dict[str, float]:
        return {
            "grad_norm:mean": self.grad_norm,
            "update_norm:mean": self.update_norm,
            "learning_rate:mean": self.learning_rate,
        }


#: The step parameters of each optimizer family.
PARAMS = {"adamw": AdamParams, "dimuon": DimuonParams}


def check_params(family: str, params: object) -> AdamParams | DimuonParams:
    """The step parameters. Raises `UserFailure` for another family or a value out of range."""
    expected = PARAMS[family]
    if not isinstance(params, expected):
        kind = "adamw" if isinstance(params, AdamParams) else getattr(params, "type", "unknown")
        raise UserFailure(
            f"this model was created with the {family} optimizer; it cannot use parameters of type "
            f"{kind!r}. Send {expected.__name__}."
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
    One step with the accumulated gradient, which is zero afterwards.

    Without a pass since the last step, the gradient is zero: moments decay and weight decay
    applies, as in torch. A gradient that is not finite is refused, and so is a step after which a
    weight or a moment would not be finite. A refused step changes nothing, not even the gradient.
    """
    checked = check_params(adapter.optimizer, params)
    shard = adapter.shard
    if shard is not None:
        shard.sum_shared(adapter.grad, adapter.layout)
    try:
        return _step(adapter, checked)
    except UserFailure:
        if shard is not None:
            shard.keep_once(adapter.grad, adapter.layout)
        raise


def _step(adapter: TrainingAdapter, checked: AdamParams | DimuonParams) -> StepReport:
    grad_norm = _norm(adapter, adapter.grad)
    if not math.isfinite(grad_norm):
        raise UserFailure(
            f"the gradient is not finite ({grad_norm}), so optimizer step {adapter.step + 1} was "
            "not taken and the weights are unchanged. Look for extreme weights or advantages in "
            "the preceding batches."
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
        update_matrices(
            *(adapter.master, adapter.grad, adapter.m, adapter.layout),
            params=checked,
            shard=adapter.shard,
        )
    update_norm = _norm(adapter, torch.sub(adapter.master, adapter.grad, out=adapter.grad))
    adapter.grad.zero_()
    adapter.refresh_live()
    return StepReport(
        grad_norm=grad_norm, update_norm=update_norm, learning_rate=checked.learning_rate
    )


def _may_overflow(
    adapter: TrainingAdapter, params: AdamParams | DimuonParams, grad_norm: float
) -> bool:
    """Whether the step might overflow. Raises `UserFailure` if one of its factors does."""
    if isinstance(params, AdamParams):
        factor = params.learning_rate / (1 - params.beta1 ** (adapter.step + 1))
        decay = params.learning_rate * params.weight_decay
        moment = float(torch.linalg.vector_norm(adapter.m, ord=math.inf))
        if adapter.shard is not None:
            moment = adapter.shard.group.largest(moment)
        largest = max(grad_norm, moment) / params.eps
    else:
        placements = adapter.whole_layout.placements.values()
        widest = max(max(*placement.shape_A, *placement.shape_B) for placement in placements)
        factor = params.learning_rate * UPDATE_RMS * math.sqrt(widest)
        decay, largest = 0.0, 1.0
    if max(factor, decay) >= MAX_FLOAT32:
        raise _too_large(params, grad_norm)
    return factor * largest >= SAFE_UPDATE or decay > 2 or grad_norm >= SAFE_GRADIENT


def _stays_finite(
    adapter: TrainingAdapter, params: AdamParams | DimuonParams, scale: float
) -> bool:
    """Whether the weights, moments and change of a step are finite, computed on copies."""
    finite = _is_finite_step(adapter, params, scale)
    if adapter.shard is None:
        return finite
    return not adapter.shard.group.largest(not finite)


def _is_finite_step(
    adapter: TrainingAdapter, params: AdamParams | DimuonParams, scale: float
) -> bool:
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
    finite = True
    for like, (momenta, targets, grads) in _by_shape(
        adapter.layout, m, weights, grad, shard=adapter.shard
    ):
        momentum = torch.stack(momenta).lerp_(torch.stack(grads).mul_(scale), 1 - params.beta1)
        old = torch.stack(targets)
        new = old.sub(like.orthogonalized(momentum), alpha=_step_length(params, like.shape))
        # Not returned at once: all ranks compute the same matrices together.
        finite = finite and _are_finite(new, momentum, old.sub_(new))
    return finite


def _are_finite(*tensors: Tensor) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def _too_large(params: AdamParams | DimuonParams, grad_norm: float) -> UserFailure:
    return UserFailure(
        f"this optimizer step would make weights beyond the range of float32 ({MAX_FLOAT32:.2g}): "
        f"learning_rate {params.learning_rate:g}, gradient norm {grad_norm:g}. No step was taken "
        "and the weights are unchanged. Use a smaller learning rate; 1e-5 to 1e-3 are usual."
    )


def _norm(adapter: TrainingAdapter, flat: Tensor) -> float:
    """The norm of the whole vector, of which a rank has a part."""
    if adapter.shard is None:
        return norm(flat)
    parts = adapter.shard.own_parts(flat, adapter.layout)
    own = math.sqrt(sum(norm(part) ** 2 for part in parts))
    return adapter.shard.norm(own)


def norm(flat: Tensor) -> float:
    """The Euclidean norm in float64, in parts: torch makes a float64 copy of its input."""
    parts = [
        torch.linalg.vector_norm(part, dtype=torch.float64)
        for part in torch.split(flat, PART_ELEMENTS)
    ]
    return float(parts[0] if len(parts) == 1 else torch.linalg.vector_norm(torch.stack(parts)))


def update_weights(
    weights: Tensor, grad: Tensor, m: Tensor, v: Tensor, *, step: int, params: AdamParams
) -> None:
    """
    The update of torch.optim.AdamW: moments, decay, bias correction, eps.

    Stores the old weights in `grad`, which is no longer needed.
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
        # eps is added to the bias-corrected root, so its effect does not depend on the step.
        denominator = v_part.sqrt().div_(math.sqrt(correction_v)).add_(params.eps)
        w.addcdiv_(m_part, denominator, value=-params.learning_rate / correction_m)


# -- dimuon ---------------------------------------------------------------------------------------

#: Coefficients of a·s + b·s³ + c·s⁵, which drives every singular value s towards 1, as in Muon.
QUINTIC = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5

#: Root mean square of an update at learning rate 1. It is about that of AdamW, so learning rates
#: for AdamW are suitable here too.
UPDATE_RMS = 0.2

#: Only a momentum of zeros has a smaller norm.
MIN_NORM = 1e-30


def update_matrices(
    weights: Tensor,
    grad: Tensor,
    m: Tensor,
    layout: Layout,
    *,
    params: DimuonParams,
    shard: Shard | None = None,
) -> None:
    """
    Muon's update of every A and B separately: M <- beta1·M + (1 - beta1)·G, W <- W - lr·s·O(M).

    O maps the singular values to about 1, so every direction of the momentum moves by the same
    amount; s = 0.2·sqrt(max(rows, columns)) makes the root mean square of the update 0.2. Stores
    the old weights in `grad`, as `update_weights` does. With `shard`, each rank makes the update
    of whole matrices, and takes its part of it.
    """
    m.lerp_(grad, 1 - params.beta1)
    grad.copy_(weights)
    for like, (momenta, targets) in _by_shape(layout, m, weights, shard=shard):
        step = _step_length(params, like.shape)
        for target, update in zip(targets, like.orthogonalized(torch.stack(momenta)), strict=True):
            target.sub_(update, alpha=step)


def _step_length(params: DimuonParams, shape: tuple[int, int]) -> float:
    return params.learning_rate * UPDATE_RMS * math.sqrt(max(shape))


def orthogonalized(stack: Tensor) -> Tensor:
    """Each matrix of [n, rows, columns] with its singular values mapped to about 1."""
    a, b, c = QUINTIC
    tall = stack.shape[1] > stack.shape[2]
    x: Tensor = stack.mT if tall else stack
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=MIN_NORM)
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if tall else x


@dataclass(frozen=True)
class _Alike:
    """Matrices of one whole shape, of which all ranks have parts of the same kind."""

    shape: tuple[int, int]
    division: Division | None = None
    shard: Shard | None = None

    def orthogonalized(self, stack: Tensor) -> Tensor:
        if self.shard is None:
            return orthogonalized(stack)
        whole = self.shard.whole_matrices(stack, self.division)
        return self.shard.own_matrices(orthogonalized(whole), self.division)


def _by_shape(
    layout: Layout, *vectors: Tensor, shard: Shard | None = None
) -> Iterator[tuple[_Alike, list[list[Tensor]]]]:
    """
    Groups the matrices of each vector by shape.

    Layers have equal shapes, so one batched product handles many matrices.
    """
    groups: dict[_Alike, list[tuple[Tensor, ...]]] = {}
    for name, placement in layout.placements.items():
        own = (matrices(vector, placement) for vector in vectors)
        for letter, same in zip("AB", zip(*own, strict=True), strict=True):
            shape = (same[0].shape[-2], same[0].shape[-1])
            like = _Alike(shape) if shard is None else _Alike(*shard.alike(name, letter, shape))
            # A factor with a matrix for each expert is that many matrices.
            each = zip(*(tensor.reshape(-1, *shape) for tensor in same), strict=True)
            groups.setdefault(like, []).extend(each)
    for like, members in groups.items():
        count = max(1, STACK_ELEMENTS // (like.shape[0] * like.shape[1]))
        for start in range(0, len(members), count):
            yield like, [list(each) for each in zip(*members[start : start + count], strict=True)]
