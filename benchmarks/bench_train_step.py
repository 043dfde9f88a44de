"""
Trained tokens per CPU-second: the engine against plain transformers + PEFT.

    python benchmarks/bench_train_step.py [--quick] [--rounds 3]

One thread, both sides alternately in one process, best of the rounds by process CPU time. A step
is forward, backward and AdamW over 8 sequences with LoRA of rank 16 on all linear layers and the
output projection. Mixed lengths are padded for PEFT and packed by tinkex; only real tokens count.
Then 32 sequences of 128 tokens: each with its own adapter, against all with the same one.
`--quick` skips the embedded model.
"""

import argparse
import datetime
import os
import platform
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

from tinkex.engine import Engine, EngineSettings
from tinkex.engine.model.original_model import load, quiet_transformers
from tinkex.models.embedded import ensure_embedded
from tinkex.wire.inputs import Datum, ModelInput
from tinkex.wire.training import AdamOptimizerConfig, AdamParams, ForwardBackwardInput, LoraConfig

ROOT = Path(__file__).resolve().parent.parent
RANK = 16
EQUAL = [128] * 8
MIXED = [128, 96, 32, 64, 48, 112, 24, 72]
MANY = 32
#: The small model is measured this many times as often, because its steps are short.
SMALL_ROUNDS = 4

Step = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Row:
    model: str
    case: str
    ours: float
    theirs: float
    #: Our speed relative to theirs, or the cost of many adapters relative to that of one.
    ratio: float
    bar: float
    #: Whether a ratio above the bar is good.
    more: bool

    @property
    def met(self) -> bool:
        return self.ratio >= self.bar if self.more else self.ratio <= self.bar


