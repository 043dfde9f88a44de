"""The format of sizes and times, and output for programs."""

import json
from datetime import UTC, datetime, timedelta

import click
import pytest
from click.testing import CliRunner

from tinkex.cli.command_group import with_common_options
from tinkex.cli.output import (
    ago,
    as_json,
    as_records,
    counted,
    fits,
    printable,
    show_json,
    show_table,
    size,
    write_csv,
)

NOW = datetime(2027, 1, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (None, "N/A"),
        (0, "0.0 B"),
        (1023, "1023.0 B"),
        (1536, "1.5 KB"),
        (5 * 1024**3, "5.0 GB"),
        (3 * 1024**5, "3072.0 TB"),
    ],
)
def test_sizes_go_in_steps_of_1024(count: int | None, expected: str) -> None:
    assert size(count) == expected


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        (timedelta(seconds=5), "just now"),
        (timedelta(minutes=1), "1 minute ago"),
        (timedelta(hours=23, minutes=59), "23 hours ago"),
        (timedelta(days=6), "6 days ago"),
        (timedelta(days=15), "2 weeks ago"),
        (timedelta(days=45), "2026-12-17"),
        (-timedelta(hours=2), "in 2 hours"),
        (-timedelta(seconds=5), "in less than a minute"),
    ],
)
def test_times_are_relative_up_to_a_month_and_then_dates(before: timedelta, expected: str) -> None:
    assert ago(NOW - before, now=NOW) == expected
    assert ago((NOW - before).replace(tzinfo=None), now=NOW) == expected


def test_json_has_iso_times() -> None:
    result = CliRunner().invoke(click.command()(lambda: show_json({"at": [NOW]})))
    assert json.loads(result.stdout) == {"at": ["2027-01-31T12:00:00+00:00"]}


def test_a_table_outside_a_terminal_cuts_nothing_and_reads_no_markup() -> None:
    long = "x" * 300

    @click.command()
    def show() -> None:
        show_table(("A", "B"), [(long, "[red]b[/red]")], title="title")

    result = CliRunner().invoke(show)
    assert result.stdout.splitlines()[1] == f"{long}  [red]b[/red]"
    assert result.stderr == "title\n"


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["-f", "json", "sub"], "True"),
        (["sub", "-f", "json"], "True"),
        (["-f", "json", "sub", "-f", "table"], "False"),  # the last one counts
        (["sub"], "False"),
    ],
)
def test_the_format_may_stand_before_or_after_the_subcommand(
    args: list[str], expected: str
) -> None:
    @click.group()
    def top() -> None:
        pass

    @top.command()
    def sub() -> None:
        click.echo(as_json())

    assert CliRunner().invoke(with_common_options(top), args).stdout == f"{expected}\n"


PATH = "tinker://0fb0c8b1-9a52-4a30-9d6c-0d3f8a5c1f0e:train:0/sampler_weights/a-name"


def test_a_table_that_is_too_wide_becomes_records_with_whole_paths() -> None:
    columns = ("Path", "Type", "Size", "Saved")
    row = (PATH, "sampler", "1.5 MB", "9 minutes ago")
    assert not fits(columns, [row], 80)
    assert fits(columns, [row], 120)
    assert as_records(columns, [row], 80) == [
        (PATH, "  Type: sampler, Size: 1.5 MB, Saved: 9 minutes ago")
    ]
    # Long texts wrap; they do not make records of a table.
    assert fits(("State", "Finding"), [("problem", "word " * 100)], 80)


def test_control_characters_do_not_reach_a_terminal() -> None:
    assert printable("a\x1b[2Jb\x07\tc\n") == "a[2Jb\tc\n"


@pytest.mark.parametrize(("count", "expected"), [(0, "0 files"), (1, "1 file"), (2, "2 files")])
def test_one_is_singular(count: int, expected: str) -> None:
    assert counted(count, "file") == expected


def test_csv_leaves_the_unknown_empty(tmp_path) -> None:
    file = tmp_path / "rows.csv"
    write_csv(str(file), ("a", "b"), [(1, None), ("x,y", 2.5)])
    assert file.read_text() == 'a,b\n1,\n"x,y",2.5\n'
