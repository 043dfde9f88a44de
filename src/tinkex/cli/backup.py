"""`tinkex backup`: a copy of a server's data folder as it is at one moment, also while it runs."""

from pathlib import Path

import click

from tinkex.cli.errors import CommandFailed
from tinkex.cli.output import as_json, show_json, size
from tinkex.cli.server_options import of_a_data_folder, settings_of


@click.command("backup")
@click.argument("target", type=click.Path(path_type=Path))
@of_a_data_folder
def command(
    target: Path, data: str | None, db: str | None, storage: str | None, format: str | None
) -> None:
    """Copy everything a server keeps to a new folder TARGET. The server may run meanwhile.

    The copy holds the server's secrets and everybody's work: it is readable by its owner alone.
    `tinkex restore` makes a data folder of it, and `tinkex doctor --data TARGET` looks at it.
    """
    settings = settings_of("backup", data=data, db=db, storage=storage)
    from tinkex.server.maintenance.backup import BackupFailed, create

    try:
        manifest = create(settings, target)
    except BackupFailed as error:
        raise CommandFailed(str(error), hint=error.hint) from error
    if as_json():
        show_json({"folder": str(target), "files": manifest.files, "bytes": manifest.bytes})
    else:
        click.echo(f"{manifest.files} files, {size(manifest.bytes)}, in {target}", err=True)
    if manifest.missing:
        click.echo(
            f"warning: not in the data folder itself, though it should be: {len(manifest.missing)} of "
            "its files. `tinkex doctor` names them.",
            err=True,
        )
