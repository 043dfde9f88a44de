"""
What breaks first in a fleet: a discrete-event simulation, driven by measured costs.

    python benchmarks/simulate_fleet.py [--seconds 20]

First it has to predict measurements. It takes the rows with 1, 2 and 4 replicas of the newest reports
of `bench_replicas.py` (engines in one process) and `bench_scale_out.py` (workers), fits two numbers to
them (CPU time of the web process for a sample, and the time between two samples in one place of an
engine), and predicts the row with 8 replicas.

Then it simulates up to 1,000 GPUs and 100,000 sessions on one PostgreSQL, and on cells of 63 replicas.
Each session keeps samples in flight, so that all places of all engines are always wanted. A sample
passes: a web process (accept), PostgreSQL (row), a notification, a place in an engine, PostgreSQL
(result), a notification, a web process (answer). CPUs are queues; engines are places with a fixed time.
"""

import argparse
import heapq
import itertools
import math
import re
import statistics
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import reports

from tinkex.server.scheduler.replicas import FEW_SEQUENCES, MAX_OVER_AVERAGE, _score

#: The prediction of the 8-replica run must be this close.
MAX_ERROR = 0.1
#: The fleets that are simulated on one database.
FLEETS = (16, 32, 64, 128, 256, 512, 1000)
CELL = 63
SESSIONS_PER_REPLICA = 100


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Measured costs. Each says where it comes from."""

    #: CPU of a web process for a sample and its answer (results/replicas_*, fitted).
    web_s: float = 1.3e-3
    #: CPU of PostgreSQL for a sample of 2 kB and of 25 kB, both transactions (283 and 773 us,
    #: measured with the real store and an instant engine on 2 cores, PostgreSQL 15).
    database_s: float = 283e-6
    #: WAL of such a sample, bytes (same measurement: 4.5 kB and 29 kB).
    wal_bytes: float = 4500
    #: One NOTIFY statement: 0.4 ms with one listener, and 27 us for each listener, all of which are
    #: woken (same machine: 4.0 to 4.8 ms with 100 listeners, 8.3 ms with 300).
    notify_s: float = 0.4e-3
    wake_s: float = 27e-6
    #: A commit on a disk that syncs, and half a round trip: time, not CPU (results/durability_*).
    commit_s: float = 3e-3
    #: Time between two samples in one place of an engine (fitted).
    gap_s: float = 2e-3
    #: CPU of a web process for one heartbeat or one renewed poll (results/polls_*: 0.40 to 0.47 ms).
    poll_s: float = 0.45e-3
    #: An 8B model on one H200 with one adapter: 256 sequences, 13,083 tokens/s (results/gpu_decode_*);
    #: 512 tokens then take 10 s.
    places: int = 256
    engine_s: float = 256 * 512 / 13_083


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What one cell may use. These are choices, not measurements."""

    database_cores: int = 16
    connections: int = 1000
    wal_bytes_per_s: float = 300e6
    #: Connections of a process: one writes, seven read, one notifies, one listens.
    connections_each: int = 10
    #: Web processes are added until each is used up to this share.
    web_share: float = 0.6


