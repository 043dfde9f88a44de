"""`base_url="local"`: one server for all programs; it ends with the last, even if killed."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from processes import has_exited
from tinkex import TinkerError
from tinkex.client import local_server
from tinkex.client.local_server import LocalSettings

#: A stand-in for `tinkex serve`: prints that it is ready, serves healthz, ends on SIGTERM.
SERVER = """
import http.server, os, sys
print("loading", *sys.argv[1:], file=sys.stderr, flush=True)
if "--broken" in sys.argv:
    sys.exit("no such model")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(f"tinkex ready at http://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()
"""


MODULE = "tinkex_stand_in.main"


@pytest.fixture
def settings(tmp_path, monkeypatch) -> LocalSettings:
    """Settings whose server is the stand-in above, in place of the real one."""
    package = tmp_path / "path" / "tinkex_stand_in"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "main.py").write_text(SERVER)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    return LocalSettings(model="m", arguments=(), data=tmp_path / "data", wait_s=20, module=MODULE)


def server_pid(settings: LocalSettings) -> int:
    return int(json.loads((settings.data / "local.json").read_text())["pid"])


def test_the_server_stops_when_the_last_client_is_closed(settings, capsys):
    first, second = local_server.attach(settings), local_server.attach(settings)
    pid = server_pid(settings)
    assert first.url == second.url
    assert "loading serve m --port 0 --data" in capsys.readouterr().err
    first.release()
    first.release()  # can be repeated
    assert not has_exited(pid, within_s=0.3)
    second.release()
    assert has_exited(pid)


def test_attaching_while_the_last_server_is_stopping_gives_a_running_server(settings):
    for _ in range(5):
        first = local_server.attach(settings)
        first.release()
        second = local_server.attach(settings)  # at once: the old one stays, or a new one starts
        assert local_server._healthy(second.url)
        assert not has_exited(server_pid(settings), within_s=0.1)
        second.release()
    assert has_exited(server_pid(settings))


def test_a_new_server_is_started_after_the_old_one_has_ended(settings):
    local_server.attach(settings).release()
    pid = server_pid(settings)
    assert has_exited(pid)
    second = local_server.attach(settings)
    assert server_pid(settings) != pid
    second.release()
    assert has_exited(server_pid(settings))


def attach_elsewhere(settings: LocalSettings) -> subprocess.Popen[str]:
    code = f"""
    import sys, time
    from pathlib import Path
    from tinkex.client import local_server
    server = local_server.attach(local_server.LocalSettings(
        model="m", arguments=(), data=Path({str(settings.data)!r}), module={MODULE!r}))
    print(server.url, flush=True)
    time.sleep(60)
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def test_a_killed_client_leaves_no_server_behind(settings):
    client = attach_elsewhere(settings)
    assert client.stdout
    assert client.stdout.readline().startswith("http://")
    pid = server_pid(settings)
    client.send_signal(signal.SIGKILL)
    client.wait()
    client.stdout.close()
    assert has_exited(pid)


def test_the_server_outlives_the_program_that_started_it_while_another_needs_it(settings):
    starter = attach_elsewhere(settings)
    assert starter.stdout
    url = starter.stdout.readline().strip()
    mine = local_server.attach(settings)
    assert mine.url == url
    pid = server_pid(settings)
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    starter.stdout.close()
    assert not has_exited(pid, within_s=0.3)
    mine.release()
    assert has_exited(pid)


def test_many_programs_at_once_share_one_server(settings):
    clients = [attach_elsewhere(settings) for _ in range(4)]
    urls = {client.stdout.readline().strip() for client in clients if client.stdout}
    assert len(urls) == 1
    pid = server_pid(settings)
    for client in clients:
        client.kill()
        client.wait()
        assert client.stdout
        client.stdout.close()
    assert has_exited(pid)


def test_a_server_that_was_killed_is_replaced(settings):
    first = local_server.attach(settings)
    pid = server_pid(settings)
    os.kill(pid, signal.SIGKILL)
    assert has_exited(pid)
    second = local_server.attach(settings)
    assert server_pid(settings) != pid
    first.release()
    second.release()
    assert has_exited(server_pid(settings))


def test_other_settings_for_the_same_data_are_refused(settings):
    running = local_server.attach(settings)
    other = dataclasses.replace(settings, arguments=("--dtype", "bfloat16"))
    with pytest.raises(TinkerError, match="with other settings uses"):
        local_server.attach(other)
    pid = server_pid(settings)
    running.release()
    assert has_exited(pid)


def test_a_server_that_does_not_start_is_reported_with_its_log(settings):
    broken = dataclasses.replace(settings, arguments=("--broken",))
    with pytest.raises(TinkerError, match="no such model"):
        local_server.attach(broken)


def test_settings_come_from_the_environment(tmp_path):
    env = {
        "TINKEX_LOCAL_MODEL": "org/model",
        "TINKEX_LOCAL_ARGS": "--dtype bfloat16 --threads 2",
        "XDG_DATA_HOME": str(tmp_path),
    }
    settings = LocalSettings.from_env(env)
    assert settings.data.parent == tmp_path / "tinkex" / "local"
    assert settings.command() == [
        "serve",
        "org/model",
        "--port",
        "0",
        "--data",
        str(settings.data),
        "--dtype",
        "bfloat16",
        "--threads",
        "2",
    ]
    other = LocalSettings.from_env(env | {"TINKEX_LOCAL_MODEL": "x=/a/org/model"})
    assert other.data != settings.data
