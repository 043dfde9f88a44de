"""Reference models for `history.check`: integer arithmetic, and a recorded run without kills."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qa.faults.counting_server import PRIME


@dataclass(frozen=True)
class IntegerModel:
    """The arithmetic of `faults.counting_server.CountingEcho`; the state is a value and a gradient."""

    def begin(self, argument: Any) -> tuple[int, int]:
        return 0, 0

    def apply(
        self, state: tuple[int, int], kind: str, argument: Any
    ) -> tuple[tuple[int, int], Any]:
        value, gradient = state
        match kind:
            case "pass":
                return (value, gradient + argument), [value, gradient + argument]
            case "forward":
                return state, [value, gradient]
            case "step":
                value = (3 * value + gradient + 1) % PRIME
                return (value, 0), value
            case _:
                return state, None

    def load(self, state: tuple[int, int], saved: tuple[int, int]) -> tuple[int, int]:
        return saved[0], 0

    def sample(self, saved: tuple[int, int], argument: Sequence[int]) -> list[int]:
        prompt, seed, count = argument
        mix = saved[0] + 31 * seed + prompt
        return [mix * (7 + position) % 1000 for position in range(count)]

    def same(self, expected: Any, answer: Any) -> bool:
        return bool(expected == answer)


@dataclass(frozen=True)
class RecordedRun:
    """
    The answers of a run of the same program without kills.

    The state of a model is its number of steps, which determines the next answer.
    """

    #: Answers by number of earlier steps; None if the answer is not compared.
    answers: Mapping[int, Any]
    #: Samples by number of steps before the save, and by request.
    samples: Mapping[tuple[int, str], Any]
    #: Allowed relative difference of numbers; 0 means identical bits.
    tolerance: float

    def begin(self, argument: int) -> int:
        return argument

    def apply(self, state: int, kind: str, argument: Any) -> tuple[int, Any]:
        expected = None if kind.startswith("save") else self.answers[state]
        return state + 1, expected

    def load(self, state: int, saved: int) -> int:
        return state + 1

    def sample(self, saved: int, argument: Any) -> Any:
        return self.samples.get((saved, str(argument)))

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
