"""Questions to a running server of this user, and its end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from tinkex.local import leases, registry
from tinkex.local.leases import Holder
from tinkex.local.registry import TOKEN_HEADER, RunningServer

#: A session whose client sent something within this time has a running client: three heartbeats.
ALIVE_S = 30.0
#: Requests that nobody asked about for this long do not keep a server. They are stored: the next
#: server runs them.
MAX_WAIT_S = 3600.0
POLL_S = 0.05
#: A server stops within its drain time, which is 10 s by default.
STOP_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Clients:
    """Who uses a server."""

    holders: tuple[Holder, ...]
    #: Sessions of programs without a lease, such as the official SDK: their ids and versions.
    sessions: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.holders or self.sessions)

    def __str__(self) -> str:
        words = [str(one) for one in self.holders]
        words += [f"session {one}" for one in self.sessions]
        return ", ".join(words) or "none"


class ControlFailed(Exception):
    """The server did not do what it was asked; the text says why."""


class HasClients(ControlFailed):
    """The server has clients, so it was not stopped."""

    def __init__(self, server: RunningServer, clients: Clients) -> None:
        super().__init__(f"the server at {server.url} is in use: {clients}")
        self.clients = clients


class NotResponding(ControlFailed):
    """The server does not say whether it has clients, so it was not stopped."""


class StillRunning(ControlFailed):
    """The server did not stop in time."""


def ask(
    server: RunningServer,
    path: str,
    *,
    add: Mapping[str, str] | None = None,
    timeout_s: float = 5.0,
) -> dict[str, Any]:
    """
    Send a request of local administration, without proxies. ControlFailed if it is refused.

    With `add` it is a POST with these parameters.
    """
    import urllib.error  # imported here: they are slow to load
    import urllib.request

    request = urllib.request.Request(
        f"{server.url}/api/v1/local/{path}" + (f"?{urlencode(add)}" if add else ""),
        data=b"" if add else None,
        headers={TOKEN_HEADER: server.token},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            return dict(json.load(answer))
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")
        with contextlib.suppress(ValueError, KeyError, TypeError):
            text = str(json.loads(text)["detail"])
        raise ControlFailed(text) from error
    except (OSError, ValueError) as error:
        raise ControlFailed(f"the server at {server.url} does not respond: {error}") from error


def status(server: RunningServer) -> dict[str, Any] | None:
    """What the server says about itself; None if it does not respond."""
    try:
        return ask(server, "status")
    except ControlFailed:
        return None


def clients_of(server: RunningServer, told: Mapping[str, Any] | None) -> Clients:
    """Who uses a server; `told` is its status."""
    # A program with a lease counts as long as it holds that, and its sessions do not count again.
    sessions = (
        f"{session['session_id']} (SDK {session['sdk_version'] or 'unknown'})"
        for session in (told or {}).get("sessions", [])
        if session["lease"] is None
    )
    # A program may have several clients.
    programs = {one.pid: one for one in leases.holders(Path(server.data))}
    return Clients(holders=tuple(programs.values()), sessions=tuple(sessions))


def is_used_without_lease(server: RunningServer, keep_s: float) -> bool:
    """Whether a program without a lease used the server within this time, or waits for a result."""
    if (told := status(server)) is None:
        return True  # it is busy or restarts: programs may wait for it
    waits = told["open_requests"] and told["idle_s"] < MAX_WAIT_S
    return bool(waits or clients_of(server, told).sessions or told["idle_s"] < keep_s)


def _refuse_if_used(server: RunningServer) -> None:
    told = status(server)
    if clients := clients_of(server, told):
        raise HasClients(server, clients)
    # A server that is not ready yet has no clients but those with a lease.
    if told is None and server.ready and registry.is_running(server):
        raise NotResponding(
            f"the server at {server.url} (process {server.pid}) does not respond, so it is not "
            "known whether programs use it"
        )


def stop(server: RunningServer, *, force: bool = False, wait_s: float = STOP_S) -> None:
    """
    Stop a server and wait for its end.

    HasClients if it has some, NotResponding if that is not known, unless forced.
    """
    with leases.locked(Path(server.data)):
        if not force:
            _refuse_if_used(server)
        if registry.is_running(server):
            with contextlib.suppress(ProcessLookupError):
                os.kill(server.pid, signal.SIGTERM)
        deadline = time.monotonic() + wait_s
        while registry.is_running(server):
            if time.monotonic() > deadline:
                raise StillRunning(
                    f"process {server.pid} was asked to stop {wait_s:.0f} s ago and still runs"
                )
            time.sleep(POLL_S)
