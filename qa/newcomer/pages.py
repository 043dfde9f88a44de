"""The commands and programs that a page of the documentation tells its reader to run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: What a newcomer reads, in this order.
PAGES = ("README.md", "docs/quickstart.md")

_CONSOLE = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
_PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
#: A command after the prompt, with lines that a backslash continues.
_COMMAND = re.compile(r"^\$ ((?:.*\\\n)*.*)$", re.MULTILINE)
_COMMENT = re.compile(r"\s+#(?: .*)?$")
#: A command that the demo suggests: indented, after its heading.
_SUGGESTED = re.compile(r"^    (\S(?:.*\\\n)*.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Command:
    """A command as the page has it, without its comment."""

    page: str
    text: str


def commands(page: str, text: str | None = None) -> list[Command]:
    """The commands of a page, in order: lines of its console blocks that begin with `$ `."""
    text = (ROOT / page).read_text() if text is None else text
    return [
        Command(page, _COMMENT.sub("", found))
        for block in _CONSOLE.findall(text)
        for found in _COMMAND.findall(block)
    ]


def program(page: str) -> str:
    """The Python blocks of a page, as one program."""
    return "\n".join(_PYTHON.findall((ROOT / page).read_text()))


def suggested(output: str) -> list[str]:
    """The commands below "Next steps" in the output of the demo, as they would be pasted."""
    return _SUGGESTED.findall(output.partition("Next steps\n")[2])
