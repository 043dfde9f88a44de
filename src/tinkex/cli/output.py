"""Output of commands: tables, JSON and CSV, and the format of sizes and times."""

from __future__ import annotations

import csv
import json
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TextIO

import click

from tinkex.wire.text_format import format_binary_bytes

NONE = "N/A"
#: An empty cell outside a terminal, so that `awk` counts the same columns in every row.
EMPTY = "-"
_UNITS = (("minute", 60), ("hour", 3600), ("day", 86_400), ("week", 604_800))
#: Times further away than this are shown as dates.
_DISTANT_S = 30 * 86_400
#: Between columns.
_GAP = 2
#: Longer words are broken in a table on a terminal, except in the first column.
_MAX_WORD = 20
#: Keys of `click.Context.meta`, which a command shares with its groups.
_FORMAT, _VERBOSE = "tinkex.format", "tinkex.verbose"


# -- options that every command has ----------------------------------------------------------------


def _remember(key: str) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """A callback that stores an option where `as_json` and `verbose` find it; the last one wins."""

    def store(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        if value is not None:
            ctx.meta[key] = value
        return value

    return store


def common_options(*, hidden: bool = False, default: str | None = None) -> list[click.Option]:
    """
    --format and --verbose. `command_group` adds them to every command and group.

    Only the first group has a default: what is given before the subcommand holds after it.
    """
    return [
        click.Option(
            ["--format", "-f"],
            type=click.Choice(["table", "json"]),
            default=default,
            callback=_remember(_FORMAT),
            expose_value=False,
            hidden=hidden,
            help="Output format.  [default: table]",
        ),
        click.Option(
            ["--verbose", "-v"],
            is_flag=True,
            default=None,
            callback=_remember(_VERBOSE),
            expose_value=False,
            hidden=hidden,
            help="Show more: exact times, and what an error was about.",
        ),
    ]


#: For a command that had another option for JSON before it had --format.
json_alias = click.option(
    "--json",
    type=click.Choice(["table", "json"]),
    is_flag=True,
    flag_value="json",
    default=None,
    callback=_remember(_FORMAT),
    expose_value=False,
    hidden=True,
)


def as_json() -> bool:
    """Whether --format json was given, before or after the subcommand."""
    return bool(_chosen(_FORMAT) == "json")


def verbose() -> bool:
    """Whether --verbose was given, before or after the subcommand."""
    return bool(_chosen(_VERBOSE))


def _chosen(key: str) -> Any:
    ctx = click.get_current_context(silent=True)
    return None if ctx is None else ctx.meta.get(key)


def examples(*lines: str) -> str:
    """The epilog of a command: an "Examples:" block that click does not wrap."""
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])


# -- JSON ------------------------------------------------------------------------------------------


def show_json(value: Any, *, file: TextIO | None = None) -> None:
    """Print JSON, by default to stdout; times are ISO 8601."""
    click.echo(json.dumps(plain(value), indent=2, ensure_ascii=False), file=file)


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


# -- tables ----------------------------------------------------------------------------------------


def show_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str | None = None,
    styles: Mapping[str, str] | None = None,
) -> None:
    """
    Print a table, and its title to stderr.

    The first column has what people copy: an id or a path. It is never wrapped. On a terminal the
    other columns wrap; if even that is too wide, each row becomes a line with the first cell and a
    paragraph with the others. Columns without any content are not shown there. Elsewhere the table
    is plain and never truncated, so that `grep` and `awk` see complete ids.

    `styles` colors cells by their text.
    """
    if title:
        click.echo(title, err=True)
    if not sys.stdout.isatty():
        show_columns([columns, *([cell or EMPTY for cell in row] for row in rows)])
        return
    used = [index for index in range(len(columns)) if not rows or any(row[index] for row in rows)]
    columns = [columns[index] for index in used]
    rows = [[printable(row[index]) for index in used] for row in rows]

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # Text, so that names chosen by users are not interpreted as markup.
    console = Console(highlight=False)
    if not fits(columns, rows, console.width):
        for first, paragraph in as_records(columns, rows, console.width):
            # Not by rich, which would wrap it: a line that the terminal wraps is copied as one.
            click.secho(first, fg="cyan")
            console.print(Text(paragraph))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(
            column, style="cyan" if number == 0 else None, no_wrap=number == 0, overflow="fold"
        )
    for row in rows:
        table.add_row(*(Text(cell, style=(styles or {}).get(cell, "")) for cell in row))
    console.print(table)


def fits(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> bool:
    """Whether a table fits if all columns but the first wrap."""
    needed = -_GAP
    for number, cells in enumerate(zip(columns, *rows, strict=True)):
        if number == 0:
            needed += _GAP + max(map(len, cells))
        else:
            words = [len(word) for cell in cells for word in cell.split()]
            needed += _GAP + min(max(words, default=0), _MAX_WORD)
    return needed <= width


def as_records(
    columns: Sequence[str], rows: Sequence[Sequence[str]], width: int
) -> list[tuple[str, str]]:
    """Each row as its first cell and a paragraph that names the other cells."""
    records = []
    for first, *others in rows:
        named = zip(columns[1:], others, strict=True)
        text = ", ".join(f"{column}: {cell}" for column, cell in named if cell)
        indent = " " * _GAP
        lines = textwrap.wrap(
            text,
            width,
            initial_indent=indent,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        records.append((first, "\n".join(lines)))
    return records


def show_columns(rows: Sequence[Sequence[str]]) -> None:
    """Print rows whose cells are aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        click.echo((" " * _GAP).join(padded).rstrip())


def show_properties(properties: Mapping[str, str]) -> None:
    """Print one line for each property. Values are never wrapped: people copy them."""
    if not sys.stdout.isatty():
        show_table(("Property", "Value"), list(properties.items()))
        return
    width = max(map(len, properties), default=0)
    for name, value in properties.items():
        click.echo(click.style(name.ljust(width), fg="cyan") + " " * _GAP + printable(value))


def printable(text: str) -> str:
    """Without control characters: a name chosen by somebody else must not control a terminal."""
    return "".join(char for char in text if char.isprintable() or char in "\n\t")


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


# -- words -----------------------------------------------------------------------------------------


def counted(count: int, singular: str, plural: str | None = None) -> str:
    """`1 checkpoint`, `2 checkpoints`, `0 entries`."""
    return f"{count} {singular if count == 1 else plural or f'{singular}s'}"


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
    text = counted(int(absolute_s // seconds), unit)
    return f"{text} ago" if elapsed_s > 0 else f"in {text}"


def ago_exact(moment: datetime | None) -> str:
    """`ago`, and with --verbose the exact time too."""
    if moment is None or not verbose():
        return ago(moment)
    return f"{ago(moment)} ({moment.isoformat(timespec='seconds')})"


def yes_no(value: bool | None) -> str:
    return NONE if value is None else ("yes" if value else "no")
