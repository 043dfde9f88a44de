"""Runs one plan without and with network faults, and checks that both runs have the same results."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from qa.faults.counting_server import BASE, echo_server
from qa.faults.proxy import Proxy, fault_proxy
from qa.faults.workload import CHUNKS, CONFIG, SESSIONS, TRAINERS, Plan, Results, run
from serving import TINY, Server, serving


@dataclass(frozen=True)
class Stored:
    """Contents of the server's database and files after a run."""

    #: Kinds of the steps of each model, by step number.
    steps: dict[str, dict[int, str]]
    #: Number of requests by kind and status.
    outcomes: Counter[tuple[str, str]]
    #: Numbers of rows. More rows than the plan creates would be duplicated work.
    sessions: int
    models: int
    samplers: int
    samples: int
    #: Final weights by model.
    weights: dict[str, bytes]


@dataclass
class RunResult:
    """Results of the client, state of the server, and injected faults of one run."""

    results: Results
    stored: Stored
    proxy: Proxy
    wall_s: float
    #: Tracebacks and errors in the client's log.
    log_errors: list[str]
    #: Only with `CountingEcho`: optimizer steps by model, and sampled prompts.
    ran_steps: dict[str, int] = field(default_factory=dict)
    ran_prompts: Counter[tuple[int, ...]] = field(default_factory=Counter)


def run_with_echo(plan: Plan, folder: Path, *, seed: int, rate: float) -> RunResult:
    """Runs against the real application with `CountingEcho`, which records what it ran."""
    with echo_server(folder) as (url, executor):
        result = run_through_proxy(url, folder, plan, seed=seed, rate=rate)
    result.ran_steps = executor.steps()
    result.ran_prompts = Counter(executor.prompts())
    return result


@contextmanager
def tiny_server(model: Path, folder: Path) -> Iterator[Server]:
    """A deterministic server with the tiny model, whose weights are comparable bit by bit."""
    with serving(f"{TINY}={model}", data=folder, args=("--deterministic",)) as server:
        yield server


def run_through_proxy(url: str, folder: Path, plan: Plan, *, seed: int, rate: float) -> RunResult:
    """Runs the plan against a server whose data is in the folder."""
    since_s, started = time.time(), time.monotonic()
    with (
        _recorded_log_errors() as log_errors,
        fault_proxy(url, seed=seed, rate=rate, config=CONFIG) as proxy,
    ):
        results = run(proxy.url, plan)
    wall_s = time.monotonic() - started
    return RunResult(results, _stored(folder, since_s), proxy, wall_s, log_errors)


@contextmanager
def _recorded_log_errors() -> Iterator[list[str]]:
    """Log records of the client that are errors or have a traceback."""
    recorded: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.ERROR or record.exc_info:
                recorded.append(self.format(record))

    handler = Handler()
    loggers = [logging.getLogger("tinkex.client"), logging.getLogger("asyncio")]
    loggers += [logging.getLogger(name) for name in _CLIENT_LOGS]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield recorded
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


_CLIENT_LOGS = [
    f"tinkex.{name}"
    for name in ("calls", "results", "session", "training", "telemetry", "streaming")
]


def _stored(folder: Path, since_s: float) -> Stored:
    with closing(sqlite3.connect(folder / "tinkex.db")) as db:
        steps: dict[str, dict[int, str]] = {}
        for model_id, number, kind in db.execute(
            "SELECT model_id, seq_id, kind FROM requests "
            "WHERE model_id IS NOT NULL AND seq_id > 0 AND created_s >= ?",
            (since_s,),
        ):
            assert number not in steps.setdefault(model_id, {}), (
                f"step {number} of {model_id} exists twice"
            )
            steps[model_id][number] = kind
        weights = {
            model_id: (folder / place / "adapter_model.safetensors").read_bytes()
            for model_id, place in db.execute(
                "SELECT model_id, place FROM checkpoint_versions WHERE name = 'final'"
            )
            if (folder / place / "adapter_model.safetensors").exists()
        }

        def count(table: str, also: str = "") -> int:
            query = f"SELECT count(*) FROM {table} WHERE created_s >= ? {also}"
            return int(db.execute(query, (since_s,)).fetchone()[0])

        outcomes = db.execute(
            "SELECT kind, status, count(*) FROM requests WHERE created_s >= ? GROUP BY 1, 2",
            (since_s,),
        )
        return Stored(
            steps=steps,
            outcomes=Counter({(kind, status): n for kind, status, n in outcomes}),
            sessions=count("sessions"),
            models=count("models"),
            samplers=count("samplers"),
            samples=count("requests", "AND kind = 'sample'"),
            weights=weights,
        )


def check(plan: Plan, baseline: RunResult, faulty: RunResult) -> None:
    """Raises AssertionError if the runs differ, or if one of them did something twice."""
    differing = [
        key
        for key in baseline.results.found
        if faulty.results.found.get(key) != baseline.results.found[key]
    ]
    assert not differing, f"{len(differing)} results differ, first {differing[0]}"
    assert faulty.results.found.keys() == baseline.results.found.keys()
    for result in (baseline, faulty):
        _check_one(plan, result)
    for number in range(TRAINERS):
        ours, theirs = (each.results.model_ids[number] for each in (faulty, baseline))
        assert faulty.stored.weights.get(ours) == baseline.stored.weights.get(theirs), number
        assert _without_forwards(faulty.stored.steps[ours]) == _without_forwards(
            baseline.stored.steps[theirs]
        ), number


def _check_one(plan: Plan, result: RunResult) -> None:
    results, stored = result.results, result.stored
    assert len(results.prompts) + len(results.abandoned) == plan.samples
    assert not result.log_errors, result.log_errors[0]
    made = (stored.sessions, stored.models, stored.samplers)
    assert made == (SESSIONS, TRAINERS, SESSIONS + plan.bursts), made
    for model_id in results.model_ids.values():
        numbers = stored.steps[model_id]
        assert sorted(numbers) == list(range(1, len(numbers) + 1)), (
            f"step numbers of {model_id} have gaps"
        )
        kinds = Counter(numbers.values())
        assert kinds["optim_step"] == plan.steps_each, kinds
        assert kinds["forward_backward"] == plan.steps_each * CHUNKS, kinds
    failed = {kind: n for (kind, status), n in stored.outcomes.items() if status == "failed"}
    # Only samples that the client cancelled may fail.
    assert failed.keys() <= {"sample"}, failed
    assert failed.get("sample", 0) <= len(results.abandoned), failed
    waited = len(results.prompts)
    assert waited <= stored.samples <= waited + len(results.abandoned), stored.samples
    if result.ran_prompts:
        assert set(result.ran_steps.values()) == {plan.steps_each}, result.ran_steps
        drawn = result.ran_prompts
        assert all(drawn[prompt] == 1 for prompt in results.prompts)
        assert all(drawn[prompt] <= 1 for prompt in results.abandoned)


def _without_forwards(steps: dict[int, str]) -> list[str]:
    """The kinds of all steps but `forward`, which a client may have cancelled before it was sent."""
    return [steps[number] for number in sorted(steps) if steps[number] != "forward"]


__all__ = [
    "BASE",
    "TINY",
    "RunResult",
    "check",
    "run_through_proxy",
    "run_with_echo",
    "tiny_server",
]
