"""Mixtures, windows, MLA and recurrent layers on a GPU, against the CPU in float32.

In float32 both must agree to rounding. In bfloat16 sampled logprobs must be those of a forward pass,
and gradients near those of the CPU. Without a GPU the tests compare the CPU with itself.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from numerics.helpers import (
    VOCABULARY,
    gradients,
    model_from,
    random_adapter,
    request,
    sample,
    work,
)
from numerics.hybrids import HYBRIDS, write_hybrid
from numerics.mixtures import MIXTURES, write_mixture
from numerics.test_families import write_model
from numerics.test_windows import MODELS
from tinkex.engine import Engine, EngineSettings
from tinkex.wire.inputs import Datum, ModelInput

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

#: The caps of the real models. In bfloat16 tighter ones round transformers' own scores too coarsely.
CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
ATTENTION = {**MODELS, "Gemma2": {**MODELS["Gemma2"], **CAPS}}

WRITERS: dict[str, Callable[[Path, str], Path]] = {
    **dict.fromkeys(HYBRIDS, write_hybrid),
    **dict.fromkeys(MIXTURES, write_mixture),
    **dict.fromkeys(
        ATTENTION, lambda folder, family: write_model(folder, family, **ATTENTION[family])
    ),
}


def datum_of(tokens: list[int]) -> Datum:
    weights = np.ones(len(tokens) - 1, np.float32)
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": np.array(tokens[1:]), "weights": weights},
    )


class Result(NamedTuple):
    """Of a prompt and a sampled answer: with an adapter, and with the base model beside it."""

    tokens: list[int]
    sampled: np.ndarray[Any, Any]
    trained: np.ndarray[Any, Any]
    gradients: dict[str, torch.Tensor]


def run(
    folder: Path, adapter: Path, snapshot: Path, tokens: list[int] | None, **settings: Any
) -> Result:
    """`tokens` are trained on; by default those that were sampled."""
    engine = Engine(
        EngineSettings(
            name="family", folder=folder, kv_tokens=2048, memory_bytes=4 << 30, **settings
        )
    )
    prompt = np.random.default_rng(0).integers(0, VOCABULARY, 70).tolist()
    answers = sample(
        engine,
        [request(prompt, samples=3, max_tokens=30, seed=1, stop=[]) for _ in range(2)],
        [adapter, None],
    )
    sequence = answers[0].sequences[2]
    tokens = tokens or prompt + sequence.tokens
    model_from(engine, "m", adapter)
    rows = [datum_of(each) for each in ([5, 6, 7], tokens, [8, 9])]
    output = engine.run_pass("m", work(rows), backward=True)
    found = output.loss_fn_outputs[1]["logprobs"].to_numpy()
    return Result(tokens, sequence.logprobs_np, found, gradients(engine, "m", snapshot))


def difference(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The relative difference of the whole gradient."""
    square = sum(float((found[name] - wanted[name]).square().sum()) for name in wanted)
    return (square / sum(float(each.square().sum()) for each in wanted.values())) ** 0.5


@pytest.mark.parametrize("family", WRITERS)
def test_a_family_on_a_gpu_equals_the_cpu(family: str, tmp_path: Path) -> None:
    folder = WRITERS[family](tmp_path / "model", family)
    maker = Engine(EngineSettings(name="maker", folder=folder, device="cpu", kv_tokens=512))
    adapter = random_adapter(maker, tmp_path / "adapter")
    found = run(folder, adapter, tmp_path / "a", None, device=DEVICE, dtype="float32")
    wanted = run(folder, adapter, tmp_path / "b", found.tokens, device="cpu", dtype="float32")
    np.testing.assert_allclose(found.sampled, wanted.trained[69:], atol=2e-3)
    np.testing.assert_allclose(found.trained, wanted.trained, atol=2e-3)
    assert difference(found.gradients, wanted.gradients) < 5e-3

    rounded = run(folder, adapter, tmp_path / "c", None, device=DEVICE, dtype="bfloat16")
    assert np.abs(rounded.sampled - rounded.trained[69:]).mean() < 5e-2
    again = run(folder, adapter, tmp_path / "d", rounded.tokens, device="cpu", dtype="float32")
    assert np.abs(rounded.trained - again.trained).mean() < 0.1
    if family not in HYBRIDS:  # with random weights, rounding changes theirs by any amount
        assert difference(rounded.gradients, again.gradients) < 0.25


@pytest.mark.skipif(DEVICE == "cpu", reason="records CUDA graphs")
@pytest.mark.parametrize("family", WRITERS)
def test_decode_steps_of_a_family_are_graphs(family: str, tmp_path: Path) -> None:
    """Sampled with graphs: with an adapter and without, some tokens by the host, in several bursts."""
    engine = Engine(
        EngineSettings(
            name="family",
            folder=WRITERS[family](tmp_path / "model", family),
            device=DEVICE,
            dtype="bfloat16",
            kv_tokens=2048,
            memory_bytes=4 << 30,
        )
    )
    adapter = random_adapter(engine, tmp_path / "adapter")
    prompt = np.random.default_rng(0).integers(0, VOCABULARY, 70).tolist()
    requests = [
        request(prompt, samples=3, max_tokens=30, seed=1, stop=[]),
        request(prompt, samples=1, max_tokens=30, seed=2, stop=[], top_k=20),
    ]
    sample(engine, requests[:1])
    assert engine._sampler is not None
    runner = engine._sampler._runner
    assert runner.compiler is not None
    runner.compiler.waits = True
    sample(engine, requests, [adapter, adapter])
    answers = sample(engine, requests, [adapter, adapter])
    assert not runner.compiler.refused
    assert runner._graphs is not None
    assert runner._graphs._graphs
    model_from(engine, "m", adapter)
    for answer in answers:
        tokens = prompt + answer.sequences[0].tokens
        output = engine.run_pass("m", work([datum_of(tokens)]), backward=False)
        passed = output.loss_fn_outputs[0]["logprobs"].to_numpy()[69:]
        assert np.abs(answer.sequences[0].logprobs_np - passed).mean() < 5e-2
