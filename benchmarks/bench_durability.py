"""
The cost of durability: training throughput, accepted requests per second, and HTTP latency.

    python benchmarks/bench_durability.py [--pairs 7] [--rounds 5] [--no-training]

Training: two servers with the embedded model run five steps each in alternating turns. The durable
one has default settings, except that it writes a snapshot every 10 requests instead of 200, so each
turn has exactly one. The other has its data folder in memory, where fsync does nothing, and writes no
snapshots.

Store: 200 tasks accept small requests, with group commit and with one commit per request, in turns,
on SQLite and on PostgreSQL with fsync on.

HTTP: two web processes that differ in the same way, with 1 and with 200 samples in flight, in turns.
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

import bench_api
import reports

import tinkex
from postgres import binaries, postgres_server
from processes import children
from serving import Server, serving
from tinkex import types
from tinkex.models.resolve import DEFAULT_MODEL
from tinkex.server.queued_request import QueuedRequest
from tinkex.server.store import Model, Store, group_commit, open_store

T = TypeVar("T")

MEMORY = Path("/dev/shm")
STEPS, ROWS, TOKENS = 5, 4, 128
# One snapshot in each turn, at the same step; with the default of 200 it would be one in 20 turns.
SNAPSHOT_STEPS = 2 * STEPS
# With the creation of the model, half the requests between two snapshots: the snapshot then falls into
# the middle of each turn and is written before the other side begins.
WARM_UP_STEPS = 2
CONCURRENT = 200
MIN_TRAINING, MIN_ACCEPTED, MIN_HTTP = 0.95, 5.0, 1.0
# The difference of two equal servers between two runs on a busy machine.
NOISE = 0.05


@dataclass(frozen=True)
class Pair:
    """One quantity, measured on both sides in turns; higher is better."""

    name: str
    unit: str
    durable: list[float]
    other: list[float]
    #: The goal: the smallest allowed ratio.
    min_ratio: float

    @property
    def ratio(self) -> float:
        """The ratio of the medians, which a slow moment of the machine does not change."""
        return statistics.median(self.durable) / statistics.median(self.other)


def in_turns(rounds: int, sides: Sequence[Callable[[], T]]) -> list[list[T]]:
    """Runs each side once per round, in alternating order."""
    found: list[list[T]] = [[] for _ in sides]
    for number in range(rounds):
        order = range(len(sides)) if number % 2 == 0 else reversed(range(len(sides)))
        for side in order:
            found[side].append(sides[side]())
    return found


# -- training -------------------------------------------------------------------------------------


def datum(row: int) -> types.Datum:
    tokens = [(17 * row + 31 * place) % 5000 + 10 for place in range(TOKENS + 1)]
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * TOKENS},
    )


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Times of the steps of one turn."""

    tokens: int
    wall_s: float
    #: CPU time.
    web_s: float
    engine_s: float
    #: Times between the results of two optimizer steps.
    step_s: list[float]


class Trainer:
    """A client that submits all batches of a turn before it waits for the first."""

    def __init__(self, server: Server) -> None:
        self._service = tinkex.ServiceClient(base_url=server.url)
        self._training = self._service.create_lora_training_client(DEFAULT_MODEL, rank=32, seed=1)
        self._data = [datum(row) for row in range(ROWS)]
        self._snapshots = server.data / "snapshots"
        self._web = children(server.process.pid)
        self._engines = [engine for one in self._web for engine in children(one)]
        self.run(WARM_UP_STEPS)

    def run(self, steps: int = STEPS) -> Turn:
        web_s, engine_s = cpu_s(self._web), cpu_s(self._engines)
        began = time.perf_counter()
        sent = [
            (
                self._training.forward_backward(self._data, "cross_entropy"),
                self._training.optim_step(types.AdamParams(learning_rate=1e-4)),
            )
            for _ in range(steps)
        ]
        answered = [began]
        for passed, stepped in sent:
            passed.result()
            stepped.result()
            answered.append(time.perf_counter())
        return Turn(
            tokens=steps * ROWS * TOKENS,
            wall_s=answered[-1] - began,
            web_s=cpu_s(self._web) - web_s,
            engine_s=cpu_s(self._engines) - engine_s,
            step_s=[after - before for before, after in pairwise(answered)],
        )

    def run_with_snapshot(self) -> Turn:
        """Runs a turn and checks that one snapshot was written during it."""
        before = self.snapshots()
        turn = self.run()
        assert len(self.snapshots() - before) == 1, "this turn did not write exactly one snapshot"
        return turn

    def snapshots(self) -> set[Path]:
        """Complete snapshots; the server keeps the newest two."""
        return set(self._snapshots.glob("*/[!.]*"))

    def close(self) -> None:
        self._service.close("success").result()


def cpu_s(pids: Sequence[int]) -> float:
    return sum(bench_api.Server("", pid).cpu_s() for pid in pids)


@contextmanager
def trainer(folder: Path, snapshot_steps: int) -> Iterator[Trainer]:
    folder.joinpath("tinkex.toml").write_text(f"snapshot_steps = {snapshot_steps}\n")
    with serving(DEFAULT_MODEL, data=folder) as server:
        client = Trainer(server)
        yield client
        client.close()


