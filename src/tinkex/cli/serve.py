"""`tinkex serve`: the server, in the foreground, until it is told to stop."""

import importlib.util
import sys
from typing import Any

import click

from tinkex.cli.errors import CommandFailed, missing_package

REQUIRED_PACKAGES = (
    "alembic",
    "fastapi",
    "fsspec",
    "sqlalchemy",
    "uvicorn",
    "torch",
    "transformers",
)


@click.command("serve")
@click.argument("models", nargs=-1, metavar="[NAME|FOLDER|NAME=FOLDER]...")
@click.option("--host", help="Address to listen on.  [default: 127.0.0.1]")
@click.option("--port", type=int, help="Port to listen on; 0 picks a free one.  [default: 8000]")
@click.option(
    "--data",
    metavar="DIR",
    help="Folder of everything the server keeps.  [default: ~/.local/share/tinkex]",
)
@click.option("--db", metavar="URL", help="Database.  [default: SQLite in the data folder]")
@click.option(
    "--storage", metavar="URL", help="Payloads, results, checkpoints.  [default: the data folder]"
)
@click.option("--device", help="cpu, cuda, cuda:1, …  [default: auto]")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16"]),
    help="Numbers of the base model.  [default: auto]",
)
@click.option(
    "--executor", type=click.Choice(["local"]), help="Where engines run.  [default: local]"
)
@click.option("--threads", type=int, help="Threads an engine computes with.  [default: its choice]")
@click.option(
    "--memory-gb",
    type=float,
    help="Memory an engine may take.  [default: what is free of a GPU, half of that on a CPU]",
)
@click.option("--adapter-gb", type=float, help="Of that, for adapters.  [default: the rest]")
@click.option("--kv-tokens", type=int, help="Tokens kept for sampling.  [default: what fits]")
@click.option(
    "--batch-tokens",
    type=int,
    help="Most tokens in a pass.  [default: 1,024 on a CPU, 8,192 on a GPU]",
)
@click.option("--max-sequences", type=int, help="Sequences sampled together.  [default: 256]")
@click.option("--jwt", is_flag=True, default=None, help="Clients exchange keys for tokens.")
@click.option("--session-grace-s", type=float, help="Silence that frees memory.  [default: 1800]")
@click.option("--max-requests", type=int, help="Unfinished requests per owner.  [default: any]")
@click.option("--max-queued-tokens", type=int, help="Tokens in those requests.  [default: any]")
@click.option("--max-samples", type=int, help="Sequences sampled per owner.  [default: any]")
@click.option("--max-training", type=int, help="Models training per owner.  [default: any]")
@click.option("--max-checkpoint-bytes", type=int, help="Bytes kept per owner.  [default: any]")
@click.option("--max-checkpoints", type=int, help="Checkpoints kept per owner.  [default: any]")
@click.option("--max-runs", type=int, help="Training runs kept per owner.  [default: any]")
@click.option("--keep-last", type=int, help="Checkpoints a run keeps.  [default: all]")
@click.option("--public-url", metavar="URL", help="Address for links.  [default: as asked]")
@click.option(
    "--config", metavar="FILE", help="TOML file of settings.  [default: DATA/tinkex.toml]"
)
@click.option("--deterministic", is_flag=True, default=None, help="Same requests, same bits.")
@click.option(
    "--accept-changed-base",
    is_flag=True,
    default=None,
    help="Runs go on although the files of their base model changed.",
)
def command(models: tuple[str, ...], **flags: Any) -> None:
    """Serve models to every Tinker client on this machine.

    Without a name, a small chat model is served. Prints one line when it can take work:

        tinkex ready at http://HOST:PORT

    Every option can also be set as TINKEX_<OPTION> in the environment, or in a TOML file; an option
    wins over the environment, and that over the file. There are more settings than options:
    docs/reference/settings.md lists all.
    """
    try:
        from tinkex.models.resolve import ModelNotFound
        from tinkex.server.settings import Settings, SettingsError
        from tinkex.server.supervisor import StartFailed, run
    except ModuleNotFoundError as error:
        raise missing_package(error, "`tinkex serve`", "all") from error
    _check_packages()
    try:
        settings = Settings.from_sources({"models": models or None, **flags})
        status = run(settings, announce=lambda line: print(line, flush=True))
    except SettingsError as error:
        raise CommandFailed(str(error), hint=error.hint) from error
    except (ModelNotFound, StartFailed) as error:
        raise CommandFailed(str(error)) from error
    sys.exit(status)


def _check_packages() -> None:
    """The server's and the engine's packages are used by other processes: look before starting."""
    for package in REQUIRED_PACKAGES:
        try:
            found = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise missing_package(ModuleNotFoundError(name=package), "`tinkex serve`", "all")
