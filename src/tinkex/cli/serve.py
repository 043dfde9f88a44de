"""`tinkex serve`: run the server in the foreground."""

import importlib.util
import json
import sys
from typing import Any

import click

from tinkex.cli.download_progress import fetch_progress
from tinkex.cli.errors import CommandFailed, missing_package
from tinkex.cli.output import as_json, examples

REQUIRED_PACKAGES = [
    "alembic",
    "fastapi",
    "fsspec",
    "sqlalchemy",
    "uvicorn",
    "torch",
    "transformers",
]


@click.command(
    "serve",
    epilog=examples(
        "tinkex serve                                 # a small chat model",
        "tinkex serve ~/models/Qwen3-0.6B --port 8001",
        "tinkex serve Qwen/Qwen3-8B=~/models/small --device cuda --data /srv/tinkex",
        "tinkex serve Qwen/Qwen3-8B --device cuda:0,cuda:1     # two replicas",
        "tinkex serve Qwen/Qwen3-32B --gpus-per-replica 2    # over two GPUs",
    ),
)
@click.argument("models", nargs=-1, metavar="[NAME|FOLDER|NAME=FOLDER]...")
@click.option("--host", help="Address to listen on.  [default: 127.0.0.1]")
@click.option("--port", type=int, help="Port to listen on; 0: any free port.  [default: 8000]")
@click.option(
    "--data",
    metavar="DIR",
    help="Data folder of the server.  [default: ~/.local/share/tinkex]",
)
@click.option("--db", metavar="URL", help="Database URL.  [default: SQLite in the data folder]")
@click.option(
    "--storage",
    metavar="URL",
    help="Storage of payloads, results, checkpoints.  [default: the data folder]",
)
@click.option("--device", help="cpu, cuda, cuda:1, … or a list: cuda:0,cuda:1  [default: auto]")
@click.option(
    "--replicas",
    type=int,
    help="Engines of each model.  [default: 1, or one for each device of a list]",
)
@click.option(
    "--gpus-per-replica",
    type=int,
    metavar="K",
    help="Divide each model over K GPUs.  [default: 1]",
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16"]),
    help="Data type of the base model.  [default: auto]",
)
@click.option("--threads", type=int, help="Compute threads of an engine.  [default: automatic]")
@click.option(
    "--memory-gb",
    type=float,
    help="Memory limit of an engine.  [default: free GPU memory, or half of free CPU memory]",
)
@click.option(
    "--adapter-gb", type=float, help="Part of the memory for adapters.  [default: the rest]"
)
@click.option("--kv-tokens", type=int, help="KV cache size in tokens.  [default: what fits]")
@click.option(
    "--batch-tokens",
    type=int,
    help="Maximum tokens in a forward or backward pass.  [default: 1,024 on a CPU, 8,192 on a GPU]",
)
@click.option(
    "--max-sequences", type=int, help="Maximum sequences sampled together.  [default: 256]"
)
@click.option(
    "--jwt", is_flag=True, default=None, help="Make clients exchange keys for short-lived tokens."
)
@click.option(
    "--session-grace-s",
    type=float,
    help="Idle time before a session's memory is freed.  [default: 1800]",
)
@click.option(
    "--max-requests", type=int, help="Unfinished requests per owner.  [default: no limit]"
)
@click.option(
    "--max-queued-tokens", type=int, help="Tokens in unfinished requests.  [default: no limit]"
)
@click.option("--max-samples", type=int, help="Sequences sampled per owner.  [default: no limit]")
@click.option("--max-training", type=int, help="Models trained per owner.  [default: no limit]")
@click.option(
    "--max-checkpoint-bytes", type=int, help="Checkpoint bytes per owner.  [default: no limit]"
)
@click.option("--max-checkpoints", type=int, help="Checkpoints per owner.  [default: no limit]")
@click.option("--max-runs", type=int, help="Training runs per owner.  [default: no limit]")
@click.option("--keep-last", type=int, help="Checkpoints to keep per run.  [default: all]")
@click.option("--public-url", metavar="URL", help="Base URL of links.  [default: from the request]")
@click.option(
    "--config", metavar="FILE", help="TOML file with settings.  [default: DATA/tinkex.toml]"
)
@click.option(
    "--deterministic", is_flag=True, default=None, help="Make results bitwise reproducible."
)
@click.option(
    "--accept-changed-numerics",
    is_flag=True,
    default=None,
    help="Continue deterministic runs although device or versions changed.",
)
@click.option(
    "--no-compile",
    is_flag=True,
    default=None,
    help="On a GPU, compile no kernels: starts at once and is slower.",
)
@click.option(
    "--accept-changed-base",
    is_flag=True,
    default=None,
    help="Continue runs even if the files of their base model changed.",
)
@click.option(
    "--local", is_flag=True, hidden=True, help='Started by base_url="local": stops when unused.'
)
def command(models: tuple[str, ...], local: bool, **flags: Any) -> None:
    """Serve models to every Tinker client on this machine.

    Without a name, a small chat model is served. Prints one line when the server is ready, and on a
    terminal what it serves and how to connect:

        tinkex ready at http://HOST:PORT

    Every option can also be set as TINKEX_<OPTION> in the environment or in a TOML file. Options
    take precedence over the environment, and that over the file. docs/reference/settings.md lists
    all settings, including those without an option.
    """
    try:
        from tinkex.models.resolve import ModelNotFound
        from tinkex.server.announcement import Facts, banner, ready_line
        from tinkex.server.settings import Settings, SettingsError
        from tinkex.server.supervisor import StartFailed, run
    except ModuleNotFoundError as error:
        raise missing_package(error, "`tinkex serve`", "all") from error
    check_packages()
    try:
        settings = Settings.from_sources({"models": models or None, **flags})

        def announce(url: str, facts: Facts) -> None:
            if as_json():
                known = {"url": url, "data": str(settings.folder), **json.loads(facts.to_json())}
                print(json.dumps(known), flush=True)
                return
            # Programs read the line; a terminal shows more to the person at it.
            tty = sys.stdout.isatty()
            print(banner(url, settings.folder, facts) if tty else ready_line(url), flush=True)

        status = run(settings, announce=announce, show_fetching=fetch_progress, local=local)
    except (SettingsError, StartFailed) as error:
        raise CommandFailed(str(error), hint=error.hint) from error
    except ModelNotFound as error:
        raise CommandFailed(str(error)) from error
    sys.exit(status)


def check_packages() -> None:
    """Other processes import these packages: check for them before starting any."""
    for package in REQUIRED_PACKAGES:
        try:
            found = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise missing_package(ModuleNotFoundError(name=package), "`tinkex serve`", "all")
