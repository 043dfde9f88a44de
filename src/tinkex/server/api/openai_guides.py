"""Grammars for requests of OpenAI's API: JSON schemas of answers, and calls that must be made."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tinkex.extras import MissingExtra, needs
from tinkex.models.tokenizer import Tokenizer
from tinkex.models.tool_calls import CLOSE, OPEN, ToolFormat, call_schema
from tinkex.server.api.errors import Refusal
from tinkex.wire.openai import ChatRequest

#: Characters of a grammar. The engine compiles it between two steps, so it must not take long.
MAX_GRAMMAR_CHARS = 2**16
#: White space as `json.dumps` writes it. With any white space, weak models never end.
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

Tool = Mapping[str, Any]


def grammar_of(message: ChatRequest, format: ToolFormat | None, tokenizer: Tokenizer) -> str | None:
    """The grammar that the answer must follow; None: any text."""
    schema = _answer_schema(message.response_format)
    if schema is not None:
        if format is not None:
            raise Refusal(
                400,
                "a schema for the answer together with `tools` is not supported. Send one of them, "
                'or `tool_choice` "none".',
                field="response_format",
            )
        return _checked(f"start: {_json(schema)}", "response_format")
    if format is None:
        return None
    tools, choice = message.tools or [], message.tool_choice
    if isinstance(choice, dict):
        name = choice["function"]["name"]
        tools = [tool for tool in tools if tool["function"]["name"] == name]
        if not tools:
            raise Refusal(400, f"`tools` has no function {name[:60]!r}.", field="tool_choice")
        return _checked(_required(tools, format, tokenizer, parallel=False), "tool_choice")
    if choice == "required":
        parallel = message.parallel_tool_calls
        return _checked(_required(tools, format, tokenizer, parallel=parallel), "tool_choice")
    if any(tool["function"].get("strict") for tool in tools):
        return _checked(_optional(tools, format, tokenizer), "tools")
    return None


def _answer_schema(wanted: Mapping[str, Any] | None) -> Any:
    if wanted is None or wanted.get("type") == "text":
        return None
    if wanted.get("type") == "json_object":
        return {"type": "object"}
    described = wanted.get("json_schema")
    if wanted.get("type") == "json_schema" and isinstance(described, dict):
        schema = described.get("schema", {"type": "object"})
        if isinstance(schema, dict):
            return schema
    raise Refusal(
        400,
        'expected {"type": "text"}, {"type": "json_object"}, or {"type": "json_schema", '
        '"json_schema": {"schema": ...}}.',
        field="response_format",
    )


def _required(
    tools: Sequence[Tool], format: ToolFormat, tokenizer: Tokenizer, *, parallel: bool
) -> str:
    """An answer of nothing but calls."""
    calls = " | ".join(_json(_schema(tool, format)) for tool in tools)
    if format is ToolFormat.LLAMA:
        return f"start: {calls}"
    more = ' ("\\n" call)*' if parallel else ""
    opened, closed = _tag(OPEN, tokenizer), _tag(CLOSE, tokenizer)
    return f'start: call{more}\ncall: {opened} "\\n" ({calls}) "\\n" {closed}'


def _optional(tools: Sequence[Tool], format: ToolFormat, tokenizer: Tokenizer) -> str:
    """Any text, and calls whose arguments follow the schemas."""
    if format is ToolFormat.LLAMA:
        calls = " | ".join(_json(_schema(tool, format)) for tool in tools)
        return f"start: {calls} | TEXT\nTEXT: /[^{{](.|\\n)*/"
    opened, closed = _tag(OPEN, tokenizer), _tag(CLOSE, tokenizer)
    calls = " | ".join(f"{_text(_call_head(tool))} {_json(_parameters(tool))}" for tool in tools)
    rules = ["start: (begin call)* free", f'call: ({calls}) "}}\\n" {closed}']
    if opened == _text(OPEN):
        # A text up to the first tag.
        rules += ["free: TEXT", f"begin[lazy]: TEXT {opened}", "TEXT: /(.|\\n)*/"]
    else:
        # Tokens of their own are no part of any text: the tag, and others such as <think>.
        words = ["TEXT", *_other_tokens(tokenizer)]
        rules += [f"free: ({' | '.join(words)})*", f"begin: free {opened}", "TEXT: /(.|\\n)+/"]
    return "\n".join(rules)


def _other_tokens(tokenizer: Tokenizer) -> list[str]:
    """Added tokens that are part of a model's text."""
    added = tokenizer.backend.get_added_tokens_decoder()
    return [
        f"<[{token}]>"
        for token, one in sorted(added.items())
        if not one.special and one.content not in (OPEN, CLOSE)
    ]


def _call_head(tool: Tool) -> str:
    """What precedes the arguments of a call."""
    return f'\n{{"name": {json.dumps(tool["function"]["name"])}, "arguments": '


def _tag(text: str, tokenizer: Tokenizer) -> str:
    """A tag in a grammar: a token of its own, or a text."""
    token = tokenizer.backend.token_to_id(text)
    return _text(text) if token is None else f"<[{token}]>"


def _text(text: str) -> str:
    return json.dumps(text)


def _parameters(tool: Tool) -> dict[str, Any]:
    """The schema of the arguments; any object for a function that is not strict."""
    function = tool["function"]
    schema = function.get("parameters") if function.get("strict") else None
    return schema if isinstance(schema, dict) and schema else {"type": "object"}


def _schema(tool: Tool, format: ToolFormat) -> dict[str, Any]:
    return call_schema(tool["function"]["name"], tool["function"].get("parameters"), format)


def _json(schema: dict[str, Any]) -> str:
    return f"%json {json.dumps(_styled(schema))}"


def _styled(schema: dict[str, Any]) -> dict[str, Any]:
    return {**schema, "x-guidance": JSON_STYLE}


def _checked(lark: str, field: str) -> str:
    try:
        with needs(f"`{field}` with a schema"):
            from llguidance import LLMatcher
    except MissingExtra as missing:
        raise Refusal(400, f"{missing}. Then restart the server.", field=field) from missing
    if len(lark) > MAX_GRAMMAR_CHARS:
        raise Refusal(
            400,
            f"its schemas have {len(lark)} characters; at most {MAX_GRAMMAR_CHARS} are allowed.",
            field=field,
        )
    grammar = LLMatcher.grammar_from_lark(lark)
    if problem := LLMatcher.validate_grammar(grammar):
        raise Refusal(
            400, f"{field}: the schema cannot be used: {problem.splitlines()[0][:500]}", field=field
        )
    return grammar
