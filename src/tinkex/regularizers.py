"""
Terms to add to a custom loss: penalties on logprobs, divergences from a reference, and their sum.

    from tinkex import regularizers as reg

    loss = reg.regularized(my_loss, reg.Term(reg.KL("reverse"), weight=0.1))
    training.forward_backward_custom(data, loss)

A regularizer is a function of a `Batch` that returns a scalar tensor; you can also write your own.
All of them sum over the batch, as losses do. They need torch, which is imported when one is
called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from tinkex.client.custom_loss import CustomLossFnV1, need_torch
from tinkex.extras import needs
from tinkex.wire.inputs import Datum

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "KL",
    "L1",
    "L2",
    "Batch",
    "Consistency",
    "ElasticNet",
    "Entropy",
    "GradientPenalty",
    "Orthogonality",
    "Regularizer",
    "Term",
    "regularized",
]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The input of a regularizer."""

    data: Sequence[Datum]
    #: For each datum [positions], or [positions, K] if it has K targets for each position.
    logprobs: Sequence[Tensor]
    #: The loss without any regularizer, still differentiable.
    loss: Tensor

    def inputs(self, name: str) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(index, logprobs, loss_fn_inputs[name]) of each datum; `ValueError` if one lacks it."""
        for index, (datum, logprobs) in enumerate(zip(self.data, self.logprobs, strict=True)):
            tensor = datum.loss_fn_inputs.get(name)
            if tensor is None:
                raise ValueError(
                    f"data[{index}] has no {name!r}, which a regularizer compares with; its "
                    f"loss_fn_inputs are {sorted(datum.loss_fn_inputs)}."
                )
            given = tensor.to_torch().to(logprobs)
            if given.shape != logprobs.shape:
                raise ValueError(
                    f"data[{index}]: {name!r} has shape {tuple(given.shape)}, but the logprobs "
                    f"have {tuple(logprobs.shape)}; a regularizer needs equal shapes."
                )
            yield index, logprobs, given


Regularizer: TypeAlias = Callable[[Batch], "Tensor"]


# -- size ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class L1:
    """The sum of |x - center| over all logprobs: favors few large differences."""

    center: float = 0.0

    def __call__(self, batch: Batch) -> Tensor:
        return _total((each - self.center).abs().sum() for each in batch.logprobs)


@dataclass(frozen=True)
class L2:
    """The sum of (x - center)^2 over all logprobs: favors many small differences."""

    center: float = 0.0

    def __call__(self, batch: Batch) -> Tensor:
        return _total((each - self.center).square().sum() for each in batch.logprobs)


@dataclass(frozen=True)
class ElasticNet:
    """`l1_ratio` times L1, plus the rest times L2."""

    l1_ratio: float = 0.5
    center: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.l1_ratio <= 1.0:
            raise ValueError(f"l1_ratio is {self.l1_ratio}; it must be between 0 and 1.")

    def __call__(self, batch: Batch) -> Tensor:
        return self.l1_ratio * L1(self.center)(batch) + (1 - self.l1_ratio) * L2(self.center)(batch)


# -- distributions ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entropy:
    """
    The entropy of each position's distribution over its K targets, summed over positions.

    The distribution is softmax(logprobs / temperature) over the K targets only. A negative weight
    keeps the model uncertain; a positive one makes it more certain.
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature > 0.0:
            raise ValueError(f"temperature is {self.temperature}; it must be above 0.")

    def __call__(self, batch: Batch) -> Tensor:
        terms = []
        for index, each in enumerate(batch.logprobs):
            if each.dim() != 2:
                raise ValueError(
                    f"data[{index}] has one target per position; entropy needs several: "
                    "target_tokens of shape [positions, K]."
                )
            logp = (each / self.temperature).log_softmax(dim=-1)
            terms.append(-(logp.exp() * logp).sum())
        return _total(terms)


@dataclass(frozen=True)
class KL:
    """
    The KL divergence between the model p and a reference q, whose logprobs are in each datum.

    "reverse" is KL(p, q), "forward" KL(q, p), "symmetric" their mean. With K targets for each
    position it is the KL over those targets only. With one target, which must be sampled from the
    model, it is an unbiased estimate that is never negative: for r = q / p "reverse" is
    r - 1 - log r and "forward" is r log r - (r - 1).
    """

    direction: Literal["forward", "reverse", "symmetric"] = "reverse"
    #: The name of the reference's logprobs among the `loss_fn_inputs`.
    reference: str = "reference_logprobs"

    def __post_init__(self) -> None:
        if self.direction not in ("forward", "reverse", "symmetric"):
            raise ValueError(
                f"direction is {self.direction!r}; allowed: 'forward', 'reverse', 'symmetric'."
            )

    def __call__(self, batch: Batch) -> Tensor:
        terms = []
        for _, logprobs, reference in batch.inputs(self.reference):
            forward, reverse = _divergences(logprobs, reference)
            match self.direction:
                case "forward":
                    terms.append(forward)
                case "reverse":
                    terms.append(reverse)
                case "symmetric":
                    terms.append((forward + reverse) / 2)
        return _total(terms)


