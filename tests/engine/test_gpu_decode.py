"""Decoding with CUDA graphs, in the whole engine, against the code of transformers."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from gpu_models import write_model
from tinkex.engine import Engine, EngineSettings
from tinkex.engine.sampling.model_runner import ModelRunner
from tinkex.engine.sampling.scheduler import adapter_ranges
from tinkex.wire.inputs import Datum, ModelInput
from tinkex.wire.sample_controls import SampleControls, StoredSampleRequest
from tinkex.wire.sampling import SampledSequence, SampleRequest, SamplingParams
from tinkex.wire.training import AdamOptimizerConfig, ForwardBackwardInput, LoraConfig

pytestmark = pytest.mark.gpu

PROMPTS = [[(7 * at + 3 * length) % 1000 for at in range(length)] for length in (63, 200)]
ADAPTERS = {"small": (8, False), "large": (32, False), "odd": (3, True)}


class Subject:
    """An engine whose decode steps run as graphs, and some adapters."""

    def __init__(self, folder: Path, kind: str, **settings: int) -> None:
        self.engine = Engine(
            EngineSettings(
                name=kind,
                folder=write_model(folder / "model", kind),
                device="cuda",
                **{"kv_tokens": 16_384, "max_sequences": 8, **settings},
            )
        )
        self.adapters: list[Path | None] = [None]
        for name, (rank, head) in ADAPTERS.items():
            lora = LoraConfig(rank=rank, seed=rank, train_unembed=head, train_mlp=name != "small")
            self.engine.create(name, lora, AdamOptimizerConfig())
            adapter = self.engine._adapter(name)
            generator = torch.Generator("cuda").manual_seed(rank)
            adapter.master.normal_(std=0.05, generator=generator)
            adapter.refresh_live()
            self.engine.save(name, folder / name, optimizer=False)
            self.adapters.append(folder / name)
        self.sample(1, max_tokens=1)
        graphs, compiler = self.runner._graphs, self.runner.compiler
        assert graphs is not None
        assert compiler is not None
        # One bucket, so that there are few kernels to compile.
        compiler.waits, graphs._buckets = True, [8]
        assert self.engine._sampler is not None
        self.engine._sampler.scheduler.pages._evict_idle(0)
        # NaN in every slot: nothing may read what was not written.
        for layer in self.runner._layers:
            for cached in layer:
                cached.fill_(float("nan"))

    @property
    def runner(self) -> ModelRunner:
        assert self.engine._sampler is not None
        return self.engine._sampler._runner

    def sample(
        self,
        samples: int = 2,
        *,
        adapters: list[Path | None] | None = None,
        streams: bool = False,
        **params: object,
    ) -> dict[tuple[int, int], SampledSequence]:
        """(ticket, sample) -> the outcome of every prompt with every adapter."""
        adapters = self.adapters if adapters is None else adapters
        cases = [(prompt, adapter) for adapter in adapters for prompt in PROMPTS]
        for ticket, (prompt, adapter) in enumerate(cases):
            request = SampleRequest(
                prompt=ModelInput.from_ints(prompt),
                num_samples=samples,
                sampling_params=SamplingParams(**{"max_tokens": 21, "seed": 5, "stop": [], **params}),
            )  # fmt: skip
            self.engine.submit(ticket, request, adapter=adapter, streams=streams)
        found: dict[tuple[int, int], SampledSequence] = {}
        while self.engine.sampling:
            for finished in self.engine.advance():
                assert not isinstance(finished.outcome, Exception), finished.outcome
                for at, sequence in enumerate(finished.outcome.sequences):
                    found[finished.ticket, at] = sequence
        return found

    def sample_with_graphs(self, **params: object) -> dict[tuple[int, int], SampledSequence]:
        found = self.sample(**params)  # type: ignore[arg-type]
        graphs, compiler = self.runner._graphs, self.runner.compiler
        assert graphs is not None
        assert compiler is not None
        assert compiler.usable
        assert not compiler.refused
        assert graphs._graphs
        return found

    def forward_logprobs(self, ticket: int, sequence: SampledSequence) -> np.ndarray:
        prompt = PROMPTS[ticket % len(PROMPTS)]
        tokens = np.array([*prompt, *sequence.tokens])
        datum = Datum(
            model_input=ModelInput.from_ints(tokens[:-1].tolist()),
            loss_fn_inputs={"target_tokens": tokens[1:].astype(np.int64)},
        )
        work = ForwardBackwardInput(data=[datum], loss_fn="cross_entropy")
        name = list(ADAPTERS)[ticket // len(PROMPTS) - 1]
        output = self.engine.run_pass(name, work, backward=False).loss_fn_outputs[0]
        return np.asarray(output["logprobs"].to_numpy()[len(prompt) - 1 :])

    def check(self, found: dict[tuple[int, int], SampledSequence]) -> None:
        """
        Sampled logprobs against those of a forward pass over the whole sequence.

        The bound is for this model: with the code of transformers the difference is 1.1e-2.
        """
        gaps = [
            np.abs(self.forward_logprobs(ticket, sequence) - sequence.logprobs_np)
            for (ticket, _), sequence in found.items()
            if ticket >= len(PROMPTS)
        ]
        gap = float(np.concatenate(gaps).mean())
        assert gap < 2.5e-2


@pytest.fixture(scope="module", params=["qwen3", "qwen2", "llama"])
def any_subject(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Subject:
    return Subject(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return Subject(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture
def without_graphs(subject: Subject) -> Iterator[None]:
    runner = subject.runner
    kept, runner._graphs = runner._graphs, None
    prefill, runner._fused_prefill = runner._fused_prefill, None
    yield
    runner._graphs, runner._fused_prefill = kept, prefill


def test_sampled_logprobs_equal_those_of_a_forward_pass(any_subject: Subject) -> None:
    found = any_subject.sample_with_graphs()
    assert all(len(sequence.tokens) == 21 for sequence in found.values())
    any_subject.check(found)


def test_logits_equal_those_of_transformers(any_subject: Subject) -> None:
    """One step of the same sequences on both paths: base model, three ranks, an adapted head."""
    subject = any_subject
    engine, sampler = subject.engine, subject.engine._sampler
    assert sampler is not None
    for ticket, adapter in enumerate(subject.adapters):
        request = SampleRequest(
            prompt=ModelInput.from_ints(PROMPTS[1]),
            num_samples=2,
            sampling_params=SamplingParams(max_tokens=90, seed=1, stop=[]),
        )
        engine.submit(ticket, request, adapter=adapter)
    while sampler.scheduler.running < 8:
        engine.advance()
    step = sampler.scheduler.next_step()
    runner, graphs = subject.runner, subject.runner._graphs
    with torch.inference_mode():
        assert graphs is not None
        burst = graphs.start(step.sequences, sampler._adapters, 1)
        assert burst is not None
        found = burst.logits_SV.clone().log_softmax(dim=1)
        runner._graphs = None
        hidden = runner.decode(step.sequences)
        segments = runner.adapter_segments(adapter_ranges(step.sequences))
        expected = engine.model.head.logits(hidden, segments).log_softmax(dim=1)
        runner._graphs = graphs
    for ticket in range(len(subject.adapters)):
        engine.cancel(ticket)
    # Of each row: the error of one adapter would hide in the mean of all.
    gaps = (found - expected).abs().mean(dim=1).tolist()
    assert max(gaps) < 6e-2, gaps


def test_greedy_tokens_are_the_most_likely(subject: Subject) -> None:
    subject.check(subject.sample_with_graphs(samples=1, temperature=0.0))
    # From now on the prompts are in the prefix cache.
    found = subject.sample(samples=1, temperature=0.0)
    again = subject.sample(samples=1, temperature=0.0)
    assert {key: one.tokens for key, one in again.items()} == {
        key: one.tokens for key, one in found.items()
    }


def test_the_same_seed_gives_the_same_tokens_again(subject: Subject) -> None:
    subject.sample_with_graphs()
    found, again = subject.sample(), subject.sample()
    for key, one in found.items():
        assert one.tokens == again[key].tokens
        assert one.logprobs == again[key].logprobs


def test_kernels_of_few_rows_share_launches(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four rows, of which two have an adapter: right, and always the same bits."""
    subject.sample_with_graphs()
    graphs, compiler = subject.runner._graphs, subject.runner.compiler
    monkeypatch.setattr(graphs, "_graphs", {})
    monkeypatch.setattr(graphs, "_buckets", [4])
    monkeypatch.setattr(compiler, "_compiled", {"comparison"})
    # The first run fills the prefix cache.
    subject.sample_with_graphs(samples=1, adapters=subject.adapters[:2])
    found = subject.sample(samples=1, adapters=subject.adapters[:2])
    subject.check(found)
    for _ in range(3):
        again = subject.sample(samples=1, adapters=subject.adapters[:2])
        assert {key: one.logprobs for key, one in again.items()} == {
            key: one.logprobs for key, one in found.items()
        }


