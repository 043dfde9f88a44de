"""With CI=true a skipped test fails, so that missing dependencies are noticed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent

ONE = """
import pytest

@pytest.fixture
def missing():
    pytest.skip("dependency is missing")

def test_with_a_missing_dependency(missing): ...

@pytest.mark.may_skip
def test_that_may_be_skipped(missing): ...

@pytest.mark.xfail
def test_that_is_known_to_fail():
    raise AssertionError

def test_that_runs(): ...
"""
WHOLE_FILE = "import pytest\npytest.importorskip('no_such_package')\ndef test_never_seen(): ...\n"


def run(folder: Path, *, ci: str | None) -> tuple[int, str]:
    environment = {name: value for name, value in os.environ.items() if name != "CI"}
    environment["PYTHONPATH"] = str(TESTS)
    # Installed plugins take seconds to import.
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    if ci is not None:
        environment["CI"] = ci
    settings = ["-c", "/dev/null", "--rootdir", str(folder), "-o", "markers=may_skip: x"]
    plugins = ["-p", "no_skips"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rf", *settings, *plugins, str(folder)],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("ci", [None, ""])
def test_skips_are_allowed_without_ci(tmp_path: Path, ci: str | None) -> None:
    (tmp_path / "test_one.py").write_text(ONE)
    (tmp_path / "test_whole.py").write_text(WHOLE_FILE)
    status, output = run(tmp_path, ci=ci)
    assert status == 0, output
    assert "1 passed, 3 skipped, 1 xfailed" in output


def test_with_ci_only_tests_marked_may_skip_may_be_skipped(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(ONE)
    status, output = run(tmp_path, ci="true")
    assert status == 1, output
    assert "1 passed, 1 skipped, 1 xfailed, 1 error" in output
    assert "dependency is missing" in output


def test_a_skipped_file_fails_with_ci(tmp_path: Path) -> None:
    (tmp_path / "test_whole.py").write_text(WHOLE_FILE)
    status, output = run(tmp_path, ci="true")
    assert status != 0, output
    assert "no_such_package" in output
