"""
How objects are shown: reprs of one bounded line, and small HTML tables for notebooks.

A repr looks like the call of a constructor. It has what a person looks for, the first items of what
is long, and no credential.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

__all__ = ["call", "numbers", "short", "table", "without_query"]

#: Characters of a text, of an object or list in a repr, and of a whole repr.
MAX_TEXT: Final = 120
MAX_VALUE: Final = 400
MAX_REPR: Final = 600
#: Items of a list or dict that are shown.
MAX_ITEMS: Final = 8
#: Rows and characters of a cell of an HTML table.
MAX_ROWS: Final = 50
MAX_CELL: Final = 400

_LINE_BREAKS: Final = re.compile(r"\s*[\r\n\x0b\x0c\x1c-\x1e\x85\u2028\u2029]\s*")


def call(name: str, fields: Iterable[tuple[str, Any]]) -> str:
    """`name(field=value, ...)`; values are bounded (`short`), and so is the whole."""
    text = ", ".join(f"{field}={short(value)}" for field, value in fields)
    return f"{name}({_cut(text, MAX_REPR)})"


class Shown(str):
    """Text that is shown without quotes."""

    __slots__ = ()


def short(value: Any) -> str:
    """A repr of bounded length on one line."""
    if isinstance(value, Shown):
        return value
    if isinstance(value, str):
        return repr(_cut(value, MAX_TEXT))
    if isinstance(value, float):
        return _float(value, 6)
    if isinstance(value, datetime):
        return repr(time(value))
    if isinstance(value, Mapping):
        items = [f"{short(key)}: {short(item)}" for key, item in _first(value.items(), MAX_ITEMS)]
        return _bracketed("{", items, len(value), "}")
    if isinstance(value, (list, tuple)):
        items = [short(item) for item in _first(value, MAX_ITEMS)]
        return _bracketed("[", items, len(value), "]")
    return _cut(_LINE_BREAKS.sub(" ", repr(value)), MAX_VALUE)


def numbers(values: Any, most: int = MAX_ITEMS) -> Shown:
    """The first of many numbers, such as `[464, 9206, 318, ... 40 in all]`."""
    shown = values[:most]
    shown = shown.tolist() if hasattr(shown, "tolist") else list(shown)
    items = [_float(each, 4) if isinstance(each, float) else str(each) for each in shown]
    return Shown(_bracketed("[", items, len(values), "]"))


def time(moment: datetime) -> str:
    """A time to the second, in UTC if its zone is known."""
    if moment.tzinfo is None:
        return moment.isoformat(timespec="seconds")
    return moment.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def without_query(url: str) -> str:
    """A link without its query, which holds the signature."""
    return url.partition("?")[0]


def _float(value: float, digits: int) -> str:
    text = f"{value:.{digits}g}"
    return f"{text}.0" if text.lstrip("-").isdigit() else text


def _first(items: Iterable[Any], most: int) -> list[Any]:
    return [item for item, _ in zip(items, range(most), strict=False)]


def _bracketed(left: str, items: Sequence[str], total: int, right: str) -> str:
    """As many of the items as fit, and how many there are if some are left out."""
    shown: list[str] = []
    room = MAX_VALUE - 20
    for item in items:
        room -= len(item) + 2
        if room < 0 and shown:
            break
        shown.append(item)
    if len(shown) < total:
        shown.append(f"... {total} in all")
    return left + ", ".join(shown) + right


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


# -- HTML ----------------------------------------------------------------------------------------


def table(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], *, caption: str = "", total: int = 0
) -> str:
    """
    An HTML table. All text is escaped; None is an empty cell.

    `total` is the number of rows there are, if these are only some of them.
    """
    from html import escape

    def cell(value: Any) -> str:
        if value is None:
            return "<td></td>"
        if isinstance(value, bool):
            value = "yes" if value else "no"
        if isinstance(value, (int, float)):
            text = f"{value:.6g}" if isinstance(value, float) else f"{value}"
            return f'<td style="text-align: right">{text}</td>'
        text = time(value) if isinstance(value, datetime) else str(value)
        return f'<td style="text-align: left">{escape(_cut(text, MAX_CELL))}</td>'

    shown = rows[:MAX_ROWS]
    total = max(total, len(rows))
    if len(shown) < total:
        caption = f"{caption}, {len(shown)} of {total}" if caption else f"{len(shown)} of {total}"
    head = "".join(f'<th style="text-align: left">{escape(each)}</th>' for each in columns)
    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in shown)
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
