"""Options of commands that work on a server's data folder, and its settings."""

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.errors import CommandFailed, missing_package

if TYPE_CHECKING:
    from tinkex.server.settings import Settings

data_option = click.option(
    "--data",
    metavar="DIR",
    help="Data folder of the server.  [default: ~/.local/share/tinkex]",
)
db_option = click.option("--db", metavar="URL", help="Database URL, if the server uses --db.")
storage_option = click.option(
    "--storage", metavar="URL", help="Storage URL, if the server uses --storage."
)


def data_folder_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: --data, --db and --storage."""
    for option in (storage_option, db_option, data_option):
        command = option(command)
    return command


def load_settings(
    command: str,
    *,
    data: str | None,
    db: str | None = None,
    storage: str | None = None,
    module: str = "tinkex.server.maintenance.doctor",
) -> "Settings":
    """
    Settings as `tinkex serve` reads them: from options, the environment and the TOML file.

    Imports `module` first, so that a missing package is reported before anything else happens. The
    default is the module that needs the most packages.
    """
    try:
        importlib.import_module(module)
        from tinkex.server.settings import Settings, SettingsError
    except ModuleNotFoundError as error:
        raise missing_package(error, f"`tinkex {command}`", "all") from error
    try:
        return Settings.from_sources({"data": data, "db": db, "storage": storage})
    except SettingsError as error:
        raise CommandFailed(str(error), hint=error.hint) from error
