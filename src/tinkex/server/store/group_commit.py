"""
Group commit: one thread commits many small writes in one transaction.

While one transaction is flushed to disk, the next writes gather, so one flush serves all of them. A
write that comes alone does not wait. Each caller waits for the commit of its own write.
"""

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
    FAILING,
    UNREACHABLE,
    NewDataRefused,
    StorageError,
    StorageHealth,
    StorageProblem,
    storage_problem,
)

T = TypeVar("T")
Item = TypeVar("Item")
Act = Callable[[sa.Connection], Any]
#: Writes many items of one kind with few statements; returns one result for each, in order.
BatchWrite = Callable[[sa.Connection, Sequence[Item]], Sequence[T]]

log = logging.getLogger("tinkex.server.store")

# A deferred write joins the next transaction, or gets one of its own after this long.
DEFER_MAX_S = 5.0
# Deferred writes without a key that wait at most while the database is unavailable.
MAX_DEFERRED = 10_000
# Limits the size of a transaction, and so the wait of its first write under load.
MAX_GROUP = 500
# A database that is restarted is waited for this long; writes wait as well.
RECONNECT_S = 30.0
RECONNECT_RETRY_S = 0.2
# After this long without a response from the database, new writes are refused instead of queued.
RESPONSE_TIMEOUT_S = 10.0
# How often required writes are retried while the disk refuses them.
REQUIRED_RETRY_S = 0.5
# While PostgreSQL has not yet ended the transaction of a lost connection.
STATUS_RETRY_S = 0.1


@dataclass(frozen=True, slots=True)
class _Write:
    many: BatchWrite[Any, Any]
    item: Any
    #: None for a deferred write: no caller waits for it.
    promise: asyncio.Future[Any] | None
    #: Retried, in order, until the disk accepts it: a client was promised this.
    required: bool = False
    #: Called when the write is dropped.
    on_dropped: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class _Outcome:
    promise: asyncio.Future[Any]
    answer: Any = None
    error: Exception | None = None


