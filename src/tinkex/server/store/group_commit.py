"""
Group commit: one thread commits many small writes in one transaction.

While one transaction is flushed to disk, new writes wait in a queue. The next transaction commits
all of them with one flush. A write is not delayed to wait for others: if the thread is idle, it
commits the write immediately. Each caller waits until its own write is committed.
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

from tinkex.server.retry import Backoff, poll, retry_blocking
from tinkex.server.store import sql_dialects
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
#: A function that runs SQL statements on the connection of an open transaction.
Operation = Callable[[sa.Connection], Any]
#: A function that writes many items of one kind with few statements. It returns one result for each
#: item, in the order of the items.
BatchWrite = Callable[[sa.Connection, Sequence[Item]], Sequence[T]]

log = logging.getLogger("tinkex.server.store")

# A deferred write joins the next transaction. If there is none for this long, the deferred writes
# get a transaction of their own.
DEFER_MAX_S = 5.0
# Maximum number of deferred writes without a key that wait while the database is unavailable.
MAX_DEFERRED = 10_000
# Maximum number of queued writes in one transaction. A larger transaction takes longer, and all of
# its callers wait for it.
MAX_GROUP = 500
# After the connection is lost, the writer tries to reconnect for this long. Writes wait
# during that time.
RECONNECT_S = 30.0
RECONNECT_BACKOFF = Backoff.every(0.2)
# After this long without a response from the database, new writes are refused instead of queued.
RESPONSE_TIMEOUT_S = 10.0
# Interval between two attempts to commit required writes that the disk refused.
REQUIRED_RETRY_S = 0.5
# Interval between two queries of a transaction's status, while PostgreSQL reports it as in
# progress. PostgreSQL may need a moment to end the transaction of a lost connection.
STATUS_RETRY_S = 0.1


@dataclass(frozen=True, slots=True)
class _Write:
    write_batch: BatchWrite[Any, Any]
    item: Any
    #: None for a deferred write: no caller waits for it.
    future: asyncio.Future[Any] | None
    #: Whether the write is retried, in order, until the disk accepts it. For data of requests that
    #: the server has already accepted.
    required: bool = False
    #: Called when the write is dropped.
    on_dropped: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class _Outcome:
    future: asyncio.Future[Any]
    result: Any = None
    error: Exception | None = None


class Writer:
    """
    The writer thread. It commits the queued writes in groups, one transaction for each group.

    If a write raises an error, the transaction is rolled back. The writes of the group then run
    again, each in its own transaction, so only the one with the error fails. A write that met
    another writer of the database runs once more: it then finds what the other wrote.

    If the connection is lost, the group runs again on a new connection, unless the database reports
    that the commit succeeded.

    If the disk is full or fails, nothing of the group is written. Required writes stay queued and
    are retried; the others are refused with StorageError.
    """

    def __init__(
        self,
        engine: sa.Engine,
        *,
        before_commit: Operation | None = None,
        after_rollback: Operation | None = None,
        health: StorageHealth | None = None,
    ) -> None:
        self._engine = engine
        self._health = health or StorageHealth()
        self._health.report_timeouts(self._response_timeout)
        #: Called at the end of each transaction, before its commit.
        self._before_commit = before_commit
        self._after_rollback = after_rollback
        self._changed = threading.Condition()
        self._queue: list[_Write] = []
        self._deferred: deque[_Write] = deque()
        #: Deferred writes with a key; a newer one replaces an older one.
        self._deferred_by_key: dict[Hashable, _Write] = {}
        #: Whether the warning about dropped deferred writes was logged.
        self._dropping = False
        #: Required writes that the disk refused.
        self._retrying: list[_Write] = []
        self._closing = False
        #: When the writer began to wait for a response of the database; None while it does not
        #: wait.
        self._waiting_since_s: float | None = None
        #: When to give up reconnecting; None while the database is connected.
        self._reconnect_until_s: float | None = None
        self._disconnect_reason = ""
        #: Whether the error that the database does not respond was logged.
        self._timeout_logged = False
        #: Transactions committed, for metrics and the benchmark of group commit.
        self.commits = 0
        self._thread = threading.Thread(target=self._run, name="tinkex-writer", daemon=True)
        self._thread.start()

    def submit(
        self, operation: Callable[[sa.Connection], T], *, required: bool = False
    ) -> asyncio.Future[T]:
        """
        Queue `operation`. The future gets its result once its transaction is on disk.

        Operations run in the order in which `submit` was called, not in the order in which the
        futures are awaited. While the disk refuses writes, a `required` one waits; any other
        raises StorageError.
        """
        return self._enqueue(_each, operation, required)

    def submit_batched(
        self, write_batch: BatchWrite[Item, T], item: Item, *, required: bool = False
    ) -> asyncio.Future[T]:
        """
        Like `submit`, but writes of the same kind in one transaction share their SQL statements.

        Two writes are of the same kind if they have the same `write_batch`. Within a transaction,
        batches of different kinds may run in another order than they were queued. So writes that
        depend on each other must be of the same kind. Batches are not reordered relative to
        operations of `submit`.
        """
        return self._enqueue(write_batch, item, required)

    def _enqueue(
        self, write_batch: BatchWrite[Any, T], item: Any, required: bool
    ) -> asyncio.Future[T]:
        # Cancelling the caller does not cancel the write.
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        if not required and (problem := self._response_timeout()) is not None:
            future.set_exception(StorageError(problem))
            return future
        with self._changed:
            if self._closing:
                raise RuntimeError("the store is closed, so nothing can be written")
            self._queue.append(_Write(write_batch, item, future, required))
            self._changed.notify()
        return future

    def defer(
        self,
        operation: Operation,
        *,
        key: Hashable = None,
        on_dropped: Callable[[], None] | None = None,
    ) -> None:
        """
        Run `operation` in the next transaction. It is lost if the process ends before that.

        It replaces a waiting write with the same `key`. If too many writes without a key wait, the
        oldest one is dropped.
        """
        self._defer(_Write(_each, operation, None, on_dropped=on_dropped), key)

    def defer_batched(self, write_batch: BatchWrite[Item, Any], item: Item) -> None:
        """Like `defer`, but writes of the same kind share their SQL statements."""
        self._defer(_Write(write_batch, item, None), None)

    def _defer(self, write: _Write, key: Hashable) -> None:
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
                "the database accepts no writes, and more than %d deferred writes wait; the oldest "
                "ones are dropped until the database accepts writes again. Deferred writes are "
                "telemetry, and marks that results were fetched",
                MAX_DEFERRED,
            )

    def close(self) -> None:
        """Commit the waiting writes, then stop the thread. May be called again."""
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

    def _commit(
        self, connection: sa.Connection, group: list[_Write], *, again: bool = False
    ) -> None:
        results: list[Any] = []
        # The id of the transaction that computed `results`, once its commit may have succeeded.
        transaction: int | None = None

        def attempt() -> None:
            nonlocal results, transaction
            # The timeout starts before the health check, which also hangs if the disk hangs.
            self._start_timeout()
            self._health.before_commit()
            self._health.check_readable()
            self._start_timeout()
            with connection.begin():
                if transaction is None or not was_committed(connection, transaction):
                    transaction = None
                    results = self._run_group(connection, group)
                    if self._before_commit is not None:
                        self._before_commit(connection)
                    transaction = transaction_id(connection)
                self._start_timeout()

        def should_retry(error: Exception) -> bool:
            return connection.invalidated and self._may_reconnect(
                error, commit_unknown=transaction is not None
            )

        try:
            retry_blocking(attempt, RECONNECT_BACKOFF, should_retry=should_retry)
        except Exception as error:  # noqa: BLE001  errors of a write go to its caller
            if not connection.invalidated and self._after_rollback is not None:
                self._after_rollback(connection)
            self._not_written(connection, group, error, again=again)
            return
        self.commits += 1
        self._dropping = False
        self._reconnect_until_s = None
        # Before the callers get their results: they may write again at once.
        self._waiting_since_s = None
        self._health.clear()
        _resolve(
            [
                _Outcome(write.future, result)
                for write, result in zip(group, results, strict=True)
                if write.future is not None
            ]
        )

    def _run_group(self, connection: sa.Connection, group: list[_Write]) -> list[Any]:
        results: list[Any] = [None] * len(group)
        for write_batch, indexes in _calls(group):
            self._start_timeout()
            found = write_batch(connection, [group[index].item for index in indexes])
            for index, result in zip(indexes, found, strict=True):
                results[index] = result
        return results

    def _not_written(
        self, connection: sa.Connection, group: list[_Write], error: Exception, *, again: bool
    ) -> None:
        refused = isinstance(error, NewDataRefused)
        if not refused and self._health.record(error) is not None:
            self._retry_or_refuse(group, error)
        elif len(group) > 1:
            self._commit_each(connection, group, error)
        elif not again and sql_dialects.met_another_writer(error):
            self._commit(connection, group, again=True)
        elif (future := group[0].future) is not None:
            _resolve([_Outcome(future, error=error)])
        else:
            log.warning("a deferred write failed: %s", error)

    def _commit_each(
        self, connection: sa.Connection, group: list[_Write], error: Exception
    ) -> None:
        """Commit each write in its own transaction, so that only the one with the error fails."""
        for number, write in enumerate(group):
            self._commit(connection, [write])
            if self._retrying:
                # The disk refused this write. The rest must wait too: the results of one model have
                # to be committed in order.
                self._retry_or_refuse(group[number + 1 :], error)
                return

    def _retry_or_refuse(self, group: list[_Write], error: Exception) -> None:
        """After a storage problem: retry the required writes of the group, refuse the others."""
        refused = []
        for write in group:
            if write.required and not self._closing:
                self._retrying.append(write)
            elif write.future is not None:
                refused.append(_Outcome(write.future, error=self._health.as_storage_error(error)))
            elif write.on_dropped is not None:
                write.on_dropped()
        _resolve(refused)

    def _start_timeout(self) -> None:
        """Record that the writer waits for a response of the database from now on."""
        if self._reconnect_until_s is None:
            self._waiting_since_s = time.monotonic()

    def _may_reconnect(self, error: Exception, *, commit_unknown: bool) -> bool:
        """
        Whether to try again on a new connection.

        The writer gives up after RECONNECT_S. But if `commit_unknown`, it continues until the database
        reports whether the commit succeeded. Until then, the group must be neither refused nor run
        again.
        """
        now_s = time.monotonic()
        if self._reconnect_until_s is None:
            log.error("the connection to the database was lost, reconnecting: %s", error)
            self._reconnect_until_s = now_s + RECONNECT_S
        problem = storage_problem(error)
        give_up = problem is None or now_s > self._reconnect_until_s
        if self._closing or (give_up and not commit_unknown):
            return False
        self._disconnect_reason = str(error) if problem is None else problem.reason
        return True

    def _response_timeout(self) -> StorageProblem | None:
        """The problem, if the database has not responded for too long. Any thread may call this."""
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
    return StorageProblem(kind=kind, reason=f"the database has not responded for {waited_s:.0f} s")


def transaction_id(connection: sa.Connection) -> int | None:
    """The transaction's id. After a lost connection, `was_committed` takes it; None for SQLite."""
    if connection.dialect.name == "sqlite":
        return None
    found: int = connection.exec_driver_sql("SELECT txid_current()").scalar_one()
    return found


