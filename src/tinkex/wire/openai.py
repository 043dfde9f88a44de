"""
Requests of OpenAI's API: chat completions and completions.

Clients of that API send fields of many versions and servers. A field is supported, or it is refused
because it would change the result (`REFUSED`), or it is ignored.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

from pydantic import Field

from tinkex.wire.base import LenientModel, StrictModel, json_kind
from tinkex.wire.codec import decode_json, parse_json
from tinkex.wire.errors import WireError
from tinkex.wire.limits import check_count
from tinkex.wire.prompt_chunks import ImageChunk, ImageFormat

T = TypeVar("T", "ChatRequest", "CompletionRequest")

#: Sequences, stop texts and top logprobs of one request, as in OpenAI's own API or more.
MAX_CHOICES: Final = 128
MAX_STOPS: Final = 16
MAX_TOP_LOGPROBS: Final = 20
MAX_PROMPTS: Final = 128
MAX_TOOLS: Final = 128
#: The range of penalties and of logit biases.
MAX_PENALTY: Final = 2.0
MAX_BIAS: Final = 100.0
MAX_BIASED_TOKENS: Final = 1024

#: What the address of an image begins with, and the image's format.
DATA_URLS: Final[Mapping[str, ImageFormat]] = {
    "data:image/png;base64,": "png",
    "data:image/jpeg;base64,": "jpeg",
    "data:image/jpg;base64,": "jpeg",
}

ROLES: Final = ("system", "developer", "user", "assistant", "tool")

#: Fields that would change the result and are not supported: values without an effect, and advice.
REFUSED: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "audio": ((), "This server samples text only."),
    "modalities": ((["text"],), "This server samples text only."),
    "web_search_options": ((), "Search for yourself and put the result into a message."),
    "functions": (([],), "Use `tools`."),
    "function_call": (("none",), "Use `tools` and `tool_choice`."),
    "verbosity": ((), "Describe the wanted length in a message."),
    "best_of": ((1,), "Request several with `n` and choose by their logprobs."),
    "suffix": (("",), "This server samples what follows the prompt only."),
    "use_beam_search": ((False,), "Sample several with `n`."),
    "length_penalty": ((1, 1.0), "It belongs to beam search."),
    "min_p": ((0, 0.0), "Use `top_p` or `top_k`."),
    "min_tokens": ((0,), "Use `logit_bias` on the end token."),
    "repetition_penalty": ((1, 1.0), "Use `frequency_penalty` or `presence_penalty`."),
    "ignore_eos": ((False,), "Use `logit_bias` on the end token."),
    "stop_token_ids": (([],), "Use `stop` with texts."),
    "bad_words": (([],), "Use `logit_bias`."),
    "chat_template": ((), "Only the template in the model's folder is used."),
    "documents": (([],), "Put them into a message."),
    "guided_json": ((), "Use `response_format` with a JSON schema."),
    "guided_regex": ((), "Use `response_format` with a JSON schema that has a `pattern`."),
    "guided_choice": ((), "Use `response_format` with a JSON schema that has an `enum`."),
    "guided_grammar": ((), "Use `response_format` with a JSON schema."),
    "structured_outputs": ((), "Use `response_format` with a JSON schema."),
    "prompt_logprobs": ((0,), "Use completions with `echo` and `logprobs`."),
}


#: Fields with several types: one text for the errors of all of them.
_UNIONS: Final[Mapping[str, str]] = {
    "stop": "expected a text or a list of texts.",
    "prompt": "expected a text, token ids, or a list of one of them.",
    "tool_choice": "expected a text, or an object that names a function.",
}


class StreamOptions(LenientModel):
    """What a stream has besides its tokens."""

    include_usage: bool = False


class _Sampling(StrictModel):
    """Fields of both kinds of requests."""

    #: A base model, or the path of a checkpoint: `tinker://RUN/sampler_weights/NAME`.
    model: str
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    #: Texts that end a sequence; the answer does not contain them.
    stop: str | list[str] | None = None
    seed: int | None = None
    temperature: float = Field(1.0, ge=0.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    #: Not in OpenAI's API, but in that of other servers.
    top_k: int = -1
    max_tokens: int | None = Field(None, ge=0)
    stream: bool = False
    stream_options: StreamOptions | None = None
    #: By token id, as a decimal text.
    logit_bias: dict[str, float] | None = None
    presence_penalty: float = Field(0.0, ge=-MAX_PENALTY, le=MAX_PENALTY)
    frequency_penalty: float = Field(0.0, ge=-MAX_PENALTY, le=MAX_PENALTY)
    #: Also return the ids of prompt and sampled tokens. Not in OpenAI's API.
    return_token_ids: bool = False

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(_Sampling):
    """A chat completion: the next message of a conversation."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    #: More variables of the chat template. Not in OpenAI's API.
    chat_template_kwargs: dict[str, Any] | None = None
    #: Whether the prompt ends with the start of an answer. Not in OpenAI's API.
    add_generation_prompt: bool = True
    #: Whether the answer continues the last message. Not in OpenAI's API.
    continue_final_message: bool = False

    @property
    def has_images(self) -> bool:
        return any(
            is_image(part)
            for one in self.messages
            for part in (one["content"] if isinstance(one.get("content"), list) else ())
        )

    @property
    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(_Sampling):
    """A completion: what follows a text."""

    prompt: str | list[str] | list[int] | list[list[int]]
    #: How many of the most likely tokens to return; None: no logprobs at all.
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    #: Whether the answer begins with the prompt.
    echo: bool = False

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One or more prompts: texts, or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt  # type: ignore[return-value]


