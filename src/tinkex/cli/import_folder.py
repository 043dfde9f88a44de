"""`tinkex import`: add the runs and checkpoints of another data folder to this one."""

from pathlib import Path

import click

from tinkex.cli.errors import CommandFailed
from tinkex.cli.output import counted, examples, report
from tinkex.cli.server_options import data_option, load_settings


@click.command("import", epilog=examples("tinkex import ~/.local/share/tinkex/local/default"))
@click.argument("folder", type=click.Path(path_type=Path))
@data_option
def command(folder: Path, data: str | None) -> None:
    """Add the runs and checkpoints of another data FOLDER to this one.

    Earlier versions had one data folder for each model of base_url="local". All tinker:// paths and
    unfinished runs of FOLDER work here afterwards. FOLDER itself stays as it is, and the command can
    be repeated. No server may be using either folder.
    """
    settings = load_settings("import", data=data)
    from tinkex.server.maintenance.backup import BackupFailed
    from tinkex.server.maintenance.import_folder import import_folder
    from tinkex.server.settings import SettingsError
    from tinkex.server.store import DatabaseRefused

    try:
        found = import_folder(settings, folder)
    except (BackupFailed, SettingsError) as error:
        raise CommandFailed(str(error), hint=error.hint) from error
    except DatabaseRefused as error:
        raise CommandFailed(str(error)) from error
    report(
        f"Imported {counted(found.runs, 'run')} and {counted(found.checkpoints, 'checkpoint')} "
        f"into {settings.folder}.",
        {"runs": found.runs, "checkpoints": found.checkpoints, "missing": list(found.missing)},
        err=False,
    )
    if found.missing:
        click.echo(
            f"warning: {len(found.missing)} files are missing in {folder}. `tinkex doctor` shows "
            "what needs them.",
            err=True,
        )
