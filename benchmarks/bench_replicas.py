"""
Replicas: samples per second and CPU time of the web process with 1, 2, 4 and 8 engines.

    python benchmarks/bench_replicas.py [--seconds 20] [--engine-s 0.4]

An engine takes `--engine-s` for a sample and runs `AT_ONCE` together. That time is simulated, without
CPU, so that two cores are enough: this measures what the server adds for each replica, and not GPUs.
On a busy machine give the engines more time, so that all points together need less CPU.
Each point keeps four times as many samples in flight as the engines run. Points with one replica are
repeated between the others, because the machine is shared.
"""

import argparse
import asyncio
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import bench_api
import reports

from tinkex.server.executor import ServedModel
from tinkex.wire.proto.frames_pb2 import Done, Order, Stats

#: How many samples an engine runs together.
AT_ONCE = 8
#: Tells the server's process how long a sample takes.
ENGINE_S = "TINKEX_BENCH_ENGINE_S"
REPLICAS = (1, 2, 1, 4, 1, 8)
#: The goal: at least this part of N times the throughput of one replica.
LINEAR = 0.9


class SimulatedExecutor(bench_api.InstantExecutor):
    """Engines that wait instead of computing."""

    def __init__(self, replicas: int) -> None:
        self.served = (
            ServedModel(
                name=bench_api.BASE,
                folder=Path("/"),
                max_context_length=8192,
                replicas=replicas,
            ),
        )
        self._places = {name: asyncio.Semaphore(AT_ONCE) for name in self.served[0].engines}
        self._took_s = float(os.environ[ENGINE_S])

    async def ready(self, engine: str) -> int:
        return 1 + self.served[0].engines.index(engine)

    async def run(self, engine: str, work: Order, *, incarnation: int | None = None) -> Done:
        async with self._places[engine]:
            await asyncio.sleep(self._took_s)
            return await super().run(engine, work, incarnation=incarnation)

    async def send(self, engine: str, work: Order, **options: Any) -> asyncio.Future[Done]:
        return asyncio.create_task(self.run(engine, work, incarnation=options["incarnation"]))

    def stats(self, engine: str) -> Stats:  # type: ignore[override]
        return Stats()


def serve(folder: Path) -> Any:
    """The application in its own process; the number of replicas is the name of the folder."""
    from tinkex.server.app import create_app
    from tinkex.server.settings import Settings
    from tinkex.server.store import open_store

    chosen = Settings(data=str(folder))
    store = open_store(db_url=chosen.db_url, storage_url=chosen.storage_url, folder=chosen.folder)
    return create_app(chosen, SimulatedExecutor(int(folder.name)), store)


async def measure(replicas: int, seconds: float, engine_s: float) -> bench_api.Measured:
    in_flight = 4 * AT_ONCE * replicas
    requests = int(seconds * AT_ONCE * replicas / engine_s)
    with bench_api.started("tinkex", script=__file__, below=str(replicas)) as server:
        return await bench_api.measure(str(replicas), server, in_flight, requests, prompts=200)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--engine-s", type=float, default=0.4)
    parser.add_argument("--serve")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.serve is not None:
        bench_api.SERVERS["tinkex"] = serve
        bench_api.serve("tinkex", options.folder)
        return
    os.environ[ENGINE_S] = str(options.engine_s)
    found = []
    for replicas in REPLICAS:
        found.append(asyncio.run(measure(replicas, options.seconds, options.engine_s)))
        print(found[-1], file=sys.stderr, flush=True)
    one = statistics.mean(each.per_s for each in found if each.server == "1")
    rows = [
        f"| {each.server} | {each.requests} | {each.per_s:.1f} | "
        f"{each.per_s / one / int(each.server):.2f} | {each.cpu_ms:.2f} | "
        f"{each.cpu_ms * each.per_s / 10:.0f} |"
        for each in sorted(found, key=lambda each: int(each.server))
    ]
    least = min(each.per_s / one / int(each.server) for each in found)
    verdict = "met" if least >= LINEAR else "missed"
    simulated = (
        f"An engine waits {options.engine_s} s for a sample and runs {AT_ONCE} together: "
        f"{AT_ONCE / options.engine_s:.0f} samples/s at most for each replica. No GPU is involved."
    )
    lines = [
        reports.head("Replicas with simulated engines", "python benchmarks/bench_replicas.py"),
        simulated,
        "",
        "| replicas | samples | samples/s | of linear | web CPU ms per sample | web CPU % of a core |",
        "|--:|--:|--:|--:|--:|--:|",
        *rows,
        "",
        f"The least of linear is {least:.2f} (goal ≥ {LINEAR}: {verdict}).",
    ]
    reports.write("replicas", "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
