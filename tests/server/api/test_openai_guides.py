"""Grammars of tool calls: what a model may write, with tags as text and as tokens of their own."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from tinkex.models.tiny_model import write_tiny_tokenizer
from tinkex.models.tokenizer import Tokenizer, load_tokenizer
from tinkex.models.tool_calls import ToolFormat
from tinkex.server.api.openai_guides import grammar_of
from tinkex.wire.openai import read_chat

llguidance = pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "any"}},
]
GOOD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ANY = '<tool_call>\n{"name": "any", "arguments": {"x": [1, "y"]}}\n</tool_call>'
BAD = '<tool_call>\n{"name": "add", "arguments": {"b": 1}}\n</tool_call>'


@pytest.fixture(scope="module", params=["tags are text", "tags are tokens"])
def folder(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("tokenizer")
    backend = write_tiny_tokenizer(made)
    if request.param == "tags are tokens":
        words = ("<tool_call>", "</tool_call>", "<think>", "</think>")
        backend.add_tokens([AddedToken(word, special=False) for word in words])
        backend.save(str(made / "tokenizer.json"))
    return made


def follows(folder: Path, text: str, format: ToolFormat = ToolFormat.HERMES, **fields: Any) -> bool:
    """Whether a model may write this text."""
    tokenizer: Tokenizer = load_tokenizer(folder)
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "tools": TOOLS, **fields}
    grammar = grammar_of(read_chat(json.dumps(body).encode()), format, tokenizer)
    assert grammar is not None
    known = llguidance.LLTokenizer(
        (folder / "tokenizer.json").read_text(), n_vocab=len(tokenizer), eos_token=2
    )
    matcher = llguidance.LLMatcher(known, grammar)
    tokens = tokenizer.encode(text)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("text", "choices"),
    [
        (GOOD, ("auto", "required", "add")),
        (ANY, ("auto", "required")),
        (f"{GOOD}\n{ANY}", ("auto", "required")),
        (f"<think>hm</think>Well.\n{GOOD}", ("auto",)),
        ("No call.", ("auto",)),
        (BAD, ()),
        (GOOD.replace(" ", "  "), ()),
    ],
)
def test_a_text_follows_the_choice_of_tools(
    folder: Path, text: str, choices: tuple[str, ...]
) -> None:
    named = {"type": "function", "function": {"name": "add"}}
    for name, choice in (("auto", "auto"), ("required", "required"), ("add", named)):
        assert follows(folder, text, tool_choice=choice) == (name in choices), name


def test_without_parallel_calls_one_call_is_all(folder: Path) -> None:
    choice = {"tool_choice": "required", "parallel_tool_calls": False}
    assert follows(folder, GOOD, **choice)
    assert not follows(folder, f"{GOOD}\n{GOOD}", **choice)


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_calls_of_llama_are_the_whole_answer(folder: Path, choice: str) -> None:
    def may_say(text: str) -> bool:
        return follows(folder, text, ToolFormat.LLAMA, tool_choice=choice)

    assert may_say('{"name": "add", "parameters": {"a": 1}}')
    assert not may_say('{"name": "add", "parameters": {"b": 1}}')
    assert may_say("No call.") == (choice == "auto")