def measure_training(pairs: int) -> tuple[list[Pair], str]:
    """The pairs, and a description for the report."""
    with ExitStack() as stack:
        disk = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if in_memory(disk):
            sys.exit(f"{disk.parent} is in memory. Set TMPDIR to a folder on a disk.")
        memory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=MEMORY)))
        durable = stack.enter_context(trainer(disk, SNAPSHOT_STEPS))
        other = stack.enter_context(trainer(memory, 10**9))
        on, off = in_turns(pairs, [durable.run_with_snapshot, other.run])
        assert not other.snapshots()
    spent = [[turn.tokens / (turn.web_s + turn.engine_s) for turn in turns] for turns in (on, off)]
    bare = [turn.tokens / turn.engine_s for turn in off]
    clock = [[turn.tokens / turn.wall_s for turn in turns] for turns in (on, off)]
    found = [
        Pair("training, embedded model", "tokens/s", clock[0], clock[1], MIN_TRAINING),
        Pair("the same, per CPU second", "tokens/CPU s", spent[0], spent[1], MIN_TRAINING),
        Pair(
            "the same, relative to the engine alone", "tokens/CPU s", spent[0], bare, MIN_TRAINING
        ),
    ]
    return found, about_training(on, off)


def in_memory(folder: Path) -> bool:
    found = subprocess.run(
        ["stat", "--file-system", "--format=%T", folder],
        capture_output=True,
        text=True,
        check=True,
    )
    return found.stdout.strip() in ("tmpfs", "ramfs")


def about_training(on: Sequence[Turn], off: Sequence[Turn]) -> str:
    usual, slowest = (
        [statistics.median(summary(turn.step_s) for turn in turns) for turns in (on, off)]
        for summary in (statistics.median, max)
    )
    web_ms = [statistics.median(1000 * turn.web_s / STEPS for turn in turns) for turns in (on, off)]
    return (
        f"Training: {ROWS} x {TOKENS} tokens, rank 32, {STEPS} steps a turn, one thread, through "
        f"our client; each turn writes one snapshot, after {SNAPSHOT_STEPS} requests (the default is "
        "200, which costs a twentieth). Baseline: the data folder in memory and no snapshots. The "
        "baseline writes rows too, so the third line compares with the CPU time of the engine alone. "
        f"The web process used {web_ms[0]:.0f} ms per step, baseline {web_ms[1]:.0f}. "
        f"A step took {usual[0]:.2f} s, baseline {usual[1]:.2f}; the slowest step of a turn "
        f"{slowest[0]:.2f} s, baseline {slowest[1]:.2f} (medians of the turns)."
    )


# -- the store ------------------------------------------------------------------------------------


@contextmanager
def one_commit_per_request() -> Iterator[None]:
    """Limits the group commit to one write per transaction."""
    together, group_commit.MAX_GROUP = group_commit.MAX_GROUP, 1
    try:
        yield
    finally:
        group_commit.MAX_GROUP = together


class Acceptor:
    """Accepts small steps of a new model in each turn."""

    def __init__(self, store: Store, runner: asyncio.Runner, requests: int) -> None:
        self._store = store
        self._runner = runner
        self._requests = requests
        self._models = 0

    def grouped(self) -> float:
        return self._runner.run(self._accept())

    def each(self) -> float:
        with one_commit_per_request():
            return self._runner.run(self._accept())

    async def _accept(self) -> float:
        """Requests per second."""
        model_id = await self._model()
        numbers = iter(range(1, self._requests + 1))

        async def worker() -> None:
            for seq_id in numbers:
                await self._store.requests.accept(self._step(model_id, seq_id))

        began = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(CONCURRENT)))
        return self._requests / (time.perf_counter() - began)

    async def _model(self) -> str:
        session = await self._store.sessions.create_session(
            owner="local",
            sdk_version=None,
            tags=[],
            user_metadata={},
            project_id=None,
            display_name=None,
            idempotency_key=None,
        )
        model = Model(
            model_id=f"{session.session_id}:train:0",
            owner="local",
            session_id=session.session_id,
            base_model="b",
            lora_config={},
            optimizer_config={},
            user_metadata=None,
            created_s=time.time(),
        )
        await self._store.models.create_model(
            model=model, model_seq_id=0, request=self._step(model.model_id, 0)
        )
        return model.model_id

    def _step(self, model_id: str, seq_id: int) -> QueuedRequest:
        return QueuedRequest(
            owner="local",
            kind="optim_step",
            base_model="b",
            payload=b'{"adam_params":{"learning_rate":0.0001}}',
            model_id=model_id,
            seq_id=seq_id,
        )


def measure_store(name: str, url: str, folder: Path, rounds: int, requests: int) -> Pair:
    store = open_store(db_url=url, storage_url=str(folder), folder=folder)
    try:
        with asyncio.Runner() as runner:
            acceptor = Acceptor(store, runner, requests)
            acceptor.grouped()
            grouped, each = in_turns(rounds, [acceptor.grouped, acceptor.each])
    finally:
        store.close()
    title = f"accepting at {CONCURRENT}, {name}"
    return Pair(title, "requests/s", grouped, each, MIN_ACCEPTED)


