"""`base_url="local"`: one server for all programs; it ends after the last, even if killed."""

import dataclasses
import logging
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
from tinkex.local import control, leases, registry
from tinkex.local.leases import Holder, IdleTime

#: A stand-in for `tinkex serve`: says that it is ready, writes its file, ends when unused.
SERVER = """
import os, signal, sys, time
from pathlib import Path
from tinkex.local import leases, registry
print("loading", *sys.argv[1:], file=sys.stderr, flush=True)
print("2026-11-16 20:00:00,000 tinkex.server.supervisor /old has runs and checkpoints of an "
      "earlier version. To have them here: tinkex import /old", file=sys.stderr, flush=True)
if "--broken" in sys.argv:
    sys.exit("no such model")
data = sys.argv[sys.argv.index("--data") + 1]
url = f"http://127.0.0.1:{os.getpid()}"
registry.publish(registry.RunningServer(
    pid=os.getpid(), process_start=registry.process_start(os.getpid()),
    machine=registry.machine(), url=url, data=data, how="local", models=("m",), keys=False,
    started_s=time.time(), arguments=os.environ["TINKEX_LOCAL_ARGS"], token="t"))
leases.stop_when_unused(Path(data), in_use=lambda keep_s: False,
    stop=lambda: os.kill(os.getpid(), signal.SIGTERM))
print(f"tinkex ready at {url}", flush=True)
time.sleep(60)
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
    return LocalSettings(
        model="m", arguments=(), data=tmp_path / "data", wait_s=20, keep_s=0, module=MODULE
    )


def server_pid(settings: LocalSettings) -> int:
    running = registry.of_data(settings.data)
    assert running is not None
    return running.pid


def test_the_server_stops_when_the_last_client_is_closed(settings):
    first, second = local_server.attach(settings), local_server.attach(settings)
    pid = server_pid(settings)
    assert first.url == second.url
    log = (settings.data / "local.log").read_text()
    assert "loading serve m --local --host 127.0.0.1 --port 0 --data" in log
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
        pid = server_pid(settings)
        assert second.url.endswith(f":{pid}")
        assert not has_exited(pid, within_s=0.1)
        second.release()
    assert has_exited(pid)


def test_the_server_stays_warm_for_the_next_program(settings):
    warm = dataclasses.replace(settings, keep_s=1)
    local_server.attach(warm).release()
    pid = server_pid(settings)
    assert not has_exited(pid, within_s=0.4)
    second = local_server.attach(warm)
    assert second.url.endswith(f":{pid}")
    assert not has_exited(pid, within_s=1.2)  # the time begins again after each program
    second.release()
    assert has_exited(pid)


def holder(keep_s: float) -> Holder:
    return Holder(lease="1-a", pid=1, program="p", keep_s=keep_s)


def test_the_idle_time_begins_after_the_last_program_and_is_as_long_as_it_asked_for():
    idle = IdleTime(now_s=0)
    assert not idle.is_over([], [], 299)
    assert idle.is_over([], [], 300)
    assert not idle.is_over([holder(5), holder(10)], [], 1000)
    assert not idle.is_over([], [], 1009)
    assert idle.is_over([], [], 1010)
    assert not idle.is_over([], [holder(7)], 2000)  # it came and went between two looks
    assert idle.is_over([], [], 2007)
    assert idle.is_over([], [holder(0)], 3000)


def test_programs_are_named(settings):
    mine = local_server.attach(settings)
    other = attach_elsewhere(settings)
    assert other.stdout
    assert other.stdout.readline()
    found = {one.pid: one.program for one in leases.holders(settings.data)}
    assert set(found) == {os.getpid(), other.pid}
    assert found[other.pid] == "python"
    other.kill()
    other.wait()
    other.stdout.close()
    assert [one.pid for one in leases.holders(settings.data)] == [os.getpid()]
    mine.release()


@pytest.mark.parametrize("tells_waits", [True, False])
def test_a_program_that_wants_silence_is_not_told_about_the_start(settings, caplog, tells_waits):
    local_server.attach(dataclasses.replace(settings, tells_waits=tells_waits)).release()
    told = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert any(text.startswith("local server: loading") for text in told) is tells_waits
    # No wait, but something to do.
    assert any("earlier version" in text for text in told)


def test_stopping_refuses_while_there_are_clients(settings):
    mine = local_server.attach(dataclasses.replace(settings, keep_s=60))
    running = mine.running
    assert running is not None
    with pytest.raises(control.HasClients, match=f"process {os.getpid()}"):
        control.stop(running)
    mine.release()
    # The stand-in answers nobody, so without force it might have clients without a lease.
    with pytest.raises(control.NotResponding):
        control.stop(running)
    control.stop(running, force=True)
    assert registry.of_data(settings.data) is None
    again = local_server.attach(settings)
    assert again.running != running
    control.stop(again.running, force=True)
    again.release()


def test_a_new_server_is_started_after_the_old_one_has_ended(settings):
    first = local_server.attach(settings)
    pid = server_pid(settings)
    first.release()
    assert has_exited(pid)
    second = local_server.attach(settings)
    second_pid = server_pid(settings)
    assert second_pid != pid
    second.release()
    assert has_exited(second_pid)


def attach_elsewhere(settings: LocalSettings) -> subprocess.Popen[str]:
    code = f"""
    import sys, time
    from pathlib import Path
    from tinkex.client import local_server
    server = local_server.attach(local_server.LocalSettings(
        model="m", arguments=(), data=Path({str(settings.data)!r}), keep_s=0, module={MODULE!r}))
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
    second_pid = server_pid(settings)
    assert second_pid != pid
    first.release()
    second.release()
    assert has_exited(second_pid)


