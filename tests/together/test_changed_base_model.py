"""`tinkex serve` with a base model whose weights have changed rejects existing runs."""

import shutil
from pathlib import Path

import pytest

import tinkex
from models.test_content_hash import flip
from serving import TINY, serving
from tinkex import types

# Starts three servers.
pytestmark = pytest.mark.timeout(240)

PROMPT = types.ModelInput.from_ints([1, 2, 3])
PARAMS = types.SamplingParams(max_tokens=4, temperature=0.0, stop=[])


def flip_many(model: Path) -> None:
    """Changes the weights so that samples differ; a second call restores them."""
    file = model / "model.safetensors"
    data = bytearray(file.read_bytes())
    for at in range(-4000, -2, 2):
        data[at] ^= 1
    with file.open("r+b") as opened:
        opened.write(data)
    flip(file, -2)


def test_a_run_on_changed_base_weights_is_rejected(tiny_model: Path, tmp_path: Path) -> None:
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

    flip_many(model)  # restored: the first run continues
    with (
        serving(f"{TINY}={model}", data=data, args=("--accept-changed-base",)) as server,
        tinkex.ServiceClient(base_url=server.url) as service,
    ):
        sampling = service.create_sampling_client(model_path=path)
        assert sampling.sample(PROMPT, 1, PARAMS).result().sequences[0].tokens == first
        # With --accept-changed-base the run that was created on the changed weights continues too.
        sampling = service.create_sampling_client(model_path=path_of_changed)
        sampling.sample(PROMPT, 1, PARAMS).result()
    assert any("continue with the new files" in line for line in server.log)
