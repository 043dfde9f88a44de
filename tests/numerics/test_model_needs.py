"""What a model needs is known before it is loaded: predictions against loaded models and engines."""

import contextlib
import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from numerics.hybrids import HYBRIDS, write_hybrid
from numerics.mixtures import MIXTURES, write_mixture
from numerics.pictures import IMAGE_MODELS, write_image_model
from numerics.test_families import SERVED, write_model
from tinkex.engine import Engine, EngineSettings
from tinkex.engine.adapters.memory_plan import DoesNotFit, plan_memory
from tinkex.engine.adapters.model_needs import predicted_needs, read_shape
from tinkex.engine.engine import measured_needs
from tinkex.engine.model.base_model import BaseModel
from tinkex.engine.model.image_models import IMAGE_TYPES
from tinkex.engine.model.model_shape import ModelShape, UnknownShape
from tinkex.engine.model.stacked_weights import StackedWeights
from tinkex.engine.model.targets import text_name
from tinkex.engine.model.tower_shape import IMAGE_TOKENS
from tinkex.engine.model_fit import Candidate, smallest_total, trained
from tinkex.engine.ranks.divided_shape import fitting_counts
from tinkex.models.line_up import line_up, tensors_of
from tinkex.models.weight_file_checks import tensor_shapes

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16

#: Families whose files differ in form, each in one of the formats.
FORMS = {
    "Llama": FLOAT32,
    "Qwen3": BFLOAT16,
    "Gemma3Text": BFLOAT16,  # tied, four norms in a layer
    "Phi3": FLOAT32,  # fused projections
    "GPTNeoX": FLOAT32,  # other names, no gate
    "Youtu": BFLOAT16,  # MLA
    "Qwen3Moe": FLOAT32,  # a matrix for each expert
    "Mixtral": BFLOAT16,  # other names
    "GraniteMoe": FLOAT32,  # a tensor for all experts
    "Qwen2Moe": BFLOAT16,  # a shared expert with a gate
    "GptOss": BFLOAT16,  # transposed, with biases
    "DeepseekV3": FLOAT32,  # MLA, a dense layer first
    "HunYuanMoEV1": FLOAT32,  # a router below another name
    "Qwen3Next": BFLOAT16,  # joint projections of recurrent layers
    "NemotronH": FLOAT32,  # Mamba 2, layers without attention, experts without a gate
    "Qwen2_5_VL": FLOAT32,  # a vision tower
    "Qwen3VL": BFLOAT16,  # whose features go to several layers
    "Qwen3_5Moe": FLOAT32,  # beside recurrent layers
}


def written(family: str, folder: Path) -> Path:
    if family in MIXTURES:
        return write_mixture(folder, family)
    if family in HYBRIDS:
        return write_hybrid(folder, family)
    if family in IMAGE_MODELS:
        return write_image_model(folder, family)
    return write_model(folder, family, **SERVED[family])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FORMS)
def test_the_needs_of_a_model_are_known_before_it_is_loaded(family: str, tmp_path: Path) -> None:
    folder, dtype = written(family, tmp_path), FORMS[family]
    shape = read_shape(folder)
    predicted = predicted_needs(shape, device="cpu", element=dtype.itemsize)
    model = BaseModel(folder, device=torch.device("cpu"), dtype=dtype)
    found = measured_needs(model)
    # Buffers such as the frequencies of rotations are in no file.
    assert found.weights == pytest.approx(predicted.weights, rel=1e-3, abs=1000)
    # What autograd keeps is estimated.
    estimated = predicted.activation_bytes_per_token / found.activation_bytes_per_token
    assert 0.7 < estimated < 1.3
    names = ("vocabulary", "context", "kv_bytes_per_token", "image_bytes_per_token", "state_bytes")
    for name in (*names, "adapter_numbers"):
        assert getattr(found, name) == getattr(predicted, name), name
    assert (found.image_bytes_per_token > 0) == (family in IMAGE_MODELS)
    sizes = [
        sorted((each.kind, each.shape_A(8), each.shape_B(8)) for each in targets)
        for targets in (model.targets, shape.targets)
    ]
    assert sizes[0] == sizes[1]
    stacked = None
    if model.vision is None:
        stacked = StackedWeights.of(model._decoder, model._embed, model.head)
    assert shape.packed == (None if stacked is None else stacked.shape)


