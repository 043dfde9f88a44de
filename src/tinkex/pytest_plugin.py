"""
Fixtures for the tests of programs that use tinkex. In `conftest.py`:

    pytest_plugins = ["tinkex.pytest_plugin"]
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tinkex.testing import FakeService


@pytest.fixture
def tinkex_service(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeService]:
    """
    An in-memory service for all clients of the test, including those in child processes.

    `TINKER_BASE_URL` points to it, so the program under test is unchanged. The value is the
    `FakeService`: inspect `requests` and `ran`, or inject failures with `script`.
    """
    from tinkex.testing import FakeService

    fake = FakeService()
    with fake.serve() as running:
        for name in ("TINKEX_BASE_URL", "TINKER_BASE_URL"):
            monkeypatch.setenv(name, running.url)
        for name in ("TINKEX_API_KEY", "TINKER_API_KEY"):
            monkeypatch.setenv(name, "tml-fake")
        yield fake
