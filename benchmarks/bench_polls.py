"""
The CPU cost of waiting clients, and of one shared poll compared with one poll per sample.

    python benchmarks/bench_polls.py [--clients 2000] [--samples 500] [--http h11] [--loop asyncio]

The `Executor` completes work immediately or never, so only the web process is measured: its CPU time
from /proc while many long polls are open, and while they time out and are sent again by a plain HTTP
client. Then the official SDK samples with `retrieve_future` alone and with `retrieve_futures`.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import reports

import sdk_envs
from tinkex.server.executor import ServedModel
from tinkex.wire.proto.frames_pb2 import Done, Order

BASE = "bench/instant"
SDK = "0.36.0"
HELD_S = 20.0
ROUNDS = 1
CLONE = 10**9
#: `max_tokens` of a sample that never finishes.
ENDLESS = 7_000
#: `max_tokens` of a sample that takes several polls, its seconds, and the shorter long poll for it.
SLOW, SLOW_S, SLOW_HELD_S = 600, 6.0, 2.0
QUICK = 4
DRAWS = 3
CLOCK_HZ = os.sysconf("SC_CLK_TCK")

#: Runs in the SDK's environment.
PROGRAM = """
import json, sys, time
import tinker
from tinker import types

base, count, rounds, tokens = json.loads(sys.argv[1])
sampler = tinker.ServiceClient().create_sampling_client(base_model=base)
prompt = types.ModelInput.from_ints(list(range(100)))
for _ in range(20):
    sampler.sample(prompt, 1, types.SamplingParams(max_tokens=4)).result()
params = types.SamplingParams(max_tokens=tokens)
print("ready", flush=True)
for _ in range(rounds):
    sys.stdin.readline()
    began_s, cpu_s = time.perf_counter(), time.process_time()
    for future in [sampler.sample(prompt, 1, params) for _ in range(count)]:
        future.result()
    print(json.dumps([time.perf_counter() - began_s, time.process_time() - cpu_s]), flush=True)
"""


class Instant:
    """An executor without an engine."""

    def __init__(self) -> None:
        self.served = (ServedModel(name=BASE, folder=Path("/"), max_context_length=8192),)
        self._answer = _answer()

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def ready(self, base_model: str) -> int:
        return 1

    async def run(self, base_model: str, work: Order, *, incarnation: int | None = None) -> Done:
        if b'"max_tokens":%d' % ENDLESS in work.sample.payload.inline:
            await asyncio.Event().wait()
        if b'"max_tokens":%d' % SLOW in work.sample.payload.inline:
            await asyncio.sleep(SLOW_S)
        return Done(result=self._answer)

    async def send(self, base_model: str, work: Order, **options: Any) -> asyncio.Future[Done]:
        return asyncio.ensure_future(self.run(base_model, work, incarnation=options["incarnation"]))

    def waiting_for(self, base_model: str) -> str | None:
        return None

    def stats(self, base_model: str) -> None:
        return None


def _answer() -> bytes:
    import numpy as np

    from tinkex.wire.protobuf import encode_sample_response
    from tinkex.wire.sampling import SampledSequence, SampleResponse

    tokens, logprobs = np.arange(4, dtype=np.int32), np.zeros(4, np.float32)
    sequence = SampledSequence("length", "", tokens_np=tokens, logprobs_np=logprobs)
    return encode_sample_response(SampleResponse(sequences=[sequence]))


def serve(folder: Path, *, http: str, loop: str, single: bool, held_s: float) -> None:
    """Runs the web process."""
    import uvicorn

    from tinkex.server.app import create_app
    from tinkex.server.settings import Settings
    from tinkex.server.store import open_store
    from tinkex.wire import sdk_versions

    if single:
        sdk_versions._CLIENT_CONFIG = tuple(
            row
            for row in sdk_versions._CLIENT_CONFIG
            if "sample_use_retrieve_futures" not in row[2]
        )
    settings = Settings(data=str(folder), long_poll_s=held_s)
    store = open_store(
        db_url=settings.db_url, storage_url=settings.storage_url, folder=settings.folder
    )
    config = uvicorn.Config(
        create_app(settings, Instant(), store),
        port=0,
        http=http,
        loop=loop,
        lifespan="on",
        log_config=None,
        access_log=False,
        backlog=4096,
        timeout_keep_alive=120,
        server_header=False,
    )
    server = _ServerClass(config)
    server.run()
    store.close()


def _server_class() -> type:
    import uvicorn

    class PortPrinting(uvicorn.Server):
        """Prints its port to standard output."""

        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            print(self.servers[0].sockets[0].getsockname()[1], flush=True)

    return PortPrinting


@dataclass
class Server:
    process: "subprocess.Popen[str]"
    port: int

    def cpu_s(self) -> float:
        """CPU seconds of all threads of the process so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / CLOCK_HZ

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


