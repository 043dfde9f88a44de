"""`tinkex fleet`: workers on the nodes of a Ray cluster."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.errors import CommandFailed, missing_package
from tinkex.cli.output import as_json, counted, examples, report, show_json, show_table

if TYPE_CHECKING:
    from tinkex.server.fleet.plan import Changes
    from tinkex.server.fleet.ray_cluster import RayFleet
    from tinkex.server.fleet.worker_actor import WorkerReport

STYLES = {"ready": "green", "failing": "red", "replaced": "red", "waiting": "yellow"}
#: How often `--watch` compares the fleet with its file.
WATCH_S = 10.0

address_option = click.option(
    "--address", metavar="HOST:PORT", help="Ray cluster.  [default: RAY_ADDRESS, or the local one]"
)
no_wait_option = click.option(
    "--no-wait", is_flag=True, help="Do not wait until new workers are ready."
)


@click.group("fleet")
def command() -> None:
    """Place workers on the nodes of a Ray cluster, restart and drain them.

    Ray chooses nodes and starts lost workers again. Requests do not pass through Ray: web processes
    and workers meet in PostgreSQL.
    """


@command.command(
    "up",
    epilog=examples(
        "tinkex fleet up fleet.toml",
        "tinkex fleet up fleet.toml --watch        # follow the file until stopped",
    ),
)
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--watch", is_flag=True, help="Stay, and follow changes of the file and the cluster.")
@no_wait_option
@address_option
def up(file: Path, watch: bool, no_wait: bool, address: str | None) -> None:
    """Start, replace and drain workers until they are those of FILE. Safe to repeat.

    \b
    [[workers]]
    model = "Qwen/Qwen3-8B"    # NAME, FOLDER or NAME=FOLDER
    replicas = 4
    gpus = 1                   # of each worker; 0 for a CPU
    """
    from tinkex.server.fleet.plan import read_fleet_file

    with _fleet(address, lambda: read_fleet_file(file), wait=watch) as fleet:
        done = fleet.apply(read_fleet_file(file))
        while watch:
            time.sleep(WATCH_S)
            fleet.apply(read_fleet_file(file))
        _wait(fleet, done, no_wait=no_wait)
    _report(done)


@command.command(
    "scale", epilog=examples("tinkex fleet scale Qwen/Qwen3-8B 6", "tinkex fleet scale tiny 0")
)
@click.argument("model")
@click.argument("replicas", type=click.IntRange(0))
@no_wait_option
@address_option
def scale(model: str, replicas: int, no_wait: bool, address: str | None) -> None:
    """Give MODEL this many workers. Those that leave are drained first.

    `tinkex fleet up` sets the number of its file again.
    """
    with _fleet(address) as fleet:
        done = fleet.scale(model, replicas)
        _wait(fleet, done, no_wait=no_wait)
    _report(done)


@command.command("status", epilog=examples("tinkex fleet status", "tinkex fleet status -f json"))
@address_option
def status(address: str | None) -> None:
    """Show the workers, their nodes and what they do."""
    with _fleet(address) as fleet:
        workers = fleet.workers()
    if as_json():
        show_json({"workers": [_fields(name, found) for name, found in workers.items()]})
        return
    if not workers:
        click.echo("No workers. `tinkex fleet up FILE` starts some.", err=True)
        return
    show_table(
        ("Worker", "State", "Node", "Process", "Crashes", "Log"),
        [
            (name, "waiting", "", "", "", "no node has what it needs, or its node is lost")
            if found is None
            else (
                name,
                found.state,
                found.node,
                str(found.pid or ""),
                str(found.crashes),
                found.log.rpartition("\n")[2],
            )
            for name, found in workers.items()
        ],
        styles=STYLES,
    )


@command.command("down", epilog=examples("tinkex fleet down"))
@address_option
def down(address: str | None) -> None:
    """Drain and end all workers. Requests wait in PostgreSQL until there are workers again."""
    with _fleet(address) as fleet:
        names = list(fleet.workers())
        fleet.stop(names)
    report(f"{counted(len(names), 'worker')} ended.", {"stopped": names})


@contextlib.contextmanager
def _fleet(
    address: str | None, first: Callable[[], object] | None = None, *, wait: bool = False
) -> Iterator[RayFleet]:
    """
    A connected fleet; `first` finds mistakes before. With `wait`, Ray may still be starting.

    Until it is closed, standard output is standard error: Ray prints the loss of a node there.
    """
    try:
        from tinkex.server.fleet.plan import FleetError
        from tinkex.server.fleet.ray_cluster import RayFleet
        from tinkex.server.retry import Backoff, retry_blocking
    except ModuleNotFoundError as error:
        raise missing_package(error, "`tinkex fleet`", "server,ray") from error

    def say(words: str) -> None:
        click.echo(words, err=True)

    with contextlib.redirect_stdout(sys.stderr):
        try:
            if first is not None:
                first()
            fleet = retry_blocking(
                lambda: RayFleet(address, say),
                Backoff(first_s=2.0, max_s=10.0, retries=None if wait else 0),
                should_retry=lambda error: isinstance(error, FleetError),
                on_retry=lambda error, wait_s: say(f"{error} Trying again in {wait_s:.0f} s."),
            )
        except ModuleNotFoundError as error:
            raise missing_package(error, "`tinkex fleet`", "server,ray") from error
        except FleetError as error:
            raise CommandFailed(str(error), hint=error.hint) from error
        try:
            yield fleet
        except FleetError as error:
            raise CommandFailed(str(error), hint=error.hint) from error
        finally:
            fleet.close()


def _wait(fleet: RayFleet, done: Changes, *, no_wait: bool) -> None:
    """Wait for the new workers."""
    if not no_wait and not fleet.wait_until_ready(done.start):
        raise CommandFailed(
            "some workers are not ready.",
            hint="They are started as soon as there is a node for them. `tinkex fleet status` "
            "shows each of them; its log is on its node, in Ray's folder.",
        )


def _report(done: Changes) -> None:
    words = [
        f"{counted(len(names), 'worker')} {what}"
        for what, names in (
            ("started", done.start),
            ("replaced", done.replace),
            ("ended", done.stop),
        )
        if names
    ]
    report(
        f"{', '.join(words) or 'Nothing to change'}.",
        {"started": list(done.start), "replaced": list(done.replace), "stopped": done.stop},
    )


def _fields(name: str, found: WorkerReport | None) -> dict[str, Any]:
    """A worker for JSON."""
    if found is None:
        return {"name": name, "state": "waiting"}
    return {**asdict(found), "group": found.group.model_dump()}
