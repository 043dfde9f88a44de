"""`tinkex sample` prints text while it is generated."""

import os
import pty
import subprocess
import sys
import time

import pytest

from serving import Server
from tinkex.models.text_stream import TextStream


class Bytes:
    """A tokenizer with a token for each byte; 0 is special."""

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return bytes(token for token in tokens if token).decode(errors="replace")


@pytest.mark.parametrize("length", [1, 2, 5])
def test_text_comes_in_whole_characters_and_complete(length: int) -> None:
    text = "naïve 猫 🏴‍☠️ end"
    tokens = [*text.encode(), 0]
    stream = TextStream(Bytes())
    parts = [stream.add(tokens[at : at + length]) for at in range(0, len(tokens), length)]
    parts.append(stream.end())
    assert "".join(parts) == text
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(parts)


def test_a_character_that_never_ends_is_shown_as_such() -> None:
    stream = TextStream(Bytes())
    assert stream.add([0xF0, 0x9F]) == ""
    assert stream.end() == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("terminal", [True, False])
def test_tokens_are_printed_as_they_come(server: Server, terminal: bool) -> None:
    read, write = pty.openpty() if terminal else os.pipe()
    command = [sys.executable, "-m", "tinkex.cli.main", "sample", "--plain", "the ship sails"]
    command += ["--base-url", server.url, "--max-tokens", "400", "--seed", "1"]
    with subprocess.Popen(command, stdout=write) as process:
        os.close(write)
        pieces: list[tuple[float, bytes]] = []
        while True:
            try:
                data = os.read(read, 65536)
            except OSError:  # the other end of a terminal was closed
                break
            if not data:
                break
            pieces.append((time.monotonic(), data))
        os.close(read)
    assert process.returncode == 0
    assert len(pieces) > 5
    # The first words stand there while most of the sample is still to come.
    total = sum(len(data) for _, data in pieces)
    assert len(pieces[0][1]) < total / 4
