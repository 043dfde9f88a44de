"""One thread that writes: many small writes become one transaction, and each waits for its commit."""

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import sqlalchemy as sa

from tinkex.server.store.storage_health import (
    UNREACHABLE,
    FAILING,
    StorageHealth,
    NewDataRefused,
    StorageError,
    StorageProblem,
    storage_problem,
)

T = TypeVar("T")
Item = TypeVar("Item")
Act = Callable[[sa.Connection], Any]
#: Writes of one kind in one call: items in the order they came, answers in the same order.
BatchWrite = Callable[[sa.Connection, Sequence[Item]], Sequence[T]]

log = logging.getLogger("tinkex.server.store")

# Writes nobody waits for (when a session was last seen) join the next transaction, or make
# one of their own after this long.
DEFER_MAX_S = 5.0
# Of those that do not replace each other, so many wait while the database says nothing.
MAX_DEFERRED = 10_000
# Keeps one transaction, and so the wait of the first in it, short under a flood.
MAX_GROUP = 500
# A database that is started again is waited for; whoever writes meanwhile waits as well.
RECONNECT_S = 30.0
RECONNECT_RETRY_S = 0.2
# Whoever comes after so long without an answer of the database is refused, and does not wait.
RESPONSE_TIMEOUT_S = 10.0
# What must be written is tried again this often while the disk does not take it.
REQUIRED_RETRY_S = 0.5
# While PostgreSQL has not yet ended the transaction of a lost connection.
STATUS_RETRY_S = 0.1


@dataclass(frozen=True, slots=True)
class _Write:
    many: BatchWrite[Any, Any]
    item: Any
    promise: asyncio.Future[Any] | None
    #: ProjectStorage, in its order, until the disk takes it: somebody was promised this.
    required: bool = False
    #: Called when it is dropped instead of written.
    dropped: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class _Outcome:
    promise: asyncio.Future[Any]
    answer: Any = None
    error: Exception | None = None


