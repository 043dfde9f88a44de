"""Reads training data from JSON Lines. A mistake is reported with its file, line and field."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

#: What a row is, by the fields that it has.
Kind = Literal["chat", "completion", "preference", "prompt"]

#: The fields of each kind, in the order in which they are looked for.
FORMS: Mapping[Kind, tuple[str, ...]] = {
    "chat": ("messages",),
    "preference": ("chosen", "rejected"),
    "completion": ("prompt", "completion"),
    "prompt": ("prompt",),
}
EXPECTED = (
    'a chat {"messages": [...]}, {"prompt": ..., "completion": ...}, or a preference '
    '{"prompt": ..., "chosen": ..., "rejected": ...}'
)


class DataError(ValueError):
    """A row that cannot be used. The message has the file, the line and the field."""

    def __init__(self, where: str, field: str, problem: str) -> None:
        self.where, self.field, self.problem = where, field, problem
        super().__init__(": ".join(part for part in (where, field, problem) if part))


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of training data, checked by `check`."""

    kind: Kind
    fields: Mapping[str, Any]
    #: For messages: `chats.jsonl, line 3`.
    where: str = ""

    def error(self, field: str, problem: str) -> DataError:
        return DataError(self.where, field, problem)


def read(path: str | Path) -> list[Row]:
    """
    The rows of a JSON Lines file. Empty lines are skipped; all rows must be of one kind.

    Args:
        path: The file.

    Returns:
        The rows, at least one.

    Raises:
        DataError: A line is not JSON, or a field is missing or has the wrong type.

    Example:
        rows = data.read("chats.jsonl")
    """
    path = Path(path)
    rows: list[Row] = []
    for number, line in _lines(path):
        where = f"{path}, line {number}"
        try:
            fields = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                where, "", f"not JSON: {error.msg} at column {error.colno}. Each line is one object"
            ) from error
        row = check(fields, where)
        if rows and row.kind != rows[0].kind:
            raise row.error(
                FORMS[row.kind][-1],
                f"this row is a {row.kind}, the first one a {rows[0].kind}. Use one file for each",
            )
        rows.append(row)
    if not rows:
        raise DataError(
            str(path), "", f"the file is empty. Expected one row in each line: {EXPECTED}"
        )
    return rows


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path}, line {number}", "", f"not UTF-8 at byte {error.start}"
                ) from error
            if text.strip():
                yield number, text


def check(fields: Any, where: str = "") -> Row:
    """
    A row from its fields, such as a line of a file or a row of a dataset.

    Args:
        fields: The fields: a mapping.
        where: Where it is from, for error messages.

    Returns:
        The row.

    Raises:
        DataError: A field is missing or has the wrong type.

    Example:
        row = data.check({"prompt": "Who are you?", "completion": "A pirate."})
    """
    if not isinstance(fields, Mapping):
        raise DataError(where, "", f"is {_kind_of(fields)}, not an object. Expected {EXPECTED}")
    kind = next((kind for kind, names in FORMS.items() if all(n in fields for n in names)), None)
    if kind is None:
        found = ", ".join(map(repr, fields)) or "none"
        raise DataError(where, "", f"has the fields {found}. Expected {EXPECTED}")
    names = FORMS[kind]
    row = Row(kind=kind, fields=fields, where=where)
    if kind == "chat":
        _check_messages(row, "messages", fields["messages"])
    else:
        given = ("prompt", *names) if "prompt" in fields else names
        for name in dict.fromkeys(given):
            _check_text(row, name, fields[name])
    if kind == "preference" and "prompt" not in fields:
        for name in names:
            if isinstance(fields[name], str):
                raise row.error("prompt", "is missing. Only conversations can do without it")
    tools = fields.get("tools")
    if tools is not None and not (
        isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)
    ):
        raise row.error("tools", f"is {_kind_of(tools)}, not a list of JSON schemas")
    return row


def _check_text(row: Row, name: str, value: Any) -> None:
    """A text, or a conversation."""
    if isinstance(value, list):
        _check_messages(row, name, value)
    elif not isinstance(value, str):
        raise row.error(name, f"is {_kind_of(value)}, not a text or a list of messages")
    elif name != "prompt" and not value:
        raise row.error(name, "is empty. There is nothing to learn from it")


def _check_messages(row: Row, name: str, messages: Any) -> None:
    if not isinstance(messages, list):
        raise row.error(name, f"is {_kind_of(messages)}, not a list of messages")
    if not messages:
        raise row.error(name, "is empty")
    for index, message in enumerate(messages):
        field = f"{name}[{index}]"
        if not isinstance(message, Mapping):
            raise row.error(field, f"is {_kind_of(message)}, not a message with role and content")
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise row.error(f"{field}.role", _missing_or_wrong(message, "role", "a text"))
        content = message.get("content")
        if content is None and message.get("tool_calls"):
            continue
        if not isinstance(content, str | list):
            raise row.error(f"{field}.content", _missing_or_wrong(message, "content", "a text"))
        weight = message.get("weight", 1)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or weight < 0:
            raise row.error(f"{field}.weight", f"is {weight!r}, not a number from 0 on")


def _missing_or_wrong(message: Mapping[str, Any], name: str, wanted: str) -> str:
    if name not in message:
        return f"is missing; the message has {', '.join(map(repr, message)) or 'no fields'}"
    if message[name] == "":
        return "is empty"
    return f"is {_kind_of(message[name])}, not {wanted}"


def _kind_of(value: Any) -> str:
    names = {
        dict: "an object",
        list: "a list",
        str: "a text",
        bool: "a boolean",
        type(None): "null",
    }
    return names.get(type(value), "a number" if isinstance(value, int | float) else repr(value))
