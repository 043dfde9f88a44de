"""
Decoding speed on a GPU, in the engine without a server.

    python benchmarks/bench_gpu.py [--models 0.6b,8b] [--batches 1,64,256] [--adapters 0,1,8]

Random weights in the shape of Qwen3 models, made on the device. For each case: sequences with
about 1,024 tokens of context, all of them decoding. "old" decodes with the code of transformers,
"generate" is transformers' own loop with its default cache, up to 64 sequences. The limit is the time to read all
weights, adapters and keys once at the measured speed of a copy.

`--lib FOLDER` names a folder of packages that are not installed. `--profile` also prints which
kernels a step spends its time in.
"""

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))
if "--lib" in sys.argv[:-1]:
    sys.path.insert(1, sys.argv[sys.argv.index("--lib") + 1])

import torch
import transformers

from tinkex.engine import Engine, EngineSettings
from tinkex.engine.adapters.adapters import SamplerAdapter
from tinkex.engine.model import base_model
from tinkex.engine.model.lora import make_layout
from tinkex.engine.sampling import sampler as sampler_module
from tinkex.wire.inputs import ModelInput
from tinkex.wire.sampling import SampleRequest, SamplingParams

CONTEXT = 1024
RANK = 32
#: Bytes per second of a large copy on an H200, read and written.
COPY_SPEED = 4.25e12

SHAPES = {
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36}
    | {"num_attention_heads": 32, "tie_word_embeddings": False},
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
    | {"num_attention_heads": 16, "tie_word_embeddings": True},
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    | {"num_attention_heads": 16, "tie_word_embeddings": True},
}


def config_of(name: str) -> transformers.Qwen3Config:
    return transformers.Qwen3Config(
        vocab_size=151936,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=4096,
        eos_token_id=None,
        **SHAPES[name],
    )


def random_model(name: str) -> Any:
    """The model on the GPU, without files; made there, which takes a second."""
    with torch.device("cuda"):
        torch.manual_seed(0)
        config = config_of(name)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def random_adapter(model: Any, folder: Path) -> SamplerAdapter:
    layout = make_layout([t for t in model.targets if t.kind != "unembed"], RANK)
    live = torch.randn(layout.size, device=model.device, dtype=torch.bfloat16) * 0.02
    return SamplerAdapter(layout=layout, scale=1.0, live=live)


def engine_of(name: str, max_sequences: int) -> Engine:
    folder = Path(tempfile.mkdtemp(prefix="bench-gpu-"))
    config_of(name).save_pretrained(folder)
    base_model.load = lambda folder, dtype: random_model(name)
    sampler_module.read_sampler_adapter = random_adapter
    kv_tokens = (max_sequences + 8) * (CONTEXT + 256)
    return Engine(
        EngineSettings(
            name=name, folder=folder, kv_tokens=kv_tokens, max_sequences=256, prefix_cache=False
        )
    )


def request(prompt: int, new: int, seed: int) -> SampleRequest:
    tokens = torch.randint(10, 150_000, (prompt,), generator=torch.Generator().manual_seed(seed))
    return SampleRequest(
        prompt=ModelInput.from_ints(tokens.tolist()),
        num_samples=1,
        sampling_params=SamplingParams(max_tokens=new, seed=seed, stop=[]),
    )


@dataclasses.dataclass
class Round:
    prefill_tokens_s: float
    decode_tokens_s: float
    step_ms: float


def skip_prefill(engine: Engine) -> None:
    """Random keys and values in the whole cache, instead of prefills."""
    runner = engine._sampler._runner
    for layer in runner._layers:
        for cached in layer:
            cached.normal_()

    def prefill(chunks: Any) -> Any:
        lengths = [chunk.stop - chunk.start for chunk in chunks]
        hidden = torch.zeros(sum(lengths), engine.model.head.weight_VH.shape[1], device="cuda")
        return hidden.bfloat16(), [0, *itertools.accumulate(lengths)]

    runner.prefill = prefill


def run_round(engine: Engine, batch: int, adapters: int, new: int, prompt: int = 0) -> Round:
    """All sequences decode together: the time from the last first token to the end."""
    prompt = prompt or CONTEXT - new // 2
    for ticket in range(batch):
        folder = Path(f"/adapter-{ticket % adapters}") if adapters else None
        engine.submit(ticket, request(prompt, new, ticket), adapter=folder)
    torch.cuda.synchronize()
    began = time.perf_counter()
    scheduler = engine._sampler.scheduler
    started = None
    # Only prefills until all sequences decode, then as usual.
    usual, sampler_module.BURST_STEPS = sampler_module.BURST_STEPS, 1
    while engine.sampling:
        if started is None:
            scheduler._prefilled_last = False
        engine.advance()
        if started is None and scheduler.running == batch and not scheduler._prefilling:
            started = time.perf_counter()
            done = sum(len(s.tokens) for s in scheduler._running)
            sampler_module.BURST_STEPS = usual
    ended = time.perf_counter()
    assert started is not None
    tokens = batch * new - done
    seconds = ended - started
    return Round(
        batch * prompt / (started - began), tokens / seconds, 1000 * seconds * batch / tokens
    )


