"""The result of one request: block on it, or await it, from any thread or loop, as often as wanted."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import inspect
import operator
import os
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Generator, Iterator
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from tinkex.client import background_loop

T = TypeVar("T")
S = TypeVar("S")
P = ParamSpec("P")


class APIFuture(ABC, Generic[T]):
    """
    What an operation returns at once.

        loss = training.forward_backward(data, "cross_entropy").result()
        loss = await training.forward_backward(data, "cross_entropy")

    A time-out neither cancels the work nor loses the result: ask again.
    """

    @abstractmethod
    def result(self, timeout: float | None = None) -> T:
        """Block until the result is there, at most `timeout` seconds (then `TimeoutError`)."""

    @abstractmethod
    async def result_async(self, timeout: float | None = None) -> T:  # noqa: ASYNC109 (as upstream)
        """The same, for coroutines."""

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()


class Promise(concurrent.futures.Future[T], APIFuture[T]):
    """
    The one kind of future we hand out: a `concurrent.futures.Future` that can be awaited.

    `yields_to_waiter` is for samples, whose work is worth nothing to anybody but those who wait:
    when an awaiting task is cancelled and nobody else waits, the work is cancelled too. Threads
    that block count like tasks that await. A training step goes on whoever stops waiting for it.
    """

    def __init__(self, *, cancel_with_waiter: bool = False) -> None:
        super().__init__()
        self._pid = os.getpid()
        self._cancel_with_waiter = cancel_with_waiter
        self._awaiting: set[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = set()
        #: Threads inside `result`, `exception` or `block`.
        self._blocked = 0
        self.add_done_callback(lambda _: self._wake_waiters())

    def future(self) -> concurrent.futures.Future[T]:
        """The plain future inside, which is this object itself."""
        return self

    def result(self, timeout: float | None = None) -> T:
        if not self.done():
            self._check_process()
            refuse_to_block("result", "result_async")
        with self._blocking():
            return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        with self._blocking():
            return super().exception(timeout)

    def block(self) -> T:
        """`result()` for callers that have warned already."""
        with self._blocking():
            return super().result()

    @contextlib.contextmanager
    def _blocking(self) -> Iterator[None]:
        """Around a wait of this thread."""
        with self._condition:
            self._blocked += 1
        try:
            yield
        finally:
            with self._condition:
                self._blocked -= 1

    async def result_async(self, timeout: float | None = None) -> T:  # noqa: ASYNC109 (as upstream)
        if not self.done():
            self._check_process()
            loop = asyncio.get_running_loop()
            waiter = (loop, loop.create_future())
            with self._condition:
                self._awaiting.add(waiter)
            if self.done():  # it may have finished between the question and the registration
                self._wake_waiters()
            try:
                done, _ = await asyncio.wait([waiter[1]], timeout=timeout)
            except asyncio.CancelledError:
                with self._condition:
                    # `_waiters`: threads in `concurrent.futures.wait` or `as_completed`.
                    others = len(self._awaiting) - 1 + self._blocked + len(self._waiters)
                if self._cancel_with_waiter and not others:
                    self.cancel()
                raise
            finally:
                with self._condition:
                    self._awaiting.discard(waiter)
                waiter[1].cancel()
            if not done:
                raise TimeoutError(
                    f"no result within {timeout:g} s; the work goes on, and can be waited for again"
                )
        if self.cancelled():
            raise asyncio.CancelledError
        return super().result(0)

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise RuntimeError(
                f"This result is on its way to process {self._pid}; it never arrives in a forked "
                "one. Ask again here."
            )

    def _wake_waiters(self) -> None:
        with self._condition:
            waiters = list(self._awaiting)
        for loop, waiter in waiters:
            with contextlib.suppress(RuntimeError):  # that loop is closed: nobody waits there
                loop.call_soon_threadsafe(_wake, waiter)

    # Finishing never raises: the user may have cancelled a moment ago.

    def finish(self, value: T) -> None:
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self.set_result(value)

    def fail(self, error: BaseException) -> None:
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self.set_exception(error)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class AwaitableConcurrentFuture(APIFuture[T]):
    """Somebody's `concurrent.futures.Future`, made awaitable. Ours are that already."""

    def __init__(self, future: concurrent.futures.Future[T]) -> None:
        self._future = future

    def future(self) -> concurrent.futures.Future[T]:
        return self._future

    def result(self, timeout: float | None = None) -> T:
        if not self._future.done():
            refuse_to_block("result", "result_async")
        return self._future.result(timeout)

    async def result_async(self, timeout: float | None = None) -> T:  # noqa: ASYNC109 (as upstream)
        # Shielded: whoever stops waiting does not take the result away from the others.
        async with asyncio.timeout(timeout):
            return await asyncio.shield(asyncio.wrap_future(self._future))


