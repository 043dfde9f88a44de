"""The settings of an engine; the web process passes them to the engine process as JSON."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

DtypeName = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Everything an engine is started with."""

    #: Name under which the base model is served. Written into every checkpoint.
    name: str
    #: A folder in Hugging Face layout: config.json and *.safetensors or *.gguf.
    folder: Path
    #: The number of this engine among those of its base model; None if it is the only one.
    replica: int | None = None
    #: "auto" uses a GPU if there is one.
    device: str = "auto"
    #: With "auto" and several GPUs: the number of the GPU, counted around.
    gpu: int = 0
    #: Processes that share one copy of the model, each on its own GPU: the ranks. With several,
    #: `device` may be a list with one for each, and `gpu` counts engines, not GPUs.
    ranks: int = 1
    #: How long a rank waits for another one before the engine ends.
    rank_timeout_s: float = 300.0
    #: Number format of the frozen base model. "auto" is float32 on a CPU and bfloat16 on a GPU.
    #: Adapters always have float32 master weights.
    dtype: DtypeName = "auto"
    #: CPU threads for tensor operations. None keeps torch's default.
    threads: int | None = None
    #: Maximum tokens in one micro-batch or prefill; less if memory is short. None is the largest
    #: number that still increases throughput on the device.
    max_batch_tokens: int | None = None
    #: Size of the KV cache in tokens. None derives it from the free memory.
    kv_tokens: int | None = None
    #: Whether prompts with the same prefix share its KV pages. Always off in deterministic mode.
    prefix_cache: bool = True
    #: Maximum sequences in one decode step.
    max_sequences: int = 256
    #: Fraction of the time for training while there is sampling to do too, between 0 and 1.
    training_share: float = 0.5
    #: Sampler adapters kept in memory while no request uses them: how many, and their bytes. None is
    #: half of the part for adapters.
    idle_adapters: int = 16
    idle_adapter_bytes: int | None = None
    #: Maximum memory of the device for everything together. None is all memory that is free at
    #: start; on a CPU, which other programs share, the base model and half of the remaining free
    #: memory. A single long sequence may exceed it.
    memory_bytes: int | None = None
    #: Part of it for training and sampler adapters. None is the rest of the memory plan.
    adapter_bytes: int | None = None
    #: Host memory for adapters evicted from a GPU. None is half of the free host memory.
    host_bytes: int | None = None
    #: Checkpoints, snapshots and evicted adapters leave this much of the disk free.
    disk_reserve_bytes: int = 64 * 2**20
    #: Folder for adapters evicted to disk, emptied at start. None is a temporary folder.
    spill_folder: Path | None = None
    #: The same request gives the same bits on the same machine: no pass depends on timing, on free
    #: memory or on other requests. Sample requests run one at a time.
    deterministic: bool = False
    #: Where a deterministic engine keeps what its bits depend on. None keeps it nowhere.
    numerics_file: Path | None = None
    #: Whether a deterministic engine may differ from what that file says, and replace it.
    accept_changed_numerics: bool = False
    #: Whether a GPU may use own kernels and CUDA graphs, which are compiled while the engine runs.
    #: Never in deterministic mode.
    compiles: bool = True
    #: Engines on the CPU that share this lock file compute one at a time.
    compute_lock: Path | None = None

    @property
    def engine_name(self) -> str:
        return engine_name(self.name, self.replica)

    def to_json(self) -> str:
        # The json module keeps names that are not UTF-8 (as escaped surrogates); pydantic does not.
        return json.dumps(_FIELDS.dump_python(self, exclude_defaults=True), default=os.fspath)

    @classmethod
    def from_json(cls, text: str) -> "EngineSettings":
        return _FIELDS.validate_python(json.loads(text))


def engine_name(base_model: str, replica: int | None) -> str:
    """What the server calls an engine: the base model, with a number if it has several engines."""
    return base_model if replica is None else f"{base_model}#{replica}"


_FIELDS = TypeAdapter(EngineSettings)
