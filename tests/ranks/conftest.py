"""Tiny models, and an engine of one rank and of several on each, created once."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from numerics.helpers import tied_copy
from numerics.hybrids import CALM, write_hybrid
from ranks.ranked import ranked
from tinkex.engine import Engine
from tinkex.models.tiny_model import write_tiny_model

#: Of a hybrid that four ranks divide; two of them have the same key head of attention.
FOUR_HEADS = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("ranks-models")
    llama = write_tiny_model(root / "llama", "llama")
    return {
        "qwen3": write_tiny_model(root / "qwen3", "qwen3"),
        "llama": llama,
        "tied": tied_copy(llama, root / "tied"),
        "hybrid": write_hybrid(root / "hybrid", "Qwen3Next", **CALM, **FOUR_HEADS),
    }


@pytest.fixture(scope="session")
def engine_of(models: dict[str, Path]) -> Iterator[Callable[[str, int], Engine]]:
    """An engine of so many ranks. Shared: each test drops the models it creates."""
    engines: dict[tuple[str, int], Engine] = {}
    with ExitStack() as stack:

        def get(name: str, ranks: int) -> Engine:
            if (name, ranks) not in engines:
                engines[name, ranks] = stack.enter_context(ranked(models[name], ranks))
            return engines[name, ranks]

        yield get
