"""
Noisy neighbor: the latency of one owner's small requests under another owner's heavy load.

    python benchmarks/bench_noisy_neighbor.py [--baseline PYTHON] [--rounds 15]

A `tinkex serve` process with the tiny model and two keys. Alice has 3,000 old sessions, each with a
checkpoint, and applies one kind of load at a time; Bob samples four tokens and runs a small training
step. Then the engine is killed under Alice's load. `--baseline` is the Python of another tree (an
earlier commit), whose server is measured in the same run.

Goals: under load, Bob's slowest request takes less than 3 times his median on an idle server plus 1 s;
after an engine crash, less than 3 times an engine start.
"""

import argparse
import concurrent.futures
import datetime
import json
import os
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import reports

import tinkex
from processes import children
from tinkex import types

NAME = "bench/tiny"
SESSIONS = 3_000
DAY_S = 24 * 3600
#: Number of Alice's models, and of passes waiting on each.
MODELS, PASSES = 8, 18
TOKENS = list(range(40, 60))
LONG = [5] * 2_000


def datum(tokens: list[int]) -> types.Datum:
    weights = [1.0] * (len(tokens) - 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
    )


# -- Alice: `python bench_noisy_neighbor.py --load NAME URL KEY` until it is killed -------------------


def call(url: str, key: str, method: str, path: str, body: Any = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json", "x-api-key": key}
    request = urllib.request.Request(f"{url}/api/v1/{path}", data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        return bytes(error.read())


def load_report(url: str, key: str) -> None:
    now = datetime.datetime.now(datetime.UTC).replace(minute=0, second=0, microsecond=0)
    ends = (now - datetime.timedelta(days=14), now)
    first, end = (time_.isoformat().replace("+00:00", "Z") for time_ in ends)
    while True:
        call(url, key, "GET", f"billing/usage/events?starting_on={first}&ending_before={end}")


def load_search(url: str, key: str) -> None:
    # No session matches, so the search examines every session.
    body = {"display_name": "nothing is called this", "user_metadata": {"no": "such"}}
    while True:
        call(url, key, "POST", "sessions/search", body)


def load_custom_loss(url: str, key: str) -> None:
    import torch

    def heavy(logprobs: Any) -> Any:
        square = torch.outer(logprobs, logprobs)
        for _ in range(30):
            square = torch.softmax(square @ square, -1)
        return square.sum() + logprobs.sum(), {}

    with tinkex.ServiceClient(base_url=url, api_key=key) as service:
        handle = service.create_custom_loss(heavy, {"logprobs": 1}).result()
        clients = [service.create_lora_training_client(NAME, rank=8) for _ in range(4)]
        while True:
            waiting = [one.forward_backward_custom([datum(LONG)], handle) for one in clients]
            for future in waiting:
                with suppress(tinkex.TinkerError):
                    future.result()


def load_training(url: str, key: str) -> None:
    with tinkex.ServiceClient(base_url=url, api_key=key) as service:
        clients = [service.create_lora_training_client(NAME, rank=8) for _ in range(MODELS)]
        rows = [datum(LONG)] * 8

        def train(client: tinkex.TrainingClient) -> None:
            waiting = [client.forward_backward(rows, "cross_entropy") for _ in range(PASSES)]
            while True:
                waiting.append(client.forward_backward(rows, "cross_entropy"))
                waiting.pop(0).result()

        with concurrent.futures.ThreadPoolExecutor(MODELS) as pool:
            list(pool.map(train, clients))


def load_samples(url: str, key: str) -> None:
    with tinkex.ServiceClient(base_url=url, api_key=key) as service:
        sampler = service.create_sampling_client(base_model=NAME)
        params = types.SamplingParams(max_tokens=1_000, temperature=1.0)
        prompt = types.ModelInput.from_ints(TOKENS)
        waiting = [sampler.sample(prompt, 4, params) for _ in range(1_000)]
        while True:
            waiting.append(sampler.sample(prompt, 4, params))
            waiting.pop(0).result()


LOADS: dict[str, tuple[str, Callable[[str, str], None], int]] = {
    "report": ("usage of 14 days, 2 at a time", load_report, 2),
    "search": ("searches without a match, 8 at a time", load_search, 8),
    "custom": ("custom losses of 30 products of 2,000 x 2,000, 4 models", load_custom_loss, 1),
    "training": (
        f"{MODELS} models, {PASSES} passes of 16,000 tokens waiting on each",
        load_training,
        1,
    ),
    "samples": ("1,000 samples of 4 x 1,000 tokens waiting", load_samples, 1),
}


# -- the server and Bob --------------------------------------------------------------------------
#: A single step of decoding for 256 sequences takes longer than the bar on a CPU.
WITHOUT_BAR = {"samples"}


@contextmanager
def serving(python: str, data: Path, model: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [python, "-m", "tinkex.cli.main", "serve", f"{NAME}={model}", "--port", "0"]
    with (data.parent / "log").open("a") as log:
        process = subprocess.Popen(
            [*command, "--data", str(data), "--threads", "1"],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=data.parent,
        )
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().split()[-1]
    finally:
        process.terminate()
        process.wait(60)


def make_key(python: str, data: Path, owner: str) -> str:
    command = [python, "-m", "tinkex.cli.main", "key", "create", "--owner", owner]
    printed = subprocess.run(
        [*command, "--data", str(data)], capture_output=True, text=True, check=True
    ).stdout
    return next(word for word in printed.split() if word.startswith("tml-"))


def add_old_sessions(data: Path, count: int) -> None:
    """Adds database rows for 15-day-old copies of Alice's session, model and checkpoint."""
    with sqlite3.connect(data / "tinkex.db") as db:
        db.row_factory = sqlite3.Row
        old_s = time.time() - 15 * DAY_S
        one = {
            table: dict(db.execute(f"SELECT * FROM {table} WHERE owner = 'alice'").fetchone())
            for table in ("sessions", "models", "checkpoint_versions")
        }
        name = dict(db.execute("SELECT * FROM checkpoint_names").fetchone())

        def add(table: str, row: dict[str, Any]) -> None:
            marks = ", ".join("?" for _ in row)
            db.execute(
                f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})", list(row.values())
            )

        for number in range(count):
            session, model, version = f"old{number:08}", f"old{number:08}:train:0", f"{number:024x}"
            add(
                "sessions",
                {**one["sessions"], "session_id": session, "created_s": old_s, "seen_s": old_s}
                | {"idempotency_key": None, "finished_s": old_s},
            )
            add(
                "models",
                {**one["models"], "model_id": model, "session_id": session, "created_s": old_s},
            )
            place = f"checkpoints/{model}/weights/a/{version}"
            add(
                "checkpoint_versions",
                {**one["checkpoint_versions"], "version_id": version, "model_id": model}
                | {"place": place, "created_s": old_s},
            )
            add(
                "checkpoint_names",
                {**name, "model_id": model, "version_id": version, "saved_s": old_s},
            )


class Bob:
    """Sends one small request at a time."""

    def __init__(self, url: str, key: str) -> None:
        self._service = tinkex.ServiceClient(base_url=url, api_key=key)
        self._training = self._service.create_lora_training_client(NAME, rank=4)
        self._sampler = self._service.create_sampling_client(base_model=NAME)

    def sample(self) -> float:
        began_s = time.perf_counter()
        params = types.SamplingParams(max_tokens=4, temperature=0.0)
        self._sampler.sample(types.ModelInput.from_ints(TOKENS), 1, params).result()
        return time.perf_counter() - began_s

    def step(self) -> float:
        began_s = time.perf_counter()
        self._training.forward_backward([datum(TOKENS)], "cross_entropy")
        self._training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        return time.perf_counter() - began_s

    def both_at_once(self) -> dict[str, float]:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            futures = {"sample": pool.submit(self.sample), "step": pool.submit(self.step)}
            return {name: future.result() for name, future in futures.items()}


@contextmanager
def loading(name: str, url: str, key: str) -> Iterator[None]:
    _, _, copies = LOADS[name]
    command = [sys.executable, __file__, "--load", name, url, key]
    running = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
        for _ in range(copies)
    ]
    try:
        time.sleep(8.0)  # the clients start and the queue fills
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()


