"""
Long runs under kills: `make chaos`.

    python -m qa.chaos.run --kills 100 --seed 1

First a history of many operations over whole numbers, under kills and a faulty network. Then the
real engine: two thirds of the kills hit a deterministic server, where the final weights must have the same bits,
the others one with default settings. A run that fails names its seed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from pathlib import Path

import sdk_envs
from qa.chaos import process_kills, random_operations
from tinkex.testing import write_tiny_model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--operations", type=int, default=10_000, help="of the history; 0: none")
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
    parser.add_argument("--mode", choices=("both", "deterministic", "default"), default="both")
    options = parser.parse_args()
    seed = int(time.time()) if options.seed is None else options.seed
    shares = {
        "both": {True: options.kills - options.kills // 3, False: options.kills // 3},
        "deterministic": {True: options.kills},
        "default": {False: options.kills},
    }[options.mode]
    sdk = sdk_envs.ensure("0.36.0")
    good = True
    with tempfile.TemporaryDirectory(prefix="tinkex-chaos-") as folder:
        if options.operations:
            good = history(Path(folder) / "history", seed, options.operations)
        model = write_tiny_model(Path(folder) / "tiny", arch="llama")
        for deterministic, count in shares.items():
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
                log_progress=_print,
            )
            for line in (*report.lines(), *map(str, report.violations[:20])):
                _print(f"  {line}")
            if not report.is_good(deterministic=deterministic):
                good = False
                _print("".join(report.log[-200:]))
    _print(
        "nothing was lost" if good else f"FAILED; again with --seed {seed} --kills {options.kills}"
    )
    return 0 if good else 1


def history(folder: Path, seed: int, operations: int) -> bool:
    """Whether everything was answered as if it had been done one after the other."""
    _print(f"seed {seed}, a history of {operations} operations")
    warnings.simplefilter("ignore", FutureWarning)  # loading into a model that exists
    report = random_operations.run(
        folder=folder,
        seed=seed,
        operations=operations,
        web_kills=operations // 500,
        engine_deaths=operations // 200,
    )
    for line in (*report.lines(), *map(str, report.violations[:20])):
        _print(f"  {line}")
    return not report.violations and not report.errors


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
