"""Removes secrets from logs, responses and stored text, and repeated tracebacks from logs."""

from __future__ import annotations

import logging
import re
import time
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Final

__all__ = ["RedactingFormatter", "redact", "redact_value"]

#: API keys, JWTs, signatures of links. The prefix that identifies a key is too short to match.
_SECRETS: Final = re.compile(
    r"tml-[\w-]{9,}|eyJ[\w-]{6,}(?:\.[\w-]*){0,2}|(?<=signature=)[0-9a-f]{16,}"
)


def redact(text: str) -> str:
    """Replace every secret in `text` with `***`."""
    return _SECRETS.sub("***", text)


def redact_value(value: Any) -> Any:
    """Redact every string in a JSON value."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {redact_value(key): redact_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_value(item) for item in value]
    return value


def _lines(frames: TracebackType | None) -> Iterator[tuple[Any, ...]]:
    return ((frame.f_code, line) for frame, line in traceback.walk_tb(frames))


def _causes(error: BaseException | None) -> Iterator[Any]:
    """Types and lines of the exceptions that a traceback shows above the last one."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if error is not None:
            yield type(error)
            yield from _lines(error.__traceback__)


#: Characters that control a terminal or end a line.
_CONTROL: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")


#: A traceback that repeats within this time is logged as one line.
REPEATED_S: Final = 600.0
#: Tracebacks that are remembered.
_MAX_REMEMBERED: Final = 200


class RedactingFormatter(logging.Formatter):
    """
    Redacts messages and tracebacks.

    A message is one line with control characters escaped, so that quoted user input cannot imitate
    another log entry. A repeated traceback is logged in full only once per `REPEATED_S`, so that a
    failing request that is sent over and over cannot fill the disk.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        #: By origin of the exception: when it was last logged in full, and repeats since then.
        self._logged: dict[tuple[Any, ...], tuple[float, int]] = {}

    def formatException(self, ei: Any) -> str:
        kind, error, frames = ei
        origin = (kind, *_lines(frames), *_causes(error))
        now_s = time.monotonic()
        logged_s, repeats = self._logged.get(origin, (-REPEATED_S, 0))
        if now_s - logged_s < REPEATED_S:
            self._logged[origin] = (logged_s, repeats + 1)
            last = "".join(traceback.format_exception_only(kind, error)).strip()
            return f"{last}\n(its traceback was logged {now_s - logged_s:.0f} s ago)"
        # Moved to the end: the dictionary evicts the least recently logged one.
        self._logged.pop(origin, None)
        self._logged[origin] = (now_s, 0)
        if len(self._logged) > _MAX_REMEMBERED:
            del self._logged[next(iter(self._logged))]
        again = f"\n({repeats} repeats of this traceback were not logged)" if repeats else ""
        return super().formatException(ei) + again

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).replace("\n", "\\n")

    def format(self, record: logging.LogRecord) -> str:
        text = redact(super().format(record))
        return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)
