"""The official `openai` package, unmodified, against a base model and a trained checkpoint."""

import asyncio
import json
import os
import re
import shutil
import signal
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

import tinkex
from processes import children
from serving import TINY, Server, serving
from tinkex import types
from waiting import until

DATA = Path(__file__).resolve().parents[1] / "data"
QUESTION = [{"role": "user", "content": "What is 2 + 3?"}]
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


class Person(BaseModel):
    name: Literal["Ann", "Bob"]
    age: int = Field(ge=0, le=99)


@dataclass
class World:
    """A server, and what was trained on it."""

    server: Server
    service: tinkex.ServiceClient
    #: A checkpoint that answers `QUESTION` with a tool call.
    path: str

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.server.url}/v1", api_key="x", max_retries=0)

    def metric(self, name: str) -> float:
        """Its value; -1 if no engine has reported it yet."""
        with urllib.request.urlopen(f"{self.server.url}/metrics") as page:
            found = re.search(rf"^{name}(?:{{[^}}]*}})? (\S+)$", page.read().decode(), re.MULTILINE)
        return -1.0 if found is None else float(found[1])


@pytest.fixture(scope="module")
def world(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("openai")
    model = shutil.copytree(tiny_model, folder / "model")
    shutil.copy(DATA / "chat_templates" / "hermes.jinja", model / "chat_template.jinja")
    with (
        serving(f"{TINY}={model}", data=folder / "data") as server,
        tinkex.ServiceClient(base_url=server.url) as service,
    ):
        yield World(server, service, trained_to_call(service))


def trained_to_call(service: tinkex.ServiceClient) -> str:
    training = service.create_lora_training_client(TINY, rank=8, seed=3)
    tokenizer: Any = training.get_tokenizer()
    prompt = tokenizer.apply_chat_template(
        QUESTION, tools=[ADD], add_generation_prompt=True, return_dict=False
    )
    tokens = [*prompt, *tokenizer.encode(f"{CALL}<|im_end|>", add_special_tokens=False)]
    weights = [0.0] * (len(prompt) - 1) + [1.0] * (len(tokens) - len(prompt))
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
    )
    for _ in range(60):
        training.forward_backward([datum], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    return training.save_weights_for_sampler("calls").result().path


def test_models_are_the_base_model_and_the_checkpoint(world: World) -> None:
    listed = world.client.models.list().data
    assert [model.id for model in listed] == [TINY, world.path]
    assert listed[1].created > 1_700_000_000
    assert world.client.models.retrieve(world.path).id == world.path
    with pytest.raises(openai.NotFoundError):
        world.client.models.retrieve("tinker://none/sampler_weights/none")


@pytest.mark.parametrize("checkpoint", [False, True])
def test_tokens_and_logprobs_are_those_of_a_sampling_client(world: World, checkpoint: bool) -> None:
    model = world.path if checkpoint else TINY
    tinker = world.service.create_sampling_client(
        model_path=world.path if checkpoint else None, base_model=None if checkpoint else TINY
    )
    tokenizer: Any = tinker.get_tokenizer()
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
    params = types.SamplingParams(max_tokens=24, seed=5, temperature=0.8, top_p=0.95)
    expected = tinker.sample(
        types.ModelInput.from_ints(prompt), 2, params, topk_sample_logprobs=2
    ).result(30)
    asked: dict[str, Any] = {
        "model": model,
        "messages": QUESTION,
        "n": 2,
        "max_completion_tokens": 24,
        "seed": 5,
        "temperature": 0.8,
        "top_p": 0.95,
        "logprobs": True,
        "top_logprobs": 2,
        "extra_body": {"return_token_ids": True},
    }
    answer = world.client.chat.completions.create(**asked)
    streamed: dict[int, list[Any]] = {0: [], 1: []}
    texts = {0: "", 1: ""}
    for chunk in world.client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            streamed[choice.index] += choice.logprobs.content if choice.logprobs else []
    for choice, sequence in zip(answer.choices, expected.sequences, strict=True):
        extra: Any = choice.model_extra
        assert extra["token_ids"] == sequence.tokens
        assert extra["prompt_token_ids"] == prompt
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        found = [one.logprob for one in choice.logprobs.content]
        assert found == pytest.approx(sequence.logprobs, rel=1e-4, abs=1e-5)
        tops = [[top.logprob for top in one.top_logprobs] for one in choice.logprobs.content]
        assert sequence.topk_logprobs is not None
        for ours, theirs in zip(tops, sequence.topk_logprobs, strict=True):
            assert ours == pytest.approx([pair[1] for pair in theirs or ()], rel=1e-4, abs=1e-5)
        assert choice.message.content == tokenizer.decode(sequence.tokens, skip_special_tokens=True)
        assert texts[choice.index] == choice.message.content
        assert [one.token for one in streamed[choice.index]] == [
            one.token for one in choice.logprobs.content
        ]
        assert choice.finish_reason == sequence.stop_reason
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == sum(len(one.tokens) for one in expected.sequences)


def test_a_stop_text_ends_the_answer_and_is_not_in_it(world: World) -> None:
    asked: dict[str, Any] = {"model": world.path, "messages": QUESTION, "temperature": 0}
    asked |= {"tools": [ADD], "tool_choice": "auto", "max_tokens": 60, "stop": ['"a": 2']}
    answer = world.client.chat.completions.create(**asked)
    cut = CALL.partition('"a": 2')[0]
    assert answer.choices[0].message.content == cut
    assert answer.choices[0].finish_reason == "stop"
    stream = world.client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    said = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(said) == cut
    assert chunks[-1].usage
    assert answer.usage
    assert chunks[-1].usage.total_tokens == answer.usage.total_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_trained_checkpoint_calls_a_tool(world: World) -> None:
    asked: dict[str, Any] = {"model": world.path, "messages": QUESTION, "temperature": 0}
    asked |= {"tools": [ADD], "max_tokens": 100}
    answer = world.client.chat.completions.create(**asked).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    (call,) = answer.message.tool_calls or ()
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 2, "b": 3})
    with world.client.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion().choices[0]
    (streamed,) = final.message.tool_calls or ()
    assert streamed.function.arguments == call.function.arguments
    assert final.finish_reason == "tool_calls"
    # The call and its result go back as they came.
    said = answer.message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": call.id, "content": "5"}
    again = world.client.chat.completions.create(
        **{**asked, "messages": [*QUESTION, said, result], "max_tokens": 2}
    )
    assert again.usage is not None
    assert again.usage.prompt_tokens > 60


