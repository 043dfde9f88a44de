"""Keys and tokens, taken out of text before it is logged, answered or kept."""

from __future__ import annotations

import logging
import re
from typing import Any, Final

__all__ = ["ScrubbedFormatter", "scrubbed", "scrubbed_value"]

#: Keys, web tokens, signatures of links. The first characters of a key, which name it, are shorter.
_SECRETS: Final = re.compile(
    r"tml-[\w-]{9,}|eyJ[\w-]{6,}(?:\.[\w-]*){0,2}|(?<=signature=)[0-9a-f]{16,}"
)


def scrubbed(text: str) -> str:
    """The text with `***` for every secret."""
    return _SECRETS.sub("***", text)


def scrubbed_value(value: Any) -> Any:
    """The same for every text in a JSON value."""
    if isinstance(value, str):
        return scrubbed(value)
    if isinstance(value, dict):
        return {scrubbed_value(key): scrubbed_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [scrubbed_value(item) for item in value]
    return value


#: What a terminal obeys, or takes for the end of a line.
_CONTROL: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")


class ScrubbedFormatter(logging.Formatter):
    """
    Takes secrets out of the finished text: of the message, and of a traceback below it.

    A message is one line, and nothing in it is obeyed by a terminal: what it quotes may have been
    written to look like another entry.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).replace("\n", "\\n")

    def format(self, record: logging.LogRecord) -> str:
        text = scrubbed(super().format(record))
        return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)
