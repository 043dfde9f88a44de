"""Places for training in each engine, handed out fairly: a turn runs once it has one."""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable

from tinkex.server.dispatch.run import Run
from tinkex.server.plan import Turn
from tinkex.server.shares import Ask, Shares, Waiting


class Places:
    """Who is next is decided in `shares`; this wakes them."""

    def __init__(self, *, max_training: int = 0) -> None:
        #: Of each owner who was not given a number of their own; 0 is any number.
        self._max_training_each = max_training
        self._shares: defaultdict[str, Shares] = defaultdict(Shares)
        #: Turns that have a place, or wait for one; and the requests in those turns.
        self._given: dict[Ask, asyncio.Event] = {}
        self._asking: dict[str, tuple[Shares, Ask]] = {}
        self._max_training: dict[str, int] = {}
        #: Called when a turn is over: others may do what they could not before.
        self.freed: Callable[[], None] = lambda: None

    def allow(self, owner: str, max_training: int) -> None:
        """From now on so many models of this owner may train at once; 0 is any number."""
        if max_training == self._max_training_each:
            self._max_training.pop(owner, None)
        else:
            self._max_training[owner] = max_training

    def why(self, request_id: str) -> Waiting | None:
        """How a request stands that has a place or waits for one."""
        if (held := self._asking.get(request_id)) is None:
            return None
        shares, ask = held
        return shares.why(ask)

    def contested(self, base_model: str) -> bool:
        """Whether several owners train on this engine, or wait to."""
        return self._shares[base_model].contested

    @contextlib.asynccontextmanager
    async def place(self, run: Run, turn: Turn) -> AsyncIterator[None]:
        """One of the engine's places for training, once this owner's turn for it has come."""
        shares = self._shares[run.model.base_model]
        owner = run.model.owner
        ask = Ask(owner=owner, most=self._max_training.get(owner, self._max_training_each))
        given = self._given[ask] = asyncio.Event()
        self._asking.update({step.request_id: (shares, ask) for step in turn.steps})
        computed_s = run.computed_s
        shares.ask(ask)
        try:
            self._give(shares)
            await given.wait()
            yield
        finally:
            del self._given[ask]
            for step in turn.steps:
                self._asking.pop(step.request_id, None)
            shares.done(ask, used_s=run.computed_s - computed_s)
            self._give(shares)
            self.freed()

    def _give(self, shares: Shares) -> None:
        while (ask := shares.take()) is not None:
            self._given[ask].set()
