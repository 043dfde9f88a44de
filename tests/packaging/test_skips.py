"""With CI=true a skipped test is a failed one, so that nothing goes untested unnoticed."""

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
    pytest.skip("no such part here")

def test_of_a_missing_part(missing): ...

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
    # Plugins that are installed beside pytest take seconds to import.
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
def test_skips_are_skips_on_a_developers_machine(tmp_path: Path, ci: str | None) -> None:
    (tmp_path / "test_one.py").write_text(ONE)
    (tmp_path / "test_whole.py").write_text(WHOLE_FILE)
    status, told = run(tmp_path, ci=ci)
    assert status == 0, told
    assert "1 passed, 3 skipped, 1 xfailed" in told


def test_skips_fail_with_ci_but_for_those_that_may(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(ONE)
    status, told = run(tmp_path, ci="true")
    assert status == 1, told
    assert "1 passed, 1 skipped, 1 xfailed, 1 error" in told
    assert "no such part here" in told


def test_a_skipped_file_fails_with_ci(tmp_path: Path) -> None:
    (tmp_path / "test_whole.py").write_text(WHOLE_FILE)
    status, told = run(tmp_path, ci="true")
    assert status != 0, told
    assert "no_such_package" in told
