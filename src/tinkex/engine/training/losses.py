"""Loss functions: pure functions from logprobs to a loss for every token.

Every loss is a sum over tokens, never a mean: a client may split a batch over several requests, and
only sums add up to the same result. Gradients are the derivatives of these functions with respect
to the logprobs; `lm_head` continues from there.

Most losses are per token, so tokens of several data are evaluated together. A whole-datum loss
(`gspo`, or a custom loss graph) is evaluated on one datum at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tinkex.engine.training.custom_loss_graph import Graph

# All tensors are [T, K]: T packed tokens with K targets each (K is 1 unless targets are 2-D).

Inputs = Mapping[str, Tensor]
Terms = Callable[[Tensor, Inputs], Tensor]


def cross_entropy(logprobs: Tensor, inputs: Inputs) -> Tensor:
    return -inputs["weights"] * logprobs


def importance_sampling(logprobs: Tensor, inputs: Inputs) -> Tensor:
    return -ratio(logprobs, inputs) * inputs["advantages"]


def ppo(logprobs: Tensor, inputs: Inputs) -> Tensor:
    r, advantages = ratio(logprobs, inputs), inputs["advantages"]
    return -torch.minimum(r * advantages, clipped(r, inputs) * advantages)


def cispo(logprobs: Tensor, inputs: Inputs) -> Tensor:
    r = ratio(logprobs, inputs).detach()
    return -clipped(r, inputs) * inputs["advantages"] * logprobs


def dro(logprobs: Tensor, inputs: Inputs) -> Tensor:
    distance = logprobs - inputs["logprobs"]
    return -(logprobs * inputs["advantages"] - 0.5 * inputs["beta"] * distance * distance)


def gspo(logprobs: Tensor, inputs: Inputs) -> Tensor:
    """PPO with one ratio for a whole datum: the geometric mean of its tokens' ratios."""
    mask = inputs["sequence_ratio_mask"]
    distance = torch.where(mask != 0, logprobs - inputs["logprobs"], 0.0).detach()
    # Request checks ensure that a datum without a masked token has zero advantages.
    sequence = torch.exp(distance.sum() / mask.sum().clamp(min=1.0))
    # Each token's ratio has the value of the sequence ratio and the token's own gradient.
    r = sequence * torch.exp(logprobs - logprobs.detach())
    advantages = inputs["advantages"]
    return -torch.minimum(r * advantages, clipped(r, inputs) * advantages)


def ratio(logprobs: Tensor, inputs: Inputs) -> Tensor:
    """The probability ratio of each token: now over when it was sampled."""
    # Clients send zeros on prompt positions. There exp() may overflow, and inf * 0 would be NaN.
    counts = inputs["advantages"] != 0
    return torch.exp(torch.where(counts, logprobs - inputs["logprobs"], 0.0))


def clipped(r: Tensor, inputs: Inputs) -> Tensor:
    """The ratio clipped to absolute bounds (0.8 means 0.8, not 1 - 0.8)."""
    return torch.clamp(r, inputs["clip_low_threshold"], inputs["clip_high_threshold"])


@dataclass(frozen=True, kw_only=True)
class Loss:
    name: str
    terms: Terms
    #: Inputs that every datum must have besides `target_tokens`, one number for each target.
    inputs: tuple[str, ...]
    #: Names and defaults of `loss_fn_config`. A datum may give one number per token instead.
    config: Mapping[str, float] = field(default_factory=dict)
    #: Whether a token may have several targets: [N, K].
    takes_2d: bool = False
    #: Whether a token's loss depends on other tokens of its datum.
    whole_datum: bool = False


LOSSES: Mapping[str, Loss] = {
    loss.name: loss
    for loss in (
        Loss(name="cross_entropy", terms=cross_entropy, inputs=("weights",), takes_2d=True),
        Loss(
            name="importance_sampling",
            terms=importance_sampling,
            inputs=("logprobs", "advantages"),
        ),
        Loss(
            name="ppo",
            terms=ppo,
            inputs=("logprobs", "advantages"),
            config={"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
        ),
        Loss(
            name="cispo",
            terms=cispo,
            inputs=("logprobs", "advantages"),
            config={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
        ),
        Loss(name="dro", terms=dro, inputs=("logprobs", "advantages"), config={"beta": 0.05}),
        Loss(
            name="gspo",
            terms=gspo,
            inputs=("logprobs", "advantages", "sequence_ratio_mask"),
            config={"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
            whole_datum=True,
        ),
    )
}

#: The `loss_fn` of passes that use a registered custom loss.
CUSTOM = "custom"


@dataclass(frozen=True, kw_only=True)
class CustomLoss:
    """A user's loss graph, run on one datum at a time with a time limit."""

    graph: Graph
    name: str = CUSTOM
    whole_datum: bool = True


AnyLoss = Loss | CustomLoss


@dataclass(frozen=True, kw_only=True)
class LossValue:
    """The loss of one datum."""

    value: float
    #: Derivative with respect to each logprob, in their shape. None for a forward pass.
    gradient: Tensor | None
    metrics: Mapping[str, float] = field(default_factory=dict)


def evaluate_loss(
    loss: AnyLoss,
    logprobs: Tensor,
    inputs: Inputs,
    *,
    backward: bool,
    deadline_s: float | None = None,
) -> LossValue:
    """Evaluates a loss on one datum. `logprobs` have the shape of its targets."""
    if isinstance(loss, CustomLoss):
        gradient = None
        if backward:
            value, gradient, metrics = loss.graph.value_and_gradient(
                logprobs, inputs, deadline_s=deadline_s
            )
        else:
            value, metrics = loss.graph.run(logprobs, inputs, deadline_s=deadline_s)
        numbers = {name: float(metric) for name, metric in metrics.items()}
        return LossValue(value=float(value), gradient=gradient, metrics=numbers)
    if not backward:
        return LossValue(value=total(loss.terms(logprobs, inputs)), gradient=None)
    terms, gradient = value_and_gradient(loss, logprobs, inputs)
    return LossValue(value=total(terms), gradient=gradient)


def total(terms: Tensor) -> float:
    return float(terms.sum(dtype=torch.float64))


def value_and_gradient(loss: Loss, logprobs: Tensor, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The loss of each token, and its derivative with respect to each logprob."""
    with torch.enable_grad():
        leaf = logprobs.detach().requires_grad_()
        terms = loss.terms(leaf, inputs)
        (gradient,) = torch.autograd.grad(terms.sum(), leaf)
    return terms.detach(), gradient
