"""The table of subcommands, each in a module of its own, and the options that all of them share."""

import importlib
from dataclasses import dataclass
from typing import Any

import click

from tinkex.cli.errors import CommandFailed, as_command_failure


@dataclass(frozen=True, kw_only=True)
class Subcommand:
    """Where a subcommand is, and what `--help` says about it without looking there."""

    module: str
    help: str
    #: The name of the click command in that module.
    name: str = "command"


SUBCOMMANDS = {
    "auth": Subcommand(module="tinkex.cli.auth", help="Store a key; see who you are."),
    "backup": Subcommand(
        module="tinkex.cli.backup", help="Copy what a server keeps, also while it runs."
    ),
    "billing": Subcommand(module="tinkex.cli.billing", help="What was used, and what it costs."),
    "checkpoint": Subcommand(
        module="tinkex.cli.checkpoint", help="List, download, publish and delete saved weights."
    ),
    "conformance": Subcommand(
        module="tinkex.cli.conformance", help="Check that a Tinker server does what it should."
    ),
    "demo": Subcommand(
        module="tinkex.cli.demo", help="Fine-tune a small model here and now, and see it change."
    ),
    "doctor": Subcommand(
        module="tinkex.cli.doctor", help="Look at a server's data folder, and repair it."
    ),
    "key": Subcommand(
        module="tinkex.cli.key", help="Make, list and revoke the API keys of a server."
    ),
    "merge": Subcommand(
        module="tinkex.cli.merge", help="Add an adapter into its base model: a full model folder."
    ),
    "model": Subcommand(module="tinkex.cli.model", help="Which base models a service offers."),
    "restore": Subcommand(
        module="tinkex.cli.backup",
        name="restore_command",
        help="Make a data folder from a back-up.",
    ),
    "run": Subcommand(module="tinkex.cli.run", help="List training runs and look at one."),
    "sample": Subcommand(module="tinkex.cli.sample", help="Ask a model something, from the shell."),
    "serve": Subcommand(
        module="tinkex.cli.serve", help="Serve models to every Tinker client on this machine."
    ),
    "session": Subcommand(module="tinkex.cli.session", help="Export what a session did."),
    "tiny-model": Subcommand(
        module="tinkex.cli.tiny_model", help="Write a small random model, for tests and trials."
    ),
    "version": Subcommand(module="tinkex.cli.version", help="Which tinkex this is."),
}


class LazyGroup(click.Group):
    """A group that imports a subcommand only to run it, and puts errors into words."""

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
            said = as_command_failure(error)
            if said is None:
                raise
            raise said from error


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tinkex", prog_name="tinkex")
@click.option(
    "--format",
    "-f",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="For people, or for programs.",
)
def command(format: str) -> None:
    """The Tinker training API, as software you own."""


__all__ = ["SUBCOMMANDS", "CommandFailed", "LazyGroup", "command"]
