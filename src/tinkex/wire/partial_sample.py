"""A sample while it grows: what of it is known, and what a reader has not seen yet."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The next tokens of one sequence of a sample, with their logprobs."""

    #: Which of the request's samples these belong to, from 0.
    sequence: int
    tokens: list[int]
    #: One for each token; NaN where the service records none.
    logprobs: list[float]


class PartialSample:
    """
    The tokens of a sample so far, each once, whoever tells them again.

    Takes eight bytes a token, as the finished answer does. Readers hold a `PartialSampleReader` each and
    nothing is queued for them, so that a slow one costs no memory.
    """

    def __init__(self) -> None:
        self._tokens: dict[int, array[int]] = {}
        self._logprobs: dict[int, array[float]] = {}

    def count(self, sequence: int) -> int:
        """So many tokens of this sequence are known."""
        return len(self._tokens.get(sequence, ()))

    def take(
        self,
        sequence: int,
        tokens: Sequence[int],
        logprobs: Sequence[float] | None,
        *,
        start: int,
    ) -> bool:
        """
        Tokens that stand at `start` in their sequence; whether any of them is new.

        What is known already is left as it is, and tokens behind a gap wait for the whole answer.
        """
        known = self.count(sequence)
        if not start <= known < start + len(tokens):
            return False
        new = known - start
        values = [float("nan")] * len(tokens) if logprobs is None else logprobs
        self._tokens.setdefault(sequence, array("i")).extend(tokens[new:])
        self._logprobs.setdefault(sequence, array("f")).extend(values[new:])
        return True

    def between(self, sequence: int, start: int, stop: int) -> SampledTokens:
        return SampledTokens(
            sequence,
            self._tokens[sequence][start:stop].tolist(),
            self._logprobs[sequence][start:stop].tolist(),
        )

    @property
    def sequences(self) -> list[int]:
        """Those that have begun."""
        return sorted(self._tokens)


class PartialSampleReader:
    """How far one reader has come."""

    def __init__(self, growing: PartialSample) -> None:
        self._growing = growing
        self._seen: dict[int, int] = {}

    def news(self) -> list[SampledTokens]:
        """What has come since the last time, at most one piece for each sequence."""
        news = []
        for sequence in self._growing.sequences:
            seen, known = self._seen.get(sequence, 0), self._growing.count(sequence)
            if seen < known:
                news.append(self._growing.between(sequence, seen, known))
                self._seen[sequence] = known
        return news
