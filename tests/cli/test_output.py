"""The format of sizes and times, and output for programs."""

import json
from datetime import UTC, datetime, timedelta

import click
import pytest
from click.testing import CliRunner

from tinkex.cli.output import ago, as_json, show_json, show_table, size, write_csv

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


@pytest.mark.parametrize("args", [["-f", "json", "sub"], ["sub", "-f", "json"]])
def test_the_format_may_stand_before_or_after_the_subcommand(args: list[str]) -> None:
    @click.group()
    @click.option("-f", "--format", default="table")
    def top(format: str) -> None:
        pass

    @top.command()
    @click.option("-f", "--format")
    def sub(format: str | None) -> None:
        click.echo(as_json())

    assert CliRunner().invoke(top, args).stdout == "True\n"
    assert CliRunner().invoke(top, ["sub"]).stdout == "False\n"


def test_csv_leaves_the_unknown_empty(tmp_path) -> None:
    file = tmp_path / "rows.csv"
    write_csv(str(file), ("a", "b"), [(1, None), ("x,y", 2.5)])
    assert file.read_text() == 'a,b\n1,\n"x,y",2.5\n'
