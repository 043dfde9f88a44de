"""The `tinkex` fixture."""

from collections.abc import Iterator

import pytest

from server.storage.commands import Tinkex, commands


@pytest.fixture(scope="session")
def tinkex(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tinkex]:
    with commands(tmp_path_factory.mktemp("commands")) as run:
        yield run
