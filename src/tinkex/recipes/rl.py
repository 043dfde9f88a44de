"""
Reinforcement learning with a reward of your own.

    def reward(row, answer):
        return float(answer.strip() == row["result"])

    rows = [{"prompt": "What is 2 + 3?", "result": "5"}, ...]
    settings = rl.Settings(model=MODEL, steps=30)
    for step in rl.train(service, tokenizer, rows, reward, settings):
        print(step.number, step.metrics["reward"], step.metrics["kl"])

A step samples a group of answers to each of some prompts, with the weights of that moment. The
advantage of an answer is its reward less the mean of its group. A group whose answers all get the
same reward teaches nothing and is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinkex.data import stream
from tinkex.recipes import common
from tinkex.recipes.common import Resume, Step

Reward = Callable[[Mapping[str, Any], str], float]


@dataclass(frozen=True, kw_only=True)
class Settings(common.SamplingSettings):
    name: str = "rl"
    learning_rate: float = 5e-4
    #: `importance_sampling` or `ppo`, or another policy loss of the service.
    loss: str = "importance_sampling"
    loss_config: Mapping[str, float] = field(default_factory=dict)
    #: Optimizer steps for the answers of one step; more than one needs `ppo`.
    substeps: int = 1


@dataclass(frozen=True, slots=True)
class Answer:
    """One sampled answer."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    reward: float


def train(
    service: Any,
    tokenizer: Any,
    rows: Sequence[Mapping[str, Any]],
    reward: Reward,
    settings: Settings,
    *,
    resume: Resume | None = None,
    stop: Callable[[], bool] = common.never,
) -> Iterator[Step]:
    """
    Train an adapter and report each step. The last step has the saved weights.

    Args:
        service: A service client of tinkex or of the official SDK.
        tokenizer: The tokenizer of the model.
        rows: Mappings with `prompt`, a text or messages, and whatever `reward` needs.
        reward: Takes a row and the text of an answer, and returns a number; more is better.
        settings: See `Settings`.
        resume: Where an earlier run stopped; None: a new run.
        stop: Asked before each step. True: this is the last one.

    Returns:
        An iterator of steps: the mean `reward`, `informative` (share of groups whose rewards
        differ), `kl` (distance from the base model, nats per token) and `answer_tokens` (mean).

    Example:
        rows = [{"prompt": "Say aye."}]
        settings = rl.Settings(model=MODEL, steps=2, max_tokens=4, group_size=2)
        for step in rl.train(service, tokenizer, rows, lambda row, answer: len(answer), settings):
            print(step.metrics["reward"], step.metrics["kl"])
    """
    types = common.types_of(service)
    training = common.start(service, settings, resume)
    base = service.create_sampling_client(base_model=settings.model)
    done = resume.step if resume else 0
    batches = stream(rows, settings.prompts_per_step, seed=settings.seed, start=done)
    for number in range(done + 1, settings.steps + 1):
        last = number == settings.steps or stop()
        sampling = training.save_weights_and_get_sampling_client()
        batch = next(batches)
        sampled = common.sample_groups(sampling, tokenizer, batch, settings, number * 1000)
        groups = [
            [rewarded(tokenizer, row, prompt, each, reward) for each in sequences]
            for row, (prompt, sequences) in zip(batch, sampled, strict=True)
        ]
        answers = [answer for group in groups for answer in group]
        inputs = [types.ModelInput.from_ints([*a.prompt, *a.tokens]) for a in answers]
        references = [base.compute_logprobs(each) for each in inputs]
        data = [
            common.policy_datum(types, a.prompt, a.tokens, a.logprobs, [advantage] * len(a.tokens))
            for group in groups
            for a, advantage in zip(group, advantages(group), strict=True)
            if advantage
        ]
        steps = []
        for part in (data[n :: settings.substeps] for n in range(settings.substeps)):
            if part:
                training.forward_backward(part, settings.loss, dict(settings.loss_config) or None)
                rate = common.learning_rate_at(number - 1, settings)
                steps.append(training.optim_step(types.AdamParams(learning_rate=rate)))
        saves = common.Saves(training, settings, number, last)
        tokens = sum(len(answer.tokens) for answer in answers)
        metrics = {
            "reward": sum(answer.reward for answer in answers) / len(answers),
            "informative": sum(any(advantages(group)) for group in groups) / len(groups),
            "kl": sum(map(divergence, answers, (r.result() for r in references))) / tokens,
            "answer_tokens": tokens / len(answers),
        }
        for step in steps:
            step.result()
        trained = sum(datum.model_input.length for datum in data)
        yield Step(number=number, metrics=metrics, tokens=trained, **saves.paths())
        if last:
            return


def rewarded(
    tokenizer: Any, row: Mapping[str, Any], prompt: list[int], sequence: Any, reward: Reward
) -> Answer:
    text = tokenizer.decode(sequence.tokens, skip_special_tokens=True)
    value = float(reward(row, text))
    return Answer(prompt, list(sequence.tokens), list(sequence.logprobs), value)


def advantages(group: Sequence[Answer]) -> list[float]:
    """The reward of each answer less the mean; exactly zero if all are equal."""
    rewards = [answer.reward for answer in group]
    mean = sum(rewards) / len(rewards) if max(rewards) > min(rewards) else rewards[0]
    return [reward - mean for reward in rewards]


def divergence(answer: Answer, reference: Sequence[float]) -> float:
    """The KL divergence from the base model, summed over tokens: never negative, low variance."""
    there = reference[len(answer.prompt) :]
    gaps = [min(theirs - own, 50.0) for theirs, own in zip(there, answer.logprobs, strict=True)]
    return sum(math.exp(gap) - 1 - gap for gap in gaps)
