"""
Retries and periodic work of the server.

| user | what is repeated |
|---|---|
| `supervisor` | a web process that crashed; the checks of its locks; a pause that a stop ends |
| `engine_process` | an engine that crashed; the check for idle engines |
| `web_process` | the checks at its start: whether it listens, whether the disk has space |
| `process_setup` | garbage collection |
| `worker_process` | the checks whether it was told to stop |
| `cluster.worker`, `cluster.known_workers`, `cluster.remote_scheduler` | heartbeats; reading the rows of workers and requests; waiting for current steps |
| `fleet.worker_actor` | a worker process that ended |
| `scheduler.results` | storing a result that the file store refused |
| `scheduler.checkpoints` | a save on a full disk |
| `scheduler.scheduler`, `scheduler.placement`, `scheduler.session_status` | looking for waiting requests, lost replicas and silent sessions |
| `store.database` | reads and files of accepted work while storage has a problem |
| `store.group_commit` | a transaction after the connection was lost |
| `store.connections` | switching a SQLite file to its write-ahead log |
| `store.sql_dialects` | taking PostgreSQL's lock |
| `store.notifier` | the connection for notifications after it was lost |
| `maintenance.cleanup`, `maintenance.disk_monitor` | deleting old data; checking the disk |

These wait elsewhere, because something else may end the wait, or because nothing is repeated:

- `store.group_commit`: its writer thread repeats writes that a full disk refused in the loop that
  waits for its queue, because other writes may come first.
- `scheduler.model_worker`: the timer of a gap, which the missing step cancels.
- `scheduler.moves`, `cluster.moves`: a model that waits a moment for its copy; a question about a copy
  is asked again every second, until the answer comes.
- `activity`, `api.console_stream`: a report at intervals, until its reader leaves.
- `cluster.remote_results`, `fleet.ray_cluster`: a look at what others have done, until they have.
- `scheduler.engine_scheduler`: a model that is unloaded checks every second whether its gap is closed.
- `scheduler.sample_worker`, `scheduler.result_waiters`: one pause before a sample is cancelled, or
  before a poll that could not read the database is answered.
- `api.bodies`, `api.connection_limits`: a request that waits for memory, a connection without
  progress.
- `maintenance.cleanup`: pauses between pieces of work, so that requests come first.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Backoff:
    """How long to wait before each retry: `first_s`, then twice as long each time, up to `max_s`."""

    first_s: float
    max_s: float
    #: Retries after the first attempt; None for any number.
    retries: int | None = None
    #: No retry follows an attempt that failed later than this after the first one began.
    within_s: float | None = None
    #: Whether the first retry follows without a wait.
    immediate: bool = False

    @classmethod
    def every(cls, wait_s: float, *, retries: int | None = None) -> "Backoff":
        """The same wait before each retry."""
        return cls(first_s=wait_s, max_s=wait_s, retries=retries)

    def wait_s(self, failures: int, elapsed_s: float = 0.0) -> float | None:
        """The wait after this many failed attempts in a row; None to give up."""
        if self.retries is not None and failures > self.retries:
            return None
        if self.within_s is not None and elapsed_s > self.within_s:
            return None
        doublings = failures - (2 if self.immediate else 1)
        if doublings < 0:
            return 0.0
        # Beyond this, the power would not fit in a float.
        return min(self.first_s * 2.0 ** min(doublings, 100), self.max_s)


class Crashed(Exception):
    """A process ended by itself. If it was `stable`, the backoff begins anew."""

    def __init__(self, text: str = "", *, stable: bool) -> None:
        super().__init__(text)
        self.stable = stable


ShouldRetry = Callable[[Exception], bool]
OnRetry = Callable[[Exception, float], object]


class _Failures:
    """Counts the failures of one call of `retry`."""

    def __init__(
        self, backoff: Backoff, should_retry: ShouldRetry | None, on_retry: OnRetry | None
    ) -> None:
        self._backoff = backoff
        self._should_retry = should_retry
        self._on_retry = on_retry
        self._began_s = time.monotonic()
        self._count = 0

    def wait_s(self, error: Exception) -> float | None:
        """The wait after this error; None to give up."""
        if self._should_retry is not None and not self._should_retry(error):
            return None
        if isinstance(error, Crashed) and error.stable:
            self._count = 0
        self._count += 1
        wait_s = self._backoff.wait_s(self._count, time.monotonic() - self._began_s)
        if wait_s is not None and self._on_retry is not None:
            self._on_retry(error, wait_s)
        return wait_s


async def retry(
    attempt: Callable[[], Awaitable[T]],
    backoff: Backoff,
    *,
    should_retry: ShouldRetry | None = None,
    on_retry: OnRetry | None = None,
) -> T:
    """
    Await `attempt()` until it succeeds, and return its result. Raises the last error on giving up.

    Errors for which `should_retry` is false are raised at once. `on_retry` is called with the error
    and the wait before each retry.
    """
    failures = _Failures(backoff, should_retry, on_retry)
    while True:
        try:
            return await attempt()
        except Exception as error:
            wait_s = failures.wait_s(error)
            if wait_s is None:
                raise
        await asyncio.sleep(wait_s)


def retry_blocking(
    attempt: Callable[[], T],
    backoff: Backoff,
    *,
    should_retry: ShouldRetry | None = None,
    on_retry: OnRetry | None = None,
    sleep: Callable[[float], object] = time.sleep,
) -> T:
    """Like `retry`, for a thread without an event loop."""
    failures = _Failures(backoff, should_retry, on_retry)
    while True:
        try:
            return attempt()
        except Exception as error:
            wait_s = failures.wait_s(error)
            if wait_s is None:
                raise
        sleep(wait_s)


def poll(condition: Callable[[], bool], *, every_s: float, timeout_s: float | None = None) -> bool:
    """Block until the condition is true; False if that takes longer than the timeout."""
    until_s = None if timeout_s is None else time.monotonic() + timeout_s
    while not condition():
        if until_s is not None and time.monotonic() >= until_s:
            return False
        time.sleep(every_s)
    return True


async def poll_async(condition: Callable[[], bool], *, every_s: float) -> None:
    """Wait until the condition is true."""
    while not condition():  # noqa: ASYNC110  other threads change it, and set no event
        await asyncio.sleep(every_s)


async def run_periodically(
    run: Callable[[], Awaitable[object]],
    every_s: float | Callable[[], float],
    *,
    what: str,
    log: logging.Logger,
    after_s: float | None = None,
) -> None:
    """
    Await `run()` again and again until cancelled. A failure is logged, and the next run follows.

    `every_s` is the pause before each run, or a function that returns it; `after_s` replaces the
    first one.
    """
    while True:
        pause_s = every_s() if callable(every_s) else every_s
        await asyncio.sleep(pause_s if after_s is None else after_s)
        after_s = None
        try:
            await run()
        except Exception:
            log.exception("%s failed; it runs again after the usual pause", what)


class PeriodicTask:
    """`run_periodically` in a task, from `start` to `close`."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    def start(
        self,
        run: Callable[[], Awaitable[object]],
        every_s: float | Callable[[], float],
        *,
        what: str,
        log: logging.Logger,
        after_s: float | None = None,
    ) -> None:
        """See `run_periodically`."""
        periodically = run_periodically(run, every_s, what=what, log=log, after_s=after_s)
        self._task = asyncio.create_task(periodically)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
