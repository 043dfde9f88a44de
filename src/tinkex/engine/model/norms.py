"""RMS norms as one kernel, in decode steps that a CUDA graph records.

transformers' code of a norm starts seven kernels, and a layer has two to six norms. A norm is
recognized by what it computes: families differ in whether one is added to the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tinkex.engine.model.lora import AdapterContext

#: By how much the results may differ, as a fraction of the largest.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


def replace_norms(model: nn.Module, context: AdapterContext) -> int:
    """Makes the RMS norms of a model one kernel in recorded steps. Returns how many there are."""
    found = 0
    for module in model.modules():
        if hasattr(module, "recorded_weight"):
            continue
        weight, eps = recorded_weight(module), _eps(module)
        if weight is not None and eps is not None:
            module.register_buffer("recorded_weight", weight, persistent=False)
            module.forward = partial(_forward, module, module.forward, context, eps)
            found += 1
    return found


def recorded_weight(module: Any) -> Tensor | None:
    """What the normed numbers are multiplied with; None if the module is no RMS norm."""
    weight, eps = getattr(module, "weight", None), _eps(module)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or eps is None:
        return None
    if len(list(module.parameters())) != 1 or weight.dtype not in TOLERANCE:
        return None
    size = len(weight)
    x = torch.linspace(-2, 3, 2 * size, device=weight.device).view(2, size).to(weight.dtype)
    try:
        with torch.no_grad():
            expected = module(x).float()
    except Exception:  # noqa: BLE001  a module with other inputs
        return None
    normed = x.float() * torch.rsqrt(x.float().square().mean(dim=1, keepdim=True) + eps)
    own = weight.detach()
    for candidate in (own, 1.0 + own.float()):
        gap = (normed * candidate.float() - expected).abs().max()
        if expected.shape == x.shape and gap <= TOLERANCE[weight.dtype] * expected.abs().max():
            return candidate
    return None


def _eps(module: Any) -> float | None:
    found = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return found if isinstance(found, float) else None


def _forward(
    module: Any,
    original: Callable[..., Tensor],
    context: AdapterContext,
    eps: float,
    *inputs: Tensor,
    **others: Any,
) -> Tensor:
    if context.recorded is None or len(inputs) != 1 or others:
        return original(*inputs, **others)
    from tinkex.engine.model import decode_ops as ops

    (x,) = inputs
    weight: Tensor = module.recorded_weight
    normed = ops.add_norm(x.reshape(-1, len(weight)).contiguous(), None, weight, eps)
    return normed.view(x.shape)
