"""
Speed on one GPU: decoding, prefill, HTTP, start, beside transformers' own `generate`.

    python benchmarks/bench_gpu.py [--models 8b,0.6b] [--pieces decode,http] [--minutes 9]

Models have random weights in the shape of Qwen3 and are written to files once, so that engines load
them as users' engines do. Every piece is a process with a time limit; what it has found by then
counts. "Engine" is a real engine process (`tinkex.engine`) that gets orders over its socket;
"HTTP" is `tinkex serve` with the client of this package.

Decoding: sequences with about 1,024 tokens of context, prompts in the prefix cache. Its speed is the
difference of two runs with different lengths, so it does not include prefill or the way there: the
median of three pairs, with the lowest. The limit is the time to read weights, adapters and keys once, at the measured speed of a copy.

With $OUT set, `bench_gpu.json` and `bench_gpu.md` are written there. `--small` is a quick check of
this script on any machine.
"""

import argparse
import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

SHAPES: dict[str, dict[str, Any]] = {
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36}
    | {"num_attention_heads": 32, "tie_word_embeddings": False},
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
    | {"num_attention_heads": 16, "tie_word_embeddings": True},
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    | {"num_attention_heads": 4, "tie_word_embeddings": True, "vocab_size": 2000}
    | {"num_key_value_heads": 2, "head_dim": 32},
}
COMMON = {"vocab_size": 151_936, "num_key_value_heads": 8, "head_dim": 128}
RANK = 32
PAGE = 64
#: Bytes per second of a large copy on an H200, read and written.
COPY_SPEED = 4.25e12


@dataclass(frozen=True)
class Sizes:
    #: Full pages and one token: only that token is computed when the prompt is in the cache.
    prompt: int = 15 * PAGE + 1
    short: int = 32
    long: int = 288
    #: Kernels are compiled in the background: a case is warm after this many seconds at the earliest.
    warm_s: float = 4.0
    #: (sequences, adapters)
    cases: tuple[tuple[int, int], ...] = ((1, 0), (1, 1), (64, 0), (64, 1), (64, 8), (256, 0), (256, 1), (256, 8))  # fmt: skip
    prefills: int = 32
    http_samples: int = 256
    http_tokens: int = 256
    seeds: int = 64
    rivals: tuple[int, ...] = (1, 64)
    #: Shorter than `long`, because `generate` is slow.
    rival_long: int = 160


SMALL = Sizes(
    prompt=65,
    short=4,
    long=12,
    warm_s=0.5,
    cases=((1, 0), (4, 1), (4, 2)),
    prefills=4,
    http_samples=8,
    http_tokens=8,
    seeds=4,
    rivals=(2,),
    rival_long=12,
)


@dataclass
class Context:
    model: str
    folder: Path
    device: str
    sizes: Sizes
    scratch: Path
    #: The program of an engine process.
    engine: tuple[str, ...] = ("-m", "tinkex.engine")

    def remember(self, what: str, seconds: float) -> None:
        """For a later piece of the same run, which then need not start an engine for it."""
        self._file(what).write_text(str(seconds))

    def recall(self, what: str) -> float | None:
        file = self._file(what)
        return float(file.read_text()) if file.exists() else None

    def _file(self, what: str) -> Path:
        return self.folder.with_name(f"{self.folder.name}.{what}.seconds")


def emit(**row: Any) -> None:
    """A result, for the parent process."""
    print("ROW " + json.dumps(row), flush=True)


# -- models ---------------------------------------------------------------------------------------


def config_of(name: str) -> Any:
    import transformers

    sizes = {**COMMON, **SHAPES[name]}
    return transformers.Qwen3Config(max_position_embeddings=4096, eos_token_id=None, **sizes)


def write_model(name: str, folder: Path, device: str) -> None:
    """Random weights, made on the device, and the tokenizer of the tiny model."""
    import torch
    import transformers

    from tinkex.models.tiny_model import write_tiny_model

    with torch.device(device):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            config_of(name), dtype=torch.bfloat16 if device == "cuda" else torch.float32
        )
    tiny = write_tiny_model(folder.with_name(f"{folder.name}.tokenizer"))
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part, max_shard_size="4GB")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / file, part / file)
    (part / "generation_config.json").unlink(missing_ok=True)
    part.rename(folder)


