"""What the client and the server do on macOS and Windows, as far as Linux can show it."""

import resource
import subprocess
import sys

import pytest

from serving import TINY, Server
from tinkex.local import registry
from tinkex.server.web_process import MACOS_OPEN_MAX, file_limit
from waiting import until

#: Takes away what Windows lacks: modules, and functions and constants that the client could use.
AS_ON_WINDOWS = """
import os, signal, sys
for name in "fcntl grp pwd pty readline resource syslog termios tty".split():
    sys.modules[name] = None
for name in (
    "fchmod fork forkpty geteuid getpgid getpgrp getuid killpg mkfifo O_DIRECTORY O_NOFOLLOW "
    "O_NONBLOCK pread pwrite register_at_fork sched_getaffinity setsid statvfs sysconf"
).split():
    delattr(os, name)
for name in ("SIGALRM", "SIGCHLD", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGQUIT", "SIGUSR1", "SIGUSR2"):
    delattr(signal, name)
"""

IMPORT_ALL = """
import importlib, pkgutil, tinkex
for found in pkgutil.walk_packages(tinkex.__path__, "tinkex."):
    part = found.name.split(".")[1]
    if part not in ("server", "engine") and not found.name.endswith(("__main__", "conftest")):
        importlib.import_module(found.name)
        print(found.name)
"""

LOOP = """
import tinkex
from tinkex import types

with tinkex.ServiceClient(base_url=sys.argv[1], api_key="tml-x") as service:
    training = service.create_lora_training_client(base_model=sys.argv[2], rank=4, seed=0)
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0] * 3},
    )
    passed = training.forward_backward([datum], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    print("loss", passed.result().metrics["loss:sum"])
    path = training.save_weights_for_sampler("here").result().path
    sampler = service.create_sampling_client(model_path=path)
    prompt, params = types.ModelInput.from_ints([1, 2]), types.SamplingParams(max_tokens=3)
    print(sampler.sample(prompt, num_samples=1, sampling_params=params).result().sequences)
"""


def as_on_windows(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", AS_ON_WINDOWS + program, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_module_of_the_client_is_imported_without_the_modules_of_unix() -> None:
    done = as_on_windows(IMPORT_ALL)
    assert done.returncode == 0, done.stderr
    assert {"tinkex.client.training", "tinkex.cli.train"} <= set(done.stdout.split())
    assert len(done.stdout.split()) > 150


def test_a_model_is_trained_and_sampled_without_the_modules_of_unix(
    server: Server,
) -> None:
    done = as_on_windows(LOOP, server.url, TINY)
    assert done.returncode == 0, done.stderr
    assert "loss " in done.stdout


@pytest.mark.parametrize("command", ["serve", "web", "doctor"])
def test_commands_of_a_server_say_that_they_do_not_run_on_windows(command: str) -> None:
    done = as_on_windows("from tinkex.cli.main import main\nmain()", command)
    assert done.returncode == 1
    assert f"`tinkex {command}` does not run on Windows" in done.stderr
    assert "WSL 2" in done.stderr


# -- macOS -----------------------------------------------------------------------------------------


def test_a_process_is_known_without_proc_in_any_language_and_zone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            monkeypatch.setenv("TZ", "Asia/Tokyo")
            monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
            started = registry.start_from_ps(process.pid)
            monkeypatch.setenv("TZ", "America/Lima")
            monkeypatch.delenv("LC_ALL")
            assert started
            assert registry.start_from_ps(process.pid) == started
            process.kill()
            # Nobody has waited for it: it has ended and still has its number.
            until(lambda: registry.start_from_ps(process.pid) is None)
        finally:
            process.kill()
    assert registry.start_from_ps(process.pid) is None


@pytest.mark.parametrize(
    ("soft", "hard", "limit"),
    [
        (1024, 524288, 524288),
        (256, resource.RLIM_INFINITY, MACOS_OPEN_MAX),
        (65536, resource.RLIM_INFINITY, 65536),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, resource.RLIM_INFINITY),
    ],
)
def test_the_limit_of_open_files_is_one_that_the_system_accepts(
    soft: int, hard: int, limit: int
) -> None:
    assert file_limit(soft, hard) == limit
