"""
The time that SDK, network, server and store add to one training step.

    python benchmarks/bench_roundtrip.py [--steps 200] [--sdk-python PYTHON]

One client repeats forward_backward + optim_step on the tiny model and waits for both. The engine
reports its compute time for the same steps; the rest is the added time. The client is the official
SDK 0.36.0, unmodified, in its own environment; a plain HTTP client that sends the same bodies shows
how much of the added time is the SDK's.
"""

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import aiohttp

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import reports

import sdk_envs
from serving import TINY, serving
from tinkex.testing import write_tiny_model
from tinkex.wire.codec import PROTOBUF_TYPE
from tinkex.wire.inputs import Datum, ModelInput
from tinkex.wire.protobuf import encode_forward_backward_request
from tinkex.wire.training import ForwardBackwardInput, ForwardBackwardRequest

SDK = "0.36.0"
LIMIT_MS = 25.0
WARM_UP = 20
SEQUENCES = [[20 + (7 * row + 3 * column) % 200 for column in range(24)] for row in range(4)]

#: Runs in the SDK's environment; prints the seconds of each step as JSON.
PROGRAM = """
import json, sys, time
import tinker
from tinker import types

sequences, model, warm_up, steps = json.loads(sys.argv[1])
data = [
    types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )
    for tokens in sequences
]
training = tinker.ServiceClient().create_lora_training_client(base_model=model, rank=8)

def step():
    passed = training.forward_backward(data, "cross_entropy")
    stepped = training.optim_step(types.AdamParams(learning_rate=1e-4))
    passed.result(), stepped.result()

for _ in range(warm_up):
    step()
print("warm", flush=True)
sys.stdin.readline()
took = []
for _ in range(steps):
    began = time.perf_counter()
    step()
    took.append(time.perf_counter() - began)
print(json.dumps(took), flush=True)
"""


@dataclass(frozen=True)
class Measured:
    """Milliseconds of one step."""

    client: str
    p50: float
    p90: float
    mean: float
    engine: float

    @property
    def added(self) -> float:
        return self.mean - self.engine

    @classmethod
    def of(cls, client: str, took_s: list[float], engine_s: float) -> "Measured":
        ms = sorted(1000 * seconds for seconds in took_s)
        return cls(
            client=client,
            p50=statistics.median(ms),
            p90=ms[int(0.9 * len(ms))],
            mean=statistics.fmean(ms),
            engine=1000 * engine_s / len(ms),
        )


