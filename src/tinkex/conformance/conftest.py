"""The server under test for `pytest --pyargs tinkex.conformance`, from the environment."""

import os

import pytest

from tinkex.conformance.raw_client import Remote


@pytest.fixture(scope="session")
def remote() -> Remote:
    url = os.environ.get("TINKER_BASE_URL")
    if not url:
        pytest.skip("no server to test: set TINKER_BASE_URL, and TINKER_API_KEY if it needs a key")
    return Remote(
        url,
        key=os.environ.get("TINKER_API_KEY") or "tml-conformance",
        other_key=os.environ.get("TINKEX_OTHER_API_KEY"),
        base_model=os.environ.get("TINKEX_BASE_MODEL"),
    )