def record(engine: Engine, batch: int, adapters: int) -> float:
    """Runs until the graph of this case exists. Returns the seconds of compiling and recording."""
    began = time.perf_counter()
    graphs = engine._sampler._runner._graphs if engine._sampler else None
    if graphs is None:
        engine.submit(0, request(8, 1, 0), adapter=None)
        while engine.sampling:
            engine.advance()
        graphs = engine._sampler._runner._graphs
    graphs.waits = True
    run_round(engine, batch, adapters, 12, prompt=16)
    assert graphs.active, "graphs are not used"
    assert not graphs._refused
    return time.perf_counter() - began


def limit(name: str, engine: Engine, batch: int, adapters: int) -> float:
    """Tokens per second if a step only reads what it must."""
    model = engine.model
    head = model.head.weight_VH
    weights = sum(p.numel() for p in model._decoder.layers.parameters()) + head.numel()
    lora = make_layout([t for t in model.targets if t.kind != "unembed"], RANK).size
    total = 2 * weights + 2 * lora * min(adapters, batch)
    total += batch * CONTEXT * model.cache_bytes_per_token
    return batch * COPY_SPEED / total


def generate(model: Any, batch: int, new: int = 24) -> float:
    """Tokens per second of transformers' own loop, by the median step."""
    stamps: list[float] = []

    class Clock(transformers.StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            torch.cuda.synchronize()
            stamps.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool, device="cuda")

    ids = torch.randint(10, 150_000, (batch, CONTEXT - new), device="cuda")
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        do_sample=True,
        pad_token_id=0,
        stopping_criteria=transformers.StoppingCriteriaList([Clock()]),
    )
    gaps = [b - a for a, b in itertools.pairwise(stamps[2:])]
    return batch / statistics.median(gaps)


def profile(engine: Engine, batch: int, adapters: int) -> None:
    from torch.profiler import ProfilerActivity

    graphs = engine._sampler._runner._graphs
    rows = next(size for size in graphs._buckets if size >= batch)
    recipe, recorded = next(
        (r, g)
        for r, g in graphs._graphs.items()
        if r.rows == rows and bool(r.rank) == bool(adapters)
    )
    # The rows still hold the last steps of the last round.
    graphs._state.fields[5] = 0
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(4):
            graphs._state.fields[5] = 0
            recorded.graph.replay()
        torch.cuda.synchronize()
    rows_ = sorted(found.key_averages(), key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in rows_)
    print(f"-- {recipe}: {total / 4000:.2f} ms of kernels in a step")
    for event in rows_[:14]:
        ms = event.self_device_time_total / 4000
        print(f"   {ms:7.3f} ms {event.count // 4:5d} x  {event.key[:90]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="0.6b,8b")
    parser.add_argument("--batches", default="1,64,256")
    parser.add_argument("--adapters", default="0,1,8")
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--skip", default="", help="prefill, old, generate")
    parser.add_argument("--profile", default="", help="cases as batch:adapters, with commas")
    parser.add_argument("--lib", help="folder of packages that are not installed")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    batches = [int(each) for each in options.batches.split(",")]
    profiled = {tuple(map(int, c.split(":"))) for c in options.profile.split(",") if c}
    transformers.logging.set_verbosity_error()
    rows: list[dict[str, Any]] = []
    for name in options.models.split(","):
        began = time.perf_counter()
        engine = engine_of(name, max(batches))
        print(f"{name}: engine ready after {time.perf_counter() - began:.1f} s", flush=True)
        record(engine, 1, 0)
        sampler = engine._sampler
        for at in range(max(int(each) for each in options.adapters.split(","))):
            key = str(Path(f"/adapter-{at}"))
            sampler._adapters[key] = random_adapter(engine.model, Path(key))
            sampler._last_used[key] = 0
        if "prefill" in options.skip:
            skip_prefill(engine)
        for batch in batches:
            for adapters in (int(each) for each in options.adapters.split(",")):
                if adapters > batch:
                    continue
                row: dict[str, Any] = {"model": name, "batch": batch, "adapters": adapters}
                row["until graph, s"] = round(record(engine, batch, adapters), 1)
                found = run_round(engine, batch, adapters, options.new)
                row["tok/s"] = round(found.decode_tokens_s)
                row["ms"] = round(found.step_ms, 3)
                row["limit"] = round(limit(name, engine, batch, adapters))
                row["share"] = round(found.decode_tokens_s / row["limit"], 3)
                row["prefill tok/s"] = round(found.prefill_tokens_s)
                if (batch, adapters) in profiled:
                    profile(engine, batch, adapters)
                if "old" not in options.skip:
                    runner = engine._sampler._runner
                    runner._graphs, kept = None, runner._graphs
                    run_round(engine, batch, adapters, 3)
                    row["old tok/s"] = round(run_round(engine, batch, adapters, 12).decode_tokens_s)
                    runner._graphs = kept
                rows.append(row)
                print(json.dumps(row), flush=True)
        del engine
        torch.cuda.empty_cache()
        if "generate" not in options.skip:
            model = random_model(name)
            for batch in (each for each in batches if each <= 64):
                row = {"model": name, "batch": batch, "generate": round(generate(model, batch))}
                rows.append(row)
                print(json.dumps(row), flush=True)
            del model
            torch.cuda.empty_cache()
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
