"""`tinkex ps`, `status`, `stop` and `logs`: the servers of this user on this machine."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from tinkex.cli.errors import CommandFailed
from tinkex.cli.output import (
    NONE,
    ago,
    as_json,
    counted,
    examples,
    report,
    show_json,
    show_properties,
    show_table,
    size,
    yes_no,
)
from tinkex.local import control, registry
from tinkex.local.registry import RunningServer

NO_SERVER = "no tinkex server of this user runs on this machine."
START_ONE = '`tinkex serve` starts one; so does a program with base_url="local".'
FOLLOW_S = 0.2
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096

server_argument = click.argument("server", required=False, metavar="[PID|URL]")


@click.command("ps", epilog=examples("tinkex ps", "tinkex ps -f json"))
def ps() -> None:
    """List the servers of this user on this machine.

    Local servers were started by a program with base_url="local", and stop by themselves some
    minutes after the last one.
    """
    servers = registry.running()
    told = [control.status(server) for server in servers]
    if as_json():
        found = zip(servers, told, strict=True)
        show_json({"servers": [_as_fields(server, about) for server, about in found]})
        return
    rows = [_row(server, about) for server, about in zip(servers, told, strict=True)]
    columns = ("URL", "Process", "Kind", "Data folder", "Models", "Clients", "Started", "Memory")
    show_table(columns, rows, title=counted(len(rows), "server"))


@click.command(
    "status",
    epilog=examples(
        "tinkex status",
        "tinkex status http://127.0.0.1:8000",
    ),
)
@server_argument
def status(server: str | None) -> None:
    """Show one server: whether it is ready, what it serves, and who uses it.

    Without an argument, the server that other commands use: that of TINKER_BASE_URL or `tinkex
    use`, else the running one. Exits with 1 if the server is not ready.
    """
    from tinkex.client.settings import LOCAL, named_url

    named = named_url(server)
    server = None if named == LOCAL else named
    found = _find(registry.running(), server)
    if found is None:
        _remote_status(str(server))
        return
    about = control.status(found)
    if as_json():
        show_json(_as_fields(found, about))
    else:
        show_properties(_properties(found, about))
    if _problem(found, about) is not None:
        raise click.exceptions.Exit(1)


@click.command(
    "stop",
    epilog=examples(
        "tinkex stop                      # the server that commands use",
        "tinkex stop 4711",
        "tinkex stop --all --force",
    ),
)
@server_argument
@click.option("--all", "all_servers", is_flag=True, help="Stop all servers of this user.")
@click.option("--force", is_flag=True, help="Stop it even if programs use it.")
def stop(server: str | None, all_servers: bool, force: bool) -> None:
    """Stop a server of this user, and wait for its end.

    Running requests get a few seconds to finish. Nothing is lost: requests that are not finished run
    after the next start.
    """
    if server is not None and all_servers:
        raise click.UsageError("Give either a server or --all.")
    servers = registry.running()
    if all_servers:
        chosen: Sequence[RunningServer] = servers
    else:
        one = _find(servers, server)
        if one is None:
            raise CommandFailed(
                f"{server} is not a server of this user on this machine.",
                hint="`tinkex ps` lists them.",
            )
        chosen = [one]
    for one in chosen:
        try:
            control.stop(one, force=force)
        except control.HasClients as error:
            raise CommandFailed(
                f"{error}.", hint="Wait until they have ended, or use --force."
            ) from error
        except control.NotResponding as error:
            raise CommandFailed(f"{error}.", hint="Try again, or use --force.") from error
        except control.StillRunning as error:
            raise CommandFailed(f"{error}.", hint="`tinkex logs` may show why.") from error
        report(
            f"Stopped the server at {one.url} (process {one.pid}).",
            {"url": one.url, "pid": one.pid, "stopped": True},
            err=False,
        )
    if not chosen:
        click.echo("No server runs.", err=True)


@click.command("logs", epilog=examples("tinkex logs", "tinkex logs -f", "tinkex logs -n 0 4711"))
@server_argument
@click.option("--follow", "-f", is_flag=True, help="Keep printing new lines until it stops.")
@click.option("--lines", "-n", type=int, default=50, show_default=True, help="Lines; 0: all.")
def logs(server: str | None, follow: bool, lines: int) -> None:
    """Print the log of a server of this user.

    Local servers log to local.log in their data folder. `tinkex serve` logs to standard error; this
    command finds it if that is a file (`tinkex serve 2> server.log`).
    """
    servers = registry.running()
    last = registry.data_folder() / "local.log"
    if not servers and server is None and last.exists():
        found, file = None, last
        click.echo(f"No server runs. The log of the last local server ({last}):", err=True)
    else:
        found = _find(servers, server)
        if found is None:
            raise CommandFailed(
                f"{server} is not a server of this user on this machine.",
                hint="`tinkex ps` lists them. Other machines have their own logs.",
            )
        if found.log is None:
            raise CommandFailed(
                f"the server at {found.url} (process {found.pid}) logs to a terminal or a pipe.",
                hint="Start it with `tinkex serve 2> FILE` to have the log in a file.",
            )
        file = Path(found.log)
    with file.open(encoding="utf-8", errors="replace") as opened:
        for line in opened.readlines()[-lines:]:
            click.echo(line, nl=False)
        while follow and found is not None:
            running = registry.is_running(found)
            for line in opened:
                click.echo(line, nl=False)
            if not running:
                return
            time.sleep(FOLLOW_S)


# -- which server, and what is shown ---------------------------------------------------------------


def _find(servers: Sequence[RunningServer], named: str | None) -> RunningServer | None:
    """The named server, else the obvious one; None if the name is that of no running server."""
    if named is not None:
        return next(
            (one for one in servers if named.rstrip("/") in (one.url, str(one.pid))),
            None,
        )
    try:
        found = registry.choose(servers, registry.data_folder())
    except registry.SeveralServers as several:
        names = ", ".join(f"{one.pid} ({one.url})" for one in several.servers)
        raise CommandFailed(
            f"several servers of this user run: {names}.", hint="Name one by its process or URL."
        ) from several
    if found is None:
        raise CommandFailed(NO_SERVER, hint=START_ONE)
    return found


def _remote_status(named: str) -> None:
    """The status of a server that is not one of this user on this machine."""
    if not named.startswith(("http://", "https://")):
        raise CommandFailed(
            f"{named} is not a server of this user on this machine.",
            hint="`tinkex ps` lists them; a server elsewhere is named by its URL.",
        )
    from tinkex.client.auth import sessionless_requests
    from tinkex.client.settings import Settings

    settings = Settings.resolve(base_url=named)
    answer = sessionless_requests.ask(settings, sessionless_requests.capabilities)
    models = [model.model_name for model in answer.supported_models]
    if as_json():
        show_json({"ready": True, "problem": None, "url": settings.base_url, "models": models})
    else:
        names = ", ".join(name or NONE for name in models)
        show_properties({"URL": settings.base_url, "Ready": "yes", "Models": names})


def _problem(server: RunningServer, about: dict[str, Any] | None) -> str | None:
    """Why a server is not ready; `about` is its status."""
    if about is None:
        return "it does not respond" if server.ready else "it is starting"
    problem: str | None = about["problem"]
    return problem


def _as_fields(server: RunningServer, about: dict[str, Any] | None) -> dict[str, Any]:
    clients = control.clients_of(server, about)
    problem = _problem(server, about)
    return {
        "ready": problem is None,
        "problem": problem,
        "pid": server.pid,
        "url": server.url,
        "kind": server.how,
        "data": server.data,
        "models": _models(server, about),
        "keys": server.keys if about is None else about["keys"],
        "clients": [
            *({"pid": one.pid, "program": one.program} for one in clients.holders),
            *({"session": one} for one in clients.sessions),
        ],
        "open_requests": None if about is None else about["open_requests"],
        "started": datetime.fromtimestamp(server.started_s, UTC),
        "memory_bytes": memory_bytes(server.pid),
        "log": server.log,
    }


def _row(server: RunningServer, about: dict[str, Any] | None) -> list[str]:
    clients = control.clients_of(server, about)
    return [
        server.url,
        str(server.pid),
        server.how if _problem(server, about) is None else f"{server.how} (not ready)",
        server.data,
        ", ".join(_models(server, about)),
        str(len(clients.holders) + len(clients.sessions)),
        ago(datetime.fromtimestamp(server.started_s, UTC)),
        size(memory_bytes(server.pid)),
    ]


def _properties(server: RunningServer, about: dict[str, Any] | None) -> dict[str, str]:
    problem = _problem(server, about)
    return {
        "URL": server.url,
        "Ready": "yes" if problem is None else f"no: {problem}",
        "Models": ", ".join(_models_with_replicas(server, about)),
        "Clients": str(control.clients_of(server, about)),
        "Keys": yes_no(server.keys if about is None else about["keys"]),
        "Queue": NONE if about is None else f"{about['open_requests']} unfinished requests",
        "Process": f"{server.pid} ({server.how})",
        "Started": ago(datetime.fromtimestamp(server.started_s, UTC)),
        "Memory": size(memory_bytes(server.pid)),
        "Data folder": server.data,
        "Disk": f"{size(shutil.disk_usage(server.data).free)} free",
        "Log": server.log or "a terminal or a pipe",
    }


def _models(server: RunningServer, about: dict[str, Any] | None) -> list[str]:
    if about is None:
        return list(server.models)
    return [model["name"] for model in about["models"]]


def _models_with_replicas(server: RunningServer, about: dict[str, Any] | None) -> list[str]:
    if about is None:
        return list(server.models)
    return [
        model["name"] + (f" ({count} replicas)" if (count := model["replicas"]) > 1 else "")
        for model in about["models"]
    ]


def memory_bytes(pid: int) -> int | None:
    """The resident memory of a process and all its children; None where that is unknown."""
    try:
        total = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
        tasks = Path(f"/proc/{pid}/task").glob("*/children")
        children = [int(child) for task in tasks for child in task.read_text().split()]
    except (OSError, IndexError, ValueError):
        return None
    return total + sum(memory_bytes(child) or 0 for child in children)
