"""The `tinkex` command group: a table of subcommands that are imported only when they run."""

import difflib
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from tinkex.cli.errors import CommandFailed, ReaderGone, UsageFailed, as_command_failure
from tinkex.cli.output import common_options, examples, verbose

#: The sections of `tinkex --help`, and the line of each subcommand, which help does not import.
SECTIONS = {
    "Train and sample": {
        "demo": "Fine-tune a small model on this machine, as a demo.",
        "train": "Train an adapter on a file, or with a reward of your own.",
        "sample": "Sample from a model.",
        "chat": "Talk to a model or a checkpoint.",
        "run": "List, show and plot training runs.",
        "checkpoint": "List, download, publish and delete saved weights.",
        "export": "Export saved weights for PEFT, transformers or llama.cpp.",
        "model": "List the base models of a service.",
        "merge": "Merge an adapter into its base model.",
        "session": "Export the trace of a session.",
    },
    "Choose a service": {
        "use": "Use a service by default, by its URL or a name.",
        "auth": "Store an API key, and show its owner.",
        "billing": "Show usage and costs.",
    },
    "Run a server": {
        "serve": "Serve models to every Tinker client on this machine.",
        "models": "Show which models can be served, and whether they fit here.",
        "web": "Answer clients, for workers on the same database.",
        "worker": "Train and sample one model for web processes.",
        "fleet": "Place workers on the nodes of a Ray cluster.",
        "ps": "List the servers of this user on this machine.",
        "status": "Show one server: ready or not, models, queue, clients.",
        "stop": "Stop a server of this user.",
        "logs": "Print the log of a server of this user.",
        "key": "Create, list and revoke the API keys of a server.",
        "doctor": "Find and repair problems in a server's data folder.",
        "backup": "Copy the data of a server, even while it runs.",
        "restore": "Create a data folder from a backup.",
        "import": "Add the runs and checkpoints of another data folder.",
        "move-data": "Move the data of a server to another database or storage.",
        "conformance": "Check that a server implements the Tinker protocol.",
        "tiny-model": "Write a small random model for tests.",
    },
    "This program": {
        "completion": "Print a script that completes commands in your shell.",
        "version": "Show the version of tinkex.",
    },
}
SUBCOMMANDS = {name: line for section in SECTIONS.values() for name, line in section.items()}
#: Modules and names of commands that are not `command` in a module of their own name.
PLACES = {
    "import": ("import_folder", "command"),
    "logs": ("servers", "logs"),
    "move-data": ("move_data", "command"),
    "ps": ("servers", "ps"),
    "restore": ("backup", "restore_command"),
    "status": ("servers", "status"),
    "stop": ("servers", "stop"),
    "web": ("cluster", "web"),
    "worker": ("cluster", "worker"),
}
#: Where to find a command that people look for at the top.
ELSEWHERE = {
    "login": "auth login",
    "logout": "auth logout",
    "whoami": "auth whoami",
    "download": "checkpoint download",
    "usage": "billing usage",
}


class LazyGroup(click.Group):
    """A group that imports a subcommand when it runs, and shows errors without tracebacks."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in SUBCOMMANDS:
            return None
        module_name, name = PLACES.get(cmd_name, (cmd_name.replace("-", "_"), "command"))
        module = importlib.import_module(f"tinkex.cli.{module_name}")
        found: click.Command = getattr(module, name)
        return with_common_options(found)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not (ctx.resilient_parsing or name.startswith("-") or name in SUBCOMMANDS):
            near = difflib.get_close_matches(name, SUBCOMMANDS, n=1)
            known = ELSEWHERE.get(name) or (near[0] if near else None)
            advice = f" Did you mean `tinkex {known}`?" if known else ""
            raise UsageFailed(f"there is no command {name!r}.{advice}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, SUBCOMMANDS))
        for section, commands in SECTIONS.items():
            with formatter.section(section):
                formatter.write_dl([(name.ljust(width), line) for name, line in commands.items()])

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        with expected_errors():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with expected_errors():
            return super().invoke(ctx)


@contextmanager
def expected_errors() -> Iterator[None]:
    """Show errors as a sentence and a hint, whoever raised them."""
    try:
        yield
    except BrokenPipeError as error:
        raise ReaderGone from error
    except click.UsageError as error:
        if isinstance(error, UsageFailed) or type(error).__name__ == "NoArgsIsHelpError":
            raise
        raise UsageFailed(error.format_message(), error.ctx) from error
    except CommandFailed as failure:
        failure.verbose = verbose()
        raise
    except (click.ClickException, click.exceptions.Exit, click.Abort):
        raise
    except Exception as error:
        found = as_command_failure(error)
        if found is None:
            raise
        found.verbose = verbose()
        raise found from error


def with_common_options(command: click.Command) -> click.Command:
    """Add --format and --verbose to a command and its subcommands, unless they are there."""
    is_group = isinstance(command, click.Group)
    taken = {name for param in command.params for name in param.opts}
    command.params += [
        option for option in common_options(hidden=is_group) if taken.isdisjoint(option.opts)
    ]
    if isinstance(command, click.Group):
        for subcommand in command.commands.values():
            with_common_options(subcommand)
    return command


@click.group(
    cls=LazyGroup,
    params=list[click.Parameter](common_options(default="table")),
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples(
        "tinkex demo                      # two minutes on a laptop",
        "tinkex serve                     # your own server; then, in another shell:",
        'tinkex sample "Who are you?"',
        "tinkex run list",
        "tinkex COMMAND --help            # the options of a command, with examples",
    ),
)
@click.version_option(package_name="tinkex", prog_name="tinkex")
def command() -> None:
    """Client and self-hosted server for the Tinker training API."""


__all__ = ["SUBCOMMANDS", "CommandFailed", "LazyGroup", "command"]