def kill_engine(server: subprocess.Popen[str]) -> None:
    web = children(server.pid)
    for pid in [child for one in web for child in children(one)]:
        with suppress(OSError):
            if b"tinkex.engine" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
                return
    raise RuntimeError("no engine process found")


def measure(python: str, rounds: int) -> dict[str, Any]:
    """Seconds of Bob's sample and step: idle, under each load, and after an engine crash."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        data, model = Path(folder) / "data", Path(folder) / "model"
        subprocess.run(
            [python, "-m", "tinkex.cli.main", "tiny-model", str(model)],
            check=True,
            capture_output=True,
        )
        alice, bob_key = (make_key(python, data, owner) for owner in ("alice", "bob"))
        with (
            serving(python, data, model) as (_, url),
            tinkex.ServiceClient(base_url=url, api_key=alice) as service,
        ):
            training = service.create_lora_training_client(NAME, rank=4)
            training.save_state("a").result()
        add_old_sessions(data, SESSIONS)
        with serving(python, data, model) as (server, url):
            bob = Bob(url, bob_key)
            bob.sample(), bob.step()
            found["idle"] = timed(bob, rounds)
            for name in LOADS:
                with loading(name, url, alice):
                    found[name] = timed(bob, rounds)
                print(f"{python}: {name}: {found[name]}", file=sys.stderr)
                settle(bob)
        # A new server for each death: a request that was lost twice is tried apart from the others,
        # and that is another question than how long one death takes.
        for name in ("engine start", "crash under training", "crash under samples"):
            data = Path(folder) / name.replace(" ", "-")
            alice, bob_key = (make_key(python, data, owner) for owner in ("alice", "bob"))
            with serving(python, data, model) as (server, url):
                bob = Bob(url, bob_key)
                bob.sample(), bob.step()
                load = name.removeprefix("crash under ")
                with loading(load, url, alice) if load in LOADS else nullcontext():
                    kill_engine(server)
                    found[name] = bob.both_at_once()
            print(f"{python}: {name}: {found[name]}", file=sys.stderr)
    return found


def timed(bob: Bob, rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {"sample": [], "step": []}
    until_s = time.monotonic() + 60
    for _ in range(rounds):
        times["sample"].append(bob.sample())
        times["step"].append(bob.step())
        if time.monotonic() > until_s:
            break
    return times


def settle(bob: Bob) -> None:
    """Waits until the remaining work of a load is done: five fast steps in a row."""
    quick = 0
    deadline = time.monotonic() + 120
    while quick < 5 and time.monotonic() < deadline:
        quick = quick + 1 if bob.step() < 0.25 else 0


def report(by_server: dict[str, dict[str, Any]]) -> tuple[str, bool]:
    lines, met = [], True
    for server, found in by_server.items():
        lines += [
            f"\n## {server}\n",
            "| Alice's load | Bob's request | median s | slowest s | goal s | |",
            "|---|---|--:|--:|--:|---|",
        ]
        idle = {what: statistics.median(found["idle"][what]) for what in ("sample", "step")}
        for what, times in found["idle"].items():
            lines.append(
                f"| none | {what} | {statistics.median(times):.3f} | {max(times):.3f} | | |"
            )
        for name, (words, _, _) in LOADS.items():
            for what, times in found[name].items():
                goal_s = 3 * idle[what] + 1
                if name in WITHOUT_BAR:
                    verdict = "|"
                else:
                    good = max(times) < goal_s
                    met &= good or server != "this tree"
                    verdict = f"{goal_s:.2f} | {'met' if good else 'missed'}"
                lines.append(
                    f"| {words} | {what} | {statistics.median(times):.3f} | {max(times):.3f} | {verdict} |"
                )
        lines += [
            "",
            "| engine killed | Bob's request | s | goal s | |",
            "|---|---|--:|--:|---|",
        ]
        start = found["engine start"]
        for what in ("sample", "step"):
            lines.append(f"| on an idle server | {what} | {start[what]:.1f} | | |")
        for name in ("training", "samples"):
            for what in ("sample", "step"):
                took, goal_s = found[f"crash under {name}"][what], 3 * start[what]
                good = took < goal_s
                met &= good or server != "this tree"
                verdict = "met" if good else "missed"
                lines.append(
                    f"| under {LOADS[name][0]} | {what} | {took:.1f} | {goal_s:.1f} | {verdict} |"
                )
    return "\n".join(lines) + "\n", met


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--load", nargs=3, metavar=("NAME", "URL", "KEY"))
    parser.add_argument("--baseline", help="the Python of another tree")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    if options.load:
        name, url, key = options.load
        threading.Thread(target=LOADS[name][1], args=(url, key), daemon=True).start()
        sys.stdin.read()  # until the parent process ends
        os._exit(0)
    servers = {"this tree": sys.executable} | (
        {"baseline": options.baseline} if options.baseline else {}
    )
    found: dict[str, dict[str, Any]] = {}
    met = False
    for name, python in servers.items():
        found[name] = measure(python, options.rounds)
        met = write_report(found)  # after each server: the baseline may take long or fail
    return 0 if met else 1


def write_report(found: dict[str, dict[str, Any]]) -> bool:
    """Writes the report; returns whether this tree met every goal."""
    table, met = report(found)
    head = reports.head(
        "Noisy neighbor: small requests of one owner under another owner's load",
        "python benchmarks/bench_noisy_neighbor.py",
        "one engine thread",
    )
    reports.write("noisy_neighbor", f"{head}\nAlice has {SESSIONS:,} sessions.\n{table}")
    return met


if __name__ == "__main__":
    sys.exit(main())