@pytest.mark.usefixtures("without_graphs")
def test_without_graphs(subject: Subject) -> None:
    """The other path is checked by the same rule."""
    subject.check(subject.sample())


def test_stops_end_a_sequence_at_the_token(subject: Subject) -> None:
    subject.sample_with_graphs()
    found = subject.sample()
    ticket, stop = next((key[0], one.tokens[4]) for key, one in found.items() if key[1] == 0)
    again = subject.sample(stop=[stop])
    sequence = again[ticket, 0]
    expected = found[ticket, 0].tokens
    assert sequence.tokens == expected[: expected.index(stop) + 1]
    assert sequence.stop_reason == "stop"


@pytest.mark.parametrize("params", [{"top_k": 5}, {"top_p": 0.8}])
def test_requests_that_need_the_host(subject: Subject, params: dict[str, object]) -> None:
    found = subject.sample_with_graphs(**params)
    assert all(len(sequence.tokens) == 21 for sequence in found.values())
    subject.check(found)


def test_a_request_that_needs_the_host_runs_beside_the_others(subject: Subject) -> None:
    engine = subject.engine
    subject.sample_with_graphs()
    expected = subject.sample(samples=1)
    requests = {
        at: SampleRequest(
            prompt=ModelInput.from_ints(PROMPTS[at % len(PROMPTS)]),
            num_samples=1,
            # The first one needs the host for its logprobs; its tokens are those of the others.
            topk_sample_logprobs=0 if at else 3,
            sampling_params=SamplingParams(max_tokens=21, seed=5, stop=[]),
        )
        for at in range(8)
    }
    for at, request in requests.items():
        engine.submit(at, request, adapter=subject.adapters[at // len(PROMPTS)])
    found = {}
    while engine.sampling:
        for finished in engine.advance():
            assert not isinstance(finished.outcome, Exception), finished.outcome
            found[finished.ticket, 0] = finished.outcome.sequences[0]
    # The others' bursts are several tokens long, so the request that needs the host ends last.
    assert list(found)[-1] == (0, 0)
    subject.check(found)
    assert found[0, 0].tokens[:8] == expected[0, 0].tokens[:8]


def test_biases_are_added_on_the_device(subject: Subject) -> None:
    engine = subject.engine
    params = SamplingParams(max_tokens=21, seed=5, stop=[])
    for ticket in range(4):
        plain = SampleRequest(
            prompt=ModelInput.from_ints(PROMPTS[0]), num_samples=1, sampling_params=params
        )
        controls = SampleControls(bias_tokens=[7 + ticket], biases=[1000.0])
        biased = StoredSampleRequest(**plain.model_dump(), controls=controls)
        engine.submit(ticket, biased if ticket else plain, adapter=None)
    while engine.sampling:
        for finished in engine.advance():
            assert not isinstance(finished.outcome, Exception), finished.outcome
            tokens = finished.outcome.sequences[0].tokens
            expected = 7 + finished.ticket
            assert (set(tokens) == {expected}) == bool(finished.ticket)
    graphs = subject.runner._graphs
    assert graphs is not None
    assert any(recipe.biased for recipe in graphs._graphs)


def test_streamed_tokens_are_the_result(subject: Subject) -> None:
    found = subject.sample_with_graphs(streams=True, samples=1)
    assert len(found) == 8


def test_few_pages_preempt_and_keep_the_tokens(tmp_path: Path) -> None:
    """With pages for a few sequences, several steps ahead are reserved only where they fit."""
    tight = Subject(tmp_path, "qwen3", kv_tokens=11 * 64, max_sequences=8)
    found = tight.sample_with_graphs(max_tokens=80, adapters=tight.adapters[:3])
    assert all(len(sequence.tokens) == 80 for sequence in found.values())
    tight.check(found)
