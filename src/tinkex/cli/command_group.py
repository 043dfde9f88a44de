"""The `tinkex` command group: a table of subcommands that are imported only when they run."""

import importlib
from dataclasses import dataclass
from typing import Any

import click

from tinkex.cli.errors import CommandFailed, as_command_failure


@dataclass(frozen=True, kw_only=True)
class Subcommand:
    """The module of a subcommand, and its line in `tinkex --help`, which does not import it."""

    module: str
    help: str
    #: Name of the click command in that module.
    name: str = "command"


SUBCOMMANDS = {
    "auth": Subcommand(module="tinkex.cli.auth", help="Store an API key, and show its owner."),
    "backup": Subcommand(
        module="tinkex.cli.backup", help="Copy the data of a server, even while it runs."
    ),
    "billing": Subcommand(module="tinkex.cli.billing", help="Show usage and costs."),
    "checkpoint": Subcommand(
        module="tinkex.cli.checkpoint", help="List, download, publish and delete saved weights."
    ),
    "conformance": Subcommand(
        module="tinkex.cli.conformance", help="Check that a server implements the Tinker protocol."
    ),
    "demo": Subcommand(
        module="tinkex.cli.demo", help="Fine-tune a small model on this machine, as a demo."
    ),
    "doctor": Subcommand(
        module="tinkex.cli.doctor", help="Find and repair problems in a server's data folder."
    ),
    "key": Subcommand(
        module="tinkex.cli.key", help="Create, list and revoke the API keys of a server."
    ),
    "merge": Subcommand(module="tinkex.cli.merge", help="Merge an adapter into its base model."),
    "model": Subcommand(module="tinkex.cli.model", help="List the base models of a service."),
    "restore": Subcommand(
        module="tinkex.cli.backup",
        name="restore_command",
        help="Create a data folder from a backup.",
    ),
    "run": Subcommand(module="tinkex.cli.run", help="List and show training runs."),
    "sample": Subcommand(module="tinkex.cli.sample", help="Sample from a model."),
    "serve": Subcommand(
        module="tinkex.cli.serve", help="Serve models to every Tinker client on this machine."
    ),
    "session": Subcommand(module="tinkex.cli.session", help="Export the trace of a session."),
    "tiny-model": Subcommand(
        module="tinkex.cli.tiny_model", help="Write a small random model for tests."
    ),
    "version": Subcommand(module="tinkex.cli.version", help="Show the version of tinkex."),
}


class LazyGroup(click.Group):
    """A group that imports a subcommand when it runs, and shows errors without tracebacks."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        subcommand = SUBCOMMANDS.get(cmd_name)
        if subcommand is None:
            return None
        module = importlib.import_module(subcommand.module)
        command: click.Command = getattr(module, subcommand.name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, SUBCOMMANDS[name].help) for name in sorted(SUBCOMMANDS)])

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
