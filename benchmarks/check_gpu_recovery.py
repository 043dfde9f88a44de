"""
Checks that device failures only delay clients: kills, CUDA errors and full memory during training.

    python benchmarks/check_gpu_recovery.py [--device cuda] [--steps 60] [--faults 9] [--seed 1] [--lib FOLDER]

Two clients train and sample on a real `tinkex serve`; then again while the engine is killed, its CUDA
context is broken by a failed device-side assertion, or another process takes all free memory. With
`--deterministic` losses, tokens and the bits of the saved weights must equal those of the undisturbed
run; without it losses must be close. On a CPU engines are only killed. `--lib` names a folder with
packages that are not installed. Exit status 1: a client saw an error, or numbers differ.
"""

import argparse
import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = [str(ROOT / "src"), str(ROOT / "tests")]
if "--lib" in sys.argv[:-1]:
    LIBRARIES.append(str(Path(sys.argv[sys.argv.index("--lib") + 1]).absolute()))
sys.path[:0] = LIBRARIES

import torch

import tinkex
from processes import children
from serving import TINY, Server, serving
from tinkex import types
from tinkex.testing import write_tiny_model

CLIENTS = 2
#: Allowed relative difference of losses if batch boundaries may differ.
CLOSE = 0.02
#: A client without progress for this long has hung.
PATIENCE_S = 180.0
#: After this many results, a fault comes within this time, in the middle of an operation.
MAX_FAULT_DELAY_S = 0.5

#: Log texts of broken contexts, of engines that end themselves, of full memory, and of unknown
#: errors.
LOG_TEXTS = ("Assertion", "its device failed", "out of memory", "engine bug")

#: Loaded by every Python process started below: a signal breaks the CUDA context of an engine.
BREAK_CONTEXT = """
import signal, sys
if any("tinkex.engine" in word for word in sys.orig_argv):
    def break_context(*_):
        torch = sys.modules.get("torch")
        if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized():
            torch.zeros(1, device="cuda")[torch.tensor([5], device="cuda")]
    signal.signal(signal.SIGUSR1, break_context)
"""
#: Takes all free memory, piece by piece, and holds it for a moment.
FILL_MEMORY = """
import sys, time, torch
kept, piece = [], 1 << 30
while piece >= 1 << 20:
    try:
        kept.append(torch.empty(piece, dtype=torch.uint8, device="cuda"))
    except RuntimeError:
        piece //= 2
print("full", flush=True)
time.sleep(float(sys.argv[1]))
"""


