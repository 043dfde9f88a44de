"""Requests of OpenAI's API: what is read, what is refused by name, and what is ignored."""

import base64
import json
from typing import Any

import pytest

from tinkex.wire.errors import WireError
from tinkex.wire.openai import (
    REFUSED,
    ChatRequest,
    CompletionRequest,
    images_of,
    read_chat,
    read_completion,
    text_of_content,
)

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "a"}


def chat(**fields: Any) -> ChatRequest:
    return read_chat(json.dumps({**CHAT, **fields}).encode())


def completion(**fields: Any) -> CompletionRequest:
    return read_completion(json.dumps({**COMPLETION, **fields}).encode())


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("read", [chat, completion])
def test_a_field_that_would_change_the_result_is_refused_by_name(read: Any, name: str) -> None:
    neutral, _ = REFUSED[name]
    for value in (None, *neutral):
        read(**{name: value})
    with pytest.raises(WireError, match=f"^{name}: this server does not support it"):
        read(**{name: {"anything": "else"}})


def test_no_supported_field_is_refused() -> None:
    assert not REFUSED.keys() & (ChatRequest.wire_names() | CompletionRequest.wire_names())


def test_unknown_fields_and_null_are_ignored() -> None:
    assert chat(new_field={"a": 1}, temperature=None, stream_options=None) == chat()


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"messages": [{"role": "robot", "content": "a"}]}, r"messages\[0\].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, r"content\[0\]"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].content"),
        ({"temperature": -1}, "temperature"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"logit_bias": {"word": 1}}, "logit_bias.word"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\]"),
        ({"tools": [{"type": "function", "function": {}}]}, r"tools\[0\].function.name"),
        ({"tool_choice": {"type": "function", "function": "x"}}, "tool_choice.function"),
        ({"tool_choice": {"type": "function", "function": None}}, "tool_choice.function"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"continue_final_message": True}, "continue_final_message"),
    ],
)
def test_a_wrong_field_of_a_chat_is_named(fields: dict[str, Any], where: str) -> None:
    with pytest.raises(WireError, match=where):
        chat(**fields)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_a_prompt_is_texts_or_tokens(prompt: Any, prompts: Any) -> None:
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], {}, [1, "a"], None])
def test_an_empty_or_odd_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(WireError, match="prompt"):
        completion(prompt=prompt)


def test_the_text_of_a_message_may_be_in_parts() -> None:
    assert text_of_content([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]) == "ab"
    assert text_of_content(None) == ""


# -- images ------------------------------------------------------------------------------------------


def with_image(url: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}


def test_images_are_data_urls() -> None:
    data = base64.b64encode(b"\x89PNG").decode()
    message = chat(
        messages=[
            with_image(f"data:image/png;base64,{data}"),
            {"role": "assistant", "content": "a"},
            with_image("data:image/jpg;base64,"),
        ]
    )
    assert message.has_images
    first, second = images_of(message)
    assert (first.data, first.format) == (b"\x89PNG", "png")
    assert (second.data, second.format) == (b"", "jpeg")
    assert not chat(messages=[{"role": "user", "content": "a"}]).has_images


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (with_image("https://example.org/a.png"), "fetches no addresses: send data:image/png"),
        (with_image("data:image/gif;base64,R0lG"), "is not the data of an image"),
        (with_image("file:///etc/passwd"), "fetches no addresses"),
        (with_image(None), r"content\[0\].image_url.url: expected a text"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "image_url.url: expected a text"),
        (
            {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]},
            "not 'input_audio'. This server reads text and images, no sound, video or files",
        ),
    ],
)
def test_other_parts_are_refused_by_name(content: Any, message: str) -> None:
    with pytest.raises(WireError, match=message):
        chat(messages=[content])


def test_an_image_that_is_not_base64_is_named() -> None:
    message = chat(
        messages=[{"role": "user", "content": "a"}, with_image("data:image/png;base64,*")]
    )
    with pytest.raises(WireError, match=r"messages\[1\].content\[0\].*is not base64"):
        images_of(message)
