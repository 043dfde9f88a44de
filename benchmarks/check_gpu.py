"""
Compares a GPU with the CPU: every loss, optimizer, checkpoint and sample.

    python benchmarks/check_gpu.py [--device cuda] [--models qwen3,llama,mid] [--lib FOLDER]

Needs torch, transformers, safetensors, tokenizers, numpy, pydantic and protobuf; `--lib` names a
folder with those that are not installed. Uses two tiny models and one of medium size with random
weights: the engine on the device in float32 and bfloat16 against the engine on the CPU in the same
format. Prints a table and exits with 1 if a figure is out of bounds.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))
if "--lib" in sys.argv[:-1]:
    sys.path.insert(1, sys.argv[sys.argv.index("--lib") + 1])

import numpy as np
import torch
import transformers
from safetensors.torch import load_file

from tinkex.engine import Engine, EngineSettings
from tinkex.engine.adapters.checkpoints import write
from tinkex.engine.adapters.memory_plan import Tier
from tinkex.models.tiny_model import write_tiny_model
from tinkex.wire.custom_loss import CustomLossGraph, CustomLossInput
from tinkex.wire.inputs import Datum, ModelInput
from tinkex.wire.sampling import SampleRequest, SampleResponse, SamplingParams
from tinkex.wire.training import (
    AdamOptimizerConfig,
    AdamParams,
    DimuonOptimizerConfig,
    DimuonParams,
    ForwardBackwardInput,
    LoraConfig,
)

LENGTHS = (17, 5, 64, 1, 130, 33)
LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo", "custom")
GRAPHS = ROOT / "tests" / "data" / "graphs" / "official-0.36.0.jsonl"

#: figure -> its limit, by number format
BOUNDS = {
    "loss": {"float32": 1e-3, "bfloat16": 5e-2},
    "logprob max": {"float32": 2e-3, "bfloat16": 0.5},
    "logprob mean": {"float32": 2e-4, "bfloat16": 5e-2},
    "gradient": {"float32": 2e-3, "bfloat16": 0.15},
    "curve": {"float32": 1e-2, "bfloat16": 0.1},
    "mixed": {"float32": 1e-4, "bfloat16": 5e-2},
    "sampled max": {"float32": 1e-4, "bfloat16": 5e-2},
    "sampled mean": {"float32": 1e-4, "bfloat16": 5e-2},
    "exact": {"float32": 0.0, "bfloat16": 0.0},
    "learned": {"float32": 0.5, "bfloat16": 0.5},
}


@dataclass
class Table:
    bad: int = 0
    rows: list[str] = field(default_factory=list)

    def add(self, model: str, dtype: str, what: str, kind: str, value: float) -> None:
        bound = BOUNDS[kind][dtype]
        good = value <= bound  # false for NaN
        self.bad += not good
        row = f"{model:6} {dtype:8} {what:34} {value:9.1e} {bound:9.1e}  {'' if good else 'BAD'}"
        self.rows.append(row)
        print(row, flush=True)


# -- models and data ------------------------------------------------------------------------------


def write_mid_size(folder: Path) -> Path:
    """Eight layers of width 512, scaled so that logits have the magnitude of a trained model."""
    config = transformers.Qwen3Config(
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=8192,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.1 if "lm_head" in name else weight.shape[1] ** -0.5)
    model.save_pretrained(folder)
    return folder


def engine_on(folder: Path, device: str, dtype: Any, **limits: Any) -> Engine:
    settings = EngineSettings(
        name="check", folder=folder, device=device, dtype=dtype, **{"kv_tokens": 8192, **limits}
    )
    engine = Engine(settings)
    graph = json.loads(GRAPHS.read_text().splitlines()[0])
    engine.register_loss(
        "recorded",
        graph["name"],
        [CustomLossInput.model_validate(one) for one in graph["inputs"]],
        CustomLossGraph.model_validate(graph["graph"]),
    )
    return engine


def token_rows(vocabulary: int) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, vocabulary, length + 1) for length in LENGTHS]


def datum_of(tokens: np.ndarray, **inputs: np.ndarray) -> Datum:
    inputs = {"target_tokens": tokens[1:].astype(np.int64), **inputs}
    return Datum(model_input=ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs)


def work_of(loss: str, rows: list[np.ndarray], own: list[np.ndarray]) -> ForwardBackwardInput:
    """Ratios are far from every bound, so that rounding does not move them across it."""
    rng = np.random.default_rng(2)
    data = []
    for tokens, logprobs in zip(rows, own, strict=True):
        count = len(logprobs)
        if loss == "cross_entropy":
            inputs = {"weights": rng.normal(size=count)}
        else:
            old = logprobs + rng.choice([-1.0, 0.0, 1.0], count)
            inputs = {"advantages": rng.normal(size=count)}
            inputs["old_logprobs" if loss == "custom" else "logprobs"] = old
        if loss == "gspo":
            inputs["sequence_ratio_mask"] = np.ones(count)
        if loss == "custom":
            inputs["mask"] = np.ones(count)
        floats = {name: values.astype(np.float32) for name, values in inputs.items()}
        data.append(datum_of(tokens, **floats))
    config = {"loss_id": "recorded"} if loss == "custom" else None
    return ForwardBackwardInput(data=data, loss_fn=loss, loss_fn_config=config)


def sample(
    engine: Engine, requests: list[SampleRequest], adapters: list[Path | None]
) -> list[SampleResponse]:
    for ticket, (one, adapter) in enumerate(zip(requests, adapters, strict=True)):
        engine.submit(ticket, one, adapter=adapter)
    answers: dict[int, SampleResponse] = {}
    while engine.sampling:
        for finished in engine.advance():
            if isinstance(finished.outcome, Exception):
                raise finished.outcome
            answers[finished.ticket] = finished.outcome
    return [answers[ticket] for ticket in range(len(requests))]


# -- checks ---------------------------------------------------------------------------------------


class Check:
    """One model in one number format: the device against the CPU."""

    def __init__(self, name: str, folder: Path, dtype: str, device: str, table: Table) -> None:
        self.name, self.folder, self.dtype, self.device, self.table = (
            name,
            folder,
            dtype,
            device,
            table,
        )
        self.files = Path(tempfile.mkdtemp(prefix="check-gpu-"))
        self._count = 0
        self.cpu = engine_on(folder, "cpu", dtype)
        self.gpu = engine_on(folder, device, dtype)
        self.rows = token_rows(self.cpu.facts.vocab_size)
        self.adapter = self.trained_adapter()
        self.own = self.logprobs(self.cpu)

    def add(self, what: str, kind: str, value: float) -> None:
        self.table.add(self.name, self.dtype, what, kind, value)

    def new(self) -> Path:
        self._count += 1
        return self.files / str(self._count)

    def trained_adapter(self) -> Path:
        """An adapter in which every matrix has an effect."""
        self.cpu.create("maker", LoraConfig(rank=8, seed=1), AdamOptimizerConfig())
        data = [datum_of(row, weights=np.ones(len(row) - 1, np.float32)) for row in self.rows]
        for _ in range(2):
            work = ForwardBackwardInput(data=data, loss_fn="cross_entropy")
            self.cpu.run_pass("maker", work, backward=True)
            self.cpu.optim_step("maker", AdamParams(learning_rate=2e-3))
        folder = self.new()
        self.cpu.save("maker", folder, optimizer=True)
        self.cpu.drop("maker")
        return folder

    def load(self, engine: Engine, model_id: str = "m", *, dimuon: bool = False) -> None:
        kind = DimuonOptimizerConfig() if dimuon else AdamOptimizerConfig()
        engine.create(model_id, LoraConfig(rank=8), kind)
        engine.load(model_id, self.adapter, optimizer=False)

    def logprobs(self, engine: Engine) -> list[np.ndarray]:
        self.load(engine)
        work = ForwardBackwardInput(
            data=[datum_of(row) for row in self.rows], loss_fn="cross_entropy"
        )
        output = engine.run_pass("m", work, backward=False)
        engine.drop("m")
        return [one["logprobs"].to_numpy() for one in output.loss_fn_outputs]

    def gradient(self, engine: Engine, model_id: str = "m") -> torch.Tensor:
        folder = self.new()
        write(engine.snapshot_files(model_id), folder)
        tensors = load_file(folder / "gradients.safetensors")
        return torch.cat([tensors[name].flatten() for name in sorted(tensors)])

    def run(self) -> None:
        for step in (
            self.losses,
            self.mixed,
            self.optimizers,
            self.checkpoints,
            self.spilling,
            self.sampling,
            self.learning,
        ):
            step()
        shutil.rmtree(self.files)

    def losses(self) -> None:
        for loss in LOSSES:
            work = work_of(loss, self.rows, self.own)
            outputs, gradients = [], []
            for engine in (self.cpu, self.gpu):
                self.load(engine)
                outputs.append(engine.run_pass("m", work, backward=True))
                gradients.append(self.gradient(engine))
                engine.drop("m")
            ours, theirs = (output.metrics["loss:sum"] for output in outputs[::-1])
            # In nats per token: in some losses terms of both signs cancel, but their rounding does not.
            self.add(f"{loss}: loss", "loss", abs(ours - theirs) / sum(LENGTHS))
            self.add(f"{loss}: gradient", "gradient", relative(gradients[1], gradients[0]))
        gaps = np.concatenate(
            [a - b for a, b in zip(self.logprobs(self.gpu), self.own, strict=True)]
        )
        self.add("logprobs: largest difference", "logprob max", float(np.abs(gaps).max()))
        self.add("logprobs: mean difference", "logprob mean", float(np.abs(gaps).mean()))

    def mixed(self) -> None:
        """Three models, ranks and losses in one batch on the device, against each alone there."""
        engine = self.gpu
        asked = [("cross_entropy", 4), ("ppo", 8), ("gspo", 16)]
        works = [work_of(loss, self.rows, self.own) for loss, _ in asked]
        alone = []
        for (_, rank), work in zip(asked, works, strict=True):
            engine.create("alone", LoraConfig(rank=rank, seed=rank), AdamOptimizerConfig())
            engine.run_pass("alone", work, backward=True)
            alone.append(self.gradient(engine, "alone"))
            engine.drop("alone")
        passes = []
        for at, ((_, rank), work) in enumerate(zip(asked, works, strict=True)):
            engine.create(f"m{at}", LoraConfig(rank=rank, seed=rank), AdamOptimizerConfig())
            passes.append(engine.begin_pass(f"m{at}", work, backward=True))
        engine.run_micro_batch([(one, len(one.waiting)) for one in passes])
        worst = 0.0
        for at, expected in enumerate(alone):
            passes[at].output()
            worst = max(worst, relative(self.gradient(engine, f"m{at}"), expected))
            engine.drop(f"m{at}")
        self.add("mixed batch against each alone", "mixed", worst)

    def optimizers(self) -> None:
        work = work_of("cross_entropy", self.rows, self.own)
        work = ForwardBackwardInput(
            data=[datum_of(row, weights=np.ones(len(row) - 1, np.float32)) for row in self.rows],
            loss_fn="cross_entropy",
        )
        for dimuon in (False, True):
            params = (
                # Orthogonalization amplifies small directions, including rounding errors: larger
                # steps would only measure how fast two bfloat16 runs diverge.
                DimuonParams(learning_rate=3e-3, grad_clip_norm=1.0)
                if dimuon
                else AdamParams(learning_rate=1e-3, weight_decay=0.01, grad_clip_norm=1.0, eps=1e-6)
            )
            curves = []
            for engine in (self.cpu, self.gpu):
                self.load(engine, dimuon=dimuon)
                curve = []
                for _ in range(6):
                    curve.append(engine.run_pass("m", work, backward=True).metrics["loss:sum"])
                    engine.optim_step("m", params)
                curves.append(np.array(curve))
                engine.drop("m")
            off = float(np.abs(curves[1] / curves[0] - 1).max())
            self.add(f"{'dimuon' if dimuon else 'adamw'}: six steps", "curve", off)

    def checkpoints(self) -> None:
        """Saved on the device, loaded on the CPU and back: every bit is the same."""
        work = work_of("cross_entropy", self.rows, self.own)
        self.load(self.gpu)
        self.gpu.run_pass("m", work, backward=True)
        self.gpu.optim_step("m", AdamParams(learning_rate=1e-3))
        first, second, third = self.new(), self.new(), self.new()
        self.gpu.save("m", first, optimizer=True)
        self.load(self.cpu)
        self.cpu.load("m", first, optimizer=True)
        self.cpu.save("m", second, optimizer=True)
        self.gpu.load("m", second, optimizer=True)
        self.gpu.save("m", third, optimizer=True)
        off = 0.0
        for name in ("adapter_model.safetensors", "optimizer.safetensors"):
            one, other = load_file(first / name), load_file(third / name)
            off += sum(float((one[key] != other[key]).sum()) for key in one)
        self.add("save, load, save: bits that differ", "exact", off)
        self.cpu.drop("m")
        self.gpu.drop("m")

    def spilling(self) -> None:
        """Memory for one adapter: the others are evicted to the host, then to disk."""
        self.load(self.gpu)
        one = self.gpu.stats().adapters_resident_bytes
        self.gpu.drop("m")
        tight = engine_on(self.folder, self.device, self.dtype, adapter_bytes=one, host_bytes=one)
        names = ("a", "b", "c")
        work = work_of("cross_entropy", self.rows, self.own)
        curves = []
        for engine in (self.gpu, tight):
            for name in names:
                self.load(engine, name)
            curve = []
            for _ in range(3):
                for name in names:
                    curve.append(engine.run_pass(name, work, backward=True).metrics["loss:sum"])
                    engine.optim_step(name, AdamParams(learning_rate=1e-3))
            curves.append(np.array(curve))
        places = [tight._adapters.usage(tier).count for tier in Tier]
        expected = [1, 1, 1] if self.device != "cpu" else [1, 0, 2]
        self.add(f"spilled to {places}: wrong places", "exact", float(places != expected))
        off = float(np.abs(curves[1] / curves[0] - 1).max())
        # The order of atomic additions may differ; a lost moment or gradient would differ by far more.
        self.add("spilled: curve against resident", "curve", off)
        for name in names:
            self.gpu.drop(name)

    def sampling(self) -> None:
        prompts = [row[:20].tolist() for row in self.rows if len(row) > 20]
        adapters: list[Path | None] = [self.adapter, None, self.adapter][: len(prompts)]
        requests = [
            SampleRequest(
                prompt=ModelInput.from_ints(prompt),
                num_samples=3,
                sampling_params=SamplingParams(max_tokens=40, seed=7, stop=[]),
                prompt_logprobs=True,
            )
            for prompt in prompts
        ]
        sample(self.gpu, requests, adapters)
        if (graphs := self.gpu._sampler._runner._graphs) is not None:
            # The kernels of graphs are compiled in the background; other kernels round differently.
            graphs._compiler.waits = True
        answers = sample(self.gpu, requests, adapters)
        again = sample(self.gpu, requests, adapters)
        same = all(
            one.tokens == two.tokens
            for left, right in zip(answers, again, strict=True)
            for one, two in zip(left.sequences, right.sequences, strict=True)
        )
        self.add("sampled twice: not the same", "exact", float(not same))
        self.load(self.gpu)
        gaps = []
        for prompt, answer, adapter in zip(prompts, answers, adapters, strict=True):
            if adapter is None:
                continue
            for sequence in answer.sequences:
                tokens = np.array(prompt + sequence.tokens)
                work = ForwardBackwardInput(data=[datum_of(tokens)], loss_fn="cross_entropy")
                output = self.gpu.run_pass("m", work, backward=False).loss_fn_outputs[0]
                found = output["logprobs"].to_numpy()[len(prompt) - 1 :]
                gaps.append(found - sequence.logprobs_np)
        self.gpu.drop("m")
        gap = np.abs(np.concatenate(gaps))
        self.add("sampled against forward: largest", "sampled max", float(gap.max()))
        self.add("sampled against forward: mean", "sampled mean", float(gap.mean()))
        if graphs is not None:
            unused = bool(graphs._compiler.refused) or not graphs._graphs
            self.add("graphs: not used or refused", "exact", float(unused))

    def learning(self) -> None:
        """The fraction of the loss that remains after training a new adapter."""
        self.gpu.create("m", LoraConfig(rank=8, seed=3), AdamOptimizerConfig())
        rows = [row for row in self.rows if 10 < len(row) < 40]
        data = [datum_of(row, weights=np.ones(len(row) - 1, np.float32)) for row in rows]
        curve = []
        for _ in range(60):
            work = ForwardBackwardInput(data=data, loss_fn="cross_entropy")
            curve.append(self.gpu.run_pass("m", work, backward=True).metrics["loss:sum"])
            self.gpu.optim_step("m", AdamParams(learning_rate=1e-2))
        self.gpu.drop("m")
        self.add("sixty steps: loss that is left", "learned", curve[-1] / curve[0])


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    found, expected = found.double(), expected.double()
    return float((found - expected).norm() / expected.norm().clamp(min=1e-12))


def memory(folder: Path, device: str) -> Iterator[str]:
    """The planned memory of a pass against its measured memory."""
    engine = engine_on(folder, device, "auto", kv_tokens=None)
    yield f"plan: {engine.plan.describe()}"
    if device == "cpu":
        return
    tokens = np.random.default_rng(0).integers(0, engine.facts.vocab_size, 513)
    weights = np.ones(512, np.float32)
    work = ForwardBackwardInput(
        data=[datum_of(tokens, weights=weights)] * 8, loss_fn="cross_entropy"
    )
    engine.create("m", LoraConfig(rank=8), AdamOptimizerConfig())
    engine.run_pass("m", work, backward=True)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    engine.run_pass("m", work, backward=True)
    peak = torch.cuda.max_memory_allocated() - before
    planned = 8 * 512 * engine.model.bytes_per_token
    yield (
        f"a pass of 4096 tokens: {peak / 1e6:.0f} MB at its peak, {planned / 1e6:.0f} MB planned "
        "(and three chunks of logits reserved)"
    )


def timed(what: str, act: Callable[[], None]) -> None:
    began_s = time.perf_counter()
    act()
    print(f"-- {what}: {time.perf_counter() - began_s:.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--lib", help="folder of packages that are not installed")
    parser.add_argument("--models", default="qwen3,llama,mid", help="which of them, with commas")
    options = parser.parse_args()
    device = options.device
    most_threads = min(8, torch.get_num_threads())
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    where = torch.cuda.get_device_name() if device != "cpu" else "this CPU against itself"
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {where}")
    print(f"{'model':6} {'format':8} {'figure':34} {'found':>9} {'allowed':>9}")
    folder = Path(tempfile.mkdtemp(prefix="check-gpu-models-"))
    table = Table()
    makers = {
        "qwen3": lambda: write_tiny_model(folder / "qwen3", "qwen3"),
        "llama": lambda: write_tiny_model(folder / "llama", "llama"),
        "mid": lambda: write_mid_size(folder / "mid"),
    }
    models = {name: makers[name]() for name in options.models.split(",")}
    for name, model in models.items():
        # Tiny products are slower on several cores.
        torch.set_num_threads(most_threads if name == "mid" else 1)
        for dtype in ("float32", "bfloat16"):
            timed(f"{name} {dtype}", Check(name, model, dtype, device, table).run)
    for line in memory(model, device):
        print(line)
    shutil.rmtree(folder)
    print(f"{len(table.rows)} figures, {table.bad} out of bounds")
    sys.exit(1 if table.bad else 0)


if __name__ == "__main__":
    main()
