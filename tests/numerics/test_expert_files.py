"""Files of adapters for experts: other programs' layouts are read and written, wrong ones refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from numerics.helpers import VOCABULARY, model_from, random_adapter, request, sample, work
from numerics.hybrids import HYBRIDS, write_hybrid
from numerics.mixtures import engine_of, logprobs_of, write_mixture
from numerics.test_mixtures import datum_of
from tinkex.cli.command_group import command
from tinkex.engine import Engine
from tinkex.engine.adapters.checkpoints import from_peft_names, read_adapter
from tinkex.engine.adapters.merge import merge
from tinkex.models.tiny_model import write_tiny_tokenizer
from tinkex.wire.errors import UserFailure
from tinkex.wire.training import AdamOptimizerConfig, AdamParams, LoraConfig

pytestmark = pytest.mark.filterwarnings("ignore")

TOLERANCE = 1e-5

Tensors = dict[str, torch.Tensor]
Folders = Callable[[str], Path]
Engines = Callable[[str], Engine]


def test_files_have_tinker_s_layout(qwen_mixture: Engine, tmp_path: Path) -> None:
    adapter = random_adapter(qwen_mixture, tmp_path / "adapter", rank=4)
    shapes = {
        name.removeprefix("base_model.model.model.layers.1.mlp.experts."): [*tensor.shape]
        for name, tensor in load_file(adapter / "adapter_model.safetensors").items()
        if "layers.1.mlp" in name
    }
    assert shapes == {
        "w1.lora_A.weight": [1, 4, 32],
        "w1.lora_B.weight": [6, 16, 4],
        "w3.lora_A.weight": [1, 4, 32],
        "w3.lora_B.weight": [6, 16, 4],
        "w2.lora_A.weight": [6, 4, 16],
        "w2.lora_B.weight": [1, 32, 4],
    }


def changed(adapter: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of an adapter with other tensors."""
    target.mkdir()
    (target / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    change(tensors)
    save_file(
        {name: each.contiguous() for name, each in tensors.items()},
        target / "adapter_model.safetensors",
    )
    return target


FIRST = "base_model.model.model.layers.0.mlp.experts."


@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss"])
def test_an_archive_in_hosted_names_loads(family: str, mixture_on: Engines, tmp_path: Path) -> None:
    engine = mixture_on(family)
    adapter = random_adapter(engine, tmp_path / "adapter", rank=4)

    def rename(tensors: Tensors) -> None:
        for name in list(tensors):
            new = name.replace(".self_attn.", ".attn.")
            new = new.replace(".lm_head.", ".model.unembed_tokens.")
            tensors[new] = tensors.pop(name)

    hosted = changed(adapter, tmp_path / "hosted", rename)
    model_from(engine, "m", hosted)
    engine.save("m", tmp_path / "again", optimizer=False)
    engine.drop("m")
    ours, again = (
        load_file(tmp_path / at / "adapter_model.safetensors") for at in ("adapter", "again")
    )
    assert ours.keys() == again.keys()
    assert all(torch.equal(ours[name], again[name]) for name in ours)
    prompt = request([5, 6, 7], max_tokens=3, seed=1, stop=[])
    of_ours, of_hosted = sample(engine, [prompt, prompt], [adapter, hosted])
    assert of_ours.sequences[0].tokens == of_hosted.sequences[0].tokens
    np.testing.assert_allclose(
        of_ours.sequences[0].logprobs_np, of_hosted.sequences[0].logprobs_np, atol=TOLERANCE
    )


def test_names_of_layers_are_those_of_the_model_whatever_others_call_them() -> None:
    """Of the text part of an image model, and of a model whose own names are unusual."""
    A, B = torch.ones(2, 4), torch.ones(6, 2)

    def names(module: str, known: list[str]) -> list[str]:
        tensors = {
            f"base_model.model.{module}.lora_{x}.weight": y for x, y in {"A": A, "B": B}.items()
        }
        return [*from_peft_names(tensors, known)]

    own = ["model.layers.0.self_attn.q_proj", "lm_head"]
    assert names("model.language_model.layers.0.attn.q_proj", own) == own[:1]
    assert names("language_model.model.layers.0.self_attn.q_proj", own) == own[:1]
    assert names("language_model.lm_head", own) == own[1:]
    unusual = ["model.language_model.layers.0.attn.q_proj"]
    assert names(unusual[0], unusual) == unusual
    assert names(own[0], unusual) == unusual


def test_an_empty_w3_of_experts_without_a_gate_is_ignored() -> None:
    pairs = {"w1": ((1, 4, 8), (3, 6, 4)), "w3": ((0,), (0,)), "w2": ((3, 4, 6), (1, 8, 4))}
    found = from_peft_names(
        {
            f"{FIRST}{part}.lora_{letter}.weight": torch.ones(shape)
            for part, shapes in pairs.items()
            for letter, shape in zip("AB", shapes, strict=True)
        }
    )
    assert {name.rpartition(".")[2] for name in found} == {"w1", "w2"}


# -- other programs -------------------------------------------------------------------------------


def export(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(command, ["export", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def equal_pairs(left: Path, right: Path) -> bool:
    ours, theirs = read_adapter(left).pairs, read_adapter(right).pairs
    return ours.keys() == theirs.keys() and all(
        torch.equal(a, b)
        for name, pair in ours.items()
        for a, b in zip(pair, theirs[name], strict=True)
    )


def check_peft(engine: Engine, folder: Path, where: Path, tolerance: float) -> None:
    """An exported adapter gives the engine's logprobs in PEFT."""
    from peft import PeftModel

    adapter = random_adapter(engine, where / "adapter", rank=3)
    # All that it needs of the base model: no weights.
    (where / "config").mkdir()
    shutil.copy(folder / "config.json", where / "config")
    status, output = export(
        adapter, "--as", "peft", "--base", where / "config", "-o", where / "exported"
    )
    assert status == 0, output
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, 24).tolist()
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model = PeftModel.from_pretrained(base, where / "exported")
    with torch.no_grad():
        logprobs = model(torch.tensor([tokens[:-1]])).logits[0].log_softmax(-1)
    theirs = logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    np.testing.assert_allclose(logprobs_with(engine, adapter, tokens), theirs, atol=tolerance)


def logprobs_with(engine: Engine, adapter: Path, tokens: list[int]) -> npt.NDArray[np.float32]:
    model_from(engine, "m", adapter)
    (output,) = engine.run_pass("m", work([datum_of(tokens)]), backward=False).loss_fn_outputs
    engine.drop("m")
    return output["logprobs"].to_numpy()


@pytest.mark.parametrize("family", ["Qwen2Moe", "Qwen3Moe", "Mixtral", "GptOss", "DeepseekV3"])
def test_peft_opens_an_exported_adapter(
    family: str, mixture_on: Engines, mixture_folder: Folders, tmp_path: Path
) -> None:
    engine = mixture_on(family)
    check_peft(engine, mixture_folder(family), tmp_path, TOLERANCE)
    # And the layout is read.
    assert equal_pairs(tmp_path / "exported", tmp_path / "adapter")
    ours, again = (
        logprobs_with(engine, tmp_path / name, [5, 6, 7, 8]) for name in ("adapter", "exported")
    )
    np.testing.assert_array_equal(ours, again)


@pytest.mark.parametrize("family", [name for name in HYBRIDS if name != "NemotronH"])
def test_peft_opens_an_adapter_of_projections_that_one_layer_makes(
    family: str, tmp_path: Path
) -> None:
    folder = write_hybrid(tmp_path / "model", family)
    write_tiny_tokenizer(folder)
    # Packed and unpacked, the rule of recurrent layers rounds differently.
    check_peft(engine_of(folder), folder, tmp_path, 1e-4)
    config = json.loads((tmp_path / "exported" / "adapter_config.json").read_text())
    joint = {"in_proj_qkvz": 12} if family == "Qwen3Next" else {"in_proj_qkv": 9}
    assert joint.items() <= config["rank_pattern"].items()


def test_peft_gets_no_adapter_of_mamba_layers(tmp_path: Path) -> None:
    folder = write_hybrid(tmp_path / "model", "NemotronH")
    write_tiny_tokenizer(folder)
    adapter = random_adapter(engine_of(folder), tmp_path / "adapter", rank=3)
    status, output = export(adapter, "--as", "peft", "--base", folder, "-o", tmp_path / "out")
    assert status == 1
    assert "Use --as hf: a full model" in output


def exported_for_vllm(
    family: str, engine: Engine, folder: Path, where: Path
) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """The config of an exported adapter of rank 4, and the shapes of the first layer's tensors."""
    adapter = random_adapter(engine, where / "adapter", rank=4)
    status, output = export(adapter, "--as", "vllm", "--base", folder, "-o", where / "exported")
    assert status == 0, output
    config = json.loads((where / "exported" / "adapter_config.json").read_text())
    assert config["lora_alpha"] / config["r"] == 32 / 4
    assert f"--max-lora-rank {config['r']}" in output
    prefix = "base_model.model.model.layers.0."
    return config, {
        name.removeprefix(prefix): [*tensor.shape]
        for name, tensor in load_file(where / "exported" / "adapter_model.safetensors").items()
        if name.startswith(prefix)
    }


def test_vllm_gets_a_pair_for_each_expert(
    qwen_mixture: Engine, mixture_folder: Folders, tmp_path: Path
) -> None:
    config, shapes = exported_for_vllm(
        "Qwen3Moe", qwen_mixture, mixture_folder("Qwen3Moe"), tmp_path
    )
    expected = {}
    for expert in range(6):
        for part, (inputs, outputs) in {
            "gate_proj": (32, 16),
            "up_proj": (32, 16),
            "down_proj": (16, 32),
        }.items():
            expected[f"mlp.experts.{expert}.{part}.lora_A.weight"] = [4, inputs]
            expected[f"mlp.experts.{expert}.{part}.lora_B.weight"] = [outputs, 4]
    assert {name: shape for name, shape in shapes.items() if "experts" in name} == expected
    assert {"down_proj", "gate_proj", "q_proj", "up_proj"} < {*config["target_modules"]}
    assert equal_pairs(tmp_path / "exported", tmp_path / "adapter")


def test_vllm_gets_one_pair_for_all_experts_of_gpt_oss(
    mixture_on: Engines, mixture_folder: Folders, tmp_path: Path
) -> None:
    """All layers have the rank of gate and up together; the rest are zeros."""
    config, shapes = exported_for_vllm(
        "GptOss", mixture_on("GptOss"), mixture_folder("GptOss"), tmp_path
    )
    assert config["r"] == 8
    assert {name: shape for name, shape in shapes.items() if "experts" in name} == {
        "mlp.experts.base_layer.lora_A.weight": [4 * 8, 32],
        "mlp.experts.base_layer.lora_B.weight": [96, 8 * 4],
        "mlp.experts.lora_A.weight": [4 * 8, 48],
        "mlp.experts.lora_B.weight": [32, 8 * 4],
    }
    ours = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    theirs = load_file(tmp_path / "exported" / "adapter_model.safetensors")
    expert = 2
    A, B = (theirs[f"{FIRST}lora_{letter}.weight"] for letter in "AB")
    A_RI, B_OR = A.view(4, 8, 48)[expert], B.view(32, 8, 4)[:, :, expert]
    w2 = [ours[f"{FIRST}w2.lora_{letter}.weight"] for letter in "AB"]
    torch.testing.assert_close(B_OR @ A_RI, w2[1][0] @ w2[0][expert])
    query = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    torch.testing.assert_close(
        theirs[f"{query}B.weight"] @ theirs[f"{query}A.weight"],
        ours[f"{query}B.weight"] @ ours[f"{query}A.weight"],
    )


def test_an_export_for_vllm_of_an_unknown_family_says_what_to_do(
    mixture_on: Engines, mixture_folder: Folders, tmp_path: Path
) -> None:
    folder = mixture_folder("DeepseekV3")
    adapter = random_adapter(mixture_on("DeepseekV3"), tmp_path / "adapter", rank=2)
    status, output = export(adapter, "--as", "vllm", "--base", folder, "-o", tmp_path / "out")
    assert status == 1
    assert "not for deepseek_v3" in output
    assert "Use --as hf" in output
    assert [each.name for each in tmp_path.iterdir()] == ["adapter"]


def test_an_export_with_another_base_model_is_refused(
    qwen_mixture: Engine, mixture_folder: Folders, tmp_path: Path
) -> None:
    adapter = random_adapter(qwen_mixture, tmp_path / "adapter", rank=2)
    other = mixture_folder("Mixtral")
    status, output = export(adapter, "--as", "peft", "--base", other, "-o", tmp_path / "out")
    assert status == 1
    assert "experts.w1 has matrices" in output


def test_a_pair_for_each_expert_loads_if_one_factor_is_equal(
    qwen_mixture: Engine, mixture_folder: Folders, tmp_path: Path
) -> None:
    exported_for_vllm("Qwen3Moe", qwen_mixture, mixture_folder("Qwen3Moe"), tmp_path)
    expanded = tmp_path / "exported"

    def differ(tensors: Tensors) -> None:
        tensors[f"{FIRST}2.up_proj.lora_A.weight"] += 1

    with pytest.raises(UserFailure, match=r"another lora_A for each expert of .*experts\.w3"):
        read_adapter(changed(expanded, tmp_path / "differ", differ))

    def lose(tensors: Tensors) -> None:
        for letter in "AB":
            tensors.pop(f"{FIRST}2.up_proj.lora_{letter}.weight")

    with pytest.raises(UserFailure, match=r"has 5 experts for .*, but none with number 2"):
        read_adapter(changed(expanded, tmp_path / "lose", lose))

    def mix(tensors: Tensors) -> None:
        name = f"{FIRST}2.up_proj.lora_A.weight"
        tensors[name] = tensors[name].half()

    with pytest.raises(UserFailure, match=r"experts\.w3 have matrices of different shapes or for"):
        read_adapter(changed(expanded, tmp_path / "mix", mix))

    def both(tensors: Tensors) -> None:
        tensors[f"{FIRST}w3.lora_A.weight"] = torch.ones(1, 4, 32)
        tensors[f"{FIRST}w3.lora_B.weight"] = torch.ones(6, 16, 4)

    with pytest.raises(UserFailure, match=r"experts\.w3 in two layouts"):
        read_adapter(changed(expanded, tmp_path / "both", both))


def _another_A_for_each_expert(tensors: Tensors) -> None:
    tensors[f"{FIRST}base_layer.lora_A.weight"][3] += 1


def _one_A_for_gate_and_up(tensors: Tensors) -> None:
    tensors[f"{FIRST}base_layer.lora_B.weight"] += 1


def _only_one_parameter(tensors: Tensors) -> None:
    for letter in "AB":
        del tensors[f"{FIRST}base_layer.lora_{letter}.weight"]


def _another_rank(tensors: Tensors) -> None:
    name = f"{FIRST}base_layer.lora_A.weight"
    tensors[name] = tensors[name][:-1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_another_A_for_each_expert, r"another lora_A for each expert of .*experts\.w[13]"),
        (_one_A_for_gate_and_up, r"experts\.base_layer has one lora_A for gate and up"),
        (_only_one_parameter, r"adapts only one of the parameters of .*mlp\.experts"),
        (_another_rank, r"experts\.base_layer has .*which are no stacks .* of rank 8"),
    ],
)
def test_wrong_stacks_of_experts_are_refused_by_name(
    change: Callable[[Tensors], None],
    message: str,
    qwen_mixture: Engine,
    mixture_folder: Folders,
    tmp_path: Path,
) -> None:
    adapter = random_adapter(qwen_mixture, tmp_path / "adapter", rank=4)
    folder = mixture_folder("Qwen3Moe")
    status, output = export(adapter, "--as", "peft", "--base", folder, "-o", tmp_path / "exported")
    assert status == 0, output
    wrong = changed(tmp_path / "exported", tmp_path / "wrong", change)
    with pytest.raises(UserFailure, match=message):
        read_adapter(wrong)


# -- wrong files ----------------------------------------------------------------------------------


def _drop_half(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{FIRST}w3.lora_B.weight"]


def _both_shared(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{FIRST}w1.lora_B.weight"] = tensors[f"{FIRST}w1.lora_B.weight"][:1]


def _none_shared(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{FIRST}w2.lora_B.weight"] = tensors[f"{FIRST}w2.lora_B.weight"].repeat(6, 1, 1)


def _fewer_experts(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{FIRST}w2.lora_A.weight"] = tensors[f"{FIRST}w2.lora_A.weight"][:4]


def _integers(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{FIRST}w2.lora_A.weight"] = tensors[f"{FIRST}w2.lora_A.weight"].int()


def _flat(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{FIRST}w2.lora_B.weight"] = tensors[f"{FIRST}w2.lora_B.weight"][0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop_half, r"only one of lora_A and lora_B for .*layers\.0\.mlp\.experts\.w3"),
        (_both_shared, r"experts\.w1 has shapes .*both factors are shared"),
        (_none_shared, r"experts\.w2 .*lora_B must be shared by all experts"),
        (_fewer_experts, r"experts\.w2 has matrices \[4, 4, 16\] and \[32, 4\]"),
        (_integers, r"experts\.w2\.lora_A\.weight has numbers of type torch\.int32"),
        (_flat, r"experts\.w2 has matrices of shape \[6, 4, 16\] and \[32, 4\]; only"),
    ],
)
def test_wrong_tensors_are_refused_by_name(
    change: Callable[[dict[str, torch.Tensor]], None],
    message: str,
    qwen_mixture: Engine,
    tmp_path: Path,
) -> None:
    adapter = random_adapter(qwen_mixture, tmp_path / "adapter", rank=4)
    wrong = changed(adapter, tmp_path / "wrong", change)
    qwen_mixture.create("m", LoraConfig(rank=4), AdamOptimizerConfig())
    with pytest.raises(UserFailure, match=message):
        qwen_mixture.load("m", wrong, optimizer=False)
    with pytest.raises(UserFailure, match=message):
        sample(qwen_mixture, [request([1, 2, 3], max_tokens=2)], [wrong])


@pytest.mark.parametrize("kind", ["m", "v"])
def test_moments_of_another_shape_change_nothing(
    kind: str, qwen_mixture: Engine, tmp_path: Path
) -> None:
    qwen_mixture.create("m", LoraConfig(rank=4), AdamOptimizerConfig())
    qwen_mixture.run_pass("m", work([datum_of([5, 6, 7, 8, 9])]), backward=True)
    qwen_mixture.optim_step("m", AdamParams(learning_rate=1e-2))
    qwen_mixture.save("m", tmp_path / "saved", optimizer=True)
    file = tmp_path / "saved" / "optimizer.safetensors"
    tensors = load_file(file)
    name = f"{kind}:{FIRST}w2.lora_A.weight"
    tensors[name] = tensors[name][:2].clone()
    save_file(tensors, file, metadata={"optimizer": "adamw"})
    qwen_mixture.create("other", LoraConfig(rank=4, seed=9), AdamOptimizerConfig())
    before = qwen_mixture._adapters["other"].master.clone()
    with pytest.raises(UserFailure, match=r"its optimizer state: .*experts\.w2 has matrices"):
        qwen_mixture.load("other", tmp_path / "saved", optimizer=True)
    assert torch.equal(qwen_mixture._adapters["other"].master, before)


# -- MXFP4 ----------------------------------------------------------------------------------------

#: The numbers of four bits.
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def write_mxfp4(folder: Path, plain: Path) -> None:
    """Writes random experts in MXFP4 to one folder, and their numbers in bfloat16 to the other."""
    write_mixture(plain, "GptOss", intermediate_size=32)
    config = json.loads((plain / "config.json").read_text()) | {"dtype": "bfloat16"}
    (plain / "config.json").write_text(json.dumps(config))
    tensors = {
        name: tensor.bfloat16() for name, tensor in load_file(plain / "model.safetensors").items()
    }
    packed = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors[name].shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(119, 124, blocks.shape[:3], dtype=torch.uint8)
        numbers = E2M1[torch.stack([blocks & 15, blocks >> 4], dim=-1).long()]
        numbers = numbers.flatten(3) * 2.0 ** (scales.float().unsqueeze(3) - 127)
        tensors[name] = numbers.flatten(2).mT.bfloat16().contiguous()
        del packed[name]
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    shutil.copytree(plain, folder)
    save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    }
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_folder_in_mxfp4_is_the_same_model_as_its_numbers_in_bfloat16(
    dtype: str, tmp_path: Path
) -> None:
    write_mxfp4(tmp_path / "mxfp4", tmp_path / "plain")
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, 12).tolist()
    found = []
    for name in ("mxfp4", "plain"):
        engine = engine_of(tmp_path / name, dtype=dtype)
        engine.create("m", LoraConfig(rank=2, seed=1), AdamOptimizerConfig())
        engine.run_pass("m", work([datum_of(tokens)]), backward=True)
        engine.optim_step("m", AdamParams(learning_rate=1e-2))
        (output,) = engine.run_pass("m", work([datum_of(tokens)]), backward=False).loss_fn_outputs
        found.append(output["logprobs"].to_numpy())
    np.testing.assert_array_equal(found[0], found[1])
    # A merged model has plain numbers, and says so.
    adapter = random_adapter(engine, tmp_path / "adapter", rank=2)
    ours, theirs = (
        merge(tmp_path / name, adapter, tmp_path / f"merged-{name}") for name in ("mxfp4", "plain")
    )
    assert "quantization_config" not in json.loads((ours.folder / "config.json").read_text())
    torch.testing.assert_close(
        logprobs_of(ours.folder, tokens), logprobs_of(theirs.folder, tokens), atol=0, rtol=0
    )
