"""
Thousands of steps and samples through a faulty network; writes docs/reference/faults.md.

    python -m qa.faults.run
    python -m qa.faults.run --steps 200 --samples 500 --seed 7 --server echo --no-page

A failed run prints its seed. With the same seed, the n-th request of each endpoint has the same fault.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

from qa.faults.comparison import (
    BASE,
    TINY,
    RunResult,
    check,
    run_through_proxy,
    run_with_echo,
    tiny_server,
)
from qa.faults.proxy import FAULTS
from qa.faults.workload import SESSIONS, TRAINERS, Plan
from tinkex.testing import write_tiny_model


@dataclass(frozen=True)
class Figures:
    """The figures of one run that the page shows."""

    wall_s: float
    #: Requests by endpoint; faults by name, and by endpoint and name.
    requests: Counter[str]
    faults: Counter[str]
    faults_by_endpoint: Counter[tuple[str, str]]

    @classmethod
    def of(cls, result: RunResult) -> Figures:
        proxy = result.proxy
        return cls(result.wall_s, proxy.requests, proxy.faults, proxy.faults_by_endpoint)

    def __str__(self) -> str:
        requests, faults = self.requests.total(), self.faults.total()
        return f"{requests:,} requests, {faults:,} faults, {self.wall_s:.0f} s"


PAGE = ROOT / "docs" / "reference" / "faults.md"
SERVERS = {"tiny": "the tiny model", "echo": "counting executor"}


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs client and server through a fault proxy.")
    parser.add_argument("--steps", type=int, default=2000, help="optimizer steps of all trainers")
    parser.add_argument("--samples", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=0.15, help="share of requests with a fault")
    parser.add_argument("--server", choices=[*SERVERS, "both"], default="both")
    parser.add_argument("--no-page", action="store_true", help="do not write the page")
    options = parser.parse_args()
    done: dict[str, tuple[Figures, Figures]] = {}
    for name in SERVERS:
        if options.server in (name, "both"):
            with tempfile.TemporaryDirectory() as folder:
                done[name] = run_both(name, options, Path(folder))
    if not options.no_page:
        PAGE.write_text(page(options, done))
        print(f"written: {PAGE.relative_to(ROOT)}")


def run_both(name: str, options: argparse.Namespace, folder: Path) -> tuple[Figures, Figures]:
    with ExitStack() as stack:
        go: Callable[..., RunResult]
        if name == "tiny":
            plan = Plan(base_model=TINY, steps=options.steps, samples=options.samples)
            model = write_tiny_model(folder / "model", arch="llama")
            server = stack.enter_context(tiny_server(model, folder / "data"))
            go = partial(run_through_proxy, server.url, server.data, plan)
        else:
            plan = Plan(base_model=BASE, steps=options.steps, samples=options.samples)
            folders = iter((folder / "baseline", folder / "faulty"))
            go = lambda **how: run_with_echo(plan, next(folders), **how)
        baseline = go(seed=options.seed, rate=0.0)
        print(f"{name}, no faults: {Figures.of(baseline)}", flush=True)
        try:
            faulty = go(seed=options.seed, rate=options.rate)
            print(f"{name}, faults:    {Figures.of(faulty)}", flush=True)
            check(plan, baseline, faulty)
        except BaseException:
            print(
                f"FAILED: --server {name} --seed {options.seed} --rate {options.rate}", flush=True
            )
            raise
    print(f"{name}: same results, nothing lost, nothing duplicated", flush=True)
    return Figures.of(baseline), Figures.of(faulty)


def page(options: argparse.Namespace, done: dict[str, tuple[Figures, Figures]]) -> str:
    totals = "\n".join(
        f"| {SERVERS[name]} | {baseline} | {faulty} |" for name, (baseline, faulty) in done.items()
    )
    by_name: Counter[str] = Counter()
    requests: Counter[str] = Counter()
    by_endpoint: Counter[str] = Counter()
    for _, faulty in done.values():
        by_name += faulty.faults
        requests += faulty.requests
        for (endpoint, _), count in faulty.faults_by_endpoint.items():
            by_endpoint[endpoint] += count
    faults = "\n".join(f"| {name} | {by_name[name]:,} |" for name in FAULTS)
    endpoints = "\n".join(
        f"| `{name}` | {count:,} | {by_endpoint[name]:,} |"
        for name, count in requests.most_common()
    )
    return f"""\
# Results on a faulty network

`make faults` writes this page (`qa/faults/run.py`, seed {options.seed}): {SESSIONS} sessions, {TRAINERS} \
trainers in threads and samplers in coroutines run {options.steps:,} training steps and \
{options.samples:,} samples, once without faults and once through a proxy on loopback that injects \
faults into {options.rate:.0%} of all requests. Batches are sent in three chunks; the workload includes \
saves, loads, ephemeral samplers, streams, waits that time out, and cancelled samples and passes.

Both runs have the same results, field by field: losses, logprobs, tokens, and with the tiny model \
every bit of the trained weights. On the server each model has the steps 1, 2, 3, … exactly once and \
without a gap; each sample ran once; no session, model or sampler is duplicated. The client logged no \
error and no traceback.

| server behind the real API | no faults | faults |
|---|---|---|
{totals}

"Counting executor" is the real server with an executor that computes with integers and counts what \
it runs. `make test` has a shorter run (`tests/faults/test_faults.py`) and ten whole sessions with a \
fault in every second request, which covers endpoints that a long run calls rarely.

## Faults

In half of the cases an error status follows after the server has processed the request, as with a \
gateway.

| fault | times |
|---|---|
{faults}

## Endpoints

| endpoint | requests | with a fault |
|---|---|---|
{endpoints}

## How the client handles faults

- One layer retries a request with the same bytes and the same number, so the server recognizes \
the retry ([internals](../internals.md)).
- The client honors `Retry-After` in milliseconds, in seconds and as a date, up to a day; otherwise the \
backoff grows from half a second to ten seconds. A request waits no longer than the time it has left \
(`give_up_s`, 300 s) and is then sent once more; samples that get 429 ("busy") wait as long as the \
server asks. The client logs a wait of more than a minute as a warning, with its reason.
- The client retries a response that it cannot parse (a page of a proxy, truncated JSON) three times, \
then raises `APIResponseValidationError`.
- Results of passes and samples carry a `Content-Digest` (RFC 9530), because protobuf that is \
truncated between two fields parses as a complete message.
- The client polls for a result for up to an hour. If a stream breaks, it polls for the sample.
"""


if __name__ == "__main__":
    main()