def test_a_required_call_and_a_json_schema_hold_for_a_random_model(world: World) -> None:
    required = world.client.chat.completions.create(
        model=TINY,
        messages=QUESTION,  # type: ignore[arg-type]
        tools=[_bounded_tool()],
        tool_choice={"type": "function", "function": {"name": "pick"}},
        seed=1,
        max_tokens=100,
    ).choices[0]
    (call,) = required.message.tool_calls or ()
    assert 0 <= json.loads(call.function.arguments)["number"] <= 9  # type: ignore[union-attr]
    for seed in range(3):
        parsed = world.client.chat.completions.parse(
            model=TINY,
            messages=QUESTION,  # type: ignore[arg-type]
            response_format=Person,
            seed=seed,
            max_tokens=100,
        ).choices[0]
        assert parsed.message.parsed is not None
        assert parsed.finish_reason == "stop"


def _bounded_tool() -> Any:
    number = {"type": "integer", "minimum": 0, "maximum": 9}
    schema = {
        "type": "object",
        "properties": {"number": number},
        "required": ["number"],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": "pick", "parameters": schema}}


def test_completions_return_logprobs_of_prompt_and_answer(world: World) -> None:
    tinker = world.service.create_sampling_client(base_model=TINY)
    tokenizer: Any = tinker.get_tokenizer()
    prompt = tokenizer.encode("the ship sails")
    scored = tinker.compute_logprobs(types.ModelInput.from_ints(prompt)).result(30)
    answer = world.client.completions.create(
        model=TINY, prompt=["the ship sails", "a cat"], max_tokens=0, echo=True, logprobs=1
    )
    assert [choice.text for choice in answer.choices] == ["the ship sails", "a cat"]
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.token_logprobs is not None
    assert found.token_logprobs[0] is None  # type: ignore[comparison-overlap]
    assert found.token_logprobs[1:] == pytest.approx(scored[1:], rel=1e-4, abs=1e-5)
    assert "".join(found.tokens or ()) == "the ship sails"
    biased = world.client.completions.create(
        model=TINY, prompt=prompt, max_tokens=5, logit_bias={"77": 100}
    )
    assert biased.choices[0].text == tokenizer.decode([77] * 5)


@pytest.mark.parametrize(
    ("penalty", "expected"),
    [({"presence_penalty": 2}, [0, 2, 2]), ({"frequency_penalty": 2}, [0, 2, 4])],
)
def test_penalties_are_taken_from_tokens_of_the_answer(
    world: World, penalty: dict[str, float], expected: list[float]
) -> None:
    def leads(**fields: float) -> list[float]:
        """How far token 77, which is always sampled, is before the second best."""
        answer = world.client.completions.create(
            model=TINY,
            prompt=[77, 5],
            max_tokens=3,
            temperature=0,
            logit_bias={"77": 20},
            logprobs=2,
            extra_body=fields,
        )
        found = answer.choices[0].logprobs
        assert found is not None
        return [max(top.values()) - min(top.values()) for top in found.top_logprobs or ()]

    lost = [before - after for before, after in zip(leads(), leads(**penalty), strict=True)]
    assert lost == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("asked", "status", "param"),
    [
        ({"model": "nobody"}, 404, "model"),
        ({"model": "tinker://x/sampler_weights/y"}, 404, "model"),
        ({"extra_body": {"min_p": 0.1}}, 400, "min_p"),
        ({"functions": [{"name": "f"}]}, 400, "functions"),
        ({"n": 0}, 400, "n"),
        ({"stop": 5}, 400, "stop"),
        ({"max_tokens": 100_000}, 400, None),
        ({"messages": []}, 400, "messages"),
        ({"reasoning_effort": "low"}, 400, "reasoning_effort"),
        ({"tool_choice": "sometimes", "tools": [ADD]}, 400, "tool_choice"),
        ({"response_format": {"type": "xml"}}, 400, "response_format"),
        ({"response_format": {"type": "json_object"}, "tools": [ADD]}, 400, "response_format"),
    ],
)
def test_a_refused_request_names_the_field(
    world: World, asked: dict[str, Any], status: int, param: str | None
) -> None:
    request: Any = {"model": TINY, "messages": QUESTION, "max_tokens": 4, **asked}
    with pytest.raises(openai.APIStatusError) as refused:
        world.client.chat.completions.create(**request)
    assert (refused.value.status_code, refused.value.param) == (status, param)