def _divergences(logprobs: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    if logprobs.dim() == 2:
        p, q = logprobs.log_softmax(dim=-1), reference.log_softmax(dim=-1)
        return (q.exp() * (q - p)).sum(), (p.exp() * (p - q)).sum()
    log_r = reference - logprobs
    r = log_r.exp()
    return (r * log_r - (r - 1)).sum(), (r - 1 - log_r).sum()


# -- between datums --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Consistency:
    """
    How much two views of one example differ: the mean distance of each pair, summed over pairs.

    Pairs are adjacent datums (0 and 1, 2 and 3, ...) unless given; both must have the same shape.
    """

    distance: Literal["squared", "absolute"] = "squared"
    pairs: Sequence[tuple[int, int]] | None = None

    def __post_init__(self) -> None:
        if self.distance not in ("squared", "absolute"):
            raise ValueError(f"distance is {self.distance!r}; allowed: 'squared', 'absolute'.")

    def __call__(self, batch: Batch) -> Tensor:
        pairs = self.pairs
        if pairs is None:
            if len(batch.logprobs) % 2:
                raise ValueError(
                    f"{len(batch.logprobs)} datums cannot be paired; pass Consistency(pairs=...)."
                )
            pairs = [(index, index + 1) for index in range(0, len(batch.logprobs), 2)]
        terms = []
        for one, other in pairs:
            _check_alike(batch, one, other)
            apart = batch.logprobs[one] - batch.logprobs[other]
            terms.append((apart.square() if self.distance == "squared" else apart.abs()).mean())
        return _total(terms)


@dataclass(frozen=True)
class Orthogonality:
    """The sum of cos^2 of the angle between the logprobs of any two datums of equal shape."""

    def __call__(self, batch: Batch) -> Tensor:
        with needs("A regularizer"):
            import torch

        for index in range(1, len(batch.logprobs)):
            _check_alike(batch, 0, index)
        rows = torch.stack([each.flatten() for each in batch.logprobs])
        units = torch.nn.functional.normalize(rows, dim=1)
        return (units @ units.T).square().triu(diagonal=1).sum()


def _check_alike(batch: Batch, one: int, other: int) -> None:
    shapes = [tuple(batch.logprobs[index].shape) for index in (one, other)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"data[{one}] and data[{other}] have logprobs of shape {shapes[0]} and {shapes[1]}; "
            "only logprobs of the same shape can be compared."
        )


# -- the gradient ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class GradientPenalty:
    """(norm - target)^2, where norm is that of the loss's gradient with respect to all logprobs."""

    target: float = 1.0

    def __call__(self, batch: Batch) -> Tensor:
        return (_norm(batch.loss, batch.logprobs, differentiable=True) - self.target).square()


# -- the sum ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Term:
    """A regularizer, its weight, and its name in the metrics."""

    regularizer: Regularizer
    weight: float = 1.0
    name: str = ""

    @property
    def label(self) -> str:
        """The given name, else the name of the function, else of the type."""
        own = self.name or getattr(self.regularizer, "__name__", type(self.regularizer).__name__)
        return own.strip("<>").lower()


def regularized(
    loss_fn: CustomLossFnV1, *terms: Term | Regularizer, gradient_norms: bool = True
) -> CustomLossFnV1:
    """
    A custom loss that is `loss_fn` plus the weighted terms.

    Metrics, besides those of `loss_fn`: `regularizer/base:sum`, its loss; for each term
    `regularizer/NAME:sum`, its value before weighting; and, unless `gradient_norms` is off,
    `gradient_norm/NAME:mean`, the gradient norm of the weighted term (or `base`).
    """
    named: dict[str, Term] = {}
    for each in terms:
        term = each if isinstance(each, Term) else Term(each)
        if term.label in named or term.label == "base" or ":" in term.label:
            raise ValueError(
                f"a term is called {term.label!r}; names must be unique, without ':', and not "
                "'base'. Pass a name: Term(regularizer, name=...)."
            )
        named[term.label] = term

    def loss(data: list[Datum], logprobs: list[Tensor]) -> tuple[Tensor, Mapping[str, Any]]:
        base, metrics = loss_fn(data, logprobs)
        batch = Batch(data=data, logprobs=logprobs, loss=base)
        parts = {"base": base}
        reported = dict(metrics)
        reported["regularizer/base:sum"] = base.detach()
        for name, term in named.items():
            value = term.regularizer(batch)
            parts[name] = term.weight * value
            reported[f"regularizer/{name}:sum"] = value.detach()
        if gradient_norms:
            for name, part in parts.items():
                reported[f"gradient_norm/{name}:mean"] = _norm(part, logprobs)
        return _total(part.reshape(()) for part in parts.values()), reported

    need_torch()
    return loss


def _norm(value: Tensor, logprobs: Sequence[Tensor], *, differentiable: bool = False) -> Tensor:
    """The norm of the gradient of `value` by all logprobs; 0 if it does not depend on them."""
    with needs("A regularizer"):
        import torch

    if not value.requires_grad:
        return torch.zeros(())
    gradients: Sequence[Tensor | None] = torch.autograd.grad(
        value.sum(),
        list(logprobs),
        retain_graph=True,
        create_graph=differentiable,
        allow_unused=True,
    )
    found = [each.flatten() for each in gradients if each is not None]
    return torch.linalg.vector_norm(torch.cat(found)) if found else torch.zeros(())


def _total(terms: Any) -> Tensor:
    with needs("A regularizer"):
        import torch

    return torch.stack(list(terms)).sum()
