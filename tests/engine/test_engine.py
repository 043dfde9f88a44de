"""The engine's training interface."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tinkex.client.submission import noop_step
from tinkex.engine import Engine, EngineSettings
from tinkex.engine.adapters.memory_plan import Resident, plan_memory
from tinkex.engine.device import UnusableDevice
from tinkex.engine.engine import measured_needs
from tinkex.engine.sampling.interface import Finished, PartialOutput, SamplerStats
from tinkex.wire.errors import UserFailure
from tinkex.wire.inputs import Datum, ModelInput
from tinkex.wire.protobuf import decode_forward_backward_request
from tinkex.wire.sampling import (
    SampledSequence,
    SampleRequest,
    SampleResponse,
    SamplingParams,
)
from tinkex.wire.training import (
    AdamOptimizerConfig,
    AdamParams,
    DimuonParams,
    ForwardBackwardInput,
    LoraConfig,
    OptimizerConfigBase,
)


@pytest.fixture
def model(engine: Engine) -> Iterator[str]:
    engine.create("m", LoraConfig(rank=4, seed=1), AdamOptimizerConfig())
    yield "m"
    engine.drop("m")


def work(tokens: list[int], loss: str = "cross_entropy") -> ForwardBackwardInput:
    datum = Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)},
    )
    return ForwardBackwardInput._of([datum], loss, None)


def test_the_facts_are_the_model_s(engine: Engine) -> None:
    facts = engine.facts
    assert (facts.arch, facts.device, facts.dtype) == ("qwen3", "cpu", "float32")
    assert (facts.max_context_length, facts.vocab_size) == (2048, 400)


def test_a_model_is_created_once(engine: Engine, model: str) -> None:
    assert engine.has(model)
    with pytest.raises(ValueError, match="exists already"):
        engine.create(model, LoraConfig(rank=4), AdamOptimizerConfig())


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (LoraConfig(rank=0), "rank is 0; ranks go from 1 to"),
        (LoraConfig(rank=100_000), "rank is 100000"),
        (
            LoraConfig(rank=4, train_attn=False, train_mlp=False, train_unembed=False),
            "trains nothing",
        ),
    ],
)
def test_an_impossible_adapter_is_refused(engine: Engine, lora: LoraConfig, message: str) -> None:
    with pytest.raises(UserFailure, match=message):
        engine.create("new", lora, AdamOptimizerConfig())
    assert not engine.has("new")


def test_an_unknown_optimizer_is_refused(engine: Engine, model: str) -> None:
    with pytest.raises(UserFailure, match="'lion' is not supported by this server; use 'adamw'"):
        engine.create("new", LoraConfig(rank=4), OptimizerConfigBase(type="lion"))
    with pytest.raises(UserFailure, match="created with the adamw optimizer"):
        engine.optim_step(model, DimuonParams(learning_rate=0.1))


@pytest.mark.parametrize(
    "params",
    [
        AdamParams(learning_rate=-1.0),
        AdamParams.model_construct(learning_rate=float("nan")),  # bypasses the checks of the type
        AdamParams(beta1=1.0),
        AdamParams(beta2=-0.1),
        AdamParams(eps=0.0),
        AdamParams(weight_decay=-0.1),
        AdamParams(grad_clip_norm=-1.0),
    ],
    ids=str,
)
def test_parameters_out_of_range_are_refused(
    engine: Engine, model: str, params: AdamParams
) -> None:
    with pytest.raises(UserFailure, match=r"adam_params.\w+ is .*; it must be"):
        engine.optim_step(model, params)


@pytest.mark.parametrize(
    ("settings", "total", "tokens"),
    [
        ({}, 4 * 10**9, 1024),  # half of the memory: other programs use the machine too
        ({"memory_bytes": 6 * 10**9}, 6 * 10**9, 1024),
        ({"memory_bytes": 90 * 10**9}, 8 * 10**9, 1024),
        ({"max_batch_tokens": 4096}, 4 * 10**9, 4096),
        # Batch boundaries determine the bits of a deterministic engine, so this must not change.
        ({"deterministic": True}, 4 * 10**9, 8192),
    ],
)
def test_on_a_cpu_half_of_the_free_memory_is_the_default(
    engine: Engine, settings: dict[str, Any], total: int, tokens: int
) -> None:
    base = engine.model.size_bytes
    made = EngineSettings(name="t", folder=engine.settings.folder, device="cpu", **settings)
    plan = plan_memory(measured_needs(engine.model), made, free=8 * 10**9)
    beside = 0 if plan.total == settings.get("memory_bytes") else base
    assert (plan.total - beside, plan.batch_tokens) == (total, tokens)


def test_a_deterministic_engine_repeats_every_bit_with_and_without_other_requests(
    tiny_folder: Path,
) -> None:
    engine = Engine(
        EngineSettings(
            name="t", folder=tiny_folder, device="cpu", kv_tokens=512, deterministic=True
        )
    )
    assert engine.max_batch_tokens == 8192
    answers = []
    for mates in (0, 5):
        for ticket in range(mates + 1):
            prompt = ModelInput.from_ints([7, 8, 9] if ticket == mates else [ticket] * 9)
            params = SamplingParams(max_tokens=20, seed=3, stop=[])
            one = SampleRequest(prompt=prompt, num_samples=2, sampling_params=params)
            engine.submit(ticket, one, adapter=None)
        finished = []
        while engine.sampling:
            finished += engine.advance()
        answers += [one.outcome for one in finished if one.ticket == mates]
    assert answers[0] == answers[1]


def test_unknown_models_are_refused(engine: Engine) -> None:
    with pytest.raises(UserFailure, match="model 'unknown' does not exist"):
        engine.run_pass("unknown", work([1, 2]), backward=True)


def test_a_refused_pass_leaves_no_gradient(engine: Engine, model: str) -> None:
    with pytest.raises(UserFailure):
        engine.run_pass(model, work([1, 2, 3], "stable_reinforce"), backward=True)
    assert engine.optim_step(model, AdamParams())["grad_norm:mean"] == 0.0


def test_metrics_have_one_colon_and_a_loss(engine: Engine, model: str) -> None:
    output = engine.run_pass(model, work([1, 2, 3]), backward=True)
    assert output.loss_fn_output_type == "ArrayRecord"
    assert "loss:sum" in output.metrics
    step = engine.optim_step(model, AdamParams(learning_rate=1e-3))
    assert all(name.count(":") == 1 for name in {**output.metrics, **step})
    assert step["grad_norm:mean"] > 0
    assert step["update_norm:mean"] > 0
    assert step["learning_rate:mean"] == 1e-3


def test_gradients_can_be_cleared(engine: Engine, model: str) -> None:
    engine.run_pass(model, work([1, 2, 3]), backward=True)
    engine.clear_gradients(model)
    assert engine.optim_step(model, AdamParams())["grad_norm:mean"] == 0.0


def test_a_pass_can_be_run_in_steps(engine: Engine, model: str) -> None:
    """Other work can run between micro-batches; the result is the same."""
    data = [datum for n in range(3) for datum in work([n, 5, 6, 7]).data]
    whole = ForwardBackwardInput._of(data, "cross_entropy", None)
    expected = engine.run_pass(model, whole, backward=False)
    parts = engine.begin_pass(model, whole, backward=False)
    while parts.waiting:
        engine.run_micro_batch([(parts, 1)])
    output = parts.output()
    assert output.metrics == pytest.approx(expected.metrics)
    for mine, theirs in zip(output.loss_fn_outputs, expected.loss_fn_outputs, strict=True):
        assert mine["logprobs"].tolist() == pytest.approx(theirs["logprobs"].tolist(), abs=1e-5)


def test_two_models_train_independently(engine: Engine, model: str, tmp_path: Path) -> None:
    engine.create("other", LoraConfig(rank=2, seed=1, train_mlp=False), AdamOptimizerConfig())
    before = engine._adapters["other"].master.clone()
    for _ in range(2):
        engine.run_pass(model, work([1, 2, 3]), backward=True)
        engine.optim_step(model, AdamParams(learning_rate=1e-2))
    assert torch.equal(engine._adapters["other"].master, before)
    assert not engine._adapters["other"].grad.any()
    engine.drop("other")


def test_an_unsupported_device_error_lists_the_allowed_ones(tiny_folder: Path) -> None:
    with pytest.raises(UnusableDevice, match="'mps' is not supported") as raised:
        Engine(EngineSettings(name="tiny", folder=tiny_folder, device="mps"))
    assert "--device cpu, --device cuda" in raised.value.hint


@pytest.mark.parametrize("with_its_setting", [True, False])
def test_the_filler_for_half_a_batch_fails(
    engine: Engine, model: str, with_its_setting: bool
) -> None:
    """Also on a server that does not know its setting, because it has more targets than tokens."""
    request, forward_only = decode_forward_backward_request(noop_step(model, True).encode(3))
    assert not forward_only
    work = request.forward_backward_input
    if not with_its_setting:
        work = ForwardBackwardInput._of(work.data, work.loss_fn, None)
    with pytest.raises(UserFailure, match="never_sent" if with_its_setting else "target_tokens"):
        engine.begin_pass(model, work, backward=True)


class EchoSampler:
    """Another sampler: it answers with the prompt."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._waiting: dict[int, SampleRequest] = {}
        self._answered = 0

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    awaited_read = None

    def submit(self, ticket: int, sample_request: SampleRequest, *_: Any, **__: Any) -> None:
        self._waiting[ticket] = sample_request

    def cancel(self, ticket: int) -> None:
        self._waiting.pop(ticket, None)

    def advance(self) -> list[Finished]:
        ticket, one = self._waiting.popitem()
        self._answered += len(one.prompt.to_ints())
        echo = SampledSequence(
            stop_reason="length",
            sequence_id="",
            tokens_np=np.array(one.prompt.to_ints(), np.int32),
            logprobs_np=np.zeros(len(one.prompt.to_ints()), np.float32),
        )
        return [Finished(ticket=ticket, outcome=SampleResponse(sequences=[echo]))]

    def partial_outputs(self) -> list[PartialOutput]:
        return []

    def stats(self) -> SamplerStats:
        zeros = {field.name: 0 for field in dataclasses.fields(SamplerStats)}
        return SamplerStats(**{**zeros, "tokens_sampled": self._answered})

    def adapter_residents(self) -> list[Resident]:
        return []

    def drop_adapter(self, name: str) -> None: ...


def test_an_engine_may_have_another_sampler(tiny_folder: Path) -> None:
    settings = EngineSettings(name="tiny", folder=tiny_folder, device="cpu")
    engine = Engine(settings, make_sampler=EchoSampler)
    for ticket in (1, 2):
        engine.submit(
            ticket,
            SampleRequest(
                prompt=ModelInput.from_ints([4, 5]), sampling_params=SamplingParams(max_tokens=1)
            ),
            adapter=None,
        )
    engine.cancel(2)
    (finished,) = engine.advance()
    assert isinstance(finished.outcome, SampleResponse)
    assert finished.outcome.sequences[0].tokens == [4, 5]
    assert not engine.sampling
    assert engine.stats().tokens_sampled == 2
