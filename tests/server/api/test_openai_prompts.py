"""From a chat to a prompt: templates that fail, that lack tools, or that would do more than render."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

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
from tinkex.wire.openai import read_chat

LIMITS = PromptLimits.of(2048, max_message_bytes=1)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    write_tiny_tokenizer(tmp_path)
    return load_tokenizer(tmp_path)


def prepare(tokenizer: Tokenizer, **fields: Any) -> Prepared:
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], **fields}
    return prepare_chat(read_chat(json.dumps(body).encode()), tokenizer, LIMITS)


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
        prepared = [prepare_chat(message, tokenizer, LIMITS)]
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
