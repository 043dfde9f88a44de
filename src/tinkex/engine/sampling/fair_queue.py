"""Whose waiting work comes next: the owner for whom the fewest tokens were computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Generic, TypeVar

WorkT = TypeVar("WorkT")


class FairQueue(Generic[WorkT]):
    """
    A queue for each owner.

    Every token computed for an owner is counted, and the one with the lowest count comes next.
    Somebody who comes back after a while starts at the lowest count of those who are here: time
    away earns nothing, or one could save it up and shut the others out.
    """

    def __init__(self) -> None:
        self._queues: dict[str, deque[WorkT]] = {}
        self._served: dict[str, int] = {}

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def __iter__(self) -> Iterator[WorkT]:
        for queue in self._queues.values():
            yield from queue

    @property
    def served(self) -> dict[str, int]:
        """Tokens by owner, above the count at which each of them came."""
        return dict(self._served)

    def add(self, owner: str, work: WorkT, *, active: AbstractSet[str]) -> None:
        """New work; `active` are the owners who have some elsewhere."""
        present = active | self._queues.keys()
        if owner not in present:
            others = [self._served.get(other, 0) for other in present]
            # Nobody else is left whose count means anything.
            self._served = {name: self._served.get(name, 0) for name in present}
            self._served[owner] = min(others, default=0)
        self._queues.setdefault(owner, deque()).append(work)

    def charge(self, owner: str, tokens: int) -> None:
        self._served[owner] = self._served.get(owner, 0) + tokens

    def owners(self) -> Sequence[str]:
        """Who waits, next first; among equals who came first."""
        return sorted(self._queues, key=lambda owner: self._served.get(owner, 0))

    def work_of(self, owner: str) -> Sequence[WorkT]:
        return self._queues.get(owner, ())

    def requeue(self, owner: str, work: WorkT) -> None:
        """Work that had begun: before all other of its owner."""
        self._queues.setdefault(owner, deque()).appendleft(work)

    def insert_after(self, owner: str, before: WorkT, work: WorkT) -> None:
        queue = self._queues[owner]
        queue.insert(queue.index(before) + 1, work)

    def remove(self, owner: str, work: WorkT) -> None:
        queue = self._queues[owner]
        queue.remove(work)
        if not queue:
            del self._queues[owner]

    def retain(self, wanted: Callable[[WorkT], bool]) -> None:
        """Drops everything else."""
        queues = {owner: deque(filter(wanted, queue)) for owner, queue in self._queues.items()}
        self._queues = {owner: queue for owner, queue in queues.items() if queue}
