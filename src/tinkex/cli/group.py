"""The table of subcommands, each in a module of its own, and how their errors are shown."""

import importlib
from dataclasses import dataclass
from typing import IO, Any

import click


@dataclass(frozen=True, kw_only=True)
class Subcommand:
    """Where a subcommand is, and what `--help` says about it without looking there."""

    module: str
    help: str


SUBCOMMANDS = {
    "conformance": Subcommand(
        module="tinkex.cli.conformance", help="Check that a Tinker server does what it should."
    ),
    "demo": Subcommand(
        module="tinkex.cli.demo", help="Fine-tune a small model here and now, and see it change."
    ),
    "key": Subcommand(
        module="tinkex.cli.key", help="Make, list and revoke the API keys of a server."
    ),
    "merge": Subcommand(
        module="tinkex.cli.merge", help="Add an adapter into its base model: a full model folder."
    ),
    "serve": Subcommand(
        module="tinkex.cli.serve", help="Serve models to every Tinker client on this machine."
    ),
    "tiny-model": Subcommand(
        module="tinkex.cli.tiny_model", help="Write a small random model, for tests and trials."
    ),
}


class CommandFailed(click.ClickException):
    """What went wrong, and what to do next."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"error: {self.message}", err=True)
        if self.hint:
            click.echo(f"hint: {self.hint}", err=True)


class LazyGroup(click.Group):
    """A group that imports a subcommand only to run it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        subcommand = SUBCOMMANDS.get(cmd_name)
        if subcommand is None:
            return None
        module = importlib.import_module(subcommand.module)
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, SUBCOMMANDS[name].help) for name in sorted(SUBCOMMANDS)])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tinkex", prog_name="tinkex")
def command() -> None:
    """The Tinker training API, as software you own."""


def needs(error: ModuleNotFoundError, what: str, extra: str) -> CommandFailed:
    """A part that is not installed, and how to get it."""
    return CommandFailed(
        f"{what} needs {error.name}, which is not installed.",
        hint=f"pip install 'tinkex[{extra}]'",
    )
