"""
Evaluation: sample an answer to every row at once, and score them.

    def score(row, answer):
        return float(answer.strip() == row["result"])

    found = evaluate.evaluate(sampling, tokenizer, rows, score)
    print(found.mean, found.standard_error)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinkex.data import prompt_tokens
from tinkex.recipes import common


@dataclass(frozen=True, kw_only=True)
class Scored:
    """One answer with its score."""

    row: Mapping[str, Any]
    answer: str
    score: float
    #: Whether the model ended the answer itself, before `max_tokens`.
    complete: bool


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The scores of all answers."""

    answers: Sequence[Scored]

    @property
    def mean(self) -> float:
        return sum(each.score for each in self.answers) / len(self.answers)

    @property
    def standard_error(self) -> float:
        """Of the mean; 0 for a single answer."""
        count, mean = len(self.answers), self.mean
        if count < 2:
            return 0.0
        variance = sum((each.score - mean) ** 2 for each in self.answers) / (count - 1)
        return math.sqrt(variance / count)


def evaluate(
    sampling: Any,
    tokenizer: Any,
    rows: Sequence[Mapping[str, Any]],
    score: Callable[[Mapping[str, Any], str], float],
    *,
    samples: int = 1,
    max_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    plain: bool = False,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """
    Score a model on rows. All requests are submitted at once; the client limits what is in flight.

    Args:
        sampling: A sampling client of tinkex or of the official SDK.
        tokenizer: The tokenizer of the model.
        rows: Mappings with `prompt`, a text or messages, and whatever `score` needs.
        score: Takes a row and the text of an answer, and returns a number.
        samples: Answers to each row.
        max_tokens: The longest answer.
        temperature: 0 takes the most likely token.
        seed: Of the samples.
        plain: Whether texts are used as they are, without the chat template.
        report: Called with the number of answered rows, and of all rows.

    Returns:
        The scores.

    Example:
        found = evaluate.evaluate(sampling, tokenizer, [{"prompt": "Hi"}], lambda row, text: 1.0)
        print(found.mean, found.standard_error)
    """
    if not rows:
        raise ValueError("there are no rows to evaluate.")
    answers = []
    texts = sample(
        sampling,
        tokenizer,
        [row["prompt"] for row in rows],
        samples=samples,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        plain=plain,
    )
    for done, (row, group) in enumerate(zip(rows, texts, strict=True), start=1):
        for text, complete in group:
            value = float(score(row, text))
            answers.append(Scored(row=row, answer=text, score=value, complete=complete))
        report(done, len(rows))
    return Evaluation(answers=answers)


def sample(
    sampling: Any,
    tokenizer: Any,
    prompts: Sequence[Any],
    *,
    samples: int = 1,
    max_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    plain: bool = False,
) -> Iterator[list[tuple[str, bool]]]:
    """For each prompt its answers, and whether each is complete. All are submitted at once."""
    types = common.types_of(sampling)
    futures = []
    for number, prompt in enumerate(prompts):
        params = types.SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed + number,  # one seed for all would give similar answers to all
        )
        tokens = types.ModelInput.from_ints(prompt_tokens(tokenizer, prompt, plain=plain))
        futures.append(sampling.sample(tokens, samples, params))
    for future in futures:
        yield [
            (
                tokenizer.decode(each.tokens, skip_special_tokens=True).strip(),
                each.stop_reason == "stop",
            )
            for each in future.result().sequences
        ]