def was_committed(connection: sa.Connection, transaction: int) -> bool:
    """Whether that transaction was committed. Waits while PostgreSQL is still ending it."""
    statement = sa.text("SELECT txid_status(:id)").bindparams(id=transaction)
    poll(lambda: connection.scalar(statement) != "in progress", every_s=STATUS_RETRY_S)
    return bool(connection.scalar(statement) == "committed")


def _each(connection: sa.Connection, operations: Sequence[Operation]) -> list[Any]:
    return [operation(connection) for operation in operations]


def _calls(group: Sequence[_Write]) -> Iterator[tuple[BatchWrite[Any, Any], list[int]]]:
    """The batch functions to call for a group, each with the indexes of its writes, in order."""
    calls: dict[BatchWrite[Any, Any], list[int]] = {}
    for index, write in enumerate(group):
        if calls and (write.write_batch is _each) is not (_each in calls):
            yield from calls.items()
            calls = {}
        calls.setdefault(write.write_batch, []).append(index)
    yield from calls.items()


def _resolve(outcomes: Sequence[_Outcome]) -> None:
    """Set the results of the futures; each event loop is woken only once."""
    loops = {outcome.future.get_loop() for outcome in outcomes}
    for loop in loops:
        ours = [outcome for outcome in outcomes if outcome.future.get_loop() is loop]
        # A loop that has been closed has no callers that wait.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_resolve_in_loop, ours)


def _resolve_in_loop(outcomes: Sequence[_Outcome]) -> None:
    for outcome in outcomes:
        if outcome.future.done():  # its caller was cancelled
            continue
        if outcome.error is not None:
            outcome.future.set_exception(outcome.error)
        else:
            outcome.future.set_result(outcome.result)
