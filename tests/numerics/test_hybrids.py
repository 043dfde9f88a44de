"""Models with recurrent layers: training and sampling give the numbers of transformers.

Their rules have two forms, in chunks and token by token, that round differently. In transformers alone
they differ by up to 1e-4 on models of this size, so sampled logprobs have that tolerance.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from numerics.helpers import (
    VOCABULARY,
    gradients,
    model_from,
    random_adapter,
    request,
    sample,
    weighted,
    work,
)
from numerics.hybrids import HYBRIDS, SHAPE, write_hybrid
from numerics.mixtures import logprobs_of
from tinkex.engine import Engine, EngineSettings
from tinkex.engine.adapters.checkpoints import from_peft_names
from tinkex.engine.adapters.memory_plan import FRACTIONS, memory_plan
from tinkex.engine.adapters.merge import find_linear, merge
from tinkex.engine.model.lora import AdapterSegment, Pair
from tinkex.wire.inputs import Datum, ModelInput
from tinkex.wire.training import AdamOptimizerConfig, LoraConfig

pytestmark = pytest.mark.filterwarnings("ignore")

ROUNDING = 2e-4


def engine_of(folder: Path, **settings: Any) -> Engine:
    settings = {"kv_tokens": 2048, **settings}
    return Engine(EngineSettings(name="hybrid", folder=folder, device="cpu", **settings))


@pytest.fixture(scope="module")
def engine_on(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Engine]:
    """An engine of a family. Shared: each test drops the models it creates."""
    root, engines = tmp_path_factory.mktemp("hybrids"), dict[str, Engine]()

    def get(family: str) -> Engine:
        if family not in engines:
            engines[family] = engine_of(write_hybrid(root / family, family))
        return engines[family]

    return get


def random_tokens(length: int, seed: int = 0) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()
    return found


def datum_of(tokens: list[int]) -> Datum:
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": np.array(tokens[1:]),
            "weights": np.ones(len(tokens) - 1, np.float32),
        },
    )


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_family_trains_and_samples_as_transformers_would(
    family: str, engine_on: Callable[[str], Engine], tmp_path: Path
) -> None:
    """Two adapters and the base model in one decode batch; several lengths in one micro-batch."""
    engine = engine_on(family)
    folder = engine.settings.folder
    adapters = [
        random_adapter(engine, tmp_path / f"adapter{rank}", rank=rank, seed=rank) for rank in (4, 1)
    ]
    merged = [merge(folder, each, tmp_path / f"merged{at}") for at, each in enumerate(adapters)]
    folders = [*(each.folder for each in merged), folder]
    prompts = [random_tokens(length) for length in (90, 7, 3)]
    answers = sample(
        engine,
        [request(prompt, samples=2, max_tokens=12, seed=1, stop=[]) for prompt in prompts],
        [*adapters, None],
    )
    rows = [
        prompt + answer.sequences[1].tokens for prompt, answer in zip(prompts, answers, strict=True)
    ]
    for prompt, answer, row, where in zip(prompts, answers, rows, folders, strict=True):
        expected = logprobs_of(where, row).numpy()[len(prompt) - 1 :]
        np.testing.assert_allclose(answer.sequences[1].logprobs_np, expected, atol=ROUNDING)

    model_from(engine, "m", adapters[0])
    output = engine.run_pass("m", work([datum_of(row) for row in rows]), backward=True)
    engine.drop("m")
    for row, found in zip(rows, output.loss_fn_outputs, strict=True):
        expected = logprobs_of(folders[0], row).numpy()
        np.testing.assert_allclose(found["logprobs"].to_numpy(), expected, atol=ROUNDING)


@pytest.mark.parametrize("family", ["Qwen3_5Text", "Qwen3Next", "NemotronH"])
def test_gradients_are_those_of_autograd_through_merged_weights(
    family: str, engine_on: Callable[[str], Engine], tmp_path: Path
) -> None:
    """Also of the projections that share one linear layer."""
    engine = engine_on(family)
    adapter = random_adapter(engine, tmp_path / "adapter", rank=3)
    datum = weighted(np.random.default_rng(3), 70)
    model_from(engine, "m", adapter)
    engine.run_pass("m", work([datum]), backward=True)
    found = gradients(engine, "m", tmp_path / "snapshot")
    engine.drop("m")

    leaves = {
        name: tensor.requires_grad_()
        for name, tensor in load_file(adapter / "adapter_model.safetensors").items()
        if ".experts." not in name
    }
    # The adapters of experts have their own tests; here they are part of the weights.
    merged = merge(engine.settings.folder, adapter, tmp_path / "merged").folder
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(
        merged, experts_implementation="eager"
    )
    modules = dict(reference.named_modules())
    weights: dict[str, torch.Tensor] = {}
    for name, (A, B) in from_peft_names(leaves).items():
        linear, columns = find_linear(modules, name)
        (path,) = [path for path, module in modules.items() if module is linear]
        current = weights.get(f"{path}.weight", linear.weight.detach())
        change = 32 / 3 * B @ A
        change = change - change.detach()  # it is in the merged weights already
        if columns is not None:
            mask = torch.zeros(current.shape, dtype=torch.bool)
            columns.of(mask).fill_(True)
            change = torch.zeros(current.shape).masked_scatter(mask, change)
        weights[f"{path}.weight"] = current + change
    tokens = torch.tensor([datum.model_input.to_ints()])
    logits = torch.func.functional_call(reference, weights, (tokens,)).logits[0]
    targets = torch.from_numpy(datum.loss_fn_inputs["target_tokens"].to_numpy())
    factors = torch.from_numpy(datum.loss_fn_inputs["weights"].to_numpy())
    (-(factors * logits.log_softmax(-1).gather(1, targets[:, None])[:, 0])).sum().backward()
    assert any(
        name.endswith((".in_proj_q.lora_A.weight", ".x_proj.lora_A.weight")) for name in leaves
    )
    for name, leaf in leaves.items():
        assert leaf.grad is not None, name
        assert leaf.grad.any(), name
        assert float((found[name] - leaf.grad).norm()) < 5e-4 * float(leaf.grad.norm()), name


@pytest.mark.parametrize("family", HYBRIDS)
def test_packed_sequences_are_computed_as_if_alone(
    family: str, engine_on: Callable[[str], Engine]
) -> None:
    """Lengths around the chunks of the rule and the taps of the convolution."""
    engine = engine_on(family)
    rows = [random_tokens(length, seed=length) for length in (65, 2, 130, 66, 4, 3, 64)]
    engine.create("m", LoraConfig(rank=2, seed=0), AdamOptimizerConfig())
    together = engine.run_pass("m", work([datum_of(row) for row in rows]), backward=False)
    for row, found in zip(rows, together.loss_fn_outputs, strict=True):
        (alone,) = engine.run_pass("m", work([datum_of(row)]), backward=False).loss_fn_outputs
        np.testing.assert_allclose(
            found["logprobs"].to_numpy(), alone["logprobs"].to_numpy(), atol=1e-5
        )
    engine.drop("m")


@pytest.mark.parametrize("family", ["Qwen3_5Text", "NemotronH"])
def test_prefix_hits_chunks_and_preemption_change_no_result(
    family: str, engine_on: Callable[[str], Engine], tmp_path: Path
) -> None:
    """A small cache with few states, against an engine that runs one request after another."""
    folder = engine_on(family).settings.folder
    small = engine_of(folder, kv_tokens=400, max_sequences=4)
    large = engine_of(folder, prefix_cache=False)
    adapter = random_adapter(large, tmp_path / "adapter")
    shared = random_tokens(100)
    prompts = [shared, shared, [*shared, 5, 6, 7], [*shared[:50], *random_tokens(30, seed=1)]]
    prompts += [[*shared[:50], *random_tokens(40, seed=2)], [*shared[:50], 9], [8, 9]]
    requests = [request(prompt, samples=3, max_tokens=30, seed=4, stop=[]) for prompt in prompts]
    adapters = [None, None, None, adapter, adapter, adapter, None]
    found = sample(small, requests, adapters)
    assert max(answer.prompt_cache_hit_tokens or 0 for answer in found) >= 96
    for one, which, answer in zip(requests, adapters, found, strict=True):
        (alone,) = sample(large, [one], [which])
        for mine, wanted in zip(answer.sequences, alone.sequences, strict=True):
            assert mine.tokens == wanted.tokens
            np.testing.assert_allclose(mine.logprobs_np, wanted.logprobs_np, atol=ROUNDING)


def test_adapters_are_those_of_the_hosted_service(engine_on: Callable[[str], Engine]) -> None:
    """Separate q, k, v and z, and neither gates nor the convolution."""
    wanted = [f"in_proj_{letter}" for letter in "kqvz"] + ["out_proj"]
    for family in ("Qwen3_5Text", "Qwen3_5MoeText", "Qwen3Next"):
        targets = [each for each in engine_on(family).model.targets if ".linear_attn." in each.name]
        own = [each for each in targets if ".layers.0." in each.name]
        assert sorted(each.name.rpartition(".")[2] for each in own) == wanted
        assert {each.kind for each in targets} == {"attn"}
        sizes = {each.name.rpartition(".")[2]: (each.inputs, each.outputs) for each in own}
        assert sizes == {
            "in_proj_q": (32, 16),
            "in_proj_k": (32, 16),
            "in_proj_v": (32, 48),
            "in_proj_z": (32, 48),
            "out_proj": (48, 32),
        }


def test_adapters_of_mamba_are_those_of_the_hosted_service(
    engine_on: Callable[[str], Engine],
) -> None:
    """The gate and x of one joint layer. Experts without a gate have no w3."""
    kinds: dict[str, dict[str, set[str]]] = {}
    for each in engine_on("NemotronH").model.targets:
        layer, _, name = each.name.removeprefix("model.layers.").partition(".")
        kinds.setdefault(layer, {}).setdefault(each.kind, set()).add(name.removeprefix("mixer."))
    assert kinds["0"] == {"attn": {"gate_proj", "x_proj", "out_proj"}}
    assert kinds["1"] == {
        "mlp": {
            *(f"experts.w{n}" for n in (1, 2)),
            *(f"shared_experts.{n}_proj" for n in ("up", "down")),
        }
    }
    assert kinds["2"] == {"attn": {"q_proj", "k_proj", "v_proj", "o_proj"}}
    assert kinds["3"] == {"mlp": {"up_proj", "down_proj"}}


def test_an_adapter_changes_only_its_own_projection(engine_on: Callable[[str], Engine]) -> None:
    """The columns of a joint layer, against weights with the product added to its rows."""
    model = engine_on("Qwen3Next").model
    net: Any = model._decoder.layers[0].linear_attn
    layer = net.in_proj_qkvz
    x = torch.randn(1, 5, 32)
    (name,) = [each for each in layer.projections if each.endswith("in_proj_k")]
    pair = Pair(torch.randn(2, 32), torch.randn(16, 2), 0.5, None, None)
    try:
        model._context.tokens = 5
        before = layer(x)
        model._context.segments = [AdapterSegment(1, 4, {name: pair})]
        after = layer(x)
    finally:
        model._context.segments, model._context.tokens = (), None
    parts = [
        net.fix_query_key_value_ordering(each, x.new_zeros(1, 5, 8)) for each in (before, after)
    ]
    for at, (one, other) in enumerate(zip(*parts, strict=True)):
        if at == 1:
            change = 0.5 * x[0, 1:4] @ pair.A_RI.t() @ pair.B_OR.t()
            assert torch.allclose((other - one)[0, 1:4].flatten(1), change, atol=1e-5)
            assert not (other - one)[0, [0, 4]].any()
        else:
            assert torch.equal(one, other)


def test_the_text_part_of_a_hybrid_with_images_is_served(tmp_path: Path) -> None:
    tower = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2} | {
        "patch_size": 4,
        "out_hidden_size": 32,
    }
    config = transformers.Qwen3_5Config(text_config=SHAPE, vision_config=tower)
    torch.manual_seed(0)
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "m")
    engine = engine_of(tmp_path / "m")
    assert not any("visual" in target.name for target in engine.model.targets)
    (answer,) = sample(engine, [request([5, 6, 7], max_tokens=5, seed=1, stop=[])])
    assert len(answer.sequences[0].tokens) == 5


def test_states_are_planned(engine_on: Callable[[str], Engine]) -> None:
    engine = engine_on("Qwen3_5Text")
    # Three layers: 4 heads of 8 by 12 numbers, and 3 inputs of 80 channels; 4 bytes each.
    assert engine.model.state_bytes == 3 * 4 * (4 * 8 * 12 + 3 * 80)
    assert engine.plan.states == 2 * engine.settings.max_sequences
    assert f"{engine.plan.states} recurrent states" in engine.plan.table()
    few = memory_plan(
        total=20_000,
        base=1_000,
        reserved=0,
        activation_bytes_per_token=10,
        max_batch_tokens=100,
        kv_bytes_per_token=10,
        max_kv_tokens=1_000,
        fractions=FRACTIONS["cpu"],
        state_bytes=500,
        max_states=512,
    )
    # Half of the cache's quarter of 19,000 bytes.
    assert (few.states, few.kv_tokens) == (4, 275)
    assert sum(size for _, size in few.parts) == few.total