class Writer:
    """
    The writer thread.

    An act that raises undoes only itself: the other writes of its group run again, each in its own
    transaction. After a lost connection the group runs again on a new one, unless the database
    reports that the commit succeeded. When the disk is full or fails, nothing of the group was
    written: required writes stay queued and are retried, the others are refused.
    """

    def __init__(
        self,
        engine: sa.Engine,
        *,
        last: Act | None = None,
        undone: Act | None = None,
        health: StorageHealth | None = None,
    ) -> None:
        self._engine = engine
        self._health = health or StorageHealth()
        self._health.report_timeouts(self._response_timeout)
        #: Called at the end of each transaction, and after each rollback.
        self._last = last
        self._undone = undone
        self._changed = threading.Condition()
        self._queue: list[_Write] = []
        self._deferred: deque[_Write] = deque()
        #: Deferred writes with a key; a newer one replaces an older one.
        self._deferred_by_key: dict[Hashable, _Write] = {}
        #: Whether the log already says that deferred writes are dropped.
        self._dropping = False
        #: Required writes that the disk refused.
        self._retrying: list[_Write] = []
        self._closing = False
        #: Since when the database owes a response; None while it owes none.
        self._waiting_since_s: float | None = None
        #: Until when a lost database is waited for; None while it is connected.
        self._reconnect_until_s: float | None = None
        self._disconnect_reason = ""
        #: Whether the log already says that the database does not respond.
        self._timeout_logged = False
        #: Transactions committed, for metrics and the benchmark of group commit.
        self.commits = 0
        self._thread = threading.Thread(target=self._run, name="tinkex-writer", daemon=True)
        self._thread.start()

    def submit(
        self, act: Callable[[sa.Connection], T], *, required: bool = False
    ) -> asyncio.Future[T]:
        """
        The result of `act`, after its transaction is on disk.

        Acts run in the order of these calls, not of the awaits. A `required` write waits while the
        disk refuses it; any other raises StorageError.
        """
        return self._enqueue(_each, act, required)

    def submit_batched(
        self, many: BatchWrite[Item, T], item: Item, *, required: bool = False
    ) -> asyncio.Future[T]:
        """
        Like `submit`, for a write that shares its statements with others of its kind.

        Within a transaction, batches of different kinds may be reordered, but never across an act.
        So writes that depend on each other must be of one kind.
        """
        return self._enqueue(many, item, required)

    def _enqueue(self, many: BatchWrite[Any, T], item: Any, required: bool) -> asyncio.Future[T]:
        # Cancelling the caller does not cancel the write.
        promise: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        if not required and (problem := self._response_timeout()) is not None:
            promise.set_exception(StorageError(problem))
            return promise
        with self._changed:
            if self._closing:
                raise RuntimeError("the store is closed: nothing can be written any more")
            self._queue.append(_Write(many, item, promise, required))
            self._changed.notify()
        return promise

    def defer(
        self,
        act: Act,
        *,
        key: Hashable = None,
        on_dropped: Callable[[], None] | None = None,
    ) -> None:
        """
        Write with the next transaction; lost if the process ends before.

        It replaces a waiting write with the same `key`. Of writes without a key, the oldest is
        dropped when too many wait.
        """
        write = _Write(_each, act, None, on_dropped=on_dropped)
        with self._changed:
            if self._closing:
                return
            was_idle = not self._deferred and not self._deferred_by_key
            if key is not None:
                self._deferred_by_key[key] = write
            else:
                self._deferred.append(write)
            # An idle thread waits without a timeout: the first deferred write starts its timer.
            if was_idle:
                self._changed.notify()
            oldest = self._deferred.popleft() if len(self._deferred) > MAX_DEFERRED else None
        if oldest is not None:
            self._drop(oldest)

    def _drop(self, write: _Write) -> None:
        if write.on_dropped is not None:
            write.on_dropped()
        if not self._dropping:
            self._dropping = True
            log.warning(
                "the database accepts no writes, and more than %d deferred writes wait (which "
                "results were fetched, telemetry): the oldest are dropped until it does",
                MAX_DEFERRED,
            )

    def close(self) -> None:
        """Commit what waits, then stop. Safe to repeat."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        with self._engine.connect() as connection:
            while group := self._next_group():
                self._commit(connection, group)
                self._waiting_since_s = None
                if self._timeout_logged:
                    self._timeout_logged = False
                    log.warning("the database responds again")

    def _next_group(self) -> list[_Write]:
        with self._changed:
            while not self._queue and not self._closing:
                has_deferred = self._deferred or self._deferred_by_key
                wait_s = (
                    REQUIRED_RETRY_S if self._retrying else DEFER_MAX_S if has_deferred else None
                )
                if not self._changed.wait(wait_s):
                    break
            deferred = [*self._deferred_by_key.values(), *self._deferred]
            group = self._retrying + deferred + self._queue[:MAX_GROUP]
            self._retrying = []
            self._deferred_by_key = {}
            self._deferred = deque()
            self._queue = self._queue[MAX_GROUP:]
            return group

    def _commit(self, connection: sa.Connection, group: list[_Write]) -> None:
        answers: list[Any] = []
        #: The transaction of `answers`, once its commit may have succeeded.
        transaction: int | None = None
        while True:
            try:
                # Before the health check: on a disk that hangs, that check hangs too.
                self._start_timeout()
                self._health.before_commit()
                self._health.check_readable()
                self._start_timeout()
                with connection.begin():
                    if transaction is None or not was_committed(connection, transaction):
                        transaction = None
                        answers = self._answers(connection, group)
                        if self._last is not None:
                            self._last(connection)
                        transaction = transaction_id(connection)
                    self._start_timeout()
            except Exception as error:  # noqa: BLE001  whatever an act raises goes to its caller
                if connection.invalidated:
                    if self._wait_for_database(error, unsure=transaction is not None):
                        continue
                elif self._undone is not None:
                    self._undone(connection)
                self._not_written(connection, group, error)
                return
            break
        self.commits += 1
        self._dropping = False
        self._reconnect_until_s = None
        self._health.clear()
        _resolve(
            [
                _Outcome(write.promise, answer)
                for write, answer in zip(group, answers, strict=True)
                if write.promise is not None
            ]
        )

    def _answers(self, connection: sa.Connection, group: list[_Write]) -> list[Any]:
        answers: list[Any] = [None] * len(group)
        for many, indexes in _calls(group):
            self._start_timeout()
            found = many(connection, [group[index].item for index in indexes])
            for index, answer in zip(indexes, found, strict=True):
                answers[index] = answer
        return answers

    def _not_written(
        self, connection: sa.Connection, group: list[_Write], error: Exception
    ) -> None:
        refused = isinstance(error, NewDataRefused)
        if not refused and self._health.record(error) is not None:
            self._retry_or_refuse(group, error)
        elif len(group) > 1:
            self._commit_each(connection, group, error)
        elif (promise := group[0].promise) is not None:
            _resolve([_Outcome(promise, error=error)])
        else:
            log.warning("a deferred write failed: %s", error)

    def _commit_each(
        self, connection: sa.Connection, group: list[_Write], error: Exception
    ) -> None:
        """Commit each write in its own transaction, because one of them always fails."""
        for number, write in enumerate(group):
            self._commit(connection, [write])
            if self._retrying:
                # Keeps the order: results of one model must not overtake each other.
                self._retry_or_refuse(group[number + 1 :], error)
                return

    def _retry_or_refuse(self, group: list[_Write], error: Exception) -> None:
        """Nothing of this group is on disk, because of a storage problem and not of its writes."""
        refused = []
        for write in group:
            if write.required and not self._closing:
                self._retrying.append(write)
            elif write.promise is not None:
                refused.append(_Outcome(write.promise, error=self._health.as_storage_error(error)))
            elif write.on_dropped is not None:
                write.on_dropped()
        _resolve(refused)

    def _start_timeout(self) -> None:
        """From now on the database owes a response."""
        if self._reconnect_until_s is None:
            self._waiting_since_s = time.monotonic()

    def _wait_for_database(self, error: Exception, *, unsure: bool) -> bool:
        """
        Sleep before the next attempt to connect; False after RECONNECT_S.

        If it is `unsure` whether the commit succeeded, the group is neither refused nor run again
        until the database says so.
        """
        now_s = time.monotonic()
        if self._reconnect_until_s is None:
            log.error("the connection to the database was lost, reconnecting: %s", error)
            self._reconnect_until_s = now_s + RECONNECT_S
        problem = storage_problem(error)
        give_up = problem is None or now_s > self._reconnect_until_s
        if self._closing or (give_up and not unsure):
            return False
        self._disconnect_reason = str(error) if problem is None else problem.reason
        time.sleep(RECONNECT_RETRY_S)
        return True

    def _response_timeout(self) -> StorageProblem | None:
        """The problem, if the database has not responded for too long; for all threads."""
        since_s = self._waiting_since_s
        if since_s is None or (waited_s := time.monotonic() - since_s) < RESPONSE_TIMEOUT_S:
            return None
        problem = not_responding(self._engine, waited_s)
        if self._reconnect_until_s is not None:
            problem = StorageProblem(kind=UNREACHABLE, reason=self._disconnect_reason)
        if not self._timeout_logged:
            self._timeout_logged = True
            log.error("%s %s", problem.text, problem.advice)
        return problem


def not_responding(engine: sa.Engine, waited_s: float) -> StorageProblem:
    """The problem of a database that has not responded for this long."""
    kind = FAILING if engine.dialect.name == "sqlite" else UNREACHABLE
    return StorageProblem(kind=kind, reason=f"the database has not answered for {waited_s:.0f} s")


def transaction_id(connection: sa.Connection) -> int | None:
    """The transaction's id, to find out after a lost connection whether it was committed."""
    if connection.dialect.name == "sqlite":
        return None
    found: int = connection.exec_driver_sql("SELECT txid_current()").scalar_one()
    return found


