"""The memory plan and the choice of evictions."""

from typing import Any

import pytest

from tinkex.engine.adapters.memory_plan import (
    FRACTIONS,
    DoesNotFit,
    MemoryFractions,
    Resident,
    choose_evictions,
    memory_plan,
    reserved_bytes,
)
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
        ({"gathered": 100, "decode_logits": 70}, 50 + 300 + 70),  # these stay
        ({"free": 0}, 300),
    ],
)
def test_temporary_memory_of_steps_is_reserved(sizes: dict[str, int], reserved: int) -> None:
    usual = {"free": 1000, "slack": 0.05, "logits": 100, "gathered": 0, "decode_logits": 0}
    assert reserved_bytes(**{**usual, **sizes}) == reserved


def test_a_base_model_that_leaves_too_little_is_refused_with_the_sizes() -> None:
    with pytest.raises(DoesNotFit, match=r"takes 1.2 MB of 1.3 MB, and 100.0 kB are reserved"):
        memory_plan(**{**USUAL, "base": 1_199_000})


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
