"""
What does it cost that nothing is lost?

    python benchmarks/bench_durability.py [--pairs 7] [--rounds 5] [--no-training]

Training: two servers with the embedded model take turns of five steps. One is as it comes, except
that it snapshots after every 10 requests instead of 200: so each of its turns has a whole one. The
other has its data folder in memory, where forcing a commit to disk does nothing, and takes no
snapshots: nothing of it outlives the machine.

Store: small requests are accepted by 200 at a time, with group commit and with a commit for each
(the writer takes one write at a time), in turns, on SQLite and on PostgreSQL with fsync on.

HTTP: two web processes that differ in the same way, one sample in flight and 200, in turns.
"""

import argparse
import asyncio
import datetime
import os
import platform
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

import tinkex
from postgres import binaries, postgres_server
from processes import children
from serving import Server, serving
from tinkex import types
from tinkex.models.resolve import DEFAULT_MODEL
from tinkex.server.store import Model, NewRequest, Store, group_commit, open_store

T = TypeVar("T")

MEMORY = Path("/dev/shm")
STEPS, ROWS, TOKENS = 5, 4, 128
# One in each turn, at the same place: with 200, as by default, it would be in one of twenty.
SNAPSHOT_STEPS = 2 * STEPS
# Together with its creation half a snapshot's worth, so that it falls in the middle of each turn,
# and is written before the other side begins.
WARM_UP_STEPS = 2
CONCURRENT = 200
LEAST_TRAINING, LEAST_ACCEPTED, LEAST_HTTP = 0.95, 5.0, 1.0
# Two equal servers differ by as much between two runs on a busy machine.
NOISE = 0.05


@dataclass(frozen=True)
class Pair:
    """The same thing measured on both sides, in turns; more is better."""

    name: str
    unit: str
    durable: list[float]
    other: list[float]
    least: float

    @property
    def ratio(self) -> float:
        """Of the medians: one slow moment of the machine is not a side's fault."""
        return statistics.median(self.durable) / statistics.median(self.other)


def in_turns(rounds: int, sides: Sequence[Callable[[], T]]) -> list[list[T]]:
    """Each side once a round; who begins changes, so that neither has the better place."""
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
    """What some steps took."""

    tokens: int
    wall_s: float
    #: Processor time.
    web_s: float
    engine_s: float
    #: From the answer to one optimizer step to that of the next.
    step_s: list[float]


class Trainer:
    """A client that trains as people do: the next batch is sent while this one is computed."""

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
        """The same, and one was begun and ended meanwhile."""
        before = self.snapshots()
        turn = self.run()
        assert len(self.snapshots() - before) == 1, "not one snapshot in this turn"
        return turn

    def snapshots(self) -> set[Path]:
        """Those that are whole; the newest and the one before it are kept."""
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
    """And what there is to know about it."""
    with ExitStack() as stack:
        disk = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if in_memory(disk):
            sys.exit(f"{disk.parent} is in memory; set TMPDIR to a folder on a disk.")
        memory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=MEMORY)))
        durable = stack.enter_context(trainer(disk, SNAPSHOT_STEPS))
        other = stack.enter_context(trainer(memory, 10**9))
        on, off = in_turns(pairs, [durable.run_with_snapshot, other.run])
        assert not other.snapshots()
    spent = [[turn.tokens / (turn.web_s + turn.engine_s) for turn in turns] for turns in (on, off)]
    bare = [turn.tokens / turn.engine_s for turn in off]
    clock = [[turn.tokens / turn.wall_s for turn in turns] for turns in (on, off)]
    found = [
        Pair("training, embedded model", "tokens/s", clock[0], clock[1], LEAST_TRAINING),
        Pair("the same, of processor time", "tokens/CPU s", spent[0], spent[1], LEAST_TRAINING),
        Pair("the same, beside the engine alone", "tokens/CPU s", spent[0], bare, LEAST_TRAINING),
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
        f"our client; a snapshot in each turn, after {SNAPSHOT_STEPS} requests (by default after "
        "200: this costs twenty times as much), begun and ended within it. Beside it: the data "
        "folder in memory and no snapshots. Rows are written there too, so the third line is "
        "beside what the engine alone spent, as if HTTP, checking and rows cost nothing. "
        f"The web process spent {web_ms[0]:.0f} ms on a step, without snapshots {web_ms[1]:.0f}. "
        f"A step took {usual[0]:.2f} s, beside it {usual[1]:.2f}; the slowest of a turn "
        f"{slowest[0]:.2f} s, beside it {slowest[1]:.2f} (medians of the turns)."
    )


