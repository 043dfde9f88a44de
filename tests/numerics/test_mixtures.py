"""Mixtures of experts: training and sampling give the numbers of transformers with merged weights."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

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
from numerics.mixtures import (
    MIXTURES,
    engine_of,
    logprobs_of,
    merged_parameters,
    write_mixture,
)
from tinkex.engine import Engine
from tinkex.engine.adapters.checkpoints import from_peft_names
from tinkex.engine.adapters.merge import merge
from tinkex.engine.model import model_experts
from tinkex.engine.model.base_model import BaseModel
from tinkex.engine.model.stacked_weights import StackedWeights
from tinkex.engine.model.unsupported import UnsupportedModel
from tinkex.engine.training.expert_metrics import expert_metrics
from tinkex.wire.errors import UserFailure
from tinkex.wire.inputs import Datum, ModelInput
from tinkex.wire.training import AdamOptimizerConfig, AdamParams, DimuonParams, LoraConfig

pytestmark = pytest.mark.filterwarnings("ignore")

TOLERANCE = 1e-5


def datum_of(tokens: list[int]) -> Datum:
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": np.array(tokens[1:]),
            "weights": np.ones(len(tokens) - 1, np.float32),
        },
    )


@pytest.mark.parametrize("family", MIXTURES)
def test_a_family_trains_and_samples_as_transformers_would(
    family: str,
    mixture_on: Callable[[str], Engine],
    mixture_folder: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """Two adapters and the base model in one decode batch; both adapters in one micro-batch."""
    engine, folder = mixture_on(family), mixture_folder(family)
    adapters = [
        random_adapter(engine, tmp_path / f"adapter{rank}", rank=rank, seed=rank) for rank in (4, 1)
    ]
    merged = [merge(folder, each, tmp_path / f"merged{at}") for at, each in enumerate(adapters)]
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCABULARY, length).tolist() for length in (20, 7, 3)]
    answers = sample(
        engine,
        [request(prompt, samples=2, max_tokens=12, seed=1, stop=[]) for prompt in prompts],
        [*adapters, None],
    )
    tokens = [
        prompt + answer.sequences[1].tokens for prompt, answer in zip(prompts, answers, strict=True)
    ]
    expected = [
        logprobs_of(where, row).numpy()
        for where, row in zip([*(each.folder for each in merged), folder], tokens, strict=True)
    ]
    for prompt, answer, wanted in zip(prompts, answers, expected, strict=True):
        np.testing.assert_allclose(
            answer.sequences[1].logprobs_np, wanted[len(prompt) - 1 :], atol=TOLERANCE
        )

    data = [datum_of(row) for row in tokens[:2]]
    models = [model_from(engine, f"m{at}", each) for at, each in enumerate(adapters)]
    passes = [
        engine.begin_pass(model, work([datum]), backward=True)
        for model, datum in zip(models, data, strict=True)
    ]
    engine.run_micro_batch([(each, 1) for each in passes])
    together = [gradients(engine, model, tmp_path / f"t-{model}") for model in models]
    for at, (model, datum) in enumerate(zip(models, data, strict=True)):
        found = passes[at].output().loss_fn_outputs[0]["logprobs"].to_numpy()
        np.testing.assert_allclose(found, expected[at], atol=TOLERANCE)
        engine.clear_gradients(model)
        engine.run_pass(model, work([datum]), backward=True)
        alone = gradients(engine, model, tmp_path / f"a-{model}")
        for name, wanted in alone.items():
            assert wanted.any(), name
            scale = max(1.0, float(wanted.abs().max()))
            assert float((together[at][name] - wanted).abs().max()) < TOLERANCE * scale, name
        engine.drop(model)
    experts = [name for name in together[0] if ".experts." in name]
    assert len(experts) == 6 * len(engine.model.experts)
    assert not [
        name for name in together[0] if re.search(r"gate\.|router|shared_expert_gate", name)
    ]


def test_gradients_of_a_whole_model_are_those_of_autograd(
    qwen_mixture: Engine, tmp_path: Path
) -> None:
    """Against autograd through transformers' eager experts, in which A and B are merged."""
    import transformers

    adapter = random_adapter(qwen_mixture, tmp_path / "adapter", rank=3)
    datum = weighted(np.random.default_rng(3), 25)
    model_from(qwen_mixture, "m", adapter)
    qwen_mixture.run_pass("m", work([datum]), backward=True)
    found = gradients(qwen_mixture, "m", tmp_path / "snapshot")

    leaves = {
        name: tensor.requires_grad_()
        for name, tensor in load_file(adapter / "adapter_model.safetensors").items()
    }
    model = transformers.AutoModelForCausalLM.from_pretrained(
        qwen_mixture.settings.folder, experts_implementation="eager"
    )
    merged = merged_parameters(model, from_peft_names(leaves), 32 / 3)
    tokens = torch.tensor([datum.model_input.to_ints()])
    logits = torch.func.functional_call(model, merged, (tokens,)).logits[0]
    targets = torch.from_numpy(datum.loss_fn_inputs["target_tokens"].to_numpy())
    weights = torch.from_numpy(datum.loss_fn_inputs["weights"].to_numpy())
    (-(weights * logits.log_softmax(-1).gather(1, targets[:, None])[:, 0])).sum().backward()
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        largest = max(1.0, float(leaf.grad.abs().max()))
        assert float((found[name] - leaf.grad).abs().max()) < 2e-5 * largest, name


