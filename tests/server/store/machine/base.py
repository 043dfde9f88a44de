"""What every rule needs: the store and its model side by side, a clock, and things to pick from."""

import asyncio
import contextlib
import tempfile
import threading
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
    """Takes the place of the module `time`: it is later only when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1_800_000_000.0

    def time(self) -> float:
        return self.now_s


class Base(RuleBasedStateMachine):
    """The store and its model, side by side. Ids are the store's; everything else is foretold."""

    url: ClassVar[str]
    root: ClassVar[Path]
    clock: ClassVar[Clock]

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.folder = Path(tempfile.mkdtemp(dir=self.root))
        self.world = expected.World()
        #: Files that nothing refers to: left by work that was refused, or undone.
        self.orphans: set[str] = set()
        #: Rooms in which the last operation left one more, by what the model knows.
        self.left: list[str] = []
        self.steps = 0
        #: Requests whose rows were deleted.
        self.gone: set[str] = set()
        self.secrets: dict[int, str] = {}
        self.clock.now_s = 1_800_000_000.0
        self.store = self.opened()

    def opened(self) -> Store:
        return open_store(
            db_url=self.url, storage_url=str(self.folder), folder=self.folder, exclusive=True
        )

    def run(self, act: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(act)

    def later(self) -> float:
        """Each operation has a moment of its own."""
        self.clock.now_s += 1.0
        return self.clock.now_s

    def flush(self) -> None:
        """Any transaction takes along what nobody waited for."""
        self.run(self.store.retention.free_pages())

    @staticmethod
    def pick(among: Sequence[T], number: int) -> T:
        return among[number % len(among)]

    @contextlib.asynccontextmanager
    async def one_transaction(self) -> AsyncIterator[None]:
        """All that is written inside is written together."""
        held, go = threading.Event(), threading.Event()

        def hold(_connection: sa.Connection) -> None:
            held.set()
            assert go.wait(30)

        first = self.store._database.submit(hold)
        await asyncio.to_thread(held.wait, 30)
        yield
        # Whoever was asked to write has come as far as to wait for it.
        await asyncio.sleep(0)
        go.set()
        await first

    def some_session(self, number: int) -> expected.Session:
        return self.pick(list(self.world.sessions.values()), number)

    def some_model(self, number: int) -> expected.Model:
        return self.pick(list(self.world.models.values()), number)

    def teardown(self) -> None:
        self.store.close()
        self.runner.close()
