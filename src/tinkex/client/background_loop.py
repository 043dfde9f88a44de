"""One event loop on one daemon thread for the whole process; a forked child makes its own."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any


class _Background:
    """A running loop, and the process it belongs to."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, name="tinkex", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()


_lock = threading.Lock()
_background: _Background | None = None


def _forget() -> None:
    """In a forked child: the parent's thread did not come along, and its lock may be held."""
    global _lock, _background
    _lock = threading.Lock()
    _background = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def background() -> asyncio.AbstractEventLoop:
    """The loop of this process, started on first use."""
    global _background
    here = _background
    if here is None or here.pid != os.getpid():
        with _lock:
            here = _background
            if here is None or here.pid != os.getpid():
                here = _background = _Background()
    return here.loop


def on_background_thread() -> bool:
    """Whether the caller stands on the loop's own thread, where waiting would wait for itself."""
    here = _background
    return here is not None and here.thread is threading.current_thread()


_kept: set[asyncio.Task[Any]] = set()


def keep(task: asyncio.Task[Any]) -> None:
    """Hold a task until it is done: asyncio itself keeps only a weak reference."""
    _kept.add(task)
    task.add_done_callback(_kept.discard)
