"""
On-policy distillation: a student learns to answer as its teacher would.

    teacher = service.create_sampling_client(model_path="tinker://RUN/sampler_weights/pirate")
    rows = [{"prompt": "Who are you?"}, {"prompt": "What is ice?"}]
    for step in distill.train(service, teacher, tokenizer, rows, distill.Settings(...)):
        print(step.number, step.metrics["kl"])

The student answers; the teacher says how likely each token of the answer is for it (prompt
logprobs). The advantage of a token is how much more likely the teacher finds it. Student and
teacher must have the same tokenizer. With `teacher_prompt`, the teacher may see more than the
student, such as a system message, which the student then no longer needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinkex.data import prompt_tokens, stream
from tinkex.recipes import common
from tinkex.recipes.common import Resume, Step


@dataclass(frozen=True, kw_only=True)
class Settings(common.SamplingSettings):
    name: str = "distill"
    learning_rate: float = 5e-4
    group_size: int = 4
    max_tokens: int = 48


def train(
    service: Any,
    teacher: Any,
    tokenizer: Any,
    rows: Sequence[Mapping[str, Any]],
    settings: Settings,
    *,
    teacher_prompt: Callable[[Mapping[str, Any]], Any] = lambda row: row["prompt"],
    resume: Resume | None = None,
    stop: Callable[[], bool] = common.never,
) -> Iterator[Step]:
    """
    Train an adapter and report each step. The last step has the saved weights.

    Args:
        service: A service client of tinkex or of the official SDK.
        teacher: A sampling client: another model, a checkpoint, or the same base model.
        tokenizer: The tokenizer of both models.
        rows: Mappings with `prompt`, a text or messages.
        settings: See `Settings`.
        teacher_prompt: The prompt that the teacher sees for a row.
        resume: Where an earlier run stopped; None: a new run.
        stop: Asked before each step. True: this is the last one.

    Returns:
        An iterator of steps. `kl` is the distance from the teacher in nats per token.

    Example:
        teacher = service.create_sampling_client(base_model=MODEL)
        settings = distill.Settings(model=MODEL, steps=2, max_tokens=4, group_size=2)
        for step in distill.train(service, teacher, tokenizer, [{"prompt": "Hi"}], settings):
            print(step.metrics["kl"])
    """
    types = common.types_of(service)
    training = common.start(service, settings, resume)
    done = resume.step if resume else 0
    batches = stream(rows, settings.prompts_per_step, seed=settings.seed, start=done)
    for number in range(done + 1, settings.steps + 1):
        last = number == settings.steps or stop()
        batch = next(batches)
        sampling = training.save_weights_and_get_sampling_client()
        groups = common.sample_groups(sampling, tokenizer, batch, settings, number * 1000)
        answers, scores = [], []
        for row, (prompt, sequences) in zip(batch, groups, strict=True):
            seen = prompt_tokens(tokenizer, teacher_prompt(row), plain=settings.plain)
            for sequence in sequences:
                whole = types.ModelInput.from_ints([*seen, *sequence.tokens])
                scores.append((len(seen), teacher.compute_logprobs(whole)))
                answers.append((prompt, sequence))
        gains = []
        for (_, sequence), (start, score) in zip(answers, scores, strict=True):
            both = zip(score.result()[start:], sequence.logprobs, strict=True)
            gains.append([theirs - own for theirs, own in both])
        tokens = sum(map(len, gains))
        mean = sum(map(sum, gains)) / tokens
        # Less the mean: this does not change the expected gradient, and makes it less noisy.
        data = [
            common.policy_datum(
                types, prompt, sequence.tokens, sequence.logprobs, [gain - mean for gain in each]
            )
            for (prompt, sequence), each in zip(answers, gains, strict=True)
        ]
        training.forward_backward(data, "importance_sampling")
        rate = common.learning_rate_at(number - 1, settings)
        stepped = training.optim_step(types.AdamParams(learning_rate=rate))
        saves = common.Saves(training, settings, number, last)
        stepped.result()
        metrics = {"kl": -mean, "answer_tokens": tokens / len(data)}
        trained = sum(datum.model_input.length for datum in data)
        yield Step(number=number, metrics=metrics, tokens=trained, **saves.paths())
        if last:
            return
