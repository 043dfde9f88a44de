"""The workers of a cluster under faults: processes that this program starts, or that Ray starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from cluster import FORGETFUL, Cluster, Process
from processes import children
from ray_cluster import RayCluster
from serving import TINY

NAMES = ("one", "two")
LOST_NODE_S = 10.0


class Workers(Protocol):
    """What faults need of the workers."""

    def start(self) -> None:
        """Start all of them, and wait until they are ready."""

    def returned(self, name: str) -> None:
        """The process of a worker was killed: see that there will be another one."""

    def drain(self, name: str) -> None:
        """End a worker as for a new version, and start it again."""


class PlainWorkers:
    """Workers as processes of this program."""

    def __init__(self, running: Cluster, *, forgetful: bool) -> None:
        self._running = running
        self._program = FORGETFUL if forgetful else None

    def start(self) -> None:
        started = [self._start(name) for name in NAMES]
        for process in started:
            assert "ready" in self._running.said(process), process.log

    def _start(self, name: str) -> Process:
        return self._running.worker(name, "--deterministic", program=self._program, wait=False)

    def returned(self, name: str) -> None:
        self._running.named(name).process.wait()
        self._start(name)

    def drain(self, name: str) -> None:
        status = self._running.named(name).stop()
        if status:
            print(f"  the worker {name} ended with status {status}", flush=True)
        self._start(name)


class RayWorkers:
    """Workers that Ray places on two nodes of this machine."""

    def __init__(self, cluster: RayCluster, model: Path, folder: Path) -> None:
        self._cluster = cluster
        self._folder = folder
        self._file = folder / "fleet.toml"
        self._file.write_text(
            f'[[workers]]\nmodel = "{TINY}={model}"\nreplicas = {len(NAMES)}\ngpus = 0\n'
            "resources = { place = 1 }\nsettings = { threads = 1, deterministic = true }\n"
        )

    def start(self) -> None:
        self._fleet("up", str(self._file))

    def returned(self, name: str) -> None:
        """Its actor starts the process again."""

    def drain(self, name: str) -> None:
        self._fleet("scale", TINY, str(len(NAMES) - 1))
        self._fleet("scale", TINY, str(len(NAMES)))

    def lose_node(self) -> None:
        self._cluster.lose_node()
        time.sleep(LOST_NODE_S)
        self._cluster.add_node()

    def _fleet(self, *arguments: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "tinkex.cli", "fleet", *arguments],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **self._cluster.env},
        )
        if done.returncode:
            print(f"  tinkex fleet {' '.join(arguments)}: {done.stderr[-2000:]}", flush=True)


def running_workers(model: Path) -> dict[str, int]:
    """The processes of all workers of this model on this machine, by name."""
    served = f"{TINY}={model}"
    found = {}
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # it has just ended
        if served in words and "--name" in words:
            found[words[words.index("--name") + 1]] = int(file.parent.name)
    return found


def with_children(pids: Sequence[int]) -> list[int]:
    """These processes, each before its children, which are engines or web processes."""
    found: list[int] = []
    for pid in pids:
        found.append(pid)
        try:
            found += children(pid)
        except OSError:
            continue
    return found


def send(signal_number: int, pids: Sequence[int]) -> None:
    """Parents first when they are stopped, and last when they continue."""
    for pid in reversed(pids) if signal_number == signal.SIGCONT else pids:
        try:
            os.kill(pid, signal_number)
        except ProcessLookupError:
            continue