#: Of adapters in one micro-batch: ranks that need padding on a GPU, and every choice of layers.
LORAS = {
    "rank1": LoraConfig(rank=1, seed=1),
    "rank7": LoraConfig(rank=7, seed=2),
    "no-experts": LoraConfig(rank=4, seed=3, train_mlp=False),
    "experts": LoraConfig(rank=3, seed=4, train_attn=False, train_unembed=False),
    "output": LoraConfig(rank=2, seed=5, train_attn=False, train_mlp=False),
    "rank8": LoraConfig(rank=8, seed=6),
}


def test_adapters_of_any_kind_share_a_micro_batch(qwen_mixture: Engine, tmp_path: Path) -> None:
    """Each gets the gradient that it gets alone, and in micro-batches of one datum."""
    rng = np.random.default_rng(7)
    data = {name: [weighted(rng, length) for length in (6, 1, 9)] for name in LORAS}
    for name, lora in LORAS.items():
        qwen_mixture.create(name, lora, AdamOptimizerConfig())
        # So that B is not zero.
        qwen_mixture.run_pass(name, work(data[name]), backward=True)
        qwen_mixture.optim_step(name, AdamParams(learning_rate=1e-2))
    alone = {}
    for name in LORAS:
        qwen_mixture.run_pass(name, work(data[name]), backward=True)
        alone[name] = gradients(qwen_mixture, name, tmp_path / f"alone-{name}")
        qwen_mixture.clear_gradients(name)
    passes = [
        qwen_mixture.begin_pass(name, work(rows), backward=True) for name, rows in data.items()
    ]
    for count in (1, 2):
        qwen_mixture.run_micro_batch([(each, count) for each in passes])
    for name in LORAS:
        found = gradients(qwen_mixture, name, tmp_path / f"mixed-{name}")
        assert found.keys() == alone[name].keys()
        for key, wanted in alone[name].items():
            scale = max(1.0, float(wanted.abs().max()))
            assert float((found[key] - wanted).abs().max()) < TOLERANCE * scale, (name, key)


def test_the_same_work_gives_the_same_bits(qwen_mixture: Engine) -> None:
    data = [weighted(np.random.default_rng(8), length) for length in (30, 11)]
    weights = []
    for name in ("first", "second"):
        qwen_mixture.create(name, LoraConfig(rank=5, seed=1), AdamOptimizerConfig())
        for _ in range(3):
            qwen_mixture.run_pass(name, work(data), backward=True)
            qwen_mixture.optim_step(name, AdamParams(learning_rate=1e-2))
        weights.append(qwen_mixture._adapters[name].master)
    assert torch.equal(weights[0], weights[1])


def test_an_adapter_that_was_evicted_to_disk_comes_back_bit_for_bit(qwen_mixture: Engine) -> None:
    for name in ("kept", "evicted"):
        qwen_mixture.create(name, LoraConfig(rank=3, seed=1), AdamOptimizerConfig())
        qwen_mixture.run_pass(name, work([datum_of([5, 6, 7, 8, 9])]), backward=True)
        qwen_mixture.optim_step(name, AdamParams(learning_rate=1e-2))
        qwen_mixture.run_pass(name, work([datum_of([9, 8, 7, 6])]), backward=True)
    store = qwen_mixture._adapters
    store._to_disk("evicted", store._entries["evicted"])
    assert not store.on_device("evicted")
    kept, evicted = store["kept"], store["evicted"]
    assert evicted.grad.any()
    for vector in ("master", "m", "v", "grad", "live"):
        assert torch.equal(getattr(kept, vector), getattr(evicted, vector)), vector


