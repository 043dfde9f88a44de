"""
CPU time, memory, import time and size of the client: tinkex and the official SDK.

    python benchmarks/bench_client.py [--rounds 3]

A server in another process answers every request immediately, so only the client does work: samples
with a prompt of 4,096 tokens, 1, 200 and 2,000 in flight, and passes over 512 examples of 1,024
tokens. Both clients run the same program in fresh interpreters, in alternating rounds, each in an
environment that contains only that client. CPU time is that of the client's process, all threads.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import reports

import sdk_envs
from tinkex.wire.codec import PROTOBUF_TYPE
from tinkex.wire.proto import tinkex_wire_pb2 as pb
from tinkex.wire.protobuf import encode_forward_backward_output, encode_sample_response
from tinkex.wire.sampling import SampledSequence, SampleResponse
from tinkex.wire.tensors import TensorData
from tinkex.wire.training import ForwardBackwardOutput

SDK = "0.36.0"
SIZES = PROMPT_TOKENS, EXAMPLES, TOKENS = 4096, 512, 1024
#: Number of samples by number in flight.
SAMPLES = {1: 150, 200: 1000, 2000: 2000}
PASSES = 3
IMPORTS = 7
MAX_CPU, MAX_IMPORT, MAX_PACKAGES, MAX_SIZE = 0.5, 0.25, 0.5, 0.4
TINKEX, OFFICIAL = "tinkex", "tinker"

#: Runs with either client; prints CPU ms per operation and the peak memory in MB.
PROGRAM = """
import asyncio, importlib, itertools, json, resource, sys

name, (kind, in_flight, count, prompt_tokens, examples, tokens) = json.loads(sys.argv[1])
tinker = importlib.import_module(name)
types = importlib.import_module(f"{name}.types")

def cpu_s():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime

service = tinker.ServiceClient()

async def samples():
    sampler = await service.create_sampling_client_async(base_model="bench/instant")
    ids = [1000 + n % 30000 for n in range(prompt_tokens)]
    params = types.SamplingParams(max_tokens=16, temperature=1.0)

    async def keep(in_flight, count):
        left = itertools.count(count, -1)

        async def worker():
            while next(left) > 0:
                prompt = types.ModelInput.from_ints(ids)
                answer = await sampler.sample_async(prompt, 1, params)
                assert len(answer.sequences[0].tokens) == len(answer.sequences[0].logprobs) == 16

        await asyncio.gather(*(worker() for _ in range(in_flight)))

    await keep(min(in_flight, 200), 200 if in_flight > 1 else 20)
    began = cpu_s()
    await keep(in_flight, count)
    return cpu_s() - began

async def passes():
    training = await service.create_lora_training_client_async(base_model="bench/instant", rank=8)
    ids = [1000 + n % 30000 for n in range(tokens + 1)]
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints(ids[:-1]),
            loss_fn_inputs={"target_tokens": ids[1:], "weights": [1.0] * tokens},
        )
        for _ in range(examples)
    ]

    async def once():
        future = await training.forward_backward_async(data, "cross_entropy")
        found = (await future).loss_fn_outputs
        assert len(found) == examples
        for output in found:
            assert len(output["logprobs"].to_numpy()) == tokens

    await once()
    began = cpu_s()
    for _ in range(count):
        await once()
    return cpu_s() - began

