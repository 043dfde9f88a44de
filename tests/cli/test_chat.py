"""`tinkex chat` in a real terminal: streaming, commands, and Ctrl-C."""

import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from serving import TINY, Server
from tinkex.cli.chat import GREETING, Conversation
from tinkex.cli.chat_display import WordWrap

PROMPT = "you> "


class Terminal:
    """A program in a pseudo-terminal."""

    def __init__(self, descriptor: int, process: "subprocess.Popen[bytes]") -> None:
        self._descriptor = descriptor
        self.process = process
        self._unread = ""

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def until(self, text: str, within_s: float = 30.0) -> str:
        """What the program printed before this text."""
        end_s = time.monotonic() + within_s
        while text not in self._unread:
            assert time.monotonic() < end_s, f"{text!r} does not come: {self._unread[-500:]!r}"
            if select.select([self._descriptor], [], [], 0.1)[0]:
                data = os.read(self._descriptor, 65536).decode(errors="replace")
                self._unread += data.replace("\r\n", "\n")
        before, _, self._unread = self._unread.partition(text)
        return before

    def say(self, text: str) -> str:
        """Type a message, and return what is printed before the next prompt."""
        self.type(f"{text}\n")
        return self.until(PROMPT).partition("\n")[2]


@contextmanager
def chatting(server: Server, *options: str) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "tinkex.cli.main", "chat", "--base-url", server.url]
    with subprocess.Popen(
        [*command, *options],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=_take_terminal,  # noqa: PLW1509  there is no other way to the terminal
        env={**os.environ, "TERM": "dumb"},
    ) as process:
        os.close(theirs)
        try:
            yield Terminal(ours, process)
        finally:
            if process.poll() is None:
                process.kill()
            os.close(ours)


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C reaches this program


def test_a_conversation_in_a_terminal(server: Server, tmp_path: Path) -> None:
    saved = tmp_path / "chats.jsonl"
    with chatting(server, "--seed", "4", "--max-tokens", "20") as terminal:
        assert f"{TINY}\n{GREETING}" in terminal.until(PROMPT)
        assert "/regenerate" in terminal.say("/help")
        assert "no message yet" in terminal.say("/regenerate")
        assert "there is no command /nothing" in terminal.say("/nothing")
        first = terminal.say("hello")
        assert first.strip()
        again = terminal.say("/regenerate")  # with the next seed
        assert again != first
        assert terminal.say("/compare base") == f"{TINY}:\n{again}"
        terminal.say("/clear")
        assert terminal.say("hello") == first
        assert "is not served here" in terminal.say("/compare no/such")
        terminal.type("two\\\n")
        terminal.until("...> ")
        terminal.say("lines")
        terminal.type('"""a\n')
        terminal.until("...> ")
        terminal.type("b\n")
        terminal.until("...> ")
        terminal.say('c"""')
        assert "Added to" in terminal.say(f"/save {saved}")
        assert "starts over" in terminal.say("/system Be brief.")
        terminal.say("hello")
        terminal.say(f"/save {saved}")
        terminal.type("\x04")
        assert terminal.process.wait(10) == 0
    first, second = map(json.loads, saved.read_text().splitlines())
    questions = [one["content"] for one in first["messages"] if one["role"] == "user"]
    assert questions == ["hello", "two\nlines", "a\nb\nc"]
    assert second["messages"][0] == {"role": "system", "content": "Be brief."}
    assert [one["role"] for one in second["messages"]] == ["system", "user", "assistant"]


def test_ctrl_c_stops_the_answer_and_not_the_program(server: Server, tmp_path: Path) -> None:
    saved = tmp_path / "chats.jsonl"
    with chatting(server, "--max-tokens", "1900") as terminal:
        terminal.until(PROMPT)
        # Python does not see a signal between the prompt and its wait for a key.
        time.sleep(0.5)
        terminal.type("\x03")
        assert "leaves" in terminal.until(PROMPT)
        for _ in range(5):  # a random model may end by itself
            terminal.type("hello\n")
            terminal.until("\n")
            terminal.type("\x03")
            if "(stopped)" in terminal.until(PROMPT):
                break
        else:
            pytest.fail("no answer was stopped")
        terminal.say(f"/save {saved}")
        terminal.type("/quit\n")
        assert terminal.process.wait(10) == 0
    assert json.loads(saved.read_text())["messages"][-1]["role"] == "assistant"


def test_an_answer_that_is_cut_says_so_and_a_full_context_says_what_to_do(server: Server) -> None:
    with chatting(server, "--max-tokens", "4", "--seed", "4") as terminal:
        terminal.until(PROMPT)
        assert "(cut after 4 tokens; --max-tokens allows more)" in terminal.say("hello")
        words = " ".join(["sea"] * 40 + ["\\"])
        for _ in range(60):
            terminal.type(f"{words}\n")
            terminal.until("...> ")
        said = terminal.say("end")
        assert "tokens, and the context of the model is 2,048." in said
        assert "hint: /clear starts over." in said
        assert "starts over" in terminal.say("/clear")
        assert "(cut after 4 tokens" in terminal.say("hello")


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("one two three", ["one two", "three"]),
        ("one two thr", ["one two", "thr"]),
        ("  indented\n\nlast", ["  indented", "", "last"]),
        ("a muchtoolongword b", ["a", "muchtoolon", "gword b"]),
        ("\u6d77\u6d77\u6d77\u6d77\u6d77\u6d77", ["\u6d77" * 5, "\u6d77"]),
    ],
)
def test_lines_break_between_words(text: str, lines: list[str], size: int) -> None:
    wrap = WordWrap(10)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert ("".join(map(wrap.add, pieces)) + wrap.end()).split("\n") == lines


def test_a_message_in_a_pipe_is_answered(server: Server) -> None:
    command = [sys.executable, "-m", "tinkex.cli.main", "chat", TINY, "--base-url", server.url]
    done = subprocess.run(
        [*command, "--max-tokens", "5", "--seed", "1"],
        input="hello\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip()
    assert "you>" not in done.stdout


def test_a_conversation_is_messages_in_turns() -> None:
    conversation = Conversation("s")
    assert conversation.take_last() is None
    conversation.add("a", "b")
    assert [one["role"] for one in conversation.messages("c")] == [
        *("system", "user", "assistant", "user")
    ]
    assert conversation.take_last() == ("a", "b")
    assert conversation.messages() == [{"role": "system", "content": "s"}]
