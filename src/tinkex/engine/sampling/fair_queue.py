"""A fair queue: the owner who has been served the fewest tokens comes next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Generic, TypeVar

WorkT = TypeVar("WorkT")


class FairQueue(Generic[WorkT]):
    """
    One queue for each owner.

    Every token computed for an owner is counted, and the owner with the lowest count comes next. An
    owner who returns after a pause starts at the lowest count of the present owners, so that nobody
    can accumulate credit while idle and then block the others.
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
        """Token counts by owner, relative to the counts at which they started."""
        return dict(self._served)

    def add(self, owner: str, work: WorkT, *, active: AbstractSet[str]) -> None:
        """Adds new work. `active` are the owners who have admitted work."""
        present = active | self._queues.keys()
        if owner not in present:
            others = [self._served.get(other, 0) for other in present]
            # Forget owners without work: their counts are no longer needed.
            self._served = {name: self._served.get(name, 0) for name in present}
            self._served[owner] = min(others, default=0)
        self._queues.setdefault(owner, deque()).append(work)

    def charge(self, owner: str, tokens: int) -> None:
        self._served[owner] = self._served.get(owner, 0) + tokens

    def owners(self) -> Sequence[str]:
        """Owners with waiting work, next first. Ties are broken by order of arrival."""
        return sorted(self._queues, key=lambda owner: self._served.get(owner, 0))

    def work_of(self, owner: str) -> Sequence[WorkT]:
        return self._queues.get(owner, ())

    def requeue(self, owner: str, work: WorkT) -> None:
        """Puts preempted work before all other work of its owner."""
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
        """Removes all work for which `wanted` is false."""
        queues = {owner: deque(filter(wanted, queue)) for owner, queue in self._queues.items()}
        self._queues = {owner: queue for owner, queue in queues.items() if queue}
