"""Experts over several ranks: gpt-oss in every respect, and the forms that files have."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from numerics.helpers import VOCABULARY
from numerics.mixtures import write_mixture
from numerics.test_expert_files import write_mxfp4
from ranks import test_agreement as agreement
from ranks.ranked import ranked
from ranks.test_agreement import Pair
from tinkex.engine.model import original_model
from tinkex.engine.model.targets import HEAD
from tinkex.engine.ranks.expert_parts import ExpertForm, ExpertReader, Part
from tinkex.engine.ranks.loading import find_parts, load_shard
from tinkex.engine.ranks.shard import Division, Shard
from tinkex.models.weight_file_checks import RefusedFolder

CPU = torch.device("cpu")


def tensors_of_rank(
    folder: Path, rank: int, ranks: int = 2, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """What one rank loads, without the others."""
    group: Any = SimpleNamespace(rank=rank, size=ranks)
    model, _ = load_shard(folder, dtype, CPU, group)
    found: dict[str, torch.Tensor] = model.state_dict()
    return found


def assert_equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert tensor.dtype == two[name].dtype, name
        assert torch.equal(tensor, two[name]), name


# -- gpt-oss: biases, sinks, windows, gate and up in turns -----------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """gpt-oss on one rank and on four."""
    folder = tmp_path_factory.mktemp("gpt-oss")
    write_mixture(folder, "GptOss", num_key_value_heads=4)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("bias"):  # transformers begins with zeros
            tensor.normal_(std=0.5)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with ranked(folder, 1) as one, ranked(folder, 4) as four:
        yield one, four


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "pair" in request.fixturenames:
        for engine in request.getfixturevalue("pair"):
            for model_id in [*engine._adapters._entries]:
                engine.drop(model_id)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("optimizer", ["adamw", "dimuon"])
def test_gpt_oss_trains_on_four_ranks_as_on_one(pair: Pair, optimizer: str) -> None:
    agreement.test_losses_gradients_and_steps_are_those_of_one_rank(pair, optimizer)


def test_gpt_oss_samples_on_four_ranks_as_on_one(pair: Pair, tmp_path: Path) -> None:
    agreement.test_samples_with_a_seed_are_those_of_one_rank(pair, tmp_path)


def test_checkpoints_of_gpt_oss_go_on_with_another_number_of_ranks(
    pair: Pair, tmp_path: Path
) -> None:
    agreement.test_a_checkpoint_of_any_number_of_ranks_goes_on_with_another(pair, tmp_path)


# -- files ----------------------------------------------------------------------------------------


def join_experts(folder: Path) -> None:
    """Writes the experts of each layer as one tensor, as Qwen3.5 is published."""
    tensors = load_file(folder / "model.safetensors")
    joined: dict[str, torch.Tensor] = {}
    for name in [*tensors]:
        prefix, _, leaf = name.partition(".experts.0.")
        if not leaf:
            continue
        part = leaf.removesuffix(".weight")
        count = sum(
            each.startswith(f"{prefix}.experts.") and each.endswith(leaf) for each in tensors
        )
        joined[f"{prefix}.{part}"] = torch.stack(
            [tensors[f"{prefix}.experts.{each}.{leaf}"] for each in range(count)]
        )
    assert joined
    kept = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for name, down in joined.items():
        if name.endswith("down_proj"):
            prefix = name.removesuffix(".down_proj")
            kept[f"{prefix}.experts.down_proj"] = down
            gate_up = [joined[f"{prefix}.{part}_proj"] for part in ("gate", "up")]
            kept[f"{prefix}.experts.gate_up_proj"] = torch.cat(gate_up, dim=1)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.filterwarnings("ignore")
def test_all_experts_in_one_tensor_are_cut_as_those_in_tensors_of_their_own(tmp_path: Path) -> None:
    folder = write_mixture(tmp_path, "Qwen3Moe")
    before = [tensors_of_rank(folder, rank) for rank in (0, 1)]
    join_experts(folder)
    for rank in (0, 1):
        assert_equal(tensors_of_rank(folder, rank), before[rank])
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert not torch.equal(before[0][name], before[1][name])


@pytest.mark.filterwarnings("ignore")
def test_mxfp4_is_cut_to_the_numbers_of_the_plain_folder(tmp_path: Path) -> None:
    """Also where a part ends within a group of numbers with one scale, and in files of their own."""
    write_mxfp4(tmp_path / "mxfp4", tmp_path / "plain")  # a width of 32, which is one group
    tensors = load_file(tmp_path / "mxfp4" / "model.safetensors")
    (tmp_path / "mxfp4" / "model.safetensors").unlink()
    files = {
        "model-1.safetensors": [name for name in tensors if not name.endswith("_blocks")],
        "model-2.safetensors": [name for name in tensors if name.endswith("_blocks")],
    }
    for file, names in files.items():
        save_file(
            {name: tensors[name] for name in names},
            tmp_path / "mxfp4" / file,
            metadata={"format": "pt"},
        )
    weight_map = {name: file for file, names in files.items() for name in names}
    index = tmp_path / "mxfp4" / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for rank in (0, 1):
        one, two = (
            tensors_of_rank(tmp_path / name, rank, dtype=torch.bfloat16)
            for name in ("mxfp4", "plain")
        )
        assert_equal(one, two)


@pytest.mark.filterwarnings("ignore")
def test_a_folder_in_mxfp4_is_served_by_two_ranks(tmp_path: Path) -> None:
    """Its first layers are compared with transformers' own numbers."""
    write_mxfp4(tmp_path / "mxfp4", tmp_path / "plain")
    with ranked(tmp_path / "mxfp4", 2) as engine:
        assert "quantization_config" not in engine.model.config.to_dict()


