"""The public names, and consistency of version, changelog and metadata."""

import importlib
import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import tinkex
from qa.stub import STUB, stub

ROOT = Path(__file__).parents[2]


def test_every_public_name_exists_and_is_listed_in_order():
    assert tinkex.__all__ == sorted(tinkex.__all__)
    for name in tinkex.__all__:
        assert getattr(tinkex, name) is not None
        assert name in dir(tinkex)
    public = {
        name
        for name, value in vars(tinkex).items()
        # Subpackages become attributes when any test of this run has imported them.
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert public - {"annotations", "TYPE_CHECKING", "Any"} <= set(tinkex.__all__)


def test_dir_lists_the_public_names_only():
    """Completion in a shell or notebook offers nothing that may change without notice."""
    program = "import tinkex, tinkex.testing; tinkex.AdamParams; print(*dir(tinkex))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) == {
        *tinkex.__all__,
        # Importable, but not in `__all__`, as in the official client.
        "APIResponse",
        "AsyncAPIResponse",
        "resources",
    }


def test_the_stub_for_type_checkers_is_up_to_date():
    assert STUB.read_text() == stub(), "run `make stub`"


def test_an_unknown_name_raises_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        tinkex.Nothing  # noqa: B018


@cache
def failed_checks() -> frozenset[str]:
    """The names of the checks that `qa/api_surface/compare.py` reports as failed."""
    program = ROOT / "qa" / "api_surface" / "compare.py"
    command = [sys.executable, program, "--package", "tinkex", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    assert report["note"] is None
    assert report["headline"]["total"] > 2000
    return frozenset(failure["name"] for failure in report["failures"])


def deliberate() -> list[list[str]]:
    """The names of checks in each row of the first table of differences."""
    page = (ROOT / "docs" / "reference" / "differences.md").read_text().partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| \S", page, re.MULTILINE)
    return [re.findall(r"`([^`]+)`", row) for row in rows]


def test_only_documented_differences_from_the_official_surface_exist():
    expected = {name for row in deliberate() for name in row}
    assert failed_checks() == expected


def test_the_differences_are_few():
    assert len(deliberate()) <= 10


def test_additional_exports_are_known():
    official = json.loads((ROOT / "tests" / "data" / "api-surface.json").read_text())
    ours = set(tinkex.__all__) - set(official["modules"]["."]["names"])
    # The official client has some of these in private modules or environment variables.
    assert ours == {
        "BreakerPolicy",
        "CircuitOpenError",
        "QueueState",
        "Recovery",
        "RetryConfig",
        "SampleStream",
        "SampledTokens",
        "Settings",
        "download_checkpoint",
        "download_checkpoint_async",
        "metrics_snapshot",
        "on_queue_state",
        "progress",
        "recovering",
        "recovering_async",
        "reset_metrics",
    }


def test_every_official_import_path_gives_the_exported_object():
    official = json.loads((ROOT / "tests" / "data" / "api-surface.json").read_text())
    expected = {name for row in deliberate() for name in row}
    for path, names in official["import_paths"].items():
        module = importlib.import_module(f"tinkex.{path}")
        for name in names:
            if f"{path}:{name}" not in expected:
                found = getattr(module, name)
                assert found is getattr(tinkex.types, name, found)


def test_the_changelog_starts_with_the_version_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    heading = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heading
    assert heading[1] == project["version"]


def test_the_version_is_that_of_the_installed_distribution():
    try:
        installed = importlib.metadata.version("tinkex")
    except importlib.metadata.PackageNotFoundError:
        assert tinkex.__version__ == "0+unknown"
    else:
        assert tinkex.__version__ == installed
