"""
A cluster under kills: `make cluster`.

    python -m qa.cluster.run --faults 30 --seed 1 [--forgetful]

PostgreSQL, an S3 API (moto) and nginx, all on loopback; nginx sends each request to one of two web
processes in turn. Two workers compute with a tiny model in deterministic mode. Two programs, one with
the official SDK and one with tinkex, train, save and sample in rounds. Meanwhile web processes, workers
and connections of the database are killed, workers are stopped for longer than the take-over time and
continue, and the object store does not respond. The checker of `qa/chaos` must find nothing, and the
final weights of all rounds must have the same bits. With `--forgetful`, workers lose every second
notification. A failed run prints its seed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import sdk_envs
from cluster import Cluster, Process, cluster
from object_store import BUCKET, ObjectStore, object_store
from postgres import Postgres, postgres_server
from processes import children
from qa.chaos.history import Event, check
from qa.chaos.process_kills import PROGRAM, Client, Progress, _in_threads, _programs, _recorded
from qa.chaos.reference_models import RecordedRun
from serving import TINY
from tinkex.server.store.blobs import Files
from tinkex.testing import write_tiny_model

FAULTS = ("web", "worker", "engine", "connections", "stop", "drain", "store")
#: Longer than the take-over time of the test cluster (3 s).
STOPPED_S = 6.0
STORE_SILENT_S = 3.0
STEPS = 8

NGINX = """
pid {folder}/nginx.pid;
error_log {folder}/nginx.log;
events {{ worker_connections 512; }}
http {{
    access_log off;
    client_max_body_size 100m;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    upstream web {{ {servers} }}
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://web;
            proxy_http_version 1.1;
            proxy_set_header Host $host;
            proxy_buffering off;
            proxy_read_timeout 120s;
        }}
    }}
}}
"""


@contextlib.contextmanager
def nginx(folder: Path, urls: list[str]) -> Iterator[str]:
    """Round robin over these web processes; the URL for clients."""
    found = shutil.which("nginx", path="/usr/sbin:" + os.environ.get("PATH", ""))
    assert found, "nginx is not installed (Debian: apt install nginx-light)"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    servers = " ".join(f"server {url.removeprefix('http://')} max_fails=0;" for url in urls)
    config = folder / "nginx.conf"
    config.write_text(NGINX.format(folder=folder, servers=servers, port=port))
    process = subprocess.Popen([found, "-c", str(config), "-g", "daemon off;"])
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGQUIT)
        process.wait(20)


class Faults:
    """Does harm in a thread of its own, by the seed, until it has done enough."""

    def __init__(
        self,
        running: Cluster,
        postgres: Postgres,
        store: ObjectStore,
        progress: Progress,
        *,
        seed: int,
        count: int,
        start_worker: Callable[[str], Process],
    ) -> None:
        self._running, self._postgres, self._object_store = running, postgres, store
        self._progress, self._start_worker = progress, start_worker
        self._draw, self._count = random.Random(seed), count
        self.done: Counter[str] = Counter()
        self.stuck = False
        self._thread = threading.Thread(target=self._run, name="faults", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def _run(self) -> None:
        for number in range(self._count):
            if not self._progress.reach(self._progress.answers + self._draw.randrange(5, 40)):
                self.stuck = True
                return
            # Each kind at least once, if there are enough.
            fault = FAULTS[number] if number < len(FAULTS) else self._draw.choice(FAULTS)
            getattr(self, f"_{fault}")()
            self.done[fault] += 1
            _print(f"  {number + 1} faults ({fault}), {self._progress.answers} answers")

    def _one(self, *, web: bool) -> Process:
        alive = [one for one in self._running.started if one.process.poll() is None]
        return self._draw.choice([one for one in alive if one.said.startswith("http") is web])

    def _web(self) -> None:
        for child in children(self._one(web=True).process.pid):
            os.kill(child, signal.SIGKILL)

    def _worker(self) -> None:
        lost = self._one(web=False)
        lost.kill()
        time.sleep(self._draw.choice([0.0, STOPPED_S]))
        self._start_worker(lost.said)

    def _engine(self) -> None:
        for child in children(self._one(web=False).process.pid):
            os.kill(child, signal.SIGKILL)

    def _connections(self) -> None:
        with self._postgres.connect() as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = %s AND pid <> pg_backend_pid()",
                (self._running.db.rpartition("/")[2],),
            )

    def _stop(self) -> None:
        stopped = self._one(web=False)
        stopped.signal(signal.SIGSTOP)
        time.sleep(STOPPED_S)
        stopped.signal(signal.SIGCONT)

    def _drain(self) -> None:
        leaving = self._one(web=False)
        status = leaving.stop()
        if status:
            _print(f"  the worker {leaving.said} ended with status {status}")
        self._start_worker(leaving.said)

    def _store(self) -> None:
        with self._object_store.paused():
            time.sleep(STORE_SILENT_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--seed", type=int, default=None, help="default: the current time")
    parser.add_argument("--forgetful", action="store_true")
    options = parser.parse_args()
    seed = int(time.time()) if options.seed is None else options.seed
    _print(f"seed {seed}, {options.faults} faults{', forgetful' if options.forgetful else ''}")
    sdk = sdk_envs.ensure("0.36.0")
    with tempfile.TemporaryDirectory(prefix="tinkex-cluster-") as folder:
        good = run(Path(folder), sdk, seed, options.faults, forgetful=options.forgetful)
    _print("passed" if good else f"FAILED; repeat with --seed {seed} --faults {options.faults}")
    return 0 if good else 1


def run(folder: Path, sdk: Path | None, seed: int, faults: int, *, forgetful: bool) -> bool:
    """One round without faults as the reference, then rounds until all faults are done."""
    began_s = time.monotonic()
    history: list[Event] = []
    progress = Progress()
    model = write_tiny_model(folder / "tiny", arch="llama")
    with ExitStack() as stack:
        store = stack.enter_context(object_store())
        postgres = stack.enter_context(postgres_server())
        env = {**store.environment, "TINKEX_SNAPSHOT_STEPS": "7", "TINKEX_LONG_POLL_S": "20"}
        running = stack.enter_context(
            cluster(postgres.database(), folder / "c", model, storage=f"s3://{BUCKET}/c", env=env)
        )

        def start_worker(name: str, *, wait: bool = False) -> Process:
            return running.worker(name, "--deterministic", forgetful=forgetful, wait=wait)

        urls = [running.web().said]
        workers = [start_worker(name) for name in ("one", "two")]
        urls.append(running.web().said)
        for worker in workers:
            assert "ready" in running.said(worker), worker.log
        url = stack.enter_context(nginx(folder, urls))
        _print(f"  cluster at {url} after {time.monotonic() - began_s:.0f} s")
        clients = []
        for name, command in _programs(sdk).items():
            prefix = name.upper().replace("TINKEX", "TINKER")
            program_env = {
                **os.environ,
                f"{prefix}_BASE_URL": url,
                f"{prefix}_API_KEY": "tml-any-key-will-do",
            }
            program = [*command, str(PROGRAM), name, TINY, name, str(STEPS)]
            client = Client(name, program, program_env, history=history, progress=progress)
            stack.callback(client.close)
            clients.append(client)
        _in_threads(clients, lambda client: client.round())
        baseline = len(history)
        _print(f"  one round without faults: {baseline} events")
        harm = Faults(
            running,
            postgres,
            store,
            progress,
            seed=seed,
            count=faults,
            start_worker=start_worker,
        )
        harm.start()

        def until_done(client: Client) -> None:
            client.round()
            while not harm.is_over:
                client.round()

        error = ""
        try:
            _in_threads(clients, until_done)
        except RuntimeError as failed:
            error = str(failed)
        answers, samples = _recorded(history[:baseline])
        violations = check(history, RecordedRun(answers=answers, samples=samples, tolerance=0.0))
        weights = _weights(postgres, running, store)
        logs = "\n".join(f"== {one.log_file.name}\n{one.log[-6000:]}" for one in running.started)
    good = not violations and not error and not harm.stuck and len(weights) == 1
    operations = sum(event.answered for event in history)
    kinds = ", ".join(f"{count} {fault}" for fault, count in sorted(harm.done.items()))
    _print(f"  faults: {sum(harm.done.values())} ({kinds})")
    _print(f"  rounds: {sum(client._rounds for client in clients)}, operations: {operations}")
    _print(f"  violations: {len(violations)}, distinct final weights: {len(weights)}")
    _print(f"  wall time: {time.monotonic() - began_s:.0f} s")
    for line in (error, *map(str, violations[:20])):
        if line:
            _print(f"  {line}")
    if not good:
        _print(logs)
    return good


def _weights(postgres: Postgres, running: Cluster, store: ObjectStore) -> set[str]:
    """Digests of the tensors of the final checkpoints of all rounds."""
    os.environ.update(store.environment)
    files = Files(running.storage)
    found = set()
    with postgres.connect(running.db.rpartition("/")[2]) as connection:
        rows = connection.execute("SELECT place FROM checkpoint_versions WHERE name = 'final'")
        for number, (place,) in enumerate(rows.fetchall()):
            folder = running.folder / "final" / str(number)
            files.download(place, str(folder))
            digest = hashlib.sha256()
            for file in sorted(folder.rglob("*.safetensors")):
                digest.update(file.name.encode() + file.read_bytes())
            found.add(digest.hexdigest())
    return found


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
