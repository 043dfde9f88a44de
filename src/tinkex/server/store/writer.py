"""One thread that writes: many small writes become one transaction, and each waits for its commit."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import sqlalchemy as sa

from tinkex.server.store.trouble import Condition

T = TypeVar("T")
Act = Callable[[sa.Connection], Any]

log = logging.getLogger("tinkex.server.store")

# Writes nobody waits for (when a session was last seen) join the next transaction, or make
# one of their own after this long.
LAZY_AFTER_S = 5.0
# Keeps one transaction, and so the wait of the first in it, short under a flood.
MOST_TOGETHER = 500
# A database that is started again is waited for; whoever writes meanwhile waits as well.
AWAY_S = 30.0
AWAY_RETRY_S = 0.2
# What must be written is tried again this often while the disk does not take it.
STUCK_RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class _Write:
    act: Act
    promise: Future[Any] | None
    #: Kept, in its order, until the disk takes it: somebody was promised this.
    must: bool = False


class Writer:
    """
    Group commit.

    While one transaction is being forced to disk the next writes gather, so the disk is asked
    once for all of them. An act that raises undoes only itself: the others of its group are
    run again, each in a transaction of its own. When the connection is lost the group is run
    again on the next one: acts find what an earlier run of them did, should it have been kept.
    When the disk is full or fails, nothing of the group was written: what was promised stays
    here and is tried again, and the rest is refused.
    """

    def __init__(
        self,
        engine: sa.Engine,
        *,
        last: Act | None = None,
        undone: Act | None = None,
        condition: Condition | None = None,
    ) -> None:
        self._engine = engine
        self._condition = condition or Condition()
        #: Run at the end of each transaction, and after one that was undone.
        self._last = last
        self._undone = undone
        self._changed = threading.Condition()
        self._eager: list[_Write] = []
        self._lazy: list[_Write] = []
        #: What must be written and could not be.
        self._stuck: list[_Write] = []
        self._closing = False
        #: Until when a database that is away is waited for; None while it is there.
        self._away_until_s: float | None = None
        #: Transactions committed, for the benchmark of group commit.
        self.commits = 0
        self._thread = threading.Thread(target=self._run, name="tinkex-writer", daemon=True)
        self._thread.start()

    def submit(self, act: Callable[[sa.Connection], T], *, must: bool = False) -> asyncio.Future[T]:
        """
        What `act` answers, once its transaction is on disk.

        Acts run in the order of these calls, whoever awaits which of them first. One that `must`
        be written waits for a disk that does not take it; any other raises StorageTrouble.
        """
        promise: Future[T] = Future()
        # From here on a caller that is cancelled only stops listening: the write happens.
        promise.set_running_or_notify_cancel()
        self._put(_Write(act, promise, must))
        return asyncio.wrap_future(promise)

    def later(self, act: Act) -> None:
        """Written with the next transaction; lost if the process dies before."""
        with self._changed:
            if self._closing:
                return
            self._lazy.append(_Write(act, None))
            # The thread sleeps without a limit when it has nothing; the first lazy write
            # starts its clock.
            if len(self._lazy) == 1:
                self._changed.notify()

    def close(self) -> None:
        """Write what is waiting, then stop. Safe to repeat."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _put(self, write: _Write) -> None:
        with self._changed:
            if self._closing:
                raise RuntimeError("the store is closed: nothing can be written any more")
            self._eager.append(write)
            self._changed.notify()

    def _run(self) -> None:
        with self._engine.connect() as connection:
            while group := self._next_group():
                self._commit(connection, group)

    def _next_group(self) -> list[_Write]:
        with self._changed:
            while not self._eager and not self._closing:
                wait_s = STUCK_RETRY_S if self._stuck else LAZY_AFTER_S if self._lazy else None
                if not self._changed.wait(wait_s):
                    break
            group = self._stuck + self._lazy + self._eager[:MOST_TOGETHER]
            self._stuck = []
            self._lazy = []
            self._eager = self._eager[MOST_TOGETHER:]
            return group

    def _commit(self, connection: sa.Connection, group: list[_Write]) -> None:
        try:
            self._condition.check()
            with connection.begin():
                answers = [write.act(connection) for write in group]
                if self._last is not None:
                    self._last(connection)
        except Exception as error:  # noqa: BLE001  whatever an act raises is its caller's to see
            if connection.invalidated:
                if self._waits_for_database(error):
                    self._commit(connection, group)
                    return
            elif self._undone is not None:
                self._undone(connection)
            if self._condition.note(error) is not None:
                self._hold(group, error)
            elif len(group) > 1:
                self._commit_each(connection, group, error)
            elif (promise := group[0].promise) is not None:
                promise.set_exception(error)
            else:
                log.warning("a background write failed: %s", error)
            return
        self.commits += 1
        self._away_until_s = None
        self._condition.clear()
        for write, answer in zip(group, answers, strict=True):
            if write.promise is not None:
                write.promise.set_result(answer)

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
        for write in group:
            if write.must and not self._closing:
                self._stuck.append(write)
            elif write.promise is not None:
                write.promise.set_exception(self._condition.refusal(error))

    def _waits_for_database(self, error: Exception) -> bool:
        """Sleep before the next try; False when there have been enough."""
        now_s = time.monotonic()
        if self._away_until_s is None:
            log.error("the connection to the database was lost, trying again: %s", error)
            self._away_until_s = now_s + AWAY_S
        if self._closing or now_s > self._away_until_s or not isinstance(error, sa.exc.DBAPIError):
            return False
        time.sleep(AWAY_RETRY_S)
        return True
