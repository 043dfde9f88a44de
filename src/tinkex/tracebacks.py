"""
Tracebacks that end in the caller's code.

The frames of this package say nothing to a person whose argument or path is wrong, so the public
methods remove them from what they raise: `end_at_caller` is called in their `except` blocks, and
costs nothing while nothing is raised. Errors that look like a bug of this package keep all frames.
`TINKEX_TRACEBACKS=full` keeps all frames and causes of every error.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from types import FunctionType, TracebackType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)

_NOT_PLAIN = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR | inspect.CO_GENERATOR

#: Besides this package: what runs between it and its caller, and what it calls.
_INTERNAL = frozenset({"tinkex", "asyncio", "concurrent", "contextlib", "json", "threading"}) | {
    *("aiohappyeyeballs", "aiohttp", "google", "numpy", "pydantic", "yarl")
}
#: Expected errors: of the service (which set `__module__` to "tinkex"), and of arguments.
_EXPECTED = (ValueError, TypeError, RuntimeError, TimeoutError, KeyboardInterrupt)


def end_at_caller(error: BaseException) -> None:
    """
    Remove the frames of this package from an error that is about to be raised again.

        except Exception as error:
            end_at_caller(error)
            raise

    Frames of the user's own code stay, such as those of a custom loss.
    """
    if os.environ.get("TINKEX_TRACEBACKS") == "full":
        return
    kept = _foreign_frames(error.__traceback__)
    if not kept and not _is_expected(error):
        return  # a bug here: all frames are needed to find it
    error.__traceback__ = _joined(kept)
    shown = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if shown is not None and not _foreign_frames(shown.__traceback__):
        # A cause inside this package. The text of the error says what it means.
        error.__cause__ = None
        error.__suppress_context__ = True


def _is_expected(error: BaseException) -> bool:
    if isinstance(error, _EXPECTED):
        return True
    errors = sys.modules.get("tinkex.client.errors")
    return errors is not None and isinstance(error, errors.TinkerError)


def _foreign_frames(traceback: TracebackType | None) -> list[TracebackType]:
    """The entries of code that is neither of this package nor below it, outermost first."""
    found = []
    while traceback is not None:
        module = traceback.tb_frame.f_globals.get("__name__") or ""
        if module.partition(".")[0] not in _INTERNAL:
            found.append(traceback)
        traceback = traceback.tb_next
    return found


def _joined(entries: list[TracebackType]) -> TracebackType | None:
    joined: TracebackType | None = None
    for entry in reversed(entries):
        joined = TracebackType(joined, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return joined


def ends_at_caller(function: F) -> F:
    """Decorator of a public function or method: what it raises ends at its caller."""

    @functools.wraps(function)
    def edge(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (Exception, KeyboardInterrupt) as error:
            end_at_caller(error)
            raise

    edge.ends_at_caller = True  # type: ignore[attr-defined]
    return edge  # type: ignore[return-value]


def public_edge(kind: C) -> C:
    """Class decorator: what the constructor and the public methods raise ends at their caller."""
    for name, member in list(vars(kind).items()):
        if name.startswith("_") and name != "__init__":
            continue
        wrap = type(member) if isinstance(member, staticmethod | classmethod) else None
        function = member.__func__ if wrap is not None else member
        if not isinstance(function, FunctionType) or hasattr(function, "ends_at_caller"):
            continue
        if not function.__code__.co_flags & _NOT_PLAIN:
            decorated = ends_at_caller(function)
            setattr(kind, name, decorated if wrap is None else wrap(decorated))
    return kind