class ResultCounter:
    """Counts the results of all clients."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = threading.Condition()

    def add(self) -> None:
        with self._changed:
            self._count += 1
            self._changed.notify_all()

    def wait_for_more(self, number: int) -> None:
        """Waits for this many more results, or until there are none for long: clients ended or hang."""
        with self._changed:
            enough = self._count + number
            self._changed.wait_for(lambda: self._count >= enough, timeout=60)


@dataclass
class Run:
    """The results of the clients and the final files."""

    losses: list[list[float]] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    took_s: float = 0.0


def batch(step: int) -> list[types.Datum]:
    draw = random.Random(step)
    data = []
    for _ in range(8):
        length = draw.randrange(32, 400)
        tokens = [draw.randrange(10, 60) for _ in range(length)]
        inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (length - 1)}
        data.append(
            types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
        )
    return data


def one_client(
    url: str, data: Path, number: int, steps: int, results: ResultCounter, quiet: threading.Event
) -> tuple[list[float], list[int], str]:
    """
    Losses of all steps, tokens of all samples, and a hash of the saved weights.

    Saves after the last fault, so that faults after the last step are covered too.
    """
    losses, tokens = [], []
    with tinkex.ServiceClient(base_url=url, api_key="tml-check") as service:
        training = service.create_lora_training_client(TINY, rank=8, seed=number)
        for step in range(steps):
            passed = training.forward_backward(batch(100 * number + step), "cross_entropy")
            stepped = training.optim_step(types.AdamParams(learning_rate=1e-3))
            losses.append(float(passed.result(PATIENCE_S).metrics["loss:sum"]))
            stepped.result(PATIENCE_S)
            results.add()
            if step % 4 == 3:
                sampler = training.save_weights_and_get_sampling_client()
                for temperature in (0.0, 1.0):
                    params = types.SamplingParams(max_tokens=24, temperature=temperature, seed=step)
                    prompt = types.ModelInput.from_ints([11, 12, 13, step + 14])
                    answer = sampler.sample(prompt, 2, params).result(PATIENCE_S)
                    tokens += [int(token) for each in answer.sequences for token in each.tokens]
        quiet.wait()
        training.save_state("final").result(PATIENCE_S)
        (folder,) = (data / "checkpoints" / training.model_id / "weights" / "final").iterdir()
        whole = hashlib.sha256()
        for file in sorted(folder.glob("*.safetensors")):
            whole.update(file.read_bytes())
    return losses, tokens, whole.hexdigest()[:16]


def engine_of(server: Server) -> int | None:
    """The process id of the engine, if it is running."""
    for web in children(server.process.pid):
        for child in children(web):
            try:
                words = Path(f"/proc/{child}/cmdline").read_text()
            except OSError:
                continue
            if "tinkex.engine" in words:
                return child
    return None


def inject_fault(server: Server, kind: str, seconds: float) -> bool:
    """Causes one fault. Returns False if there was no engine to hit."""
    if kind == "full":
        with subprocess.Popen(
            [sys.executable, "-c", FILL_MEMORY, str(seconds)], stdout=subprocess.PIPE
        ) as filling:
            filling.wait()
        return True
    engine = engine_of(server)
    if engine is None:
        return False
    try:
        os.kill(engine, signal.SIGKILL if kind == "killed" else signal.SIGUSR1)
    except ProcessLookupError:
        return False
    return True


def disturb(
    server: Server,
    kinds: list[str],
    faults: int,
    rng: random.Random,
    results: ResultCounter,
    quiet: threading.Event,
) -> Counter[str]:
    injected: Counter[str] = Counter()
    plan = [kinds[number % len(kinds)] for number in range(faults)]
    rng.shuffle(plan)
    while plan:
        # Without progress in between, three crashes would be attributed to the same request.
        results.wait_for_more(rng.randrange(2, 8))
        time.sleep(rng.uniform(0.0, MAX_FAULT_DELAY_S))
        if inject_fault(server, plan[0], rng.uniform(1.0, 4.0)):
            injected[plan.pop(0)] += 1
    quiet.set()
    return injected


def run(
    model: Path, args: tuple[str, ...], kinds: list[str], steps: int, faults: int, seed: int
) -> tuple[Run, Counter[str], list[str]]:
    """Runs all clients once, with this many faults of these kinds."""
    found, results, quiet = Run(), ResultCounter(), threading.Event()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        with (
            serving(f"{TINY}={model}", data=data, args=args) as server,
            ThreadPoolExecutor() as pool,
        ):
            disturbing = pool.submit(
                disturb, server, kinds, faults, random.Random(seed), results, quiet
            )
            began = time.monotonic()
            for client in [
                pool.submit(one_client, server.url, data, number, steps, results, quiet)
                for number in range(CLIENTS)
            ]:
                try:
                    losses, tokens, weights = client.result()
                except Exception as error:  # noqa: BLE001  what clients see is the result
                    found.errors.append(f"{type(error).__name__}: {error}")
                    continue
                found.losses.append(losses)
                found.tokens.append(tokens)
                found.weights.append(weights)
            found.took_s = time.monotonic() - began
            injected = disturbing.result()
            log = list(server.log)
    return found, injected, log


def max_difference(one: list[list[float]], other: list[list[float]]) -> float:
    return max(
        abs(a - b) / max(abs(a), 1e-3)
        for mine, theirs in zip(one, other, strict=True)
        for a, b in zip(mine, theirs, strict=True)
    )


def check(
    model: Path, options: argparse.Namespace, kinds: list[str], *, deterministic: bool
) -> bool:
    args = ("--device", options.device, *(["--deterministic"] if deterministic else []))
    name = "deterministic" if deterministic else "default"
    undisturbed, _, _ = run(model, args, kinds, options.steps, 0, options.seed)
    print(
        f"{name}: undisturbed in {undisturbed.took_s:.0f} s; {undisturbed.weights}; errors: {undisturbed.errors}",
        flush=True,
    )
    disturbed, injected, log = run(model, args, kinds, options.steps, options.faults, options.seed)
    print(
        f"{name}: {dict(injected)} in {disturbed.took_s:.0f} s; {disturbed.weights}; errors: {disturbed.errors}",
        flush=True,
    )
    if undisturbed.errors or disturbed.errors:
        print("\n".join(log[-60:]))
        return False
    counts = {text: sum(text in line for line in log) for text in LOG_TEXTS}
    print(f"{name}: in the log: {counts}", flush=True)
    difference = max_difference(undisturbed.losses, disturbed.losses)
    same = {
        what: getattr(undisturbed, what) == getattr(disturbed, what)
        for what in ("losses", "tokens", "weights")
    }
    print(f"{name}: losses differ by at most {difference:.1e}; equal: {same}", flush=True)
    return all(same.values()) if deterministic else difference <= CLOSE


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=60, help="of each client")
    parser.add_argument("--faults", type=int, default=9)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--modes", default="deterministic,default", help="of the server")
    parser.add_argument("--lib", help="a folder with packages that are not installed")
    options = parser.parse_args()
    on_gpu = options.device != "cpu"
    kinds = ["killed", "broken context", "full"] if on_gpu else ["killed"]
    print(
        f"torch {torch.__version__}, {torch.cuda.get_device_name() if on_gpu else 'CPU'}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(BREAK_CONTEXT)
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, *LIBRARIES])
        model = write_tiny_model(Path(folder) / "model")
        if on_gpu:
            from check_gpu import write_mid_size  # needs more packages than a run on a CPU

            # Large enough for the kernels that real models use, with the tokenizer of the tiny model.
            write_mid_size(model)
        good = [
            check(model, options, kinds, deterministic=mode == "deterministic")
            for mode in options.modes.split(",")
        ]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
