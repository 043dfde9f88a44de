"""What is taken out of text before it is logged, answered or kept: keys, tokens, repeated tracebacks."""

from __future__ import annotations

import logging
import re
import time
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Final

__all__ = ["RedactingFormatter", "redact", "redact_value"]

#: Keys, web tokens, signatures of links. The first characters of a key, which name it, are shorter.
_SECRETS: Final = re.compile(
    r"tml-[\w-]{9,}|eyJ[\w-]{6,}(?:\.[\w-]*){0,2}|(?<=signature=)[0-9a-f]{16,}"
)


def redact(text: str) -> str:
    """The text with `***` for every secret."""
    return _SECRETS.sub("***", text)


def redact_value(value: Any) -> Any:
    """The same for every text in a JSON value."""
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
    """Kinds and lines of the exceptions that a traceback shows above its last one."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if error is not None:
            yield type(error)
            yield from _lines(error.__traceback__)


#: What a terminal obeys, or takes for the end of a line.
_CONTROL: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")


#: A traceback that was logged is one line when it comes again within this time.
REPEATED_S: Final = 600.0
#: Different tracebacks that are remembered.
_MOST_REMEMBERED: Final = 200


class RedactingFormatter(logging.Formatter):
    """
    Takes secrets out of the finished text: of the message, and of a traceback below it.

    A message is one line, and nothing in it is obeyed by a terminal: what it quotes may have been
    written to look like another entry. The same traceback is written once in a while: a request
    that fails can be sent again as often as one likes, and would fill the disk.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        #: Where an exception came from: when it was last written in full, how often not since.
        self._written: dict[tuple[Any, ...], tuple[float, int]] = {}

    def formatException(self, ei: Any) -> str:
        kind, error, frames = ei
        place = (kind, *_lines(frames), *_causes(error))
        now_s = time.monotonic()
        written_s, left_out = self._written.get(place, (-REPEATED_S, 0))
        if now_s - written_s < REPEATED_S:
            self._written[place] = (written_s, left_out + 1)
            last = "".join(traceback.format_exception_only(kind, error)).strip()
            return f"{last}\n(its traceback is above, {now_s - written_s:.0f} s ago)"
        # Written again, so it is the youngest: the one forgotten is that not seen for longest.
        self._written.pop(place, None)
        self._written[place] = (now_s, 0)
        if len(self._written) > _MOST_REMEMBERED:
            del self._written[next(iter(self._written))]
        again = f"\n({left_out} more of these were not shown)" if left_out else ""
        return super().formatException(ei) + again

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).replace("\n", "\\n")

    def format(self, record: logging.LogRecord) -> str:
        text = redact(super().format(record))
        return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)
