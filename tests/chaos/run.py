"""
Long runs under kills: `make chaos`.

    python tests/chaos/run.py --kills 100 --seed 1

Two thirds of the kills hit a deterministic server, where the final weights must have the same bits,
the others one with default settings. A run that fails names its seed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sdk_envs
from chaos import kills
from tinkex.testing import write_tiny_model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
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
        model = write_tiny_model(Path(folder) / "tiny", arch="llama")
        for deterministic, count in shares.items():
            mode = "deterministic" if deterministic else "default"
            _say(f"seed {seed}, {count} kills, {mode} server")
            report = kills.run(
                model=model,
                data=Path(folder) / mode,
                sdk=sdk,
                seed=seed,
                kills=count,
                deterministic=deterministic,
                say=_say,
            )
            for line in (*report.lines(), *map(str, report.violations[:20])):
                _say(f"  {line}")
            if not report.is_good(deterministic=deterministic):
                good = False
                _say("".join(report.log[-200:]))
    _say(
        "nothing was lost" if good else f"FAILED; again with --seed {seed} --kills {options.kills}"
    )
    return 0 if good else 1


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
