"""Completion in shells: commands and options, and runs and checkpoints of a real server."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import tinkex
from forked_shell import ForkedShell
from serving import TINY, Server
from waiting import until


@pytest.fixture(scope="module")
def shell(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedShell]:
    home = tmp_path_factory.mktemp("home")
    env = {"TINKER_BASE_URL": server.url, "HOME": str(home), "XDG_DATA_HOME": str(home)}
    with ForkedShell(env, home) as running:
        yield running


@pytest.fixture(scope="module")
def saved(server: Server) -> str:
    """The path of a checkpoint."""
    with tinkex.ServiceClient(base_url=server.url) as service:
        training = service.create_lora_training_client(TINY, rank=4)
        return training.save_state("completed").result().path


def bash(shell: ForkedShell, line: str, **env: str) -> list[str]:
    """What our script for bash gets for a line."""
    ran = shell(env={"_TINKEX_COMPLETE": "bash_complete", "COMP_LINE": line, **env})
    assert ran.err == ""
    return [row.removeprefix("plain,") for row in ran.out.split()]


def offers(shell: ForkedShell, line: str, wanted: str, **env: str) -> None:
    """The line is completed with this; again if a busy machine needs more than the 1.5 s it has."""
    until(lambda: wanted in bash(shell, line, **env), within_s=30)


def test_commands_and_options_are_completed(shell: ForkedShell) -> None:
    assert bash(shell, "tinkex ch") == ["chat", "checkpoint"]
    assert bash(shell, "tinkex checkpoint l") == ["list"]
    assert "--format" in bash(shell, "tinkex checkpoint list --")
    assert bash(shell, 'tinkex sample "two words" --fo') == ["--format"]
    assert bash(shell, "tinkex run list -f ") == ["table", "json"]


def test_runs_and_checkpoints_come_from_the_server(shell: ForkedShell, saved: str) -> None:
    run_id = saved.removeprefix("tinker://").split("/")[0]
    offers(shell, "tinkex run info ", run_id)
    until(lambda: bash(shell, f"tinkex run info {run_id[:-2]}") == [run_id], within_s=30)
    offers(shell, "tinkex checkpoint list --run-id ", run_id)
    for command in ("info", "download", "delete", "publish", "set-ttl"):
        offers(shell, f"tinkex checkpoint {command} tinker://", saved)
    offers(shell, "tinkex sample Hello --path ", saved)
    offers(shell, "tinkex merge tinker:", saved)
    words = {"COMP_WORDS": "tinkex checkpoint info ", "COMP_CWORD": ""}
    fish = {"_TINKEX_COMPLETE": "fish_complete", **words}
    until(lambda: saved in re.split(r"[,\s]", shell(env=fish).out), within_s=30)
    zsh = {"_TINKEX_COMPLETE": "zsh_complete", **words, "COMP_CWORD": "3"}
    until(lambda: saved.replace(":", r"\:") in shell(env=zsh).out.splitlines(), within_s=30)


def test_the_service_may_be_named_on_the_line(
    shell: ForkedShell, server: Server, saved: str
) -> None:
    line = f"tinkex checkpoint info --base-url {server.url} "
    offers(shell, line, saved, TINKER_BASE_URL="http://127.0.0.1:9")


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "local", "banana", "https://tinker.example"])
def test_without_a_server_nothing_is_said_and_nothing_started(shell: ForkedShell, url: str) -> None:
    started = time.monotonic()
    assert bash(shell, "tinkex run info ", TINKER_BASE_URL=url) == []
    assert time.monotonic() - started < 10  # a command waits 30 s; this machine may be busy


def test_a_server_that_does_not_answer_is_not_waited_for(shell: ForkedShell) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        started = time.monotonic()
        assert bash(shell, "tinkex run info ", TINKER_BASE_URL=url) == []
        assert time.monotonic() - started < 10  # a command waits 30 s; this machine may be busy


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.may_skip
def test_bash_completes_words_with_colons(server: Server, saved: str, tmp_path: Path) -> None:
    """In a real bash, which splits words at colons and replaces only the last part."""
    tool = tmp_path / "tinkex"
    tool.write_text(f'#!/bin/sh\nexec {sys.executable} -m tinkex.cli.main "$@"\n')
    tool.chmod(0o755)
    script = """
        eval "$(tinkex completion bash)"
        complete -p tinkex
        COMP_LINE="tinkex checkpoint info $1"; COMP_POINT=${#COMP_LINE}
        _tinkex_completion tinkex
        printf '%s\\n' "${COMPREPLY[@]}"
    """
    env = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "TINKER_BASE_URL": server.url,
        "HOME": str(tmp_path),
    }
    typed, rest = saved[:-5], saved[-5:]

    def replies() -> list[str]:
        done = subprocess.run(
            ["bash", "--norc", "-c", script, "bash", typed],
            env=env,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stderr == ""
        registered, *lines = done.stdout.splitlines()
        assert registered == "complete -o nosort -F _tinkex_completion tinkex"
        return lines

    # Bash keeps what stands before the last colon.
    until(lambda: replies() == [f"{typed.rpartition(':')[2]}{rest}"], within_s=30)
