"""One operation of a user's, from its beginning to its end, for metrics and traces."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from tinkex.client import metrics

if TYPE_CHECKING:
    from tinkex.client.otel import Span, Tracing

T = TypeVar("T")


class Operation:
    """Begun; `run` makes the task that does it, and it ends when that does."""

    __slots__ = ("_metrics", "_name", "_span", "_started")

    def __init__(self, name: str, tracing: Tracing | None, about: str) -> None:
        self._name = name
        self._started = monotonic()
        self._span: Span | None = None if tracing is None else tracing.begin(name, about)
        self._metrics = metrics.here
        self._metrics.change("operations_in_flight", name, 1)

    def current(self) -> AbstractContextManager[None]:
        """Tasks that are made inside belong to this operation, and so do their requests."""
        return nullcontext() if self._span is None else self._span.current()

    def run(self, make: Callable[[], asyncio.Task[T]]) -> asyncio.Task[T]:
        """Make the task. If that fails, the operation has failed."""
        try:
            with self.current():
                task = make()
        except BaseException as error:
            self.end(error)
            raise
        # Not by waiting inside the task: one that is cancelled before it starts never gets there.
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self.end(asyncio.CancelledError() if task.cancelled() else task.exception())

    def end(self, error: BaseException | None) -> None:
        taken_s = monotonic() - self._started
        outcome = "done" if error is None else "failed"
        if isinstance(error, asyncio.CancelledError):
            outcome = "cancelled"
        self._metrics.change("operations_in_flight", self._name, -1)
        self._metrics.count(f"operations_{outcome}", self._name)
        self._metrics.observe("operation", self._name, taken_s)
        if self._span is not None:
            self._span.end(outcome, error, taken_s)


@contextmanager
def during(name: str, tracing: Tracing | None, about: str) -> Iterator[None]:
    """The same around a piece of a coroutine."""
    operation = Operation(name, tracing, about)
    try:
        with operation.current():
            yield
    except BaseException as error:
        operation.end(error)
        raise
    operation.end(None)


@lru_cache(maxsize=100)
def named(request_type: str) -> str:
    """`ForwardBackward`, as servers call it, is `forward_backward` to users."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", request_type).lower()
