"""The guide to OpenAI's API names every field that the server reads, and no other."""

import re
from pathlib import Path

from tinkex.wire.openai import REFUSED, ChatRequest, CompletionRequest

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "openai.md"


def named() -> set[str]:
    """The fields in the first column of the table."""
    table = PAGE.read_text().partition("## Supported fields")[2].partition("\n\nA field")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return {name.partition(".")[0] for cell in cells for name in re.findall(r"`([\w.]+)`", cell)}


def test_every_field_is_in_the_table() -> None:
    # `model` is described above it.
    assert named() == (ChatRequest.wire_names() | CompletionRequest.wire_names()) - {"model"}


def test_the_refused_fields_that_are_named_are_refused() -> None:
    examples = (
        PAGE.read_text().partition("unless its value has no effect: ")[2].partition(" and others")
    )
    assert set(re.findall(r"`(\w+)`", examples[0])) <= REFUSED.keys()
