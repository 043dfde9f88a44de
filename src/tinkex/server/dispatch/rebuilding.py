"""
Which models are built again at once, after an engine died.

An owner who is alone has all of theirs built together. While others want the same engine, each
owner has one at a time, so that many models of one do not hold up the only one of another.
"""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator

from tinkex.server.dispatch.run import Run


class Rebuilding:
    """Models that are being built again. `contested` says whether several owners want an engine."""

    def __init__(self, contested: Callable[[str], bool]) -> None:
        self._contested = contested
        #: By base model and owner, in the order in which they began.
        self._models: defaultdict[tuple[str, str], list[Run]] = defaultdict(list)
        self._changed = asyncio.Event()

    @contextlib.contextmanager
    def model(self, run: Run) -> Iterator[None]:
        """This model is being built again, step by step: each waits for `turn`."""
        place = (run.model.base_model, run.model.owner)
        self._models[place].append(run)
        try:
            yield
        finally:
            self._models[place].remove(run)
            if not self._models[place]:
                del self._models[place]
            self.look_again()

    async def turn(self, run: Run) -> None:
        """Until the next step of this model may be built again."""
        while not self._may(run):
            await self._changed.wait()

    def look_again(self) -> None:
        """Somebody may go on who could not before."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _may(self, run: Run) -> bool:
        model = run.model
        first = self._models[model.base_model, model.owner][0]
        return first is run or not self._contested(model.base_model)
