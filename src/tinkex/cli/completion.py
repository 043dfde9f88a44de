"""`tinkex completion SHELL`, and what is completed from a server: runs and checkpoints."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    add_completion_class,
    get_completion_class,
    split_arg_string,
)

from tinkex.cli.main import COMPLETE_VAR
from tinkex.cli.output import as_json, examples, show_json

#: Nobody waits longer for a key press.
LIMIT_S = 1.5
#: As many as a person might read.
MAX_ITEMS = 100

#: Where each shell reads the script at its start.
START_FILES = {
    "bash": 'eval "$(tinkex completion bash)"   # in ~/.bashrc',
    "zsh": 'eval "$(tinkex completion zsh)"   # in ~/.zshrc, after compinit',
    "fish": "tinkex completion fish | source   # in ~/.config/fish/config.fish",
}

#: Click's script for bash loses words with colons, as run ids and paths have: bash splits words at
#: them. This one splits the line at spaces, and removes from each completion what bash keeps.
BASH_SCRIPT = """\
%(complete_func)s() {
    local line="${COMP_LINE:0:$COMP_POINT}" word prefix="" type value
    word="${line##*[[:space:]]}"
    if [[ "$word" == *:* && "$COMP_WORDBREAKS" == *:* ]]; then
        prefix="${word%%"${word##*:}"}"
    fi
    COMPREPLY=()
    while IFS=, read -r type value; do
        if [[ $type == dir ]]; then
            compopt -o dirnames
        elif [[ $type == file ]]; then
            compopt -o default
        elif [[ $type == plain ]]; then
            COMPREPLY+=("${value#"$prefix"}")
        fi
    done < <(env COMP_LINE="$line" %(complete_var)s=bash_complete "$1" 2> /dev/null)
    return 0
}

complete -o nosort -F %(complete_func)s %(prog_name)s
"""


@add_completion_class
class TinkexBash(BashComplete):
    """Completion for bash, of which the script sends the line up to the cursor."""

    source_template = BASH_SCRIPT

    def get_completion_args(self) -> tuple[list[str], str]:
        line = os.environ.get("COMP_LINE")
        if line is None:  # click's own script
            return super().get_completion_args()
        args = split_arg_string(line)[1:]
        incomplete = "" if line[-1:].isspace() or not args else args.pop()
        return args, incomplete

    @staticmethod
    def _check_version() -> None:
        """Not by starting a bash: the script needs 4.4, of 2016."""


@click.command(
    "completion",
    epilog=examples(*START_FILES.values()),
)
@click.argument("shell", type=click.Choice(list(START_FILES)))
def command(shell: str) -> None:
    """Print a script that completes commands, options, run ids and checkpoint paths in SHELL.

    Add the line below for your shell to its start file. Run ids and paths come from the service
    that the other commands use; without one, nothing is completed.
    """
    from tinkex.cli.command_group import command as root

    kind = get_completion_class(shell)
    assert kind is not None, shell
    script = kind(root, {}, "tinkex", COMPLETE_VAR).source()
    if as_json():
        show_json({"shell": shell, "script": script})
    else:
        click.echo(script, nl=False)


def complete_runs(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """The ids of the newest runs."""

    def fetch(client: Any) -> list[CompletionItem]:
        runs = client.list_training_runs(limit=MAX_ITEMS).result(LIMIT_S).training_runs
        return [CompletionItem(run.training_run_id, help=run.base_model) for run in runs]

    return _matching(fetch, ctx, incomplete)


def complete_checkpoints(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """The paths of the newest checkpoints."""

    def fetch(client: Any) -> list[CompletionItem]:
        found = client.list_user_checkpoints(limit=MAX_ITEMS).result(LIMIT_S).checkpoints
        return [CompletionItem(one.tinker_path, help=one.checkpoint_type) for one in found]

    return _matching(fetch, ctx, incomplete)


def complete_adapters(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """The path of a checkpoint, or a folder."""
    if incomplete.startswith("tinker:"):
        return complete_checkpoints(ctx, param, incomplete)
    return [CompletionItem(incomplete, type="dir")]


def _matching(
    fetch: Callable[[Any], list[CompletionItem]], ctx: click.Context, incomplete: str
) -> list[CompletionItem]:
    """What the service of the command has, within `LIMIT_S`. Any failure is silent and empty."""
    given: dict[str, Any] = {name: ctx.params.get(name) for name in ("base_url", "api_key")}
    found: list[CompletionItem] = []

    def ask() -> None:
        try:
            import tinkex
            from tinkex.client.settings import LOCAL, Settings
            from tinkex.local import registry

            if Settings.resolve(**given).base_url == LOCAL:
                running = registry.of_data(registry.data_folder())
                if running is None:
                    return  # a key press must not start a server
                given["base_url"] = running.url
            found.extend(fetch(tinkex.RestClient(**given)))
        except Exception:  # noqa: BLE001 (an error message would destroy the line that is typed)
            return

    logging.disable()
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    return [item for item in found if item.value.startswith(incomplete)]