used = asyncio.run({"sample": samples, "pass": passes}[kind]())
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps([1000 * used / count, peak]), flush=True)
"""

#: The names that most programs use; tinkex loads them lazily.
CLASSES = "ServiceClient, TrainingClient, SamplingClient"

#: Prints the CPU ms and the number of modules of an import.
IMPORT = """
import json, resource, sys
name, names = json.loads(sys.argv[1])
statement = compile(f"from {name} import {names}" if names else f"import {name}", "", "exec")
before = len(sys.modules)
def cpu_s():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
began = cpu_s()
exec(statement)
print([1000 * (cpu_s() - began), len(sys.modules) - before])
"""

#: Prints the number of installed distributions and their MB, without pip and setuptools.
INSTALLED = """
from importlib.metadata import distributions
found = [d for d in distributions() if d.metadata["Name"] not in ("pip", "setuptools")]
files = [file.locate() for d in found for file in d.files or ()]
print([len(found), sum(f.stat().st_size for f in files if f.is_file()) / 1e6])
"""


# -- the server ----------------------------------------------------------------------------------

SAMPLED = encode_sample_response(
    SampleResponse(
        sequences=[
            SampledSequence(
                "length",
                "",
                tokens_np=np.arange(16, dtype=np.int32),
                logprobs_np=np.full(16, -0.5, np.float32),
            )
        ]
    )
)


@cache
def passed(examples: int) -> bytes:
    logprobs = TensorData.from_numpy(np.full(TOKENS, -0.5, np.float32))
    return encode_forward_backward_output(
        ForwardBackwardOutput(
            loss_fn_output_type="TensorData",
            loss_fn_outputs=[{"logprobs": logprobs} for _ in range(examples)],
            metrics={"loss:sum": 0.5 * examples * TOKENS},
        )
    )


class Instant:
    """A server whose requests are finished as soon as they arrive."""

    def __init__(self, *, batched: bool) -> None:
        #: Whether clients poll for all their samples with one `retrieve_futures`.
        self.batched = batched
        self.samplers = itertools.count()
        self.numbers = itertools.count()
        #: The finished requests of each sampler, in order.
        self.done: dict[str, list[str]] = {}
        self.finished = asyncio.Condition()

    async def answer(self, path: str, body: bytes) -> bytes | dict[str, Any]:
        """Bytes are protobuf. The id of a request determines its result."""
        match path:
            case "asample":
                return await self.accept(body)
            case "retrieve_future":
                return self.result(json.loads(body)["request_id"])
            case "retrieve_futures":
                poll = json.loads(body)
                sampler = poll["target"]["sampling_session_id"]
                return await self.completions(sampler, poll["prev_cursor"])
            case "forward_backward":
                examples = len(pb.ForwardBackwardRequest.FromString(body).data)
                return {"request_id": f"pass {examples}"}
            case "create_model":
                return {"request_id": "model"}
            case "client/config":
                return {"sample_use_retrieve_futures": self.batched}
            case "create_session":
                return {"session_id": "s"}
            case "create_sampling_session":
                return {"sampling_session_id": f"s:sample:{next(self.samplers)}"}
            case "telemetry":
                return {"status": "accepted"}
            case _:
                return {}

    async def accept(self, body: bytes) -> dict[str, Any]:
        request_id = f"sample {next(self.numbers)}"
        if self.batched:
            async with self.finished:
                sampler = json.loads(body)["sampling_session_id"]
                self.done.setdefault(sampler, []).append(request_id)
                self.finished.notify_all()
        return {"request_id": request_id, "sample_sequence_ids": ["0"]}

    def result(self, request_id: str) -> bytes | dict[str, Any]:
        kind, _, count = request_id.partition(" ")
        if kind == "sample":
            return SAMPLED
        return passed(int(count)) if kind == "pass" else {"model_id": "s:train:0"}

    async def completions(self, sampler: str, cursor: int) -> dict[str, Any]:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(20), self.finished:
                await self.finished.wait_for(lambda: len(self.done.get(sampler, ())) > cursor)
        done = self.done.get(sampler, [])
        completions = [
            {
                "state": "finished",
                "request_id": request_id,
                "response_payload_uncompressed_size": len(SAMPLED),
            }
            for request_id in done[cursor:]
        ]
        return {"completions": completions, "cursor": len(done)}


async def serve(*, batched: bool) -> None:
    instant = Instant(batched=batched)

    async def handle(request: web.Request) -> web.Response:
        path = request.path.removeprefix("/api/v1/")
        found = await instant.answer(path, await request.read())
        if isinstance(found, bytes):
            return web.Response(body=found, content_type=PROTOBUF_TYPE)
        return web.json_response(found)

    app = web.Application(client_max_size=2**28)
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, access_log=None, keepalive_timeout=120)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


@contextmanager
def started(kind: str) -> Iterator[str]:
    command = [sys.executable, __file__, "--serve", kind]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()


# -- measuring -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Row:
    """One quantity, measured for both clients."""

    what: str
    official: float
    tinkex: float
    #: The goal: the largest allowed ratio.
    max_ratio: float | None

    @property
    def ratio(self) -> float:
        return self.tinkex / self.official

    @property
    def met(self) -> bool:
        return self.max_ratio is None or self.ratio <= self.max_ratio

    def line(self) -> str:
        goal = f"≤ {self.max_ratio:g}: {'met' if self.met else 'missed'}" if self.max_ratio else ""
        official, ours = (
            f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
            for value in (self.official, self.tinkex)
        )
        return f"| {self.what} | {official} | {ours} | {self.ratio:.2f} | {goal} |"


def printed(python: Path, program: str, client: str, *, url: str = "", case: Any = None) -> Any:
    """The list in the last line that a program prints."""
    env = {
        **os.environ,
        "TINKER_BASE_URL": url,
        "TINKER_API_KEY": "tml-bench",
        "TINKER_TELEMETRY": "0",
    }
    done = subprocess.run(
        [python, "-c", program, json.dumps([client, case])],
        env=env,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    )
    return json.loads(done.stdout.splitlines()[-1])


class Comparison:
    """Runs the same program with both clients, in alternating rounds."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.pythons = {
            OFFICIAL: sdk_envs.ensure_alone(f"tinker-{SDK}", f"tinker=={SDK}"),
            TINKEX: sdk_envs.ensure_this_client(),
        }

    def rows(
        self, program: str, names: Mapping[str, float | None], *, rounds: int = 0, **options: Any
    ) -> list[Row]:
        """One row per printed number; `names` maps its name and unit to its goal."""
        found: dict[str, list[list[float]]] = {OFFICIAL: [], TINKEX: []}
        for turn in range(rounds or self.rounds):
            for client in (OFFICIAL, TINKEX) if turn % 2 else (TINKEX, OFFICIAL):
                found[client].append(printed(self.pythons[client], program, client, **options))
        rows = []
        for column, (what, max_ratio) in enumerate(names.items()):
            official, ours = (
                statistics.median(numbers[column] for numbers in found[client])
                for client in (OFFICIAL, TINKEX)
            )
            rows.append(Row(what=what, official=official, tinkex=ours, max_ratio=max_ratio))
            print(rows[-1].line(), flush=True)
        return rows