def limit_tokens_s(name: str, batch: int, adapters: int, context: int) -> float:
    """Tokens per second if a step only reads what it must."""
    c = {**COMMON, **SHAPES[name]}
    hidden, inner, layers = c["hidden_size"], c["intermediate_size"], c["num_hidden_layers"]
    heads = c["num_attention_heads"] * c["head_dim"]
    keys = c["num_key_value_heads"] * c["head_dim"]
    shapes = [(hidden, heads), (hidden, keys), (hidden, keys), (heads, hidden)]
    shapes += [(hidden, inner), (hidden, inner), (inner, hidden)]
    weights = layers * sum(a * b for a, b in shapes) + hidden * c["vocab_size"]
    lora = layers * RANK * sum(a + b for a, b in shapes) * min(adapters, batch)
    read = 2 * (weights + lora + batch * context * 2 * keys * layers)
    return batch * COPY_SPEED / read


# -- a real engine process ------------------------------------------------------------------------


@dataclass
class EngineChild:
    """The web process's end of the socket of an engine process."""

    process: "subprocess.Popen[bytes]"
    wire: socket.socket
    ready_s: float
    adapters: list[Path] = field(default_factory=list)
    tickets: int = 0
    #: Models in training.
    models: int = 0
    #: Counts of the last stats report.
    stats: Any = None

    def order(self, **work: Any) -> int:
        from tinkex.wire import engine_protocol

        self.tickets += 1
        order = engine_protocol.Order(ticket=self.tickets, **work)
        self.wire.sendall(engine_protocol.frame(order))
        return self.tickets

    def report(self) -> Any:
        from tinkex.wire import engine_protocol

        while True:
            head = self._read(engine_protocol.LENGTH_PREFIX.size)
            body = self._read(engine_protocol.body_length(head))
            report = engine_protocol.Report.FromString(body)
            kind = report.WhichOneof("body")
            if kind == "stats":
                self.stats = report.stats
                continue
            if kind in ("failed", "refused"):
                raise RuntimeError(getattr(report, kind).message)
            return report

    def _read(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            if not (part := self.wire.recv(size - len(parts))):
                raise RuntimeError(f"the engine process ended with {self.process.wait(20)}")
            parts += part
        return bytes(parts)

    def add_adapters(self, count: int, folder: Path) -> None:
        from tinkex.wire.proto import frames_pb2

        lora = json.dumps({"rank": RANK, "seed": 1, "train_unembed": False}).encode()
        optimizer = b'{"type":"adamw"}'
        for at in range(len(self.adapters), count):
            name, target = f"m{at}", folder / f"adapter-{at}"
            create = frames_pb2.Create(model_id=name, lora_config=lora, optimizer_config=optimizer)
            save = frames_pb2.Save(model_id=name, folder=str(target), optimizer=False)
            for work in (
                {"create": create},
                {"save": save},
                {"drop": frames_pb2.Drop(model_id=name)},
            ):
                self.order(**work)
                self.report()
            self.adapters.append(target)

    def sample(self, prompts: list[list[int]], new: int, adapters: int) -> "Samples":
        """All prompts at once, with the adapters in turn; the time until the last answer."""
        from tinkex.wire.proto import frames_pb2
        from tinkex.wire.protobuf import decode_sample_response

        payloads = [request_json(prompt, new, seed=at) for at, prompt in enumerate(prompts)]
        began_s = time.perf_counter()
        tickets = {}
        for at, payload in enumerate(payloads):
            sample = frames_pb2.Sample(payload=frames_pb2.Payload(inline=payload), owner="bench")
            if adapters:
                sample.adapter_folder = str(self.adapters[at % adapters])
            tickets[self.order(sample=sample)] = at
        results: dict[int, bytes] = {}
        while len(results) < len(prompts):
            report = self.report()
            results[tickets[report.ticket]] = report.done.result
        took_s = time.perf_counter() - began_s
        found = [decode_sample_response(results[at]) for at in range(len(prompts))]
        return Samples(took_s, [list(one.sequences[0].tokens) for one in found])

    def seconds(self, prompts: list[list[int]], new: int, adapters: int) -> float:
        return self.sample(prompts, new, adapters).took_s


@dataclass
class Samples:
    took_s: float
    tokens: list[list[int]]


def request_json(prompt: list[int], new: int, seed: int) -> bytes:
    from tinkex.wire.codec import encode_json
    from tinkex.wire.inputs import ModelInput
    from tinkex.wire.sampling import SampleRequest, SamplingParams

    params = SamplingParams(max_tokens=new, seed=seed, stop=[])
    return encode_json(
        SampleRequest(prompt=ModelInput.from_ints(prompt), num_samples=1, sampling_params=params)
    )


def prompts_of(count: int, length: int, model: str, first: int = 0) -> list[list[int]]:
    """Different prompts, the same in every run."""
    import numpy as np

    vocabulary = {**COMMON, **SHAPES[model]}["vocab_size"]
    return [
        np.random.default_rng(first + at).integers(10, vocabulary, length).tolist()
        for at in range(count)
    ]


@contextlib.contextmanager
def engine_child(context: Context, **settings: Any) -> Iterator[EngineChild]:
    from tinkex.wire.engine_settings import EngineSettings

    began_s = time.perf_counter()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    if context.device == "cpu":
        settings["threads"] = 1  # several would wait for each other on a busy machine
    chosen = EngineSettings(
        name=context.model, folder=context.folder, device=context.device, **settings
    )
    with theirs:
        process = subprocess.Popen(
            [
                *(sys.executable, *context.engine),
                *("--fd", str(theirs.fileno()), "--settings", chosen.to_json()),
            ],
            pass_fds=(theirs.fileno(),),
            stdout=sys.stderr,
        )
    child = EngineChild(process=process, wire=ours, ready_s=0.0)
    try:
        child.report()  # ready
        child.ready_s = time.perf_counter() - began_s
        yield child
    finally:
        ours.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def until_stable(run: Callable[[], float], sizes: Sizes, *, most_s: float = 20.0) -> None:
    """
    Repeats a run until three in a row take the same time, at least for `sizes.warm_s`.

    Runs on the slow path are stable too, while kernels are compiled in the background.
    """
    began_s, took = time.perf_counter(), [run()]
    while (past_s := time.perf_counter() - began_s) < most_s:
        if past_s > sizes.warm_s and len(took) > 2 and max(took[-3:]) < 1.05 * min(took[-3:]):
            break
        took.append(run())


# -- pieces ---------------------------------------------------------------------------------------


def decode(
    context: Context, limit: Callable[[str, int, int, int], float | None] = limit_tokens_s
) -> None:
    """`limit` gives the most tokens per second for model, sequences, adapters and context."""
    sizes = context.sizes
    most = max(batch for batch, _ in sizes.cases)
    tokens = (most + 8) * (-(-(sizes.prompt + sizes.long) // PAGE) + 1) * PAGE
    with engine_child(context, kv_tokens=tokens, max_sequences=max(256, most)) as engine:
        emit(what="engine process ready", unit="s", value=round(engine.ready_s, 1))
        engine.add_adapters(max(adapters for _, adapters in sizes.cases), context.scratch)
        found: dict[tuple[int, int], float] = {}
        for batch, adapters in sizes.cases:
            prompts = prompts_of(batch, sizes.prompt, context.model)
            short = functools.partial(engine.seconds, prompts, sizes.short, adapters)
            long = functools.partial(engine.seconds, prompts, sizes.long, adapters)
            until_stable(short, sizes)
            pairs = [(short(), long()) for _ in range(3)]
            # A pair whose longer run was the faster one measured nothing and counts as 0.
            rates = [
                batch * (sizes.long - sizes.short) / (long_s - short_s) if long_s > short_s else 0.0
                for short_s, long_s in pairs
            ]
            length = sizes.prompt + (sizes.short + sizes.long) // 2
            most_s = limit(context.model, batch, adapters, length)
            rate = found[batch, adapters] = statistics.median(rates)
            emit(
                what=f"decode, {batch} sequences, {adapters} adapters",
                unit="tokens/s",
                value=round(rate),
                lowest=round(min(rates)),
                share="" if most_s is None else round(rate / most_s, 3),
            )
        for batch in sorted({batch for batch, _ in found}):
            base, one, many = (found.get((batch, count)) for count in (0, 1, 8))
            if base and one:
                emit(what=f"one adapter over base, {batch}", unit="%", value=round(100 * (base / one - 1), 1))  # fmt: skip
            if one and many:
                emit(what=f"8 adapters over one, {batch}", unit="%", value=round(100 * (one / many - 1), 1))  # fmt: skip
        context.remember("samples", seconds_of_samples(context, engine))


def seconds_of_samples(context: Context, engine: EngineChild) -> float:
    """The samples that `http` sends, in an engine process."""
    sizes = context.sizes
    count, new = sizes.http_samples, sizes.http_tokens
    prompts = prompts_of(count, sizes.prompt, context.model)
    until_stable(lambda: engine.seconds(prompts, new, 1), sizes)
    took_s = min(engine.seconds(prompts, new, 1) for _ in range(2))
    emit(what=f"engine, {count} x {new} tokens", unit="tokens/s", value=round(count * new / took_s))
    return took_s


def prefill(context: Context) -> None:
    """New prompts of 1,024 tokens; one sampled token each."""
    sizes = context.sizes
    with engine_child(context) as engine:
        engine.add_adapters(8, context.scratch)
        fresh = 0

        def run(adapters: int) -> float:
            nonlocal fresh
            fresh += sizes.prefills
            prompts = prompts_of(sizes.prefills, sizes.prompt, context.model, first=1000 + fresh)
            return engine.seconds(prompts, 1, adapters)

        for adapters in (0, 1, 8):
            until_stable(functools.partial(run, adapters), sizes)
            took_s = min(run(adapters) for _ in range(3))
            emit(
                what=f"prefill, {adapters} adapters",
                unit="tokens/s",
                value=round(sizes.prefills * sizes.prompt / took_s),
            )


def seeds(context: Context) -> None:
    """How many sequences with a seed differ alone and in a batch."""
    sizes = context.sizes
    prompts = prompts_of(sizes.seeds, 33, context.model)
    with engine_child(context, prefix_cache=False) as engine:
        engine.add_adapters(1, context.scratch)
        new = min(64, sizes.long)
        until_stable(lambda: engine.seconds(prompts, new, 1), sizes)
        until_stable(lambda: engine.seconds(prompts[:1], new, 1), sizes)
        together = engine.sample(prompts, new, 1).tokens
        again = engine.sample(prompts, new, 1).tokens
        alone = [alone_tokens(engine, prompts, at, new) for at in range(len(prompts))]
    for name, other in (("alone", alone), ("in the same batch again", again)):
        differ = sum(a != b for a, b in zip(together, other, strict=True))
        emit(what=f"seeds: sequences of {len(prompts)} that differ {name}", unit="", value=differ)


def alone_tokens(engine: EngineChild, prompts: list[list[int]], at: int, new: int) -> list[int]:
    from tinkex.wire.proto import frames_pb2
    from tinkex.wire.protobuf import decode_sample_response

    payload = frames_pb2.Payload(inline=request_json(prompts[at], new, seed=at))
    sample = frames_pb2.Sample(payload=payload, adapter_folder=str(engine.adapters[0]))
    engine.order(sample=sample)
    return list(decode_sample_response(engine.report().done.result).sequences[0].tokens)


def host(context: Context) -> None:
    """
    Host time of a decode step: all time of a look except waiting for the device.

    Looks while all sequences run, and apart from them the look in which all requests finish.
    """
    import torch

    from tinkex.engine import Engine, EngineSettings
    from tinkex.engine.sampling import decode_graphs, sampler
    from tinkex.engine.sampling.model_runner import GRAPH_STEPS
    from tinkex.wire.codec import decode_json
    from tinkex.wire.sampling import SampleRequest

    if context.device == "cpu":
        emit(what="host time of a step", unit="ms", value="only on a GPU")
        return
    count = max(batch for batch, _ in context.sizes.cases)
    engine = Engine(
        EngineSettings(
            name=context.model, folder=context.folder, device=context.device,
            max_sequences=count, kv_tokens=count * 512,
        )
    )  # fmt: skip
    waited_s = launched_s = 0.0
    read, replay = decode_graphs.Burst.read, torch.cuda.CUDAGraph.replay

    def timed_read(self: Any) -> Any:
        nonlocal waited_s
        began_s = time.perf_counter()
        torch.cuda.synchronize()
        waited_s += time.perf_counter() - began_s
        return read(self)

    def timed_replay(self: Any) -> None:
        nonlocal launched_s
        began_s = time.perf_counter()
        replay(self)
        launched_s += time.perf_counter() - began_s

    decode_graphs.Burst.read = timed_read  # type: ignore[method-assign]
    torch.cuda.CUDAGraph.replay = timed_replay  # type: ignore[method-assign]
    sampler.BURST_STEPS = 1  # a call is a look
    prompts = prompts_of(count, 65, context.model)
    #: Seconds of each look without waiting, and of its launches; of looks that finish requests.
    looks: list[tuple[float, float]] = []
    finishing: list[float] = []

    def run() -> float:
        nonlocal waited_s, launched_s
        for at, prompt in enumerate(prompts):
            one = decode_json(SampleRequest, request_json(prompt, 200, seed=at))
            engine.submit(at, one, adapter=None)
        running: Any = engine._sampler
        while running.scheduler.running < count and engine.sampling:
            engine.advance()
        looks.clear()
        finishing.clear()
        run_s = time.perf_counter()
        while engine.sampling:
            waited_s, launched_s, began_s = 0.0, 0.0, time.perf_counter()
            finished = engine.advance()
            busy_s = time.perf_counter() - began_s - waited_s
            if finished:
                finishing.append(busy_s)
            elif launched_s:
                looks.append((busy_s, launched_s))
        return time.perf_counter() - run_s

    until_stable(run, context.sizes)
    if not looks:
        raise RuntimeError("no look of the last run used a graph")
    step_ms = 1000 / GRAPH_STEPS / len(looks)
    emit(
        what=f"host time of a step, {count} sequences",
        unit="ms",
        value=round(step_ms * sum(busy_s for busy_s, _ in looks), 3),
        lowest=round(1000 / GRAPH_STEPS * min(busy_s for busy_s, _ in looks), 3),
    )
    emit(
        what="of it, launches of graphs, while the device computes",
        unit="ms",
        value=round(step_ms * sum(launch_s for _, launch_s in looks), 3),
    )
    emit(
        what="host time of a look that finishes requests, for each of them",
        unit="ms",
        value=round(1000 * sum(finishing) / count, 3),
    )


def rivals(context: Context) -> None:
    """transformers' own loop: its default cache, then a static cache with a compiled forward."""
    import torch
    import transformers

    dtype = torch.bfloat16 if context.device == "cuda" else torch.float32
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(context.folder, dtype=dtype)
    generate(context, model.to(context.device).eval(), (None, "static"))


def generate(context: Context, model: Any, caches: Sequence[str | None]) -> None:
    """The speed of `generate` with these kinds of cache."""
    import torch

    sizes = context.sizes

    def timed(batch: int, new: int, cache: str | None) -> float:
        ids = torch.tensor(prompts_of(batch, sizes.prompt, context.model), device=context.device)
        began_s = time.perf_counter()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new,
            do_sample=True, pad_token_id=0, cache_implementation=cache,
        )  # fmt: skip
        if context.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began_s

    for cache in caches:
        if cache:
            model.forward = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
        for batch in sizes.rivals:
            name = (
                f"generate, {'static cache, compiled' if cache else 'default'}, {batch} sequences"
            )
            try:
                for _ in range(2):
                    timed(batch, sizes.short, cache)  # warm-up
                timed(batch, sizes.rival_long, cache)
                short_s = timed(batch, sizes.short, cache)
                long_s = timed(batch, sizes.rival_long, cache)
                rate = batch * (sizes.rival_long - sizes.short) / max(1e-6, long_s - short_s)
                emit(what=name, unit="tokens/s", value=round(rate))
            except Exception as error:  # noqa: BLE001  a rival that fails is a result
                emit(what=name, unit="tokens/s", value=f"{type(error).__name__}: {error}"[:80])


@contextlib.contextmanager
def server(context: Context) -> Iterator[tuple[str, float]]:
    """`tinkex serve` on a free port; yields its URL and the seconds from command to ready."""
    data = Path(tempfile.mkdtemp(prefix="data-", dir=context.scratch))
    began_s = time.perf_counter()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "tinkex.cli.main", "serve", f"bench={context.folder}"),
            *("--port", "0", "--data", str(data), "--device", context.device),
        ],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_STATE_HOME": str(data / "state")},
    )
    assert process.stdout
    try:
        line = process.stdout.readline().strip()
        if "ready at" not in line:
            raise RuntimeError(f"tinkex serve said {line!r}")
        yield line.split()[-1], time.perf_counter() - began_s
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def http(context: Context) -> None:
    """Concurrent samples over HTTP, and the same work in an engine process."""
    import tinkex

    sizes = context.sizes
    count, new = sizes.http_samples, sizes.http_tokens
    prompts = prompts_of(count, sizes.prompt, context.model)
    engine_s = context.recall("samples")
    if engine_s is None:
        with engine_child(context) as engine:
            engine.add_adapters(1, context.scratch)
            engine_s = seconds_of_samples(context, engine)
    with server(context) as (url, ready_s):
        emit(what="from command to ready", unit="s", value=round(ready_s, 1))
        with tinkex.ServiceClient(base_url=url, api_key="tml-bench") as service:
            began_s = time.perf_counter()
            base = service.create_sampling_client(base_model="bench")
            base.sample(
                prompt=tinkex.ModelInput.from_ints(prompts[0]),
                num_samples=1,
                sampling_params=tinkex.SamplingParams(max_tokens=1, seed=1, stop=[]),
            ).result()
            emit(what="first answer of a new server", unit="s", value=round(time.perf_counter() - began_s, 2))  # fmt: skip
            training = service.create_lora_training_client(
                base_model="bench", rank=RANK, train_unembed=False
            )
            sampler = training.save_weights_and_get_sampling_client()

            def run() -> float:
                began_s = time.perf_counter()
                waiting = [
                    sampler.sample(
                        prompt=tinkex.ModelInput.from_ints(prompt),
                        num_samples=1,
                        sampling_params=tinkex.SamplingParams(max_tokens=new, seed=at, stop=[]),
                    )
                    for at, prompt in enumerate(prompts)
                ]
                for each in waiting:
                    each.result()
                return time.perf_counter() - began_s

            until_stable(run, sizes)
            took = [run() for _ in range(2)]
    emit(
        what=f"HTTP, {count} x {new} tokens", unit="tokens/s", value=round(count * new / min(took))
    )
    emit(what="HTTP over engine", unit="", value=round(engine_s / statistics.median(took), 3))


