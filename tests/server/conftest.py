"""Fixtures: the application with the echo executor, and a client of it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from server.echo import EchoExecutor
from server.hosting import Api, hosted


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def echo(anyio_backend: str) -> EchoExecutor:
    return EchoExecutor()


@pytest.fixture
async def api(echo: EchoExecutor, tmp_path: Path) -> AsyncIterator[Api]:
    async with hosted(echo, tmp_path, gap_s=0.2, long_poll_s=5.0) as api:
        yield api
