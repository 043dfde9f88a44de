"""
Kills processes of a real server while clients train and sample; results must not change.

The seed alone decides which process is killed, and after how many answers. The moment within a step
depends on the timing of the machine.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from processes import children
from qa.chaos.history import Event, Violation, check
from qa.chaos.reference_models import RecordedRun
from serving import TINY, Server, serving

PROGRAM = Path(__file__).with_name("client_program.py")
TARGETS = ("engine", "web", "both")
#: A run without an answer for this long is stuck.
STUCK_S = 240.0
#: Allowed relative difference from a run without kills on a server that is not deterministic.
TOLERANCE = 0.02


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One planned kill."""

    target: str
    #: Number of answers between the previous kill and this one.
    after: int
    #: Further delay. With `after` = 0 the kill hits the recovery from the previous one.
    delay_s: float


def plan(seed: int, kills: int) -> list[Kill]:
    rng = random.Random(seed)
    planned = []
    for _ in range(kills):
        target = rng.choices(TARGETS, [4, 4, 2])[0]
        if planned and rng.random() < 0.7:
            planned.append(Kill(target=target, after=0, delay_s=rng.uniform(0.0, 1.5)))
        else:
            after = rng.randrange(1, 30)
            planned.append(Kill(target=target, after=after, delay_s=rng.uniform(0.0, 0.05)))
    return planned


@dataclass
class Progress:
    """Counts the answers of all clients."""

    answers: int = 0
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def add(self) -> None:
        with self._changed:
            self.answers += 1
            self._changed.notify_all()

    def reach(self, answers: int) -> bool:
        """Waits for this many answers; False if the run is stuck."""
        with self._changed:
            while self.answers < answers:
                before = self.answers
                if not self._changed.wait(STUCK_S) and self.answers == before:
                    return False
            return True


class Killer:
    """Executes the planned kills in its own thread."""

    def __init__(
        self,
        server: Server,
        planned: Sequence[Kill],
        progress: Progress,
        log_progress: Callable[[str], None],
    ) -> None:
        self._server, self._planned = server, planned
        self._progress, self._log_progress = progress, log_progress
        self._choice = random.Random(len(planned))
        self.killed: Counter[str] = Counter()
        self.stuck = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="killer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def _run(self) -> None:
        for kill in self._planned:
            if not self._progress.reach(self._progress.answers + kill.after):
                self.stuck = True
                return
            time.sleep(kill.delay_s)
            for pid in self._find(kill.target):
                os.kill(pid, signal.SIGKILL)
            self.killed[kill.target] += 1
            killed = sum(self.killed.values())
            if killed % 10 == 0:
                self._log_progress(f"  {killed} kills, {self._progress.answers} answers")

    def _find(self, target: str) -> list[int]:
        """The processes to kill; waits until they are running."""
        while not self._stopped.is_set():
            webs = [pid for pid in children(self._server.process.pid) if _is_running(pid)]
            engines = [child for web in webs for child in _children(web) if _is_running(child)]
            if target == "engine":
                # Of an engine over several GPUs also the other ranks.
                ranks = (rank for engine in engines for rank in _children(engine))
                engines += filter(_is_running, ranks)
            if target == "web" and webs:
                return webs
            if target == "engine" and engines:
                # With replicas, the others go on.
                return [self._choice.choice(engines)]
            if target == "both" and webs and engines:
                return [*engines, *webs]
            time.sleep(0.005)
        return []