#: name -> (function, most seconds). Training is in `bench_gpu_training.py`.
PIECES: dict[str, tuple[Callable[[Context], None], int]] = {
    "decode": (decode, 200),
    "prefill": (prefill, 80),
    "http": (http, 150),
    "seeds": (seeds, 75),
    "host": (host, 60),
    "rivals": (rivals, 120),
}


# -- the run --------------------------------------------------------------------------------------


def run_piece(
    script: Path, piece: str, model: str, options: argparse.Namespace, seconds: float
) -> list[dict[str, Any]]:
    """Runs a piece as a process of its own, with a time limit; returns what it found."""
    command = [sys.executable, str(script), "--child", piece, "--models", model]
    command += ["--scratch", str(options.scratch), "--device", options.device]
    command += ["--small"] if options.small else []
    command += ["--cases", options.cases] if options.cases else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path[1:]])}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    rows: list[dict[str, Any]] = []
    began_s = time.perf_counter()

    def read() -> None:
        for line in process.stdout or ():
            if line.startswith("ROW "):
                row = {"model": model, "piece": piece, **json.loads(line[4:])}
                rows.append(row)
                print(json.dumps(row), flush=True)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    limited = False
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        limited = True
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    reader.join(5)
    took = time.perf_counter() - began_s
    print(f"# {model} {piece}: {took:.0f} s, exit {process.returncode}", flush=True)
    if process.returncode:
        what = "time limit" if limited else f"failed with exit status {process.returncode}"
        value = round(took)
        rows.append({"model": model, "piece": piece, "what": what, "unit": "s", "value": value})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    head = ("model", "measure", "value", "lowest", "unit", "share of the limit")
    lines = [f"| {' | '.join(head)} |", "|---|---|--:|--:|---|--:|"]
    for row in rows:
        cells = (row.get(key, "") for key in ("model", "what", "value", "lowest", "unit", "share"))
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def main(
    pieces: dict[str, tuple[Callable[[Context], None], int]],
    script: Path,
    *,
    write: Callable[[str, Path, str], None] = write_model,
    models: str = "8b,0.6b",
    engine: tuple[str, ...] = Context.engine,
) -> None:
    """
    `pieces` are name -> (function, most seconds).

    `write` makes the folder of a model, and `engine` is the program of an engine process.
    """
    parser = argparse.ArgumentParser(prog=script.name)
    parser.add_argument("--models", default=models, help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--pieces", default=",".join(pieces))
    parser.add_argument("--minutes", type=float, default=9.0, help="of the whole run")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cases", help="of decode: sequences x adapters, such as 1x1,64x8")
    parser.add_argument("--small", action="store_true", help="few tokens, to check this script")
    parser.add_argument("--scratch", type=Path, help="folder of the models")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.scratch is None:
        options.scratch = Path(tempfile.gettempdir()) / "tinkex-bench-gpu"
    options.scratch.mkdir(parents=True, exist_ok=True)
    sizes = SMALL if options.small else Sizes()
    if options.cases:
        cases = [case.split("x") for case in options.cases.split(",")]
        sizes = replace(sizes, cases=tuple((int(batch), int(many)) for batch, many in cases))
    if options.child:
        context = Context(
            model=options.models,
            folder=options.scratch / options.models,
            device=options.device,
            sizes=sizes,
            scratch=Path(tempfile.mkdtemp(prefix="run-", dir=options.scratch)),
            engine=engine,
        )
        try:
            if options.child == "write":
                write(context.model, context.folder, options.device)
            else:
                pieces[options.child][0](context)
        finally:
            shutil.rmtree(context.scratch, ignore_errors=True)
        return
    ends_s = time.monotonic() + 60 * options.minutes
    for old in options.scratch.glob("*.seconds"):
        old.unlink()
    rows: list[dict[str, Any]] = []
    out = os.environ.get("OUT")
    for model in options.models.split(","):
        if not (options.scratch / model).exists():
            rows += run_piece(script, "write", model, options, 120)
        for piece in options.pieces.split(","):
            left_s = ends_s - time.monotonic()
            if left_s < 15:
                print(f"# {model} {piece}: no time left", flush=True)
                continue
            rows += run_piece(script, piece, model, options, min(pieces[piece][1], left_s))
            if out:
                Path(out, f"{script.stem}.json").write_text(json.dumps(rows, indent=1))
                Path(out, f"{script.stem}.md").write_text(table(rows))
    print(table(rows))


if __name__ == "__main__":
    main(PIECES, Path(__file__))
