"""Tool calls are found in a text whatever the pieces it arrives in, and nothing is lost."""

import json

import pytest

from tinkex.models.tool_calls import ToolCall, ToolCallReader, ToolFormat, tool_format

HERMES, LLAMA = ToolFormat.HERMES, ToolFormat.LLAMA
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ADDED = ToolCall("add", '{"a": 1}')


def read(format: ToolFormat, text: str, size: int) -> tuple[str, list[ToolCall]]:
    reader = ToolCallReader(format)
    pieces = [reader.add(text[at : at + size]) for at in range(0, len(text), size)]
    pieces.append(reader.end())
    return "".join(text for text, _ in pieces), [call for _, calls in pieces for call in calls]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    ("format", "text", "shown", "calls"),
    [
        (HERMES, "no call", "no call", []),
        (HERMES, "trailing space \n", "trailing space \n", []),
        (HERMES, ADD, "", [ADDED]),
        (HERMES, f"Let me see.\n{ADD}\n{ADD}\n", "Let me see.", [ADDED, ADDED]),
        (HERMES, ADD.removesuffix("</tool_call>"), "", [ADDED]),
        (HERMES, "a <tool_call> no </tool_call> b", "a <tool_call> no </tool_call> b", []),
        (HERMES, "1 < 2 <tool", "1 < 2 <tool", []),
        (HERMES, "<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
        (LLAMA, '{"name": "add", "parameters": {"a": 1}}', "", [ADDED]),
        (LLAMA, '<|python_tag|>{"name": "add", "parameters": {"a": 1}}', "", [ADDED]),
        (
            LLAMA,
            '{"name": "add", "parameters": {"a": 1}}; {"name": "b", "parameters": {}}',
            "",
            [ADDED, ToolCall("b", "{}")],
        ),
        (LLAMA, '{"answer": 5}', '{"answer": 5}', []),
        (LLAMA, "{ is a brace", "{ is a brace", []),
        (LLAMA, 'Use {"name": "add"}.', 'Use {"name": "add"}.', []),
    ],
)
def test_calls_and_text_are_separated(
    format: ToolFormat, text: str, shown: str, calls: list[ToolCall], size: int
) -> None:
    assert read(format, text, size) == (shown, calls)


def test_text_before_a_call_is_not_held_back() -> None:
    reader = ToolCallReader(HERMES)
    assert reader.add("Let me see") == ("Let me see", [])
    assert reader.add(" <") == ("", [])
    assert reader.add("3") == (" <3", [])


@pytest.mark.parametrize("packed", [False, True])
def test_a_call_that_is_nested_too_deeply_stays_text(packed: bool) -> None:
    deep = '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"
    arguments = json.dumps(deep) if packed else deep
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert read(HERMES, text, len(text)) == (text, [])


def test_arguments_in_a_text_are_unpacked() -> None:
    packed = json.dumps({"name": "add", "arguments": json.dumps({"a": 1})})
    assert read(HERMES, f"<tool_call>{packed}</tool_call>", 3) == ("", [ADDED])


@pytest.mark.parametrize(
    ("template", "format"),
    [
        ("{% if tools %}... <tool_call>", HERMES),
        ('Respond as {"name": ..., "parameters": ...} ipython', LLAMA),
        ("<tool_call><function=name>", None),
        ("[TOOL_CALLS]", None),
    ],
)
def test_the_format_is_that_of_the_template(template: str, format: ToolFormat | None) -> None:
    assert tool_format(template) is format