def _children(pid: int) -> list[int]:
    try:
        return children(pid)
    except OSError:  # it has just exited
        return []


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Client:
    """A client program in its own process, and the events that it writes."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        history: list[Event],
        progress: Progress,
    ) -> None:
        self.name = name
        self._history, self._progress = history, progress
        self._rounds = 0
        self._done = threading.Semaphore(0)
        self.process = subprocess.Popen(
            [*command],
            env=dict(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log: list[str] = []
        self._threads = [
            threading.Thread(target=self._read, daemon=True),
            threading.Thread(target=self._read_log, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def round(self) -> None:
        """Runs one round of the program and waits for its end."""
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        while not self._done.acquire(timeout=1.0):
            if self.process.poll() is not None:
                break
        if self.process.poll() is not None:
            raise RuntimeError(f"{self.name} ended: {''.join(self.log[-30:])}")
        self._rounds += 1

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            fields = json.loads(line)
            if "round" in fields:
                self._done.release()
                continue
            event = Event(**fields)
            self._history.append(event)
            if event.answered:
                self._progress.add()

    def _read_log(self) -> None:
        assert self.process.stderr
        self.log.extend(self.process.stderr)

    def close(self) -> None:
        assert self.process.stdin
        assert self.process.stdout
        assert self.process.stderr
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for thread in self._threads:
            thread.join(10)
        self.process.stdout.close()
        self.process.stderr.close()


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of a run."""

    killed: Counter[str]
    violations: list[Violation]
    #: Digests of the final weights of all rounds.
    weights: set[str]
    rounds: int
    operations: int
    #: The largest relative difference of a loss from the run without kills.
    largest_difference: float
    wall_s: float
    stuck: bool
    log: list[str]
    #: Runs whose stored step metrics are not those of their requests.
    wrong_metrics: list[str]

    def is_good(self, *, deterministic: bool) -> bool:
        """No violation, and weights or losses as in the run without kills."""
        same = len(self.weights) == 1 if deterministic else self.largest_difference <= TOLERANCE
        wrong = self.violations or self.wrong_metrics or self.stuck
        return same and not wrong and self.rounds > 0

    def lines(self) -> list[str]:
        kinds = ", ".join(f"{count} of {target}" for target, count in sorted(self.killed.items()))
        return [
            f"kills: {sum(self.killed.values())} ({kinds})",
            f"rounds: {self.rounds}, operations: {self.operations}",
            f"distinct final weights: {len(self.weights)}",
            f"largest difference of a loss: {self.largest_difference:.2e}",
            f"violations: {len(self.violations)}",
            f"runs with wrong step metrics: {len(self.wrong_metrics)} {self.wrong_metrics[:3]}",
            f"wall time: {self.wall_s:.0f} s",
        ]


