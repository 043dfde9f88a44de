"""One plan, run without faults and with them: the proof that nothing was lost or done twice."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from qa.faults.counting_server import BASE, echoing
from qa.faults.proxy import Proxy, in_front_of
from qa.faults.workload import CHUNKS, CONFIG, SESSIONS, TRAINERS, Plan, Results, run
from serving import TINY, Server, serving


@dataclass(frozen=True)
class Stored:
    """What a server has on disk after a run."""

    #: Kinds of the steps of each model, by number.
    steps: dict[str, dict[int, str]]
    #: How often requests of one kind ended in one way.
    endings: Counter[tuple[str, str]]
    #: Rows: more than the program made would be work done for nobody.
    sessions: int
    models: int
    samplers: int
    samples: int
    #: Weights at the end, by model.
    weights: dict[str, bytes]


@dataclass
class Outcome:
    """One run: what the client got, what the server did, what was met on the way."""

    results: Results
    stored: Stored
    proxy: Proxy
    wall_s: float
    #: Tracebacks and errors in the client's log.
    complaints: list[str]
    #: By the executor of whole numbers only: steps by model, prompts drawn.
    ran_steps: dict[str, int] = field(default_factory=dict)
    ran_prompts: Counter[tuple[int, ...]] = field(default_factory=Counter)


def through_echo(plan: Plan, folder: Path, *, seed: int, rate: float) -> Outcome:
    """Against the real application over whole numbers, which tells what ran."""
    with echoing(folder) as (url, executor):
        outcome = through(url, folder, plan, seed=seed, rate=rate)
    outcome.ran_steps = executor.steps()
    outcome.ran_prompts = Counter(executor.prompts())
    return outcome


@contextmanager
def tiny_server(model: Path, folder: Path) -> Iterator[Server]:
    """A real server with the tiny model, all bits of which can be compared."""
    with serving(f"{TINY}={model}", data=folder, args=("--deterministic",)) as server:
        yield server


def through(url: str, folder: Path, plan: Plan, *, seed: int, rate: float) -> Outcome:
    """Against any server, whose data is in the folder."""
    since_s, started = time.time(), time.monotonic()
    with _listening() as complaints, in_front_of(url, seed=seed, rate=rate, config=CONFIG) as proxy:
        results = run(proxy.url, plan)
    wall_s = time.monotonic() - started
    return Outcome(results, _stored(folder, since_s), proxy, wall_s, complaints)


@contextmanager
def _listening() -> Iterator[list[str]]:
    """What a user would be frightened by: errors, and anything with a traceback."""
    heard: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.ERROR or record.exc_info:
                heard.append(self.format(record))

    ear = Ear()
    loggers = [logging.getLogger("tinkex.client"), logging.getLogger("asyncio")]
    loggers += [logging.getLogger(name) for name in _CLIENT_LOGS]
    for logger in loggers:
        logger.addHandler(ear)
    try:
        yield heard
    finally:
        for logger in loggers:
            logger.removeHandler(ear)


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
            assert number not in steps.setdefault(model_id, {}), f"{number} of {model_id} twice"
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

        endings = db.execute(
            "SELECT kind, status, count(*) FROM requests WHERE created_s >= ? GROUP BY 1, 2",
            (since_s,),
        )
        return Stored(
            steps=steps,
            endings=Counter({(kind, status): n for kind, status, n in endings}),
            sessions=count("sessions"),
            models=count("models"),
            samplers=count("samplers"),
            samples=count("requests", "AND kind = 'sample'"),
            weights=weights,
        )


def check(plan: Plan, calm: Outcome, faulty: Outcome) -> None:
    """Raises AssertionError where the two runs differ, or one of them did something twice."""
    differing = [
        key
        for key in calm.results.found
        if faulty.results.found.get(key) != calm.results.found[key]
    ]
    assert not differing, f"{len(differing)} results differ, first {differing[0]}"
    assert faulty.results.found.keys() == calm.results.found.keys()
    for outcome in (calm, faulty):
        _check_one(plan, outcome)
    for number in range(TRAINERS):
        ours, theirs = (each.results.model_ids[number] for each in (faulty, calm))
        assert faulty.stored.weights.get(ours) == calm.stored.weights.get(theirs), number
        assert _changing(faulty.stored.steps[ours]) == _changing(calm.stored.steps[theirs]), number


def _check_one(plan: Plan, outcome: Outcome) -> None:
    results, stored = outcome.results, outcome.stored
    assert len(results.prompts) + len(results.given_up) == plan.samples
    assert not outcome.complaints, outcome.complaints[0]
    made = (stored.sessions, stored.models, stored.samplers)
    assert made == (SESSIONS, TRAINERS, SESSIONS + plan.bursts), made
    for model_id in results.model_ids.values():
        numbers = stored.steps[model_id]
        assert sorted(numbers) == list(range(1, len(numbers) + 1)), f"gaps in {model_id}"
        kinds = Counter(numbers.values())
        assert kinds["optim_step"] == plan.steps_each, kinds
        assert kinds["forward_backward"] == plan.steps_each * CHUNKS, kinds
    failed = {kind: n for (kind, status), n in stored.endings.items() if status == "failed"}
    # Those that the user gave up may be told "cancelled"; nothing else fails.
    assert failed.keys() <= {"sample"}, failed
    assert failed.get("sample", 0) <= len(results.given_up), failed
    waited = len(results.prompts)
    assert waited <= stored.samples <= waited + len(results.given_up), stored.samples
    if outcome.ran_prompts:
        assert set(outcome.ran_steps.values()) == {plan.steps_each}, outcome.ran_steps
        drawn = outcome.ran_prompts
        assert all(drawn[prompt] == 1 for prompt in results.prompts)
        assert all(drawn[prompt] <= 1 for prompt in results.given_up)


def _changing(steps: dict[int, str]) -> list[str]:
    """The steps that change weights or keep them, in order; passes given up may be missing."""
    return [steps[number] for number in sorted(steps) if steps[number] != "forward"]


__all__ = ["BASE", "TINY", "Outcome", "check", "through", "through_echo", "tiny_server"]
