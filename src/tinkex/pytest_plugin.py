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
    A service in memory that every client of the test talks to, also in processes it starts.

    The environment names it (`TINKER_BASE_URL`), so the program under test is not changed. The
    value is the `FakeService`: look at `requests` and `ran`, or make things go wrong with `script`.
    """
    from tinkex.testing import FakeService

    fake = FakeService()
    with fake.serve() as running:
        for name in ("TINKEX_BASE_URL", "TINKER_BASE_URL"):
            monkeypatch.setenv(name, running.url)
        for name in ("TINKEX_API_KEY", "TINKER_API_KEY"):
            monkeypatch.setenv(name, "tml-fake")
        yield fake
