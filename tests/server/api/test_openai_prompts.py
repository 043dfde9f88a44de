"""From a chat to a prompt: templates that fail, that lack tools, or that would do more than render."""

import base64
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from qa.fuzz.hostile_images import png, write_processor
from tinkex.models.tiny_model import write_tiny_tokenizer
from tinkex.models.tokenizer import Tokenizer, load_tokenizer
from tinkex.server.api.errors import Refusal
from tinkex.server.api.openai_prompts import (
    OWN_VARIABLES,
    Prepared,
    PromptLimits,
    check_logprobs,
    prepare_chat,
)
from tinkex.wire.inputs import ImageChunk
from tinkex.wire.openai import read_chat

#: Of a model that reads text only.
FOLDER = Path("/nonexistent")
LIMITS = PromptLimits.of(2048, max_message_bytes=1)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    write_tiny_tokenizer(tmp_path)
    return load_tokenizer(tmp_path)


def prepare(tokenizer: Tokenizer, **fields: Any) -> Prepared:
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], **fields}
    return prepare_chat(read_chat(json.dumps(body).encode()), tokenizer, LIMITS, FOLDER)


def refusal(tokenizer: Tokenizer, **fields: Any) -> Refusal:
    with pytest.raises(Refusal) as raised:
        prepare(tokenizer, **fields)
    assert raised.value.status == 400
    return raised.value


def test_the_prompt_is_that_of_the_template(tokenizer: Tokenizer) -> None:
    found = prepare(tokenizer, messages=[{"role": "developer", "content": "b"}])
    text = "<|im_start|>system\nb<|im_end|>\n<|im_start|>assistant\n"
    assert found.tokens == tokenizer.encode(text)
    continued = prepare(
        tokenizer,
        messages=[{"role": "assistant", "content": "Once upon"}],
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert tokenizer.decode(continued.tokens).endswith("assistant\nOnce upon")


def test_a_template_without_tools_or_with_unknown_calls_is_refused(tokenizer: Tokenizer) -> None:
    assert "has no tools" in str(refusal(tokenizer, tools=[TOOL]))
    assert prepare(tokenizer, tools=[TOOL], tool_choice="none").tool_format is None
    tokenizer.chat_template = "{{ tools }} [TOOL_CALLS]"
    error = refusal(tokenizer, tools=[TOOL])
    assert error.field == "tools"
    assert "not supported" in str(error)


def test_a_model_without_a_template_is_refused_with_advice(tokenizer: Tokenizer) -> None:
    tokenizer.chat_template = None
    assert "/v1/completions" in str(refusal(tokenizer))


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages.append(1) }}",
        "{% for a in range(10**9) %}x{% endfor %}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_cannot_reach_the_machine(tokenizer: Tokenizer, template: str) -> None:
    tokenizer.chat_template = template
    assert refusal(tokenizer).field == "messages"


def test_a_template_that_fails_is_an_error_of_the_request(tokenizer: Tokenizer) -> None:
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    assert "roles must alternate" in str(refusal(tokenizer))
    tokenizer.chat_template = "{{ messages[5].content }}"
    assert refusal(tokenizer).field == "messages"


@pytest.mark.parametrize("name", sorted(OWN_VARIABLES))
def test_a_request_sets_no_variable_that_has_a_field(tokenizer: Tokenizer, name: str) -> None:
    error = refusal(tokenizer, chat_template_kwargs={name: "x"})
    assert error.field == "chat_template_kwargs"
    assert name in str(error)


def test_too_many_logprobs_are_refused(tokenizer: Tokenizer) -> None:
    asked: dict[str, Any] = {"n": 128, "top_logprobs": 20, "max_tokens": 391}
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], **asked}
    for logprobs, allowed in ((False, True), (True, False)):
        fields = {**body, "logprobs": logprobs, "top_logprobs": 20 * logprobs}
        message = read_chat(json.dumps(fields).encode())
        prepared = [prepare_chat(message, tokenizer, LIMITS, FOLDER)]
        if allowed:
            check_logprobs(message, prepared, 2048)
        else:
            with pytest.raises(Refusal, match="at most 1048576 are allowed"):
                check_logprobs(message, prepared, 2048)