def read_chat(body: bytes) -> ChatRequest:
    """Decode a chat completion; `WireError` for a field that is malformed or not supported."""
    message = _decode(ChatRequest, body)
    if not message.messages:
        raise WireError.at(("messages",), "the conversation is empty; send at least one message.")
    for position, one in enumerate(message.messages):
        _check_message(position, one)
    check_count(("tools",), len(message.tools or ()), MAX_TOOLS, "tools")
    for position, tool in enumerate(message.tools or ()):
        _check_tool(position, tool)
    _check_tool_choice(message.tool_choice)
    if message.top_logprobs and not message.logprobs:
        raise WireError.at(("top_logprobs",), "set `logprobs` to true to get them.")
    if message.add_generation_prompt and message.continue_final_message:
        raise WireError.at(
            ("continue_final_message",),
            "it continues the last message; set `add_generation_prompt` to false.",
        )
    _check_sampling(message)
    return message


def read_completion(body: bytes) -> CompletionRequest:
    """Decode a completion; `WireError` for a field that is malformed or not supported."""
    message = _decode(CompletionRequest, body)
    if not message.prompts or not all(message.prompts):
        raise WireError.at(("prompt",), "it is empty; send at least one token.")
    check_count(("prompt",), len(message.prompts), MAX_PROMPTS, "prompts")
    if message.stream and (len(message.prompts) > 1 or message.echo):
        raise WireError.at(
            ("stream",), "a stream has one prompt and no `echo`. Send a request for each prompt."
        )
    if message.max_tokens == 0 and not message.echo:
        raise WireError.at(("max_tokens",), "0 new tokens are useful only with `echo`.")
    _check_sampling(message)
    return message


def _decode(kind: type[T], body: bytes) -> T:
    _refuse_unsupported(body)
    try:
        return decode_json(kind, body)
    except WireError as error:
        found = {
            (error.loc[:1] if error.loc[0] in _UNIONS else error.loc): error
            for error in error.errors
            if error.loc
        }
        raise WireError(
            [
                one._replace(loc=loc, msg=_UNIONS.get(str(loc[0]), one.msg))
                for loc, one in found.items()
            ]
            or error.errors
        ) from None


def _refuse_unsupported(body: bytes) -> None:
    value = parse_json(body)
    if not isinstance(value, dict):
        raise WireError(f"expected an object, not {json_kind(value)}.")
    for name, (neutral, advice) in REFUSED.items():
        found = value.get(name)
        if found is not None and found not in neutral:
            raise WireError.at((name,), f"this server does not support it. {advice}", "unsupported")


