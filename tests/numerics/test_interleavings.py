"""Random interleavings of all operations, against a simple float64 reference model.

The reference keeps every adapter as a dict of tensors, without packing, pages, shared batches
or eviction; the engine has memory for few adapters, so they are evicted often.

    TINKEX_PROPERTY_EXAMPLES=200 pytest tests/numerics/test_interleavings.py

runs more examples, different ones each time.
"""

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    multiple,
    rule,
    run_state_machine_as_test,
)
from safetensors.torch import load_file
from torch import Tensor

from numerics import reference
from numerics.helpers import VOCABULARY, request, sample, work
from tinkex.engine import Engine, EngineSettings
from tinkex.wire.errors import UserFailure
from tinkex.wire.inputs import Datum, ModelInput
from tinkex.wire.training import AdamOptimizerConfig, AdamParams, LoraConfig

EXAMPLES = os.environ.get("TINKEX_PROPERTY_EXAMPLES")
STEPS = 16

#: Allowed difference of logprobs: float32 against float64, after some optimizer steps.
TOLERANCE = 2e-3


# -- the reference model --------------------------------------------------------------------------


@dataclass
class ReferenceAdapter:
    """One adapter: plain tensors by their PEFT names."""

    lora: LoraConfig
    weights: dict[str, Tensor]
    grad: dict[str, Tensor] = field(default_factory=dict)
    m: dict[str, Tensor] = field(default_factory=dict)
    v: dict[str, Tensor] = field(default_factory=dict)
    step: int = 0

    def __post_init__(self) -> None:
        for one in (self.grad, self.m, self.v):
            if not one:
                one.update({name: torch.zeros_like(w) for name, w in self.weights.items()})

    def clear(self) -> None:
        self.grad = {name: torch.zeros_like(w) for name, w in self.weights.items()}

    def adamw(self, params: AdamParams) -> float:
        """The formulas of the paper; returns the gradient's norm."""
        norm = float(torch.sqrt(sum(g.square().sum() for g in self.grad.values())))  # type: ignore[arg-type]
        scale = min(1.0, params.grad_clip_norm / (norm + 1e-6)) if params.grad_clip_norm else 1.0
        self.step += 1
        for name, weight in self.weights.items():
            g = self.grad[name] * scale
            weight = weight * (1 - params.learning_rate * params.weight_decay)
            self.m[name] = params.beta1 * self.m[name] + (1 - params.beta1) * g
            self.v[name] = params.beta2 * self.v[name] + (1 - params.beta2) * g * g
            m = self.m[name] / (1 - params.beta1**self.step)
            v = self.v[name] / (1 - params.beta2**self.step)
            self.weights[name] = weight - params.learning_rate * m / (v.sqrt() + params.eps)
        self.clear()
        return norm


@dataclass(frozen=True)
class Saved:
    """A checkpoint: its folder, and the state of the reference at that time."""

    folder: Path
    lora: LoraConfig
    weights: dict[str, Tensor]
    moments: tuple[dict[str, Tensor], dict[str, Tensor], int] | None


def reference_loss(
    base: reference.Reference,
    adapter: ReferenceAdapter,
    data: list[Datum],
    loss: str,
    *,
    backward: bool,
) -> tuple[float, list[Tensor]]:
    """The loss and each datum's logprobs; `backward` adds to the adapter's gradients."""
    base.scale = 32 / adapter.lora.rank
    base.lora = {name: w.clone().requires_grad_(backward) for name, w in adapter.weights.items()}
    total = torch.zeros((), dtype=torch.float64)
    logprobs = []
    for datum in data:
        inputs = {
            name: torch.from_numpy(tensor.to_numpy())
            for name, tensor in datum.loss_fn_inputs.items()
        }
        targets = inputs.pop("target_tokens")
        own = base.logprobs(datum.model_input.to_ints()).gather(1, targets[:, None])[:, 0]
        logprobs.append(own.detach())
        total = total + reference.LOSSES[loss](own, inputs)
    if backward:
        total.backward()
        for name, leaf in base.lora.items():
            if leaf.grad is not None:
                adapter.grad[name] = adapter.grad[name] + leaf.grad
    base.lora = {}
    return float(total.detach()), logprobs


# -- strategies -----------------------------------------------------------------------------------

loras = st.builds(
    LoraConfig,
    rank=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 3),
    train_attn=st.booleans(),
    train_mlp=st.booleans(),
    train_unembed=st.just(True) | st.booleans(),
).filter(lambda lora: lora.train_attn or lora.train_mlp or lora.train_unembed)

