"""Tokens of a sample that is still running, and readers that follow it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The next tokens of one sequence of a sample, with their logprobs."""

    #: Index of the sequence in its request, from 0.
    sequence: int
    tokens: list[int]
    #: One for each token; NaN if the service does not record them.
    logprobs: list[float]
    #: The most likely (token, logprob) pairs at each position, if they were requested.
    tops: list[list[tuple[int, float]]] = field(default_factory=list)


class PartialSample:
    """
    The tokens of a sample so far. Tokens that arrive twice are stored once.

    Takes eight bytes per token, like the finished response, and more for top logprobs. Each reader keeps its own position, so
    a slow reader needs no queue and no extra memory.
    """

    def __init__(self) -> None:
        self._tokens: dict[int, array[int]] = {}
        self._logprobs: dict[int, array[float]] = {}
        self._tops: dict[int, list[list[tuple[int, float]]]] = {}

    def count(self, sequence: int) -> int:
        """Number of known tokens of this sequence."""
        return len(self._tokens.get(sequence, ()))

    def add(
        self,
        sequence: int,
        tokens: Sequence[int],
        logprobs: Sequence[float] | None,
        *,
        start: int,
        tops: Sequence[list[tuple[int, float]]] = (),
    ) -> bool:
        """
        Add tokens that begin at position `start` of their sequence; True if any of them is new.

        Known tokens are skipped. Tokens after a gap are dropped: the finished response has them.
        """
        known = self.count(sequence)
        if not start <= known < start + len(tokens):
            return False
        new = known - start
        values = [float("nan")] * len(tokens) if logprobs is None else logprobs
        self._tokens.setdefault(sequence, array("i")).extend(tokens[new:])
        self._logprobs.setdefault(sequence, array("f")).extend(values[new:])
        if tops:
            self._tops.setdefault(sequence, []).extend(tops[new:])
        return True

    def slice(self, sequence: int, start: int, stop: int) -> SampledTokens:
        return SampledTokens(
            sequence,
            self._tokens[sequence][start:stop].tolist(),
            self._logprobs[sequence][start:stop].tolist(),
            self._tops.get(sequence, [])[start:stop],
        )

    @property
    def sequences(self) -> list[int]:
        """Indexes of the sequences that have tokens."""
        return sorted(self._tokens)


class PartialSampleReader:
    """One reader's position in a partial sample."""

    def __init__(self, sample: PartialSample) -> None:
        self._sample = sample
        self._read: dict[int, int] = {}

    def read_new(self) -> list[SampledTokens]:
        """Tokens that arrived since the last call, at most one piece per sequence."""
        pieces = []
        for sequence in self._sample.sequences:
            position, known = self._read.get(sequence, 0), self._sample.count(sequence)
            if position < known:
                pieces.append(self._sample.slice(sequence, position, known))
                self._read[sequence] = known
        return pieces
