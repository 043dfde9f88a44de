"""The scheduler and its data structures must not import torch."""

import subprocess
import sys


def test_pages_sequences_and_scheduler_load_no_torch() -> None:
    code = (
        "import sys, tinkex.engine.sampling.scheduler\n"
        "loaded = {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(loaded)) or 0)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