def test_variables_reach_the_template(tokenizer: Tokenizer) -> None:
    tokenizer.chat_template = "{{ mood }}{{ reasoning_effort }}"
    found = prepare(tokenizer, chat_template_kwargs={"mood": "calm"}, reasoning_effort="low")
    assert tokenizer.decode(found.tokens) == "calmlow"


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "banana"}, "banana"),
        ({"not": {"type": "string"}}, "not"),
        ({"enum": ["x" * 70_000]}, "at most 65536"),
    ],
)
def test_a_schema_that_is_too_large_or_wrong_is_refused(
    tokenizer: Tokenizer, schema: Any, words: str
) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    error = refusal(tokenizer, response_format=wanted)
    assert error.field == "response_format"
    assert words in str(error)


def test_without_the_library_a_schema_is_refused_with_what_to_install(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    error = refusal(tokenizer, response_format={"type": "json_object"})
    assert error.field == "response_format"
    assert "pip install 'tinkex[guided]'" in str(error)


# -- images ------------------------------------------------------------------------------------------

#: As Qwen's templates write images.
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<|im_start|><|endoftext|><|im_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


@pytest.fixture
def folder(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    """A model whose images are the token `<|endoftext|>`, 16 x 16 pixels each."""
    tokenizer.chat_template = TEMPLATE
    (placeholder,) = tokenizer.encode("<|endoftext|>")
    (tmp_path / "config.json").write_text(json.dumps({"image_token_id": placeholder}))
    return write_processor(tmp_path)


def with_images(*parts: Any) -> bytes:
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {
            "type": "image_url",
            "image_url": {"url": f"data:image/png;base64,{base64.b64encode(part).decode()}"},
        }
        for part in parts
    ]
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode()


def test_images_take_the_places_of_the_template(tokenizer: Tokenizer, folder: Path) -> None:
    one, two = png(64, 48), png(32, 32)
    message = read_chat(with_images("a", one, two, "b"))
    found = prepare_chat(message, tokenizer, LIMITS, folder)
    chunks = found.sample.prompt.chunks
    assert [chunk.type[:5] for chunk in chunks] == ["encod", "image", "encod", "image", "encod"]
    assert [chunk.data for chunk in chunks if isinstance(chunk, ImageChunk)] == [one, two]
    text = [tokenizer.decode(chunk.tokens) for chunk in chunks if chunk.type == "encoded_text"]
    assert text == ["a<|im_start|>", "<|im_end|><|im_start|>", "<|im_end|>b"]
    # What is counted and returned has a placeholder for each token of an image.
    (placeholder,) = tokenizer.encode("<|endoftext|>")
    assert found.tokens.count(placeholder) == 12 + 4


def test_a_text_cannot_make_a_place_for_an_image(tokenizer: Tokenizer, folder: Path) -> None:
    message = read_chat(with_images("<|endoftext|>", png(16, 16)))
    with pytest.raises(Refusal, match=r"have 1 images, and the chat template .* makes 2 places"):
        prepare_chat(message, tokenizer, LIMITS, folder)


def test_an_image_that_does_not_fit_is_refused(tokenizer: Tokenizer, folder: Path) -> None:
    message = read_chat(with_images("a", png(512, 512)))
    small = PromptLimits.of(1000, max_message_bytes=1)
    with pytest.raises(Refusal, match="has 1027 tokens; the model's context is 1000"):
        prepare_chat(message, tokenizer, small, folder)
    with pytest.raises(Refusal, match="ends within its header"):
        prepare_chat(read_chat(with_images(png(9, 9)[:20])), tokenizer, LIMITS, folder)


def test_a_model_of_text_refuses_images(tokenizer: Tokenizer, folder: Path) -> None:
    message = read_chat(with_images("a", png(16, 16)))
    (folder / "config.json").write_text("{}")
    with pytest.raises(Refusal, match=r"takes no images: its config\.json has no image_token_id"):
        prepare_chat(message, tokenizer, LIMITS, folder)
    with pytest.raises(Refusal, match=r"has no preprocessor_config\.json"):
        prepare_chat(message, tokenizer, LIMITS, FOLDER)
