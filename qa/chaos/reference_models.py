"""Sequential machines: whole numbers in place of tensors, and an undisturbed twin."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qa.faults.counting_server import PRIME


@dataclass(frozen=True)
class Numbers:
    """What `faults.counting_server.LongEcho` does, step by step: a value and a gradient."""

    def begin(self, asked: Any) -> tuple[int, int]:
        return 0, 0

    def apply(self, state: tuple[int, int], kind: str, asked: Any) -> tuple[tuple[int, int], Any]:
        value, gradient = state
        match kind:
            case "pass":
                return (value, gradient + asked), [value, gradient + asked]
            case "forward":
                return state, [value, gradient]
            case "step":
                value = (3 * value + gradient + 1) % PRIME
                return (value, 0), value
            case _:
                return state, None

    def load(self, state: tuple[int, int], saved: tuple[int, int]) -> tuple[int, int]:
        return saved[0], 0

    def draw(self, saved: tuple[int, int], asked: Sequence[int]) -> list[int]:
        prompt, seed, count = asked
        mix = saved[0] + 31 * seed + prompt
        return [mix * (7 + place) % 1000 for place in range(count)]

    def same(self, expected: Any, answer: Any) -> bool:
        return bool(expected == answer)


@dataclass(frozen=True)
class Twin:
    """
    What an undisturbed run of the same program answered, step by step.

    A state is how many steps a model has behind it: its next answer is the twin's next answer.
    """

    #: The twin's answers, by the number of steps before; None where nothing is compared.
    answers: Mapping[int, Any]
    #: The twin's samples: by the number of steps before the save, and the question.
    samples: Mapping[tuple[int, str], Any]
    #: Relative difference that numbers may have; 0 is to the last bit.
    tolerance: float

    def begin(self, asked: int) -> int:
        return asked

    def apply(self, state: int, kind: str, asked: Any) -> tuple[int, Any]:
        expected = None if kind.startswith("save") else self.answers[state]
        return state + 1, expected

    def load(self, state: int, saved: int) -> int:
        return state + 1

    def draw(self, saved: int, asked: Any) -> Any:
        return self.samples.get((saved, str(asked)))

    def same(self, expected: Any, answer: Any) -> bool:
        if isinstance(expected, Mapping):
            return set(expected) == set(answer) and all(
                self.same(value, answer[name]) for name, value in expected.items()
            )
        if isinstance(expected, list):
            return len(expected) == len(answer) and all(map(self.same, expected, answer))
        if isinstance(expected, float):
            return math.isclose(expected, answer, rel_tol=self.tolerance, abs_tol=self.tolerance)
        return bool(expected == answer)
