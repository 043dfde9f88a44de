"""The memory plan and the choice of evictions."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tinkex.engine.adapters.memory_plan import (
    FRACTIONS,
    DoesNotFit,
    MemoryFractions,
    MemoryPlan,
    Resident,
    choose_evictions,
    memory_plan,
    plan_memory,
    reserved_bytes,
)
from tinkex.engine.adapters.model_needs import ModelNeeds
from tinkex.engine.model_fit import refuse_too_large, smallest_total
from tinkex.wire.engine_settings import EngineSettings
from tinkex.wire.text_format import format_bytes

HALVES = MemoryFractions(activations=0.25, cache=0.5)
USUAL = {
    "total": 1_300_000,
    "base": 200_000,
    "reserved": 100_000,
    "activation_bytes_per_token": 100,
    "max_batch_tokens": 8192,
    "kv_bytes_per_token": 10,
    "max_kv_tokens": 10**9,
    "fractions": HALVES,
}

#: changed arguments -> (tokens of a pass, tokens of the cache, bytes for adapters)
PLANS: dict[str, tuple[dict[str, Any], tuple[int, int, int]]] = {
    "shares of what the base leaves": ({}, (2500, 50_000, 250_000)),
    "a larger base leaves less": ({"base": 700_000}, (1250, 25_000, 125_000)),
    "a pass is never larger than asked": ({"max_batch_tokens": 500}, (500, 50_000, 450_000)),
    "a cache is never larger than useful": ({"max_kv_tokens": 1000}, (2500, 1000, 740_000)),
    "a given cache comes first": ({"kv_tokens": 20_000}, (2000, 20_000, 600_000)),
    "given adapters come first": ({"adapter_bytes": 600_000}, (1000, 20_000, 600_000)),
    "a fixed pass comes first": ({"fixed_batch": True, "max_batch_tokens": 4000}, (4000, 30_000, 300_000)),
    "a fixed pass leaves what it leaves": ({"fixed_batch": True}, (8192, 9040, 90_400)),
    "a cache that takes everything": ({"kv_tokens": 100_000}, (16, 100_000, 0)),
    "expensive tokens": ({"activation_bytes_per_token": 30_000}, (16, 50_000, 20_000)),
    "a usual adapter fits": ({"one_adapter": 250_000}, (2500, 50_000, 250_000)),
    "passes and cache make room for it": ({"one_adapter": 400_000}, (2000, 40_000, 400_000)),
    "almost all of it": ({"one_adapter": 990_000}, (33, 666, 990_040)),
    "not if nothing would be left": ({"one_adapter": 999_000}, (2500, 50_000, 250_000)),
    "not if the part is given": (
        {"one_adapter": 400_000, "adapter_bytes": 600_000}, (1000, 20_000, 600_000)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_the_memory_is_divided_by_the_table(name: str) -> None:
    change, (batch, cache, adapters) = PLANS[name]
    plan = memory_plan(**{**USUAL, **change})
    assert (plan.batch_tokens, plan.kv_tokens, plan.adapters) == (batch, cache, adapters)


@pytest.mark.parametrize("device", FRACTIONS)
def test_the_parts_add_up_to_the_total(device: str) -> None:
    plan = memory_plan(**{**USUAL, "fractions": FRACTIONS[device]})
    parts = (plan.base, plan.reserved, plan.activations, plan.cache, plan.adapters)
    assert sum(parts) == plan.total
    assert min(parts) > 0
    assert "1.3 MB in total: base model 200.0 kB" in plan.describe()


def test_the_plan_is_a_table() -> None:
    assert memory_plan(**USUAL).table().splitlines() == [
        "  base model                 200.0 kB",
        "  reserved                   100.0 kB",
        "  passes of 2,500 tokens     250.0 kB",
        "  KV cache of 50,000 tokens  500.0 kB",
        "  adapters                   250.0 kB",
        "  total                        1.3 MB",
    ]


@pytest.mark.parametrize(
    ("sizes", "reserved"),
    [
        ({}, 50 + 300),
        ({"gathered": 200}, 50 + 400),  # more than three times the logits
        ({"gathered": 100, "graphs": 70}, 50 + 300 + 70),  # these stay
        ({"free": 0}, 300),
    ],
)
def test_temporary_memory_of_steps_is_reserved(sizes: dict[str, int], reserved: int) -> None:
    usual = {"free": 1000, "slack": 0.05, "logits": 100, "gathered": 0, "graphs": 0}
    assert reserved_bytes(**{**usual, **sizes}) == reserved


def test_a_base_model_that_leaves_too_little_is_refused_with_the_sizes() -> None:
    with pytest.raises(DoesNotFit, match=r"takes 1.2 MB of 1.3 MB, and 100.0 kB are reserved"):
        memory_plan(**{**USUAL, "base": 1_199_000})


#: A small model on a CPU: 16 tokens of a pass and of the cache are 16 MB.
SMALL = ModelNeeds(
    device="cpu",
    element=4,
    weights=2_000_000_000,
    vocabulary=10_000,
    context=1000,
    kv_bytes_per_token=200_000,
    activation_bytes_per_token=800_000,
    rank=32,
    adapter_numbers=20_000_000,
    graphs=False,
)


SMALLER = "use --dtype bfloat16, whose weights take 1.0 GB"

#: settings, free memory -> the end of the message and the beginning of the hint
REFUSALS: list[tuple[dict[str, int], int, str, str]] = [
    ({}, 1_500_000_000, "; 1.5 GB are free on this machine.", f"U{SMALLER[1:]}, or use a machine"),
    (
        {},
        2_150_000_000,  # half of 150 MB is too little
        "; 2.1 GB are free on this machine, and by default other programs keep half of what the weights leave.",
        f"Allow more memory with --memory-gb 2.1, or {SMALLER}",
    ),
    (
        {"memory_bytes": 1_000_000_000},
        9_000_000_000,
        "; 9.0 GB are free on this machine, and --memory-gb allows 1.0 GB.",
        f"Allow more memory with --memory-gb 2.6, or {SMALLER}",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "free", "limit", "hint"), REFUSALS)
def test_a_model_that_is_too_large_is_refused_with_what_helps(
    settings: dict[str, int], free: int, limit: str, hint: str
) -> None:
    made = EngineSettings(name="m", folder=Path(), **settings)  # type: ignore[arg-type]
    with pytest.raises(DoesNotFit) as refused:
        refuse_too_large(SMALL, made, free=free)
    message = str(refused.value)
    assert message.startswith(
        "in float32 it needs at least 2.1 GB of memory, of which the weights take 2.0 GB, and 2.6 "
        "GB with an adapter of rank 32"
    )
    assert message.endswith(limit)
    assert refused.value.hint.startswith(hint)
    assert refused.value.hint.endswith(
        "or use a machine or a GPU with at least 2.6 GB, or serve a smaller model (`tinkex models` "
        "lists what fits)."
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("with_adapter", [False, True])
def test_the_memory_that_is_asked_for_is_just_enough(device: str, with_adapter: bool) -> None:
    needs = dataclasses.replace(SMALL, device=device, graphs=device == "cuda")
    settings = EngineSettings(name="m", folder=Path())
    wanted = needs.training_adapter + needs.sampler_adapter if with_adapter else 0
    total = smallest_total(needs, settings, adapters=wanted)

    def planned(total: int) -> MemoryPlan:
        limited = dataclasses.replace(settings, memory_bytes=total)
        return plan_memory(needs, limited, free=10**12)

    plan = planned(total)
    assert plan.total == total
    assert plan.adapters >= wanted
    if with_adapter:
        assert planned(total - 2 * 10**6).adapters < wanted
    else:
        with pytest.raises(DoesNotFit):
            planned(total - 2 * 10**6)


def test_the_adapters_that_fit_are_counted() -> None:
    settings = EngineSettings(name="m", folder=Path(), memory_bytes=6_000_000_000)
    plan = plan_memory(SMALL, settings, free=10**12)
    assert plan.adapters_text() == (
        "an adapter of rank 32 on all layers takes 320.0 MB in training (6 fit) and 80.0 MB for "
        "sampling"
    )
    tight = dataclasses.replace(settings, memory_bytes=2_150_000_000)
    assert (
        "(none fits in 2.0 MB: use a smaller rank)"
        in plan_memory(SMALL, tight, free=10**12).adapters_text()
    )


def resident(name: str, size: int, last_used: int, **more: bool) -> Resident:
    return Resident(name=name, size=size, last_used=last_used, **more)


OLD, NEW, BUSY = resident("old", 10, 1), resident("new", 30, 5), resident("busy", 50, 0, busy=True)
FILE = resident("file", 5, 9, has_file=True)


@pytest.mark.parametrize(
    ("shortage", "leaving"),
    [
        (-5, []),
        (0, []),
        (1, ["file"]),  # it need not be written, even if it was used most recently
        (5, ["file"]),
        (6, ["file", "old"]),
        (16, ["file", "old", "new"]),
        (999, ["file", "old", "new"]),  # never an adapter in use
    ],
)
def test_adapters_with_files_and_least_recently_used_are_evicted_first(
    shortage: int, leaving: list[str]
) -> None:
    assert choose_evictions([NEW, BUSY, FILE, OLD], shortage) == leaving


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (2_500_000, "2.5 MB"), (3_210_000_000, "3.2 GB")],
)  # fmt: skip
def test_sizes_are_formatted_with_units(size: int, text: str) -> None:
    assert format_bytes(size) == text
