"""
Direct preference optimization: make chosen answers more likely than rejected ones.

    pairs = [data.pair(tokenizer, row) for row in data.read("preferences.jsonl")]
    for step in dpo.train(service, pairs, dpo.Settings(model=MODEL, steps=50)):
        print(step.number, step.metrics["margin"])

The loss of a pair is -log sigmoid(margin), where margin = beta * (how much more likely than the
base model the policy finds the chosen answer, less the same of the rejected one). Its gradient is
that of a cross entropy with the weights +c and -c, where c = beta * sigmoid(-margin). So a step is
a `forward` pass, which gives the margins, and a `forward_backward` pass with these weights. The
loss that the server stores for a step is the one of the second pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tinkex.data import Example, Pair, stream
from tinkex.recipes import common
from tinkex.recipes.common import Resume, Step


@dataclass(frozen=True, kw_only=True)
class Settings(common.Settings):
    name: str = "dpo"
    learning_rate: float = 1e-4
    batch_size: int = 8
    #: How strongly the policy is kept near the base model; more is nearer.
    beta: float = 0.1


def train(
    service: Any,
    pairs: Sequence[Pair],
    settings: Settings,
    *,
    held_out: Sequence[Pair] = (),
    resume: Resume | None = None,
    stop: Callable[[], bool] = common.never,
) -> Iterator[Step]:
    """
    Train an adapter and report each step. The last step has the saved weights.

    Args:
        service: A service client of tinkex or of the official SDK.
        pairs: Chosen and rejected answers.
        settings: See `Settings`.
        held_out: Pairs that are only measured: `held_out_loss`, `held_out_margin`, ...
        resume: Where an earlier run stopped; None: a new run.
        stop: Asked before each step. True: this is the last one.

    Returns:
        An iterator of steps. `accuracy` is the share of pairs whose margin is positive.

    Example:
        for step in dpo.train(service, pairs, dpo.Settings(model=MODEL, steps=3)):
            print(step.metrics["margin"], step.metrics["accuracy"])
    """
    types = common.types_of(service)
    training = common.start(service, settings, resume)
    base = service.create_sampling_client(base_model=settings.model)
    known: dict[int, list[float]] = {}
    done = resume.step if resume else 0

    def reference(batch: Sequence[Pair]) -> list[float]:
        """Logprobs of both sides of each pair under the base model, computed once."""
        new = [pair for pair in batch if id(pair) not in known]
        futures = [
            base.compute_logprobs(types.ModelInput.from_ints(side.tokens))
            for pair in new
            for side in (pair.chosen, pair.rejected)
        ]
        sums = [
            _weighted(side, future.result())
            for side, future in zip(_sides(new), futures, strict=True)
        ]
        known.update((id(pair), sums[2 * n : 2 * n + 2]) for n, pair in enumerate(new))
        return [each for pair in batch for each in known[id(pair)]]

    def margins(batch: Sequence[Pair]) -> list[float]:
        data = [side.datum(types) for side in _sides(batch)]
        passed = training.forward(data, "cross_entropy")
        before = reference(batch)
        now = map(common.weighted_logprobs, data, passed.result().loss_fn_outputs)
        gains = [after - was for after, was in zip(now, before, strict=True)]
        return [
            settings.beta * (chosen - rejected)
            for chosen, rejected in zip(gains[::2], gains[1::2], strict=True)
        ]

    if done == 0 and held_out:
        yield Step(number=0, metrics=_summary(margins(held_out), "held_out_"))
    batches = stream(pairs, settings.batch_size, seed=settings.seed, start=done)
    for number in range(done + 1, settings.steps + 1):
        last = number == settings.steps or stop()
        batch = next(batches)
        found = margins(batch)
        weighted = []
        for pair, margin in zip(batch, found, strict=True):
            c = settings.beta / (1 + math.exp(min(margin, 500.0)))
            for side, sign in ((pair.chosen, c), (pair.rejected, -c)):
                weights = [sign * weight for weight in side.weights]
                weighted.append(Example(side.tokens, weights).datum(types))
        training.forward_backward(weighted, "cross_entropy")
        rate = common.learning_rate_at(number - 1, settings)
        stepped = training.optim_step(types.AdamParams(learning_rate=rate))
        saves = common.Saves(training, settings, number, last)
        metrics = _summary(found)
        if held_out and common.is_due(settings, number, last):
            metrics |= _summary(margins(held_out), "held_out_")
        stepped.result()  # fails if the pass before it failed
        yield Step(number=number, metrics=metrics, tokens=sum(map(len, batch)), **saves.paths())
        if last:
            return


def _sides(pairs: Sequence[Pair]) -> list[Example]:
    return [side for pair in pairs for side in (pair.chosen, pair.rejected)]


def _weighted(example: Example, logprobs: Sequence[float | None]) -> float:
    pairs = zip(example.weights, logprobs, strict=True)
    return sum(weight * logprob for weight, logprob in pairs if weight and logprob is not None)


def _summary(margins: Sequence[float], prefix: str = "") -> dict[str, float]:
    count = len(margins)
    losses = [max(-m, 0.0) + math.log1p(math.exp(-abs(m))) for m in margins]
    return {
        f"{prefix}loss": sum(losses) / count,
        f"{prefix}margin": sum(margins) / count,
        f"{prefix}accuracy": sum(m > 0 for m in margins) / count,
    }
