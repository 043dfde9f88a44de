"""Who samples next: so many at a time, in order within a client, in turn between clients."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

E = TypeVar("E")

NO_LIMIT = 2**31


class Line(Generic[E]):
    """
    What one client has waiting, first come, first served.

    What waits is an entry in a queue and nothing more: no task, no socket. `begin` starts one,
    and says whether there was anything to start; it may have been taken back meanwhile.
    """

    def __init__(self, begin: Callable[[E], bool], limit: int | None = None) -> None:
        self.begin = begin
        #: How many of this line may be inside together.
        self.limit = NO_LIMIT if limit is None else limit
        self.waiting: deque[E] = deque()
        self.inside = 0
        self._in_turn = False

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.inside


class Admission:
    """
    Lets in at most `size` at a time from any number of lines.

    Lines take turns, one entry each, so that a client with ten thousand waiting does not keep
    another from its first. Belongs to one event loop.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0
        #: Lines that have something waiting and are below their own limit.
        self._turns: deque[Line[Any]] = deque()

    def join(self, line: Line[E], entries: Iterable[E]) -> None:
        line.waiting.extend(entries)
        self._queue(line)
        self._let_in()

    def leave(self, line: Line[Any]) -> None:
        """One that `line.begin` started has ended."""
        line.inside -= 1
        self.used -= 1
        self._queue(line)
        self._let_in()

    def _queue(self, line: Line[Any]) -> None:
        if line.waiting and line.inside < line.limit and not line._in_turn:
            line._in_turn = True
            self._turns.append(line)

    def _let_in(self) -> None:
        while self._turns and self.used < self.size:
            line = self._turns.popleft()
            line._in_turn = False
            while line.waiting:
                if line.begin(line.waiting.popleft()):
                    line.inside += 1
                    self.used += 1
                    break
            self._queue(line)