#: A type of the line-up and a tiny model of it.
TYPES = {
    "llama": "Llama",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "gpt_oss": "GptOss",
    "qwen3_5": "Qwen3_5",
    "qwen3_5_moe": "Qwen3_5Moe",
    "deepseek_v3": "DeepseekV3",
    "qwen3_vl_moe": "Qwen3VLMoe",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", TYPES.values())
def test_weights_of_the_line_up_have_the_sizes_of_files(family: str, tmp_path: Path) -> None:
    folder = written(family, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    if family in IMAGE_MODELS:
        # The line-up has the keys of the text part beside those of the whole model.
        own = {key: config[key] for key in ("vision_config", "tie_word_embeddings")}
        config = config["text_config"] | own
    of_files = read_shape(folder)
    computed = ModelShape.of(config, tensors_of(config), images=family in IMAGE_MODELS)
    assert computed.tower == of_files.tower
    assert computed.all_parameters == of_files.all_parameters
    assert computed.cached_numbers == of_files.cached_numbers
    assert computed.state_bytes(2) == of_files.state_bytes(2)
    names = [sorted(text_name(repr(one)) for one in each.targets) for each in (computed, of_files)]
    assert names[0] == names[1]
    assert trained(computed) == trained(of_files)


def test_the_line_up_has_the_sizes_that_are_published() -> None:
    for model in line_up():
        if model.config is None:
            continue
        assert model.type in TYPES, "add a family whose files it is compared with"
        shape = Candidate.of_line_up(model).shape
        assert shape is not None
        if model.gigabytes is not None:
            # The tower of Qwen3.5 is assumed, and that of its smallest model may be smaller.
            most = 1.04 if model.type == "qwen3_5" else 1.01
            assert 0.93 < 2e-9 * shape.all_parameters / model.gigabytes < most, model.name


def test_images_are_planned_for_every_model_of_the_line_up_that_reads_them() -> None:
    """As the engine does, which loads the tower: or what just fits would not."""
    for model in line_up():
        shape = Candidate.of_line_up(model).shape
        if shape is not None:
            needs = predicted_needs(shape, device="cuda", element=2)
            plan = plan_memory(needs, EngineSettings(name="m", folder=Path()), free=10**13)
            assert (plan.images > 10**9) == (model.type in IMAGE_TYPES), model.name


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_the_memory_that_is_said_to_be_needed_is_what_the_engine_plans(gpus: int) -> None:
    """With what it reserves for logits and images, on each of the GPUs."""
    settings = EngineSettings(name="m", folder=Path())
    for shape in filter(None, (Candidate.of_line_up(model).shape for model in line_up())):
        if gpus not in fitting_counts(shape, gpus):
            continue
        needs = predicted_needs(shape, device="cuda", element=2, gpus=gpus)
        both = needs.training_adapter + needs.sampler_adapter
        beside = smallest_total(needs, settings, adapters=both) - needs.weights
        images = IMAGE_TOKENS["cuda"] * needs.image_bytes_per_token
        assert beside - both > 3 * 10**9 + images
        plan = plan_memory(needs, settings, free=beside)
        assert 0 <= plan.adapters - both < 100
        assert plan_memory(needs, settings, free=beside + 10**7).adapters >= both
        with contextlib.suppress(DoesNotFit):
            assert plan_memory(needs, settings, free=beside - 10**7).adapters < both


def test_adapters_of_the_line_up_have_the_sizes_that_the_official_cookbook_counts() -> None:
    recorded = json.loads((Path(__file__).parents[1] / "data" / "adapter_sizes.json").read_text())
    compared = 0
    for model in line_up():
        shape = Candidate.of_line_up(model).shape
        if shape is None or model.name not in recorded["weights"]:
            continue
        counts = dict.fromkeys(("attn", "mlp", "unembed"), 0)
        for target in shape.targets:
            rank = recorded["rank"]
            counts[target.kind] += math.prod(target.shape_A(rank)) + math.prod(target.shape_B(rank))
        assert counts == recorded["weights"][model.name], model.name
        compared += 1
    assert compared >= 25


def test_words_for_models_without_published_sizes_are_those_of_their_family(tmp_path: Path) -> None:
    known = {model.type: trained(Candidate.of_line_up(model).shape) for model in line_up() if model.config}  # type: ignore[arg-type]  # fmt: skip
    nemotron = trained(read_shape(written("NemotronH", tmp_path)))
    known["nemotron_h"] = nemotron.replace(", MLP (up down)", "")  # of a tiny model only
    for model in line_up():
        if model.config is None and model.refused is None:
            assert model.trained == known[model.type], model.name


@pytest.mark.parametrize("family", ["Qwen3", "Qwen3Moe"])
def test_the_plan_of_an_engine_is_the_predicted_one(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tinkex.engine")
    folder = written(family, tmp_path)
    settings = EngineSettings(name="m", folder=folder, device="cpu", memory_bytes=100_000_000)
    needs = predicted_needs(read_shape(folder), device="cpu", element=4)
    predicted = plan_memory(needs, settings, free=10**12)
    plan = Engine(settings).plan
    assert plan.base == pytest.approx(predicted.base, rel=1e-3)
    assert plan.reserved == pytest.approx(predicted.reserved, rel=1e-3)
    assert plan.kv_tokens == predicted.kv_tokens
    assert plan.adapters == pytest.approx(predicted.adapters, rel=0.1)
    assert (plan.training_adapter, plan.sampler_adapter) == (
        predicted.training_adapter,
        predicted.sampler_adapter,
    )
    lines = [record.getMessage() for record in caplog.records]
    begin = next(at for at, line in enumerate(lines) if line.startswith("needs of m in float32"))
    assert lines[begin + 1 : begin + 6] == needs.table().splitlines()
    assert lines[begin + 6].startswith("memory: ")  # planned after it was loaded
    assert lines[-1] == f"adapters: {plan.adapters_text()}"


def write_headers(folder: Path, config: dict[str, Any]) -> Path:
    """A folder without weights: the header of its file is all that there is."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    header = json.dumps(
        {
            name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]}
            for name, shape in tensors_of(config).items()
        }
    ).encode()
    file = folder / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    return folder


def test_a_model_that_cannot_fit_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    (config,) = (
        model.config
        for model in line_up()
        if model.name == "Qwen/Qwen3-30B-A3B" and model.config is not None
    )
    folder = write_headers(tmp_path / "m", dict(config))
    settings: dict[str, Any] = {"name": "m", "folder": folder, "device": "cpu"}
    with pytest.raises(DoesNotFit) as refused:
        Engine(EngineSettings(**settings, dtype="bfloat16", memory_bytes=10**9))
    message = str(refused.value)
    assert message.startswith("in bfloat16 it needs at least ")
    # The output projection is in float32 on a CPU.
    assert "the weights take 61.7 GB" in message
    assert "with an adapter of rank 32 on all layers in training and for sampling" in message
    assert message.endswith("--memory-gb allows 1.0 GB.")
    assert "or serve a smaller model (`tinkex models` lists what fits)" in refused.value.hint
    with pytest.raises(DoesNotFit) as refused:
        Engine(EngineSettings(**settings, memory_bytes=10**9))
    assert "the weights take 122.1 GB" in str(refused.value)


def test_mxfp4_is_counted_as_the_matrices_that_are_loaded() -> None:
    (config,) = (
        model.config
        for model in line_up()
        if model.name == "openai/gpt-oss-20b" and model.config is not None
    )
    tensors = tensors_of(config)
    packed: dict[str, tuple[int, ...]] = {}
    for name, shape in tensors.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = shape
            packed[f"{name}_blocks"] = (experts, outputs, inputs // 32, 16)
            packed[f"{name}_scales"] = (experts, outputs, inputs // 32)
        else:
            packed[name] = shape
    plain, found = ModelShape.of(config, tensors), ModelShape.of(config, packed)
    assert found.all_parameters == plain.all_parameters
    assert found.targets == plain.targets


def test_a_folder_with_the_same_weights_twice_is_counted_once(tmp_path: Path) -> None:
    folder = written("Llama", tmp_path / "m")
    once = read_shape(folder)
    header = (
        b'{"layers.0.attention.wq.weight":{"dtype":"F32","shape":[32,32],"data_offsets":[0,0]}}'
    )
    other = folder / "consolidated.safetensors"
    other.write_bytes(len(header).to_bytes(8, "little") + header)
    assert read_shape(folder) == once
    # The same with an index.
    names = dict.fromkeys(tensor_shapes(folder), "part-1.safetensors")
    (folder / "model.safetensors").rename(folder / "part-1.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    assert read_shape(folder) == once


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_hidden_layers": 9}, "of 9 layers, 2 were found"),
        ({"num_hidden_layers": None}, "config.json has num_hidden_layers = None"),
        ({"max_position_embeddings": "many"}, "config.json has max_position_embeddings = 'many'"),
        ({"kv_lora_rank": 8}, "unusual sizes .KeyError.'qk_nope_head_dim'"),
        ({"num_attention_heads": 0, "head_dim": None}, "num_attention_heads = 0, not a positive"),
        ({"num_key_value_heads": "two", "head_dim": [1]}, "unusual sizes .TypeError"),
    ],
)
def test_sizes_that_cannot_be_read_say_what_is_missing(
    change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    folder = written("Llama", tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UnknownShape, match=says):
        read_shape(folder)
