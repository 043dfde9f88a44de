"""`tinkex serve` on a model whose weights were changed since: the old run is refused, loudly."""

import shutil
from pathlib import Path

import pytest

import tinkex
from models.test_content_hash import flip
from serving import TINY, serving
from tinkex import types

# Three servers, one after the other.
pytestmark = pytest.mark.timeout(240)

PROMPT = types.ModelInput.from_ints([1, 2, 3])
PARAMS = types.SamplingParams(max_tokens=4, temperature=0.0, stop=[])


def flip_many(model: Path) -> None:
    """Changes the weights enough to be seen in what is sampled; the second time changes them back."""
    file = model / "model.safetensors"
    data = bytearray(file.read_bytes())
    for at in range(-4000, -2, 2):
        data[at] ^= 1
    with file.open("r+b") as opened:
        opened.write(data)
    flip(file, -2)


def test_a_run_on_weights_that_were_changed_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    data = tmp_path / "data"
    with (
        serving(f"{TINY}={model}", data=data) as server,
        tinkex.ServiceClient(base_url=server.url) as service,
    ):
        training = service.create_lora_training_client(TINY, rank=4, seed=1)
        path = training.save_weights_for_sampler("kept").result().path
        sampling = service.create_sampling_client(model_path=path)
        first = sampling.sample(PROMPT, 1, PARAMS).result().sequences[0].tokens

    flip_many(model)
    with (
        serving(f"{TINY}={model}", data=data) as server,
        tinkex.ServiceClient(base_url=server.url) as service,
    ):
        sampling = service.create_sampling_client(model_path=path)
        with pytest.raises(tinkex.RequestFailedError, match="its weights differ") as caught:
            sampling.sample(PROMPT, 1, PARAMS).result()
        assert caught.value.category == types.RequestErrorCategory.User
        training = service.create_lora_training_client(TINY, rank=4, seed=1)
        path_of_changed = training.save_weights_for_sampler("kept").result().path
    assert any("are refused. New runs are served" in line for line in server.log)

    flip_many(model)  # the first files again: the first run goes on as it was
    with (
        serving(f"{TINY}={model}", data=data, args=("--accept-changed-base",)) as server,
        tinkex.ServiceClient(base_url=server.url) as service,
    ):
        sampling = service.create_sampling_client(model_path=path)
        assert sampling.sample(PROMPT, 1, PARAMS).result().sequences[0].tokens == first
        # So does the run that was made on the files in between.
        sampling = service.create_sampling_client(model_path=path_of_changed)
        sampling.sample(PROMPT, 1, PARAMS).result()
    assert any("go on with these" in line for line in server.log)
