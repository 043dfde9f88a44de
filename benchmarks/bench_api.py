"""
CPU time of the web process per request, and whether it grows with the number in flight.

    python benchmarks/bench_api.py [--requests 4000] [--no-sdk]

The `Executor` completes work immediately. A plain HTTP client in another process keeps 1, 100 or 2,000
samples in flight; each is one submission and one result, both durable before the response. The
server's CPU time comes from /proc. The baseline is a small server that polls a table: its engine
looks every 100 ms, its API every 50 ms. A run through the official SDK is added for reference only,
because the SDK's own CPU time hides the server's.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import resource
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import uvicorn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import reports

import sdk_envs
from tinkex.server.executor import ServedModel
from tinkex.wire.codec import PROTOBUF_TYPE
from tinkex.wire.proto.frames_pb2 import Done, Order
from tinkex.wire.protobuf import encode_sample_response
from tinkex.wire.sampling import SampledSequence, SampleResponse

BASE = "bench/instant"
SDK = "0.36.0"
IN_FLIGHT = (1, 100, 2000)
CLOCK_HZ = os.sysconf("SC_CLK_TCK")
ENGINE_POLL_S, API_POLL_S = 0.1, 0.05
MAX_GROWTH, MAX_LATENCY = 1.3, 0.1

TOKENS = np.arange(16, dtype=np.int32)
RESULT = encode_sample_response(
    SampleResponse(
        sequences=[
            SampledSequence(
                "length", "", tokens_np=TOKENS, logprobs_np=np.full(16, -0.5, np.float32)
            )
        ]
    )
)

#: Runs in the SDK's environment; prints seconds and CPU seconds.
PROGRAM = """
import json, sys, time
import tinker
from tinker import types

base, count = json.loads(sys.argv[1])
sampler = tinker.ServiceClient().create_sampling_client(base_model=base)
prompt = types.ModelInput.from_ints(list(range(100)))
params = types.SamplingParams(max_tokens=16)
for _ in range(20):
    sampler.sample(prompt, 1, params).result()
began, cpu = time.perf_counter(), time.process_time()
for future in [sampler.sample(prompt, 1, params) for _ in range(count)]:
    future.result()
print(json.dumps([time.perf_counter() - began, time.process_time() - cpu]))
"""


class InstantExecutor:
    """An executor that completes all work immediately."""

    served = (ServedModel(name=BASE, folder=Path("/"), max_context_length=8192),)

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def ready(self, base_model: str) -> int:
        return 1

    async def run(self, base_model: str, work: Order, *, incarnation: int | None = None) -> Done:
        return Done(result=RESULT if work.HasField("sample") else b"{}")

    async def send(self, base_model: str, work: Order, **options: Any) -> asyncio.Future[Done]:
        answer: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        answer.set_result(await self.run(base_model, work, incarnation=options["incarnation"]))
        return answer

    def waiting_for(self, base_model: str) -> str | None:
        return None

    def stats(self, base_model: str) -> None:
        return None


def serve_instant(folder: Path) -> Any:
    from tinkex.server.app import create_app
    from tinkex.server.settings import Settings
    from tinkex.server.store import open_store

    chosen = Settings(data=str(folder))
    store = open_store(db_url=chosen.db_url, storage_url=chosen.storage_url, folder=chosen.folder)
    return create_app(chosen, InstantExecutor(), store)


def serve_polling(folder: Path) -> Any:
    """A table of requests that the engine and every waiting request poll."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    table = sqlite3.connect(folder / "queue.db", isolation_level=None)
    table.execute("PRAGMA journal_mode=WAL")
    table.execute("CREATE TABLE requests (id TEXT PRIMARY KEY, body BLOB, result BLOB)")

    async def engine() -> None:
        while True:
            waiting = table.execute("SELECT id FROM requests WHERE result IS NULL").fetchall()
            for (request_id,) in waiting:
                table.execute("UPDATE requests SET result=? WHERE id=?", (RESULT, request_id))
            await asyncio.sleep(ENGINE_POLL_S)

    async def submit(request: Request) -> Response:
        request_id = uuid.uuid4().hex
        table.execute(
            "INSERT INTO requests VALUES (?, ?, NULL)", (request_id, await request.body())
        )
        return JSONResponse({"request_id": request_id})

    async def retrieve(request: Request) -> Response:
        request_id = (await request.json())["request_id"]
        while True:
            (result,) = table.execute(
                "SELECT result FROM requests WHERE id=?", (request_id,)
            ).fetchone()
            if result is not None:
                return Response(result, media_type=PROTOBUF_TYPE)
            await asyncio.sleep(API_POLL_S)

    async def session(request: Request) -> Response:
        return JSONResponse({"session_id": "s", "sampling_session_id": "s:sample:0"})

    app = Starlette(
        routes=[
            Route("/api/v1/asample", submit, methods=["POST"]),
            Route("/api/v1/retrieve_future", retrieve, methods=["POST"]),
            Route("/api/v1/create_session", session, methods=["POST"]),
            Route("/api/v1/create_sampling_session", session, methods=["POST"]),
        ]
    )

    async def with_engine(scope: Any, receive: Any, send: Any) -> None:
        if not hasattr(app.state, "engine"):
            app.state.engine = asyncio.create_task(engine())
        await app(scope, receive, send)

    return with_engine


