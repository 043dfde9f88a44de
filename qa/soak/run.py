"""
Hours of mixed use in minutes: tenants come, train, sample, vanish; memory and descriptors stay flat.

    python -m qa.soak.run [--minutes 20] [--seed 1] [--report FILE]

A real server with keys and the tiny model; our client and the official SDK as its users, each in a
process that ends after half a minute; and clients that are rude. What a server keeps is kept for
seconds, so that everything it deletes is deleted many times over. Exit status 0: flat, no error.
"""

import argparse
import itertools
import json
import os
import platform
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
from datetime import UTC, datetime
from pathlib import Path

import sdk_envs
from processes import children
from qa.soak.measurements import (
    ALLOWED,
    MEBIBYTE,
    Reading,
    chart,
    connections,
    descriptors,
    folder_bytes,
    resident_bytes,
    verdicts,
)
from qa.soak.misbehaving_client import Rude
from serving import TINY, Server, serving
from tinkex.testing import write_tiny_model

ROOT = Path(__file__).resolve().parents[2]
VISITOR = Path(__file__).with_name("client_program.py")
SDK = "0.36.0"
VISIT_S = 30.0
LOOK_S = 3.0
#: A visitor that takes so much longer than it was told hangs.
PATIENCE_S = 180.0

#: Everything is kept for seconds, and every cache is small enough to be full in the first quarter.
SETTINGS = """\
result_kept_s = 20
unfetched_kept_s = 30
session_grace_s = 15
abandoned_s = 40
janitor_s = 3
orphan_s = 30
telemetry_kept_s = 20
audit_kept_s = 60
snapshot_steps = 10
keep_last = 2
stream_grace_s = 2
long_poll_s = 10
gap_s = 60
kv_tokens = 16384
adapter_gb = 0.05
"""

#: Whose key, which client, and the limits of the key.
TENANTS = (
    ("alice", "tinkex", ()),
    ("bob", "tinkex", ("--max-samples", "16", "--max-training", "1")),
    ("carol", "tinker", ()),
    ("dave", "tinker", ("--max-requests", "20")),
)


@dataclass
class Tenant:
    """One place for visitors, taken by one after the other."""

    owner: str
    client: str
    key: str
    python: Path
    done: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)

    def receive(self, url: str, seeds: "itertools.count[int]", until_s: float) -> None:
        while (left_s := until_s - time.monotonic()) > VISIT_S / 2:
            self.visit(url, next(seeds), min(VISIT_S, left_s))

    def visit(self, url: str, seed: int, seconds: float) -> None:
        command = [self.python, VISITOR, self.client, TINY, str(seed), str(seconds)]
        env = {**os.environ, "TINKER_BASE_URL": url, "TINKER_API_KEY": self.key}
        if self.client == "tinker":
            # Our packages are not for the other environment.
            env.pop("PYTHONPATH", None)
        try:
            ran = subprocess.run(
                command,
                env=env,
                capture_output=True,
                text=True,
                timeout=seconds + PATIENCE_S,
                check=False,
            )
            told = json.loads(ran.stdout.splitlines()[-1])
        except subprocess.TimeoutExpired as late:
            told = (late.stderr or b"").decode(errors="replace")
            self.errors.append(f"{self.owner}, seed {seed}: did not end\n{told[-4000:]}")
        except (IndexError, ValueError):
            self.errors.append(f"{self.owner}, seed {seed}: said nothing\n{ran.stderr[-2000:]}")
        else:
            self.done.update({"visits": 1, **told["done"]})
            self.errors += [f"{self.owner}, seed {seed}: {error}" for error in told["errors"]]


class Watcher:
    """Looks at a server every few seconds, in a thread of its own."""

    def __init__(self, server: Server, key: str) -> None:
        self._server = server
        self._key = key
        self._port = int(server.url.rpartition(":")[2])
        (self.web,) = children(server.process.pid)
        (self.engine,) = children(self.web)
        self.readings: list[Reading] = []
        self.errors: list[str] = []
        self._began_s = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join(30)

    def _run(self) -> None:
        try:
            while not self._over.wait(LOOK_S):
                self.readings.append(self._look())
        except (OSError, LookupError) as error:
            self.errors.append(f"the server could not be looked at any more: {error!r}")

    def _look(self) -> Reading:
        return Reading(
            at_s=time.monotonic() - self._began_s,
            web_bytes=resident_bytes(self.web),
            web_descriptors=descriptors(self.web),
            connections=connections(self._port),
            engine_bytes=resident_bytes(self.engine),
            engine_descriptors=descriptors(self.engine),
            data_bytes=folder_bytes(self._server.data),
            open_requests=int(self.figures()["tinkex_requests_open"]),
        )

    def figures(self) -> dict[str, float]:
        """What the metrics page says."""
        asked = urllib.request.Request(
            f"{self._server.url}/metrics", headers={"X-API-Key": self._key}
        )
        with urllib.request.urlopen(asked, timeout=60) as page:
            lines = page.read().decode().splitlines()
        return {
            name: float(value)
            for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")
        }

    def settled(self, within_s: float) -> int:
        """How many requests are unfinished once everybody has left: 0, after a while."""
        until_s = time.monotonic() + within_s
        while (left := int(self.figures()["tinkex_requests_open"])) and time.monotonic() < until_s:
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


