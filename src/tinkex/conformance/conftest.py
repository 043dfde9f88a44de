"""Options of `pytest --pyargs tinkex.conformance`."""

import os

import pytest

from tinkex.conformance.remote import Remote

OPTIONS = {
    "--tinkex-url": ("base URL of the server under test", "TINKER_BASE_URL"),
    "--tinkex-key": ("its API key", "TINKER_API_KEY"),
    "--tinkex-other-key": ("a key of another owner", "TINKEX_OTHER_API_KEY"),
    "--tinkex-base-model": ("base model to use; the first served one by default", ""),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tinkex", "a Tinker server under test")
    for name, (what, variable) in OPTIONS.items():
        default = os.environ.get(variable) if variable else None
        told = f"{what} ({variable})" if variable else what
        group.addoption(name, default=default, help=told)


@pytest.fixture(scope="session")
def remote(request: pytest.FixtureRequest) -> Remote:
    url = request.config.getoption("--tinkex-url")
    if not url:
        pytest.skip("no server to test: give --tinkex-url or set TINKER_BASE_URL")
    return Remote(
        url,
        key=request.config.getoption("--tinkex-key") or "tml-conformance",
        other_key=request.config.getoption("--tinkex-other-key"),
        base_model=request.config.getoption("--tinkex-base-model"),
    )