SERVERS = {"tinkex": serve_instant, "table": serve_polling}


def serve(kind: str, folder: Path) -> None:
    """The server's process."""
    from tinkex.server.process_setup import tuned_gc

    app = SERVERS[kind](folder)
    # As `tinkex.server.web_process` does.
    as_served = tuned_gc() if kind == "tinkex" else contextlib.nullcontext()
    lifespan = "on" if kind == "tinkex" else "off"
    config = uvicorn.Config(
        app, port=0, log_config=None, access_log=False, lifespan=lifespan, timeout_keep_alive=120
    )
    server = uvicorn.Server(config)

    async def run() -> None:
        async with as_served:
            serving = asyncio.create_task(server.serve())
            while not server.started:  # noqa: ASYNC110 (uvicorn only sets a flag)
                await asyncio.sleep(0.01)
            print(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", flush=True)
            await serving

    asyncio.run(run())


@dataclass(frozen=True)
class Server:
    url: str
    pid: int

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / CLOCK_HZ


@contextmanager
def started(kind: str, *, script: str = __file__, below: str = "") -> Iterator[Server]:
    """Runs the server of a script in its own process, with its data in a new folder."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, script, "--serve", kind, "--folder", str(Path(folder, below))]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout
        try:
            yield Server(process.stdout.readline().strip(), process.pid)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@dataclass(frozen=True)
class Measured:
    server: str
    in_flight: int
    requests: int
    per_s: float
    cpu_ms: float
    p50_ms: float
    p99_ms: float


class Load:
    """A plain HTTP client: submits a sample and fetches its result."""

    def __init__(self, http: aiohttp.ClientSession, sampler: str) -> None:
        self.http = http
        self.sampler = sampler
        self.numbers = itertools.count()
        #: How many different prompts there are.
        self.prompts = 1

    async def post(self, path: str, body: dict[str, Any], accept: str = "application/json") -> Any:
        sent = {"Content-Type": "application/json", "X-API-Key": "tml-bench", "Accept": accept}
        data = json.dumps(body).encode()
        async with self.http.post(f"/api/v1/{path}", data=data, headers=sent) as got:
            found = await got.read()
            assert got.status == 200, (got.status, found)
            return found

    async def sample(self) -> None:
        seq_id = next(self.numbers)
        tokens = [seq_id % self.prompts, *range(1, 100)]
        body = {
            "sampling_session_id": self.sampler,
            "seq_id": seq_id,
            "num_samples": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": tokens}]},
            "sampling_params": {"max_tokens": 16, "seed": 1},
        }
        accepted = json.loads(await self.post("asample", body))
        poll = {"request_id": accepted["request_id"], "allow_metadata_only": False}
        assert await self.post("retrieve_future", poll, PROTOBUF_TYPE) == RESULT

    async def keep(self, in_flight: int, requests: int) -> list[float]:
        """Runs `requests` samples, `in_flight` at a time; the seconds of each."""
        took: list[float] = []
        left = itertools.count(requests, -1)

        async def worker() -> None:
            while next(left) > 0:
                began = time.perf_counter()
                await self.sample()
                took.append(time.perf_counter() - began)

        await asyncio.gather(*(worker() for _ in range(in_flight)))
        return took


@asynccontextmanager
async def sampling(server: Server) -> AsyncIterator[Load]:
    """A client with a sampling session."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(server.url, connector=connector, timeout=timeout) as http:
        load = Load(http, "")
        body = {"tags": [], "user_metadata": {}, "sdk_version": SDK}
        session = json.loads(await load.post("create_session", body))["session_id"]
        wanted = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
        made = json.loads(await load.post("create_sampling_session", wanted))
        load.sampler = made["sampling_session_id"]
        yield load


async def measure(
    name: str, server: Server, in_flight: int, requests: int, *, prompts: int = 1
) -> Measured:
    async with sampling(server) as load:
        load.prompts = prompts
        # Warm up connections and caches before the measurement.
        await load.keep(in_flight, max(in_flight, min(200, requests // 4)))
        cpu_s, began = server.cpu_s(), time.perf_counter()
        took = sorted(await load.keep(in_flight, requests))
        wall_s = time.perf_counter() - began
        used_s = server.cpu_s() - cpu_s
    return Measured(
        server=name,
        in_flight=in_flight,
        requests=len(took),
        per_s=len(took) / wall_s,
        cpu_ms=1000 * used_s / len(took),
        p50_ms=1000 * statistics.median(took),
        p99_ms=1000 * took[int(0.99 * len(took))],
    )


def through_sdk(server: Server, requests: int) -> tuple[float, float, float]:
    """Samples per second, and CPU ms per sample of the server and of the SDK."""
    env = {**os.environ, "TINKER_BASE_URL": server.url, "TINKER_API_KEY": "tml-bench"}
    cpu_s = server.cpu_s()
    done = subprocess.run(
        [sdk_envs.ensure(SDK), "-c", PROGRAM, json.dumps([BASE, requests])],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    wall_s, sdk_s = json.loads(done.stdout.splitlines()[-1])
    return (
        requests / wall_s,
        1000 * (server.cpu_s() - cpu_s) / requests,
        1000 * sdk_s / requests,
    )


def report(rows: list[Measured], sdk: tuple[float, float, float] | None, command: str) -> str:
    at = {(row.server, row.in_flight): row for row in rows}
    growth = at["tinkex", 2000].cpu_ms / at["tinkex", 100].cpu_ms
    latency = at["tinkex", 1].p50_ms / at["table", 1].p50_ms
    parser = "httptools" if find_spec("httptools") else "h11"
    head = reports.head(
        "CPU time of the web process per request",
        command,
        f"uvicorn {version('uvicorn')} with {parser}",
    )
    what = (
        "One request is a submission (100 prompt tokens) and its result (16 tokens), both durable "
        "before the response; the engine takes no time. CPU time is that of the web process."
    )
    cost = (
        f"CPU time per request at 2,000 in flight relative to 100: {growth:.2f} (goal ≤ {MAX_GROWTH}: "
        f"{'met' if growth <= MAX_GROWTH else 'missed'})."
    )
    wait = (
        f"Latency at 1 in flight relative to the server that polls a table: {latency:.3f} (goal ≤ "
        f"{MAX_LATENCY}: {'met' if latency <= MAX_LATENCY else 'missed'})."
    )
    table = [
        f"| {row.server} | {row.in_flight} | {row.requests} | {row.per_s:.0f} | "
        f"{row.cpu_ms:.2f} | {row.p50_ms:.1f} | {row.p99_ms:.1f} |"
        for row in rows
    ]
    lines = [
        *(head, what, ""),
        "| server | in flight | requests | requests/s | server CPU ms per request | p50 ms | p99 ms |",
        "|---|---:|---:|---:|---:|---:|---:|",
        *(*table, "", cost, "", wait),
    ]
    if sdk is not None:
        through = (
            f"Through the official SDK {SDK}: {sdk[0]:.0f} samples/s; per sample {sdk[1]:.2f} ms of "
            f"server CPU and {sdk[2]:.2f} ms of SDK CPU."
        )
        lines += ["", through]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--no-sdk", action="store_true")
    parser.add_argument("--serve", choices=SERVERS)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 20_000)), hard))
    if options.serve:
        serve(options.serve, options.folder)
        return
    rows = []
    with started("tinkex") as server:
        for in_flight in IN_FLIGHT:
            requests = options.requests // 8 if in_flight == 1 else options.requests
            rows.append(asyncio.run(measure("tinkex", server, in_flight, requests)))
            print(rows[-1])
        sdk = None if options.no_sdk else through_sdk(server, options.requests // 8)
    with started("table") as server:
        for in_flight in IN_FLIGHT[:2]:  # more would fill a core with polls alone
            requests = 40 if in_flight == 1 else 1000
            rows.append(asyncio.run(measure("table", server, in_flight, requests)))
            print(rows[-1])
    words = [f"--requests {options.requests}", *(["--no-sdk"] if options.no_sdk else [])]
    text = report(rows, sdk, " ".join(["python benchmarks/bench_api.py", *words]))
    reports.write("api", text)


if __name__ == "__main__":
    main()
