"""`tinkex ps`, `status`, `stop`, `logs` and `use`, with a real local server."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import tinkex
from forked_shell import ForkedShell
from processes import has_exited
from serving import TINY
from tinkex.cli.command_group import command
from tinkex.cli.servers import memory_bytes
from tinkex.local import control, profiles, registry

PROGRAM = (sys.executable, "-m", "tinkex.cli.main")
NAMES = ("XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME")


def run(*args: str, code: int = 0) -> tuple[str, str]:
    """Runs `tinkex ...` in this process; returns what it printed on stdout and stderr."""
    done = CliRunner().invoke(command, args, prog_name="tinkex")
    assert done.exit_code == code, (done.stdout, done.stderr, done.exception)
    return done.stdout, done.stderr


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in NAMES:
        monkeypatch.setenv(name, str(tmp_path / name))
    yield tmp_path
    for server in registry.running():
        control.stop(server, force=True)


def test_without_a_server_every_command_says_so() -> None:
    assert run("ps")[1].startswith("0 servers")
    assert json.loads(run("ps", "-f", "json")[0]) == {"servers": []}
    for name in ("status", "stop", "logs"):
        out, err = run(name, code=1)
        assert out == ""
        assert err.startswith("error: no tinkex server of this user runs on this machine.\nhint: ")
    assert "tinkex ps" in run("stop", "4711", code=1)[1]
    assert run("stop", "--all")[1] == "No server runs.\n"
    assert "--base-url local" in run("run", "list", code=1)[1]


@pytest.mark.timeout(120)
def test_a_local_server_from_its_start_to_its_end(
    home: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKEX_LOCAL_MODEL", f"{TINY}={tiny_model}")
    monkeypatch.setenv("TINKEX_LOCAL_KEEP_S", "60")
    with tinkex.ServiceClient(base_url="local") as service:
        service.get_server_capabilities()
        (local,) = registry.running()
        data = home / "XDG_DATA_HOME" / "tinkex"

        # A list of runs needs no address, and no loaded model.
        listed = subprocess.run(
            [*PROGRAM, "run", "list"], capture_output=True, text=True, check=True
        )
        assert listed.stderr.startswith("0 training runs")
        assert control.ask(local, "status")["models"] == [
            {"name": TINY, "replicas": 1, "loaded": False, "processes": []}
        ]

        header, row = run("ps")[0].splitlines()
        columns = re.split(" {2,}", header)
        shown = dict(zip(columns, re.split(" {2,}", row), strict=True))
        assert shown.pop("Memory").endswith("MB")
        assert shown == {
            "URL": local.url,
            "Process": str(local.pid),
            "Kind": "local",
            "Data folder": str(data),
            "Models": TINY,
            "Clients": "1",
            "Started": "just now",
        }
        (told,) = json.loads(run("ps", "-f", "json")[0])["servers"]
        assert told["clients"] == [{"pid": os.getpid(), "program": told["clients"][0]["program"]}]

        with ForkedShell({}, home) as shell:
            first, *rest = shell("ps", terminal=True).out.splitlines()
            assert first == local.url  # can be copied
            assert all(len(line) <= 80 for line in rest)
            paragraph = " ".join(" ".join(rest).split())
            assert "Kind: local, Data folder:" in paragraph
            assert f"Models: {TINY}, Clients: 1, Started: just now, " in paragraph
            for said in (shell("-f", "json", "ps").json, shell("ps", "-f", "json").json):
                assert said["servers"][0]["pid"] == local.pid
            for name, title in (("ps", "1 server\n"), ("logs", "")):
                gone = shell(name, reader_gone=True)
                assert (gone.code, gone.err) == (141, title)

        for named in ([], [local.url], [str(local.pid)]):
            properties = run("status", *named)[0]
            assert "Ready        yes" in properties
            assert f"Clients      process {os.getpid()} (" in properties
            assert str(data / "local.log") in properties

        out, err = run("stop", code=1)
        assert out == ""
        assert err.startswith(f"error: the server at {local.url} is in use: process {os.getpid()}")
        assert "--force" in err

    assert "starting tinkex" in run("logs", "-n", "0")[0]
    following = subprocess.Popen([*PROGRAM, "logs", "-f"], stdout=subprocess.PIPE, text=True)
    assert run("stop")[0] == f"Stopped the server at {local.url} (process {local.pid}).\n"
    assert has_exited(local.pid)
    assert "stopped" in following.communicate(timeout=20)[0]
    # The log stays.
    out, err = run("logs")
    assert "stopped" in out
    assert err.startswith("No server runs. The log of the last local server")


def test_profiles_are_named_used_and_cleared(home: Path) -> None:
    assert run("use", "http://GPU-box:8000/", "--name", "lab")[0] == (
        "Using http://gpu-box:8000 (lab).\n"
    )
    assert profiles.path().stat().st_mode & 0o777 == 0o600
    run("use", "http://127.0.0.1:9")
    assert json.loads(run("use", "--list", "-f", "json")[0]) == {
        "current": "127.0.0.1:9",
        "profiles": {"lab": "http://gpu-box:8000", "127.0.0.1:9": "http://127.0.0.1:9"},
    }
    assert tinkex.Settings.resolve().base_url == "http://127.0.0.1:9"
    run("use", "lab")
    assert "lab" in run("use", "--list")[0]
    assert "there is no profile 'home'" in run("use", "home", code=1)[1]
    run("use", "local")
    assert tinkex.Settings.resolve().base_url == "local"
    run("use", "--clear")
    with pytest.raises(tinkex.TinkerError, match="No service is named"):
        tinkex.Settings.resolve()
    assert run("use", code=2)
    assert run("use", "banana://x", code=1)[1].startswith("error: base_url 'banana://x' is not")


def test_memory_counts_children() -> None:
    own = memory_bytes(os.getpid())
    assert own is not None
    child = subprocess.Popen(["sleep", "10"])
    try:
        both = memory_bytes(os.getpid())
    finally:
        child.kill()
        child.wait()
    assert both is not None
    assert both > own
    assert memory_bytes(child.pid) is None
