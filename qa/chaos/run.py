"""
Long runs under kills: `make chaos`.

    python -m qa.chaos.run --kills 100 --seed 1 [--replicas 2] [--mixture]

First, random operations against a server that computes with integers, under kills and network faults.
Then the real engine: two thirds of the kills hit a deterministic server, whose final weights must be
bit-identical, the others a server with default settings. A failed run prints its seed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from pathlib import Path

import sdk_envs
from numerics.mixtures import write_mixture
from qa.chaos import process_kills, random_operations
from tinkex.testing import write_tiny_model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument(
        "--operations", type=int, default=10_000, help="number of random operations; 0 skips them"
    )
    parser.add_argument("--seed", type=int, default=None, help="default: the current time")
    parser.add_argument("--mode", choices=("both", "deterministic", "default"), default="both")
    parser.add_argument("--replicas", type=int, default=1, help="engines of the model")
    parser.add_argument("--gpus-per-replica", type=int, default=1, help="ranks of each engine")
    parser.add_argument("--mixture", action="store_true", help="a model with experts")
    options = parser.parse_args()
    seed = int(time.time()) if options.seed is None else options.seed
    kills_by_mode = {
        "both": {True: options.kills - options.kills // 3, False: options.kills // 3},
        "deterministic": {True: options.kills},
        "default": {False: options.kills},
    }[options.mode]
    sdk = sdk_envs.ensure("0.36.0")
    good = True
    with tempfile.TemporaryDirectory(prefix="tinkex-chaos-") as folder:
        if options.operations:
            good = run_random_operations(Path(folder) / "history", seed, options.operations)
        if options.mixture:
            model = write_mixture(Path(folder) / "tiny", "Qwen3Moe")
        else:
            model = write_tiny_model(Path(folder) / "tiny", arch="llama")
        for deterministic, count in kills_by_mode.items():
            if not count:
                continue
            mode = "deterministic" if deterministic else "default"
            _print(f"seed {seed}, {count} kills, {mode} server")
            report = process_kills.run(
                model=model,
                data=Path(folder) / mode,
                sdk=sdk,
                seed=seed,
                kills=count,
                deterministic=deterministic,
                replicas=options.replicas,
                ranks=options.gpus_per_replica,
                log_progress=_print,
            )
            for line in (*report.lines(), *map(str, report.violations[:20])):
                _print(f"  {line}")
            if not report.is_good(deterministic=deterministic):
                good = False
                _print("".join(report.log[-200:]))
    _print("passed" if good else f"FAILED; repeat with --seed {seed} --kills {options.kills}")
    return 0 if good else 1


def run_random_operations(folder: Path, seed: int, operations: int) -> bool:
    """Runs random operations; whether a sequential execution explains all answers."""
    _print(f"seed {seed}, {operations} random operations")
    warnings.simplefilter("ignore", FutureWarning)  # load_state is deprecated
    report = random_operations.run(
        folder=folder,
        seed=seed,
        operations=operations,
        web_kills=operations // 500,
        engine_crashes=operations // 200,
    )
    for line in (*report.lines(), *map(str, report.violations[:20])):
        _print(f"  {line}")
    return not report.violations and not report.errors


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
