"""
Compares the losses of fifty training steps on the embedded model with a record.

    python benchmarks/golden_curve.py [--steps 50] [--threads 1] [--write]

Each step trains on two of the demo's sixteen lessons, with LoRA rank 16, AdamW at 1e-3 and float32 on
a CPU. Other processors and thread counts add in another order, so losses may differ in their last
digits, and more so the longer training runs. `--write` makes a new record: only if a change of the
numbers is intended, with the reason in the commit. Exits with 1 if a loss is off, and with 75 if the
model cannot be downloaded.
"""

import argparse
import csv
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tinkex.cli.demo import datum_of, load_lessons
from tinkex.engine import Engine, EngineSettings
from tinkex.models.embedded import EMBEDDED_MODEL, FetchFailed, ensure_embedded
from tinkex.models.tokenizer import load_tokenizer
from tinkex.wire.training import AdamOptimizerConfig, AdamParams, ForwardBackwardInput, LoraConfig

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "tests" / "data" / "losses" / "smollm2-135m_cpu-float32.tsv"

STEPS, LESSONS, BATCH, RANK, LEARNING_RATE = 50, 16, 2, 16, 1e-3

#: Exit status if the model cannot be downloaded; 2 would also mean a wrong option or missing file.
NO_MODEL = 75

#: Allowed relative difference of a loss: at the first step, and at the fiftieth.
FIRST, LAST = 1e-4, 2e-2
#: For a loss below this, the difference is relative to this value.
SMALL = 0.1


def losses(steps: int, threads: int) -> Iterator[float]:
    """Mean loss per answer token, before each step."""
    folder = ensure_embedded()
    tokenizer = load_tokenizer(folder)
    engine = Engine(
        EngineSettings(
            name=EMBEDDED_MODEL, folder=folder, device="cpu", dtype="float32", threads=threads
        )
    )
    engine.create("golden", LoraConfig(rank=RANK, seed=1), AdamOptimizerConfig())
    lessons = load_lessons()[0][:LESSONS]
    for step in range(steps):
        batch = [lessons[(step * BATCH + at) % LESSONS] for at in range(BATCH)]
        data = [datum_of(tokenizer, lesson) for lesson in batch]
        weight = sum(float(datum.loss_fn_inputs["weights"].to_numpy().sum()) for datum in data)
        work = ForwardBackwardInput(data=data, loss_fn="cross_entropy")
        output = engine.run_pass("golden", work, backward=True)
        engine.optim_step("golden", AdamParams(learning_rate=LEARNING_RATE))
        yield output.metrics["loss:sum"] / weight


def allowed(step: int) -> float:
    """The tolerance of a step; it grows exponentially with the steps."""
    return float(FIRST * (LAST / FIRST) ** (step / (STEPS - 1)))


def compare(steps: int, threads: int) -> bool:
    with RECORD.open() as lines:
        rows = csv.DictReader((line for line in lines if not line.startswith("#")), delimiter="\t")
        expected = [float(row["loss"]) for row in rows]
    good = True
    began_s = time.perf_counter()
    worst = 0.0
    for step, (found, loss) in enumerate(zip(losses(steps, threads), expected, strict=False)):
        off = abs(found - loss) / max(loss, SMALL)
        worst = max(worst, off / allowed(step))
        verdict = "" if off <= allowed(step) else f"  off by {off:.1e}, allowed {allowed(step):.1e}"
        good = good and not verdict
        print(f"{step:3d}  {found:.6f}  {loss:.6f}{verdict}", flush=True)
    print(f"{time.perf_counter() - began_s:.1f} s; at most {worst:.2f} of what is allowed")
    return good


def write(threads: int) -> None:
    rows = [f"{step}\t{loss:.7f}\n" for step, loss in enumerate(losses(STEPS, threads))]
    title = f"# {EMBEDDED_MODEL}, float32 on a CPU; made by benchmarks/golden_curve.py --write\n"
    RECORD.write_text(title + "step\tloss\n" + "".join(rows))
    print(f"wrote {RECORD}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    try:
        if options.write:
            write(options.threads)
        elif not compare(options.steps, options.threads):
            sys.exit(1)
    except FetchFailed as error:
        print(error)
        sys.exit(NO_MODEL)


if __name__ == "__main__":
    main()