def measure_stores(rounds: int, requests: int) -> list[Pair]:
    found = []
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{Path(folder) / 'tinkex.db'}"
        found.append(measure_store("SQLite", url, Path(folder), rounds, requests))
    if binaries() is not None:
        with (
            tempfile.TemporaryDirectory() as folder,
            postgres_server("fsync=on", "full_page_writes=on") as running,
        ):
            url = running.database()
            found.append(measure_store("PostgreSQL", url, Path(folder), rounds, requests))
    return found


# -- HTTP -----------------------------------------------------------------------------------------


@contextmanager
def started(kind: str) -> Iterator[bench_api.Server]:
    """Runs a web process of `bench_api`."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--serve", kind, "--folder", folder]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout
        try:
            yield bench_api.Server(process.stdout.readline().strip(), process.pid)
        finally:
            process.terminate()
            process.wait(30)
            process.stdout.close()


async def one_by_one(servers: Sequence[bench_api.Server], count: int) -> list[list[float]]:
    """
    The inverse latency of single requests, for each server.

    Servers alternate with every request: with longer turns two equal servers differ by a third on a
    busy machine, because a single request mostly waits for other processes.
    """
    async with AsyncExitStack() as stack:
        loads = [await stack.enter_async_context(bench_api.sampling(one)) for one in servers]
        for load in loads:
            await load.keep(1, 20)
        found: list[list[float]] = [[] for _ in loads]
        for number in range(count):
            for side in range(len(loads)) if number % 2 == 0 else reversed(range(len(loads))):
                found[side] += [1 / took for took in await loads[side].keep(1, 1)]
    return found


def measure_http(rounds: int, requests: int) -> list[Pair]:
    with started("group") as grouped, started("each") as each:

        def once(server: bench_api.Server) -> float:
            """Requests per second."""
            return asyncio.run(bench_api.measure("", server, CONCURRENT, requests)).per_s

        single = asyncio.run(one_by_one([grouped, each], rounds * requests // 8))
        many = in_turns(rounds, [partial(once, side) for side in (grouped, each)])
        return [
            Pair(f"samples over HTTP, {in_flight} in flight", "requests/s", *found, MIN_HTTP)
            for in_flight, found in ((1, single), (CONCURRENT, many))
        ]


# -- the report -----------------------------------------------------------------------------------

HEAD = (
    "| quantity | unit | durable | baseline | ratio | goal | |",
    "|---|---|---:|---:|---:|---:|---|",
)
ACCEPTING = (
    f"Accepting: small requests from {CONCURRENT} tasks, each acknowledged when it is on disk. "
    "Baseline: one commit per request. PostgreSQL has fsync on."
)
HTTP = (
    "HTTP: a submission and its result, both durable, through a web process. Baseline: a web process "
    "with one commit per write. With one sample in flight, the inverse latency of each request, "
    "sent to both in turns; there each group has one write."
)


def met(pair: Pair) -> bool:
    noise = NOISE if pair.min_ratio == MIN_HTTP else 0.0
    return pair.ratio >= pair.min_ratio - noise


def row(pair: Pair) -> str:
    spread = [
        f"{statistics.median(side):,.0f} ({min(side):,.0f} to {max(side):,.0f})"
        for side in (pair.durable, pair.other)
    ]
    goal = f"≥ {pair.min_ratio:g}" + (f" (noise {NOISE:g})" if pair.min_ratio == MIN_HTTP else "")
    verdict = "met" if met(pair) else "missed"
    return f"| {pair.name} | {pair.unit} | {spread[0]} | {spread[1]} | {pair.ratio:.2f} | {goal} | {verdict} |"


def report(pairs: Sequence[Pair], training: str | None, command: str) -> str:
    lines = [
        reports.head("The cost of durability", command).rstrip(),
        "Both sides alternate within one run; medians, with the slowest and the fastest turn.",
        "\n".join([*HEAD, *(row(pair) for pair in pairs)]),
        ACCEPTING,
        HTTP,
    ]
    if training is not None:
        lines.append(training)
    return "\n\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=7, help="turns of training")
    parser.add_argument("--rounds", type=int, default=5, help="turns of everything else")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--no-training", action="store_true")
    parser.add_argument("--only-training", action="store_true")
    parser.add_argument("--out", type=Path, help="path of the report")
    parser.add_argument("--serve", choices=["group", "each"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        if options.serve == "each":
            group_commit.MAX_GROUP = 1
        bench_api.serve("tinkex", options.folder)
        return
    pairs: list[Pair] = []
    training = None
    if not options.no_training:
        pairs, training = measure_training(options.pairs)
    if not options.only_training:
        pairs += measure_stores(options.rounds, options.requests)
        pairs += measure_http(options.rounds, options.requests)
    command = " ".join(["python benchmarks/bench_durability.py", *sys.argv[1:]])
    text = report(pairs, training, command)
    reports.write("durability", text, options.out)
    if missed := [pair.name for pair in pairs if not met(pair)]:
        sys.exit(f"missed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
