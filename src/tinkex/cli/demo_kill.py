"""The demo kills the engine of its own server once, to show that a run goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from tinkex.local import control
from tinkex.local.registry import RunningServer


@dataclass(frozen=True, kw_only=True)
class Kill:
    """An engine that was killed."""

    process: int
    #: How many steps were finished.
    step: int
    #: The time from the kill to the result of the next step.
    pause_s: float


class KeepEngine(Exception):
    """The engine must not be killed; the text says why."""


def kill_engine(server: RunningServer, model: str) -> int:
    """SIGKILL to the engine of a server that only this program uses; returns its process id."""
    process = _engine_of(server, model)
    os.kill(process, signal.SIGKILL)
    return process


def _engine_of(server: RunningServer, model: str) -> int:
    if server.how != "local":
        raise KeepEngine(f"the server of process {server.pid} was not started by a demo")
    try:
        told = control.ask(server, "status")
    except control.ControlFailed as error:
        raise KeepEngine(str(error)) from error
    clients = control.clients_of(server, told)
    others = [str(one) for one in clients.holders if one.pid != os.getpid()]
    if others or clients.sessions:
        raise KeepEngine(f"others use the server, too: {', '.join([*others, *clients.sessions])}")
    processes = [
        int(process)
        for one in told["models"]
        if one["name"] == model
        for process in one["processes"]
    ]
    if len(processes) != 1:
        raise KeepEngine(f"the server has {len(processes)} engine processes of {model}")
    (process,) = processes
    # A local server is the leader of a session, so no process elsewhere is hit even if this one has
    # ended since and its number is in use again.
    try:
        is_of_server = os.getsid(process) == server.pid
    except OSError:
        is_of_server = False
    if not is_of_server:
        raise KeepEngine(f"process {process} is not one of the server")
    return process


def missing_steps(recorded: Sequence[tuple[int, int]], steps: int) -> str | None:
    """
    What is wrong with the server's record of a run of so many steps; None if it has each once.

    The record is a list of the number of a step, and of how many steps up to it are meant.
    """
    counted, last = sum(count for _, count in recorded), max(recorded, default=(0, 0))[0]
    if counted == last == steps:
        return None
    return f"The server recorded {counted} steps, the last one as {last}, and {steps} were sent."
