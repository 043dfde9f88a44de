"""The benchmarks of a GPU start on a CPU: what they use of the engine was not renamed."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "bench_gpu.py"


@pytest.mark.timeout(120)
def test_an_engine_process_of_the_benchmark_samples(tmp_path: Path) -> None:
    options = ("--small", "--device", "cpu", "--models", "tiny", "--pieces", "seeds")
    done = subprocess.run(
        [sys.executable, SCRIPT, *options],
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "failed" not in done.stdout
    assert "| tiny | seeds: sequences of 4 that differ alone | 0 |" in done.stdout