def started(
    folder: str, options: argparse.Namespace, *, single: bool = False, held_s: float = HELD_S
) -> Server:
    command = [sys.executable, __file__, "--serve", folder, "--http", options.http]
    command += ["--loop", options.loop, "--held", str(held_s), *(["--single"] if single else [])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    return Server(process=process, port=int(process.stdout.readline()))


class Connection:
    """A minimal HTTP client for one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, port: int) -> "Connection":
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def post(self, path: str, body: Any) -> tuple[int, bytes]:
        data = json.dumps(body).encode()
        head = (
            f"POST /api/v1/{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        )
        self._writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        head_bytes = await self._reader.readuntil(b"\r\n\r\n")
        status = int(head_bytes[9:12])
        length = int(head_bytes.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        return status, await self._reader.readexactly(length)

    def close(self) -> None:
        self._writer.close()


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """The CPU cost of many waiting clients."""

    what: str
    held_ms_per_s: float
    repoll_ms: float


async def create_sampler(connection: Connection) -> str:
    session = {"tags": [], "user_metadata": {}, "sdk_version": SDK}
    session_id = json.loads((await connection.post("create_session", session))[1])["session_id"]
    sampler = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": BASE}
    made = await connection.post("create_sampling_session", sampler)
    return str(json.loads(made[1])["sampling_session_id"])


async def waiting(server: Server, clients: int, *, batched: bool) -> Waiting:
    """Measures clients that each have one endless sample and one long poll."""
    connections = [await Connection.open(server.port) for _ in range(clients)]
    sampler = await create_sampler(connections[0])

    async def begin(number: int, connection: Connection) -> dict[str, Any]:
        sample = {
            "prompt": {"chunks": [{"tokens": [1, 2, 3]}]},
            "sampling_params": {"max_tokens": ENDLESS},
            "sampling_session_id": sampler,
            "seq_id": number * CLONE,
        }
        status, body = await connection.post("asample", sample)
        assert status == 200, body
        if not batched:
            return {"request_id": json.loads(body)["request_id"]}
        target = {"sampling_session_id": sampler, "cloned_sampler_id": number}
        return {"target": {"type": "sampling_session", **target}, "prev_cursor": 0}

    bodies = [await begin(number, connection) for number, connection in enumerate(connections)]
    path, expected = ("retrieve_futures", 200) if batched else ("retrieve_future", 408)

    async def poll_on(connection: Connection, body: dict[str, Any]) -> None:
        for _ in range(ROUNDS + 1):
            status, answer = await connection.post(path, body)
            assert status == expected, answer

    polling = [
        asyncio.create_task(poll_on(*pair)) for pair in zip(connections, bodies, strict=True)
    ]
    # All polls are open: the first round of submissions is over, and no poll has timed out yet.
    await asyncio.sleep(HELD_S * 0.6)
    before_s = server.cpu_s()
    await asyncio.sleep(HELD_S / 4)
    held_s = server.cpu_s() - before_s
    await asyncio.gather(*polling)
    spent_s = server.cpu_s() - before_s
    for connection in connections:
        connection.close()
    # The last round answers polls and opens none; it counts as half a round.
    return Waiting(
        what=f"{clients} polls of `{path}`",
        held_ms_per_s=held_s / (HELD_S / 4) * 1000,
        repoll_ms=spent_s / (clients * (ROUNDS + 0.5)) * 1000,
    )


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Samples through the official SDK; medians of the rounds."""

    what: str
    wall_s: float
    client_cpu_s: float
    server_cpu_s: float


class Drawing:
    """The official SDK in its own process, which samples on request."""

    def __init__(self, server: Server, count: int, tokens: int) -> None:
        self.server = server
        self.rounds: list[tuple[float, float, float]] = []
        self._process = subprocess.Popen(
            [sdk_envs.ensure(SDK), "-c", PROGRAM, json.dumps([BASE, count, DRAWS, tokens])],
            env={
                **os.environ,
                "TINKER_BASE_URL": f"http://127.0.0.1:{server.port}",
                "TINKER_API_KEY": "tml-x",
                "TINKER_TELEMETRY": "0",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout
        assert self._process.stdout.readline().strip() == "ready"

    def draw(self) -> None:
        assert self._process.stdin
        assert self._process.stdout
        before_s = self.server.cpu_s()
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        wall_s, cpu_s = json.loads(self._process.stdout.readline())
        self.rounds.append((wall_s, cpu_s, self.server.cpu_s() - before_s))

    def drawn(self, what: str) -> Drawn:
        self._process.terminate()
        self._process.communicate()
        medians = (sorted(column)[DRAWS // 2] for column in zip(*self.rounds, strict=True))
        wall_s, client_s, server_s = medians
        return Drawn(what=what, wall_s=wall_s, client_cpu_s=client_s, server_cpu_s=server_s)


def compared(options: argparse.Namespace, *, tokens: int, held_s: float, what: str) -> list[Drawn]:
    """Both kinds of polls in alternating rounds, so that a busy machine affects both equally."""
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        servers = [
            started(folder, options, single=single, held_s=held_s)
            for folder, single in ((one, True), (other, False))
        ]
        drawings = [Drawing(server, options.samples, tokens) for server in servers]
        for _ in range(DRAWS):
            for drawing in drawings:
                drawing.draw()
        names = (f"{what}, `retrieve_future` alone", f"{what}, `retrieve_futures`")
        draws = [drawing.drawn(name) for drawing, name in zip(drawings, names, strict=True)]
        for server in servers:
            server.stop()
    return draws


def report(waits: list[Waiting], draws: list[Drawn], options: argparse.Namespace) -> str:
    lines = [
        reports.head(
            "CPU cost of waiting clients",
            f"python benchmarks/bench_polls.py --clients {options.clients} --samples {options.samples}",
            f"uvicorn {version('uvicorn')} ({options.http}, {options.loop})",
        ),
        f"Long polls last {HELD_S:.0f} s.",
        "",
        "| open polls | server CPU ms per second while open | server CPU ms per poll |",
        "|---|---|---|",
        *(f"| {one.what} | {one.held_ms_per_s:.1f} | {one.repoll_ms:.3f} |" for one in waits),
    ]
    if draws:
        lines += [
            "",
            (
                f"{options.samples} concurrent samples through the official SDK {SDK}; median of "
                f"{DRAWS}. The engine finishes immediately, or after {SLOW_S:.0f} s with long polls of "
                f"{SLOW_HELD_S:.0f} s."
            ),
            "",
            "| engine finishes | wall s | client CPU s | server CPU s |",
            "|---|---|---|---|",
            *(
                f"| {one.what} | {one.wall_s:.2f} | {one.client_cpu_s:.2f} | {one.server_cpu_s:.2f} |"
                for one in draws
            ),
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else "")
    parser.add_argument("--clients", type=int, default=2000)
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--http", default="h11")
    parser.add_argument("--loop", default="asyncio")
    parser.add_argument("--no-report", action="store_true")
    parser.add_argument("--held", type=float, default=HELD_S, help=argparse.SUPPRESS)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--single", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        global _ServerClass
        _ServerClass = _server_class()
        serve(
            options.serve,
            http=options.http,
            loop=options.loop,
            single=options.single,
            held_s=options.held,
        )
        return
    waits, draws = [], []
    for batched in (False, True):
        if options.clients:
            with tempfile.TemporaryDirectory() as folder:
                server = started(folder, options)
                try:
                    waits.append(asyncio.run(waiting(server, options.clients, batched=batched)))
                finally:
                    server.stop()
    if options.samples:
        draws += compared(options, tokens=QUICK, held_s=HELD_S, what="immediately")
        draws += compared(options, tokens=SLOW, held_s=SLOW_HELD_S, what="after three polls")
    text = report(waits, draws, options)
    if options.no_report:
        print(text)
    else:
        reports.write("polls", text)


if __name__ == "__main__":
    main()
