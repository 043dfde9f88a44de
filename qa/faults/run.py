"""
Thousands of steps and samples through a network that fails all the time; writes docs/reference/faults.md.

    python -m qa.faults.run
    python -m qa.faults.run --steps 200 --samples 500 --seed 7 --server echo --no-page

A run that fails names its seed; with the same seed, the n-th request of each endpoint meets the
same fault again.
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

from qa.faults.comparison import BASE, TINY, Outcome, check, through, through_echo, tiny_server
from qa.faults.proxy import FAULTS
from qa.faults.workload import SESSIONS, TRAINERS, Plan
from tinkex.testing import write_tiny_model


@dataclass(frozen=True)
class Figures:
    """What the page tells of one run."""

    wall_s: float
    #: By endpoint; by fault; by endpoint and fault.
    requests: Counter[str]
    met: Counter[str]
    met_by: Counter[tuple[str, str]]

    @classmethod
    def of(cls, outcome: Outcome) -> Figures:
        proxy = outcome.proxy
        return cls(outcome.wall_s, proxy.requests, proxy.met, proxy.met_by)

    def __str__(self) -> str:
        asked, met = self.requests.total(), self.met.total()
        return f"{asked:,} requests, {met:,} faults, {self.wall_s:.0f} s"


PAGE = ROOT / "docs" / "reference" / "faults.md"
SERVERS = {"tiny": "the tiny model", "echo": "whole numbers"}


def main() -> None:
    parser = argparse.ArgumentParser(description="Our client and server through a fault proxy.")
    parser.add_argument("--steps", type=int, default=2000, help="optimizer steps of all trainers")
    parser.add_argument("--samples", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=0.15, help="share of requests with a fault")
    parser.add_argument("--server", choices=[*SERVERS, "both"], default="both")
    parser.add_argument("--no-page", action="store_true", help="do not write the page")
    given = parser.parse_args()
    done: dict[str, tuple[Figures, Figures]] = {}
    for name in SERVERS:
        if given.server in (name, "both"):
            with tempfile.TemporaryDirectory() as folder:
                done[name] = both_ways(name, given, Path(folder))
    if not given.no_page:
        PAGE.write_text(page(given, done))
        print(f"written: {PAGE.relative_to(ROOT)}")


def both_ways(name: str, given: argparse.Namespace, folder: Path) -> tuple[Figures, Figures]:
    with ExitStack() as stack:
        go: Callable[..., Outcome]
        if name == "tiny":
            plan = Plan(base_model=TINY, steps=given.steps, samples=given.samples)
            model = write_tiny_model(folder / "model", arch="llama")
            server = stack.enter_context(tiny_server(model, folder / "data"))
            go = partial(through, server.url, server.data, plan)
        else:
            plan = Plan(base_model=BASE, steps=given.steps, samples=given.samples)
            folders = iter((folder / "calm", folder / "faulty"))
            go = lambda **how: through_echo(plan, next(folders), **how)
        calm = go(seed=given.seed, rate=0.0)
        print(f"{name}, no faults: {Figures.of(calm)}", flush=True)
        try:
            faulty = go(seed=given.seed, rate=given.rate)
            print(f"{name}, faults:    {Figures.of(faulty)}", flush=True)
            check(plan, calm, faulty)
        except BaseException:
            print(f"FAILED with {name}, --seed {given.seed} --rate {given.rate}", flush=True)
            raise
    print(f"{name}: the same results, nothing lost, nothing twice", flush=True)
    return Figures.of(calm), Figures.of(faulty)


def page(given: argparse.Namespace, done: dict[str, tuple[Figures, Figures]]) -> str:
    totals = "\n".join(
        f"| {SERVERS[name]} | {calm} | {faulty} |" for name, (calm, faulty) in done.items()
    )
    met: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    by_endpoint: Counter[str] = Counter()
    for _, faulty in done.values():
        met += faulty.met
        asked += faulty.requests
        for (endpoint, _), count in faulty.met_by.items():
            by_endpoint[endpoint] += count
    faults = "\n".join(f"| {name} | {met[name]:,} |" for name in FAULTS)
    endpoints = "\n".join(
        f"| `{name}` | {count:,} | {by_endpoint[name]:,} |" for name, count in asked.most_common()
    )
    return f"""\
# A network that fails all the time

Made by `make faults` (`qa/faults/run.py`, seed {given.seed}): {SESSIONS} sessions, {TRAINERS} \
trainers in threads and samplers in coroutines run {given.steps:,} training steps and \
{given.samples:,} samples, once undisturbed and once through a proxy on loopback that spoils \
{given.rate:.0%} of all requests. Batches go in three chunks; there are saves, loads, ephemeral \
samplers, streams, waits that time out, and samples and passes that are given up.

Both runs end with the same results, field by field: losses, logprobs, tokens, and with the tiny \
model every bit of the trained weights. On the server each model has its steps 1, 2, 3, … without a \
gap and each once; each sample was drawn once; no session, model or sampler is there twice. The \
client logged no error and no traceback.

| server behind the real API | no faults | faults |
|---|---|---|
{totals}

"Whole numbers" is the real server with an executor that counts what it runs. A shorter run is part \
of `make test` (`tests/faults/test_faults.py`), and so are ten sessions from beginning to end with \
every second request spoiled, for the endpoints that a long run asks a few times only.

## What was met

Half of the statuses come after the server has done the work, as a gateway's do.

| fault | times |
|---|---|
{faults}

## Where

| endpoint | requests | with a fault |
|---|---|---|
{endpoints}

## What the client does about it

- A request is repeated by one layer, with the same bytes and the same number, so the server answers \
a repeat with its first self ([internals](../internals.md)).
- `Retry-After` is honoured in milliseconds, seconds and as a date; else delays grow from half a \
second to ten.
- An answer that is no message at all (a page of a proxy, JSON cut short) is asked for again, three \
times; then it is an `APIResponseValidationError`.
- Results of passes and samples carry a `Content-Digest` (RFC 9530): protobuf that was cut between \
two fields would read as a whole message.
- A result is asked for again for an hour; a stream that breaks off is fetched like any other sample.
"""


if __name__ == "__main__":
    main()