# -- the store ------------------------------------------------------------------------------------


@contextmanager
def a_commit_each() -> Iterator[None]:
    """The writer takes one write at a time."""
    together, group_commit.MAX_GROUP = group_commit.MAX_GROUP, 1
    try:
        yield
    finally:
        group_commit.MAX_GROUP = together


class Acceptor:
    """Accepts small steps of models, each model a new one."""

    def __init__(self, store: Store, runner: asyncio.Runner, requests: int) -> None:
        self._store = store
        self._runner = runner
        self._requests = requests
        self._models = 0

    def grouped(self) -> float:
        return self._runner.run(self._accept())

    def each(self) -> float:
        with a_commit_each():
            return self._runner.run(self._accept())

    async def _accept(self) -> float:
        """Requests a second."""
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

    def _step(self, model_id: str, seq_id: int) -> NewRequest:
        return NewRequest(
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
    return Pair(title, "requests/s", grouped, each, LEAST_ACCEPTED)


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
    """A web process of this file's own."""
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
    The inverse of the seconds that each lone request took, of each server.

    Every request is a turn: a lone one waits for other processes more often than it works, and
    longer turns of two equal servers differ by a third on a busy machine.
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
            """Requests a second."""
            return asyncio.run(bench_api.measure("", server, CONCURRENT, requests)).per_s

        lone = asyncio.run(one_by_one([grouped, each], rounds * requests // 8))
        many = in_turns(rounds, [partial(once, side) for side in (grouped, each)])
        return [
            Pair(f"samples over HTTP, {in_flight} in flight", "requests/s", *found, LEAST_HTTP)
            for in_flight, found in ((1, lone), (CONCURRENT, many))
        ]


# -- the report -----------------------------------------------------------------------------------

HEAD = (
    "| what | unit | as it is | beside it | ratio | bar | |",
    "|---|---|---:|---:|---:|---:|---|",
)
ACCEPTING = (
    f"Accepting: small requests from {CONCURRENT} tasks, each answered when it is on disk. "
    "Beside it: a commit for each request. PostgreSQL has fsync on."
)
HTTP = (
    "HTTP: a submission and its result, both durable, through a web process of its own. Beside it: "
    "a web process that commits each write by itself. For one in flight, the inverse of the "
    "latency of each request, sent to both in turns; there a group is one write."
)


def met(pair: Pair) -> bool:
    noise = NOISE if pair.least == LEAST_HTTP else 0.0
    return pair.ratio >= pair.least - noise


def row(pair: Pair) -> str:
    spread = [
        f"{statistics.median(side):,.0f} ({min(side):,.0f} to {max(side):,.0f})"
        for side in (pair.durable, pair.other)
    ]
    bar = f"≥ {pair.least:g}" + (f" (noise {NOISE:g})" if pair.least == LEAST_HTTP else "")
    verdict = "met" if met(pair) else "missed"
    return f"| {pair.name} | {pair.unit} | {spread[0]} | {spread[1]} | {pair.ratio:.2f} | {bar} | {verdict} |"


def report(pairs: Sequence[Pair], training: str | None, command: str) -> str:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    about = (
        f"{today}, commit {commit}, {os.cpu_count()} CPU cores shared with other work (load "
        f"{os.getloadavg()[0]:.1f}), {platform.system()} {platform.machine()}, "
        f"Python {platform.python_version()}; `{command}`"
    )
    lines = [
        "# What durability costs",
        about,
        "Both sides run in turns in one run; medians, and the slowest and the fastest turn.",
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
    parser.add_argument("--out", type=Path, help="where the report goes")
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
    print(text)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    name = f"durability_{os.cpu_count()}cpu_{today}.md"
    out = options.out or ROOT / "benchmarks" / "results" / name
    out.parent.mkdir(exist_ok=True)
    out.write_text(text)
    if missed := [pair.name for pair in pairs if not met(pair)]:
        sys.exit(f"missed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
