"""`base_url="local"`, `tinkex serve` and programs that name no service share one data folder."""

import contextlib
import os
import pty
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import tinkex
from processes import has_exited
from serving import TINY, serving, unloaded
from tinkex.local import control, leases, registry

PROGRAM = (sys.executable, "-m", "tinkex.cli.main")
NAMES = ("XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME")


@pytest.fixture
def home(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty home folder, whose local server serves the tiny model and stays warm."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in NAMES:
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("TINKEX_LOCAL_MODEL", f"{TINY}={tiny_model}")
    monkeypatch.setenv("TINKEX_LOCAL_ARGS", "--threads 1")
    monkeypatch.setenv("TINKEX_LOCAL_KEEP_S", "60")
    yield tmp_path
    for server in registry.running():
        control.stop(server, force=True)


def train() -> str:
    """What a first program does: it trains on a local server, and saves."""
    with tinkex.ServiceClient(base_url="local") as service:
        training = service.create_lora_training_client(TINY, rank=4)
        return training.save_state("first").result().path


def saved() -> list[str]:
    """The checkpoints that a command without any address sees."""
    with tinkex.RestClient() as rest:
        found = rest.list_user_checkpoints().result().checkpoints
        return [checkpoint.tinker_path for checkpoint in found]


#: A program that names a model, which its local server may have to add.
ADDING = """
import sys, tinkex
with tinkex.ServiceClient(base_url="local") as service:
    training = service.create_lora_training_client(sys.argv[1], rank=4)
    print(training.save_weights_for_sampler("s").result().path)
"""


def on_terminal(*command: str) -> list[str]:
    """The lines that a person sees of a program."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while piece := os.read(ours, 4096):
            shown += piece
    os.close(ours)
    assert process.wait(10) == 0, shown
    return shown.decode().splitlines()


def serve() -> subprocess.CompletedProcess[str]:
    """`tinkex serve` that is expected to refuse."""
    return subprocess.run(
        [*PROGRAM, "serve", os.environ["TINKEX_LOCAL_MODEL"], "--port", "0"],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


@pytest.mark.timeout(180)
def test_programs_local_servers_and_serve_share_one_folder(
    home: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = train()
    (warm,) = registry.running()
    assert (warm.how, warm.models) == ("local", (TINY,))
    assert warm.data == str(home / "XDG_DATA_HOME" / "tinkex")
    assert saved() == [path]  # found without an address, and still warm

    # With a program, `tinkex serve` refuses and names it.
    with tinkex.ServiceClient(base_url="local") as service:
        service.get_server_capabilities()
        refused = serve()
        assert refused.returncode == 1
        assert f"process {os.getpid()} (" in refused.stderr
        assert f"tinkex stop --force {warm.pid}" in refused.stderr

    # Without one, it takes over, and has everything. Its model is loaded on first use.
    names = {name: os.environ[name] for name in NAMES}
    with serving(*unloaded(tiny_model), data=Path(warm.data), env=names) as server:
        assert has_exited(warm.pid)
        assert any("stopped the unused local server" in line for line in server.log)
        assert [one.url for one in registry.running()] == [server.url]
        assert saved() == [path]
        # base_url="local" uses it, and its end does not stop it.
        monkeypatch.delenv("TINKEX_LOCAL_ARGS")
        with tinkex.ServiceClient(base_url="local") as service:
            assert service.get_server_capabilities().supported_models
            assert [one.pid for one in leases.holders(Path(warm.data))] == [os.getpid()]
        assert saved() == [path]
        monkeypatch.setenv("TINKEX_LOCAL_ARGS", "--dtype bfloat16")
        with (
            pytest.raises(tinkex.TinkerError, match="runs with other settings"),
            tinkex.ServiceClient(base_url="local") as service,
        ):
            service.get_server_capabilities()
    assert registry.running() == []


def assert_needs_token(local: registry.RunningServer) -> None:
    """Administration needs the token of the server's file; reading the status loads no model."""
    assert control.ask(local, "status")["models"] == [
        {"name": TINY, "replicas": 1, "loaded": False, "processes": []}
    ]
    for headers in ({}, {registry.TOKEN_HEADER: "guess"}):
        request = urllib.request.Request(f"{local.url}/api/v1/local/status", headers=headers)
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request)
        assert caught.value.code == 403
        caught.value.close()


def test_a_program_that_knows_only_the_address_keeps_the_server(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKEX_LOCAL_KEEP_S", "0")
    with tinkex.ServiceClient(base_url="local") as service:
        service.get_server_capabilities()
        (local,) = registry.running()
        assert_needs_token(local)
        other = tinkex.ServiceClient(base_url=local.url)
        other.create_sampling_client(base_model=TINY)
    assert not has_exited(local.pid, within_s=2)
    with pytest.raises(control.HasClients, match=r"session .*SDK 0\.36\.0"):
        control.stop(local)
    other.close("success").result(10)
    assert has_exited(local.pid)


@pytest.mark.timeout(180)
def test_a_program_that_names_another_model_adds_it(
    home: Path, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = shutil.copytree(tiny_model, home / "other")
    *started, began, ended, path = on_terminal(sys.executable, "-c", ADDING, str(other))
    # Both ends of the wait are told.
    # A start of less than three seconds is not told.
    assert not started or "starting a server on this machine" in started[0]
    assert f"does not serve {other} yet: adding it" in began
    assert re.fullmatch(r"the local server serves other after \d+ s\.", ended)
    with tinkex.ServiceClient(base_url="local") as service:
        names = [model.model_name for model in service.get_server_capabilities().supported_models]
        assert names == [TINY, "other"]
        (local,) = registry.running()
        with urllib.request.urlopen(f"{local.url}/metrics") as metrics:
            assert (
                b'tinkex_engine_tokens_sampled_total{base_model="other",replica="0"}'
                in metrics.read()
            )
        # Advice for a program that does not start the server itself.
        with pytest.raises(tinkex.TinkerError, match="cannot serve 'no/such'") as caught:
            service.create_lora_training_client("no/such")
        assert "TINKEX_LOCAL_MODEL=no/such=FOLDER" in str(caught.value)
        assert "tinkex serve" not in str(caught.value)
        assert "does not serve no/such yet: adding it" in caplog.text
        with pytest.raises(tinkex.TinkerError, match=r"cannot serve '/nowhere'.*no folder"):
            service.create_sampling_client(base_model="/nowhere")
        # A model that cannot be loaded is not served, and does not disturb the others.
        broken = shutil.copytree(tiny_model, home / "broken")
        (broken / "model.safetensors").write_bytes(b"")
        with pytest.raises(tinkex.TinkerError, match=r"cannot serve .*broken"):
            service.create_lora_training_client(str(broken))
        names = [model.model_name for model in service.get_server_capabilities().supported_models]
        assert names == [TINY, "other"]
    control.stop(local)
    # The next local server has it too, and its runs.
    with tinkex.ServiceClient(base_url="local") as service:
        assert service.create_sampling_client(model_path=path)
