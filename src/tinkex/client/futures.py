"""Futures: results to block on or to await, from any thread or event loop, any number of times."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import inspect
import operator
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Generator, Iterator
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from tinkex import display
from tinkex.client import background_loop, user_warnings
from tinkex.tracebacks import end_at_caller

T = TypeVar("T")
S = TypeVar("S")
P = ParamSpec("P")


class APIFuture(ABC, Generic[T]):
    """
    What an operation returns immediately.

        loss = training.forward_backward(data, "cross_entropy").result()
        loss = await training.forward_backward(data, "cross_entropy")

    A timeout neither cancels the work nor loses the result: call again to keep waiting.
    """

    @abstractmethod
    def result(self, timeout: float | None = None) -> T:
        """
        Block until the result is available.

        Args:
            timeout: Most seconds to wait. None: no limit.

        Returns:
            The result, however often it is called.

        Raises:
            TimeoutError: No result yet. The work continues; call again to keep waiting.
            TinkerError: The work failed.

        Example:
            loss = training.forward_backward(data, "cross_entropy").result(timeout=600)
        """

    @abstractmethod
    async def result_async(self, timeout: float | None = None) -> T:  # noqa: ASYNC109 (as upstream)
        """
        `result` for coroutines. `await future` is the same without a timeout.

        Args:
            timeout: Most seconds to wait. None: no limit.

        Returns:
            The result, however often it is called.

        Raises:
            TimeoutError: No result yet. The work continues; await again to keep waiting.
            TinkerError: The work failed.

        Example:
            async def step():
                future = training.forward_backward(data, "cross_entropy")
                return await future.result_async(timeout=600)
        """

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()


class Promise(concurrent.futures.Future[T], APIFuture[T]):
    """
    The future that all operations return: a `concurrent.futures.Future` that can be awaited.

    `cancel_with_waiter` is for samples, which are useless without a caller that waits: when an
    awaiting task is cancelled and no other waits, the work is cancelled too. Threads that block
    count as waiting. A training step continues even if all callers stop waiting.
    """

    def __init__(self, *, cancel_with_waiter: bool = False) -> None:
        super().__init__()
        self._pid = os.getpid()
        self._cancel_with_waiter = cancel_with_waiter
        self._awaiting: set[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = set()
        #: The error once a caller got it, and its frames without those of that caller.
        self._raised: BaseException | None = None
        self._frames: TracebackType | None = None
        #: Threads inside `result`, `exception` or `block`.
        self._blocked = 0
        self.add_done_callback(lambda _: self._wake_waiters())

    def __repr__(self) -> str:
        return _shown_future(self, type(self).__name__)

    def future(self) -> concurrent.futures.Future[T]:
        """The plain future, which is this object."""
        return self

    def result(self, timeout: float | None = None) -> T:
        if not self.done():
            self._check_process()
            refuse_to_block("result", "result_async")
        try:
            with self._blocking():
                return super().result(timeout)
        except (Exception, KeyboardInterrupt) as error:
            self._end_at_caller(error)
            raise

    def exception(self, timeout: float | None = None) -> BaseException | None:
        with self._blocking():
            return super().exception(timeout)

    def block(self) -> T:
        """`result()` without the warning, for callers that have checked already."""
        with self._blocking():
            return super().result()

    def _end_at_caller(self, error: BaseException) -> None:
        if error is self._raised:  # without the frames of callers that asked before
            error.__traceback__ = self._frames
        else:
            end_at_caller(error)
        if error is self._exception:
            self._raised, self._frames = error, error.__traceback__

    @contextlib.contextmanager
    def _blocking(self) -> Iterator[None]:
        """The context of a blocking wait: counts this thread as waiting."""
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
            if self.done():  # it may have finished before the waiter was registered
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
                    f"no result within {timeout:g} s; the work continues, and can be awaited again"
                )
        if self.cancelled():
            raise asyncio.CancelledError
        try:
            return super().result(0)
        except Exception as error:
            self._end_at_caller(error)
            raise

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise RuntimeError(
                f"This result belongs to process {self._pid} and never arrives in a forked "
                "process. Repeat the call here."
            )

    def _wake_waiters(self) -> None:
        with self._condition:
            waiters = list(self._awaiting)
        for loop, waiter in waiters:
            with contextlib.suppress(RuntimeError):  # that loop is closed
                loop.call_soon_threadsafe(_wake, waiter)

    # These never raise: the user may have cancelled just before.

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
    """Wraps any `concurrent.futures.Future` to be awaitable. A `Promise` is awaitable already."""

    def __init__(self, future: concurrent.futures.Future[T]) -> None:
        self._future = future

    def __repr__(self) -> str:
        return _shown_future(self._future, type(self).__name__)

    def future(self) -> concurrent.futures.Future[T]:
        return self._future

    def result(self, timeout: float | None = None) -> T:
        if not self._future.done():
            refuse_to_block("result", "result_async")
        return self._future.result(timeout)

    async def result_async(self, timeout: float | None = None) -> T:  # noqa: ASYNC109 (as upstream)
        # Shielded: a caller that stops waiting does not cancel the result for others.
        async with asyncio.timeout(timeout):
            return await asyncio.shield(asyncio.wrap_future(self._future))


AwaitableConcurrentFuture.register(Promise)  # so that `isinstance` accepts every future


def _shown_future(future: concurrent.futures.Future[Any], name: str) -> str:
    """The repr of a future: its state, and its result or error if there is one."""
    if future.cancelled():
        shown: list[tuple[str, Any]] = [("state", "cancelled")]
    elif not future.done():
        shown = [("state", "pending")]
    # `Future.result` and `.exception` do not wait: it is done.
    elif (error := concurrent.futures.Future.exception(future)) is not None:
        shown = [("state", "failed"), ("error", error)]
    else:
        result = concurrent.futures.Future.result(future)
        # A text may be a signed link, so it is not shown.
        shown = [
            ("state", "done"),
            ("result", display.Shown("<text>") if isinstance(result, str) else result),
        ]
    return display.call(name, shown)


def refuse_to_block(name: str, alternative: str) -> None:
    """Raise where blocking would deadlock; warn where it blocks a running event loop."""
    if background_loop.on_background_thread():
        raise RuntimeError(
            f"{name}() would deadlock: it blocks the thread that must complete it. "
            f"In callbacks of tinkex futures use `await {alternative}()`, or another thread."
        )
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    if "ipykernel" in sys.modules:  # notebooks always run a loop, and blocking is usual there
        return
    call = name if " " in name else f"{name}()"
    instead = alternative if "(" in alternative else f"{alternative}()"
    user_warnings.warn(
        f"{call} blocks the running event loop until the result is available; "
        f"write `await {instead}` instead.",
        RuntimeWarning,
    )


def settle(promise: Promise[T], task: asyncio.Task[T]) -> None:
    """Pass the outcome of a finished task to its promise."""
    if task.cancelled():
        promise.fail(RuntimeError("The client was closed before the result arrived."))
    elif (error := task.exception()) is not None:
        promise.fail(error)
    else:
        promise.finish(task.result())


# Sync and async variants. A method is written once, as a function that returns a promise; the
# variants of the official client are generated from it here. `_name` gives `name` and `name_async`.
# A public method is looked up when its variant is called, so that `sample_async` follows a `sample`
# that a program replaced or a subclass overrode.


def waits(start: Callable[Concatenate[S, P], Promise[T]]) -> Callable[Concatenate[S, P], T]:
    """The blocking variant: returns the value."""
    name = start.__name__.lstrip("_")

    def blocking(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            refuse_to_block(name, f"{name}_async")
            return start(self, *args, **kwargs).block()
        except (Exception, KeyboardInterrupt) as error:
            end_at_caller(error)
            raise

    blocking.ends_at_caller = True  # type: ignore[attr-defined]
    return as_written(blocking, name, start)


def awaits(
    start: Callable[Concatenate[S, P], Promise[T]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """The `_async` variant that returns the value."""

    now = _bound_method(start)

    async def variant(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            started = now(self)(*args, **kwargs)
            if not isinstance(started, APIFuture) and isinstance(
                started, concurrent.futures.Future
            ):
                # A program replaced the method with one that returns a plain future.
                return await AwaitableConcurrentFuture(started)
            return await started
        except Exception as error:
            end_at_caller(error)
            raise

    note = "A coroutine: it returns the value, not a future of it."
    return as_written(variant, start.__name__.lstrip("_") + "_async", start, note=note)


def submits(
    start: Callable[Concatenate[S, P], Promise[T]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, Promise[T]]]:
    """The `_async` variant that returns the future: await it twice, or keep it for later."""

    now = _bound_method(start)

    async def variant(self: S, /, *args: P.args, **kwargs: P.kwargs) -> Promise[T]:
        try:
            return now(self)(*args, **kwargs)
        except Exception as error:
            end_at_caller(error)
            raise

    note = "A coroutine that submits the work: it returns the future."
    return as_written(variant, start.__name__.lstrip("_") + "_async", start, note=note)


def _bound_method(
    start: Callable[Concatenate[S, P], Promise[T]],
) -> Callable[[S], Callable[P, Promise[T]]]:
    """A function from an object to its method that `start` defines."""
    if start.__name__.startswith("_"):
        return lambda self: functools.partial(start, self)
    return operator.attrgetter(start.__name__)


F = TypeVar("F", bound=Callable[..., Any])


def as_written(
    function: F,
    name: str,
    start: Callable[..., Any],
    doc: str | None = None,
    returns: Any = inspect.Signature.empty,
    note: str = "",
) -> F:
    """Give the generated function the name, signature and docstring (and a note) of a written one."""
    owner, _, _ = start.__qualname__.rpartition(".")
    function.__name__ = name
    function.__qualname__ = f"{owner}.{name}"
    function.__doc__ = doc or start.__doc__
    if note and function.__doc__:
        function.__doc__ = f"{inspect.cleandoc(function.__doc__)}\n\n{note}"
    function.__module__ = start.__module__
    signature = inspect.signature(start).replace(return_annotation=returns)
    # Not `functools.wraps`: tools follow `__wrapped__` and would see a plain function.
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function
