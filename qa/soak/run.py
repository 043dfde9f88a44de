"""
Soak test: many short client programs of several tenants; memory and file descriptors must stay flat.

    python -m qa.soak.run [--minutes 20] [--seed 1] [--report FILE]

A server with API keys and the tiny model; clients of tinkex and of the official SDK, each in a process
that ends after half a minute; and a misbehaving client. Retention times are seconds, so the server
deletes everything many times. The exit status is 0 if memory is flat and no error occurred.
"""

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import sdk_envs
from benchmarks import reports
from processes import children
from qa.soak.measurements import (
    MAX_GROWTH,
    MEBIBYTE,
    Reading,
    chart,
    connections,
    descriptors,
    folder_bytes,
    resident_bytes,
    verdicts,
)
from qa.soak.misbehaving_client import MisbehavingClient
from serving import TINY, Server, serving
from tinkex.testing import write_tiny_model

PROGRAM = Path(__file__).with_name("client_program.py")
SDK = "0.36.0"
PROGRAM_S = 30.0
INTERVAL_S = 3.0
#: A program that takes this much longer than planned counts as hanging.
GRACE_S = 180.0

#: Short retention times, and caches that are full within the first quarter of the run.
SETTINGS = """\
result_kept_s = 20
unfetched_kept_s = 30
session_grace_s = 15
abandoned_s = 40
janitor_s = 3
orphan_s = 30
telemetry_kept_s = 20
audit_kept_s = 60
metrics_kept_s = 60
snapshot_steps = 10
keep_last = 2
stream_grace_s = 2
long_poll_s = 10
gap_s = 60
kv_tokens = 16384
adapter_gb = 0.05
"""

#: Owner, client, and limits of the key.
TENANTS = (
    ("alice", "tinkex", ()),
    ("bob", "tinkex", ("--max-samples", "16", "--max-training", "1")),
    ("carol", "tinker", ()),
    ("dave", "tinker", ("--max-requests", "20")),
)


@dataclass
class Tenant:
    """Runs one client program after the other with the key of one owner."""

    owner: str
    client: str
    key: str
    python: Path
    done: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)

    def run_programs(self, url: str, seeds: "itertools.count[int]", end_s: float) -> None:
        while (remaining_s := end_s - time.monotonic()) > PROGRAM_S / 2:
            self.run_program(url, next(seeds), min(PROGRAM_S, remaining_s))

    def run_program(self, url: str, seed: int, seconds: float) -> None:
        command = [self.python, PROGRAM, self.client, TINY, str(seed), str(seconds)]
        env = {**os.environ, "TINKER_BASE_URL": url, "TINKER_API_KEY": self.key}
        if self.client == "tinker":
            # The official SDK must not import packages of this environment.
            env.pop("PYTHONPATH", None)
        try:
            ran = subprocess.run(
                command,
                env=env,
                capture_output=True,
                text=True,
                timeout=seconds + GRACE_S,
                check=False,
            )
            result = json.loads(ran.stdout.splitlines()[-1])
        except subprocess.TimeoutExpired as late:
            stderr = (late.stderr or b"").decode(errors="replace")
            self.errors.append(f"{self.owner}, seed {seed}: did not end\n{stderr[-4000:]}")
        except (IndexError, ValueError):
            self.errors.append(f"{self.owner}, seed {seed}: printed nothing\n{ran.stderr[-2000:]}")
        else:
            self.done.update({"programs": 1, **result["done"]})
            self.errors += [f"{self.owner}, seed {seed}: {error}" for error in result["errors"]]


class Monitor:
    """Measures a server every few seconds in its own thread."""

    def __init__(self, server: Server, key: str) -> None:
        self._server = server
        self._key = key
        self._port = int(server.url.rpartition(":")[2])
        (self.web,) = children(server.process.pid)
        (self.engine,) = children(self.web)
        self.readings: list[Reading] = []
        self.errors: list[str] = []
        self._began_s = time.monotonic()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(30)

    def _run(self) -> None:
        try:
            while not self._stopped.wait(INTERVAL_S):
                self.readings.append(self._measure())
        except (OSError, LookupError) as error:
            self.errors.append(f"the server could not be measured any more: {error!r}")

    def _measure(self) -> Reading:
        return Reading(
            at_s=time.monotonic() - self._began_s,
            web_bytes=resident_bytes(self.web),
            web_descriptors=descriptors(self.web),
            connections=connections(self._port),
            engine_bytes=resident_bytes(self.engine),
            engine_descriptors=descriptors(self.engine),
            data_bytes=folder_bytes(self._server.data),
            open_requests=int(self.metrics()["tinkex_requests_open"]),
        )

    def metrics(self) -> dict[str, float]:
        """The values of the metrics page."""
        request = urllib.request.Request(
            f"{self._server.url}/metrics", headers={"X-API-Key": self._key}
        )
        with urllib.request.urlopen(request, timeout=60) as page:
            lines = page.read().decode().splitlines()
        return {
            name: float(value)
            for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")
        }

    def wait_until_idle(self, timeout_s: float) -> int:
        """Waits until no request is open; the number of requests still open at the timeout."""
        end_s = time.monotonic() + timeout_s
        while (left := int(self.metrics()["tinkex_requests_open"])) and time.monotonic() < end_s:
            time.sleep(1)
        return left


