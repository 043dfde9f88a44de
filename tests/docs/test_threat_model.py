"""Every protection in the threat model names a test that exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "threat-model.md"

TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def protections() -> list[list[str]]:
    """The rows of the table "Ways in"."""
    table = PAGE.read_text().partition("## Ways in")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|")]
    return rows[2:]


def test_every_protection_names_a_test_that_exists() -> None:
    rows = protections()
    assert len(rows) > 15
    for way, _, shown in rows:
        named = TEST.findall(shown)
        assert named, f"{way}: no test is named"
        for file, name in named:
            text = (ROOT / file).read_text()
            assert re.search(rf"def {name}\(", text), f"{way}: {file}::{name} does not exist"
