"""`tinkex doctor`: find and repair problems in a server's data folder."""

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from tinkex.cli.errors import CommandFailed
from tinkex.cli.output import as_json, examples, show_json, show_table
from tinkex.cli.server_options import data_folder_options, load_settings

if TYPE_CHECKING:
    from tinkex.server.maintenance.doctor import Finding

STYLES = {"fine": "green", "note": "yellow", "problem": "bold red"}


@click.command(
    "doctor",
    epilog=examples(
        "tinkex doctor",
        "tinkex doctor --data /srv/tinkex -f json",
        "tinkex doctor --repair           # stop the server first",
    ),
)
@data_folder_options
@click.option("--repair", is_flag=True, help="Make the repairs that cannot lose data.")
def command(data: str | None, db: str | None, storage: str | None, repair: bool) -> None:
    """Check every row and every file of a server's data folder, and list the findings.

    Without --repair, nothing is changed, and the server may be running.

    With --repair, the server must be stopped. The command deletes files that no row refers to,
    rebuilds damaged indexes, upgrades an old database, and makes secrets readable only by their
    owner. It moves a damaged snapshot to the folder set-aside if its model can be rebuilt without
    it.

    The exit status is 0 if there is no problem or all problems were repaired, and 1 otherwise.
    """
    settings = load_settings("doctor", data=data, db=db, storage=storage)
    from tinkex.server.maintenance import doctor
    from tinkex.server.settings import SettingsError
    from tinkex.server.store import DatabaseRefused

    done: list[str] = []
    if repair:
        try:
            done = doctor.repair(settings)
        except SettingsError as error:
            raise CommandFailed(f"nothing was repaired: {error}", hint=error.hint) from error
        except DatabaseRefused as error:
            raise CommandFailed(f"nothing was repaired: {error}") from error
    findings = doctor.examine(settings)
    problems = [finding for finding in findings if finding.level is doctor.Level.PROBLEM]
    if as_json():
        show_json(
            {
                "folder": str(settings.folder),
                "sound": not problems,
                "repaired": done,
                "findings": [_plain(finding) for finding in findings],
            }
        )
    else:
        for line in done:
            click.echo(f"repaired: {line}", err=True)
        rows = [(finding.level.value, finding.about, _sentence(finding)) for finding in findings]
        show_table(("State", "About", "Finding"), rows, styles=STYLES)
    sys.exit(1 if problems else 0)


def _sentence(finding: "Finding") -> str:
    return f"{finding.text}. {finding.advice}" if finding.advice else f"{finding.text}."


def _plain(finding: "Finding") -> dict[str, object]:
    repairable = finding.repair is not None
    return {**asdict(finding), "level": finding.level.value, "repair": repairable}
