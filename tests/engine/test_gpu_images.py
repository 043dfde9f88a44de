"""Models that read images on a GPU, against the CPU in float32; see test_gpu_families.py."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.test_gpu_families import DEVICE, Result, difference
from numerics.helpers import gradients, model_from, random_adapter, sample, work
from numerics.pictures import HYBRIDS, IMAGE_MODELS, datum_of, picture, text, write_image_model
from tinkex.engine import Engine, EngineSettings
from tinkex.wire.inputs import ModelInput
from tinkex.wire.prompt_chunks import Chunk, EncodedTextChunk
from tinkex.wire.sampling import SampleRequest, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

#: 20 + 45 + 5 tokens.
PROMPT: tuple[Chunk, ...] = (text(20, 1), picture(5, 9, 1), text(5, 2))
OPENED: list[Engine] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while OPENED:
        images = OPENED.pop().images
        if images is not None:
            images.close()


def run(
    folder: Path, adapter: Path, snapshot: Path, tokens: list[int] | None, **settings: Any
) -> Result:
    """`tokens` are the answer that is trained; by default the one that was sampled."""
    engine = Engine(
        EngineSettings(
            name="images", folder=folder, kv_tokens=2048, memory_bytes=4 << 30, **settings
        )
    )
    OPENED.append(engine)
    params = SamplingParams(max_tokens=30, seed=1, stop=[])
    request = SampleRequest(prompt=ModelInput(list(PROMPT)), num_samples=3, sampling_params=params)
    answers = sample(engine, [request, request], [adapter, None])
    sequence = answers[0].sequences[2]
    tokens = tokens or sequence.tokens
    model_from(engine, "m", adapter)
    rows = [[text(3)], [*PROMPT, EncodedTextChunk(tokens)], [picture(2, 2), text(4)]]
    output = engine.run_pass("m", work([datum_of(row) for row in rows]), backward=True)
    found = output.loss_fn_outputs[1]["logprobs"].to_numpy()[-len(tokens) :]
    return Result(tokens, sequence.logprobs_np, found, gradients(engine, "m", snapshot))


@pytest.mark.parametrize("family", IMAGE_MODELS)
def test_images_on_a_gpu_equal_the_cpu(family: str, tmp_path: Path) -> None:
    folder = write_image_model(tmp_path / "model", family)
    maker = Engine(EngineSettings(name="maker", folder=folder, device="cpu", kv_tokens=512))
    adapter = random_adapter(maker, tmp_path / "adapter")
    found = run(folder, adapter, tmp_path / "a", None, device=DEVICE, dtype="float32")
    wanted = run(folder, adapter, tmp_path / "b", found.tokens, device="cpu", dtype="float32")
    np.testing.assert_allclose(found.sampled, wanted.trained, atol=2e-3)
    np.testing.assert_allclose(found.trained, wanted.trained, atol=2e-3)
    assert difference(found.gradients, wanted.gradients) < 5e-3

    rounded = run(folder, adapter, tmp_path / "c", None, device=DEVICE, dtype="bfloat16")
    assert np.abs(rounded.sampled - rounded.trained).mean() < 5e-2
    again = run(folder, adapter, tmp_path / "d", rounded.tokens, device="cpu", dtype="float32")
    if family not in HYBRIDS:  # with random weights, rounding changes theirs by any amount
        assert np.abs(rounded.trained - again.trained).mean() < 0.15
        assert difference(rounded.gradients, again.gradients) < 0.25
