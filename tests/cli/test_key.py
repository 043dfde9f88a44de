"""`tinkex key`: made, listed, revoked on a data folder; a key is seen once."""

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tinkex.cli.key import command


def key(folder: Path, *args: str) -> Result:
    return CliRunner().invoke(command, [*args, "--data", str(folder)])


def test_a_key_is_shown_once_and_never_again(tmp_path: Path) -> None:
    made = key(tmp_path, "create", "--owner", "alice", "--name", "laptop", "--expires", "30d")
    assert made.exit_code == 0
    secret = made.stdout.strip()
    assert secret.startswith("tml-")
    assert "not shown again" in made.stderr
    listed = key(tmp_path, "list").stdout
    assert secret not in listed
    assert f"{secret[:8]}…" in listed
    assert "alice" in listed
    assert "laptop" in listed
    assert "active" in listed


def test_a_revoked_key_stays_in_the_list(tmp_path: Path) -> None:
    key(tmp_path, "create")
    assert "is revoked" in key(tmp_path, "revoke", "1").stderr
    assert "revoked" in key(tmp_path, "list").stdout
    unknown = key(tmp_path, "revoke", "7")
    assert unknown.exit_code == 1
    assert "there is no key 7" in unknown.stderr


def test_an_empty_list_says_what_that_means(tmp_path: Path) -> None:
    assert "No keys" in key(tmp_path, "list").stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--expires", "banana"), "is not a time"),
        (("--expires", "2020-01-01"), "is over already"),
        (("--owner", " "), "--owner is empty"),
        (("--name", "x" * 201), "longer than 200"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    refused = key(tmp_path, "create", *options)
    assert refused.exit_code == 1
    assert said in refused.stderr


def test_the_command_loads_no_torch_and_no_web_server(tmp_path: Path) -> None:
    program = (
        "import sys; from click.testing import CliRunner; from tinkex.cli.key import command; "
        f"CliRunner().invoke(command, ['create', '--data', {str(tmp_path)!r}]); "
        "print([name for name in ('torch', 'fastapi', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "[]", done.stderr
