"""Chooses which data of which models go into the next micro-batch, from their lengths alone."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class ModelQueue:
    """The waiting data of one model, in order."""

    model_id: str
    #: A batch never mixes passes with and without gradients.
    backward: bool
    #: Tokens of each datum.
    lengths: Sequence[int]


class Selection(NamedTuple):
    """The next `size` data of a model."""

    model_id: str
    size: int


class BatchMixer:
    """
    Takes datum after datum from the model that has been served the fewest tokens.

    A datum that does not fit excludes its model from the rest of this batch; the model then comes
    first in the next one. Over time, models with work get the same number of tokens, whether their
    data are long or short. A model that returns after a pause starts at the lowest count of the
    others, so it cannot accumulate credit while idle.
    """

    def __init__(self) -> None:
        self._served: dict[str, int] = {}

    def next_batch(self, queues: Sequence[ModelQueue], max_tokens: int) -> list[Selection]:
        """
        Data for one batch of at most `max_tokens`; a longer datum runs alone.

        Ties go to the model with the fewest waiting tokens, then to the earlier in `queues`: a
        small pass that has just arrived does not wait for another model's long datum. The first
        model served determines whether the batch has gradients.
        """
        self._rebase_counts([queue.model_id for queue in queues])
        served = self._served
        waiting = {queue.model_id: sum(queue.lengths) for queue in queues}
        first = min(queues, key=lambda queue: (served[queue.model_id], waiting[queue.model_id]))
        counts: dict[str, int] = {}
        left = max_tokens
        heap = [
            (served[queue.model_id], waiting[queue.model_id], index, queue)
            for index, queue in enumerate(queues)
            if queue.backward == first.backward
        ]
        heapq.heapify(heap)
        while heap:
            _, _, index, queue = heapq.heappop(heap)
            count = counts.get(queue.model_id, 0)
            length = queue.lengths[count]
            if length > left and counts:
                continue
            left -= length
            served[queue.model_id] += length
            counts[queue.model_id] = count = count + 1
            if count < len(queue.lengths):
                total = waiting[queue.model_id]
                heapq.heappush(heap, (served[queue.model_id], total, index, queue))
        return [
            Selection(queue.model_id, counts[queue.model_id])
            for queue in queues
            if queue.model_id in counts
        ]

    def _rebase_counts(self, present: Sequence[str]) -> None:
        known = {name: self._served[name] for name in present if name in self._served}
        lowest = min(known.values(), default=0)
        # Counts are relative to the lowest, so they stay small however long the engine runs.
        self._served = {name: known.get(name, lowest) - lowest for name in present}
