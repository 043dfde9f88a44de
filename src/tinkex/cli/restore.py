"""`tinkex restore`: a data folder from a back-up."""

from datetime import UTC, datetime
from pathlib import Path

import click

from tinkex.cli.errors import CommandFailed
from tinkex.cli.server_options import settings_of


@click.command("restore")
@click.argument("backup", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--data", metavar="DIR", help="The folder to make.  [default: ~/.local/share/tinkex]")
def command(backup: Path, data: str | None) -> None:
    """Make a data folder of what `tinkex backup` has written to BACKUP, which stays as it is.

    Models go on from the moment of the back-up. What was accepted later is not in it: clients of
    that time start their runs again from a checkpoint, or from the beginning.
    """
    # The back-up brings its own settings; none of those here apply to it.
    settings = settings_of("restore", data=data)
    from tinkex.server.maintenance.backup import BackupFailed, restore

    try:
        found = restore(backup, settings.folder)
    except BackupFailed as error:
        raise CommandFailed(str(error), hint=error.hint) from error
    when = datetime.fromtimestamp(found.taken_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    click.echo(f"{settings.folder} is as it was at {when}.", err=True)
