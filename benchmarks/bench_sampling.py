"""
Useful tokens per CPU-second: the engine's sampler against `generate` of transformers.

    python benchmarks/bench_sampling.py [--repeats 3] [--models small,embedded] [--no-report]

32 requests of mixed prompt and output lengths, sampled at temperature 1, on one thread. `generate`
gets them as one left-padded batch and stops each sequence at its own length; finished sequences wait
for the longest. Only requested tokens count. CPU time is that of the whole process.
Also measures 16 requests with the same prompt, and 32 requests over 8 adapters and over one.
"""

import argparse
import datetime
import os
import platform
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.generation import StoppingCriteria, StoppingCriteriaList

from tinkex.engine import Engine, EngineSettings
from tinkex.engine.model.original_model import load
from tinkex.models.embedded import ensure_embedded
from tinkex.wire.inputs import ModelInput
from tinkex.wire.sampling import SampleRequest, SamplingParams
from tinkex.wire.training import AdamOptimizerConfig, LoraConfig

ROOT = Path(__file__).resolve().parent.parent
BAR = 1.5
REQUESTS = 32
GROUP = 16
ADAPTERS = 8
RANK = 16


@dataclass(frozen=True)
class Ask:
    prompt: list[int]
    new: int
    seed: int
    adapter: Path | None = None


@dataclass(frozen=True)
class Row:
    model: str
    case: str
    way: str
    #: Useful tokens per CPU-second of each repeat.
    rates: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.rates)


# -- models ---------------------------------------------------------------------------------------