def test_other_settings_for_the_same_data_are_refused(settings):
    running = local_server.attach(settings)
    other = dataclasses.replace(settings, arguments=("--dtype", "bfloat16"))
    with pytest.raises(TinkerError, match="runs with other settings"):
        local_server.attach(other)
    pid = server_pid(settings)
    running.release()
    assert has_exited(pid)


def test_a_server_that_does_not_start_is_reported_with_its_log(settings):
    broken = dataclasses.replace(settings, arguments=("--broken",))
    with pytest.raises(TinkerError, match="no such model"):
        local_server.attach(broken)


def test_old_folders_are_named_to_the_program(settings, caplog):
    local_server.attach(settings).release()
    (line,) = [record.getMessage() for record in caplog.records if "/old" in record.getMessage()]
    assert line.endswith("To have them here: tinkex import /old")


def test_settings_come_from_the_environment(tmp_path):
    env = {
        "TINKEX_LOCAL_MODEL": "org/model",
        "TINKEX_LOCAL_ARGS": "--dtype bfloat16 --threads 2",
        "TINKEX_LOCAL_KEEP_S": "7",
        "XDG_DATA_HOME": str(tmp_path),
    }
    settings = LocalSettings.from_env(env)
    assert settings.data == tmp_path / "tinkex"  # that of `tinkex serve`
    assert settings.keep_s == 7
    place = ["--local", "--host", "127.0.0.1", "--port", "0", "--data", str(settings.data)]
    assert settings.command() == [
        *("serve", "org/model", *place),
        *("--dtype", "bfloat16", "--threads", "2"),
    ]
    other = LocalSettings.from_env(env | {"TINKEX_DATA": "/a"})
    assert str(other.data) == "/a"
    assert str(LocalSettings.from_env({"TINKEX_LOCAL_DATA": "/b"} | env).data) == "/b"
    with pytest.raises(TinkerError, match="TINKEX_LOCAL_KEEP_S='soon' is not a number"):
        LocalSettings.from_env({"TINKEX_LOCAL_KEEP_S": "soon"})
