"""The tests of an engine, on one of two ranks. Not those that change the code of one process."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from engine import (
    test_adapter_store,
    test_checkpoints,
    test_engine,
    test_prefix_cache,
    test_sample_controls,
    test_sampler,
    test_streaming,
    test_worker,
)
from engine.conftest import tiny_folder
from ranks.ranked import expect_tests, ranked
from tinkex.engine import Engine
from tinkex.engine.ranks.engine import ON_ALL_RANKS, RankedEngine

assert tiny_folder  # a fixture

#: Tests that fill the whole context, or take their time in other processes.
SLOW = ("without_stop", "killed_while", "in_company", "more_adapters_than_fit", "usual_adapter")
#: Tests that change what rank 0 has without a call.
INSIDE = ("blocks_only_others",)


@pytest.fixture(scope="session")
def engine(tiny_folder: Path) -> Iterator[Engine]:
    with ranked(tiny_folder) as engine:
        yield engine


@pytest.fixture
def engine_with(tiny_folder: Path, tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    with ExitStack() as stack:

        def make(**settings: int | None) -> Engine:
            settings = {"kv_tokens": 512, **settings}
            spill = tmp_path / "spill"
            return stack.enter_context(ranked(tiny_folder, spill_folder=spill, **settings))

        yield make


@pytest.fixture(scope="module")
def rounds_on(tiny_folder: Path) -> Iterator[Callable[[bool], test_worker.Rounds]]:
    with ExitStack() as stack:

        def get(deterministic: bool) -> test_worker.Rounds:
            settings = {"kv_tokens": 512, "max_batch_tokens": 40, "deterministic": deterministic}
            return test_worker.Rounds(stack.enter_context(ranked(tiny_folder, **settings)))

        yield get


ENGINES = {"engine", "engine_with", "rounds"}

for module in (
    *(test_adapter_store, test_checkpoints, test_engine, test_prefix_cache),
    *(test_sample_controls, test_sampler, test_streaming, test_worker),
):
    for name, value in vars(module).items():
        if not name.startswith("test_"):
            globals().setdefault(name, value)  # fixtures
        elif not any(part in name for part in SLOW + INSIDE):
            takes = set(inspect.signature(value).parameters)
            if takes & ENGINES and takes.isdisjoint({"monkeypatch", "tiny_folder"}):
                assert name not in globals(), name
                globals()[name] = value

expect_tests(globals(), 75)


#: What rank 0 answers alone: nothing changes.
READS = {
    *("has", "resident", "pass_tokens", "wait", "partial_outputs", "stats", "sampling"),
    "awaited_read",
    "prepared",
}
#: Calls whose arguments differ between the ranks.
OWN = {"submit", "begin_pass", "run_micro_batch", "run_pass"}


def test_every_call_of_an_engine_is_made_on_all_ranks_or_changes_nothing() -> None:
    calls = {name for name in vars(Engine) if not name.startswith("_")}
    assert calls == READS | OWN | ON_ALL_RANKS
    assert vars(RankedEngine).keys() >= OWN
