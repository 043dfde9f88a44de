"""The tests of what an engine computes, on two ranks."""

import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from numerics import (
    test_checkpoints_agree,
    test_dimuon,
    test_gradients,
    test_mixed_batches,
    test_sampling_agrees,
    test_sums,
)
from ranks.ranked import expect_tests, ranked
from tinkex.engine import Engine

#: Tests with other models, and with what `test_agreement` and `test_contract` do.
LEFT_OUT = ("bfloat16", "alone_and_in_a_batch", "prefix_cache_and_preemption")


@pytest.fixture(scope="session")
def engine(models: dict[str, Path]) -> Iterator[Engine]:
    with ranked(models["qwen3"], name="qwen3", kv_tokens=4096) as engine:
        yield engine


for module in (
    *(test_sampling_agrees, test_checkpoints_agree, test_dimuon),
    *(test_gradients, test_mixed_batches, test_sums),
):
    for name, value in vars(module).items():
        if not name.startswith("test_"):
            globals().setdefault(name, value)  # fixtures
        elif not any(part in name for part in LEFT_OUT):
            takes = set(inspect.signature(value).parameters)
            if "engine" in takes and takes.isdisjoint({"monkeypatch", "engine_on"}):
                globals()[name] = value

expect_tests(globals(), 26)
