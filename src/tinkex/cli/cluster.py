"""`tinkex web` and `tinkex worker`: the processes of several machines on one PostgreSQL database."""

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli import serve
from tinkex.cli.download_progress import fetch_progress
from tinkex.cli.errors import CommandFailed, missing_package
from tinkex.cli.output import as_json, examples

if TYPE_CHECKING:
    from tinkex.server.settings import Settings

_WEB = (
    *("config", "host", "port", "jwt", "session_grace_s", "public_url"),
    *("max_requests", "max_queued_tokens", "max_samples"),
    *("max_checkpoint_bytes", "max_checkpoints", "max_runs"),
)
_WORKER = (
    *("config", "device", "replicas", "gpus_per_replica", "dtype", "threads"),
    *("memory_gb", "adapter_gb", "kv_tokens"),
    *("batch_tokens", "max_sequences", "max_training", "keep_last", "deterministic"),
    *("accept_changed_numerics", "no_compile", "accept_changed_base"),
)


def _options(names: Iterable[str], *, folder: str) -> list[click.Parameter]:
    """What all processes share, and these options of `tinkex serve`."""
    wanted = set(names)
    return [
        click.Option(["--db"], metavar="URL", help="PostgreSQL database of the cluster."),
        click.Option(["--storage"], metavar="URL", help="Storage that all processes reach."),
        click.Option(
            ["--data"],
            metavar="DIR",
            help=f"Folder for local copies.  [default: ~/.local/share/tinkex/{folder}]",
        ),
        *(one for one in serve.command.params if one.name in wanted),
    ]


@click.command(
    "web",
    params=_options(_WEB, folder="web-PORT"),
    epilog=examples(
        "tinkex web --db postgresql+psycopg://db/tinkex --storage /mnt/tinkex",
        "tinkex web --host 0.0.0.0 --port 8001    # with TINKEX_DB, TINKEX_STORAGE",
    ),
)
@click.argument("models", nargs=-1, metavar="[NAME=FOLDER]...")
def web(models: tuple[str, ...], **flags: Any) -> None:
    """Answer clients; workers on the same database do the work.

    Start as many as you need, behind any load balancer. They share everything by the database and the
    storage, so a client may reach another one with each request.

    A folder is only needed for OpenAI's routes, which need the tokenizer of a model, and only if the
    folder of the workers is not on this machine.
    """
    try:
        from tinkex.server.announcement import Facts, ready_line
        from tinkex.server.supervisor import run
    except ModuleNotFoundError as error:
        raise missing_package(error, "`tinkex web`", "all") from error

    def announce(url: str, facts: Facts) -> None:
        known = json.dumps({"url": url, **json.loads(facts.to_json())})
        print(known if as_json() else ready_line(url), flush=True)

    settings = _settings({"models": models or None, **flags}, "web")
    with _failures():
        status = run(settings, announce=announce, show_fetching=fetch_progress, web=True)
    sys.exit(status)


@click.command(
    "worker",
    params=_options(_WORKER, folder="worker"),
    epilog=examples(
        "tinkex worker Qwen/Qwen3-8B    # with TINKEX_DB and TINKEX_STORAGE",
        "tinkex worker Qwen/Qwen3-8B --device cuda:1 --data /srv/worker-1",
    ),
)
@click.argument("model", metavar="NAME|FOLDER|NAME=FOLDER")
@click.option("--name", help="Name of the worker.  [default: machine and data folder]")
@click.option(
    "--takeover-s",
    type=float,
    help="Silence of another worker after which this one takes its work.  [default: 15]",
)
def worker(model: str, **flags: Any) -> None:
    """Train and sample one base model for the web processes of the same database.

    Prints one line when its engine is ready. SIGTERM or Ctrl-C hands its models to other workers and
    ends it. It is not restarted when it ends by itself: systemd, Kubernetes or another tool does that.
    """
    try:
        from tinkex.server.worker_process import run_worker, set_up_process
    except ModuleNotFoundError as error:
        raise missing_package(error, "`tinkex worker`", "all") from error
    serve.check_packages()

    def announce(name: str) -> None:
        print(json.dumps({"worker": name}) if as_json() else f"tinkex worker {name} ready")
        sys.stdout.flush()

    settings = _settings({"models": (model,), **flags}, "worker")
    set_up_process(settings)
    with _failures():
        status = run_worker(settings, on_ready=announce)
    sys.exit(status)


def _settings(flags: dict[str, Any], command: str) -> "Settings":
    """Settings with a data folder of its own: it has local copies only."""
    from dataclasses import replace

    from tinkex.local.registry import default_data_folder
    from tinkex.server.settings import Settings

    with _failures():
        settings = Settings.from_sources(flags)
        settings.check_shared(f"tinkex {command}")
    default = default_data_folder()
    if settings.folder == default:
        folder = f"web-{settings.port}" if command == "web" else "worker"
        settings = replace(settings, data=str(default / folder))
    return settings


@contextmanager
def _failures() -> Iterator[None]:
    """Shows expected errors as a sentence and a hint."""
    from tinkex.models.resolve import ModelNotFound
    from tinkex.server.settings import SettingsError
    from tinkex.server.supervisor import StartFailed

    try:
        yield
    except (SettingsError, StartFailed) as error:
        raise CommandFailed(str(error), hint=error.hint) from error
    except ModelNotFound as error:
        raise CommandFailed(str(error)) from error
