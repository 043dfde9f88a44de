"""What the memory is for, and who gives way when it is short. Plain numbers: no tensors here.

    total = base model + reserved + activations of a pass + cache for sampling + adapters

Sizes come in measured, the plan goes out; the loop that moves adapters is in `shelf`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class DoesNotFit(ValueError):
    """The base model leaves too little memory to work with."""


class Tier(enum.IntEnum):
    """Where an adapter is. On a CPU there is no tier between device and disk."""

    DEVICE = 0
    HOST = 1
    DISK = 2


@dataclass(frozen=True, kw_only=True)
class MemoryFractions:
    """How what is left beside the base model is divided. Adapters get the rest."""

    activations: float
    cache: float


#: A CPU decodes little at once; a GPU lives from large decode batches.
FRACTIONS = {
    "cpu": MemoryFractions(activations=0.3, cache=0.25),
    "cuda": MemoryFractions(activations=0.25, cache=0.5),
}

#: Fewer tokens in a pass or in the cache than this are no service.
MIN_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    total: int
    base: int
    reserved: int
    #: Tokens of one training or prefill pass, and what they take.
    batch_tokens: int
    activations: int
    #: Tokens whose keys and values are kept, and what they take.
    kv_tokens: int
    cache: int
    #: Adapters in training and of samplers together.
    adapters: int

    def describe(self) -> str:
        parts = (
            ("base model", self.base),
            ("reserved", self.reserved),
            (f"passes of {self.batch_tokens} tokens", self.activations),
            (f"cache of {self.kv_tokens} tokens", self.cache),
            ("adapters", self.adapters),
        )
        shown = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts)
        return f"{format_bytes(self.total)} in all: {shown}"


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
    The whole memory divided once, at start.

    `kv_tokens`, `adapter_bytes` and `fixed_batch` are somebody's wish and taken as they are; shares
    are of what they leave.
    """
    left = total - base - reserved
    smallest = MIN_TOKENS * (activation_bytes_per_token + kv_bytes_per_token)
    if left < smallest:
        raise DoesNotFit(
            f"the base model takes {format_bytes(base)} of {format_bytes(total)}, and {format_bytes(reserved)} "
            f"are kept free: the {format_bytes(max(0, left))} that are left are too little to work "
            f"with ({format_bytes(smallest)} at least). Serve a smaller model, use --dtype bfloat16, "
            "or free memory."
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
        # More than every sequence at full length is never used.
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
    """An adapter that takes memory in some tier."""

    name: str
    size: int
    #: Greater is later.
    last_used: int
    #: Used by a pass or a sample that is under way.
    busy: bool = False
    #: Its file never changes, so it can be dropped and read again: nothing has to be written.
    has_file: bool = False


def choose_evictions(residents: Iterable[Resident], shortage: int) -> list[str]:
    """
    Who leaves so that `shortage` bytes become free: what is cheap to drop, then least used first.

    All that are idle when even they are not enough: the caller knows what to do then.
    """
    leaving: list[str] = []
    idle = (resident for resident in residents if not resident.busy)
    for resident in sorted(idle, key=lambda r: (not r.has_file, r.last_used)):
        if shortage <= 0:
            break
        leaving.append(resident.name)
        shortage -= resident.size
    return leaving


def format_bytes(size: int) -> str:
    """A size in the unit in which it has one to three digits before the point."""
    amount = float(size)
    for unit in ("B", "kB", "MB"):
        if abs(amount) < 999.5:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} GB"
