"""Whose rows go into the next micro-batch: a decision over lengths. Knows no tensors and no clock."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class ModelQueue:
    """The rows of one model that wait, in their order."""

    model_id: str
    #: Rows with gradients and rows without are never in one batch.
    backward: bool
    #: Tokens of each row.
    lengths: Sequence[int]


class Selection(NamedTuple):
    """The next rows of a model, so many."""

    model_id: str
    rows: int


class BatchMixer:
    """
    CheckedDatum after row from the model that got the fewest tokens so far.

    A row that does not fit ends its model's part in this batch; having got the fewest, the model
    comes first in the next one. So over time models that have work get the same number of tokens,
    whether their rows are long or short. Who comes back after a while starts at the lowest count
    of those who are here: time away earns nothing.
    """

    def __init__(self) -> None:
        self._served: dict[str, int] = {}

    def next_batch(self, queues: Sequence[ModelQueue], max_tokens: int) -> list[Selection]:
        """
        Rows for one batch of at most `max_tokens`; a longer row goes alone.

        Among equals who comes first here comes first. The model that is served first decides
        whether the batch has gradients.
        """
        self._rebase_counts([queue.model_id for queue in queues])
        served = self._served
        first = min(queues, key=lambda queue: served[queue.model_id])
        counts: dict[str, int] = {}
        left = max_tokens
        line = [
            (served[queue.model_id], place, queue)
            for place, queue in enumerate(queues)
            if queue.backward == first.backward
        ]
        heapq.heapify(line)
        while line:
            _, place, queue = heapq.heappop(line)
            count = counts.get(queue.model_id, 0)
            length = queue.lengths[count]
            if length > left and counts:
                continue
            left -= length
            served[queue.model_id] += length
            counts[queue.model_id] = count = count + 1
            if count < len(queue.lengths):
                heapq.heappush(line, (served[queue.model_id], place, queue))
        return [
            Selection(queue.model_id, counts[queue.model_id])
            for queue in queues
            if queue.model_id in counts
        ]

    def _rebase_counts(self, present: Sequence[str]) -> None:
        known = {name: self._served[name] for name in present if name in self._served}
        lowest = min(known.values(), default=0)
        # Counted from the lowest: the numbers stay small however long the engine runs.
        self._served = {name: known.get(name, lowest) - lowest for name in present}
