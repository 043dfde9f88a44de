"""Typical custom losses with the ranks of their inputs; `data/graphs` holds their traced graphs."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

LossFn = Callable[..., tuple[Tensor, dict[str, Tensor]]]


def ppo(logprobs, old_logprobs, advantages, mask):
    ratio = torch.exp(torch.where(mask > 0, logprobs - old_logprobs, 0.0))
    clipped = ratio.clamp(0.8, 1.2)
    loss = -torch.minimum(ratio * advantages, clipped * advantages) * mask
    outside = ((ratio < 0.8) | (ratio > 1.2)).float() * mask
    return loss.sum(), {
        "custom/clip_fraction:mean": outside.sum() / mask.sum().clamp(min=1),
        "custom/tokens:sum": mask.sum(),
    }


def dual_clip_ppo(logprobs, old_logprobs, advantages):
    ratio = (logprobs - old_logprobs).exp()
    inner = torch.max(-advantages * ratio, -advantages * torch.clamp(ratio, min=0.8, max=1.2))
    outer = torch.where(advantages < 0, torch.min(-advantages * 3.0, inner), inner)
    return outer.mean() * logprobs.shape[0], {"custom/ratio:mean": ratio.mean().detach()}


def cispo(logprobs, old_logprobs, advantages):
    weight = torch.exp(logprobs - old_logprobs).detach().clamp_max(4.0)
    return -(weight * advantages * logprobs).sum(), {}


def dro(logprobs, old_logprobs, advantages, beta):
    distance = logprobs - old_logprobs
    return -(logprobs * advantages - 0.5 * beta * distance**2).sum(), {
        "custom/distance:mean": distance.abs().mean()
    }


def gspo(logprobs, old_logprobs, advantages, mask):
    chosen = mask.to(torch.bool)
    mean_ratio = torch.exp((logprobs - old_logprobs)[chosen].mean())
    per_token = mean_ratio.detach() * torch.exp(logprobs - logprobs.detach())
    loss = -torch.minimum(per_token * advantages, per_token.clip(0.9, 1.1) * advantages)
    return loss.masked_fill(~chosen, 0.0).sum(), {"custom/ratio:mean": mean_ratio}


def kl_regularised(logprobs, reference, advantages, beta):
    difference = reference - logprobs
    k3 = torch.expm1(difference) - difference
    k2 = 0.5 * difference.square()
    return (-(logprobs * advantages) + beta * k3).sum(), {
        "custom/kl/k2:mean": k2.mean(),
        "custom/kl/k3:mean": k3.mean().detach(),
    }


def entropy_regularised(logprobs, weights):
    """Several targets per position: logprobs have shape [N, K]."""
    probabilities = torch.exp(logprobs)
    share = probabilities / probabilities.sum(dim=-1, keepdim=True)
    entropy = -torch.special.xlogy(share, share).sum(-1)
    return (-(weights * logprobs).sum() - 0.01 * entropy.sum()), {
        "custom/entropy:mean": entropy.mean()
    }


def distil(logprobs, teacher):
    student = F.log_softmax(logprobs / 2.0, dim=-1)
    target = torch.softmax(teacher / 2.0, dim=-1)
    return F.kl_div(student, target, reduction="sum") * 4.0, {
        "custom/agree:mean": (student.argmax(-1) == target.argmax(-1)).float().mean()
    }


def dpo(logprobs, reference, side):
    ratio = (logprobs - reference) * side
    return -F.logsigmoid(0.1 * ratio.sum()), {"custom/margin:mean": ratio.sum()}


def unlikelihood(logprobs, weights):
    return -(weights * torch.log1p(-logprobs.exp().clamp(max=1 - 1e-6))).sum(), {}


def slices_and_shapes(logprobs, advantages):
    shifted = torch.cat([torch.zeros_like(logprobs[:1]), logprobs[:-1]], dim=0)
    pairs = logprobs.unsqueeze(0) - logprobs.unsqueeze(1)
    upper = torch.triu(pairs, diagonal=1)[..., ::2]
    stacked = torch.stack((shifted, logprobs), dim=-1).transpose(0, 1).reshape(-1)
    top, where = logprobs.max(dim=0)
    ordered = logprobs.sort(descending=True).values[: logprobs.size(0) // 2]
    row = logprobs.view(1, -1).expand(3, -1)[1, None, :, None].flatten()
    positions = torch.arange(logprobs.shape[0], device=logprobs.device, dtype=logprobs.dtype)
    loss = (
        F.softplus(upper).sum()
        + stacked.cumsum(0).mean()
        + top
        + where * 0.0
        + ordered.logsumexp(0)
        + (row * advantages * positions).sum() / math.sqrt(logprobs.shape[0])
    )
    return loss, {
        "custom/top:mean": top,
        "custom/count:sum": torch.ones_like(top) * logprobs.shape[0],
    }


def in_place(logprobs, advantages):
    """In-place operations on a tensor, on a view, and on an input."""
    total = logprobs.clone()
    total.mul_(2.0)
    total[1:3].add_(advantages[1:3])
    advantages.clamp_(min=0.0)
    total.masked_fill_(advantages == 0, 0.5)
    return (total * advantages).sum() + total.sum(), {"custom/positive:sum": advantages.sum()}


def group_normalised(logprobs, rewards, group):
    """An integer input used as an index, and group statistics by scatter and gather."""
    sums = torch.zeros(4, dtype=logprobs.dtype).scatter_add(0, group, rewards)
    counts = torch.zeros(4, dtype=logprobs.dtype).scatter_add(0, group, torch.ones_like(rewards))
    baseline = (sums / counts.clamp(min=1)).gather(0, group)
    centred = rewards - baseline
    scale = centred.std(unbiased=False) + 1e-6
    return -(logprobs * (centred / scale)).sum(), {"custom/scale:mean": scale}


def constants(logprobs, beta):
    worst = torch.full_like(logprobs, float("-inf"))
    filled = torch.where(logprobs > -1e9, logprobs, worst).to(
        torch.float64, memory_format=torch.contiguous_format
    )
    zeros = torch.zeros_like(logprobs, layout=torch.strided, device=torch.device("cpu"))
    return (filled + zeros).sum() * beta, {"custom/length:sum": logprobs.shape[0]}


LOSSES: list[tuple[LossFn, dict[str, int]]] = [
    (ppo, {"logprobs": 1, "old_logprobs": 1, "advantages": 1, "mask": 1}),
    (dual_clip_ppo, {"logprobs": 1, "old_logprobs": 1, "advantages": 1}),
    (cispo, {"logprobs": 1, "old_logprobs": 1, "advantages": 1}),
    (dro, {"logprobs": 1, "old_logprobs": 1, "advantages": 1, "beta": 0}),
    (gspo, {"logprobs": 1, "old_logprobs": 1, "advantages": 1, "mask": 1}),
    (kl_regularised, {"logprobs": 1, "reference": 1, "advantages": 1, "beta": 0}),
    (entropy_regularised, {"logprobs": 2, "weights": 2}),
    (distil, {"logprobs": 2, "teacher": 2}),
    (dpo, {"logprobs": 1, "reference": 1, "side": 1}),
    (unlikelihood, {"logprobs": 1, "weights": 1}),
    (slices_and_shapes, {"logprobs": 1, "advantages": 1}),
    (in_place, {"logprobs": 1, "advantages": 1}),
    (group_normalised, {"logprobs": 1, "rewards": 1, "group": 1}),
    (constants, {"logprobs": 1, "beta": 0}),
]
BY_NAME = {fn.__name__: (fn, ranks) for fn, ranks in LOSSES}
