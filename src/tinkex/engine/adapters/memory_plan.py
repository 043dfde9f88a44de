"""Divides the memory of the device, and chooses which adapters to evict. Only numbers, no tensors.

    total = base model + reserved + activations of a pass + KV cache + adapters

`adapter_store` moves the adapters.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from tinkex.wire.text_format import format_bytes


class DoesNotFit(ValueError):
    """The base model leaves too little memory for passes and the KV cache."""

    hint = (
        "Serve a smaller model, use --dtype bfloat16, free memory, or allow more with --memory-gb."
    )


class Tier(enum.IntEnum):
    """Where an adapter is. With a CPU as the device, HOST is not used."""

    DEVICE = 0
    HOST = 1
    DISK = 2


@dataclass(frozen=True, kw_only=True)
class MemoryFractions:
    """How the memory besides the base model is divided. Adapters get the rest."""

    activations: float
    cache: float


#: A CPU decodes few sequences at once; a GPU needs large decode batches to be efficient.
FRACTIONS = {
    "cpu": MemoryFractions(activations=0.3, cache=0.25),
    "cuda": MemoryFractions(activations=0.25, cache=0.5),
}

#: Minimum tokens of a pass and of the KV cache.
MIN_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    total: int
    base: int
    reserved: int
    #: Tokens of one training or prefill pass, and their memory.
    batch_tokens: int
    activations: int
    #: Tokens of the KV cache, and their memory.
    kv_tokens: int
    cache: int
    #: Memory for training and sampler adapters together.
    adapters: int

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        return (
            ("base model", self.base),
            ("reserved", self.reserved),
            (f"passes of {self.batch_tokens:,} tokens", self.activations),
            (f"KV cache of {self.kv_tokens:,} tokens", self.cache),
            ("adapters", self.adapters),
        )

    def describe(self) -> str:
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in self.parts)
        return f"{format_bytes(self.total)} in total: {parts}"

    def table(self) -> str:
        """One line for each part, for the log."""
        rows = [*self.parts, ("total", self.total)]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"  {name:{width}} {format_bytes(size):>9}" for name, size in rows)


def reserved_bytes(
    *, free: int, slack: float, logits: int, gathered: int, decode_logits: int
) -> int:
    """
    Memory for everything that is not listed as a part of its own.

    `slack` is the fraction of the free memory for libraries, kernels and fragmentation. Beside it
    are what a step needs for a moment, which is either three times one chunk of logits (the logits,
    their gradient or a copy, and a temporary) or the gathered keys and values of a layer with a copy;
    and the logits of decode graphs, which stay.
    """
    return int(slack * free) + max(3 * logits, 2 * gathered) + decode_logits


def memory_plan(
    *,
    total: int,
    base: int,
    reserved: int,
    activation_bytes_per_token: int,
    max_batch_tokens: int,
    kv_bytes_per_token: int,
    max_kv_tokens: int,
    fractions: MemoryFractions,
    fixed_batch: bool = False,
    kv_tokens: int | None = None,
    adapter_bytes: int | None = None,
) -> MemoryPlan:
    """
    Divides the whole memory, once at start.

    `kv_tokens`, `adapter_bytes` and `fixed_batch` are taken as given; `fractions` apply to the
    memory that they leave.
    """
    left = total - base - reserved
    smallest = MIN_TOKENS * (activation_bytes_per_token + kv_bytes_per_token)
    if left < smallest:
        raise DoesNotFit(
            f"the base model takes {format_bytes(base)} of {format_bytes(total)}, and "
            f"{format_bytes(reserved)} are reserved: {format_bytes(max(0, left))} are left, and at "
            f"least {format_bytes(smallest)} are needed."
        )
    free = left
    if kv_tokens is not None:
        free -= kv_tokens * kv_bytes_per_token
    if adapter_bytes is not None:
        free -= adapter_bytes
    if fixed_batch:
        free -= max_batch_tokens * activation_bytes_per_token
    free = max(0, free)
    batch_tokens = max_batch_tokens
    if not fixed_batch:
        fitting = int(free * fractions.activations) // activation_bytes_per_token
        batch_tokens = min(max_batch_tokens, max(MIN_TOKENS, fitting))
    if kv_tokens is None:
        # A cache larger than all sequences at full length would never be used.
        kv_tokens = int(free * fractions.cache) // kv_bytes_per_token
        kv_tokens = min(max_kv_tokens, max(MIN_TOKENS, kv_tokens))
    activations, cache = batch_tokens * activation_bytes_per_token, kv_tokens * kv_bytes_per_token
    if adapter_bytes is None:
        adapter_bytes = max(0, left - activations - cache)
    return MemoryPlan(
        total=total,
        base=base,
        reserved=reserved,
        batch_tokens=batch_tokens,
        activations=activations,
        kv_tokens=kv_tokens,
        cache=cache,
        adapters=adapter_bytes,
    )


@dataclass(frozen=True, kw_only=True)
class Resident:
    """An adapter that takes memory in a tier."""

    name: str
    size: int
    #: A counter: larger is later.
    last_used: int
    #: In use by a running pass or sample; never evicted.
    busy: bool = False
    #: Its file never changes, so it can be dropped and read again without being written.
    has_file: bool = False


def choose_evictions(residents: Iterable[Resident], shortage: int) -> list[str]:
    """
    Names of the adapters to evict to free `shortage` bytes: those with files first, then the least
    recently used. All idle adapters if even they are not enough.
    """
    evicted: list[str] = []
    idle = (resident for resident in residents if not resident.busy)
    for resident in sorted(idle, key=lambda r: (not r.has_file, r.last_used)):
        if shortage <= 0:
            break
        evicted.append(resident.name)
        shortage -= resident.size
    return evicted
