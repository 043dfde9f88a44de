"""
A cluster under faults: `make cluster`.

    python -m qa.cluster.run --faults 30 --seed 1 [--forgetful | --ray]
    python -m qa.cluster.run --operations 5000 --faults 60 --minutes 20

PostgreSQL, an S3 API (moto) and nginx, all on loopback; nginx sends each request to one of two web
processes in turn. Two workers compute with a tiny model in deterministic mode; with `--ray`, a Ray cluster
of two nodes places them. Programs with the official SDK and with tinkex train, save and sample in rounds,
and tinkex streams samples; each stream must have all of its tokens once.
Meanwhile, in turn, web processes, workers, engines and connections of the database are killed, web
processes and workers are stopped for longer than the take-over time and continue, web processes are
restarted, workers are drained, the database restarts or does not respond, and the object store does not
respond, or refuses connections, for 20 to 30 s; with `--ray`, nodes are lost.
The checker of `qa/chaos` must find nothing, and the final weights of all rounds must have the same bits.
With `--forgetful`, workers lose every second notification. A failed run prints its seed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import sdk_envs
from cluster import Cluster, cluster
from load_balancer import nginx
from object_store import BUCKET, ObjectStore, object_store
from postgres import Postgres, postgres_server
from qa.chaos.history import Event, check
from qa.chaos.process_kills import PROGRAM, Client, Progress, in_threads, programs, recorded
from qa.chaos.reference_models import RecordedRun
from qa.cluster.faults import Faults
from qa.cluster.streams import Streams
from qa.cluster.workers import PlainWorkers, RayWorkers, Workers
from ray_cluster import ray_cluster
from serving import TINY
from tinkex.server.store.blobs import Files
from tinkex.testing import write_tiny_model

STEPS = 8
#: Operations for each fault, unless a number of operations is given.
PER_FAULT = 25


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run does."""

    seed: int
    faults: int
    operations: int
    minutes: float
    #: Programs of each SDK.
    clients: int
    forgetful: bool
    ray: bool

    def words(self) -> str:
        how = ", forgetful" if self.forgetful else ", workers placed by Ray" if self.ray else ""
        return f"seed {self.seed}, {self.faults} faults, {self.operations} operations{how}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--operations", type=int, default=0, help="default: 25 for each fault")
    parser.add_argument("--minutes", type=float, default=60.0, help="at most; rounds are finished")
    parser.add_argument("--clients", type=int, default=1, help="programs of each SDK")
    parser.add_argument("--seed", type=int, default=None, help="default: the current time")
    parser.add_argument("--forgetful", action="store_true")
    parser.add_argument("--ray", action="store_true")
    options = parser.parse_args()
    if options.forgetful and options.ray:
        parser.error("--forgetful is for workers that this program starts, not for those of Ray")
    plan = Plan(
        seed=int(time.time()) if options.seed is None else options.seed,
        faults=options.faults,
        operations=options.operations or PER_FAULT * options.faults,
        minutes=options.minutes,
        clients=options.clients,
        forgetful=options.forgetful,
        ray=options.ray,
    )
    _print(plan.words())
    sdk = sdk_envs.ensure("0.36.0")
    with tempfile.TemporaryDirectory(prefix="tinkex-cluster-") as folder:
        good = run(Path(folder), sdk, plan)
    _print("passed" if good else f"FAILED; repeat with --seed {plan.seed} and the same options")
    return 0 if good else 1


def run(folder: Path, sdk: Path | None, plan: Plan) -> bool:
    """One round without faults as the reference, then rounds until all is done."""
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
        # The first one creates the tables; then all start at once.
        urls = [running.web().said]
        workers = _workers(stack, running, plan, model)
        workers.start()
        urls.append(running.web().said)
        url = stack.enter_context(nginx(folder, urls))
        _print(f"  cluster at {url} after {time.monotonic() - began_s:.0f} s")
        clients = []
        for name, command in programs(sdk).items():
            prefix = name.upper().replace("TINKEX", "TINKER")
            program_env = {
                **os.environ,
                f"{prefix}_BASE_URL": url,
                f"{prefix}_API_KEY": "tml-any-key-will-do",
            }
            for number in range(plan.clients):
                called = f"{name}-{number}" if number else name
                program = [*command, str(PROGRAM), name, TINY, called, str(STEPS)]
                client = Client(called, program, program_env, history=history, progress=progress)
                stack.callback(client.close)
                clients.append(client)
        in_threads(clients, lambda client: client.round())
        baseline = len(history)
        streams = Streams(url)
        _print(f"  one round without faults: {baseline} events")
        harm = Faults(
            running,
            workers,
            postgres,
            store,
            progress,
            model=model,
            seed=plan.seed,
            count=plan.faults,
            operations=plan.operations,
            until_s=began_s + 60 * plan.minutes,
            say=_print,
        )
        harm.start()

        def until_done(client: Client) -> None:
            client.round()
            while not harm.is_over:
                client.round()

        error = ""
        try:
            with streams.running():
                in_threads(clients, until_done)
        except RuntimeError as failed:
            error = str(failed)
        answers, samples = recorded(history[:baseline])
        violations = check(history, RecordedRun(answers=answers, samples=samples, tolerance=0.0))
        weights = _weights(postgres, running, store)
        logs = "\n".join(f"== {one.log_file.name}\n{one.log[-6000:]}" for one in running.started)
    wrong = any((violations, streams.violations, error, harm.stuck, harm.failure))
    good = not wrong and len(weights) == 1 and streams.whole > 0
    operations = sum(event.answered for event in history)
    kinds = ", ".join(f"{count} {fault}" for fault, count in sorted(harm.done.items()))
    _print(f"  faults: {sum(harm.done.values())} ({kinds})")
    _print(f"  rounds: {sum(client._rounds for client in clients)}, operations: {operations}")
    _print(f"  violations: {len(violations)}, distinct final weights: {len(weights)}")
    _print(f"  whole streams: {streams.whole}, others: {len(streams.violations)}")
    _print(f"  wall time: {time.monotonic() - began_s:.0f} s")
    for line in (error, harm.failure, *map(str, violations[:20]), *streams.violations[:20]):
        if line:
            _print(f"  {line}")
    if not good:
        _print(logs)
    return good


def _workers(stack: ExitStack, running: Cluster, plan: Plan, model: Path) -> Workers:
    if not plan.ray:
        return PlainWorkers(running, forgetful=plan.forgetful)
    env = {
        **running.env,
        "TINKEX_DB": running.db,
        "TINKEX_STORAGE": running.storage,
        "TINKEX_DATA": str(running.folder / "ray"),
    }
    return RayWorkers(stack.enter_context(ray_cluster(env, nodes=2)), model, running.folder)


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