def complaints(log: Sequence[str]) -> list[str]:
    """What the server wrote about itself that nobody's request explains."""
    wrong = re.compile(r"Traceback|\bbug\b|died|failed unexpectedly|background task")
    return [line.rstrip() for line in log if wrong.search(line)]


def report(
    watcher: Watcher, tenants: Sequence[Tenant], rude: Rude, errors: Sequence[str], command: str
) -> str:
    """What was seen, as a page."""
    readings = watcher.readings
    minutes = readings[-1].at_s / 60
    where = f"{os.cpu_count()} CPU cores shared with other work (load {os.getloadavg()[2]:.1f})"
    system = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    lines = [
        f"# {minutes:.0f} minutes of everything",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}, commit {_commit()}, {where}, {system}; `{command}`",
        "",
        f"{len(readings)} looks. Last quarter against second (allowed: +{ALLOWED:.0%}):",
        "",
        "| | second quarter | last quarter | growth | |",
        "|---|---:|---:|---:|---|",
    ]
    for one in verdicts(readings):
        word = ("flat" if one.is_flat else "GROWS") if one.bounded else "for information"
        lines.append(
            f"| {one.what} | {one.second:.1f} | {one.last:.1f} | {one.growth:+.1%} | {word} |"
        )
    pictures = (
        ("web MiB", [r.web_bytes / MEBIBYTE for r in readings]),
        ("engine MiB", [r.engine_bytes / MEBIBYTE for r in readings]),
        ("web fds", [float(r.web_descriptors) for r in readings]),
        ("held alone", [float(r.web_descriptors - r.connections) for r in readings]),
        ("engine fds", [float(r.engine_descriptors) for r in readings]),
        ("data MiB", [r.data_bytes / MEBIBYTE for r in readings]),
        ("open", [float(r.open_requests) for r in readings]),
    )
    lines += [
        "",
        "From the first look to the last; each line from its smallest to its largest:",
        "",
    ]
    lines += ["```"]
    for name, values in pictures:
        lines.append(f"{name:>10} {min(values):7.1f} {chart(values)} {max(values):.1f}")
    lines += ["```", "", "What was done:", "", "| who | client | what |", "|---|---|---|"]
    for tenant in tenants:
        client = "official SDK 0.36.0" if tenant.client == "tinker" else "tinkex"
        lines.append(f"| {tenant.owner} | {client} | {_counts(tenant.done)} |")
    lines.append(f"| eve | plain sockets | {_counts(rude.done)} |")
    lines += ["", f"Errors that were not expected: {len(errors)}.", ""]
    # The same one again and again is told once.
    distinct = {error.split(":", 2)[-1][-100:]: error for error in errors}
    lines += [f"```\n{error}\n```" for error in list(distinct.values())[:20]]
    return "\n".join(lines).rstrip() + "\n"


def _counts(done: "Counter[str] | dict[str, int]") -> str:
    return ", ".join(f"{count} {what.replace('_', ' ')}" for what, count in sorted(done.items()))


def _commit() -> str:
    asked = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    ran = subprocess.run(asked, capture_output=True, text=True, check=False)
    return ran.stdout.strip() or os.environ.get("SOAK_COMMIT", "unknown")


def run(minutes: float, seed: int, folder: Path) -> tuple[str, bool]:
    """The report, and whether all is well."""
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
        watcher = Watcher(server, key)
        rude = Rude(server.url, key, TINY, seed)
        watcher.start()
        rude.start()
        until_s = time.monotonic() + 60 * minutes
        seeds = itertools.count(seed * 10_000)
        threads = [
            threading.Thread(target=tenant.receive, args=(server.url, seeds, until_s))
            for tenant in tenants
        ]
        for thread in threads:
            thread.start()
        # Last visits take their time; what they leave behind is looked at, the quiet is not counted.
        time.sleep(max(0.0, until_s - time.monotonic()))
        watcher.stop()
        for thread in threads:
            thread.join()
        rude.stop()
        left = watcher.settled(within_s=90)
        errors = [error for tenant in tenants for error in tenant.errors]
        errors += rude.errors + watcher.errors
        if left:
            errors.append(f"{left} requests are unfinished long after everybody left")
    errors += complaints(server.log)
    well = not errors and all(one.is_flat for one in verdicts(watcher.readings) if one.bounded)
    command = f"python -m qa.soak.run --minutes {minutes:g} --seed {seed}"
    return report(watcher, tenants, rude, errors, command), well


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        page, well = run(options.minutes, options.seed, Path(folder))
    sys.stdout.write(page)
    if options.report is not None:
        options.report.write_text(page)
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
