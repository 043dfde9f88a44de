"""What an engine is told when it starts, and what it says about itself afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

DtypeName = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    #: The name under which the base model is served; written into every checkpoint.
    name: str
    #: A folder in Hugging Face layout: config.json and *.safetensors or *.gguf.
    folder: Path
    #: "auto" takes the GPU when there is one.
    device: str = "auto"
    #: Of the frozen base model. "auto" is float32 on a CPU and bfloat16 on a GPU; adapters have
    #: float32 masters either way.
    dtype: DtypeName = "auto"
    #: CPU threads for tensor work; None leaves torch's own choice.
    threads: int | None = None
    #: Most tokens in one training or prefill pass; fewer are taken where memory is short. None is as
    #: many as gain speed on the device.
    max_batch_tokens: int | None = None
    #: Tokens whose keys and values are kept for sampling; None sizes them by free memory.
    kv_tokens: int | None = None
    #: Whether prompts that begin alike are computed once; never in deterministic mode.
    prefix_cache: bool = True
    #: Most sequences that decode together.
    max_sequences: int = 256
    #: Adapters of samplers kept in memory when no request uses them.
    idle_adapters: int = 16
    #: Most that everything together may take of the device. None is all that is free at start, and
    #: on a CPU, where others live too, the base model and half of what is free beside it; a single
    #: sequence may take more.
    memory_bytes: int | None = None
    #: Of that, for adapters in training and of samplers; None is what the rest leaves.
    adapter_bytes: int | None = None
    #: Host memory for adapters that had to leave a GPU; None is half of what is free.
    host_bytes: int | None = None
    #: Where adapters wait that fit no memory; emptied at start. None is a temporary folder.
    spill_folder: Path | None = None
    #: The same request gives the same bits again on the same machine: nothing in a pass may depend
    #: on timing, on free memory or on what else is waiting. Samples run one request at a time.
    deterministic: bool = False


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Sizes and counts as they are now."""

    #: What the plan divides: everything this engine may take of its device.
    memory_bytes: int
    base_bytes: int
    adapter_budget_bytes: int
    #: Adapters in training: on the device, on the host beside it, on disk.
    adapters_resident: int
    adapters_resident_bytes: int
    adapters_on_host: int
    adapters_on_host_bytes: int
    adapters_on_disk: int
    adapters_on_disk_bytes: int
    sampler_adapters: int = 0
    sampler_adapters_bytes: int = 0
    kv_pages: int = 0
    kv_pages_used: int = 0
    #: Of the free ones, those that hold the beginning of a prompt that may come again.
    kv_pages_known: int = 0
    kv_bytes: int = 0
    #: Most tokens in one pass, and what one of them takes.
    batch_tokens: int
    activation_bytes_per_token: int
    samples_waiting: int = 0
    sequences_running: int = 0


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    name: str
    #: The model family as its config names it: "llama", "qwen3", ...
    arch: str
    max_context_length: int
    vocab_size: int
    device: str
    dtype: str
