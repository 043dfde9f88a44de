"""
Supervised fine-tuning: make the tokens that have weight more likely.

    rows = data.read("chats.jsonl")
    examples = [example for row in rows for example in data.examples(tokenizer, row)]
    for step in sft.train(service, examples, sft.Settings(model=MODEL, steps=100)):
        print(step.number, step.metrics["loss"])
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tinkex.data import Example, stream
from tinkex.recipes import common
from tinkex.recipes.common import Resume, Step

#: Steps that are submitted before their results are read, so that the service never waits.
SUBMITTED_AHEAD = 2


@dataclass(frozen=True, kw_only=True)
class Settings(common.Settings):
    name: str = "sft"
    batch_size: int = 8


def train(
    service: Any,
    examples: Sequence[Example],
    settings: Settings,
    *,
    held_out: Sequence[Example] = (),
    resume: Resume | None = None,
    stop: Callable[[], bool] = common.never,
) -> Iterator[Step]:
    """
    Train an adapter and report each step. The last step has the saved weights.

    Args:
        service: A service client of tinkex or of the official SDK.
        examples: What to learn.
        settings: See `Settings`.
        held_out: What is only measured, as `held_out_loss`.
        resume: Where an earlier run stopped; None: a new run.
        stop: Asked before each step. True: this is the last one.

    Returns:
        An iterator of steps. `loss` is in nats per token that has weight.

    Example:
        for step in sft.train(service, examples, sft.Settings(model=MODEL, steps=3)):
            print(step.metrics["loss"])
    """
    types = common.types_of(service)
    training = common.start(service, settings, resume)
    done = resume.step if resume else 0
    measured = [example.datum(types) for example in held_out]

    def measure() -> Any:
        return training.forward(measured, "cross_entropy") if measured else None

    if done == 0 and measured:
        yield Step(number=0, metrics={"held_out_loss": mean_loss(measured, measure().result())})
    batches = stream(examples, settings.batch_size, seed=settings.seed, start=done)
    pending: deque[Callable[[], Step]] = deque()
    for number in range(done + 1, settings.steps + 1):
        last = number == settings.steps or stop()
        batch = [example.datum(types) for example in next(batches)]
        passed = training.forward_backward(batch, "cross_entropy")
        rate = common.learning_rate_at(number - 1, settings)
        stepped = training.optim_step(types.AdamParams(learning_rate=rate))
        held = measure() if common.is_due(settings, number, last) else None
        saves = common.Saves(training, settings, number, last)

        def finish(
            number: int = number,
            batch: list[Any] = batch,
            passed: Any = passed,
            stepped: Any = stepped,
            held: Any = held,
            saves: common.Saves = saves,
        ) -> Step:
            metrics = {"loss": mean_loss(batch, passed.result())}
            stepped.result()
            if held is not None:
                metrics["held_out_loss"] = mean_loss(measured, held.result())
            tokens = sum(datum.model_input.length for datum in batch)
            return Step(number=number, metrics=metrics, tokens=tokens, **saves.paths())

        pending.append(finish)
        while pending and (last or len(pending) > SUBMITTED_AHEAD):
            yield pending.popleft()()
        if last:
            return


def mean_loss(batch: Sequence[Any], output: Any) -> float:
    """Nats per token that has weight."""
    total = sum(map(common.weighted_logprobs, batch, output.loss_fn_outputs))
    return -total / sum(float(datum.loss_fn_inputs["weights"].to_numpy().sum()) for datum in batch)
