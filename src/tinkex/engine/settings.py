"""The facts and statistics that an engine reports."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Current sizes and counts."""

    #: Memory of the device that the memory plan divides.
    memory_bytes: int
    base_bytes: int
    adapter_budget_bytes: int
    #: Training adapters on the device, in host memory, and on disk.
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
    #: Unused pages that hold a cached prefix.
    kv_pages_known: int = 0
    kv_bytes: int = 0
    #: Maximum tokens in one forward pass, and the activation memory of one token.
    batch_tokens: int
    activation_bytes_per_token: int
    samples_waiting: int = 0
    sequences_running: int = 0


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    name: str
    #: The model family, as in `model_type` of its config: "llama", "qwen3", ...
    arch: str
    max_context_length: int
    vocab_size: int
    device: str
    dtype: str