def small_model(folder: Path) -> Path:
    """4 layers, 256 hidden, a vocabulary of 8,192: random, in Hugging Face layout."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
    )
    with quiet_transformers():
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def sequences(lengths: Sequence[int], vocabulary: int) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, vocabulary, length + 1) for length in lengths]


def work(tokens: Sequence[np.ndarray]) -> ForwardBackwardInput:
    data = [
        Datum(
            model_input=ModelInput.from_ints(row[:-1].tolist()),
            loss_fn_inputs={
                "target_tokens": row[1:].astype(np.int64),
                "weights": np.ones(len(row) - 1, np.float32),
            },
        )
        for row in tokens
    ]
    return ForwardBackwardInput(data, "cross_entropy")


def our_step(engine: Engine, tokens: Sequence[np.ndarray]) -> Step:
    asked = work(tokens)

    def step() -> object:
        engine.run_pass("one", asked, backward=True)
        return engine.optim_step("one", AdamParams(learning_rate=1e-4))

    return step


def peft_step(model: torch.nn.Module, tokens: Sequence[np.ndarray]) -> Step:
    """Padded on the right, as by a data collator; the loss is over real tokens only."""
    longest = max(len(row) for row in tokens) - 1
    ids = torch.zeros(len(tokens), longest, dtype=torch.int64)
    targets = torch.full_like(ids, -100)
    mask = torch.zeros_like(ids)
    for place, row in enumerate(tokens):
        length = len(row) - 1
        ids[place, :length] = torch.from_numpy(row[:-1])
        targets[place, :length] = torch.from_numpy(row[1:])
        mask[place, :length] = 1
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-4, weight_decay=0.0)
    kept = None if bool(mask.all()) else mask

    def step() -> object:
        logits = model(input_ids=ids, attention_mask=kept, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return None

    return step


def our_pass(engine: Engine, tokens: Sequence[np.ndarray], model_ids: Sequence[str]) -> Step:
    """One micro-batch of all sequences, sequence n on model n; gradients, but no optimizer step."""
    asked = [work([row]) for row in tokens] if len(model_ids) > 1 else [work(tokens)]

    def step() -> object:
        passes = [
            engine.begin_pass(model_id, one, backward=True)
            for model_id, one in zip(model_ids, asked, strict=True)
        ]
        engine.run_micro_batch([(running, len(running.waiting)) for running in passes])
        return [running.output() for running in passes]

    return step


def cpu_seconds(steps: Sequence[Step], rounds: int) -> list[float]:
    """The best of each, measured alternately after a warm-up round."""
    best = [float("inf")] * len(steps)
    for turn in range(rounds + 1):
        for place, step in enumerate(steps):
            began = time.process_time()
            step()
            if turn:
                best[place] = min(best[place], time.process_time() - began)
    return best


def measure(name: str, folder: Path, rounds: int) -> list[Row]:
    engine = Engine(EngineSettings(name=name, folder=folder, device="cpu", threads=1))
    vocabulary = engine.facts.vocab_size
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about tied embeddings: nothing is merged here
        config = PeftConfig(
            r=RANK,
            lora_alpha=32,
            target_modules=r".*\.(q|k|v|o|gate|up|down)_proj|lm_head",
        )
        model = get_peft_model(load(folder, torch.float32), config)
    lora = LoraConfig(rank=RANK, seed=0)
    engine.create("one", lora, AdamOptimizerConfig())
    rows = []
    for case, lengths, bar in (("equal lengths", EQUAL, 1.0), ("mixed lengths", MIXED, 1.2)):
        tokens = sequences(lengths, vocabulary)
        ours, theirs = cpu_seconds([our_step(engine, tokens), peft_step(model, tokens)], rounds)
        total = sum(lengths)
        rows.append(
            Row(
                model=name,
                case=f"{case}: {len(lengths)} x {min(lengths)} to {max(lengths)}",
                ours=total / ours,
                theirs=total / theirs,
                ratio=theirs / ours,
                bar=bar,
                more=True,
            )
        )
    del model
    ids = [f"many-{number}" for number in range(MANY)]
    for model_id in ids:
        engine.create(model_id, lora, AdamOptimizerConfig())
    tokens = sequences([128] * MANY, vocabulary)
    one, many = cpu_seconds(
        [our_pass(engine, tokens, ["one"]), our_pass(engine, tokens, ids)], rounds
    )
    rows.append(
        Row(
            model=name,
            case=f"{MANY} adapters beside one: one batch of {MANY} x 128",
            ours=MANY * 128 / many,
            theirs=MANY * 128 / one,
            ratio=many / one,
            bar=1.35,
            more=False,
        )
    )
    return rows


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| model | case | tinkex | beside it | ratio | bar | |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        sign = "≥" if row.more else "≤"
        lines.append(
            f"| {row.model} | {row.case} | {row.ours:,.0f} | {row.theirs:,.0f} | {row.ratio:.2f} "
            f"| {sign} {row.bar:.2f} | {'met' if row.met else 'missed'} |"
        )
    return "\n".join(lines)


def report(rows: Sequence[Row], rounds: int) -> str:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    machine = f"{os.cpu_count()} CPU cores (one used), {platform.system()} {platform.machine()}"
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft"))
    return f"""# Training steps beside transformers + PEFT

{datetime.date.today()}, commit {commit}, {machine}, Python {platform.python_version()}, {versions}; `python benchmarks/bench_train_step.py --rounds {rounds}`

Tokens per second of CPU time, one thread, the sides in turns after a warm-up, best of {SMALL_ROUNDS * rounds} (small model) and {rounds} (embedded). A step is forward, backward and AdamW with LoRA of
rank {RANK} on all linear layers and the output projection. PEFT pads mixed lengths; only real tokens count.
In the rows of many adapters "beside it" is the same batch on one adapter, the ratio is the cost (forward and backward, no step).

{table(rows)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        rows += measure(
            "4 layers, 256 hidden", small_model(Path(folder)), SMALL_ROUNDS * options.rounds
        )
    if not options.quick:
        rows += measure("embedded (135M)", ensure_embedded(), options.rounds)
    text = report(rows, options.rounds)
    print(text)
    if not options.quick:
        name = f"train_step_{os.cpu_count()}cpu_{datetime.date.today()}.md"
        (ROOT / "benchmarks" / "results" / name).write_text(text)


if __name__ == "__main__":
    main()
