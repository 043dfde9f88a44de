"""Keys and tokens, taken out of text before it is logged, answered or kept."""

from __future__ import annotations

import re
from typing import Any, Final

__all__ = ["scrubbed", "scrubbed_value"]

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