def measured(rounds: int) -> list[Row]:
    comparison = Comparison(rounds)
    rows = []
    for kind, note in (("single", ""), ("batched", ", polled together")):
        with started(kind) as url:
            for in_flight, count in SAMPLES.items():
                if kind == "batched" and in_flight == 1:
                    continue
                about = f"{in_flight:,} in flight{note}"
                cpu, peak = f"sample, {about}: CPU ms", f"sample, {about}: peak MB"
                case = ["sample", in_flight, count, *SIZES]
                rows += comparison.rows(PROGRAM, {cpu: MAX_CPU, peak: None}, url=url, case=case)
    with started("single") as url:
        names = {"forward_backward: CPU ms": MAX_CPU, "forward_backward: peak MB": None}
        rows += comparison.rows(PROGRAM, names, url=url, case=["pass", 1, PASSES, *SIZES])
    names = {"import: CPU ms": MAX_IMPORT, "import: modules": None}
    rows += comparison.rows(IMPORT, names, rounds=IMPORTS, case="")
    names = {"import of the clients' classes: CPU ms": None, "the same: modules": None}
    rows += comparison.rows(IMPORT, names, rounds=IMPORTS, case=CLASSES)
    names = {"installed: packages": MAX_PACKAGES, "installed: MB": MAX_SIZE}
    return rows + comparison.rows(INSTALLED, names, rounds=1)


def report(rows: list[Row], command: str) -> str:
    what = (
        f"A sample has a prompt of {PROMPT_TOKENS:,} tokens, a forward_backward {EXAMPLES} examples "
        f"of {TOKENS:,} tokens. The server, in another process, answers immediately; CPU time is that "
        "of the client per operation. Medians of alternating rounds."
    )
    goals = [row for row in rows if row.max_ratio is not None]
    missed = [row.what for row in goals if not row.met]
    summary = f"Goals met: {len(goals) - len(missed)} of {len(goals)}."
    if missed:
        summary += f" Missed: {'; '.join(missed)}."
    lines = [
        *(reports.head("CPU time, memory and size of the clients", command), what, ""),
        f"| | tinker {SDK} | tinkex | ratio | goal |",
        "|---|---:|---:|---:|---|",
        *(*(row.line() for row in rows), "", summary, ""),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--serve", choices=("single", "batched"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 20_000)), hard))
    if options.serve:
        asyncio.run(serve(batched=options.serve == "batched"))
        return
    rows = measured(options.rounds)
    text = report(rows, f"python benchmarks/bench_client.py --rounds {options.rounds}")
    reports.write("client", text)


if __name__ == "__main__":
    main()