def test_fields_without_an_effect_are_ignored(world: World) -> None:
    world.client.chat.completions.create(
        model=TINY,
        messages=QUESTION,  # type: ignore[arg-type]
        max_tokens=2,
        user="u",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        extra_body={"some_new_field": 1},
    )


def test_three_hundred_streams_at_once_are_all_complete(world: World) -> None:
    async def run() -> list[tuple[str, str | None]]:
        client = openai.AsyncOpenAI(
            base_url=f"{world.server.url}/v1", api_key="x", max_retries=0, timeout=120
        )

        async def one(seed: int) -> tuple[str, str | None]:
            text, reason = "", None
            stream = await client.completions.create(
                model=world.path if seed % 2 else TINY,
                prompt="the ship",
                max_tokens=12,
                seed=seed,
                stream=True,
            )
            async for chunk in stream:
                text += chunk.choices[0].text
                reason = chunk.choices[0].finish_reason or reason
            return text, reason

        async with client:
            return await asyncio.gather(*(one(seed) for seed in range(300)))

    found = asyncio.run(run())
    assert all(reason in ("length", "stop") for _, reason in found)
    # The company of 299 others changes nothing.
    for seed in (0, 1, 298):
        alone = world.client.completions.create(
            model=world.path if seed % 2 else TINY, prompt="the ship", max_tokens=12, seed=seed
        )
        assert alone.choices[0].text == found[seed][0]


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_frees_the_pages_of_its_sample(world: World, stream: bool) -> None:
    def pages() -> float:
        return world.metric("tinkex_engine_kv_pages_used")

    until(lambda: pages() == 0)
    asked: dict[str, Any] = {"model": TINY, "prompt": "the ship", "max_tokens": 1900, "n": 64}
    asked |= {"logit_bias": {"2": -100}, "stream": stream}  # never the end token
    with world.client as client:
        if stream:
            answer: Any = client.completions.create(**asked)
            next(answer)
            until(lambda: pages() > 0)
            answer.close()
        else:
            with pytest.raises(openai.APITimeoutError):
                client.with_options(timeout=1.0).completions.create(**asked)
    until(lambda: pages() == 0)


def test_a_restart_in_mid_stream_ends_it_with_an_error_and_the_next_request_waits(
    world: World,
) -> None:
    (web_process,) = children(world.server.process.pid)
    # With retries, as by default: a kept connection may still lead to the process that stops.
    with world.client.with_options(max_retries=2) as client:
        stream = client.completions.create(
            model=TINY,
            prompt="the ship",
            max_tokens=1900,
            n=16,
            logit_bias={"2": -100},  # never the end token
            stream=True,
        )
        next(stream)
        os.kill(web_process, signal.SIGTERM)
        with pytest.raises(openai.APIError, match="the server is stopping"):
            list(stream)
        assert client.completions.create(model=TINY, prompt="the ship", max_tokens=2).usage
    assert children(world.server.process.pid) != [web_process]
