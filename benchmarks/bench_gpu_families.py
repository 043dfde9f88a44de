"""
Speed of mixtures of experts and of recurrent models on one GPU, beside transformers' own code.

    python benchmarks/bench_gpu_families.py [--models Qwen3-30B-A3B,gpt-oss-20b] [--minutes 9]

Models are those of the hosted line-up, by the last part of their names. Their weights are random and
made on the device: their files have only names and shapes, so a model of 61 GB needs neither disk
nor host memory. Options, the engine process and the way of measuring are those of `bench_gpu.py` and
`bench_gpu_training.py`. `--small` with the model `tiny-moe`, `tiny-gpt-oss` or `tiny-hybrid` is a
quick check of this script on any machine.
"""

import functools
import json
import math
import shutil
import struct
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_gpu import (
    COPY_SPEED,
    PAGE,
    RANK,
    SHAPES,
    Context,
    Sizes,
    decode,
    emit,
    engine_child,
    generate,
    main,
    prompts_of,
    request_json,
)
from bench_gpu_training import (
    add_lora,
    create_models,
    mixed_lengths,
    train_case,
)

from tinkex.models.line_up import line_up, tensors_of

TINY = {"hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 2000, "head_dim": 32}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
RECURRENT = {"linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_num_value_heads": 4}
RECURRENT |= {"linear_value_head_dim": 16, "linear_conv_kernel_dim": 4}

#: The parts of configs that set sizes. `SHAPES` has them for the functions of `bench_gpu`.
CONFIGS: dict[str, Mapping[str, Any]] = {
    "tiny-moe": {"model_type": "qwen3_moe", **TINY, **EXPERTS, "intermediate_size": 128},
    "tiny-gpt-oss": {"model_type": "gpt_oss", **TINY, "intermediate_size": 64}
    | {"num_local_experts": 8, "num_experts_per_tok": 2, "attention_bias": True},
    "tiny-hybrid": {"model_type": "qwen3_5_moe", **TINY, **EXPERTS, **RECURRENT}
    | {"shared_expert_intermediate_size": 32},
    **{
        model.name.rpartition("/")[2]: model.config
        for model in line_up()
        if model.config is not None and "vision_config" not in model.config
    },
}
SHAPES |= {name: dict(config) for name, config in CONFIGS.items()}
#: Other names in transformers for the text part of a family with images.
TEXT_TYPES = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}


# -- models ---------------------------------------------------------------------------------------


