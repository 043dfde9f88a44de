"""Divides the memory of the device, and chooses which adapters to evict. Only numbers, no tensors.

    total = base model + reserved + images + activations of a pass + KV cache + states + adapters

A plan of predicted needs shows before a model is loaded whether it fits, and a plan of measured
needs is what the engine uses. `adapter_store` moves the adapters.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tinkex.engine.adapters.model_needs import ModelNeeds
from tinkex.engine.model.step_memory import GATHERED_BYTES, PLANNED_RANK, logit_tokens
from tinkex.engine.model.tower_shape import IMAGE_TOKENS
from tinkex.wire.engine_settings import EngineSettings
from tinkex.wire.text_format import format_bytes


class DoesNotFit(ValueError):
    """The base model leaves too little memory for passes and the KV cache; the hint says what helps."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


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

#: Fraction of the memory that the plan leaves unused: fragmentation, libraries, other programs.
SLACK_FRACTION = 0.05

#: Fraction of the memory free at start that the plan divides if no limit is set.
FREE_FRACTION = {"cpu": 0.5, "cuda": 1.0}

#: Default maximum of tokens in one forward pass: more do not increase the throughput.
BATCH_TOKENS = {"cpu": 1024, "cuda": 8192}
#: In deterministic mode the batch boundaries determine the bits, so this value must never change.
DETERMINISTIC_BATCH_TOKENS = 8192

#: Minimum tokens of a pass and of the KV cache.
MIN_TOKENS = 16

#: Idle adapters of samplers may take this fraction of the part for adapters.
IDLE_FRACTION = 0.5

