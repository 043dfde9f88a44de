"""One event loop on one daemon thread per process; a forked child starts its own."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class _Background:
    """A running loop, and the process that it belongs to."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, name="tinkex", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()


def after_fork(reset: Callable[[], None]) -> Callable[[], None]:
    """Decorator: call `reset` in every forked child. Locks of the parent may be held there."""
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(after_in_child=reset)
    return reset


_lock = threading.Lock()
_background: _Background | None = None


@after_fork
def _reset() -> None:
    """The parent's thread does not exist in the child."""
    global _lock, _background
    _lock = threading.Lock()
    _background = None


def background() -> asyncio.AbstractEventLoop:
    """The loop of this process, started on first use."""
    global _background
    current = _background
    if current is None or current.pid != os.getpid():
        with _lock:
            current = _background
            if current is None or current.pid != os.getpid():
                current = _background = _Background()
    return current.loop


def on_background_thread() -> bool:
    """Whether the caller runs on the loop's thread, where blocking would deadlock."""
    current = _background
    return current is not None and current.thread is threading.current_thread()


_kept: set[asyncio.Task[Any]] = set()


def keep(task: asyncio.Task[Any]) -> None:
    """Hold a task until it is done: asyncio itself keeps only a weak reference."""
    _kept.add(task)
    task.add_done_callback(_kept.discard)


class SingleFlight(Generic[T]):
    """
    Work that runs at most once at a time: callers that arrive while it runs share its outcome.

    With `keep_result`, a result is returned to all later callers too; a failure is not kept.
    """

    def __init__(
        self, work: Callable[[], Coroutine[Any, Any, T]], *, keep_result: bool = False
    ) -> None:
        self._work = work
        self._keep_result = keep_result
        self._task: asyncio.Task[T] | None = None

    async def get(self) -> T:
        task = self._task
        if task is None or (task.done() and not (self._keep_result and _succeeded(task))):
            task = self._task = asyncio.create_task(self._work())
            keep(task)
            # Retrieve the exception: asyncio would log it if every caller was cancelled.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        # Shielded: a caller that is cancelled does not cancel the work of the others.
        return await asyncio.shield(task)

    @property
    def value(self) -> T | None:
        """The result of the last run, if it is done and succeeded."""
        task = self._task
        return task.result() if task is not None and task.done() and _succeeded(task) else None

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()


def _succeeded(task: asyncio.Task[Any]) -> bool:
    return not task.cancelled() and task.exception() is None
