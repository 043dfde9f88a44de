"""
Traces which files one request runs through, on a real server and in a client.

    python qa/walk.py [--functions] [--write]

Starts `tinkex serve` with the tiny model and a client process, both with a profile hook
(`trace_hook/sitecustomize.py`), and sends `forward_backward`, `sample` and `save_weights` in several
rounds after a warm-up. A file counts if in every round one of its functions runs between the call and
its result; functions that also run on an idle server, such as periodic checks, do not count.
`docs/internals.md` shows the table; `--write` updates it and `tests/docs/test_walk.py` checks it.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HOOK = Path(__file__).resolve().parent / "trace_hook"
NAME = "walk/tiny"
OPERATIONS = ("forward_backward", "sample", "save_weights")
PACKAGES = ("server", "client")
#: Work that does not belong to the request, such as a timer, is unlikely to run in every round.
ROUNDS = 3
#: Longer than the interval of the server's periodic checks (5 s), so that all of them are recorded.
IDLE_S = 7.0
#: Rarer periodic work must not run at all: recorded as idle or not by chance, it would change figures.
ENVIRONMENT = {"TINKER_TELEMETRY": "0", "TINKEX_JANITOR_S": "3600"}
#: Longer than the hook's interval, and long enough for work that follows a response, such as metrics.
SETTLE_S = 0.5

PAGE = ROOT / "docs" / "internals.md"
BEGIN, END = "<!-- qa/walk.py: begin -->\n", "<!-- qa/walk.py: end -->\n"

CLIENT = """
import sys
import tinkex
from tinkex import types
from tinkex.client import session

assert session.HEARTBEAT_EVERY_S
session.HEARTBEAT_EVERY_S = 3600.0
url, name = sys.argv[1:]
tokens = list(range(40, 60))
datum = types.Datum(
    model_input=types.ModelInput.from_ints(tokens[:-1]),
    loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * 19},
)
service = tinkex.ServiceClient(base_url=url, api_key="tml-walk")
training = service.create_lora_training_client(name, rank=4)
sampler = service.create_sampling_client(base_model=name)
params = types.SamplingParams(max_tokens=4, temperature=0.0)
actions = {
    "forward_backward": lambda: training.forward_backward([datum], "cross_entropy").result(),
    "sample": lambda: sampler.sample(types.ModelInput.from_ints(tokens), 1, params).result(),
    "save_weights": lambda: training.save_state("walk", overwrite=True).result(),
}
for name in list(actions) * 2:
    actions[name]()
print("ready", flush=True)
for line in sys.stdin:
    actions[line.strip()]()
    print("done", flush=True)
"""


@dataclass(frozen=True)
class Walk:
    """The files and functions of one package that one operation runs, in order of the first call."""

    operation: str
    package: str
    files: list[str]
    functions: list[str]


@contextmanager
def started(command: list[str], env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if "serve" in command else None,
        text=True,
        env=env,
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=60)


def read_line(process: subprocess.Popen[str], expected: str) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line.startswith(expected):
        raise SystemExit(f"expected {expected!r}, got {line!r}")
    return line


def trace() -> list[Walk]:
    """Runs server and client, and records every operation in every round."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        traces = folder / "trace"
        traces.mkdir()
        phase = traces / "phase"
        phase.write_text("")
        model = folder / "model"
        tinkex = [sys.executable, "-m", "tinkex.cli.main"]
        subprocess.run([*tinkex, "tiny-model", str(model)], check=True, capture_output=True)
        env = {**os.environ, **ENVIRONMENT, "TINKEX_TRACE": str(traces)}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HOOK), env.get("PYTHONPATH")]))
        serve = [*tinkex, "serve", f"{NAME}={model}", "--port", "0", "--threads", "1"]
        with started([*serve, "--data", str(folder / "data")], env) as server:
            url = read_line(server, "tinkex ready at").split()[-1]
            with started([sys.executable, "-c", CLIENT, url, NAME], env) as client:
                read_line(client, "ready")
                assert client.stdin is not None
                enter(phase, "idle")
                time.sleep(IDLE_S)
                for operation, number in itertools.product(OPERATIONS, range(ROUNDS)):
                    enter(phase, f"{operation} {number}")
                    client.stdin.write(operation + "\n")
                    client.stdin.flush()
                    read_line(client, "done")
                    time.sleep(SETTLE_S)
                enter(phase, "")
        return read(traces)


def enter(phase: Path, name: str) -> None:
    part = phase.with_suffix(".part")
    part.write_text(name)
    part.replace(phase)
    time.sleep(SETTLE_S)


def read(traces: Path) -> list[Walk]:
    processes = [json.loads(path.read_text()) for path in traces.glob("*.json")]
    walks = []
    for package in PACKAGES:
        for operation in OPERATIONS:
            rounds = [called(processes, package, f"{operation} {n}") for n in range(ROUNDS)]
            in_all = set.intersection(*({file for file, _ in one} for one in rounds))
            functions = [(file, function) for file, function in rounds[0] if file in in_all]
            files = list(dict.fromkeys(file for file, _ in functions))
            walks.append(Walk(operation, package, files, [": ".join(one) for one in functions]))
    return walks


def called(processes: list[Any], package: str, phase: str) -> list[tuple[str, str]]:
    """File and name of the functions of a package that ran in a phase and not on the idle server."""
    found: dict[tuple[str, str], None] = {}
    for phases in processes:
        idle = {tuple(one) for one in phases.get("idle", [])}
        for file, function in phases.get(phase, []):
            inside = file.rpartition(f"{os.sep}tinkex{os.sep}")[2]
            if inside.startswith(package + os.sep) and (file, function) not in idle:
                found.setdefault((inside.removeprefix(package + os.sep), function))
    return list(found)


def table(walks: list[Walk]) -> str:
    lines = ["| | " + " | ".join(f"`{name}`" for name in OPERATIONS) + " |", "|---|--:|--:|--:|"]
    for package in PACKAGES:
        counts = [str(len(walk.files)) for walk in walks if walk.package == package]
        lines.append(f"| files of {package}/ | " + " | ".join(counts) + " |")
    return "\n".join(lines)


def documented() -> str:
    """The table in `docs/internals.md`."""
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip()


def write(figures: str) -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{figures}\n{END}{rest.partition(END)[2]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--functions", action="store_true", help="list every function too")
    parser.add_argument("--write", action="store_true", help=f"update {PAGE.relative_to(ROOT)}")
    options = parser.parse_args()
    walks = trace()
    print(table(walks))
    if options.write:
        write(table(walks))
    for walk in walks:
        print(f"\n{walk.operation}, {walk.package}/: {len(walk.files)}")
        print("  " + "\n  ".join(walk.functions if options.functions else walk.files))


if __name__ == "__main__":
    main()
