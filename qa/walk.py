"""
Which files does one request run through? Traced on a real server and in a real client.

    python qa/walk.py [--functions]

Starts `tinkex serve` with the tiny model and a client process, both with a profile hook
(`trace_hook/sitecustomize.py`), and sends one `forward_backward`, one `sample` and one
`save_weights` after a warm-up. A file counts when one of its functions is called between the
call and its result and is not called on an idle server: heartbeats and periodic checks do not count.
The figures stand in `docs/internals.md`; `tests/docs/test_walk.py` checks them.
"""

import argparse
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

ROOT = Path(__file__).resolve().parent.parent
HOOK = Path(__file__).resolve().parent / "trace_hook"
NAME = "walk/tiny"
OPERATIONS = ("forward_backward", "sample", "save_weights")
PACKAGES = ("server", "client")
IDLE_S = 4.0
#: Longer than the hook's interval, and long enough for what follows an answer (marks, metrics).
SETTLE_S = 0.5

CLIENT = """
import sys
import tinkex
from tinkex import types

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
act = {
    "forward_backward": lambda: training.forward_backward([datum], "cross_entropy").result(),
    "sample": lambda: sampler.sample(types.ModelInput.from_ints(tokens), 1, params).result(),
    "save_weights": lambda: training.save_state("walk", overwrite=True).result(),
}
for name in list(act) * 2:
    act[name]()
print("ready", flush=True)
for line in sys.stdin:
    act[line.strip()]()
    print("done", flush=True)
"""


@dataclass(frozen=True)
class Walk:
    """The files of one package that one operation runs through, in the order of the first call."""

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


def answered(process: subprocess.Popen[str], expected: str) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line.startswith(expected):
        raise SystemExit(f"expected {expected!r}, got {line!r}")
    return line


def trace() -> list[Walk]:
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        traces = folder / "trace"
        traces.mkdir()
        phase = traces / "phase"
        phase.write_text("")
        model = folder / "model"
        tinkex = [sys.executable, "-m", "tinkex.cli.main"]
        subprocess.run([*tinkex, "tiny-model", str(model)], check=True, capture_output=True)
        env = {**os.environ, "TINKEX_TRACE": str(traces), "TINKER_TELEMETRY": "0"}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HOOK), env.get("PYTHONPATH")]))
        serve = [*tinkex, "serve", f"{NAME}={model}", "--port", "0", "--threads", "1"]
        with started([*serve, "--data", str(folder / "data")], env) as server:
            url = answered(server, "tinkex ready at").split()[-1]
            with started([sys.executable, "-c", CLIENT, url, NAME], env) as client:
                answered(client, "ready")
                assert client.stdin is not None
                enter(phase, "idle")
                time.sleep(IDLE_S)
                for operation in OPERATIONS:
                    enter(phase, operation)
                    client.stdin.write(operation + "\n")
                    client.stdin.flush()
                    answered(client, "done")
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
            files: dict[str, None] = {}
            functions: dict[str, None] = {}
            for phases in processes:
                idle = {tuple(one) for one in phases.get("idle", [])}
                for file, function in phases.get(operation, []):
                    inside = file.rpartition(f"{os.sep}tinkex{os.sep}")[2]
                    if inside.startswith(package + os.sep) and (file, function) not in idle:
                        name = inside.removeprefix(package + os.sep)
                        files.setdefault(name)
                        functions.setdefault(f"{name}: {function}")
            walks.append(Walk(operation, package, list(files), list(functions)))
    return walks


def table(walks: list[Walk]) -> str:
    lines = ["| | " + " | ".join(f"`{name}`" for name in OPERATIONS) + " |", "|---|--:|--:|--:|"]
    for package in PACKAGES:
        counts = [str(len(walk.files)) for walk in walks if walk.package == package]
        lines.append(f"| files of {package}/ | " + " | ".join(counts) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--functions", action="store_true", help="list every function too")
    asked = parser.parse_args()
    walks = trace()
    print(table(walks))
    for walk in walks:
        print(f"\n{walk.operation}, {walk.package}/: {len(walk.files)}")
        print("  " + "\n  ".join(walk.functions if asked.functions else walk.files))


if __name__ == "__main__":
    main()
