"""
Does training give the losses it always gave? Fifty steps on the embedded model, against a record.

    python benchmarks/golden_curve.py [--steps 50] [--threads 1] [--write]

Two of sixteen lessons of the demo a step, over and over, LoRA rank 16, AdamW at 1e-3, float32 on a CPU. Other processors and
thread counts add in another order, so losses may differ in their last digits, and by more the
longer training goes on. `--write` makes a new record: only when a change of the numbers is meant,
and then the commit says why. Exits with 1 when a loss is off,
with 75 when the model cannot be fetched.
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

#: Exit status where the model cannot be had; 2 would also be a wrong option or a missing file.
NO_MODEL = 75

#: Allowed relative difference of a loss: at the first step, and at the fiftieth.
FIRST, LAST = 1e-4, 2e-2
#: Of a loss below this, the difference is taken as a share of this.
SMALL = 0.1


def losses(steps: int, threads: int) -> Iterator[float]:
    """Mean loss of an answer's token, before each step."""
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
    """Grows with the steps, evenly on a logarithmic scale."""
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
