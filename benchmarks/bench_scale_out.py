"""
Web processes, workers and PostgreSQL: throughput, latency and CPU time, against one process.

    python benchmarks/bench_scale_out.py [--seconds 20] [--engine-s 1.6]
    python benchmarks/bench_scale_out.py --sections webs [--rounds 5]

Workers have simulated engines: a sample waits `--engine-s` in one of `AT_ONCE` places, without CPU. So
this measures what web processes, the database and workers add, and not GPUs. Everything is a process of
its own on loopback: PostgreSQL without fsync, web processes, workers. The one-process server uses the
same PostgreSQL. Load is constant, and only what is finished in the measured time counts. What the processes use without any load (heartbeats,
looks at tables) is measured first, and subtracted. Other work on the machine changes rates and
latencies; CPU times and what is measured in turn with its counterpart remain comparable.
"""

import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import bench_api
import reports
from bench_replicas import AT_ONCE, ENGINE_S, SimulatedExecutor

sys.path.insert(0, str(bench_api.ROOT / "tests"))

from postgres import Postgres, postgres_server
from processes import children
from tinkex.wire.codec import PROTOBUF_TYPE

REPLICAS = (1, 2, 1, 4, 1, 8)
LINEAR, SAME_CPU, LARGE_RATE, RATE_REACHED = 0.9, 0.1, 0.75, 0.95
#: How long the processes are watched without load.
IDLE_S = 4.0
#: Tokens of a prompt whose JSON body has 25 kB.
LARGE_TOKENS = 4_200


# --- The processes. ---


def settings_for(folder: Path, options: argparse.Namespace) -> Any:
    from tinkex.server.settings import Settings

    return Settings(data=str(folder), db=options.db, storage=options.storage, activity_s=0.0)


def open_for(settings: Any, **options: Any) -> Any:
    from tinkex.server.store import open_store

    return open_store(
        db_url=settings.db_url,
        storage_url=settings.storage_url,
        folder=settings.folder,
        **options,
    )


def serve_one(options: argparse.Namespace, folder: Path) -> Any:
    """Routes, scheduler and engines in one process, on PostgreSQL."""
    from tinkex.server.app import create_app

    settings = settings_for(folder, options)
    return create_app(settings, SimulatedExecutor(1), open_for(settings, exclusive=True))


def serve_web(options: argparse.Namespace, folder: Path) -> Any:
    from tinkex.server.app import create_app
    from tinkex.server.cluster.known_workers import KnownWorkers
    from tinkex.server.cluster.web import web_parts

    settings = settings_for(folder, options)
    store = open_for(settings, role="web")
    workers = KnownWorkers(store, takeover_s=settings.takeover_s)
    parts = functools.partial(web_parts, settings, workers, store, name=folder.name)
    return create_app(settings, workers, store, parts=parts)


async def work(options: argparse.Namespace, folder: Path) -> None:
    from tinkex.server.worker_process import running_worker

    settings = settings_for(folder, options)
    store = open_for(settings, role="worker", writer=folder.name)
    async with running_worker(settings, folder.name, SimulatedExecutor(1), store):
        print("ready", flush=True)
        await asyncio.Event().wait()