class Writer:
    """
    Group commit.

    While one transaction is being forced to disk the next writes gather, so the disk is asked
    once for all of them; a write that comes alone waits for nothing. An act that raises undoes
    only itself: the others of its group are run again, each in a transaction of its own. When the
    connection is lost the group is run again on the next one, unless the database says that its
    commit was kept. When the disk is full or fails, nothing of the group was
    written: what was promised stays here and is tried again, and the rest is refused.
    """

    def __init__(
        self,
        engine: sa.Engine,
        *,
        last: Act | None = None,
        undone: Act | None = None,
        condition: StorageHealth | None = None,
    ) -> None:
        self._engine = engine
        self._health = condition or StorageHealth()
        self._health.watch(self._response_timeout)
        #: Run at the end of each transaction, and after one that was undone.
        self._last = last
        self._undone = undone
        self._changed = threading.Condition()
        self._eager: list[_Write] = []
        self._lazy: deque[_Write] = deque()
        #: The newest write about each thing.
        self._newest: dict[Hashable, _Write] = {}
        #: Whether the log has been told that some are dropped.
        self._dropping = False
        #: What must be written and could not be.
        self._stuck: list[_Write] = []
        self._closing = False
        #: Since when the database has owed an answer; None while it owes none.
        self._asked_s: float | None = None
        #: Until when a database that is away is waited for; None while it is there.
        self._away_until_s: float | None = None
        self._away_reason = ""
        #: Whether the log has been told that it says nothing.
        self._noted = False
        #: Transactions committed, for the benchmark of group commit.
        self.commits = 0
        self._thread = threading.Thread(target=self._run, name="tinkex-writer", daemon=True)
        self._thread.start()

    def submit(self, act: Callable[[sa.Connection], T], *, required: bool = False) -> asyncio.Future[T]:
        """
        What `act` answers, once its transaction is on disk.

        Acts run in the order of these calls, whoever awaits which of them first. One that `must`
        be written waits for a disk that does not take it; any other raises StorageError.
        """
        return self._promised(_each, act, required)

    def submit_batched(
        self, many: BatchWrite[Item, T], item: Item, *, required: bool = False
    ) -> asyncio.Future[T]:
        """
        The same for a write that shares its statements with others of its kind.

        Within a transaction, writes of different such kinds may change places with each other,
        but not with an act: what must see each other is not of two kinds.
        """
        return self._promised(many, item, required)

    def _promised(self, many: BatchWrite[Any, T], item: Any, required: bool) -> asyncio.Future[T]:
        # A caller that is cancelled only stops listening: the write happens.
        promise: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        if not required and (problem := self._response_timeout()) is not None:
            promise.set_exception(StorageError(problem))
            return promise
        with self._changed:
            if self._closing:
                raise RuntimeError("the store is closed: nothing can be written any more")
            self._eager.append(_Write(many, item, promise, required))
            self._changed.notify()
        return promise

    def later(
        self,
        act: Act,
        *,
        about: Hashable = None,
        dropped: Callable[[], None] | None = None,
    ) -> None:
        """
        Written with the next transaction; lost if the process dies before.

        It replaces a waiting one `about` the same thing. Of those about nothing, the oldest is
        dropped when too many wait.
        """
        write = _Write(_each, act, None, dropped=dropped)
        with self._changed:
            if self._closing:
                return
            was_idle = not self._lazy and not self._newest
            if about is not None:
                self._newest[about] = write
            else:
                self._lazy.append(write)
            # The thread sleeps without a limit when it has nothing; the first lazy write
            # starts its clock.
            if was_idle:
                self._changed.notify()
            oldest = self._lazy.popleft() if len(self._lazy) > MAX_DEFERRED else None
        if oldest is not None:
            self._drop(oldest)

    def _drop(self, write: _Write) -> None:
        if write.dropped is not None:
            write.dropped()
        if not self._dropping:
            self._dropping = True
            log.warning(
                "the database takes no writes, and more than %d wait that nobody waits for "
                "(which results were fetched, telemetry): the oldest are dropped until it does",
                MAX_DEFERRED,
            )

    def close(self) -> None:
        """Write what is waiting, then stop. Safe to repeat."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        with self._engine.connect() as connection:
            while group := self._next_group():
                self._commit(connection, group)
                self._asked_s = None
                if self._noted:
                    self._noted = False
                    log.warning("the database has answered")

    def _next_group(self) -> list[_Write]:
        with self._changed:
            while not self._eager and not self._closing:
                has_lazy = self._lazy or self._newest
                wait_s = REQUIRED_RETRY_S if self._stuck else DEFER_MAX_S if has_lazy else None
                if not self._changed.wait(wait_s):
                    break
            lazy = [*self._newest.values(), *self._lazy]
            group = self._stuck + lazy + self._eager[:MAX_GROUP]
            self._stuck = []
            self._newest = {}
            self._lazy = deque()
            self._eager = self._eager[MAX_GROUP:]
            return group

    def _commit(self, connection: sa.Connection, group: list[_Write]) -> None:
        answers: list[Any] = []
        #: Of the transaction that these answers are from, once its commit may have been kept.
        mark: int | None = None
        while True:
            try:
                # First of all: a disk that hangs may hold up the look at it too.
                self._asks()
                self._health.before_commit()
                self._health.check_readable()
                self._asks()
                with connection.begin():
                    if mark is None or not was_kept(connection, mark):
                        mark = None
                        answers = self._answers(connection, group)
                        if self._last is not None:
                            self._last(connection)
                        mark = transaction_mark(connection)
                    self._asks()
            except Exception as error:  # noqa: BLE001  whatever an act raises is its caller's to see
                if connection.invalidated:
                    if self._waits_for_database(error, unsure=mark is not None):
                        continue
                elif self._undone is not None:
                    self._undone(connection)
                self._not_written(connection, group, error)
                return
            break
        self.commits += 1
        self._dropping = False
        self._away_until_s = None
        self._health.clear()
        _tell(
            [
                _Outcome(write.promise, answer)
                for write, answer in zip(group, answers, strict=True)
                if write.promise is not None
            ]
        )

    def _answers(self, connection: sa.Connection, group: list[_Write]) -> list[Any]:
        answers: list[Any] = [None] * len(group)
        for many, places in _calls(group):
            self._asks()
            found = many(connection, [group[place].item for place in places])
            for place, answer in zip(places, found, strict=True):
                answers[place] = answer
        return answers

    def _not_written(
        self, connection: sa.Connection, group: list[_Write], error: Exception
    ) -> None:
        refused = isinstance(error, NewDataRefused)
        if not refused and self._health.record(error) is not None:
            self._hold(group, error)
        elif len(group) > 1:
            self._commit_each(connection, group, error)
        elif (promise := group[0].promise) is not None:
            _tell([_Outcome(promise, error=error)])
        else:
            log.warning("a background write failed: %s", error)

    def _commit_each(
        self, connection: sa.Connection, group: list[_Write], error: Exception
    ) -> None:
        """Each in a transaction of its own, because one of them cannot be written at all."""
        for number, write in enumerate(group):
            self._commit(connection, [write])
            if self._stuck:
                # Results of one model must not overtake each other.
                self._hold(group[number + 1 :], error)
                return

    def _hold(self, group: list[_Write], error: Exception) -> None:
        """Nothing of this group is on disk, and the disk is to blame, not one of the writes."""
        refused = []
        for write in group:
            if write.required and not self._closing:
                self._stuck.append(write)
            elif write.promise is not None:
                refused.append(_Outcome(write.promise, error=self._health.as_storage_error(error)))
            elif write.dropped is not None:
                write.dropped()
        _tell(refused)

    def _asks(self) -> None:
        """From now on the database owes an answer, if it did not before."""
        if self._away_until_s is None:
            self._asked_s = time.monotonic()

    def _waits_for_database(self, error: Exception, *, unsure: bool) -> bool:
        """
        Sleep before the next try; False when there have been enough.

        What may be on disk is neither refused nor done again: it is waited for until that is known.
        """
        now_s = time.monotonic()
        if self._away_until_s is None:
            log.error("the connection to the database was lost, trying again: %s", error)
            self._away_until_s = now_s + RECONNECT_S
        problem = storage_problem(error)
        enough = problem is None or now_s > self._away_until_s
        if self._closing or (enough and not unsure):
            return False
        self._away_reason = str(error) if problem is None else problem.reason
        time.sleep(RECONNECT_RETRY_S)
        return True

    def _response_timeout(self) -> StorageProblem | None:
        """What whoever would have to wait for this thread is told; for all threads."""
        asked_s = self._asked_s
        if asked_s is None or (silent_s := time.monotonic() - asked_s) < RESPONSE_TIMEOUT_S:
            return None
        problem = not_responding(self._engine, silent_s)
        if self._away_until_s is not None:
            problem = StorageProblem(kind=UNREACHABLE, reason=self._away_reason)
        if not self._noted:
            self._noted = True
            log.error("%s %s", problem.text, problem.advice)
        return trouble


def not_responding(engine: sa.Engine, silent_s: float) -> StorageProblem:
    """A database that has not answered for so long."""
    kind = FAILING if engine.dialect.name == "sqlite" else UNREACHABLE
    return StorageProblem(kind=kind, reason=f"the database has not answered for {silent_s:.0f} s")


def transaction_mark(connection: sa.Connection) -> int | None:
    """A name for the transaction, to ask for it should its end not be heard; None on SQLite."""
    if connection.dialect.name == "sqlite":
        return None
    found: int = connection.exec_driver_sql("SELECT txid_current()").scalar_one()
    return found


def was_kept(connection: sa.Connection, mark: int) -> bool:
    """Whether that transaction was committed. Waits for one whose connection ends just now."""
    statement = sa.text("SELECT txid_status(:mark)").bindparams(mark=mark)
    while (state := connection.scalar(statement)) == "in progress":
        time.sleep(STATUS_RETRY_S)
    return bool(state == "committed")


def _each(connection: sa.Connection, acts: Sequence[Act]) -> list[Any]:
    return [act(connection) for act in acts]


def _calls(group: Sequence[_Write]) -> Iterator[tuple[BatchWrite[Any, Any], list[int]]]:
    """What is called for a group, each with the places of its writes. Acts keep theirs."""
    calls: dict[BatchWrite[Any, Any], list[int]] = {}
    for place, write in enumerate(group):
        if calls and (write.many is _each) is not (_each in calls):
            yield from calls.items()
            calls = {}
        calls.setdefault(write.many, []).append(place)
    yield from calls.items()


def _tell(outcomes: Sequence[_Outcome]) -> None:
    """Each loop is woken once, however many of its promises are kept."""
    loops = {outcome.promise.get_loop() for outcome in outcomes}
    for loop in loops:
        ours = [outcome for outcome in outcomes if outcome.promise.get_loop() is loop]
        # A loop that was closed meanwhile has nobody who listens.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_keep_promises, ours)


def _keep_promises(outcomes: Sequence[_Outcome]) -> None:
    for outcome in outcomes:
        if outcome.promise.done():  # its caller was cancelled
            continue
        if outcome.error is not None:
            outcome.promise.set_exception(outcome.error)
        else:
            outcome.promise.set_result(outcome.answer)
