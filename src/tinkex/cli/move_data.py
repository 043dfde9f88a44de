"""`tinkex move-data`: move the data of a server to another database and storage."""

from dataclasses import replace

import click

from tinkex.cli.errors import CommandFailed
from tinkex.cli.output import counted, examples, report
from tinkex.cli.server_options import data_option, load_settings


@click.command(
    "move-data",
    epilog=examples(
        "tinkex move-data --db postgresql+psycopg://HOST/NAME --storage s3://BUCKET",
        "tinkex move-data --from-db postgresql+psycopg://HOST/NAME   # to SQLite",
    ),
)
@data_option
@click.option("--db", metavar="URL", help="Database to move to.  [default: SQLite]")
@click.option("--storage", metavar="URL", help="Storage to move to.  [default: the data folder]")
@click.option("--from-db", metavar="URL", help="Database to move from.  [default: SQLite]")
@click.option(
    "--from-storage", metavar="URL", help="Storage to move from.  [default: the data folder]"
)
def command(
    data: str | None,
    db: str | None,
    storage: str | None,
    from_db: str | None,
    from_storage: str | None,
) -> None:
    """Move the data of a server to another database, another storage, or both.

    Copies all files and rows, and compares them. The source is not changed. Stop the server first.
    A move that was interrupted goes on when the command is repeated. Afterwards start the server
    with the new --db and --storage.
    """
    settings = load_settings("move-data", data=data)
    from tinkex.server.maintenance.backup import BackupFailed
    from tinkex.server.maintenance.move_data import move_data
    from tinkex.server.settings import SettingsError
    from tinkex.server.store import DatabaseRefused

    source = replace(settings, db=from_db or "", storage=from_storage or "")
    target = replace(settings, db=db or "", storage=storage or "")
    try:
        moved = move_data(source, target)
    except (BackupFailed, SettingsError) as error:
        raise CommandFailed(str(error), hint=error.hint) from error
    except (DatabaseRefused, OSError) as error:
        raise CommandFailed(str(error)) from error
    present = f" ({moved.present} were there already)" if moved.present else ""
    report(
        f"Copied {counted(moved.rows, 'row')} and {counted(moved.files, 'file')}{present}.",
        {
            "rows": moved.rows,
            "files": moved.files,
            "present": moved.present,
            "missing": list(moved.missing),
        },
    )
    if moved.missing:
        click.echo(
            f"warning: {counted(len(moved.missing), 'file')} could not be copied, because the "
            f"source does not have them. The first: {moved.missing[0]}. `tinkex doctor` lists all.",
            err=True,
        )
