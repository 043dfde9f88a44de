"""Programs that name no service find the running server of their user, and send it no other key."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import tinkex
from http_stub import Received, Reply, StubServer, reply_json, stub_server
from tinkex import TinkerError
from tinkex.cli.command_group import command as tinkex_command
from tinkex.client import local_server
from tinkex.client.auth import key_store
from tinkex.client.auth.credentials import ApiKey
from tinkex.client.auth.key_store import StoredKey, StoredKeys
from tinkex.client.settings import DEFAULT_URL, Settings
from tinkex.local import control, profiles, registry
from tinkex.local.registry import RunningServer


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name)
    return tmp_path


def server(url: str = "http://127.0.0.1:1", **changes: object) -> RunningServer:
    """A record of this process, as a server would write it."""
    pid = os.getpid()
    plain = RunningServer(
        pid=pid,
        process_start=registry.process_start(pid) or "",
        machine=registry.machine(),
        url=url,
        data=str(registry.data_folder()),
        how="serve",
        models=("test/tiny",),
        keys=False,
        started_s=time.time(),
        token="secret-token",
    )
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


# -- servers that do not respond ----------------------------------------------------------------


def test_a_server_that_does_not_respond_is_not_stopped() -> None:
    # Port 1 refuses connections; the process of the record is this one.
    silent = server()
    Path(silent.data).mkdir(parents=True)
    assert control.is_used_without_lease(silent, keep_s=0.0)
    with pytest.raises(control.NotResponding, match="not known whether programs use it"):
        control.stop(silent)
    registry.publish(silent)
    told = CliRunner().invoke(tinkex_command, ["stop"])
    assert told.exit_code == 1
    assert "use --force" in told.output


# -- which files are trusted ---------------------------------------------------------------------


def test_a_published_server_is_found_and_its_files_are_private(home: Path) -> None:
    file = registry.publish(server())
    assert file.is_relative_to(home / ".local/state/tinkex/servers")
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    (found,) = registry.running()
    assert found == server(started_s=found.started_s)
    assert "secret-token" not in repr(found)


def test_files_that_others_could_have_written_are_ignored(home: Path) -> None:
    file = registry.publish(server())
    file.chmod(0o644)
    assert registry.running() == []
    file.chmod(0o600)
    real = file.rename(file.with_suffix(".real"))
    file.symlink_to(real)
    assert registry.running() == []
    file.unlink()
    real.rename(file)
    assert len(registry.running()) == 1
    file.parent.chmod(0o755)
    assert registry.running() == []
    registry.publish(server())  # repairs the mode
    assert len(registry.running()) == 1
    file.write_text("[]")
    assert registry.running() == []


def test_files_of_ended_processes_are_deleted() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    files = [
        registry.publish(server(pid=ended.pid)),
        # The same process id, after it was given to another process.
        registry.publish(server(process_start="1")),
    ]
    assert registry.running() == []
    assert [file.exists() for file in files] == [False, False]


def test_files_of_other_machines_on_a_shared_disk_are_left_alone() -> None:
    file = registry.publish(server(machine="elsewhere 1 2"))
    assert registry.running() == []
    assert file.exists()
    # A container that shares the name and the home folder of this machine.
    host, boot, _ = registry.machine().split(" ")
    registry.publish(server(machine=f"{host} {boot} pid:[1]"))
    assert registry.running() == []
    assert file.exists()
    host, _, rest = registry.machine().partition(" ")
    registry.publish(server(machine=f"{host} another-boot{rest}"))
    assert registry.running() == []
    assert not file.exists()


def test_a_user_without_a_home_folder_has_no_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert registry.running() == []
    with pytest.raises(RuntimeError):  # the server logs it and goes on
        registry.publish(server(data="/d"))


def test_the_server_of_the_default_folder_is_chosen_else_the_only_one(home: Path) -> None:
    mine, other, third = server(), server(data="/other"), server(data="/third")
    folder = registry.data_folder()
    assert registry.choose([], folder) is None
    assert registry.choose([other], folder) == other
    assert registry.choose([other, mine], folder) == mine
    with pytest.raises(registry.SeveralServers):
        registry.choose([other, third], folder)


# -- which service a client uses -----------------------------------------------------------------


def test_without_any_server_the_error_names_every_way() -> None:
    with pytest.raises(TinkerError) as caught:
        tinkex.ServiceClient()
    for way in (
        "tinkex serve",
        'base_url="local"',
        "--base-url local",
        "TINKER_BASE_URL",
        "tinkex use URL",
        "TINKER_API_KEY",
        "tinkex auth login",
    ):
        assert way in str(caught.value)


def test_arguments_come_before_the_environment_the_profile_and_a_found_server(home: Path) -> None:
    registry.publish(server())
    assert Settings.resolve().base_url == "http://127.0.0.1:1"
    profiles.write(profiles.Profiles().adding("lab", "http://127.0.0.1:2"))
    assert Settings.resolve().base_url == "http://127.0.0.1:2"
    env = {**os.environ, "TINKER_BASE_URL": "http://127.0.0.1:3"}
    assert Settings.resolve(env=env).base_url == "http://127.0.0.1:3"
    assert Settings.resolve(base_url="http://127.0.0.1:4", env=env).base_url.endswith(":4")
    with pytest.raises(TinkerError, match=r"no profile 'home'; known: lab"):
        Settings.resolve(env={**os.environ, "TINKEX_PROFILE": "home"})


def test_a_server_that_starts_is_named_and_not_used(home: Path) -> None:
    registry.publish(server(ready=False))
    Path(server().data).mkdir(parents=True)
    for find in (Settings.resolve, local_server.attach):
        with pytest.raises(TinkerError, match=r"at http://127\.0\.0\.1:1 .* not ready yet"):
            find()
    shown = CliRunner().invoke(tinkex_command, ["status"])
    assert shown.exit_code == 1
    assert "no: it is starting" in shown.output
    assert "serve (not ready)" in CliRunner().invoke(tinkex_command, ["ps"]).output


def test_several_servers_are_listed(home: Path) -> None:
    others = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    try:
        for number, one in enumerate(others):
            start = registry.process_start(one.pid)
            registry.publish(
                server(
                    f"http://127.0.0.1:{number}",
                    pid=one.pid,
                    process_start=start,
                    data=f"/{number}",
                )
            )
        with pytest.raises(TinkerError, match=r"127\.0\.0\.1:0 .*127\.0\.0\.1:1 .*tinkex use URL"):
            Settings.resolve()
    finally:
        for one in others:
            one.kill()
            one.wait()


def test_a_key_without_an_address_means_the_hosted_service(home: Path) -> None:
    registry.publish(server())
    for settings in (
        Settings.resolve(api_key="tml-hosted"),
        Settings.resolve(env={**os.environ, "TINKER_API_KEY": "tml-hosted"}),
        Settings.resolve(env={**os.environ, "TINKER_CREDENTIAL_CMD": "echo tml-hosted"}),
    ):
        assert settings.base_url == DEFAULT_URL
    stored = StoredKeys().with_key("1", StoredKey(key=ApiKey("tml-hosted"))).with_default("1")
    key_store.write(key_store.default_path(), stored)
    assert Settings.resolve().base_url == DEFAULT_URL


# -- what a found server gets --------------------------------------------------------------------


def answer(request: Received) -> Reply:
    if request.path.endswith("get_server_capabilities"):
        return reply_json({"supported_models": []})
    return reply_json({})


@pytest.fixture
def recording() -> Iterator[StubServer]:
    with stub_server(answer) as stub:
        yield stub


def keys_sent(recording: StubServer) -> set[str | None]:
    assert recording.requests
    sent = json.dumps(
        [[one.path, dict(one.headers), one.body.decode()] for one in recording.requests]
    )
    assert "hosted" not in sent
    return {one.headers.get("x-api-key") for one in recording.requests}


def ask() -> None:
    with tinkex.ServiceClient() as service:
        service.get_server_capabilities()


def store_keys(url: str) -> None:
    """Keys of other services, none of which is for the default service, and one of this server."""
    stored = StoredKeys()
    for number, (key, service) in enumerate(
        (
            ("tml-hosted-1", "https://other.example"),
            ("tml-hosted-2", url.replace("127.0.0.1", "localhost")),
            ("tml-own", url),
        )
    ):
        stored = stored.with_key(str(number), StoredKey(key=ApiKey(key), base_url=service))
    key_store.write(key_store.default_path(), stored.with_default("0"))


def test_a_server_without_keys_gets_no_secret(
    recording: StubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLOUDFLARE_ACCESS_CLIENT_SECRET", "hosted")
    store_keys(recording.url)
    registry.publish(server(recording.url))
    ask()
    assert keys_sent(recording) == {"tml-local"}


def test_a_server_with_keys_gets_only_the_key_stored_for_it(recording: StubServer) -> None:
    registry.publish(server(recording.url, keys=True))
    with pytest.raises(TinkerError, match=f"tinkex auth login --base-url {recording.url}"):
        ask()
    assert recording.requests == []
    store_keys(recording.url)
    ask()
    assert keys_sent(recording) == {"tml-own"}


def test_base_url_local_sends_no_key_of_the_environment(
    recording: StubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-hosted")
    registry.publish(server(recording.url))
    with tinkex.ServiceClient(base_url="local") as service:
        service.get_server_capabilities()
    assert keys_sent(recording) == {"tml-local"}


def test_the_server_that_is_used_is_named_at_info(
    recording: StubServer, caplog: pytest.LogCaptureFixture
) -> None:
    registry.publish(server(recording.url))
    with caplog.at_level("INFO", "tinkex"):
        ask()
    assert f"using the server of this user at {recording.url}" in caplog.text
