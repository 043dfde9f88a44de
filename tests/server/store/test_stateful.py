"""
Random operations of the store, compared with a reference model of plain dictionaries.

After each operation every table and every file is compared with the model. At any point the store
is closed and opened, or dies in a transaction: acknowledged writes are there, others are rolled
back. On SQLite, and on PostgreSQL where it is installed.

    TINKEX_PROPERTY_EXAMPLES=500 pytest tests/server/store/test_stateful.py

runs more examples, different ones each time.
"""

import asyncio
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, settings
from hypothesis.stateful import initialize, rule, run_state_machine_as_test

from postgres import Postgres
from server.store.machine.base import OWNERS, PICK, Clock
from server.store.machine.clients import Clients
from server.store.machine.comparing import Comparing
from server.store.machine.keys import Keys
from server.store.machine.retention import Retention
from tinkex.server.queued_request import Kind, Outcome
from tinkex.server.store import (
    checkpoint_catalog,
    checkpoints,
    database,
    events,
    keys,
    models,
    quotas,
    request_rows,
    requests,
    retention,
    sessions,
    snapshots,
)
from tinkex.server.store.keys import MARKER
from tinkex.server.store.schema import metadata

EXAMPLES = os.environ.get("TINKEX_PROPERTY_EXAMPLES")
STEPS = 50

#: The modules of the store that use the clock.
TIMED = (
    *(checkpoint_catalog, checkpoints, database, events, keys, models, quotas),
    *(request_rows, requests, retention, sessions, snapshots),
)


class StoreMachine(Clients, Retention, Keys, Comparing):
    """The rules of all areas, an initial state, passing time, and process ends."""

    @initialize()
    def empty(self) -> None:
        def act(connection: sa.Connection) -> None:
            for table in reversed(metadata.sorted_tables):
                connection.execute(table.delete())

        async def write() -> None:
            await self.store._database.write(act)

        self.run(write())
        # The keys of an earlier example were deleted with its rows.
        (self.folder / MARKER).unlink(missing_ok=True)
        # Most operations need something to work on.
        for owner in ("ann", "bob"):
            self.create_session(owner, "k1")  # idempotency keys are per owner
            self.create_model(1, 0)
            self.create_sampler(1, 0, join=False)
            self.accept_steps(1, [1, 2], Kind.FORWARD_BACKWARD, large=owner == "bob")
            self.accept_samples(1, 0, [0, 1])
            while self.world.waiting():
                outcome = "small" if owner == "ann" else "large"
                self.finish_requests([0, 1], outcome, again=False, beside=owner == "bob")
            ttl_s = 500.0 if owner == "ann" else None
            self.save_checkpoint(1, "weights", "a", 0.0, False, ttl_s, None)
            self.load_checkpoint(1, 1)
            self.save_checkpoint(1, "sampler_weights", "a", 0.0, False, None, 2)
        # One model has no snapshot; the other has two, and a step after them.
        for step_number in (1, 2):
            self.save_snapshot(1, -step_number, None)
        self.accept_steps(1, [7], Kind.OPTIM_STEP, large=False)
        # A taken name, an expired name, and a model whose creation failed.
        self.save_checkpoint(1, "weights", "a", 0.0, False, None, None)
        self.save_checkpoint(0, "weights", "a", 600.0, False, 500.0, None)
        self.create_model(0, 1)
        self.finish_requests([-1], "failed", again=False, beside=False)
        # One client timed out and came back; the other has waiting requests, so it did not.
        self.mark_timed_out(0.0, 0, comes_back=True)

    @rule(seconds=st.sampled_from([10.0, 1000.0, 50_000.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @rule()
    def other_writer(self) -> None:
        self.switch()

    @rule(dies=st.booleans(), number=PICK, seq_id=st.integers(1, 9))
    def restart(self, dies: bool, number: int, seq_id: int) -> None:
        if dies:
            self.crash(number, seq_id)
        self.store.close()
        self.store = self.opened()

    def crash(self, number: int, seq_id: int) -> None:
        """The process dies in a transaction: no caller gets a result, and nothing is stored."""
        self.later()
        database = self.store._database

        def die(_connection: sa.Connection) -> None:
            raise SystemExit

        async def act() -> None:
            unanswered: list[asyncio.Future[Any]] = []
            async with self.one_transaction():
                submit(unanswered)
                await asyncio.sleep(0)
                unanswered.append(database.write(die))
            await asyncio.to_thread(database.writer._thread.join, 30)
            assert not any(one.done() for one in unanswered)
            for one in unanswered:
                one.cancel()
            await asyncio.gather(*unanswered, return_exceptions=True)

        def submit(unanswered: list[asyncio.Future[Any]]) -> None:
            if self.world.models:
                model = self.pick(list(self.world.models.values()), number)
                new = self.step(model, seq_id, Kind.OPTIM_STEP)
                unanswered.append(asyncio.ensure_future(self.store.requests.accept(new)))
            unanswered += [
                self.store.requests.finish_one(self.queued(one), Outcome(result=b"never"))
                for one in self.world.waiting()[:3]
            ]
            for session_id in self.world.sessions:
                self.store.sessions.mark_seen(session_id)
            for request_id in self.world.requests:
                self.store.requests.mark_fetched(request_id)

        self.run(act())

    @rule(number=PICK, owner=OWNERS)
    def read(self, number: int, owner: str) -> None:
        if self.world.requests:
            self.read_request(number)
        if self.world.names:
            self.find_checkpoint(number, owner)
        self.list_checkpoints(owner)


def check(url: str, root: Path, clock: Clock, *, examples: int) -> None:
    class Machine(StoreMachine):
        pass

    Machine.url, Machine.root, Machine.clock = url, root, clock
    # The same examples each time, unless more are requested.
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=int(EXAMPLES or examples),
            stateful_step_count=STEPS,
            deadline=None,
            derandomize=EXAMPLES is None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in TIMED:
        if hasattr(module, "time"):
            monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory if possible: a killed process leaves the same files there."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as made:
        yield Path(made)


# For the threads that die in `crash`.
@pytest.mark.filterwarnings("ignore:Exception in thread tinkex-writer")
@pytest.mark.timeout(3600 if EXAMPLES else 180)
def test_the_store_on_sqlite_matches_the_reference_model(folder: Path, clock: Clock) -> None:
    check(f"sqlite:///{folder / 'tinkex.db'}", folder, clock, examples=12)


@pytest.mark.filterwarnings("ignore:Exception in thread tinkex-writer")
@pytest.mark.timeout(3600 if EXAMPLES else 180)
def test_the_store_on_postgresql_matches_the_reference_model(
    folder: Path, clock: Clock, postgres: Postgres
) -> None:
    # Fewer than above: what the two databases have in common is shown there.
    check(postgres.database(), folder, clock, examples=6)
