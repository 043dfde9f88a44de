"""Output of commands: tables, JSON and CSV, and the format of sizes and times."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TextIO

import click

from tinkex.wire.text_format import format_binary_bytes

NONE = "N/A"
_UNITS = (("minute", 60), ("hour", 3600), ("day", 86_400), ("week", 604_800))
#: Times further away than this are shown as dates.
_DISTANT_S = 30 * 86_400

format_option = click.option(
    "--format",
    "-f",
    type=click.Choice(["table", "json"]),
    help="Output format; the same as `tinkex --format`.",
)


def as_json() -> bool:
    """Whether --format json was given, before or after the subcommand."""
    ctx = click.get_current_context(silent=True)
    while ctx is not None:
        if (chosen := ctx.params.get("format")) is not None:
            return bool(chosen == "json")
        ctx = ctx.parent
    return False


def show_json(value: Any) -> None:
    """Print JSON to stdout; times are ISO 8601."""
    click.echo(json.dumps(plain(value), indent=2, ensure_ascii=False))


def report(words: str, fields: Mapping[str, Any], *, err: bool = True) -> None:
    """Print what a command did: `fields` if JSON is asked for, otherwise `words`."""
    if as_json():
        show_json(fields)
    else:
        click.echo(words, err=err)


def plain(value: Any) -> Any:
    """Convert to JSON types; times become ISO 8601 strings."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, datetime):
        return value.isoformat()
    return value


def show_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str | None = None
) -> None:
    """
    Print a table: with borders and color on a terminal, elsewhere plain and never truncated, so
    that `grep` and `awk` see complete ids.
    """
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(title=title, title_justify="left")
        for number, column in enumerate(columns):
            table.add_column(column, style="cyan" if number == 0 else None, overflow="fold")
        for row in rows:
            # Text, so that names chosen by users are not interpreted as markup.
            table.add_row(*map(Text, row))
        Console().print(table)
        return
    if title:
        click.echo(title, err=True)
    show_columns([columns, *rows])


def show_columns(rows: Sequence[Sequence[str]]) -> None:
    """Print rows whose cells are aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        click.echo("  ".join(padded).rstrip())


def show_properties(properties: Mapping[str, str]) -> None:
    """Print a table with one line for each property."""
    show_table(("Property", "Value"), list(properties.items()))


def write_csv(path: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Write CSV to a file or (`-`) to stdout; None is an empty cell."""

    def write(file: TextIO) -> None:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(["" if cell is None else cell for cell in row] for row in rows)

    if path == "-":
        write(sys.stdout)
        return
    with open(path, "w", newline="", encoding="utf-8") as file:
        write(file)


def size(count: int | None) -> str:
    """A size such as `1.5 MB`; units are powers of 1024."""
    if count is None:
        return NONE
    return format_binary_bytes(count)


def ago(moment: datetime | None, *, now: datetime | None = None) -> str:
    """A time such as `3 hours ago` or `in 2 days`; a date if it is more than 30 days away."""
    if moment is None:
        return NONE
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    elapsed_s = ((now or datetime.now(UTC)) - moment).total_seconds()
    absolute_s = abs(elapsed_s)
    if absolute_s > _DISTANT_S:
        return moment.astimezone(UTC).date().isoformat()
    if absolute_s < 60:
        return "just now" if elapsed_s >= 0 else "in less than a minute"
    unit, seconds = next(pair for pair in reversed(_UNITS) if absolute_s >= pair[1])
    number = int(absolute_s // seconds)
    text = f"{number} {unit}{'' if number == 1 else 's'}"
    return f"{text} ago" if elapsed_s > 0 else f"in {text}"


def yes_no(value: bool | None) -> str:
    return NONE if value is None else ("yes" if value else "no")
