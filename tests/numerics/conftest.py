"""Tiny models and an engine on each, created once."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from numerics.helpers import tied_copy
from tinkex.engine import Engine, EngineSettings
from tinkex.models.tiny_model import write_tiny_model


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    # Tiny products are slower on several cores.
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("numerics-models")
    qwen3 = write_tiny_model(folder / "qwen3", "qwen3")
    llama = write_tiny_model(folder / "llama", "llama")
    return {"qwen3": qwen3, "llama": llama, "tied": tied_copy(llama, folder / "tied")}


@pytest.fixture(scope="session")
def engine_on(models: dict[str, Path]) -> Callable[[str], Engine]:
    """An engine on one of the models. Shared: each test drops the models it creates."""
    engines: dict[str, Engine] = {}

    def get(name: str) -> Engine:
        if name not in engines:
            engines[name] = Engine(
                EngineSettings(name=name, folder=models[name], device="cpu", kv_tokens=4096)
            )
        return engines[name]

    return get


@pytest.fixture
def engine(engine_on: Callable[[str], Engine]) -> Engine:
    return engine_on("qwen3")
