"""
Pictures train and sample with both SDKs, whatever happens to the engine.

A step is interrupted by `kill -9` of its engine, in one model for each SDK.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import sdk_envs
import tinkex
from numerics.pictures import PLACEHOLDER, write_image_model
from processes import children
from serving import Server, serving
from tinkex import types
from together.images import PROGRAM, check, write_pictures
from together.official_sdk import ACCEPTED_STATUSES, environment

pytestmark = [pytest.mark.sdk, pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]

#: The placeholder of the models, as text, for an image.
TEMPLATE = (
    "{% for part in messages[0].content %}{% if part.type == 'image' %}Whe"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}"
)
#: A dense decoder, and one with recurrent layers, which round differently in sampling.
WITHIN = {"Qwen3VL": 1e-4, "Qwen3_5": 1e-2}
#: The first is divided over two processes.
ARGS = {"Qwen3VL": ("--gpus-per-replica", "2", "--device", "cpu")}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("pictures") / "pictures.json")


@pytest.fixture(scope="module", params=WITHIN)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    family, folder = request.param, tmp_path_factory.mktemp(request.param)
    model = write_image_model(folder / "model", family)
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))
    args = ARGS.get(family, ())
    with serving(f"test/{family}={model}", data=folder / "data", args=args) as server:
        yield server


@pytest.mark.parametrize("sdk", ["0.36.0", "tinkex"])
def test_colors_are_learned_from_pictures(sdk: str, server: Server, pictures: Path) -> None:
    (family,) = {name for name in WITHIN if name in str(server.data)}
    (web,) = children(server.process.pid)
    (engine,) = children(web)
    interpreter = sys.executable if sdk == "tinkex" else sdk_envs.ensure(sdk)
    module = "tinkex" if sdk == "tinkex" else "tinker"
    killed = [str(engine)] if (sdk == "tinkex") == (family == "Qwen3_5") else []
    done = subprocess.run(
        [interpreter, PROGRAM, module, f"test/{family}", pictures, *killed],
        env=environment(server.url),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    details = f"{done.stderr[-4000:]}\nserver: {''.join(server.log[-60:])}"
    assert done.stdout, details
    assert done.returncode in ACCEPTED_STATUSES, details
    check(json.loads(done.stdout.splitlines()[-1]), pictures, within=WITHIN[family])
    assert bool(killed) == (engine not in children(web))


def test_openais_chats_take_images(server: Server, pictures: Path) -> None:
    """The same tokens as `SamplingClient.sample` gives for the same prompt."""
    (family,) = {name for name in WITHIN if name in str(server.data)}
    model = f"test/{family}"
    image = json.loads(pictures.read_text())[0]
    url = f"data:image/png;base64,{image['data']}"
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)

    def ask(url: str) -> Any:
        parts = [{"type": "text", "text": "A "}, {"type": "image_url", "image_url": {"url": url}}]
        messages: Any = [{"role": "user", "content": [*parts, {"type": "text", "text": " color"}]}]
        return client.chat.completions.create(
            model=model,
            messages=messages,
            max_tokens=5,
            temperature=0,
            logprobs=True,
            extra_body={"return_token_ids": True},
        )

    answer = ask(url)
    (choice,) = answer.choices
    places = choice.prompt_token_ids
    assert places.count(PLACEHOLDER) == image["tokens"]
    assert answer.usage.prompt_tokens == len(places)
    first = places.index(PLACEHOLDER)
    chunks = [
        types.EncodedTextChunk(tokens=places[:first]),
        types.ImageChunk(data=image["data"], format="png"),
        types.EncodedTextChunk(tokens=places[first + image["tokens"] :]),
    ]
    greedy = types.SamplingParams(max_tokens=5, temperature=0)
    with tinkex.ServiceClient(base_url=server.url) as service:
        sampler = service.create_sampling_client(base_model=model)
        prompt = types.ModelInput(chunks=chunks)
        (expected,) = (
            sampler.sample(prompt, num_samples=1, sampling_params=greedy).result().sequences
        )
    assert choice.token_ids == expected.tokens
    found = [one.logprob for one in choice.logprobs.content]
    assert found == pytest.approx(expected.logprobs, abs=WITHIN[family])
    with pytest.raises(openai.BadRequestError, match="fetches no addresses"):
        ask("https://example.org/a.png")
    with pytest.raises(openai.BadRequestError, match="the image cannot be decoded"):
        ask(url[:-60])
