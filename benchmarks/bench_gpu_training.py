"""
Speed of training on one GPU, beside transformers' own code, and of training and sampling together.

    python benchmarks/bench_gpu_training.py [--models 8b,0.6b] [--pieces train,http] [--minutes 9]

Models, options and the engine process are those of `bench_gpu.py`. Times are from the first order to
the last report, with the optimizer step of every pass, so they include everything that a server's
engine does. `--small` is a quick check of this script on any machine.
"""

import functools
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_gpu import (
    COMMON,
    RANK,
    SHAPES,
    Context,
    EngineChild,
    emit,
    engine_child,
    main,
    prompts_of,
    request_json,
    server,
)

#: Floating-point operations per second of a large bfloat16 product on an H200.
PRODUCT_SPEED = 790e12


def mixed_lengths(total: int, longest: int) -> list[int]:
    """Many short and a few long sequences, the same in every run."""
    import numpy as np

    random, lengths = np.random.default_rng(1), list[int]()
    while sum(lengths) < total:
        drawn = random.lognormal(math.log(longest / 3), 0.7)
        lengths.append(int(min(longest, max(longest // 32, drawn))))
    lengths[-1] -= sum(lengths) - total
    return [length for length in lengths if length > 1]


def tokens_of(context: Context) -> int:
    return 256 if context.model == "tiny" else 8192


def limit_tokens_s(name: str, lengths: Sequence[int]) -> float:
    """
    Tokens per second if a step only multiplies.

    Four operations for each base weight (the products of the forward pass, and the gradient by
    their inputs), six for each weight of an adapter, and causal attention with its backward pass.
    """
    c = {**COMMON, **SHAPES[name]}
    hidden, inner, layers = c["hidden_size"], c["intermediate_size"], c["num_hidden_layers"]
    heads, keys = (c[f"num_{kind}_heads"] * c["head_dim"] for kind in ("attention", "key_value"))
    shapes = [(hidden, heads), (hidden, keys), (hidden, keys), (heads, hidden)]
    shapes += [(hidden, inner), (hidden, inner), (inner, hidden)]
    base = layers * sum(a * b for a, b in shapes) + hidden * c["vocab_size"]
    lora = layers * RANK * sum(a + b for a, b in shapes)
    attention = layers * heads * sum(length**2 for length in lengths)
    work = sum(lengths) * (4 * base + 6 * lora) + 7 * attention
    return sum(lengths) * PRODUCT_SPEED / work


# -- orders ---------------------------------------------------------------------------------------


def pass_body(lengths: Sequence[int], model: str) -> bytes:
    import numpy as np

    from tinkex import types
    from tinkex.wire.protobuf import encode_forward_backward_request
    from tinkex.wire.training import ForwardBackwardInput, ForwardBackwardRequest

    vocabulary = {**COMMON, **SHAPES[model]}["vocab_size"]
    random, data = np.random.default_rng(2), []
    for length in lengths:
        tokens = random.integers(10, vocabulary, length + 1)
        inputs = {
            "target_tokens": types.TensorData.from_numpy(tokens[1:]),
            "weights": types.TensorData.from_numpy(np.ones(length, np.float32)),
        }
        prompt = types.ModelInput.from_ints(tokens[:-1].tolist())
        data.append(types.Datum(model_input=prompt, loss_fn_inputs=inputs))
    work = ForwardBackwardInput(data=data, loss_fn="cross_entropy")
    return encode_forward_backward_request(
        ForwardBackwardRequest(forward_backward_input=work, model_id="m", seq_id=1)
    )


def create_models(engine: EngineChild, count: int, rank: int = RANK) -> None:
    """Models t0, t1 and so on, as far as they are not there yet."""
    from tinkex.wire.proto import frames_pb2

    lora = json.dumps({"rank": rank, "seed": 1, "train_unembed": False}).encode()
    for at in range(engine.models, count):
        create = frames_pb2.Create(
            model_id=f"t{at}", lora_config=lora, optimizer_config=b'{"type":"adamw"}'
        )
        engine.order(create=create)
        engine.report()
    engine.models = max(engine.models, count)


def order_step(engine: EngineChild, model: int, body: bytes, *, backward: bool) -> list[int]:
    """A pass and, after a backward pass, its optimizer step. Returns their tickets."""
    from tinkex.wire.proto import frames_pb2

    payload = frames_pb2.Payload(inline=body)
    run = frames_pb2.Pass(model_id=f"t{model}", payload=payload, backward=backward)
    tickets = [engine.order(run_pass=run)]
    if backward:
        params = frames_pb2.Payload(inline=b'{"model_id":"m","adam_params":{"learning_rate":1e-5}}')
        step = frames_pb2.OptimStep(model_id=f"t{model}", payload=params)
        tickets.append(engine.order(optim_step=step))
    return tickets


def steps_seconds(
    engine: EngineChild, bodies: Sequence[bytes], *, count: int, backward: bool = True
) -> float:
    """Seconds of a step if each model has `count` of them in its queue; one body for each model."""
    began_s = time.perf_counter()
    waiting = {
        ticket
        for _ in range(count)
        for model, body in enumerate(bodies)
        for ticket in order_step(engine, model, body, backward=backward)
    }
    while waiting:
        waiting.discard(engine.report().ticket)
    return (time.perf_counter() - began_s) / count


def warm(run: Callable[[], float]) -> None:
    """Kernels are compiled in the background: until times stay the same, at least 6 seconds."""
    times: list[float] = []
    began_s = time.perf_counter()
    while len(times) < 40:
        times.append(run())
        last = times[-3:]
        stable = len(last) == 3 and max(last) < 1.06 * min(last)
        if stable and time.perf_counter() - began_s > 6:
            return


# -- pieces ---------------------------------------------------------------------------------------


def train(context: Context) -> None:
    """Mixed lengths, and 32 sequences with one adapter, eight, and one for each."""
    total = tokens_of(context)
    mixed = mixed_lengths(total, total // 8)
    with engine_child(context) as engine:
        step_s = train_case(context, engine, "mixed lengths", [mixed])
        context.remember("steps", step_s)
        stats = engine.stats
        megabytes = round(stats.activation_bytes_per_token / 1e6, 2)
        emit(what="planned activations of a token", unit="MB", value=megabytes)
        emit(what="largest micro-batch", unit="tokens", value=stats.batch_tokens)
        one_s = 0.0
        for count in (1, 8, 32):
            lengths = [[total // 32] * (32 // count)] * count
            took_s = train_case(context, engine, f"32 sequences, {count} adapters", lengths)
            one_s = one_s or took_s
            if count > 1:
                over = round(100 * (took_s / one_s - 1), 1)
                emit(what=f"{count} adapters over one", unit="%", value=over)


def shapes(context: Context) -> None:
    """Forward only, many short sequences, and one long one."""
    total = tokens_of(context)
    with engine_child(context) as engine:
        mixed = mixed_lengths(total, total // 8)
        train_case(context, engine, "mixed lengths, forward only", [mixed], backward=False)
        train_case(context, engine, "64 sequences", [[total // 64] * 64])
        train_case(context, engine, "one sequence", [[total]])


def train_case(
    context: Context,
    engine: EngineChild,
    name: str,
    lengths: Sequence[Sequence[int]],
    *,
    backward: bool = True,
    limit: Callable[[str, Sequence[int]], float] | None = limit_tokens_s,
) -> float:
    """Seconds of a step: the median of three runs of four. `lengths` are those of each model."""
    create_models(engine, len(lengths))
    bodies = [pass_body(own, context.model) for own in lengths]
    run = functools.partial(steps_seconds, engine, bodies, backward=backward)
    warm(functools.partial(run, count=2))
    every = [length for own in lengths for length in own]
    total = sum(every)
    times = sorted(run(count=4) for _ in range(3))
    most_s = limit(context.model, every) if backward and limit is not None else None
    emit(
        what=f"train, {name}",
        unit="tokens/s",
        value=round(total / times[1]),
        lowest=round(total / times[-1]),
        share="" if most_s is None else round(total / times[1] / most_s, 3),
    )
    return times[1]


def deterministic(context: Context) -> None:
    total = tokens_of(context)
    body = pass_body(mixed_lengths(total, total // 8), context.model)
    with engine_child(context, deterministic=True) as engine:
        create_models(engine, 1)
        run = functools.partial(steps_seconds, engine, [body])
        run(count=2)
        value = round(total / min(run(count=2) for _ in range(3)))
        emit(what="train, mixed lengths, deterministic", unit="tokens/s", value=value)


def together(context: Context) -> None:
    """Training and 64 sequences that decode: each alone, then both at once for some seconds."""
    with engine_child(context) as engine:
        create_models(engine, 1)
        both_at_once(context, engine)


def both_at_once(context: Context, engine: EngineChild) -> None:
    total, small = tokens_of(context), context.model == "tiny"
    sequences, new = (4, 16) if small else (64, 160)
    body = pass_body(mixed_lengths(total, total // 8), context.model)
    prompts = prompts_of(sequences, context.sizes.prompt, context.model)
    engine.add_adapters(1, context.scratch)
    warm(lambda: engine.seconds(prompts, new, 1))
    warm(lambda: steps_seconds(engine, [body], count=2))
    step_s = min(steps_seconds(engine, [body], count=4) for _ in range(2))
    sample_s = min(engine.seconds(prompts, new, 1) for _ in range(2))
    count = 4 if small else max(8, int(8 / step_s))
    seconds, tokens_s, first_s = run_both(engine, body, prompts, new, count)
    train_share, sample_share = count * step_s / seconds, tokens_s * sample_s / new / sequences
    emit(what="training beside 64 sequences, of alone", unit="", value=round(train_share, 3))
    emit(what="64 sequences beside training, of alone", unit="", value=round(sample_share, 3))
    emit(what="sum of both", unit="", value=round(train_share + sample_share, 3))
    emit(what="first token beside training, longest", unit="s", value=round(first_s, 2))


def run_both(
    engine: EngineChild, body: bytes, prompts: list[list[int]], new: int, count: int
) -> tuple[float, float, float]:
    """
    `count` training steps while samples run without a pause.

    Returns the seconds until training ended, sampled tokens per second between the first and the last
    report of the engine's counts, and the longest time from a sample of one token to its answer.
    """
    from tinkex.wire.proto import frames_pb2

    samples: dict[int, int] = {}
    probes: dict[int, float] = {}

    def sample(at: int) -> None:
        payload = frames_pb2.Payload(inline=request_json(prompts[at], new, seed=at))
        folder = str(engine.adapters[0])
        order = frames_pb2.Sample(payload=payload, owner="bench", adapter_folder=folder)
        samples[engine.order(sample=order)] = at

    def probe() -> None:
        payload = frames_pb2.Payload(inline=request_json(prompts[0], 1, seed=0))
        ticket = engine.order(sample=frames_pb2.Sample(payload=payload, owner="probe"))
        probes[ticket] = time.perf_counter()

    for at in range(len(prompts)):
        sample(at)
    training = {
        ticket for _ in range(count) for ticket in order_step(engine, 0, body, backward=True)
    }
    began_s, longest_s, last = time.perf_counter(), 0.0, engine.stats
    counts: list[tuple[float, int]] = []
    probe()
    while training:
        ticket = engine.report().ticket
        training.discard(ticket)
        if engine.stats is not last:
            last = engine.stats
            counts.append((time.perf_counter(), last.tokens_sampled))
        if ticket in samples:
            sample(samples.pop(ticket))
        elif ticket in probes:
            longest_s = max(longest_s, time.perf_counter() - probes.pop(ticket))
            probe()
    seconds = time.perf_counter() - began_s
    while samples or probes:
        ticket = engine.report().ticket
        samples.pop(ticket, None)
        probes.pop(ticket, None)
    (first_s, first), (last_s, final) = counts[0], counts[-1]
    return seconds, (final - first) / max(1e-6, last_s - first_s), longest_s


def http(context: Context) -> None:
    """Steps over HTTP with our client: one model, then eight at once; beside the engine alone."""
    import numpy as np

    import tinkex
    from tinkex import types

    total = tokens_of(context)
    lengths = mixed_lengths(total, total // 8)
    engine_s = context.recall("steps")
    if engine_s is None:
        with engine_child(context) as engine:
            create_models(engine, 1)
            body = pass_body(lengths, context.model)
            warm(lambda: steps_seconds(engine, [body], count=2))
            engine_s = min(steps_seconds(engine, [body], count=4) for _ in range(3))
        emit(what="engine, steps in a queue", unit="tokens/s", value=round(total / engine_s))
    vocabulary = {**COMMON, **SHAPES[context.model]}["vocab_size"]
    random, data = np.random.default_rng(2), []
    for length in lengths:
        tokens = random.integers(10, vocabulary, length + 1)
        inputs = {"target_tokens": tokens[1:], "weights": np.ones(length, np.float32)}
        prompt = types.ModelInput.from_ints(tokens[:-1].tolist())
        data.append(types.Datum(model_input=prompt, loss_fn_inputs=inputs))
    with (
        server(context) as (url, _),
        tinkex.ServiceClient(base_url=url, api_key="tml-bench") as service,
    ):
        create = functools.partial(
            service.create_lora_training_client,
            base_model="bench",
            rank=RANK,
            train_unembed=False,
        )
        models = [create()]

        def run(count: int) -> float:
            """`count` steps of each model in its queue; seconds of one step of each."""
            began_s = time.perf_counter()
            waiting: list[Any] = []
            for _ in range(count):
                for model in models:
                    waiting.append(model.forward_backward(data, "cross_entropy"))
                    waiting.append(model.optim_step(types.AdamParams(learning_rate=1e-5)))
            for each in waiting:
                each.result()
            return (time.perf_counter() - began_s) / count

        warm(lambda: run(2))
        one_s = min(run(6) for _ in range(2))
        emit(what="HTTP, one model", unit="tokens/s", value=round(total / one_s))
        emit(what="HTTP over engine", unit="", value=round(engine_s / one_s, 3))
        models += [create() for _ in range(7)]
        run(1)
        eight_s = min(run(2) for _ in range(2))
        emit(what="HTTP, eight models", unit="tokens/s", value=round(8 * total / eight_s))
        emit(what="eight models over one", unit="", value=round(8 * one_s / eight_s, 3))


def rivals(context: Context) -> None:
    """
    transformers with LoRA on padded batches: four sequences at a time, and sorted by length.

    Without the optimizer step, which ours include.
    """
    import torch
    import transformers

    total = tokens_of(context)
    dtype = torch.bfloat16 if context.device == "cuda" else torch.float32
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(context.folder, dtype=dtype)
    model = model.to(context.device).train().requires_grad_(False)
    add_lora(model)
    mixed = mixed_lengths(total, total // 8)
    vocabulary = model.config.vocab_size

    def padded(parts: Sequence[Sequence[int]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        batches = []
        for own in parts:
            ids = torch.randint(0, vocabulary, (len(own), max(own)), device=context.device)
            mask = torch.arange(max(own)) < torch.tensor(own).unsqueeze(1)
            batches.append((ids, mask.to(context.device)))
        return batches

    def step(batches: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        began_s = time.perf_counter()
        for ids, mask in batches:
            labels = ids.where(mask, -100)
            model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
        if context.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began_s

    by_length = by_padded_tokens(sorted(mixed, reverse=True), total)
    as_they_come = [mixed[at : at + 4] for at in range(0, len(mixed), 4)]
    cases = [
        ("four at a time", as_they_come, False),
        ("sorted by length", by_length, False),
        ("sorted by length, checkpointing", by_length, True),
    ]
    for name, parts, checkpointing in cases:
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        try:
            batches = padded(parts)
            step(batches)
            value: Any = round(total / min(step(batches) for _ in range(3)))
        except Exception as error:  # noqa: BLE001  a rival that fails is a result
            value = f"{type(error).__name__}: {error}"[:80]
        emit(what=f"transformers + LoRA, padded, {name}", unit="tokens/s", value=value)


def by_padded_tokens(lengths: Sequence[int], most: int) -> list[Sequence[int]]:
    """Batches of at most `most` tokens with their padding; the longest sequence comes first."""
    batches, begin = [], 0
    while begin < len(lengths):
        size = max(1, most // lengths[begin])
        batches.append(lengths[begin : begin + size])
        begin += size
    return batches


def add_lora(model: Any, parts: Sequence[str] = ("self_attn", "mlp")) -> None:
    """Adapters as a plain user would write them: two small products beside every projection."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    class WithLora(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base
            like = {"dtype": base.weight.dtype, "device": base.weight.device}
            self.A = nn.Parameter(torch.randn(RANK, base.in_features, **like) * 0.01)
            self.B = nn.Parameter(torch.zeros(base.out_features, RANK, **like))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + F.linear(F.linear(x, self.A), self.B)

    for layer in model.model.layers:
        for part in (getattr(layer, name) for name in parts if hasattr(layer, name)):
            for name, child in list(part.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(part, name, WithLora(child))


#: name -> (function, most seconds)
PIECES: dict[str, tuple[Callable[[Context], None], int]] = {
    "train": (train, 200),
    "together": (together, 100),
    "http": (http, 120),
    "deterministic": (deterministic, 60),
    "shapes": (shapes, 90),
    "rivals": (rivals, 60),
}

if __name__ == "__main__":
    main(PIECES, Path(__file__))