@pytest.mark.parametrize("family", ["Qwen3Moe", "DeepseekV3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_broken_adapter_disturbs_nobody(
    family: str, dtype: str, mixture_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Its numbers are infinite in 16 bits, so its routers see NaN; the others are not its tenants."""
    engine = engine_of(mixture_folder(family), dtype=dtype)
    good = random_adapter(engine, tmp_path / "good", rank=4)
    bad = random_adapter(engine, tmp_path / "bad", rank=2, seed=3)
    tensors = load_file(bad / "adapter_model.safetensors")
    for name, tensor in tensors.items():
        if "lora_B" in name:
            tensor.fill_(3.4e38)
    save_file(tensors, bad / "adapter_model.safetensors")
    one = request([5, 6, 7, 8], max_tokens=5, samples=2, seed=1, stop=[])
    alone = sample(engine, [one, one], [good, None])
    healthy, broken, base = sample(engine, [one, one, one], [good, bad, None])
    atol = TOLERANCE if dtype == "float32" else 0.05
    for found, wanted in ((healthy, alone[0]), (base, alone[1])):
        for ours, theirs in zip(found.sequences, wanted.sequences, strict=True):
            assert ours.tokens == theirs.tokens
            np.testing.assert_allclose(ours.logprobs_np, theirs.logprobs_np, atol=atol)
    for sequence in broken.sequences:
        assert all(0 <= token < VOCABULARY for token in sequence.tokens)
        assert np.isnan(sequence.logprobs_np).all()

    data = {model: weighted(np.random.default_rng(4), 9) for model in ("good", "bad")}
    passes = []
    for model, adapter in (("good", good), ("bad", bad)):
        model_from(engine, model, adapter)
        passes.append(engine.begin_pass(model, work([data[model]]), backward=True))
    engine.run_micro_batch([(each, 1) for each in passes])
    together = gradients(engine, "good", tmp_path / "together")
    assert passes[1].output().metrics["e_max_violation:max"] > 0
    with pytest.raises(UserFailure, match="the gradient is not finite"):
        engine.optim_step("bad", AdamParams(learning_rate=1e-3))
    engine.clear_gradients("good")
    engine.run_pass("good", work([data["good"]]), backward=True)
    for name, wanted in gradients(engine, "good", tmp_path / "alone").items():
        scale = max(1.0, float(wanted.abs().max()))
        assert float((together[name] - wanted).abs().max()) < atol * scale, name


# -- metrics --------------------------------------------------------------------------------------


def test_metrics_count_the_experts_of_each_request(qwen_mixture: Engine) -> None:
    rng = np.random.default_rng(5)
    data = [weighted(rng, length) for length in (9, 14, 5)]
    for model in ("a", "b"):
        qwen_mixture.create(model, LoraConfig(rank=2, seed=0), AdamOptimizerConfig())
    passes = [
        qwen_mixture.begin_pass("a", work(data[:2]), backward=True),
        qwen_mixture.begin_pass("b", work(data[2:]), backward=True),
    ]
    qwen_mixture.run_micro_batch([(passes[0], 1), (passes[1], 1)])
    qwen_mixture.run_micro_batch([(passes[0], 1)])
    together = [each.output().metrics for each in passes]

    for metrics, rows in zip(together, (data[:2], data[2:]), strict=True):
        counts = torch.zeros(2, 6)
        for datum in rows:  # by hand: each row alone
            qwen_mixture.run_pass("a", work([datum]), backward=False)
            for layer, experts in enumerate(qwen_mixture.model.experts):
                assert experts.routed_TK is not None
                for expert in experts.routed_TK.flatten().tolist():
                    counts[layer, expert] += 1
        fair = counts.sum(dim=1) / 6
        over = (counts.amax(dim=1) - fair) / fair
        assert {name: value for name, value in metrics.items() if name.startswith("e_")} == (
            pytest.approx(
                {
                    "e_frac_with_tokens:mean": float((counts > 0).float().mean()),
                    "e_frac_oversubscribed:mean": float((counts > fair[:, None]).float().mean()),
                    "e_max_violation:mean": float(over.mean()),
                    "e_max_violation:max": float(over.max()),
                    "e_min_violation:mean": float(((fair - counts.amin(dim=1)) / fair).mean()),
                }
            )
        )


def test_an_even_load_violates_nothing() -> None:
    metrics = expert_metrics(torch.full((3, 4), 7))
    assert metrics["e_frac_with_tokens:mean"] == 1.0
    assert metrics["e_max_violation:max"] == metrics["e_min_violation:mean"] == 0.0


# -- the check at start ---------------------------------------------------------------------------


def test_a_flipped_expert_of_a_near_tie_is_not_an_error(
    mixture_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token of one layer has another expert in the original model than in the engine."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    forward = Qwen3MoeTopKRouter.forward
    calls = 0

    def flipped(self: object, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        nonlocal calls
        calls += 1
        logits, weights, index = forward(self, hidden)
        if calls == 1:
            index = index.clone()
            index[3, 1] = next(e for e in range(6) if e not in index[3].tolist())
        return logits, weights, index

    monkeypatch.setattr(Qwen3MoeTopKRouter, "forward", flipped)
    folder = mixture_folder("Qwen3Moe")
    assert BaseModel(folder, device=torch.device("cpu"), dtype=torch.float32).experts


def test_a_router_that_disagrees_is_refused(
    mixture_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_experts, "agreement", lambda *_: 0.3)
    with pytest.raises(UnsupportedModel, match="routers choose 30% of the experts"):
        BaseModel(mixture_folder("Qwen3Moe"), device=torch.device("cpu"), dtype=torch.float32)


def test_agreement_is_the_share_of_equal_choices(qwen_mixture: Engine) -> None:
    experts = qwen_mixture.model.experts[:1]
    experts[0].routed_TK = torch.tensor([[5, 5], [0, 1], [2, 3]])
    recorded = torch.tensor([[1, 0], [2, 4]])
    routed = {experts[0].name: model_experts.RoutedTokens(0, recorded, recorded)}
    assert model_experts.agreement(experts, routed, 1) == 0.75


def test_code_that_hands_experts_their_own_tokens_is_refused(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An MLP that runs over two parts of the tokens gives equal logits, but wrong adapters."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    forward = LlamaMLP.forward

    def in_parts(self: object, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([forward(self, x[:, :5]), forward(self, x[:, 5:])], dim=1)

    monkeypatch.setattr(LlamaMLP, "forward", in_parts)
    with pytest.raises(UnsupportedModel, match=r"gate_proj got 5 rows in a pass of 18 tokens"):
        BaseModel(models["llama"], device=torch.device("cpu"), dtype=torch.float32)


def test_an_old_transformers_is_refused_with_what_to_do(
    mixture_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_experts.experts, "NEEDED_TRANSFORMERS", (99, 0))
    with pytest.raises(UnsupportedModel, match=r"needs transformers 99\.0 or later; 5\..* is inst"):
        BaseModel(mixture_folder("Qwen3Moe"), device=torch.device("cpu"), dtype=torch.float32)


def test_experts_without_an_interface_are_refused(
    mixture_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_experts.experts, "is_experts", lambda module: False)
    with pytest.raises(UnsupportedModel, match="no interface for experts"):
        BaseModel(mixture_folder("Qwen3Moe"), device=torch.device("cpu"), dtype=torch.float32)


# -- training and files ---------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adamw", "dimuon"])
def test_saved_and_loaded_training_has_the_same_curve(
    optimizer: str, qwen_mixture: Engine, tmp_path: Path
) -> None:
    from tinkex.wire.training import optimizer_config_from

    config = optimizer_config_from({"type": optimizer})
    params = (
        AdamParams(learning_rate=1e-2) if optimizer == "adamw" else DimuonParams(learning_rate=1e-2)
    )
    data = [datum_of([5, 6, 7, 8, 9, 10, 11, 12]), datum_of([50, 49, 48, 47, 46])]

    def steps(model: str, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            losses.append(
                qwen_mixture.run_pass(model, work(data), backward=True).metrics["loss:sum"]
            )
            qwen_mixture.optim_step(model, params)
        return losses

    qwen_mixture.create("first", LoraConfig(rank=4, seed=1), config)
    before = steps("first", 4)
    qwen_mixture.save("first", tmp_path / "saved", optimizer=True)
    after = steps("first", 4)
    assert after[-1] < before[0] - 1
    qwen_mixture.create("second", LoraConfig(rank=4, seed=2), config)
    qwen_mixture.load("second", tmp_path / "saved", optimizer=True)
    assert steps("second", 4) == after


@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss", "DeepseekV3"])
def test_a_new_adapter_gives_the_bits_of_the_base_model(
    family: str, mixture_on: Callable[[str], Engine], tmp_path: Path
) -> None:
    engine = mixture_on(family)
    engine.create("m", LoraConfig(rank=3, seed=1), AdamOptimizerConfig())
    engine.save("m", tmp_path / "new", optimizer=False)
    engine.drop("m")
    asked = request([5, 6, 7, 8, 9, 300], max_tokens=6, seed=1, stop=[], prompt_logprobs=True)
    ours, base = (sample(engine, [asked], [which])[0] for which in (tmp_path / "new", None))
    assert ours.sequences[0].tokens == base.sequences[0].tokens
    np.testing.assert_array_equal(
        ours.sequences[0].logprobs_np.view(np.int32), base.sequences[0].logprobs_np.view(np.int32)
    )
    np.testing.assert_array_equal(ours.prompt_logprobs_np, base.prompt_logprobs_np)


def test_the_cache_of_mla_has_two_widths(mixture_on: Callable[[str], Engine]) -> None:
    """Keys have 16 + 8 numbers for each head, and values 12, which are not padded."""
    engine = mixture_on("DeepseekV3")
    assert {(*each.keys, *each.values) for each in engine.model.cache_shapes} == {(4, 24, 4, 12)}
    assert engine.model.cache_bytes_per_token == 4 * 2 * 4 * (24 + 12)
    sample(engine, [request([5, 6, 7], max_tokens=1)])
    layers = engine._sampler._runner._layers  # type: ignore[union-attr]
    assert {(each.keys.shape[1:], each.values.shape[1:]) for each in layers} == {((4, 24), (4, 12))}


def test_the_first_step_moves_only_the_factors_that_were_zero(
    qwen_mixture: Engine, tmp_path: Path
) -> None:
    qwen_mixture.create("m", LoraConfig(rank=2, seed=1), AdamOptimizerConfig())
    qwen_mixture.save("m", tmp_path / "before", optimizer=False)
    qwen_mixture.run_pass("m", work([datum_of([5, 6, 7, 8, 9])]), backward=True)
    qwen_mixture.optim_step("m", AdamParams(learning_rate=1e-2))
    qwen_mixture.save("m", tmp_path / "after", optimizer=False)
    old, new = (
        load_file(tmp_path / at / "adapter_model.safetensors") for at in ("before", "after")
    )
    for name, tensor in old.items():
        assert torch.equal(tensor, new[name]) == ("lora_A" in name), name


#: Mixtures whose layers the kernels of a decode step compute, in sizes that these need.
USUAL: dict[str, dict[str, int]] = {
    "Qwen3Moe": {},
    "Mixtral": {"head_dim": 16},
    "Qwen2Moe": {"hidden_size": 64, "shared_expert_intermediate_size": 32},
    "GptOss": {},
}


@pytest.mark.parametrize("family", [*USUAL, "Olmoe", "Glm4Moe"])
def test_the_form_of_a_mixture_is_recognized(family: str, tmp_path: Path) -> None:
    folder = write_mixture(tmp_path, family, **{"hidden_size": 64, **USUAL.get(family, {})})
    model = BaseModel(folder, device=torch.device("cpu"), dtype=torch.float32)
    found = StackedWeights.of(model._decoder, model._embed, model.head)
    assert (found is not None) == (family in USUAL)
    if found is None:
        return
    names = [target.name for target in model.targets]
    assert sorted(found.targets) == sorted(names)
    # Training has other code for mixtures.
    assert found.shape is None


def test_a_router_that_returns_something_else_is_not_usual(tmp_path: Path) -> None:
    folder = write_mixture(tmp_path, "Qwen3Moe")
    model = BaseModel(folder, device=torch.device("cpu"), dtype=torch.float32)
    router = model._decoder.layers[1].mlp.gate
    router.register_forward_hook(lambda *found: found[2][:2])
    assert StackedWeights.of(model._decoder, model._embed, model.head) is None
