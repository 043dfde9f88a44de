"""The `tinkex` command group: a table of subcommands that are imported only when they run."""

import importlib
from typing import Any

import click

from tinkex.cli.errors import CommandFailed, as_command_failure

#: The line of each subcommand in `tinkex --help`, which does not import it.
SUBCOMMANDS = {
    "auth": "Store an API key, and show its owner.",
    "backup": "Copy the data of a server, even while it runs.",
    "billing": "Show usage and costs.",
    "checkpoint": "List, download, publish and delete saved weights.",
    "conformance": "Check that a server implements the Tinker protocol.",
    "demo": "Fine-tune a small model on this machine, as a demo.",
    "doctor": "Find and repair problems in a server's data folder.",
    "key": "Create, list and revoke the API keys of a server.",
    "merge": "Merge an adapter into its base model.",
    "model": "List the base models of a service.",
    "restore": "Create a data folder from a backup.",
    "run": "List and show training runs.",
    "sample": "Sample from a model.",
    "serve": "Serve models to every Tinker client on this machine.",
    "session": "Export the trace of a session.",
    "tiny-model": "Write a small random model for tests.",
    "version": "Show the version of tinkex.",
}


class LazyGroup(click.Group):
    """A group that imports a subcommand when it runs, and shows errors without tracebacks."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in SUBCOMMANDS:
            return None
        if cmd_name == "restore":
            from tinkex.cli.backup import restore_command

            return restore_command
        module = importlib.import_module(f"tinkex.cli.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(SUBCOMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            failure = as_command_failure(error)
            if failure is None:
                raise
            raise failure from error


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tinkex", prog_name="tinkex")
@click.option(
    "--format",
    "-f",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="Output format.",
)
def command(format: str) -> None:
    """Client and self-hosted server for the Tinker training API."""


__all__ = ["SUBCOMMANDS", "CommandFailed", "LazyGroup", "command"]
