"""
Who is with an engine together, so that one that kills it is found and the others are not blamed.

An engine takes everything with it that it was working on. What was lost once is simply tried again:
most deaths have nothing to do with the work. What was lost twice is a suspect, and is tried apart
from everybody else, alone or at first in small groups. What dies alone is the culprit; the others
are cleared.

Counts outlive this process: `Desk` writes them down when an engine dies, and a roll tells the next
process who was with an engine when this one ended without a word.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

from tinkex.server.roll import Roll

#: Lost so often, the last time alone: it is not tried again.
MOST_DEATHS = 3
#: Lost so often: tried apart from the others.
SUSPECT = MOST_DEATHS - 1
#: So many suspects are tried one by one at once; more are narrowed down, this many groups at a time.
FEW = 16
GROUPS = 8
#: On the roll, work that is no request.
OTHER = ("snapshot",)


def width(suspects: int, deaths: int) -> int:
    """How many suspects run together, of so many that were lost so often."""
    if suspects <= FEW:
        return 1
    return max(1, int(suspects / GROUPS ** (deaths - SUSPECT + 1)))


@dataclass(slots=True, eq=False)
class Visit:
    """One turn of a model, or one sample, with an engine."""

    deaths: int
    #: Nobody else was with the engine at any time of this visit.
    alone: bool = True
    names: Sequence[str] = OTHER
    lines: Sequence[int] = ()
    _enter: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_suspect(self) -> bool:
        return self.deaths >= SUSPECT


class Company:
    """The visitors of one base model's engine, in the order in which they came."""

    def __init__(self, roll: Roll | None = None) -> None:
        self._roll = roll
        self._deaths: dict[str, int] = {}
        #: Found guilty by an earlier process, with the reason.
        self._condemned: dict[str, str] = {}
        self._inside: set[Visit] = set()
        self._suspects_inside = 0
        self._waiting: deque[Visit] = deque()
        self._kept_out: set[str] = set()

    def deaths(self, request_id: str) -> int:
        """How often this request was with an engine that died."""
        return self._deaths.get(request_id, 0)

    def keeps_out(self, request_id: str) -> bool:
        """Whether it waits because suspects are tried, or because it is one."""
        return request_id in self._kept_out

    @property
    def counted(self) -> Mapping[str, int]:
        """Everybody who was lost, and how often."""
        return self._deaths

    def remember(self, request_id: str, deaths: int, *, reason: str = "") -> None:
        """It was lost so often before; with a reason it is what killed the engines."""
        self._deaths[request_id] = deaths
        if reason:
            self._condemned[request_id] = reason

    def condemned(self, request_id: str) -> str | None:
        """Why it is not tried again, if it is not."""
        return self._condemned.get(request_id)

    def lost(self, request_id: str, visit: Visit, *, times: int = 1) -> bool:
        """A request was lost with its engine; whether it is the one that kills it."""
        deaths = self._deaths[request_id] = self.deaths(request_id) + times
        guilty = visit.alone and deaths >= MOST_DEATHS
        if guilty:
            # Whoever shared an engine with it was lost because of it.
            self._deaths.clear()
        return guilty

    def over(self, request_id: str) -> None:
        """A request has its result."""
        self._deaths.pop(request_id, None)
        self._condemned.pop(request_id, None)

    @contextlib.asynccontextmanager
    async def visit(self, *request_ids: str) -> AsyncIterator[Visit]:
        """With the engine, once those may come in who have been lost as often as these."""
        deaths = max(map(self.deaths, request_ids), default=0)
        visit = Visit(deaths, names=request_ids or OTHER)
        self._waiting.append(visit)
        self._let_in()
        try:
            if not visit._enter.is_set():
                self._kept_out.update(request_ids)
                await visit._enter.wait()
                self._kept_out.difference_update(request_ids)
            yield visit
        finally:
            self._kept_out.difference_update(request_ids)
            if visit in self._inside:
                self._inside.discard(visit)
                self._suspects_inside -= visit.is_suspect
            else:
                self._waiting.remove(visit)
            if self._roll is not None:
                self._roll.leave(visit.lines)
            self._let_in()

    def _let_in(self) -> None:
        """Strictly in order: suspects keep nobody out for ever, and are not kept out either."""
        while self._waiting and self._may_enter(self._waiting[0]):
            visit = self._waiting.popleft()
            if self._inside:
                visit.alone = False
                # Of several, none is alone any more.
                if len(self._inside) == 1:
                    next(iter(self._inside)).alone = False
            self._inside.add(visit)
            self._suspects_inside += visit.is_suspect
            if self._roll is not None:
                visit.lines = self._roll.enter(visit.names)
            visit._enter.set()

    def _may_enter(self, visit: Visit) -> bool:
        if not visit.is_suspect:
            return not self._suspects_inside
        if len(self._inside) > self._suspects_inside:
            return False
        suspects = self._suspects_inside + sum(other.is_suspect for other in self._waiting)
        return len(self._inside) < width(suspects, visit.deaths)