def make_key(data: Path, owner: str, limits: Sequence[str] = ()) -> str:
    command = [sys.executable, "-m", "tinkex.cli.main", "key", "create"]
    made = subprocess.run(
        [*command, "--owner", owner, "--data", data, *limits],
        capture_output=True,
        text=True,
        check=True,
    )
    return made.stdout.split()[0]


def suspicious_lines(log: Sequence[str]) -> list[str]:
    """Log lines of the server that indicate a bug or a crash."""
    wrong = re.compile(r"Traceback|\bbug\b|died|crashed|exited|failed unexpectedly|background task")
    return [line.rstrip() for line in log if wrong.search(line)]


def report(
    monitor: Monitor,
    tenants: Sequence[Tenant],
    misbehaving: MisbehavingClient,
    errors: Sequence[str],
    command: str,
) -> str:
    """The report as Markdown."""
    readings = monitor.readings
    minutes = readings[-1].at_s / 60
    lines = [
        reports.head(f"Soak test of {minutes:.0f} minutes", command),
        f"{len(readings)} measurements. Last quarter relative to the second (allowed: +{MAX_GROWTH:.0%}):",
        "",
        "| | second quarter | last quarter | growth | |",
        "|---|---:|---:|---:|---|",
    ]
    for one in verdicts(readings):
        word = ("flat" if one.is_flat else "GROWS") if one.bounded else "for information"
        lines.append(
            f"| {one.what} | {one.second:.1f} | {one.last:.1f} | {one.growth:+.1%} | {word} |"
        )
    charts = (
        ("web MiB", [r.web_bytes / MEBIBYTE for r in readings]),
        ("engine MiB", [r.engine_bytes / MEBIBYTE for r in readings]),
        ("web fds", [float(r.web_descriptors) for r in readings]),
        ("other fds", [float(r.web_descriptors - r.connections) for r in readings]),
        ("engine fds", [float(r.engine_descriptors) for r in readings]),
        ("data MiB", [r.data_bytes / MEBIBYTE for r in readings]),
        ("open", [float(r.open_requests) for r in readings]),
    )
    lines += [
        "",
        "Charts over time; each line shows its smallest and largest value:",
        "",
    ]
    lines += ["```"]
    for name, values in charts:
        lines.append(f"{name:>10} {min(values):7.1f} {chart(values)} {max(values):.1f}")
    lines += ["```", "", "Operations:", "", "| owner | client | operations |", "|---|---|---|"]
    for tenant in tenants:
        client = "official SDK 0.36.0" if tenant.client == "tinker" else "tinkex"
        lines.append(f"| {tenant.owner} | {client} | {_counts(tenant.done)} |")
    lines.append(f"| eve | plain sockets | {_counts(misbehaving.done)} |")
    lines += ["", f"Unexpected errors: {len(errors)}.", ""]
    # Repeated errors appear once.
    distinct = {error.split(":", 2)[-1][-100:]: error for error in errors}
    lines += [f"```\n{error}\n```" for error in list(distinct.values())[:20]]
    return "\n".join(lines).rstrip() + "\n"


def _counts(done: "Counter[str] | dict[str, int]") -> str:
    return ", ".join(f"{count} {what.replace('_', ' ')}" for what, count in sorted(done.items()))


def run(minutes: float, seed: int, folder: Path) -> tuple[str, bool]:
    """The report, and whether the run passed."""
    data = folder / "data"
    data.mkdir()
    (data / "tinkex.toml").write_text(SETTINGS)
    pythons = {"tinkex": Path(sys.executable), "tinker": sdk_envs.ensure(SDK)}
    tenants = [
        Tenant(owner, client, make_key(data, owner, limits), pythons[client])
        for owner, client, limits in TENANTS
    ]
    key = make_key(data, "eve")
    model = write_tiny_model(folder / "tiny")
    with serving(f"{TINY}={model}", data=data) as server:
        monitor = Monitor(server, key)
        misbehaving = MisbehavingClient(server.url, key, TINY, seed)
        monitor.start()
        misbehaving.start()
        end_s = time.monotonic() + 60 * minutes
        seeds = itertools.count(seed * 10_000)
        threads = [
            threading.Thread(target=tenant.run_programs, args=(server.url, seeds, end_s))
            for tenant in tenants
        ]
        for thread in threads:
            thread.start()
        # The last programs end after the measurements, which cover only the time under load.
        time.sleep(max(0.0, end_s - time.monotonic()))
        monitor.stop()
        for thread in threads:
            thread.join()
        misbehaving.stop()
        left = monitor.wait_until_idle(timeout_s=90)
        errors = [error for tenant in tenants for error in tenant.errors]
        errors += misbehaving.errors + monitor.errors
        if left:
            errors.append(f"{left} requests are still open after all clients have ended")
    errors += suspicious_lines(server.log)
    passed = not errors and all(one.is_flat for one in verdicts(monitor.readings) if one.bounded)
    command = f"python -m qa.soak.run --minutes {minutes:g} --seed {seed}"
    return report(monitor, tenants, misbehaving, errors, command), passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        page, passed = run(options.minutes, options.seed, Path(folder))
    sys.stdout.write(page)
    if options.report is not None:
        options.report.write_text(page)
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
