"""`tinkex backup` and `tinkex restore`: a copy of a server's data folder, and a data folder from it."""

from datetime import UTC, datetime
from pathlib import Path

import click

from tinkex.cli.errors import CommandFailed
from tinkex.cli.output import as_json, show_json, size
from tinkex.cli.server_options import data_folder_options, load_settings


@click.command("backup")
@click.argument("target", type=click.Path(path_type=Path))
@data_folder_options
def command(
    target: Path, data: str | None, db: str | None, storage: str | None, format: str | None
) -> None:
    """Copy everything a server keeps to a new folder TARGET. The server may run meanwhile.

    The copy holds the server's secrets and everybody's work: it is readable by its owner alone.
    `tinkex restore` makes a data folder of it, and `tinkex doctor --data TARGET` looks at it.
    """
    settings = load_settings("backup", data=data, db=db, storage=storage)
    from tinkex.server.maintenance.backup import BackupFailed, take

    try:
        taken = take(settings, target)
    except BackupFailed as error:
        raise CommandFailed(str(error), hint=error.hint) from error
    if as_json():
        show_json({"folder": str(target), "files": taken.files, "bytes": taken.bytes})
    else:
        click.echo(f"{taken.files} files, {size(taken.bytes)}, in {target}", err=True)
    if taken.missing:
        click.echo(
            f"warning: not in the data folder itself, though it should be: {len(taken.missing)} of "
            "its files. `tinkex doctor` names them.",
            err=True,
        )


@click.command("restore")
@click.argument("backup", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--data", metavar="DIR", help="The folder to make.  [default: ~/.local/share/tinkex]")
def restore_command(backup: Path, data: str | None) -> None:
    """Make a data folder of what `tinkex backup` has written to BACKUP, which stays as it is.

    Models go on from the moment of the back-up. What was accepted later is not in it: clients of
    that time start their runs again from a checkpoint, or from the beginning.
    """
    # The back-up brings its own settings; none of those here apply to it.
    settings = load_settings("restore", data=data)
    from tinkex.server.maintenance.backup import BackupFailed, restore

    try:
        found = restore(backup, settings.folder)
    except BackupFailed as error:
        raise CommandFailed(str(error), hint=error.hint) from error
    when = datetime.fromtimestamp(found.taken_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    click.echo(f"{settings.folder} is as it was at {when}.", err=True)
