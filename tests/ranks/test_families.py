"""Which model families are divided, and what the others are told."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from numerics.helpers import random_adapter, request, sample, weighted, work
from numerics.hybrids import CALM, HYBRIDS, write_hybrid
from numerics.mixtures import MIXTURES, write_mixture
from numerics.pictures import HYBRIDS as IMAGE_HYBRIDS
from numerics.pictures import IMAGE_MODELS, datum_of, picture, text, write_image_model
from numerics.test_families import SERVED, write_model
from numerics.test_quantized_folders import write_fp8
from ranks.ranked import ranked
from ranks.test_agreement import PARAMS, assert_close, assert_same_sample, create, outputs, tensors
from tinkex.engine import Engine
from tinkex.engine.adapters.model_needs import predicted_needs, read_shape
from tinkex.engine.engine import measured_needs
from tinkex.engine.model.unsupported import UnsupportedModel
from tinkex.engine.ranks.divided_shape import fitting_counts
from tinkex.engine.ranks.loading import load_shard
from tinkex.models.families import FAMILIES
from tinkex.models.weight_file_checks import RefusedFolder
from tinkex.wire.errors import UserFailure
from tinkex.wire.inputs import ImageChunk, ModelInput
from tinkex.wire.sampling import SampleRequest, SamplingParams

DIVIDED = sorted(SERVED.keys() - {"Llama", "Qwen3"})  # these have tests of their own


#: On more ranks than there are key heads: several have the same one.
ON_FOUR = {"Phi3", "Olmo2", "Qwen3Moe"}
#: Files whose numbers are multiplied by scales when a part is read.
IN_FP8 = {"Qwen2", "Qwen3Moe"}
#: Mixtures and hybrids have factors with a matrix for each expert, Phi 3 one for three projections.
WITH_DIMUON = {*MIXTURES, *HYBRIDS, "Phi3"}


def draw_vectors(folder: Path) -> None:
    """Norms of heads and biases begin equal, so that a wrong part of them would not be seen."""
    generator = torch.Generator().manual_seed(1)
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if name.endswith(("q_norm.weight", "k_norm.weight", "_proj.bias")):
                tensor += torch.rand(tensor.shape, generator=generator) / 2
        save_file(tensors, path, metadata={"format": "pt"})


def test_the_table_of_families_says_which_are_divided() -> None:
    assert {family.name for family in FAMILIES if family.divided} == {
        *(*DIVIDED, *MIXTURES, *HYBRIDS, *IMAGE_MODELS, "Llama", "Qwen3"),
    }


def train(one: Engine, two: Engine, adapter: Path, data: Any) -> None:
    """A pass of the model `m` with this adapter: both have the same outputs and gradients."""
    for engine in (one, two):
        create(engine, "m")
        engine.load("m", adapter, optimizer=False)
    assert_close(*(outputs(engine, "m", data, backward=True) for engine in (one, two)))
    assert_close(*(tensors(engine, "m") for engine in (one, two)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", [*DIVIDED, *MIXTURES, *HYBRIDS])
def test_a_family_computes_the_same_on_several_ranks(family: str, tmp_path: Path) -> None:
    if family in MIXTURES:
        folder = write_mixture(tmp_path / "model", family)
    elif family in HYBRIDS:
        folder = write_hybrid(tmp_path / "model", family, **CALM)
    else:
        folder = write_model(tmp_path / "model", family, **SERVED[family])
    draw_vectors(folder)
    if family in IN_FP8:
        plain, folder = folder, tmp_path / "fp8"
        write_fp8(folder, plain, block=8)
    ranks = 4 if family in ON_FOUR else 2
    # The rules of recurrent layers work in chunks of 64 tokens.
    lengths = (70, 7) if family in HYBRIDS else (20, 7)
    data = work([weighted(np.random.default_rng(0), length) for length in lengths])
    with ranked(folder, 1) as one, ranked(folder, ranks) as two:
        adapter = random_adapter(one, tmp_path / "adapter")
        train(one, two, adapter, data)
        assert_close(*(engine.optim_step("m", PARAMS["adamw"]) for engine in (one, two)))
        assert_close(*(tensors(engine, "m") for engine in (one, two)))
        if family in WITH_DIMUON:
            for engine in (one, two):
                create(engine, "d", "dimuon")
                engine.run_pass("d", data, backward=True)
            assert_close(*(engine.optim_step("d", PARAMS["dimuon"]) for engine in (one, two)))
            assert_close(*(tensors(engine, "d") for engine in (one, two)))
        asked = [request([5, 6, 7, 8], samples=2, max_tokens=12, seed=1, stop=[])]
        (first,), (second,) = (sample(engine, asked, [adapter]) for engine in (one, two))
        assert_same_sample(first, second)
        # What is predicted before a model is loaded is what it takes, on each rank.
        needs = predicted_needs(read_shape(folder), device="cpu", element=4, gpus=ranks)
        found = measured_needs(two.model)
        for name in ("kv_bytes_per_token", "state_bytes", "adapter_numbers"):
            assert getattr(needs, name) == getattr(found, name), name
        if family in HYBRIDS:
            assert 2 * found.state_bytes == measured_needs(one.model).state_bytes > 0
        # Beside tables of positions, and biases, which are predicted whole.
        assert needs.weights == pytest.approx(found.weights, rel=0.02)


@pytest.fixture
def refused(tmp_path: Path) -> Any:
    def get(folder: Path, ranks: int = 2) -> str:
        with pytest.raises(UnsupportedModel) as error, ranked(folder, ranks):
            pass
        return str(error.value)

    return get


def test_a_number_of_gpus_that_does_not_divide_the_heads_is_refused_with_the_numbers(
    refused: Any, models: dict[str, Path]
) -> None:
    message = refused(models["qwen3"], 3)
    assert "4 attention heads and 2 key heads cannot be divided over 3 GPUs" in message
    assert "--gpus-per-replica 1 or 2 or 4." in message
    assert fitting_counts(read_shape(models["qwen3"]), 8) == [1, 2, 4]


@pytest.mark.filterwarnings("ignore")
def test_heads_of_recurrent_layers_are_divided_whole(refused: Any, tmp_path: Path) -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    folder = write_hybrid(tmp_path / "delta", "Qwen3_5Text", **heads)
    message = refused(folder, 4)
    assert "4 key heads and 2 key heads of recurrent layers cannot be divided over 4" in message
    assert "--gpus-per-replica 1 or 2." in message
    assert fitting_counts(read_shape(folder), 8) == [1, 2]
    folder = write_hybrid(tmp_path / "mamba", "NemotronH", n_groups=1, **heads)
    message = refused(folder)
    assert "4 Mamba heads and 1 groups of them cannot be divided over 2 GPUs" in message
    assert fitting_counts(read_shape(folder), 8) == [1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", IMAGE_MODELS)
def test_images_are_read_as_by_one_rank(family: str, tmp_path: Path) -> None:
    calm = CALM if family in IMAGE_HYBRIDS else {}
    folder = write_image_model(tmp_path / "model", family, **calm)
    draw_vectors(folder)
    rows = [
        (text(9, 1), picture(3, 5, 1), text(4, 2)),
        (picture(4, 4, 2), text(1), picture(2, 6, 3), text(30, 4)),
        (text(7, 3),),
    ]
    data = work([datum_of(row) for row in rows])
    with ranked(folder, 1) as one, ranked(folder, 2) as two:
        adapter = random_adapter(one, tmp_path / "adapter")
        train(one, two, adapter, data)
        asked = [
            SampleRequest(
                prompt=ModelInput(list(row)),
                num_samples=2,
                sampling_params=SamplingParams(max_tokens=12, seed=1, stop=[]),
            )
            for row in rows
        ]
        which = [adapter, None, adapter]
        for answers in zip(*(sample(engine, asked, which) for engine in (one, two)), strict=True):
            assert_same_sample(*answers)
        refused = ImageChunk(data=b"no image", format="png", expected_tokens=3)
        for engine in (one, two):
            with pytest.raises(UserFailure):
                engine.run_pass("m", work([datum_of((refused, text(5)))]), backward=True)
        needs = predicted_needs(read_shape(folder), device="cpu", element=4, gpus=2)
        found = measured_needs(two.model)
        for name in ("kv_bytes_per_token", "adapter_numbers", "image_bytes_per_token"):
            assert getattr(needs, name) == getattr(found, name), name
        assert needs.weights == pytest.approx(found.weights, rel=0.03)
        for engine in (one, two):
            assert engine.images is not None
            engine.images.close()


@pytest.mark.filterwarnings("ignore")
def test_other_files_are_refused(refused: Any, tmp_path: Path, models: dict[str, Path]) -> None:
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "config.json").write_text((models["llama"] / "config.json").read_text())
    (tmp_path / "gguf" / "model.gguf").write_bytes(b"GGUF")
    assert "only safetensors" in refused(tmp_path / "gguf")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("images", [True, False])
def test_a_matrix_in_fp8_that_ends_within_a_block_is_refused(images: bool, tmp_path: Path) -> None:
    """Also of the text part of a model that is served without its images."""
    plain = write_image_model(tmp_path / "plain", "Qwen3_5")
    write_fp8(tmp_path / "fp8", plain, block=24)
    if not images:
        (tmp_path / "fp8" / "preprocessor_config.json").unlink()
    group: Any = SimpleNamespace(rank=0, size=2)
    with pytest.raises(RefusedFolder, match="its last block is not a whole one"):
        load_shard(tmp_path / "fp8", torch.float32, torch.device("cpu"), group)


def test_a_wrong_division_is_found_before_the_engine_is_ready(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, refused: Any
) -> None:
    """The first layers are compared with transformers' own."""
    from tinkex.engine.ranks import layers

    plain = layers.connect

    def broken(decoder_layers: Any, shard: Any) -> None:
        plain(decoder_layers, shard)
        decoder_layers[0].self_attn.o_proj.weight.mul_(1.5)

    monkeypatch.setattr(layers, "connect", broken)
    assert "do not compute qwen3 models correctly" in refused(models["qwen3"])
