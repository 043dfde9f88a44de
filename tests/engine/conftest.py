"""A tiny model and an engine on it, created once and only for tests that need them."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tinkex.engine import Engine


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tinkex.models.tiny_model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("engine-model") / "tiny", "qwen3")


@pytest.fixture(scope="session")
def engine(tiny_folder: Path) -> "Engine":
    """Shared by all tests: each test drops the models it creates."""
    from tinkex.engine import Engine, EngineSettings

    return Engine(EngineSettings(name="tiny", folder=tiny_folder, device="cpu", kv_tokens=2048))