def small_model(folder: Path) -> Path:
    """4 layers of 256, random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=8192,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


# -- the samplers ---------------------------------------------------------------------------------


def ours(engine: Engine, asks: list[Ask]) -> int:
    for ticket, ask in enumerate(asks):
        params = SamplingParams(max_tokens=ask.new, temperature=1.0, seed=ask.seed, stop=[])
        request = SampleRequest(prompt=ModelInput.from_ints(ask.prompt), sampling_params=params)
        engine.submit(ticket, request, adapter=ask.adapter)
    tokens = 0
    while engine.sampling:
        for finished in engine.advance():
            if isinstance(finished.outcome, Exception):
                raise finished.outcome
            tokens += sum(len(sequence.tokens) for sequence in finished.outcome.sequences)
    return tokens


class OwnLength(StoppingCriteria):
    """A sequence is done when it has as many new tokens as requested."""

    def __init__(self, prompt: int, new: list[int]) -> None:
        self._ends = torch.tensor([prompt + count for count in new])

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return ids.shape[1] >= self._ends


def by_generate(model: Any, asks: list[Ask]) -> int:
    longest = max(len(ask.prompt) for ask in asks)
    ids = torch.zeros(len(asks), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, ask in enumerate(asks):
        ids[row, longest - len(ask.prompt) :] = torch.tensor(ask.prompt)
        mask[row, longest - len(ask.prompt) :] = 1
    new = [ask.new for ask in asks]
    torch.manual_seed(asks[0].seed)
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            temperature=1.0,
            max_new_tokens=max(new),
            pad_token_id=0,
            eos_token_id=None,
            stopping_criteria=StoppingCriteriaList([OwnLength(longest, new)]),
        )
    return sum(new)


# -- measuring ------------------------------------------------------------------------------------


def rates(work: dict[str, Callable[[int], int]], repeats: int) -> dict[str, list[float]]:
    """Tokens per CPU-second. Measures alternately, so that other load affects all of them."""
    found: dict[str, list[float]] = {way: [] for way in work}
    for repeat in range(repeats):
        for way, run in work.items():
            began_s = time.process_time()
            tokens = run(repeat)
            found[way].append(tokens / (time.process_time() - began_s))
    return found


def mixed(vocabulary: int, repeat: int, scale: float, adapters: list[Path]) -> list[Ask]:
    rng = random.Random(repeat)
    return [
        Ask(
            prompt=[rng.randrange(5, vocabulary) for _ in range(int(rng.randint(16, 256) * scale))],
            new=int(rng.randint(8, 128) * scale),
            seed=number,
            adapter=adapters[number % len(adapters)] if adapters else None,
        )
        for number in range(REQUESTS)
    ]


def grouped(vocabulary: int, repeat: int, scale: float) -> list[Ask]:
    rng = random.Random(1000 + repeat)
    prompt = [rng.randrange(5, vocabulary) for _ in range(int(320 * scale))]
    return [Ask(prompt=prompt, new=int(32 * scale), seed=number) for number in range(GROUP)]


def measure(name: str, folder: Path, *, repeats: int, scale: float) -> list[Row]:
    def engine(prefix_cache: bool) -> Engine:
        return Engine(
            EngineSettings(
                name=name,
                folder=folder,
                device="cpu",
                dtype="float32",
                threads=1,
                kv_tokens=32768,
                prefix_cache=prefix_cache,
            )
        )

    cached, plain = engine(True), engine(False)
    reference: Any = (
        load(folder, torch.float32)
        if any(folder.glob("*.gguf"))
        else AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    )
    reference.eval()
    vocabulary = cached.facts.vocab_size
    warm = [Ask(prompt=[5, 6, 7], new=2, seed=0)]
    for one in (cached, plain):
        ours(one, warm)
    by_generate(reference, warm)
    rows = []

    def add(case: str, work: dict[str, Callable[[int], int]]) -> None:
        for way, found in rates(work, repeats).items():
            rows.append(Row(name, case, way, found))
            print(f"{name:9} {case:40} {way:30} {rows[-1].median:8.1f} tokens/CPU-s", flush=True)

    add(
        f"{REQUESTS} mixed requests",
        {
            "tinkex": lambda n: ours(cached, mixed(vocabulary, n, scale, [])),
            "generate": lambda n: by_generate(reference, mixed(vocabulary, n, scale, [])),
        },
    )
    add(
        f"{GROUP} requests with one prompt",
        {
            "tinkex": lambda n: ours(cached, grouped(vocabulary, n, scale)),
            "tinkex, no prefix cache": lambda n: ours(plain, grouped(vocabulary, n, scale)),
            "generate": lambda n: by_generate(reference, grouped(vocabulary, n, scale)),
        },
    )
    with tempfile.TemporaryDirectory() as place:
        adapters = []
        for number in range(ADAPTERS):
            cached.create("maker", LoraConfig(rank=RANK, seed=number), AdamOptimizerConfig())
            adapters.append(Path(place) / str(number))
            cached.save("maker", adapters[-1], optimizer=False)
            cached.drop("maker")
        add(
            f"{REQUESTS} mixed requests, LoRA of rank {RANK}",
            {
                "one adapter": lambda n: ours(plain, mixed(vocabulary, n, scale, adapters[:1])),
                f"{ADAPTERS} adapters": lambda n: ours(
                    plain, mixed(vocabulary, n, scale, adapters)
                ),
            },
        )
    return rows


# -- report ---------------------------------------------------------------------------------------


def report(rows: list[Row], command: str, commit: str) -> str:
    by = {(row.model, row.case, row.way): row for row in rows}
    today = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    lines = [
        "# Sampling on a CPU",
        "",
        f"{today}, commit {commit}, {os.cpu_count()} CPU cores ({platform.machine()}), one thread, "
        + f"float32, Python {platform.python_version()}, torch {torch.__version__}; `{command}`",
        "",
        "Useful tokens (those asked for) per CPU-second, prompts included in the time; median of "
        + "the repeats, in brackets lowest and highest. The ways take turns within one run.",
        "",
        "| model | case | way | tokens/CPU-s | against the first |",
        "|---|---|---|---:|---:|",
    ]
    for row in rows:
        first = next(r for r in rows if (r.model, r.case) == (row.model, row.case))
        lines.append(
            f"| {row.model} | {row.case} | {row.way} | {row.median:.1f} "
            f"({min(row.rates):.1f}-{max(row.rates):.1f}) | {row.median / first.median:.2f} |"
        )
    lines.append("")
    for model in dict.fromkeys(row.model for row in rows):
        case = f"{REQUESTS} mixed requests"
        ratio = by[model, case, "tinkex"].median / by[model, case, "generate"].median
        met = "met" if ratio >= BAR else "missed"
        lines.append(f"- {model}: {ratio:.2f}x `generate` (goal {BAR}: {met}).")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--models", default="small,embedded")
    parser.add_argument("--no-report", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    # Read now: the commit may change while this runs.
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as place:
        for name in options.models.split(","):
            folder = ensure_embedded() if name == "embedded" else small_model(Path(place) / name)
            # The embedded model has 33 times the parameters: shorter requests, the same mix.
            scale = 0.5 if name == "embedded" else 1.0
            rows += measure(name, folder, repeats=options.repeats, scale=scale)
    text = report(rows, f"python benchmarks/bench_sampling.py --repeats {options.repeats}", commit)
    print("\n" + text)
    if not options.no_report:
        name = f"sampling_{os.cpu_count()}cpu_{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
        (ROOT / "benchmarks" / "results" / f"{name}.md").write_text(text)


if __name__ == "__main__":
    main()
