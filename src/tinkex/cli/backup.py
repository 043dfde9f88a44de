"""`tinkex backup` and `tinkex restore`: back up and restore a server's data folder."""

from datetime import UTC, datetime
from pathlib import Path

import click

from tinkex.cli.errors import CommandFailed
from tinkex.cli.output import counted, examples, report, size
from tinkex.cli.server_options import data_folder_options, load_settings
from tinkex.wire.text_format import format_utc


@click.command(
    "backup",
    epilog=examples(
        "tinkex backup /mnt/backups/2027-01-31",
        "tinkex backup --data /srv/tinkex /mnt/backups/2027-01-31",
    ),
)
@click.argument("target", type=click.Path(path_type=Path))
@data_folder_options
def command(target: Path, data: str | None, db: str | None, storage: str | None) -> None:
    """Copy all data of a server to a new folder TARGET. The server may be running.

    The copy contains the server's secrets and the data of all users, so it is readable only by you.
    `tinkex doctor --data TARGET` checks it. `tinkex restore TARGET` creates a data folder from it.
    """
    settings = load_settings("backup", data=data, db=db, storage=storage)
    from tinkex.server.maintenance.backup import BackupFailed, create

    try:
        manifest = create(settings, target)
    except BackupFailed as error:
        raise CommandFailed(str(error), hint=error.hint) from error
    report(
        f"Copied {counted(manifest.files, 'file')} ({size(manifest.bytes)}) to {target}.",
        {
            "folder": str(target),
            "files": manifest.files,
            "bytes": manifest.bytes,
            "missing": len(manifest.missing),
        },
    )
    if manifest.missing:
        click.echo(
            f"warning: the backup is without {counted(len(manifest.missing), 'file')} that the data "
            "folder should have and does not. `tinkex doctor` lists what is missing.",
            err=True,
        )


@click.command(
    "restore",
    epilog=examples("tinkex restore /mnt/backups/2027-01-31 --data /srv/tinkex"),
)
@click.argument("backup", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--data", metavar="DIR", help="Folder to create.  [default: ~/.local/share/tinkex]")
def restore_command(backup: Path, data: str | None) -> None:
    """Create a data folder from BACKUP, a folder written by `tinkex backup`. BACKUP is not changed.

    Models continue from their state at the time of the backup. Requests that were accepted later
    are lost. A client that sent such requests must restart its run, from a checkpoint or from the
    beginning.
    """
    # Only --data applies here: the database and the files are restored into that folder.
    settings = load_settings("restore", data=data)
    from tinkex.server.maintenance.backup import BackupFailed, restore

    try:
        found = restore(backup, settings.folder)
    except BackupFailed as error:
        raise CommandFailed(str(error), hint=error.hint) from error
    taken_at = format_utc(found.taken_s)
    report(
        f"Restored {settings.folder} to its state at {taken_at}.",
        {"folder": str(settings.folder), "taken_at": datetime.fromtimestamp(found.taken_s, UTC)},
    )
