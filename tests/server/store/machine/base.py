"""The base of all rules: the store, its reference model, a clock, and values to pick from."""

import asyncio
import contextlib
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import hypothesis.strategies as st
import sqlalchemy as sa
from hypothesis.stateful import RuleBasedStateMachine

from server.store import reference_model as expected
from tinkex.server.store import Store, open_store

T = TypeVar("T")

OWNERS = st.sampled_from(["ann", "bob"])
PICK = st.integers(0, 15)
AGES_S = st.sampled_from([0.0, 10.0, 1000.0, 50_000.0])
BASE = "b"


class Clock:
    """Replaces the module `time`; advances only when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1_800_000_000.0

    def time(self) -> float:
        return self.now_s

    def monotonic(self) -> float:
        """The real one, for durations."""
        return time.monotonic()


class Base(RuleBasedStateMachine):
    """The store and its reference model. Ids come from the store; the model predicts the rest."""

    url: ClassVar[str]
    root: ClassVar[Path]
    clock: ClassVar[Clock]

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.folder = Path(tempfile.mkdtemp(dir=self.root))
        self.world = expected.World()
        #: Files that no row refers to, from refused or rolled-back work.
        self.orphans: set[str] = set()
        #: Key prefixes of new orphans that the last operation must have left.
        self.left: list[str] = []
        self.steps = 0
        #: Requests whose rows were deleted.
        self.gone: set[str] = set()
        self.secrets: dict[int, str] = {}
        self.clock.now_s = 1_800_000_000.0
        self.store = self.opened()
        #: Another process that writes to the same database.
        self.other = self.opened()

    def opened(self) -> Store:
        return open_store(db_url=self.url, storage_url=str(self.folder), folder=self.folder)

    def switch(self) -> None:
        """The other process does the next operations."""
        self.flush()
        self.store, self.other = self.other, self.store

    def run(self, act: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(act)

    def later(self) -> float:
        """Each operation has its own time."""
        self.clock.now_s += 1.0
        return self.clock.now_s

    def flush(self) -> None:
        """Write the deferred writes: any transaction includes them."""
        self.run(self.store.retention.free_pages())

    @staticmethod
    def pick(options: Sequence[T], number: int) -> T:
        return options[number % len(options)]

    @contextlib.asynccontextmanager
    async def one_transaction(self) -> AsyncIterator[None]:
        """All writes inside are in one transaction."""
        held, go = threading.Event(), threading.Event()

        def hold(_connection: sa.Connection) -> None:
            held.set()
            assert go.wait(30)

        first = self.store._database.write(hold)
        await asyncio.to_thread(held.wait, 30)
        yield
        # Lets tasks that write submit their writes.
        await asyncio.sleep(0)
        go.set()
        await first

    def some_session(self, number: int) -> expected.Session:
        return self.pick(list(self.world.sessions.values()), number)

    def some_model(self, number: int) -> expected.Model:
        return self.pick(list(self.world.models.values()), number)

    def teardown(self) -> None:
        self.store.close()
        self.other.close()
        self.runner.close()
