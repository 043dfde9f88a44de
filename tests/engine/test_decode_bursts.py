"""Bursts of decode steps in the whole engine, with steps run one by one in place of CUDA graphs.

The same tokens as without graphs, for models whose own layers run in the steps.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import plain_decode_ops
from numerics.helpers import random_adapter
from numerics.mixtures import write_mixture
from numerics.pictures import picture, text, write_image_model
from tinkex.engine import Engine, EngineSettings
from tinkex.engine import model as package
from tinkex.engine.sampling.decode_graphs import DecodeGraphs, Recipe
from tinkex.engine.sampling.kernel_compiler import KernelCompiler
from tinkex.wire.inputs import ModelInput
from tinkex.wire.sampling import SampledSequence, SampleRequest, SamplingParams

WRITERS: dict[str, Callable[[Path, str], Path]] = {
    "Qwen3Moe": write_mixture,
    "Qwen3_5": write_image_model,  # recurrent, and with images
}


class EagerGraph(NamedTuple):
    """A step that runs when a graph would be replayed."""

    graphs: DecodeGraphs
    recipe: Recipe

    def replay(self) -> None:
        self.graphs._step(self.recipe, self.graphs._state)


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in plain_decode_ops.MODULES:
        monkeypatch.setitem(sys.modules, f"tinkex.engine.model.{name}", plain_decode_ops)
        monkeypatch.setattr(package, name, plain_decode_ops, raising=False)

    def run(self: KernelCompiler, step: Callable[[], object]) -> None:
        with torch.inference_mode():
            step()

    monkeypatch.setattr(KernelCompiler, "_run", run)
    monkeypatch.setattr(DecodeGraphs, "_record", lambda self, recipe: EagerGraph(self, recipe))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)


def prompts(family: str) -> list[ModelInput]:
    found = [ModelInput(chunks=[text(length, seed=length)]) for length in (14, 31)]
    if family == "Qwen3_5":
        found.append(ModelInput(chunks=[text(5), picture(2, 3), text(9, seed=2)]))
    return found


def sampled(
    engine: Engine, adapters: Sequence[Path | None], family: str
) -> dict[tuple[int, int], SampledSequence]:
    """Some requests need the host for each token; those beside them do not."""
    cases = [(prompt, adapter) for adapter in adapters for prompt in prompts(family)]
    for ticket, (prompt, adapter) in enumerate(cases):
        controls: dict[str, Any] = {"top_k": 5} if ticket % 3 == 1 else {}
        params = SamplingParams(max_tokens=12, seed=ticket, stop=[], **controls)
        one = SampleRequest(prompt=prompt, num_samples=2, sampling_params=params)
        engine.submit(ticket, one, adapter=adapter)
    found: dict[tuple[int, int], SampledSequence] = {}
    while engine.sampling:
        for finished in engine.advance():
            assert not isinstance(finished.outcome, Exception), finished.outcome
            for at, sequence in enumerate(finished.outcome.sequences):
                found[finished.ticket, at] = sequence
    return found


def engine_on(folder: Path, *, graphs: bool) -> Engine:
    engine = Engine(
        EngineSettings(name="bursts", folder=folder, device="cpu", kv_tokens=1024, max_sequences=14)
    )
    if graphs:
        engine.model.decoder = engine.model.original_decoder({})
        assert engine.model.decoder is not None
    return engine


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", WRITERS)
def test_bursts_sample_the_same_tokens(family: str, tmp_path: Path) -> None:
    folder = WRITERS[family](tmp_path / "model", family)
    plain, engine = (engine_on(folder, graphs=graphs) for graphs in (False, True))
    adapters = [
        None,
        random_adapter(plain, tmp_path / "a"),
        random_adapter(plain, tmp_path / "b", rank=6, seed=1),
    ]
    expected = sampled(plain, adapters, family)
    sampled(engine, [None], family)  # makes the sampler
    assert engine._sampler is not None
    runner = engine._sampler._runner
    assert runner.compiler is not None
    runner.compiler.waits = True
    found = sampled(engine, adapters, family)
    assert runner.decode_steps > 1
    assert not runner.compiler.refused
    assert runner._graphs is not None
    assert runner._graphs._graphs
    for key, one in expected.items():
        assert found[key].tokens == one.tokens
        assert found[key].logprobs == pytest.approx(one.logprobs, abs=1e-3)