steps = st.builds(
    AdamParams,
    learning_rate=st.sampled_from([1e-3, 1e-2]),
    # Large enough that rounding errors in a zero gradient have no effect.
    eps=st.sampled_from([1e-2, 1e-3]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    grad_clip_norm=st.sampled_from([0.0, 0.5]),
)


@st.composite
def batches(draw: st.DrawFn) -> tuple[str, list[Datum]]:
    loss = draw(st.sampled_from(["cross_entropy", "cross_entropy", "ppo", "importance_sampling"]))
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    data = []
    for length in draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)):
        tokens = rng.integers(0, VOCABULARY, length + 1)
        inputs: dict[str, Any] = {"target_tokens": tokens[1:].astype(np.int64)}
        if loss == "cross_entropy":
            inputs["weights"] = rng.normal(size=length).astype(np.float32)
        else:
            inputs["advantages"] = rng.normal(size=length).astype(np.float32)
            # Ratios far from the bounds, where float32 and float64 could be on different sides.
            inputs["logprobs"] = rng.choice([-12.0, -3.0], length).astype(np.float32)
        data.append(
            Datum(model_input=ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs)
        )
    return loss, data


# -- the state machine ----------------------------------------------------------------------------


class Interleavings(RuleBasedStateMachine):
    engine: Engine
    base_folder: Path
    count = 0

    models = Bundle("models")
    checkpoints = Bundle("checkpoints")

    def __init__(self) -> None:
        super().__init__()
        self.base = reference.Reference(self.base_folder)
        self.adapters: dict[str, ReferenceAdapter] = {}
        self.files = tempfile.TemporaryDirectory()

    def teardown(self) -> None:
        for model_id in self.adapters:
            self.engine.drop(model_id)
        self.files.cleanup()

    def new_folder(self) -> Path:
        Interleavings.count += 1
        return Path(self.files.name) / str(Interleavings.count)

    def new_model(self, lora: LoraConfig) -> str:
        Interleavings.count += 1
        model_id = f"m{Interleavings.count}"
        self.engine.create(model_id, lora, AdamOptimizerConfig())
        folder = self.new_folder()
        self.engine.save(model_id, folder, optimizer=False)
        weights = load_file(folder / "adapter_model.safetensors")
        assert all(not w.any() for name, w in weights.items() if "lora_B" in name)
        self.adapters[model_id] = ReferenceAdapter(
            lora, {name: w.double() for name, w in weights.items()}
        )
        return model_id

    @initialize(target=models, first=loras, second=loras, third=loras)
    def some(self, first: LoraConfig, second: LoraConfig, third: LoraConfig) -> Any:
        """Starts with three models: with only one, little is tested."""
        return multiple(*(self.new_model(lora) for lora in (first, second, third)))

    @rule(target=models, lora=loras)
    def create(self, lora: LoraConfig) -> str:
        return self.new_model(lora)

    @rule(model_id=models, batch=batches(), backward=st.sampled_from([True, True, False]))
    def run_pass(self, model_id: str, batch: tuple[str, list[Datum]], backward: bool) -> None:
        loss, data = batch
        output = self.engine.run_pass(model_id, work(data, loss), backward=backward)
        self.check(model_id, output, loss, data, backward=backward)

    @rule(
        ids=st.lists(models, min_size=2, max_size=3, unique=True),
        many=st.lists(batches(), min_size=3, max_size=3),
    )
    def run_micro_batch(self, ids: list[str], many: list[tuple[str, list[Datum]]]) -> None:
        """Several models, ranks and losses in the same micro-batches."""
        passes = [
            self.engine.begin_pass(model_id, work(data, loss), backward=True)
            for model_id, (loss, data) in zip(ids, many, strict=False)
        ]
        while waiting := [one for one in passes if one.waiting]:
            self.engine.run_micro_batch([(one, 1) for one in waiting])
        for model_id, one, (loss, data) in zip(ids, passes, many, strict=False):
            self.check(model_id, one.output(), loss, data, backward=True)

    def check(
        self, model_id: str, output: Any, loss: str, data: list[Datum], *, backward: bool
    ) -> None:
        total, logprobs = reference_loss(
            self.base, self.adapters[model_id], data, loss, backward=backward
        )
        for found, own in zip(output.loss_fn_outputs, logprobs, strict=True):
            np.testing.assert_allclose(found["logprobs"].to_numpy(), own.numpy(), atol=TOLERANCE)
        assert output.metrics["loss:sum"] == pytest.approx(total, rel=1e-3, abs=0.02)

    @rule(model_id=models, params=steps)
    def optim_step(self, model_id: str, params: AdamParams) -> None:
        metrics = self.engine.optim_step(model_id, params)
        norm = self.adapters[model_id].adamw(params)
        assert metrics["grad_norm:mean"] == pytest.approx(norm, rel=1e-3, abs=1e-3)

    @rule(model_id=models)
    def clear_gradients(self, model_id: str) -> None:
        self.engine.clear_gradients(model_id)
        self.adapters[model_id].clear()

    @rule(target=checkpoints, model_id=models, optimizer=st.booleans())
    def save(self, model_id: str, optimizer: bool) -> Saved:
        folder = self.new_folder()
        self.engine.save(model_id, folder, optimizer=optimizer)
        adapter = self.adapters[model_id]
        found = load_file(folder / "adapter_model.safetensors")
        assert found.keys() == adapter.weights.keys()
        for name, weight in adapter.weights.items():
            torch.testing.assert_close(found[name].double(), weight, rtol=0, atol=TOLERANCE)
        moments = (dict(adapter.m), dict(adapter.v), adapter.step) if optimizer else None
        return Saved(folder, adapter.lora, dict(adapter.weights), moments)

    @rule(model_id=models, saved=checkpoints, optimizer=st.booleans())
    def load(self, model_id: str, saved: Saved, optimizer: bool) -> None:
        adapter = self.adapters[model_id]
        shape = ("rank", "train_attn", "train_mlp", "train_unembed")
        fits = all(getattr(adapter.lora, name) == getattr(saved.lora, name) for name in shape)
        if not fits or (optimizer and saved.moments is None):
            with pytest.raises(UserFailure):
                self.engine.load(model_id, saved.folder, optimizer=optimizer)
            return  # later steps show that nothing changed
        self.engine.load(model_id, saved.folder, optimizer=optimizer)
        m, v, step = saved.moments if optimizer and saved.moments else ({}, {}, 0)
        self.adapters[model_id] = ReferenceAdapter(
            adapter.lora, dict(saved.weights), {}, dict(m), dict(v), step
        )

    @rule(
        chosen=st.lists(checkpoints | st.none(), min_size=1, max_size=3),
        seed=st.integers(0, 99),
        greedy=st.booleans(),
    )
    def sample(self, chosen: list[Saved | None], seed: int, greedy: bool) -> None:
        """Samples checkpoints and the base model at once: each uses its own weights."""
        rng = np.random.default_rng(seed)
        prompts = [rng.integers(0, VOCABULARY, rng.integers(1, 8)).tolist() for _ in chosen]
        asked = [
            request(prompt, max_tokens=3, seed=seed, stop=[], temperature=0.0 if greedy else 1.0)
            for prompt in prompts
        ]
        folders = [None if saved is None else saved.folder for saved in chosen]
        for saved, prompt, answer in zip(
            chosen, prompts, sample(self.engine, asked, folders), strict=True
        ):
            if saved is not None:
                self.base.scale, self.base.lora = 32 / saved.lora.rank, saved.weights
            tokens = answer.sequences[0].tokens
            everything = self.base.logprobs(prompt + tokens[:-1])[len(prompt) - 1 :]
            self.base.lora = {}
            own = everything.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            if greedy:
                best = everything.max(dim=1).values
                np.testing.assert_allclose(own.numpy(), best.numpy(), atol=TOLERANCE)
            else:
                np.testing.assert_allclose(
                    answer.sequences[0].logprobs_np, own.numpy(), atol=TOLERANCE
                )

    @rule(model_id=consumes(models))
    def drop(self, model_id: str) -> None:
        self.engine.drop(model_id)
        del self.adapters[model_id]
        assert not self.engine.has(model_id)


@pytest.fixture
def machine(models: dict[str, Path]) -> Callable[[], Interleavings]:
    room = 200_000  # the largest adapter fits alone
    Interleavings.base_folder = models["llama"]
    Interleavings.engine = Engine(
        EngineSettings(
            name="llama",
            folder=models["llama"],
            device="cpu",
            kv_tokens=256,
            adapter_bytes=room,
            max_batch_tokens=16,
        )
    )
    return Interleavings


@pytest.mark.timeout(60 if EXAMPLES is None else 0)
def test_any_interleaving_gives_the_results_of_the_reference_model(
    machine: Callable[[], Interleavings],
) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=int(EXAMPLES or 12),
            stateful_step_count=STEPS,
            derandomize=EXAMPLES is None,
            deadline=None,
            database=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert Interleavings.engine._adapters._spills > 10  # eviction must be part of the test
