"""Fixtures for all tests: a tiny model on disk, a server with that model, and PostgreSQL."""

import contextlib
import gc
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from serving import TINY, Server, serving

if TYPE_CHECKING:
    from postgres import Postgres

pytest_plugins = ["no_leftovers", "no_skips"]

# Set before any test module is imported: huggingface_hub reads it once, at import.
os.environ["HF_HUB_OFFLINE"] = "1"
# Torch reads it once. Products of the tiny models are slower on several cores, and three processes
# test on two. The same for all tests, because the bits of a sum depend on it.
os.environ.setdefault("OMP_NUM_THREADS", "1")


#: Where the programs of a user keep their files.
FOLDERS = ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME")
#: Folders and files that take longest. The files took 25 s of CPU time and more, on 2026-11-17.
LONG = {
    *("together", "chaos", "conformance", "console", "defects", "docs", "faults", "numerics"),
    "storage",
    *("test_engine_process.py", "test_golden.py", "test_stateful.py", "test_supervisor.py"),
}


def pytest_configure() -> None:
    """
    Ctrl-C works in the programs of the tests, and Hypothesis tries the same examples in each run.

    A shell starts its background jobs with SIGINT ignored, and their children inherit that.
    Hypothesis does not limit the time of an example; with CI=true it does the same by itself.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.suppress(ImportError):  # a machine that only tests its GPU may not have it
        from hypothesis import settings

        settings.load_profile("ci")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """
    Modules and tests are there until the end, so garbage collections leave them out.

    There are 600,000 objects of them, and a look at all takes 0.4 s.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """
    Long files come first, so that at the end no worker waits for another one's long file.

    Tests that need a GPU, or start a whole cluster, run only if they are asked for: `pytest -m gpu`,
    `pytest -m cluster`.
    """
    items.sort(key=lambda item: LONG.isdisjoint(item.path.parts))
    for marker in ("gpu", "cluster"):
        if marker not in config.option.markexpr:
            left = [item for item in items if item.get_closest_marker(marker) is not None]
            config.hook.pytest_deselected(items=left)
            items[:] = [item for item in items if item.get_closest_marker(marker) is None]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama with its own tokenizer; 60 training steps memorize the test data."""
    from tinkex.testing import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", arch="llama")


@pytest.fixture(scope="session")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server process for all tests that do not need their own."""
    data = tmp_path_factory.mktemp("server-data")
    with serving(f"{TINY}={tiny_model}", data=data) as running:
        yield running


@pytest.fixture(scope="session")
def postgres() -> Iterator["Postgres"]:
    """One PostgreSQL server for all tests; each creates its own database in it."""
    # Here, because a machine that only tests its GPU has no driver for PostgreSQL.
    from postgres import binaries, postgres_server

    if binaries() is None:
        pytest.skip("PostgreSQL is not installed (Debian: apt install postgresql)")
    with postgres_server() as running:
        yield running


@pytest.fixture(autouse=True, scope="session")
def _no_real_service(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keeps tests from using a service outside this machine, or a server that a person runs."""
    for name in ("TINKER_API_KEY", "TINKER_BASE_URL", "TINKEX_API_KEY", "TINKEX_BASE_URL"):
        os.environ.pop(name, None)
    home = tmp_path_factory.mktemp("home")
    for name in FOLDERS:
        os.environ[name] = str(home / name.lower())
    # A local server leaves with the last program of a test.
    os.environ["TINKEX_LOCAL_KEEP_S"] = "0"


@pytest.fixture(autouse=True, scope="module")
def _own_folders(
    tmp_path_factory: pytest.TempPathFactory, _no_real_service: None
) -> Iterator[None]:
    """
    The tests of a file do not find the local servers, services and keys of other files' tests.

    A local server lives as long as the process that uses it, here until the last test, and
    `tinkex use` is remembered.
    """
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in FOLDERS:
            patch.setenv(name, str(home / name.lower()))
        yield