AwaitableConcurrentFuture.register(Promise)  # whatever we hand out passes `isinstance`


def refuse_to_block(name: str, twin: str) -> None:
    """Raise where blocking would wait for itself; warn by name where it only stops a loop."""
    if background_loop.on_background_thread():
        raise RuntimeError(
            f"{name}() would wait for the thread it runs on. "
            f"In callbacks of tinkex futures use `await {twin}()`, or another thread."
        )
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    if "ipykernel" in sys.modules:  # a notebook always runs a loop, and blocking is the custom
        return
    call = name if " " in name else f"{name}()"
    instead = twin if "(" in twin else f"{twin}()"
    warnings.warn(
        f"{call} blocks the running event loop until the answer is there; "
        f"write `await {instead}` instead.",
        RuntimeWarning,
        stacklevel=3,
    )


def settle(promise: Promise[T], task: asyncio.Task[T]) -> None:
    """Hand a finished task's outcome to its promise."""
    if task.cancelled():
        promise.fail(RuntimeError("The client was closed before the answer came."))
    elif (error := task.exception()) is not None:
        promise.fail(error)
    else:
        promise.finish(task.result())


# The twins. A method is written once, as a function that returns a promise at once; the spellings
# of the official client are made from it here. `_name` gives `name` and `name_async`. A definition
# that is public itself is looked up when its twin is called: programs replace `sample`, and
# subclasses override it, and mean `sample_async` too.


def waits(start: Callable[Concatenate[S, P], Promise[T]]) -> Callable[Concatenate[S, P], T]:
    """The blocking form: returns the value."""
    name = start.__name__.lstrip("_")

    def blocking(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        refuse_to_block(name, f"{name}_async")
        return start(self, *args, **kwargs).block()

    return _as_written(blocking, name, start)


def awaits(
    start: Callable[Concatenate[S, P], Promise[T]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """The `_async` form that returns the value."""

    now = _bound_method(start)

    async def twin(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        started = now(self)(*args, **kwargs)
        if not isinstance(started, APIFuture) and isinstance(started, concurrent.futures.Future):
            return await AwaitableConcurrentFuture(started)  # of somebody's own `sample`
        return await started

    return _as_written(twin, start.__name__.lstrip("_") + "_async", start)


def submits(
    start: Callable[Concatenate[S, P], Promise[T]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, Promise[T]]]:
    """The `_async` form that returns the future: await it twice, or keep it for later."""

    now = _bound_method(start)

    async def twin(self: S, /, *args: P.args, **kwargs: P.kwargs) -> Promise[T]:
        return now(self)(*args, **kwargs)

    return _as_written(twin, start.__name__.lstrip("_") + "_async", start)


def _bound_method(
    start: Callable[Concatenate[S, P], Promise[T]],
) -> Callable[[S], Callable[P, Promise[T]]]:
    """How the method that `start` defines is found on an object."""
    if start.__name__.startswith("_"):
        return lambda self: functools.partial(start, self)
    return operator.attrgetter(start.__name__)


F = TypeVar("F", bound=Callable[..., Any])


def _as_written(function: F, name: str, start: Callable[..., Any]) -> F:
    """Make it look as if it had been written out: name, parameters, words, kind."""
    owner, _, _ = start.__qualname__.rpartition(".")
    function.__name__ = name
    function.__qualname__ = f"{owner}.{name}"
    function.__doc__ = start.__doc__
    function.__module__ = start.__module__
    signature = inspect.signature(start).replace(return_annotation=inspect.Signature.empty)
    # Not `functools.wraps`: tools look through that, and would see a plain function.
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function
