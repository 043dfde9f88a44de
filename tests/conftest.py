"""Parts that many tests share: a tiny model on disk, and a real server around it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from postgres import Postgres, binaries, postgres_server
from serving import TINY, Server, serving

pytest_plugins = ["no_skips"]

# Before any test module is imported: huggingface_hub reads it when it is, and not again.
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama with its own tokenizer, learnable in 60 steps."""
    from tinkex.testing import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", arch="llama")


@pytest.fixture(scope="session")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests that only want to talk to one."""
    data = tmp_path_factory.mktemp("server-data")
    with serving(f"{TINY}={tiny_model}", data=data) as running:
        yield running


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """One PostgreSQL for all tests that want a database in it."""
    if binaries() is None:
        pytest.skip("no PostgreSQL is installed (Debian: apt install postgresql)")
    with postgres_server() as running:
        yield running


@pytest.fixture(autouse=True, scope="session")
def _no_real_service() -> None:
    """No test may reach a service outside this machine by accident."""
    for name in ("TINKER_API_KEY", "TINKER_BASE_URL", "TINKEX_API_KEY", "TINKEX_BASE_URL"):
        os.environ.pop(name, None)
