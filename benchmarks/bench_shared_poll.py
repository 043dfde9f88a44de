"""
CPU time of the client per sample: one poll per sample, or one shared poll beyond a number of samples.

    python benchmarks/bench_shared_poll.py [--few 64]

Uses the server of `bench_polls.py`, whose engine finishes immediately or after six seconds, with and
without the flag for shared polls; its long polls last 20 s, or 2 s so that a sample needs three of
them. The report has wall seconds, and CPU milliseconds of client and server per sample.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from types import SimpleNamespace

import bench_polls
import reports

CASES = (("immediately", bench_polls.QUICK, 20.0), ("after 6 s", bench_polls.SLOW, 20.0))
CASES += (("after 6 s, long polls of 2 s", bench_polls.SLOW, 2.0),)
COUNTS = (200, 2_000)
ROUNDS = 3

PROGRAM = """
import json, sys, time
import tinkex
from tinkex import types
from tinkex.client.http import shared_poll

url, few, base, count, rounds, tokens = json.loads(sys.argv[1])
assert shared_poll.MAX_SELF_POLLING
shared_poll.MAX_SELF_POLLING = few
sampler = tinkex.ServiceClient(base_url=url).create_sampling_client(base_model=base)
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


def measure(server: bench_polls.Server, few: int, count: int, tokens: int) -> tuple[float, ...]:
    """Median wall s, client CPU ms and server CPU ms per sample."""
    url = f"http://127.0.0.1:{server.port}"
    arguments = json.dumps([url, few, bench_polls.BASE, count, ROUNDS, tokens])
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TINKER_TELEMETRY": "0"},
    ) as process:
        assert process.stdin
        assert process.stdout
        process.stdout.readline()
        rounds = []
        for _ in range(ROUNDS):
            before_s = server.cpu_s()
            process.stdin.write("\n")
            process.stdin.flush()
            wall_s, cpu_s = json.loads(process.stdout.readline())
            each = 1000 / count
            rounds.append((wall_s, cpu_s * each, (server.cpu_s() - before_s) * each))
        process.stdin.close()
    return tuple(sorted(column)[ROUNDS // 2] for column in zip(*rounds, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--few", type=int, default=64)
    few = parser.parse_args().few
    options = SimpleNamespace(http="h11", loop="asyncio")
    lines = [
        reports.head(
            "CPU time of the client with shared polls",
            f"python benchmarks/bench_shared_poll.py --few {few}",
        ),
        "| engine finishes | in flight | polls | wall s | client ms | server ms |",
        "|---|---|---|---|---|---|",
    ]
    for what, tokens, held_s in CASES:
        for single in (True, False):
            with tempfile.TemporaryDirectory() as folder:
                server = bench_polls.started(folder, options, single=single, held_s=held_s)
                for count in COUNTS:
                    wall_s, client_ms, server_ms = measure(server, few, count, tokens)
                    way = "one per sample" if single else f"shared beyond {few}"
                    lines.append(
                        f"| {what} | {count} | {way} | {wall_s:.2f} | {client_ms:.2f} "
                        f"| {server_ms:.2f} |"
                    )
                    print(lines[-1], file=sys.stderr)
                server.stop()
    reports.write("shared_poll", "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
