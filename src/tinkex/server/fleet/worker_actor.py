"""
The actor of one worker: it keeps one `tinkex worker` process running.

The worker is a process of its own, the same as under systemd: Ray's libraries are not in it, signals
drain it, and no request passes through Ray. Ray places the actor on a node that has what the worker
needs, and starts it again elsewhere if its process or its node is lost.

Ray does not guarantee that the old process has ended by then. That is no problem here: what a worker
publishes is checked in PostgreSQL (`server.store.ownership`).
"""

import ctypes
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tinkex.local.registry import default_data_folder
from tinkex.server.fleet.plan import WorkerGroup
from tinkex.server.process_end import REPLACED_STATUS
from tinkex.server.retry import Backoff, Crashed, retry_blocking

BACKOFF = Backoff(first_s=1.0, max_s=30.0)
#: A process that was ready for this long does not count as one that fails again and again.
STABLE_S = 60.0
#: Lines of the log that explain why a worker ended.
KEPT_LINES = 5
#: How long a worker may drain. Its own limit (`drain_s`) ends it long before.
DRAIN_S = 300.0
_PR_SET_PDEATHSIG = 1

STARTING, READY, FAILING, DRAINING, ENDED = "starting", "ready", "failing", "draining", "ended"
#: Another process has its name; this one is not started again.
REPLACED = "replaced"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerReport:
    """What an actor says about its worker."""

    name: str
    state: str
    node: str
    pid: int | None
    #: How often the process ended by itself.
    crashes: int
    #: The last lines of its log, if it is failing or was replaced.
    log: str
    group: WorkerGroup


class WorkerActor:
    """Runs a worker until it is drained. Ray makes this class an actor; it imports nothing of Ray."""

    def __init__(self, name: str, group: WorkerGroup) -> None:
        if os.environ.get("RAY_AUTH_MODE") != "token":
            # Anyone who reaches a port of such a node can run code on it.
            raise RuntimeError(
                f"the Ray node {platform.node()} was started without RAY_AUTH_MODE=token"
            )
        self._name = name
        self._group = group
        self._state = STARTING
        self._process: subprocess.Popen[str] | None = None
        self._crashes = 0
        self._log: deque[str] = deque(maxlen=KEPT_LINES)
        self._drain = threading.Event()
        self._lock = threading.Lock()
        # A thread that lives as long as this process: the worker is bound to it (`_die_with_parent`).
        self._thread = threading.Thread(target=self._keep_running, daemon=True)
        self._thread.start()

    def report(self) -> WorkerReport:
        process = self._process
        return WorkerReport(
            name=self._name,
            state=self._state,
            node=platform.node(),
            pid=None if process is None or process.poll() is not None else process.pid,
            crashes=self._crashes,
            log="\n".join(self._log) if self._state in (FAILING, REPLACED) else "",
            group=self._group,
        )

    def drain(self) -> bool:
        """Ask the worker to hand over what it has, and wait for its end; False if that takes too long."""
        with self._lock:
            self._drain.set()
            if self._state not in (ENDED, REPLACED):
                self._state = DRAINING
            if self._process is not None and self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
        self._thread.join(DRAIN_S)
        return not self._thread.is_alive()

    def _keep_running(self) -> None:
        def failed(_error: Exception, _wait_s: float) -> None:
            self._crashes += 1
            self._state = FAILING

        retry_blocking(
            self._run, BACKOFF, on_retry=failed, sleep=lambda wait_s: self._drain.wait(wait_s)
        )
        replaced = self._process is not None and self._process.returncode == REPLACED_STATUS
        with self._lock:
            self._state = REPLACED if replaced else ENDED

    def _run(self) -> None:
        """Run one process until it ends; raises Crashed unless it was drained or replaced."""
        with self._lock:
            if self._drain.is_set():
                return
            self._process = subprocess.Popen(
                worker_command(self._name, self._group),
                env=worker_environment(self._name, self._group, os.environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                preexec_fn=_die_with_parent,  # noqa: PLW1509  one system call, no lock
            )
        ready_s = None
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                # Into the log of the actor, which Ray keeps on the node.
                sys.stderr.write(line)
                if line.rstrip() == f"tinkex worker {self._name} ready":
                    ready_s = time.monotonic()
                    self._state = DRAINING if self._drain.is_set() else READY
                else:
                    self._log.append(line.rstrip())
        status = self._process.wait()
        if status != REPLACED_STATUS and not self._drain.is_set():
            stable = ready_s is not None and time.monotonic() - ready_s >= STABLE_S
            raise Crashed(stable=stable)


def worker_command(name: str, group: WorkerGroup) -> list[str]:
    return [sys.executable, "-m", "tinkex.cli", "worker", group.model, "--name", name]


def worker_environment(name: str, group: WorkerGroup, env: Mapping[str, str]) -> dict[str, str]:
    """The node's environment, the group's settings, and a data folder for this worker alone."""
    base = Path(env.get("TINKEX_DATA") or default_data_folder(env))
    chosen = {
        f"TINKEX_{key.upper()}": str(value).lower() if isinstance(value, bool) else str(value)
        for key, value in group.settings.items()
    }
    folder = base / "workers" / re.sub(r"[^A-Za-z0-9.-]+", "-", name)
    # The worker does not know Ray and should not hold its token.
    kept = {key: value for key, value in env.items() if not key.startswith("RAY_")}
    return {**kept, **chosen, "TINKEX_DATA": str(folder)}


def _die_with_parent() -> None:
    """
    Linux ends the worker with its actor: Ray counts its GPU as free from then on.

    The worker cannot drain then. Another one rebuilds its models from snapshot and log.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