def run(
    *,
    model: Path,
    data: Path,
    sdk: Path | None,
    seed: int,
    kills: int,
    deterministic: bool,
    replicas: int = 1,
    ranks: int = 1,
    steps: int = 12,
    log_progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Runs one round without kills as the reference, then rounds until all kills are done."""
    began_s = time.monotonic()
    history: list[Event] = []
    progress = Progress()
    args = ("--replicas", str(replicas), "--gpus-per-replica", str(ranks))
    args += ("--deterministic",) if deterministic else ()
    data.mkdir(parents=True, exist_ok=True)
    # Frequent snapshots, so that kills hit their writing and recoveries start from them.
    (data / "tinkex.toml").write_text("snapshot_steps = 7\n")
    with ExitStack() as stack:
        server = stack.enter_context(serving(f"{TINY}={model}", data=data, args=args))
        clients = []
        for name, command in programs(sdk).items():
            env = {**os.environ, **_environment(server, name)}
            program = [*command, str(PROGRAM), name, TINY, name, str(steps)]
            client = Client(name, program, env, history=history, progress=progress)
            stack.callback(client.close)
            clients.append(client)
        in_threads(clients, lambda client: client.round())
        baseline = len(history)
        log_progress(
            f"  one round without kills: {baseline} events, {time.monotonic() - began_s:.0f} s"
        )
        killer = Killer(server, plan(seed, kills), progress, log_progress)
        stack.callback(killer.stop)
        killer.start()

        def until_done(client: Client) -> None:
            client.round()
            while not killer.is_done:
                client.round()

        try:
            in_threads(clients, until_done)
        except RuntimeError as error:
            server.log.append(str(error))
        log = list(server.log)
    answers, samples = recorded(history[:baseline])
    tolerance = 0.0 if deterministic else TOLERANCE
    expected = RecordedRun(
        answers=answers, samples=samples if deterministic else {}, tolerance=tolerance
    )
    saves = [event for event in history if event.answered and _is_path(event.answer)]
    return Report(
        killed=killer.killed,
        violations=check(history, expected),
        weights={_weights_digest(data, str(event.answer)) for event in saves},
        rounds=sum(client._rounds for client in clients),
        operations=sum(event.answered for event in history),
        largest_difference=_largest_difference(history, answers),
        wall_s=time.monotonic() - began_s,
        stuck=killer.stuck,
        log=log,
        wrong_metrics=_wrong_metrics(data),
    )


def programs(sdk: Path | None) -> dict[str, list[str]]:
    programs = {"tinkex": [sys.executable]}
    if sdk is not None:
        programs["tinker"] = [str(sdk)]
    return programs


def _environment(server: Server, name: str) -> dict[str, str]:
    prefix = name.upper().replace("TINKEX", "TINKER")
    return {f"{prefix}_BASE_URL": server.url, f"{prefix}_API_KEY": "tml-any-key-will-do"}


def in_threads(clients: Sequence[Client], action: Any) -> None:
    """Runs an action for each client in a thread; raises the first error after all have ended."""
    errors: list[Exception] = []

    def guarded(client: Client) -> None:
        try:
            action(client)
        except Exception as error:  # noqa: BLE001  raised below
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error


def recorded(baseline: Sequence[Event]) -> tuple[dict[int, Any], dict[tuple[int, str], Any]]:
    """Answers of the reference round by number of earlier steps, and its samples."""
    submits = {(each.client, each.operation): each for each in baseline if not each.answered}
    answers_by_name = {
        (each.client, each.operation): each.answer for each in baseline if each.answered
    }
    answers: dict[int, Any] = {}
    samples: dict[tuple[int, str], Any] = {}
    states: dict[str, int] = {}
    saved: dict[str, int] = {}
    for name, submit in submits.items():
        if submit.kind == "create":
            states[submit.target] = submit.argument
        elif submit.kind in ("sample", "list"):
            continue
        else:
            state = states[submit.target]
            answers.setdefault(state, answers_by_name[name])
            states[submit.target] = state + 1
            if submit.kind == "save_for_sampler":
                saved[answers_by_name[name]] = state + 1
    for name, submit in submits.items():
        if submit.kind == "sample":
            samples.setdefault((saved[submit.target], str(submit.argument)), answers_by_name[name])
    return answers, samples


def _is_path(answer: Any) -> bool:
    return isinstance(answer, str) and answer.startswith("tinker://")


def _weights_digest(data: Path, path: str) -> str:
    """A digest of every tensor file of a checkpoint."""
    model_id, kind, name = path.removeprefix("tinker://").split("/")
    # A killed save leaves a folder without a row, which the periodic cleanup removes.
    statement = "SELECT place FROM checkpoint_versions WHERE model_id = ? AND kind = ? AND name = ?"
    with contextlib.closing(sqlite3.connect(data / "tinkex.db")) as connection:
        ((place,),) = connection.execute(statement, (model_id, kind, name)).fetchall()
    digest = hashlib.sha256()
    for file in sorted((data / place).glob("*.safetensors")):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def _wrong_metrics(data: Path) -> list[str]:
    """Runs whose requests were not each counted once: a step missing, doubled or with other passes."""
    requests = """
        SELECT model_id, sum(kind = 'optim_step'), sum(kind = 'forward_backward') FROM requests
        WHERE status = 'done' AND model_id IS NOT NULL GROUP BY model_id
    """
    stored = """
        SELECT model_id, max(number * (finished_s IS NOT NULL)), sum(finished_s IS NOT NULL),
            sum(passes) FROM step_metrics GROUP BY model_id
    """
    with contextlib.closing(sqlite3.connect(data / "tinkex.db")) as connection:
        found = {row[0]: row[1:] for row in connection.execute(stored)}
        return [
            f"{model_id}: {steps} steps, {passes} passes, stored {found.get(model_id)}"
            for model_id, steps, passes in connection.execute(requests)
            if found.get(model_id, (0, 0, 0)) != (steps, steps, passes)
        ]


def _largest_difference(history: Sequence[Event], answers: Mapping[int, Any]) -> float:
    """The largest relative difference of a loss from the reference round."""
    states: dict[str, int] = {}
    answers_by_name = {
        (each.client, each.operation): each.answer for each in history if each.answered
    }
    largest_difference = 0.0
    for event in history:
        if event.answered or event.kind in ("sample", "list"):
            continue
        if event.kind == "create":
            states[event.target] = event.argument
            continue
        state = states[event.target]
        states[event.target] = state + 1
        answer = answers_by_name.get((event.client, event.operation))
        if event.kind in ("pass", "forward") and answer is not None:
            expected = answers[state]["loss"]
            largest_difference = max(
                largest_difference, abs(answer["loss"] - expected) / abs(expected)
            )
    return largest_difference
