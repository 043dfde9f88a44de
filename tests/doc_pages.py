"""What pages of the documentation have in them: blocks, commands, names in code."""

import re
from dataclasses import dataclass
from pathlib import Path

from qa.newcomer import pages

ROOT = Path(__file__).resolve().parents[1]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "deploy" / "README.md", *DOCS]

_BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


@dataclass(frozen=True)
class Block:
    """A block of code."""

    language: str
    #: The file that a reader is told to save it as. Other Python blocks are one program.
    title: str | None
    text: str
    #: Where its text begins in the page, counted from 0.
    line: int


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(found[1], found[2], found[3], text.count("\n", 0, found.start(3)))
        for found in _BLOCK.finditer(text)
    ]


def commands(page: Path) -> list[str]:
    """The commands of a page, each in one line."""
    found = pages.commands(name(page), page.read_text())
    return [each.text.replace("\\\n", " ") for each in found]


def inline(page: Path) -> list[str]:
    """What is between backticks in the text."""
    return _INLINE.findall(_BLOCK.sub("", page.read_text()))