#: The part of the cache's memory for the states of recurrent layers, and the fewest of them.
STATE_FRACTION = 0.5
MIN_STATES = 2


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
    #: How many states of recurrent layers there are, and their memory. None in most models.
    states: int = 0
    state_memory: int = 0
    #: How many tokens of images the tower computes at once, and keeps features of; and the memory
    #: for both. None in most models.
    image_tokens: int = 0
    images: int = 0
    #: Memory for training and sampler adapters together.
    adapters: int
    #: One adapter of PLANNED_RANK, in training and for sampling.
    training_adapter: int = 0
    sampler_adapter: int = 0

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        return (
            ("base model", self.base),
            ("reserved", self.reserved),
            (f"passes of {self.batch_tokens:,} tokens", self.activations),
            (f"KV cache of {self.kv_tokens:,} tokens", self.cache),
            *([(f"{self.states:,} recurrent states", self.state_memory)] if self.states else []),
            *([(f"images of {self.image_tokens:,} tokens", self.images)] if self.images else []),
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

    def adapters_text(self) -> str:
        """How many adapters fit, as one sentence."""
        count = self.adapters // max(1, self.training_adapter)
        how = f"{count:,} fit" if count != 1 else "1 fits"
        if not count:
            how = f"none fits in {format_bytes(self.adapters)}: use a smaller rank"
        return (
            f"an adapter of rank {PLANNED_RANK} on all layers takes "
            f"{format_bytes(self.training_adapter)} in training ({how}) and "
            f"{format_bytes(self.sampler_adapter)} for sampling"
        )


def plan_memory(needs: ModelNeeds, settings: EngineSettings, *, free: int) -> MemoryPlan:
    """
    The plan for a model; `free` is the memory that the weights leave, or would leave.

    Raises `DoesNotFit`.
    """
    device = needs.device
    max_batch_tokens = settings.max_batch_tokens or (
        DETERMINISTIC_BATCH_TOKENS if settings.deterministic else BATCH_TOKENS[device]
    )
    if settings.memory_bytes is not None:
        total = min(needs.weights + free, settings.memory_bytes)
    else:
        total = needs.weights + int(FREE_FRACTION[device] * free)
    image_tokens = IMAGE_TOKENS[device] if needs.image_bytes_per_token else 0
    plan = memory_plan(
        total=total,
        base=needs.weights,
        image_tokens=image_tokens,
        images=image_tokens * needs.image_bytes_per_token,
        reserved=reserved_of(needs, settings, max_batch_tokens, beside=total - needs.weights),
        activation_bytes_per_token=needs.activation_bytes_per_token,
        max_batch_tokens=max_batch_tokens,
        kv_bytes_per_token=needs.kv_bytes_per_token,
        state_bytes=needs.state_bytes,
        # One for each sequence, and as many that are kept for prefixes.
        max_states=2 * settings.max_sequences,
        max_kv_tokens=settings.max_sequences * needs.context,
        fractions=FRACTIONS[device],
        one_adapter=needs.training_adapter + needs.sampler_adapter,
        # In deterministic mode batch boundaries depend on the request alone.
        fixed_batch=settings.deterministic,
        kv_tokens=settings.kv_tokens,
        adapter_bytes=settings.adapter_bytes,
    )
    return replace(
        plan, training_adapter=needs.training_adapter, sampler_adapter=needs.sampler_adapter
    )


def reserved_of(
    needs: ModelNeeds, settings: EngineSettings, max_batch_tokens: int, *, beside: int
) -> int:
    """What is reserved of the memory `beside` the weights."""
    logits = 4 * needs.vocabulary
    chunk = min(logit_tokens(needs.device, needs.vocabulary), max_batch_tokens)
    return reserved_bytes(
        free=max(0, beside),
        slack=SLACK_FRACTION,
        logits=logits * chunk,
        gathered=GATHERED_BYTES if needs.device == "cuda" else 0,
        graphs=logits * settings.max_sequences + needs.state_bytes if needs.graphs else 0,
    )


def idle_bytes(plan: MemoryPlan, settings: EngineSettings) -> int:
    """The maximum memory of samplers' adapters that no request uses."""
    if settings.idle_adapter_bytes is not None:
        return settings.idle_adapter_bytes
    return int(IDLE_FRACTION * plan.adapters)


def reserved_bytes(*, free: int, slack: float, logits: int, gathered: int, graphs: int) -> int:
    """
    Memory for everything that is not listed as a part of its own.

    `slack` is the fraction of the free memory for libraries, kernels and fragmentation. Beside it
    are what a step needs for a moment, which is either three times one chunk of logits (the logits,
    their gradient or a copy, and a temporary) or the gathered keys and values of a layer with a copy;
    and what decode graphs keep: the logits of all sequences, and a spare state of recurrent layers.
    """
    return int(slack * free) + max(3 * logits, 2 * gathered) + graphs


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
    one_adapter: int = 0,
    fixed_batch: bool = False,
    kv_tokens: int | None = None,
    adapter_bytes: int | None = None,
    state_bytes: int = 0,
    max_states: int = 0,
    image_tokens: int = 0,
    images: int = 0,
) -> MemoryPlan:
    """
    Divides the whole memory, once at start.

    `kv_tokens`, `adapter_bytes` and `fixed_batch` are taken as given; `fractions` apply to the
    memory that they leave. If the rest for adapters were smaller than `one_adapter`, which is the
    size of a usual one, passes and cache give up what it lacks, unless nothing would be left.
    """
    left = total - base - reserved - images
    smallest = MIN_TOKENS * (activation_bytes_per_token + kv_bytes_per_token)
    smallest += MIN_STATES * state_bytes
    if left < smallest:
        raise DoesNotFit(
            f"the base model takes {format_bytes(base)} of {format_bytes(total)}, and "
            f"{format_bytes(reserved + images)} are reserved: {format_bytes(max(0, left))} are left, and at "
            f"least {format_bytes(smallest)} are needed.",
            hint="Serve a smaller model, use --dtype bfloat16, free memory, or allow more with "
            "--memory-gb.",
        )
    free = left
    if kv_tokens is not None:
        free -= kv_tokens * kv_bytes_per_token
    if adapter_bytes is not None:
        free -= adapter_bytes
    if fixed_batch:
        free -= max_batch_tokens * activation_bytes_per_token
    free = max(0, free)

    def divided(passes_share: float, cache_share: float, most: int) -> tuple[int, int, int]:
        """Tokens of a pass, tokens of the KV cache, and recurrent states: of `most` memory."""
        passes, cached, states = max_batch_tokens, kv_tokens, 0
        cache_memory = int(most * cache_share)
        if not fixed_batch:
            fitting = int(most * passes_share) // activation_bytes_per_token
            passes = min(max_batch_tokens, max(MIN_TOKENS, fitting))
            cache_memory = min(cache_memory, max(0, most - passes * activation_bytes_per_token))
        if state_bytes:
            fitting = int(cache_memory * STATE_FRACTION) // state_bytes
            states = min(max_states, max(MIN_STATES, fitting))
            cache_memory = max(0, cache_memory - states * state_bytes)
        if cached is None:
            # A cache larger than all sequences at full length would never be used.
            cached = min(max_kv_tokens, max(MIN_TOKENS, cache_memory // kv_bytes_per_token))
        return passes, cached, states

    def taken(passes: int, cached: int, states: int) -> tuple[int, int, int]:
        return (
            passes * activation_bytes_per_token,
            cached * kv_bytes_per_token,
            states * state_bytes,
        )

    counts = divided(fractions.activations, fractions.cache, free)
    if adapter_bytes is None and left - sum(taken(*counts)) < one_adapter <= free - smallest:
        # Passes and cache share the rest as before.
        both = fractions.activations + fractions.cache
        shares = fractions.activations / both, fractions.cache / both
        counts = divided(*shares, free - one_adapter)
    activations, cache, state_memory = taken(*counts)
    if adapter_bytes is None:
        adapter_bytes = max(0, left - activations - cache - state_memory)
    return MemoryPlan(
        total=total,
        base=base,
        reserved=reserved,
        batch_tokens=counts[0],
        activations=activations,
        kv_tokens=counts[1],
        cache=cache,
        states=counts[2],
        state_memory=state_memory,
        image_tokens=image_tokens,
        images=images,
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
