"""
Which models are built again at once, after an engine died.

An owner who is alone has all of theirs built together. While others want the same engine, each
owner has one at a time, and the one with the least left to do goes first: a few small steps are
not held up by somebody else's many large ones, and those lose little by waiting.
"""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator

from tinkex.server.dispatch.run import Run
from tinkex.server.plan import Step, Turn
from tinkex.server.store import RequestRow

#: What a step costs beside its tokens, in tokens.
STEP_TOKENS = 100


def size_of(step: Step | RequestRow) -> int:
    """About how much work a step is, in tokens."""
    return step.tokens + STEP_TOKENS


class Rebuilding:
    """Models that are being built again. `contested` says whether several owners want an engine."""

    def __init__(self, contested: Callable[[str], bool]) -> None:
        self._contested = contested
        #: By base model and owner: what each model has left to do, in the order they began.
        self._left: defaultdict[str, dict[str, dict[str, int]]] = defaultdict(dict)
        self._changed = asyncio.Event()

    @contextlib.contextmanager
    def model(self, run: Run) -> Iterator[None]:
        """This model is being built again, step by step: each waits for `turn`."""
        model = run.model
        owners = self._left[model.base_model]
        # Nothing until its log has been read.
        owners.setdefault(model.owner, {})[model.model_id] = 0
        try:
            yield
        finally:
            del owners[model.owner][model.model_id]
            if not owners[model.owner]:
                del owners[model.owner]
            self.look_again()

    def left(self, run: Run, tokens: int) -> None:
        """What this model has left to do."""
        model = run.model
        self._left[model.base_model][model.owner][model.model_id] = tokens
        self.look_again()

    async def turn(self, run: Run) -> None:
        """Until the next step of this model may be built again."""
        while not self._may(run):
            await self._changed.wait()

    async def give_way(self, run: Run, turn: Turn) -> None:
        """
        Until no other owner has a model that is built again with less work than this turn is.

        An engine does one thing of each model in turn. A few small steps of a log would each wait
        for a large pass of somebody who has their model already.
        """
        size = sum(map(size_of, turn.steps))
        while self._less_left(run, size):
            await self._changed.wait()

    def _less_left(self, run: Run, size: int) -> bool:
        owners = self._left.get(run.model.base_model, {})
        return any(
            next(iter(each.values())) < size
            for owner, each in owners.items()
            if owner != run.model.owner
        )

    def look_again(self) -> None:
        """Somebody may go on who could not before."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _may(self, run: Run) -> bool:
        model = run.model
        if not self._contested(model.base_model):
            return True
        # One of each owner: the first that began.
        firsts = [next(iter(each.items())) for each in self._left[model.base_model].values()]
        least = min(left for _, left in firsts)
        return (model.model_id, least) in firsts