@contextlib.contextmanager
def process(kind: str, name: str, db: str, home: Path) -> Iterator[bench_api.Server]:
    command = [sys.executable, __file__, "--serve", kind, "--folder", str(home / name)]
    started = subprocess.Popen(
        [*command, "--db", db, "--storage", str(home / "storage")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert started.stdout
    try:
        yield bench_api.Server(started.stdout.readline().strip(), started.pid)
    finally:
        started.kill()
        started.wait()


@dataclass
class Cluster:
    """The processes that serve, and PostgreSQL."""

    webs: list[bench_api.Server]
    workers: list[bench_api.Server]
    postgres: Postgres

    def cpu_s(self) -> dict[str, float]:
        return {
            "web": sum(one.cpu_s() for one in self.webs),
            "worker": sum(one.cpu_s() for one in self.workers),
            "PostgreSQL": self._postgres_s(),
        }

    def _postgres_s(self) -> float:
        """Of the server and its processes, those that have ended too."""
        pid = self.postgres._process.pid
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ended_s = sum(map(int, fields[11:15])) / bench_api.CLOCK_HZ
        return ended_s + sum(bench_api.Server("", child).cpu_s() for child in children(pid))


@contextlib.contextmanager
def cluster(
    postgres: Postgres, engine_s: float, *, webs: int = 1, workers: int = 1, one: bool = False
) -> Iterator[Cluster]:
    """A new database with these processes; `one` is a server that is all of them."""
    os.environ[ENGINE_S] = str(engine_s)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        home, db = Path(folder), postgres.database()
        start = lambda kind, name: stack.enter_context(process(kind, name, db, home))
        if one:
            yield Cluster([start("one", "one")], [], postgres)
            return
        # Workers first: a web process knows the base models from them.
        running = [start("worker", f"worker-{number}") for number in range(workers)]
        yield Cluster([start("web", f"web-{number}") for number in range(webs)], running, postgres)


# --- The load. ---


class Load(bench_api.Load):
    """Asks several web processes in turn: each for a whole sample, or each for one request."""

    def __init__(
        self, sessions: list[aiohttp.ClientSession], tokens: int, *, each_request: bool
    ) -> None:
        super().__init__(sessions[0], "")
        self._turns = itertools.cycle(sessions)
        self.tokens = tokens
        self.each_request = each_request
        self.finished: list[tuple[float, float]] = []

    async def post_to(
        self,
        http: aiohttp.ClientSession,
        path: str,
        body: dict[str, Any],
        accept: str = "application/json",
    ) -> Any:
        self.http = http  # `post` sends before it waits, so no other task can change it before
        return await self.post(path, body, accept)

    async def sample(self) -> None:
        began_s = time.perf_counter()
        number = next(self.numbers)
        body = {
            "sampling_session_id": self.sampler,
            "seq_id": number,
            "num_samples": 1,
            "prompt": {
                "chunks": [
                    {"type": "encoded_text", "tokens": [number % 200, *range(10_000, 10_000 + self.tokens)]}
                ]
            },
            "sampling_params": {"max_tokens": 16, "seed": 1},
        }  # fmt: skip
        at = next(self._turns)
        accepted = json.loads(await self.post_to(at, "asample", body))
        at = next(self._turns) if self.each_request else at
        poll = {"request_id": accepted["request_id"], "allow_metadata_only": False}
        result = await self.post_to(at, "retrieve_future", poll, PROTOBUF_TYPE)
        assert result == bench_api.RESULT
        now_s = time.perf_counter()
        self.finished.append((now_s, now_s - began_s))


@dataclass
class Measured:
    per_s: float
    #: Milliseconds of CPU for each request, by the kind of process, above those without load.
    cpu_ms: dict[str, float]
    #: CPU without load, as a share of one core, by the kind of process.
    idle: dict[str, float]
    #: Seconds of each request.
    took_s: list[float]

    @property
    def all_ms(self) -> float:
        return sum(self.cpu_ms.values())


async def measure(
    running: Cluster,
    in_flight: int,
    seconds: float,
    *,
    warm_s: float,
    tokens: int = 100,
    each_request: bool = True,
    per_s: float | None = None,
) -> Measured:
    """Keep `in_flight` samples, or begin `per_s` with at most so many; measure after `warm_s`."""
    async with contextlib.AsyncExitStack() as stack:
        sessions = []
        for web in running.webs:
            connector = aiohttp.TCPConnector(limit=0)
            timeout = aiohttp.ClientTimeout(total=120)
            session = aiohttp.ClientSession(web.url, connector=connector, timeout=timeout)
            sessions.append(await stack.enter_async_context(session))
        load = Load(sessions, tokens, each_request=each_request)
        made = await load.post("create_session", {"tags": [], "user_metadata": {}, "sdk_version": bench_api.SDK})  # fmt: skip
        wanted = {
            "session_id": json.loads(made)["session_id"],
            "sampling_session_seq_id": 0,
            "base_model": bench_api.BASE,
        }
        made = await load.post("create_sampling_session", wanted)
        load.sampler = json.loads(made)["sampling_session_id"]

        async def keep(number: int) -> None:
            every_s = 0.0 if per_s is None else in_flight / per_s
            next_s = time.perf_counter() + every_s * number / in_flight
            while True:
                if every_s:
                    await asyncio.sleep(max(next_s - time.perf_counter(), 0.0))
                    next_s = max(next_s + every_s, time.perf_counter())
                await load.sample()

        # The first samples load what all later ones use.
        await asyncio.gather(*(load.sample() for _ in range(in_flight)))
        await asyncio.sleep(1)
        before, began_s = running.cpu_s(), time.perf_counter()
        await asyncio.sleep(IDLE_S)
        after, ended_s = running.cpu_s(), time.perf_counter()
        idle = {kind: (after[kind] - before[kind]) / (ended_s - began_s) for kind in before}

        tasks = [asyncio.create_task(keep(number)) for number in range(in_flight)]
        await asyncio.sleep(warm_s)
        before, began_s = running.cpu_s(), time.perf_counter()
        await asyncio.sleep(seconds)
        after, ended_s = running.cpu_s(), time.perf_counter()
        took_s = [took for at_s, took in load.finished if began_s <= at_s < ended_s]
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, asyncio.CancelledError), outcome
    count = len(took_s)
    return Measured(
        per_s=count / (ended_s - began_s),
        cpu_ms={
            kind: 1000 * (after[kind] - before[kind] - idle[kind] * (ended_s - began_s)) / count
            for kind in before
        },
        idle=idle,
        took_s=sorted(took_s),
    )


async def measure_all(
    clusters: list[Cluster], in_flight: int, seconds: float, **options: Any
) -> Measured:
    """`measure` for several clusters on one PostgreSQL at the same time."""
    found = await asyncio.gather(*(measure(one, in_flight, seconds, **options) for one in clusters))
    if len(found) == 1:
        return found[0]
    count = sum(len(one.took_s) for one in found)
    cpu_ms = {
        kind: sum(one.cpu_ms[kind] * len(one.took_s) for one in found) / count
        for kind in found[0].cpu_ms
    }
    # Each of them has seen all of it.
    cpu_ms["PostgreSQL"] /= len(found)
    return Measured(
        per_s=sum(one.per_s for one in found),
        cpu_ms=cpu_ms,
        idle={},
        took_s=sorted(took for one in found for took in one.took_s),
    )


# --- What is measured. ---


def scaling(postgres: Postgres, engine_s: float, seconds: float) -> list[str]:
    found = []
    for workers in REPLICAS:
        with cluster(postgres, engine_s, workers=workers) as running:
            in_flight = 4 * AT_ONCE * workers
            one = asyncio.run(measure(running, in_flight, seconds, warm_s=4 * engine_s + 2))
        found.append((workers, one))
        say(f"{workers} workers: {one.per_s:.2f}/s {one.cpu_ms} {one.idle}")
    return scaling_lines(found, engine_s)


def scaling_lines(found: list[tuple[int, Measured]], engine_s: float) -> list[str]:
    alone = statistics.mean(one.per_s for workers, one in found if workers == 1)
    rows = [
        f"| {workers} | {one.per_s:.2f} | {one.per_s / alone / workers:.2f} | "
        f"{one.cpu_ms['web']:.2f} | {one.cpu_ms['worker']:.2f} | {one.cpu_ms['PostgreSQL']:.2f} | "
        f"{' | '.join(f'{100 * share:.1f}' for share in one.idle.values())} |"
        for workers, one in sorted(found, key=lambda pair: pair[0])
    ]
    least = min(one.per_s / alone / workers for workers, one in found)
    return [
        "## Workers",
        "",
        (
            f"An engine waits {engine_s} s for a sample and runs {AT_ONCE} together: "
            f"{AT_ONCE / engine_s:.1f} samples/s at most for each worker. One web process."
        ),
        "",
        (
            "| workers | samples/s | of linear | CPU ms per sample: web | worker | PostgreSQL | "
            "idle CPU % of a core: web | workers | PostgreSQL |"
        ),
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
        *rows,
        "",
        f"The least of linear is {least:.2f} (goal ≥ {LINEAR}: {verdict(least >= LINEAR)}).",
    ]


ONE, LOG = "one process", "web, log, worker"
APART = "two of these, each with a database and clients of its own"
STICKY = "two webs, a sample and its poll at one"
ROUND_ROBIN = "two webs, each request at the next"
#: What is measured in turn: the processes, and whether each request goes to the next web process.
PATHS: dict[str, dict[str, Any]] = {
    ONE: {"one": True},
    LOG: {},
    APART: {"clusters": 2},
    STICKY: {"webs": 2, "each_request": False},
    ROUND_ROBIN: {"webs": 2},
}
#: A process that has more to do does more of it at once: loads are for each web process.
SMALL, LARGE, ALONE = "64 for each web, 2 kB", "64 for each web, 25 kB", "1 in flight, 2 kB"
#: As fast at each web process, however many there are: what is left is what a second one adds.
PACED = "100 a second for each web, 2 kB"
LOADS: dict[str, dict[str, Any]] = {
    ALONE: {"in_flight": 1},
    SMALL: {"in_flight": 64},
    PACED: {"in_flight": 64, "per_s": 100.0},
    LARGE: {"in_flight": 64, "tokens": LARGE_TOKENS},
}


#: By load and path, one for each round.
Found = dict[tuple[str, str], list[Measured]]


def measure_paths(postgres: Postgres, names: Sequence[str], seconds: float, rounds: int) -> Found:
    """Paths in turn, so that the runs of one round have the same machine around them."""
    found: Found = {}
    for _, path in itertools.product(range(rounds), names):
        chosen = PATHS[path]
        with contextlib.ExitStack() as stack:
            webs, one = chosen.get("webs", 1), chosen.get("one", False)
            running = [
                stack.enter_context(cluster(postgres, 0.0, webs=webs, one=one))
                for _ in range(chosen.get("clusters", 1))
            ]
            for load, of_load in LOADS.items():
                if load not in (SMALL, PACED) and (path not in (ONE, LOG) or ONE not in names):
                    continue
                per_s = of_load.get("per_s")
                measured = asyncio.run(
                    measure_all(
                        running,
                        of_load["in_flight"] * webs,
                        seconds,
                        warm_s=2,
                        tokens=of_load.get("tokens", 100),
                        each_request=chosen.get("each_request", True),
                        per_s=None if per_s is None else per_s * webs,
                    )
                )
                found.setdefault((load, path), []).append(measured)
                say(f"{load}, {path}: {measured.per_s:.1f}/s {measured.cpu_ms}")
    return found


def path_lines(found: Found, rounds: int) -> list[str]:
    """What a sample costs on each path: medians."""
    lines = [
        f"The engine takes no time. {rounds} runs of each, in turn; medians.",
        "",
        "| load | path | samples/s | p05 ms | p50 ms | CPU ms per sample: web | worker | PostgreSQL | all |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    cpu = median_cpu(found)
    for load, path in sorted(found, key=lambda key: list(LOADS).index(key[0])):
        runs = found[load, path]
        per_s = statistics.median(run.per_s for run in runs)
        p05, p50 = (
            1000 * statistics.median(run.took_s[len(run.took_s) * part // 100] for run in runs)
            for part in (5, 50)
        )
        each_ms = cpu[load, path].values()
        lines.append(
            f"| {load} | {path} | {per_s:.1f} | {p05:.1f} | {p50:.1f} | "
            f"{' | '.join(f'{ms:.2f}' for ms in each_ms)} | {sum(each_ms):.2f} |"
        )
    return lines


def median_cpu(found: Found) -> dict[tuple[str, str], dict[str, float]]:
    return {
        key: {kind: statistics.median(run.cpu_ms[kind] for run in runs) for kind in runs[0].cpu_ms}
        for key, runs in found.items()
    }


def paths(postgres: Postgres, seconds: float, rounds: int) -> list[str]:
    """The one-process path and the log path, with one and with two web processes."""
    found = measure_paths(postgres, list(PATHS), seconds, rounds)
    cpu = median_cpu(found)
    rate = statistics.median(
        log.per_s / one.per_s for one, log in zip(found[LARGE, ONE], found[LARGE, LOG], strict=True)
    )
    more_cpu = sum(cpu[LARGE, LOG].values()) / sum(cpu[LARGE, ONE].values())
    return [
        "## The log path and the one-process path",
        "",
        *path_lines(found, rounds),
        "",
        (
            f"With bodies of 25 kB the log path has {rate:.2f} of the one-process rate (goal ≥ "
            f"{LARGE_RATE}: {verdict(rate >= LARGE_RATE)}), and needs {more_cpu:.2f} of its CPU."
        ),
        "",
        *web_lines(found),
    ]


def webs(postgres: Postgres, seconds: float, rounds: int) -> list[str]:
    """One web process, and two in three ways."""
    found = measure_paths(postgres, [path for path in PATHS if path != ONE], seconds, rounds)
    return [*path_lines(found, rounds), "", *web_lines(found)]


def web_lines(found: Found) -> list[str]:
    """What web processes need for a sample, by the number of them and the load balancer."""
    lines = []
    for load in (SMALL, PACED):
        web_ms = {
            path: [run.cpu_ms["web"] for run in found[load, path]]
            for path in (LOG, APART, STICKY, ROUND_ROBIN)
        }
        lines += [
            f"CPU of web processes for a sample, {load}; ratios are medians over the rounds:",
            "",
            "| | ms, least to most | of one | of two that share nothing |",
            "|---|--:|--:|--:|",
            *(
                f"| {path} | {min(each):.2f} to {max(each):.2f} | {_ratio(each, web_ms[LOG]):.2f} | "
                f"{_ratio(each, web_ms[APART]):.2f} |"
                for path, each in web_ms.items()
            ),
            "",
        ]
        wanted = LOADS[load].get("per_s")
        if wanted is not None and any(
            run.per_s < RATE_REACHED * wanted * PATHS[path].get("webs", 1)
            for path in (LOG, ROUND_ROBIN)
            for run in found[load, path]
        ):
            lines += ["The machine was too busy for this rate, so these are no comparison.", ""]
            continue
        of_one = _ratio(web_ms[ROUND_ROBIN], web_ms[LOG])
        own_ms = statistics.median(
            ms - sticky for ms, sticky in zip(web_ms[ROUND_ROBIN], web_ms[STICKY], strict=True)
        )
        lines += [
            (
                f"With round robin, two web processes need {of_one:.2f} of the CPU of one for a "
                f"sample (goal: within {SAME_CPU:.0%}: {verdict(of_one <= 1 + SAME_CPU)}). Round "
                f"robin itself costs {own_ms:+.2f} ms: what sticky sessions would save."
            ),
            "",
        ]
    return lines[:-1]


def _ratio(each: Sequence[float], of: Sequence[float]) -> float:
    """The median over the rounds: the machine is the same for both within a round."""
    return statistics.median(ms / other for ms, other in zip(each, of, strict=True))


def verdict(good: bool) -> str:
    return "met" if good else "missed"


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--engine-s", type=float, default=1.6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sections", default="workers,paths")
    parser.add_argument("--serve", choices=("one", "web", "worker"))
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--db")
    parser.add_argument("--storage")
    options = parser.parse_args()
    if options.serve == "worker":
        asyncio.run(work(options, options.folder))
        return
    if options.serve:
        make = serve_one if options.serve == "one" else serve_web
        bench_api.SERVERS["tinkex"] = functools.partial(make, options)
        bench_api.serve("tinkex", options.folder)
        return
    with postgres_server("max_connections=200") as postgres:
        sections = {
            "workers": lambda: scaling(postgres, options.engine_s, options.seconds),
            "paths": lambda: paths(postgres, options.seconds / 3, options.rounds),
            "webs": lambda: webs(postgres, options.seconds / 3, options.rounds),
        }
        lines = [
            reports.head(
                "Web processes, workers and PostgreSQL",
                f"python benchmarks/bench_scale_out.py {' '.join(sys.argv[1:])}".strip(),
                "PostgreSQL without fsync, simulated engines",
            ),
            "No GPU is involved.",
        ]
        for name in options.sections.split(","):
            lines += ["", *sections[name]()]
    name = "web_processes" if options.sections == "webs" else "scale_out"
    reports.write(name, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
