"""Tiny models and an engine on each, created once."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from numerics.helpers import tied_copy
from numerics.mixtures import engine_of, write_mixture
from tinkex.engine import Engine, EngineSettings
from tinkex.models.tiny_model import write_tiny_model


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


@pytest.fixture(scope="session")
def mixture_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny model of a family with experts, written when it is first asked for."""
    root = tmp_path_factory.mktemp("mixtures")

    def get(family: str) -> Path:
        folder = root / family
        return folder if folder.exists() else write_mixture(folder, family)

    return get


@pytest.fixture(scope="session")
def mixture_on(mixture_folder: Callable[[str], Path]) -> Callable[[str], Engine]:
    """An engine on it. Shared: each test drops the models it creates."""
    engines: dict[str, Engine] = {}

    def get(family: str) -> Engine:
        if family not in engines:
            engines[family] = engine_of(mixture_folder(family))
        return engines[family]

    return get


@pytest.fixture
def qwen_mixture(mixture_on: Callable[[str], Engine]) -> Iterator[Engine]:
    engine = mixture_on("Qwen3Moe")
    yield engine
    for model_id in [*engine._adapters._entries]:
        engine.drop(model_id)
