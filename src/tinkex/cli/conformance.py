"""`tinkex conformance URL`: run the conformance checks against a server."""

from __future__ import annotations

import json
import sys

import click

from tinkex.cli.errors import CommandFailed
from tinkex.conformance import CHECKS, Outcome, Remote, Report, Verdict, run
from tinkex.conformance.raw_client import Unexpected

STYLES = {Verdict.PASS: "green", Verdict.FAIL: "bold red", Verdict.SKIP: "yellow"}
#: Longest text in a table cell; --json shows all of it.
MAX_CELL_CHARS = 200


@click.command("conformance")
@click.argument("url")
@click.option("--key", envvar="TINKER_API_KEY", default="tml-conformance", help="API key.")
@click.option("--other-key", help="A key of another owner, to check that owners are isolated.")
@click.option("--base-model", help="Base model to use.  [default: the first one served]")
@click.option(
    "--only",
    multiple=True,
    metavar="ID|CHECK",
    help="Only checks of this requirement (such as S3), or this check. Can be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option(
    "--list", "listed", is_flag=True, help="List the checks and what they expect, then exit."
)
def command(
    url: str,
    key: str,
    other_key: str | None,
    base_model: str | None,
    only: tuple[str, ...],
    as_json: bool,
    listed: bool,
) -> None:
    """Run the conformance checks against the Tinker server at URL.

    Creates sessions, models and checkpoints on the server and does not delete them. A small model
    is enough. The exit status is 1 if a check fails.
    """
    if listed:
        for check in CHECKS:
            click.echo(f"{check.name} [{', '.join(check.requirements)}]: {check.sentence}")
        return
    remote = Remote(url, key=key, other_key=other_key, base_model=base_model)
    try:
        chosen = remote.base_model
    except Unexpected as error:
        raise CommandFailed(
            f"{url} does not answer as a Tinker server: {error}",
            hint="Check the URL and the key, or name a model with --base-model.",
        ) from error
    if as_json:
        report = run(remote, only=only or None)
        click.echo(json.dumps({"url": url, "base_model": chosen, **_plain(report)}, indent=2))
    else:
        report = _with_table(remote, chosen, only)
    sys.exit(0 if report.passed else 1)


def _with_table(remote: Remote, chosen: str, only: tuple[str, ...]) -> Report:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    table = Table(title=f"{remote.url}, {chosen}", title_justify="left")
    for column in ("", "check", "ids", "seen"):
        table.add_column(column, overflow="fold")

    def add_row(outcome: Outcome) -> None:
        style = STYLES[outcome.verdict]
        table.add_row(
            f"[{style}]{outcome.verdict}[/]",
            outcome.check.sentence,
            ", ".join(outcome.check.requirements),
            escape(outcome.seen[:MAX_CELL_CHARS]),
        )

    with console.status("checking ..."):
        report = run(remote, only=only or None, on_outcome=add_row)
    console.print(table)
    counts = ", ".join(f"{report.count(verdict)} {verdict}" for verdict in Verdict)
    console.print(f"{len(report.outcomes)} checks: {counts}")
    return report


def _plain(report: Report) -> dict[str, object]:
    return {
        "passed": report.passed,
        "checks": [
            {
                "name": outcome.check.name,
                "theme": outcome.check.theme,
                "requirements": list(outcome.check.requirements),
                "sentence": outcome.check.sentence,
                "verdict": outcome.verdict.value,
                "seen": outcome.seen,
                "seconds": round(outcome.seconds, 3),
            }
            for outcome in report.outcomes
        ],
    }