def write_headers(name: str, folder: Path, device: str) -> None:
    """A folder with the names and shapes of all weights, and no weights."""
    import transformers

    from tinkex.models.tiny_model import write_tiny_model

    sizes = dict(CONFIGS[name])
    kind = str(sizes.pop("model_type"))
    config = transformers.AutoConfig.for_model(TEXT_TYPES.get(kind, kind), **sizes)
    config.eos_token_id = None
    tiny = write_tiny_model(folder.with_name(f"{folder.name}.tokenizer"))
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    config.save_pretrained(part)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / file, part / file)
    header, end = {}, 0
    for tensor, shape in tensors_of(CONFIGS[name]).items():
        start, end = end, end + 2 * math.prod(shape)
        header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    with (part / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.truncate(file.tell() + end)  # a hole, which takes no disk
    part.rename(folder)


def random_model(folder: Path, dtype: Any, *, device: Any = None) -> Any:
    """In place of `original_model.load`: the model of a folder with random weights, on the device."""
    import torch
    import transformers

    from tinkex.engine.model import original_model

    config = transformers.AutoConfig.from_pretrained(folder)
    original_model.refuse_unsupported(config)
    torch.manual_seed(0)
    auto: Any = transformers.AutoModelForCausalLM
    # Without `accelerate` no device is given. A CPU takes minutes for the weights of a large model.
    with torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")):
        return auto.from_config(
            config, dtype=dtype, attn_implementation=original_model.original_attention(config, auto)
        )


def use_random_models() -> None:
    from tinkex.engine.model import base_model

    base_model.load = random_model


def wait_for_kernels() -> None:
    """An engine process waits for its compiler, so no case measures steps without graphs instead."""
    from tinkex.engine.sampling.kernel_compiler import KernelCompiler

    begin = KernelCompiler.__init__

    def waiting(self: KernelCompiler, *args: Any) -> None:
        begin(self, *args)
        self.waits = True

    KernelCompiler.__init__ = waiting  # type: ignore[method-assign]


def limit(name: str, batch: int, adapters: int, context: int) -> float | None:
    """Tokens per second if a decode step only reads what it must; of plain mixtures of experts."""
    c = CONFIGS[name]
    if c["model_type"] != "qwen3_moe":
        return None
    each = dict(tensors_of(c))
    experts = sum(math.prod(shape) for key, shape in each.items() if ".experts." in key)
    others = sum(math.prod(shape) for key, shape in each.items() if ".experts." not in key)
    others -= c["vocab_size"] * c["hidden_size"]  # the embedding
    hit = 1 - (1 - c["num_experts_per_tok"] / c["num_experts"]) ** batch
    keys = 2 * c["num_key_value_heads"] * c["head_dim"] * c["num_hidden_layers"]
    return batch * COPY_SPEED / (2 * (others + hit * experts + batch * context * keys))


# -- pieces ---------------------------------------------------------------------------------------


def tokens_of(context: Context) -> int:
    return 512 if context.model.startswith("tiny") else 8192


def train(context: Context) -> None:
    """Mixed lengths with one adapter; then several adapters in one batch, beside one."""
    total = tokens_of(context)
    mixed = mixed_lengths(total, total // 8)
    case = functools.partial(train_case, context)
    with engine_child(context) as engine:
        case(engine, f"mixed lengths, rank {RANK}", [mixed], limit=None)
        emit(
            what="planned activations of a token",
            unit="MB",
            value=round(engine.stats.activation_bytes_per_token / 1e6, 2),
        )
        one_s = case(engine, "32 sequences, 1 adapter", [[total // 32] * 32], limit=None)
        several_s = case(engine, "32 sequences, 4 adapters", [[total // 32] * 8] * 4, limit=None)
        emit(what="4 adapters of rank 32 over one", unit="%", value=over(several_s, one_s))
    with engine_child(context) as engine:
        create_models(engine, 8, rank=8)
        several_s = case(
            engine, "32 sequences, 8 adapters of rank 8", [[total // 32] * 4] * 8, limit=None
        )
        emit(what="8 adapters of rank 8 over one of 32", unit="%", value=over(several_s, one_s))


def over(found_s: float, one_s: float) -> float:
    return round(100 * (found_s / one_s - 1), 1)


def short_decode(context: Context) -> None:
    """Decoding with few cases: adapters of mixtures are large."""
    if context.sizes.cases == Sizes().cases:
        cases = ((1, 0), (1, 1), (64, 0), (64, 1), (256, 0), (256, 1))
        context.sizes = replace(context.sizes, cases=cases)
    decode(context, limit)


def routing(context: Context) -> None:
    """Which experts differ between sampling and training for the same tokens."""
    import torch

    from tinkex.engine import Engine, EngineSettings
    from tinkex.engine.model.experts import Experts
    from tinkex.wire.codec import decode_json
    from tinkex.wire.inputs import Datum, ModelInput
    from tinkex.wire.sampling import SampleRequest
    from tinkex.wire.training import AdamOptimizerConfig, ForwardBackwardInput, LoraConfig

    use_random_models()
    # Graphs and fused layers keep no choices of routers.
    engine = Engine(
        EngineSettings(
            name=context.model,
            folder=context.folder,
            device=context.device,
            kv_tokens=64 * PAGE,
            compiles=False,
        )
    )
    layers = engine.model.experts
    if not layers:
        emit(what="expert choices that differ", unit="%", value="no experts")
        return

    def routed() -> torch.Tensor:
        """The sorted choices of the last pass, [layers, tokens, choices]."""
        found = [each.routed_TK for each in layers if each.routed_TK is not None]
        return torch.stack(found).sort(dim=2).values.cpu()

    (prompt,) = prompts_of(1, 129, context.model)
    new = 16 if context.model.startswith("tiny") else 256
    engine.submit(1, decode_json(SampleRequest, request_json(prompt, new, seed=1)), adapter=None)
    steps: list[torch.Tensor] = []
    answer: Any = None
    run = Experts.run

    def recorded(self: Experts, *args: torch.Tensor) -> torch.Tensor:
        result = run(self, *args)
        if self is layers[-1]:
            steps.append(routed())
        return result

    Experts.run = recorded  # type: ignore[method-assign]
    try:
        while engine.sampling:
            for finished in engine.advance():
                answer = finished.outcome
    finally:
        Experts.run = run  # type: ignore[method-assign]
    if isinstance(answer, Exception):
        raise answer
    sequence = answer.sequences[0]
    tokens = [*prompt, *sequence.tokens]
    datum = Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )
    engine.create("m", LoraConfig(rank=8, seed=1), AdamOptimizerConfig())
    passed = ForwardBackwardInput(data=[datum], loss_fn="cross_entropy")
    output = engine.run_pass("m", passed, backward=False)
    sampled_LTK, trained_LTK = torch.cat(steps, dim=1), routed()
    count = min(sampled_LTK.shape[1], trained_LTK.shape[1])
    emit(what="tokens compared", unit="", value=count)
    kept = (sampled_LTK[:, :count].unsqueeze(3) == trained_LTK[:, :count].unsqueeze(2)).any(dim=3)
    emit(
        what="expert choices that differ between sampling and training",
        unit="%",
        value=round(100 * float((~kept).float().mean()), 3),
    )
    found = output.loss_fn_outputs[0]["logprobs"].to_numpy()[len(prompt) - 1 :]
    gaps = abs(found - sequence.logprobs_np)
    emit(what="sampled logprobs from those of a pass, mean", unit="", value=f"{gaps.mean():.1e}")


def path(context: Context) -> None:
    """How decode steps are computed: logprobs of graphs beside those of steps without them."""
    from tinkex.engine import Engine, EngineSettings
    from tinkex.wire.codec import decode_json
    from tinkex.wire.sampling import SampleRequest

    use_random_models()
    engine = Engine(
        EngineSettings(
            name=context.model, folder=context.folder, device=context.device, kv_tokens=64 * PAGE
        )
    )
    (prompt,) = prompts_of(1, 129, context.model)

    def logprobs() -> Any:
        request = decode_json(SampleRequest, request_json(prompt, 32, seed=1))
        engine.submit(1, request, adapter=None)
        while engine.sampling:
            for finished in engine.advance():
                if isinstance(finished.outcome, Exception):
                    raise finished.outcome
                found = finished.outcome.sequences[0]
        return found.tokens, found.logprobs_np

    logprobs()  # makes the sampler
    sampler: Any = engine._sampler
    runner = sampler._runner
    if runner.compiler is None:
        emit(what="decode steps", unit="", value="no graphs")
        return
    graphs, runner._graphs = runner._graphs, None
    before, without = logprobs()
    runner._graphs, runner.compiler.waits = graphs, True
    after, found = logprobs()
    decoder = type(engine.model.decoder).__name__
    refused = ", ".join(map(str, runner.compiler.refused))
    emit(what="decode steps", unit="", value=f"refused: {refused}" if refused else decoder)
    same = next((at for at, (a, b) in enumerate(zip(before, after, strict=True)) if a != b), 32)
    emit(what="the same tokens as without graphs, of 32", unit="", value=same)
    if same:
        gap = abs(found[:same] - without[:same]).mean()
        emit(what="logprobs of them, mean difference", unit="", value=f"{gap:.1e}")


def rivals(context: Context) -> None:
    """transformers' own code: training with adapters on attention only, and `generate`."""
    import torch

    if not context.model.startswith("tiny"):
        context.sizes = replace(context.sizes, rivals=(1, 64, 256))
    dtype = torch.bfloat16 if context.device == "cuda" else torch.float32
    model = random_model(context.folder, dtype, device=context.device).eval()
    model.requires_grad_(False)
    if hasattr(model, "set_experts_implementation") and "experts" in str(type(model.config)):
        model.set_experts_implementation("grouped_mm")
    generate(context, model, (None,))
    add_lora(model, ("self_attn", "linear_attn"))
    model.train()
    total = tokens_of(context)
    length = total // 8
    ids = torch.randint(0, model.config.vocab_size, (8, length), device=context.device)

    def step() -> float:
        began_s = time.perf_counter()
        for rows in ids.split(4):
            model(input_ids=rows, labels=rows).loss.backward()
        if context.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began_s

    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        name = f"transformers, adapters on attention, 8 x {length}"
        name += ", checkpointing" if checkpointing else ""
        try:
            step()
            value: Any = round(total / min(step() for _ in range(2)))
        except Exception as error:  # noqa: BLE001  a rival that fails is a result
            value = f"{type(error).__name__}: {error}"[:80]
        emit(what=name, unit="tokens/s", value=value)


#: name -> (function, most seconds)
PIECES = {
    "path": (path, 120),
    "train": (train, 200),
    "decode": (short_decode, 300),
    "routing": (routing, 60),
    "rivals": (rivals, 180),
}

if __name__ == "__main__":
    if "--fd" in sys.argv:
        from tinkex.engine import process

        use_random_models()
        wait_for_kernels()
        process.main()
    else:
        main(
            PIECES,
            Path(__file__),
            write=write_headers,
            models="Qwen3-30B-A3B,gpt-oss-20b,Qwen3.5-9B,Qwen3.5-35B-A3B",
            engine=(str(Path(__file__).resolve()),),
        )
