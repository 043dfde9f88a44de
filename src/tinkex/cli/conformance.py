"""`tinkex conformance URL`: run the conformance checks against a server."""

from __future__ import annotations

import sys

import click

from tinkex.cli.errors import CommandFailed
from tinkex.cli.output import as_json, counted, examples, json_alias, show_json, show_table
from tinkex.cli.service_options import progress_bar
from tinkex.conformance import CHECKS, Outcome, Remote, Report, Verdict, run
from tinkex.conformance.raw_client import Unexpected

STYLES = {"pass": "green", "fail": "bold red", "skip": "yellow"}
#: Longest text in a cell on a terminal. In a pipe and as JSON there is all of it.
MAX_CELL_CHARS = 200


@click.command(
    "conformance",
    epilog=examples(
        "tinkex conformance http://127.0.0.1:8000",
        "tinkex conformance http://127.0.0.1:8000 --only S3 -f json",
        "tinkex conformance --list",
    ),
)
@click.argument("url", required=False)
@click.option(
    "--api-key",
    metavar="KEY",
    envvar=["TINKEX_API_KEY", "TINKER_API_KEY"],
    default="tml-conformance",
    help="API key.  [default: TINKER_API_KEY]",
)
@click.option("--key", hidden=True, help="The earlier name of --api-key.")
@click.option("--other-key", help="A key of another owner, to check that owners are isolated.")
@click.option("--base-model", help="Base model to use.  [default: the first one served]")
@click.option(
    "--only",
    multiple=True,
    metavar="ID|CHECK",
    help="Only checks of this requirement (such as S3), or this check. Can be repeated.",
)
@json_alias
@click.option(
    "--list", "listed", is_flag=True, help="List the checks and what they expect, then exit."
)
def command(
    url: str | None,
    api_key: str,
    key: str | None,
    other_key: str | None,
    base_model: str | None,
    only: tuple[str, ...],
    listed: bool,
) -> None:
    """Run the conformance checks against the Tinker server at URL.

    Creates sessions, models and checkpoints on the server and does not delete them. A small model
    is enough. The exit status is 1 if a check fails.
    """
    if listed:
        _show_checks()
        return
    if url is None:
        raise click.UsageError("Give the URL of a server, or --list.")
    remote = Remote(url, key=key or api_key, other_key=other_key, base_model=base_model)
    try:
        chosen = remote.base_model
    except Unexpected as error:
        raise CommandFailed(
            f"{url} does not answer as a Tinker server: {error}",
            hint="Check the URL and the key, or name a model with --base-model.",
        ) from error
    done = 0
    with progress_bar("Checking") as show:

        def count(_outcome: Outcome) -> None:
            nonlocal done
            done += 1
            show(done, len(CHECKS) if not only else done)

        report = run(remote, only=only or None, on_outcome=count)
    if as_json():
        show_json({"url": url, "base_model": chosen, **_plain(report)})
    else:
        _show_report(report, title=f"{remote.url}, {chosen}")
    sys.exit(0 if report.passed else 1)


def _show_checks() -> None:
    if as_json():
        fields = ("name", "theme", "requirements", "sentence")
        show_json({"checks": [{name: getattr(check, name) for name in fields} for check in CHECKS]})
        return
    for check in CHECKS:
        click.echo(f"{check.name} [{', '.join(check.requirements)}]: {check.sentence}")


def _show_report(report: Report, *, title: str) -> None:
    longest = MAX_CELL_CHARS if sys.stdout.isatty() else None
    show_table(
        ("Verdict", "Check", "Ids", "Seen"),
        [
            (
                outcome.verdict.value,
                outcome.check.sentence,
                ", ".join(outcome.check.requirements),
                " ".join(outcome.seen.split())[:longest],
            )
            for outcome in report.outcomes
        ],
        title=title,
        styles=STYLES,
    )
    counts = ", ".join(f"{report.count(verdict)} {verdict}" for verdict in Verdict)
    click.echo(f"{counted(len(report.outcomes), 'check')}: {counts}", err=True)


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