class Simulation:
    """A clock and a heap of events."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, time_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._numbers), act))

    def run(self, until_s: float = math.inf) -> None:
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, act = heapq.heappop(self._events)
            act()


class Cores:
    """CPU cores with one queue; work is done in the order of its arrival."""

    def __init__(self, simulation: Simulation, count: int) -> None:
        self._simulation = simulation
        self._free_s = [0.0] * count
        self.used_s = 0.0
        self.count = count

    def work(self, cost_s: float) -> float:
        """When work that arrives now is done."""
        began_s = max(self._simulation.now_s, heapq.heappop(self._free_s))
        heapq.heappush(self._free_s, began_s + cost_s)
        self.used_s += cost_s
        return began_s + cost_s


class Notifier:
    """Sends the notifications of one process: one statement at a time, for all that wait."""

    def __init__(self, simulation: Simulation, database: Cores, cost_s: float) -> None:
        self._simulation, self._database, self._cost_s = simulation, database, cost_s
        self._waiting: list[Callable[[], None]] = []
        self._busy = False
        self.used_s = 0.0

    def tell(self, act: Callable[[], None]) -> None:
        self._waiting.append(act)
        if not self._busy:
            self._send()

    def _send(self) -> None:
        told, self._waiting = self._waiting, []
        self._busy = bool(told)
        if told:
            self.used_s += self._cost_s
            self._simulation.at(self._database.work(self._cost_s), lambda: self._sent(told))

    def _sent(self, told: list[Callable[[], None]]) -> None:
        for act in told:
            act()
        self._send()


class Engine:
    """Places in which samples run, and a queue before them."""

    def __init__(self, simulation: Simulation, costs: Costs) -> None:
        self._simulation = simulation
        self._took_s = costs.engine_s + costs.gap_s
        self._free = costs.places
        self._queue: deque[Callable[[], None]] = deque()

    def sample(self, done: Callable[[], None]) -> None:
        self._queue.append(done)
        self._begin()

    def _begin(self) -> None:
        while self._free and self._queue:
            self._free -= 1
            done = self._queue.popleft()
            self._simulation.at(self._simulation.now_s + self._took_s, lambda: self._end(done))  # noqa: B023

    def _end(self, done: Callable[[], None]) -> None:
        self._free += 1
        self._begin()
        done()


class Routing:
    """Consistent hashing with bounded loads, as `tinkex.server.scheduler.replicas` does it."""

    def __init__(self, replicas: int, prompts: int) -> None:
        names = [f"model#{number}" for number in range(replicas)]
        self._ranks = [
            sorted(range(replicas), key=lambda number: _score(str(prompt).encode(), names[number]))
            for prompt in range(prompts)
        ]
        self.loads = [0] * replicas
        self._total = 0

    def choose(self, prompt: int) -> int:
        self._total += 1
        allowed = max(MAX_OVER_AVERAGE * self._total / len(self.loads), FEW_SEQUENCES)
        rank = self._ranks[prompt % len(self._ranks)]
        chosen = next((one for one in rank if self.loads[one] + 1 <= allowed), rank[0])
        self.loads[chosen] += 1
        return chosen

    def end(self, replica: int) -> None:
        self.loads[replica] -= 1
        self._total -= 1


@dataclass(kw_only=True)
class Result:
    """What a simulation found, per second of its measured time."""

    per_s: float = 0.0
    web_share: float = 0.0
    webs: int = 1
    database_cores: float = 0.0
    notify_cores: float = 0.0
    #: Time that a sample spent neither in an engine nor in the queue before it.
    added_s: list[float] = field(default_factory=list)

    @property
    def added_p50_s(self) -> float:
        return statistics.median(self.added_s)


def replicas_of_one_web(
    costs: Costs, replicas: int, in_flight: int, requests: int | None, seconds: float = 100.0
) -> Result:
    """
    One web process and its engines, as the benchmarks run them; the database is not a limit there.

    With `requests`, all of them from first to last; otherwise constant load for `seconds`.
    """
    simulation = Simulation()
    web = Cores(simulation, 1)
    engines = [Engine(simulation, costs) for _ in range(replicas)]
    routing = Routing(replicas, prompts=200)
    numbers = itertools.count() if requests is None else iter(range(requests))
    finished = 0

    def begin() -> None:
        prompt = next(numbers, None)
        if prompt is not None:
            simulation.at(web.work(costs.web_s / 2), lambda: accepted(prompt))

    def accepted(prompt: int) -> None:
        chosen = routing.choose(prompt)
        engines[chosen].sample(lambda: sampled(chosen))

    def sampled(chosen: int) -> None:
        nonlocal finished
        finished += 1
        routing.end(chosen)
        simulation.at(web.work(costs.web_s / 2), begin)

    for _ in range(in_flight):
        begin()
    warm_s = 0.0 if requests is not None else 10 * costs.engine_s
    simulation.run(warm_s)
    before = finished, web.used_s
    simulation.run(math.inf if requests is not None else warm_s + seconds)
    took_s = simulation.now_s - warm_s
    return Result(
        per_s=(finished - before[0]) / took_s, web_share=(web.used_s - before[1]) / took_s
    )


def cell(costs: Costs, machine: Machine, replicas: int, seconds: float) -> Result:
    """Web processes, workers and one PostgreSQL; all places of all engines are wanted."""
    simulation = Simulation()
    ideal = replicas * costs.places / costs.engine_s
    sessions = replicas * SESSIONS_PER_REPLICA
    # A heartbeat every 10 s from each session, a renewed poll every 30 s for each sample in flight.
    in_flight = math.ceil(1.25 * replicas * costs.places)
    background = (sessions / 10 + in_flight / 30) * costs.poll_s
    webs = math.ceil((ideal * costs.web_s + background) / machine.web_share)
    # The background takes its share of each web process at any time.
    web_s = costs.web_s / max(0.01, 1 - background / webs)
    processes = webs + replicas
    database = Cores(simulation, machine.database_cores)
    statement_s = costs.notify_s + costs.wake_s * processes
    web = [Cores(simulation, 1) for _ in range(webs)]
    web_notifiers = [Notifier(simulation, database, statement_s) for _ in range(webs)]
    worker_notifiers = [Notifier(simulation, database, statement_s) for _ in range(replicas)]
    engines = [Engine(simulation, costs) for _ in range(replicas)]
    routing = Routing(replicas, prompts=2000)
    result = Result(webs=webs)
    numbers = itertools.count()
    finished = 0

    def begin() -> None:
        number = next(numbers)
        began_s = simulation.now_s
        home = number % webs
        simulation.at(web[home].work(web_s / 2), lambda: store(number, home, began_s))

    def store(number: int, home: int, began_s: float) -> None:
        done_s = database.work(costs.database_s / 2) + costs.commit_s
        simulation.at(done_s, lambda: notify(number, home, began_s))

    def notify(number: int, home: int, began_s: float) -> None:
        web_notifiers[home].tell(lambda: run(number, home, began_s))

    def run(number: int, home: int, began_s: float) -> None:
        chosen = routing.choose(number)
        added_s = simulation.now_s - began_s
        engines[chosen].sample(lambda: publish(chosen, home, added_s))

    def publish(chosen: int, home: int, added_s: float) -> None:
        routing.end(chosen)
        began_s = simulation.now_s - added_s
        done_s = database.work(costs.database_s / 2) + costs.commit_s
        simulation.at(done_s, lambda: worker_notifiers[chosen].tell(lambda: answer(home, began_s)))

    def answer(home: int, began_s: float) -> None:
        simulation.at(web[home].work(web_s / 2), lambda: end(began_s))

    def end(began_s: float) -> None:
        nonlocal finished
        finished += 1
        if simulation.now_s > warm_s:
            result.added_s.append(simulation.now_s - began_s)
        begin()

    warm_s = 2 * costs.engine_s
    for number in range(in_flight):
        # Spread over one engine time: a fleet does not start all its samples in one moment.
        simulation.at(costs.engine_s * number / in_flight, begin)
    simulation.run(warm_s)
    before = (
        finished,
        sum(one.used_s for one in web),
        database.used_s,
        sum(one.used_s for one in (*web_notifiers, *worker_notifiers)),
    )
    simulation.run(warm_s + seconds)
    result.per_s = (finished - before[0]) / seconds
    result.web_share = (sum(one.used_s for one in web) - before[1]) / seconds / webs
    result.database_cores = (database.used_s - before[2]) / seconds
    used_s = sum(one.used_s for one in (*web_notifiers, *worker_notifiers))
    result.notify_cores = (used_s - before[3]) / seconds
    return result


# --- The measured run, and its prediction. ---


@dataclass(frozen=True)
class Row:
    replicas: int
    #: None if the load was constant and the time was fixed.
    samples: int | None
    per_s: float
    cpu_ms: float
    #: Of PostgreSQL, where it was measured.
    database_ms: float


@dataclass(frozen=True)
class Report:
    """A measurement with simulated engines."""

    name: str
    engine_s: float
    places: int
    rows: list[Row]


#: A row of each report: replicas, samples if their number was fixed, samples/s, CPU of the web process
#: and of PostgreSQL.
REPORTS = {
    "replicas": r"^\| (\d+) \| (\d+) \| ([\d.]+) \| [\d.]+ \| ([\d.]+) \|() \d+ \|$",
    "scale_out": r"^\| (\d+) \|() ([\d.]+) \| [\d.]+ \| ([\d.]+) \| [\d.]+ \| ([\d.]+) \|",
}


def read_report(kind: str) -> Report:
    """The newest report of a benchmark."""
    path = max(reports.RESULTS.glob(f"{kind}_*.md"))
    text = path.read_text()
    stated = re.search(r"waits ([\d.]+) s .* runs (\d+) together", text)
    assert stated is not None
    rows = [
        Row(
            int(count), int(samples) if samples else None, float(per_s), float(web), float(sql or 0)
        )
        for count, samples, per_s, web, sql in re.findall(REPORTS[kind], text, re.MULTILINE)
    ]
    return Report(path.name, float(stated[1]), int(stated[2]), rows)


def simulated(costs: Costs, row: Row) -> Result:
    in_flight = 4 * costs.places * row.replicas
    return replicas_of_one_web(costs, row.replicas, in_flight, row.samples)


def fitted(report: Report) -> Costs:
    """Costs that explain the rows below 8: mean CPU time, and the gap with the least squared error."""
    rows = [row for row in report.rows if row.replicas < 8]
    web_s = statistics.mean(row.cpu_ms for row in rows if row.replicas > 1) / 1000
    costs = Costs(web_s=web_s, places=report.places, engine_s=report.engine_s, gap_s=0.0)

    def error(gap_s: float) -> float:
        tried = replace(costs, gap_s=gap_s)
        return sum((simulated(tried, row).per_s / row.per_s - 1) ** 2 for row in rows)

    best = min((step * 1e-3 for step in range(41)), key=error)
    return replace(costs, gap_s=best)


def prediction(kind: str) -> list[str]:
    """The table of one report, and how far the prediction is off."""
    report = read_report(kind)
    fit = fitted(report)
    lines = [
        (
            f"From the rows with 1, 2 and 4 replicas of `{report.name}`: {1000 * fit.web_s:.2f} ms of "
            f"web CPU for a sample, {1000 * fit.gap_s:.0f} ms between two samples in one place."
        ),
        "",
        "| replicas | measured samples/s | simulated | difference | measured web CPU % | simulated |",
        "|--:|--:|--:|--:|--:|--:|",
    ]
    error = math.nan
    for row in report.rows:
        found = simulated(fit, row)
        error = found.per_s / row.per_s - 1
        lines.append(
            f"| {row.replicas} | {row.per_s:.2f} | {found.per_s:.2f} | {error:+.1%} | "
            f"{row.cpu_ms * row.per_s / 10:.0f} | {100 * found.web_share:.0f} |"
        )
    verdict = "met" if abs(error) <= MAX_ERROR else "missed"
    return [
        *lines,
        "",
        (
            f"The last row was not used for the fit; the prediction is off by {error:+.1%} (goal: "
            f"within {MAX_ERROR:.0%}: {verdict})."
        ),
        "",
    ]


def database_check() -> list[str]:
    """CPU of PostgreSQL for a sample, measured and simulated: nothing is fitted."""
    report = read_report("scale_out")
    costs = replace(Costs(), engine_s=report.engine_s, places=report.places)
    lines = [
        "CPU of PostgreSQL in that run, and what the costs of the simulation give, without any fit:",
        "",
        "| workers | measured, ms per sample | simulated | of that notifications |",
        "|--:|--:|--:|--:|",
    ]
    for row in report.rows:
        found = cell(costs, Machine(), row.replicas, 40.0)
        all_ms, notify_ms = (
            1000 * cores / found.per_s for cores in (found.database_cores, found.notify_cores)
        )
        lines.append(f"| {row.replicas} | {row.database_ms:.2f} | {all_ms:.2f} | {notify_ms:.2f} |")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    lines = [
        reports.head("What breaks first in a fleet", "python benchmarks/simulate_fleet.py"),
        "A simulation, driven by measured costs. Nothing here is a measurement of GPUs.",
        "",
        "## Predictions of measured runs",
        "",
        *prediction("replicas"),
        *prediction("scale_out"),
        *database_check(),
        *fleets(Costs(), options.seconds),
    ]
    reports.write("fleet_simulation", "\n".join(lines) + "\n")


def limits(found: Result, costs: Costs, machine: Machine, replicas: int) -> list[str]:
    """What is over its limit, the most overloaded first."""
    ideal = replicas * costs.places / costs.engine_s
    processes = replicas + found.webs
    wanted = {
        "notifications": 2
        * ideal
        * (costs.notify_s + costs.wake_s * processes)
        / machine.database_cores,
        "connections": processes * machine.connections_each / machine.connections,
        "WAL": ideal * costs.wal_bytes / machine.wal_bytes_per_s,
        "rows": ideal * costs.database_s / machine.database_cores,
    }
    order = sorted(wanted, key=lambda name: -wanted[name])
    return [f"{name} ({wanted[name]:.1f} x)" for name in order if wanted[name] > 1]


def fleets(costs: Costs, seconds: float) -> list[str]:
    machine = Machine()
    lines = [
        "## From 16 to 1,000 GPUs on one PostgreSQL",
        "",
        (
            f"Each GPU runs {costs.places} samples of 512 tokens at once, {costs.engine_s:.1f} s each (8B on "
            f"an H200). {SESSIONS_PER_REPLICA} sessions for each GPU. PostgreSQL has "
            f"{machine.database_cores} cores, {machine.connections} connections and "
            f"{machine.wal_bytes_per_s / 1e6:.0f} MB/s of WAL; web processes are added until each uses "
            f"{machine.web_share:.0%} of a core. One sample in a request, prompts of 2 kB."
        ),
        "",
        (
            "| GPUs | sessions | web processes | samples/s | of linear | PostgreSQL cores: all, "
            "notifications | added latency p50 ms | wanted over its limit |"
        ),
        "|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    for replicas in FLEETS:
        found = cell(costs, machine, replicas, seconds)
        lines.append(fleet_row(found, costs, machine, replicas))
        print(lines[-1], file=sys.stderr, flush=True)
    one = cell(costs, machine, CELL, seconds)
    cells = math.ceil(1000 / CELL)
    long = replace(costs, database_s=773e-6, wal_bytes=29_000)
    lines += [
        "",
        f"## Cells of {CELL} replicas",
        "",
        (
            f"{cells} cells, each with its own PostgreSQL and web processes, have {cells * CELL} GPUs and "
            f"{cells * CELL * SESSIONS_PER_REPLICA:,} sessions. Nothing is shared, so a cell is simulated "
            "once for each load."
        ),
        "",
        (
            "| load of one cell | sessions | web processes | samples/s | of linear | PostgreSQL cores: all, "
            "notifications | added latency p50 ms | wanted over its limit |"
        ),
        "|---|--:|--:|--:|--:|--:|--:|---|",
        fleet_row(one, costs, machine, CELL, "2 kB prompts"),
        fleet_row(cell(long, machine, CELL, seconds), long, machine, CELL, "25 kB prompts"),
        "",
        f"All cells together: {cells * one.per_s:,.0f} samples/s.",
    ]
    return lines


def fleet_row(found: Result, costs: Costs, machine: Machine, replicas: int, name: str = "") -> str:
    over = limits(found, costs, machine, replicas)
    linear = found.per_s / (replicas * costs.places / costs.engine_s)
    return (
        f"| {name or replicas} | {replicas * SESSIONS_PER_REPLICA:,} | {found.webs} | "
        f"{found.per_s:,.0f} | {linear:.2f} | {found.database_cores:.1f}, {found.notify_cores:.1f} | "
        f"{1000 * found.added_p50_s:.0f} | {', '.join(over) or '-'} |"
    )


if __name__ == "__main__":
    main()