def was_committed(connection: sa.Connection, transaction: int) -> bool:
    """Whether that transaction was committed. Waits while PostgreSQL is still ending it."""
    statement = sa.text("SELECT txid_status(:id)").bindparams(id=transaction)
    while (state := connection.scalar(statement)) == "in progress":
        time.sleep(STATUS_RETRY_S)
    return bool(state == "committed")


def _each(connection: sa.Connection, acts: Sequence[Act]) -> list[Any]:
    return [act(connection) for act in acts]


def _calls(group: Sequence[_Write]) -> Iterator[tuple[BatchWrite[Any, Any], list[int]]]:
    """The calls for a group, each with the indexes of its writes. Acts are never reordered."""
    calls: dict[BatchWrite[Any, Any], list[int]] = {}
    for index, write in enumerate(group):
        if calls and (write.many is _each) is not (_each in calls):
            yield from calls.items()
            calls = {}
        calls.setdefault(write.many, []).append(index)
    yield from calls.items()


def _resolve(outcomes: Sequence[_Outcome]) -> None:
    """Resolve the futures, waking each event loop only once."""
    loops = {outcome.promise.get_loop() for outcome in outcomes}
    for loop in loops:
        ours = [outcome for outcome in outcomes if outcome.promise.get_loop() is loop]
        # A loop that was closed meanwhile has no callers left.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_resolve_in_loop, ours)


def _resolve_in_loop(outcomes: Sequence[_Outcome]) -> None:
    for outcome in outcomes:
        if outcome.promise.done():  # its caller was cancelled
            continue
        if outcome.error is not None:
            outcome.promise.set_exception(outcome.error)
        else:
            outcome.promise.set_result(outcome.answer)