def _check_message(position: int, message: Mapping[str, Any]) -> None:
    role = message.get("role")
    if role not in ROLES:
        raise WireError.at(
            ("messages", position, "role"),
            f"{str(role)[:60]!r} is not a role; there are {', '.join(ROLES)}.",
        )
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return
    if isinstance(content, list):
        for index, part in enumerate(content):
            _check_part(("messages", position, "content", index), part)
    elif not isinstance(content, str):
        raise WireError.at(
            ("messages", position, "content"),
            f"expected a text or a list of parts, not {json_kind(content)}.",
        )


def _check_part(loc: tuple[str | int, ...], part: Any) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "image_url":
        _check_image(loc, part)
    elif kind not in ("text", "refusal") or not isinstance(part.get(kind), str):
        raise WireError.at(
            loc,
            f"expected a part of type 'text' or 'image_url', not {str(kind)[:60]!r}. This server "
            "reads text and images, no sound, video or files.",
            "unsupported",
        )


def _check_image(loc: tuple[str | int, ...], part: Mapping[str, Any]) -> None:
    found = part.get("image_url")
    url = found.get("url") if isinstance(found, dict) else None
    if not isinstance(url, str):
        raise WireError.at((*loc, "image_url", "url"), "expected a text.")
    if not url.startswith(tuple(DATA_URLS)):
        shown = url[:40] + ("..." if len(url) > 40 else "")
        raise WireError.at(
            (*loc, "image_url", "url"),
            f"{shown!r} is not the data of an image. This server fetches no addresses: send "
            f"{' or '.join(list(DATA_URLS)[:2])} and the file in base64.",
            "unsupported",
        )


def is_image(part: Any) -> bool:
    """Whether a part of a checked message is an image."""
    return isinstance(part, dict) and part.get("type") == "image_url"


def images_of(message: ChatRequest) -> list[ImageChunk]:
    """The images of all messages, in order; `WireError` for data that is not base64."""
    found = []
    for position, one in enumerate(message.messages):
        content = one.get("content")
        for index, part in enumerate(content if isinstance(content, list) else ()):
            if not is_image(part):
                continue
            kind, _, data = part["image_url"]["url"].partition(",")
            try:
                chunk = ImageChunk(
                    data=base64.b64decode(data, validate=True), format=DATA_URLS[f"{kind},"]
                )
            except ValueError:
                raise WireError.at(
                    ("messages", position, "content", index, "image_url", "url"),
                    "the data after the comma is not base64.",
                ) from None
            found.append(chunk)
    return found


def _check_tool(position: int, tool: Mapping[str, Any]) -> None:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise WireError.at(
            ("tools", position), "expected an object with type 'function' and a `function`."
        )
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise WireError.at(("tools", position, "function", "name"), "the name is missing.")
    if not isinstance(function.get("parameters"), (dict, type(None))):
        raise WireError.at(("tools", position, "function", "parameters"), "expected a JSON schema.")


def _check_tool_choice(choice: str | Mapping[str, Any] | None) -> None:
    if not isinstance(choice, Mapping):
        return
    function = choice.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise WireError.at(
            ("tool_choice", "function"),
            'expected {"type": "function", "function": {"name": ...}}.',
        )


def text_of_content(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    """The text of a message, whose content may be in parts."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.get("text") or part.get("refusal") or "" for part in content)


def _check_sampling(message: _Sampling) -> None:
    check_count(("stop",), len(message.stops), MAX_STOPS, "stop texts")
    if "" in message.stops:
        raise WireError.at(("stop",), "an empty text would stop at once; remove it.")
    check_count(
        ("logit_bias",), len(message.logit_bias or ()), MAX_BIASED_TOKENS, "tokens with a bias"
    )
    for token, bias in (message.logit_bias or {}).items():
        if not token.isdecimal():
            raise WireError.at(
                ("logit_bias", token), "expected a token id, such as 50256, as the key."
            )
        if abs(bias) > MAX_BIAS:
            raise WireError.at(
                ("logit_bias", token), f"{bias} is not between -{MAX_BIAS:g} and {MAX_BIAS:g}."
            )