def engine_seconds(url: str) -> float:
    """The compute time of the engine for passes and steps so far."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        text = answer.read().decode()
    found = re.findall(
        r'tinkex_engine_compute_seconds_total\{task="(?:pass|optim_step)"\} (\S+)', text
    )
    return sum(map(float, found))


def through_sdk(python: Path, url: str, steps: int) -> Measured:
    argument = json.dumps([SEQUENCES, TINY, WARM_UP, steps])
    env = {
        **os.environ,
        "TINKER_BASE_URL": url,
        "TINKER_API_KEY": "tml-any",
        "TINKER_TELEMETRY": "0",
    }
    with subprocess.Popen(
        [python, "-c", PROGRAM, argument],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
    ) as process:
        assert process.stdin
        assert process.stdout
        if process.stdout.readline().strip() != "warm":
            sys.exit("the SDK program ended early; see its output above")
        before_s = engine_seconds(url)
        process.stdin.write("go\n")
        process.stdin.flush()
        took_s: list[float] = json.loads(process.stdout.readline())
        return Measured.of(f"official SDK {SDK}", took_s, engine_seconds(url) - before_s)


async def through_http(url: str, steps: int) -> Measured:
    async with aiohttp.ClientSession(url) as http:
        model_id = await _model(http)
        numbers = iter(range(1, 10**6))

        async def step() -> None:
            await _step(http, model_id, next(numbers), next(numbers))

        for _ in range(WARM_UP):
            await step()
        before_s = engine_seconds(url)
        took_s = [await _timed(step) for _ in range(steps)]
        return Measured.of("plain HTTP", took_s, engine_seconds(url) - before_s)


async def _timed(action: Callable[[], Awaitable[None]]) -> float:
    began_s = time.perf_counter()
    await action()
    return time.perf_counter() - began_s


async def _model(http: aiohttp.ClientSession) -> str:
    about = {"tags": [], "user_metadata": {}, "sdk_version": SDK}
    async with http.post("/api/v1/create_session", json=about) as answer:
        session_id = (await answer.json())["session_id"]
    wanted = {
        "session_id": session_id,
        "model_seq_id": 0,
        "base_model": TINY,
        "lora_config": {"rank": 8},
    }
    async with http.post("/api/v1/create_model", json=wanted) as answer:
        accepted = await answer.json()
    await _result(http, accepted["request_id"])
    return str(accepted["model_id"])


async def _step(http: aiohttp.ClientSession, model_id: str, first: int, second: int) -> None:
    """Submits both in order, then waits for both, as the SDK does."""
    data = [
        Datum(
            model_input=ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
        )
        for tokens in SEQUENCES
    ]
    work = ForwardBackwardInput(data=data, loss_fn="cross_entropy")
    body = encode_forward_backward_request(ForwardBackwardRequest(work, model_id, first))
    headers = {"Content-Type": PROTOBUF_TYPE}
    async with http.post("/api/v1/forward_backward", data=body, headers=headers) as answer:
        passed = (await answer.json())["request_id"]
    step = {"model_id": model_id, "seq_id": second, "adam_params": {"learning_rate": 1e-4}}
    async with http.post("/api/v1/optim_step", json=step) as answer:
        stepped = (await answer.json())["request_id"]
    await asyncio.gather(_result(http, passed), _result(http, stepped))


async def _result(http: aiohttp.ClientSession, request_id: str) -> None:
    headers = {"Accept": PROTOBUF_TYPE}
    body = {"request_id": request_id}
    async with http.post("/api/v1/retrieve_future", json=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        await answer.read()


def fsync_ms(folder: Path) -> float:
    """The time of one small durable write on this disk; a step needs about four."""
    took = []
    with (folder / "fsync").open("wb") as file:
        for _ in range(50):
            began_s = time.perf_counter()
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
            took.append(time.perf_counter() - began_s)
    return 1000 * statistics.median(took)


def report(rows: list[Measured], *, steps: int, disk_ms: float) -> str:
    lines = [
        reports.head(
            "Round trip of one training step",
            f"python benchmarks/bench_roundtrip.py --steps {steps}",
            f"torch {version('torch')}, tinker {SDK}",
        ),
        "forward_backward (4 sequences of 23 tokens) + optim_step on the tiny model, one client,",
        f"every request and result on disk before the response (one fsync here: {disk_ms:.1f} ms).",
        "",
        "| client | p50 ms | p90 ms | mean ms | engine ms | added ms |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row.client} | {row.p50:.1f} | {row.p90:.1f} | {row.mean:.1f} | {row.engine:.1f} "
        f"| {row.added:.1f} |"
        for row in rows
    ]
    verdict = "met" if rows[0].added < LIMIT_MS else "MISSED"
    lines += [
        "",
        f"Added through the official SDK: {rows[0].added:.1f} ms (goal < {LIMIT_MS:.0f}: {verdict}).",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--sdk-python",
        type=Path,
        default=os.environ.get("TINKEX_SDK_PYTHON"),
        help=f"interpreter with tinker {SDK}; default: a cached environment",
    )
    options = parser.parse_args()
    python = Path(options.sdk_python) if options.sdk_python else sdk_envs.ensure(SDK)
    with tempfile.TemporaryDirectory() as folder:
        tiny = write_tiny_model(Path(folder) / "tiny")
        with serving(f"{TINY}={tiny}", data=Path(folder) / "data") as server:
            rows = [
                through_sdk(python, server.url, options.steps),
                asyncio.run(through_http(server.url, options.steps)),
            ]
        text = report(rows, steps=options.steps, disk_ms=fsync_ms(Path(folder)))
    reports.write("roundtrip", text)
    if rows[0].added >= LIMIT_MS:
        sys.exit(1)


if __name__ == "__main__":
    main()
