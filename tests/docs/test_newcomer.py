"""Every command of the README and the quickstart has a check in the newcomer's run."""

import shlex
import subprocess
import sys

import pytest
from click.testing import CliRunner

from qa.newcomer import pages, run
from qa.newcomer.terminal import Failed, Terminal, as_read
from tinkex.cli.command_group import command as tinkex_command

COMMANDS = [command for page in pages.PAGES for command in pages.commands(page)]


def test_every_command_has_a_check_and_every_check_a_command():
    assert len(COMMANDS) > 12
    assert run.unchecked() == set()


def test_a_new_command_is_noticed(monkeypatch):
    monkeypatch.setitem(run.CHECKS, ("README.md", "tinkex no-such"), run.succeeds())
    assert run.unchecked() == {("README.md", "tinkex no-such")}


def test_commands_are_read_from_console_blocks_without_comments_and_output():
    page = (
        "```console\n$ make demo     # with a comment\nits output\n$ one \\\n  two\n```\n"
        "```text\n$ not a command\n```\n`$ nor this`\n"
    )
    assert [each.text for each in pages.commands("x", page)] == ["make demo", "one \\\n  two"]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda each: each.text[:40])
def test_the_command_is_one_that_a_shell_and_tinkex_understand(command):
    subprocess.run(["bash", "-n", "-c", command.text], check=True)
    words = shlex.split(command.text)
    if words[0] == "tinkex":
        help_of = CliRunner().invoke(tinkex_command, [*words[1:], "--help"])
        assert help_of.exit_code == 0, help_of.output


def test_suggested_commands_are_read_as_they_would_be_pasted():
    output = (
        "Loss\n    not this\n\nNext steps\n  Talk to the pirate:\n"
        "    tinkex sample 'Who are you?' \\\n      --path tinker://x\n  Serve:\n    tinkex serve\n"
    )
    assert pages.suggested(output) == [
        "tinkex sample 'Who are you?' \\\n      --path tinker://x",
        "tinkex serve",
    ]


def test_a_terminal_keeps_variables_and_shows_what_a_person_sees(tmp_path):
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "TERM": "xterm"}
    terminal = Terminal("one", tmp_path, env, tmp_path / "log")
    try:
        assert terminal.run("export WORD=kept", limit_s=10) == (0, "")
        assert terminal.run('echo $WORD; echo "$HOME"', limit_s=10)[1] == f"kept\n{tmp_path}"
        assert (
            terminal.run("tput cols 2>/dev/null || stty size | cut -d' ' -f2", limit_s=10)[1]
            == "80"
        )
        assert terminal.run("(exit 3)", limit_s=10)[0] == 3
        # One process: a shell that is interrupted before it starts a program goes on with it.
        waits = f"{sys.executable} -c 'import time; print(\"ready\", flush=True); time.sleep(50)'"
        assert "ready" in terminal.start(waits, "ready", limit_s=10)
        terminal.interrupt()
        assert terminal.run("echo again", limit_s=10) == (0, "again")
        with pytest.raises(Failed, match="not done after"):
            terminal.run("sleep 5", limit_s=0.2)
    finally:
        terminal.close()
    assert as_read("\x1b[32m10%\r\n50%\r100%\x1b[K\r\n") == "10%\n100%\n"
