"""Renders chat templates: converts a conversation to the text format of its model."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from tinkex.extras import MissingExtra, needs

if TYPE_CHECKING:
    import jinja2

Message = Mapping[str, Any]

#: Keys under which a message may have its reasoning. Templates read only the first or the second.
REASONING = ("reasoning_content", "thinking", "reasoning")
#: A marker that is inserted after the text to continue. The rendered text is cut at the marker,
#: which removes what the template writes after a message. If the marker's trailing space is missing
#: from the rendered text, the template strips the text of messages, so `_cut` strips it too.
_MARK = "CONTINUE_THIS_MESSAGE "


class TokenizerError(ValueError):
    """The folder has no usable tokenizer, or the tokenizer does not support the request."""


def render(
    template: str,
    conversation: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    documents: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    continue_final_message: bool | str,
    variables: Mapping[str, Any],
) -> str:
    """
    The conversation as text.

    With `continue_final_message` the text ends with that of the last message, without the tokens
    that end a message, so that the model continues it.
    """
    if any(not isinstance(tool, Mapping) for tool in tools or ()):
        raise TypeError(
            "tools must be JSON schemas, each a dict. Only the tokenizer of transformers makes "
            "schemas from functions: pip install transformers."
        )
    if any(not isinstance(message, Mapping) for message in conversation):
        raise TypeError(
            "a conversation must be a list of messages, each a dict: {'role': ..., 'content': ...}."
        )
    messages = [_with_reasoning(message) for message in conversation]
    if continue_final_message:
        field = "content" if continue_final_message is True else continue_final_message
        messages[-1:] = [_marked(messages[-1] if messages else {}, field)]
    text = _compiled(template).render(
        messages=messages,
        tools=tools,
        documents=documents,
        add_generation_prompt=add_generation_prompt,
        **variables,
    )
    return _cut(text) if continue_final_message else text


def _with_reasoning(message: Message) -> dict[str, Any]:
    """A copy that has its reasoning under the keys that templates read."""
    found = next((message[name] for name in REASONING if message.get(name) is not None), None)
    if found is None:
        return dict(message)
    return {"thinking": found, **message, "reasoning_content": found}


def _marked(message: dict[str, Any], field: str) -> dict[str, Any]:
    """The message with the marker after the text of `field`."""
    text = message.get(field)
    names = [field]
    if field in REASONING:
        names = [name for name in REASONING if text is not None and message.get(name) == text]
    if isinstance(text, str):
        return {**message, **dict.fromkeys(names, text + _MARK)}
    if isinstance(text, Sequence):
        for index in reversed(range(len(text))):
            if "text" in text[index]:
                parts = list(text)
                parts[index] = {**parts[index], "text": parts[index]["text"] + _MARK}
                return {**message, field: parts}
    raise TokenizerError(
        f"continue_final_message: the last message has no text under {field!r} to continue."
    )


def _cut(text: str) -> str:
    at = text.rfind(_MARK.strip())
    if at < 0:
        raise TokenizerError(
            "continue_final_message: the chat template omits the text of the last message, so "
            "there is nothing to continue."
        )
    before = text[:at]
    return before if text.startswith(_MARK, at) else before.rstrip()


@functools.lru_cache(maxsize=64)
def _compiled(text: str) -> jinja2.Template:
    """The compiled template, with the settings and names that chat templates expect."""
    try:
        with needs("A chat template"):
            import jinja2
            import jinja2.ext
            from jinja2.sandbox import ImmutableSandboxedEnvironment
    except MissingExtra as error:
        raise TokenizerError(str(error)) from error

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks the text of the assistant; here it only renders its content."""

        tags = {"generation"}  # noqa: RUF012  jinja2 defines name and type

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TokenizerError(f"The chat template refuses this conversation: {message}")

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(text)
