"""The command line: fast help, errors as a message and a hint, missing packages."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from tinkex.cli.command_group import command


def tinkex(*arguments: str, code: str | None = None) -> "subprocess.CompletedProcess[str]":
    command = ["-c", code] if code else ["-m", "tinkex.cli.main"]
    return subprocess.run(
        [sys.executable, *command, *arguments],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def test_help_names_every_command_and_loads_none() -> None:
    code = """
import sys
from tinkex.cli.command_group import command
try:
    command(["--help"])
except SystemExit:
    heavy = {"torch", "transformers", "fastapi", "sqlalchemy", "rich", "numpy", "pydantic"}
    print(heavy & set(sys.modules))
"""
    done = tinkex(code=code)
    for name in ("serve", "tiny-model", "demo"):
        assert f"  {name} " in done.stdout
    assert done.stdout.rstrip().endswith("set()")


def test_every_command_that_help_names_is_there() -> None:
    from tinkex.cli.command_group import SUBCOMMANDS, LazyGroup, command

    assert isinstance(command, LazyGroup)
    for name in SUBCOMMANDS:
        found = command.get_command(None, name)  # type: ignore[arg-type]
        assert found is not None
        assert found.name == name


def test_help_of_serve_shows_the_models_and_the_options() -> None:
    done = tinkex("serve", "--help")
    assert "[NAME|FOLDER|NAME=FOLDER]" in done.stdout
    for option in ("--host", "--port", "--data", "--db", "--storage", "--device", "--dtype"):
        assert option in done.stdout
    assert "tinkex ready at" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says", "hint"),
    [
        (("--host", "0.0.0.0"), "no keys", "--host 127.0.0.1"),
        (("--port", "99999"), "not a valid port", "0 for a free one"),
        (("no/such-model",), "No model 'no/such-model'", "tinkex serve no/such-model=FOLDER"),
        (("a=/", "--data", "/proc/nowhere"), "cannot be written", "--data"),
    ],
)
def test_what_cannot_start_says_why_and_what_to_do(
    arguments: tuple[str, ...], says: str, hint: str, tmp_path: Path
) -> None:
    data = () if "--data" in arguments else ("--data", str(tmp_path))
    port = () if "--port" in arguments else ("--port", "0")
    done = tinkex("serve", *arguments, *data, *port)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "error: " in done.stderr
    assert says in done.stderr
    assert hint in done.stderr
    assert "Traceback" not in done.stderr


def test_the_log_of_a_start_is_short_and_says_what_was_set(tmp_path: Path) -> None:
    # Fails after the settings were logged and the database was searched for keys.
    wrong = ("serve", "a=/", "--host", "0.0.0.0", "--port", "0", "--data", str(tmp_path))
    first, *rest = tinkex(*wrong).stderr.splitlines()
    assert f"host = '0.0.0.0', port = 0, data = '{tmp_path}'" in first
    assert "jwt" not in first
    assert [line.partition(":")[0] for line in rest] == ["error", "hint"]


def test_all_settings_are_in_the_log_if_that_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKEX_LOG_LEVEL", "debug")
    log = tinkex("serve", "a=/", "--host", "0.0.0.0", "--data", str(tmp_path)).stderr
    assert "setting jwt = False" in log


def test_two_models_of_one_name_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    done = tinkex("serve", str(tiny_model), str(tiny_model), "--data", str(tmp_path), "--port", "0")
    assert done.returncode == 1
    assert "two models have the name tiny" in done.stderr


@pytest.mark.parametrize(
    ("missing", "arguments", "extra"),
    [("click", "--help", "tinkex[cli]"), ("sqlalchemy", "serve", "tinkex[all]")],
)
def test_a_missing_part_says_what_to_install(missing: str, arguments: str, extra: str) -> None:
    code = f"""
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name={missing!r})
sys.meta_path.insert(0, Missing())
sys.argv = ["tinkex", {arguments!r}]
from tinkex.cli.main import main
main()
"""
    done = tinkex(code=code)
    assert done.returncode != 0
    assert f"needs {missing}, which is not installed" in done.stderr
    assert extra in done.stderr
    assert "Traceback" not in done.stderr


def test_with_json_a_program_reads_the_url_the_models_and_the_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from tinkex.server import supervisor
    from tinkex.server.announcement import Facts

    def run(settings: object, *, announce: Callable[[str, Facts], None], **_: object) -> int:
        announce("http://127.0.0.1:8000", Facts(needs_keys=True))
        return 0

    monkeypatch.setattr(supervisor, "run", run)
    done = CliRunner().invoke(command, ["serve", "--data", str(tmp_path), "-f", "json"])
    assert json.loads(done.stdout) == {
        "url": "http://127.0.0.1:8000",
        "data": str(tmp_path),
        "models": [],
        "needs_keys": True,
    }