@pytest.mark.filterwarnings("ignore")
def test_what_a_router_adds_to_its_scores_is_not_rounded(tmp_path: Path) -> None:
    """transformers keeps it in float32; in bfloat16, other experts would be chosen."""
    folder = write_mixture(tmp_path, "DeepseekV3")
    whole = original_model.load(folder, torch.bfloat16).state_dict()
    own = tensors_of_rank(folder, 1, dtype=torch.bfloat16)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert whole[name].dtype == torch.float32
    assert torch.equal(own[name], whole[name])


@pytest.mark.filterwarnings("ignore")
def test_only_what_transformers_asks_for_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is on a GPU before transformers reserves the model's memory there is there twice."""
    folder = write_mixture(tmp_path, "Qwen3Moe")
    group: Any = SimpleNamespace(rank=0, size=2)
    shard = Shard(group, {HEAD: Division.of("B", VOCABULARY)})
    form = ExpertForm(6, 32, 16, gated=True, concatenated=True, transposed=False, biased=False)
    reader = ExpertReader({0: form}, rank=0, ranks=2, dtype=torch.float32, device=CPU)
    read: list[str] = []

    def noted(part: Part, index: Any) -> torch.Tensor:
        tensor = original(part, index)
        read.append(str(tuple(tensor.shape)))
        return tensor

    original = Part.__getitem__
    monkeypatch.setattr(Part, "__getitem__", noted)
    found = find_parts(folder, shard, reader, layers=1)
    assert all(isinstance(part, Part) for part in found.values())
    assert not read
    assert found["model.layers.0.mlp.experts.gate_up_proj"][...].shape == (6, 16, 32)
    assert read == ["(6, 16, 32)"]
    # A layer that only predicts further tokens has experts of 22 GB in DeepSeek-V3.
    assert not any(".layers.1." in name for name in found)


@pytest.mark.filterwarnings("ignore")
def test_missing_experts_and_other_sizes_are_refused(tmp_path: Path) -> None:
    folder = write_mixture(tmp_path, "Qwen3Moe")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.experts.2.up_proj.weight"

    def refused(changed: dict[str, torch.Tensor]) -> str:
        save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(RefusedFolder) as error:
            tensors_of_rank(folder, 0)
        return str(error.value)

    lacking = {each: tensor for each, tensor in tensors.items() if each != name}
    assert "model.layers.0.mlp.experts.gate_up_proj: they would be random" in refused(lacking)
    assert f"{name} has the sizes [15, 32], and the model needs [16, 32]" in refused(
        tensors | {name: tensors[name][:15].clone()}
    )
    assert "6.up_proj.weight, which a model of 6 experts" in refused(
        tensors | {name.replace(".2.", ".6."): tensors[name].clone()}
    )
