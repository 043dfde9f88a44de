"""Models whose attention does more than causal softmax, far beyond their windows."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
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
    work,
)
from numerics.mixtures import MIXTURES, merged_parameters, write_mixture
from numerics.test_families import write_model
from tinkex.engine import Engine, EngineSettings
from tinkex.engine.adapters.checkpoints import from_peft_names
from tinkex.engine.model.attention import CacheShapes, SeenLayer
from tinkex.engine.model.attention_scores import Scoring
from tinkex.engine.model.base_model import context_length
from tinkex.engine.sampling import cache_reads
from tinkex.wire.inputs import Datum, ModelInput

#: MLA: keys are wider than values.
MLA = {"q_lora_rank": 24, "kv_lora_rank": 16, "num_key_value_heads": 4}
MLA |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}

#: A page has 16 tokens, so a window is in one page or in several. Caps are as large as the scores.
MODELS: dict[str, dict[str, Any]] = {
    "Mistral": {"sliding_window": 20},
    "Gemma3Text": {"head_dim": 16, "sliding_window": 8},
    "Gemma2": {
        "head_dim": 16,
        "sliding_window": 8,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 1.0,
        "final_logit_softcapping": 2.0,
    },
    "Youtu": MLA,
    # With experts: sinks and windows, and MLA.
    "GptOss": MIXTURES["GptOss"],
    "DeepseekV3": MIXTURES["DeepseekV3"],
}

RANK = 4
SCALE = 32 / RANK
PROMPT = np.random.default_rng(0).integers(0, VOCABULARY, 50).tolist()


class Subject(NamedTuple):
    engine: Engine
    adapter: Path
    #: Logprobs of the tokens after the first, by transformers' own code with the adapter merged.
    expected: Callable[[list[int]], npt.NDArray[np.float32]]
    #: Gradients of minus the sum of these logprobs by the adapter's tensors.
    expected_gradients: Callable[[list[int]], dict[str, torch.Tensor]]


@pytest.fixture(scope="module", params=MODELS)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    folder = tmp_path_factory.mktemp("model")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write = write_mixture if request.param in MIXTURES else write_model
        write(folder, request.param, **MODELS[request.param])
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager"
        )
    if request.param in MIXTURES:
        model.set_experts_implementation("eager")
    engine = Engine(
        EngineSettings(
            # Prompts are computed in several chunks.
            name="windows",
            folder=folder,
            device="cpu",
            kv_tokens=1024,
            max_batch_tokens=16,
        )
    )
    adapter = random_adapter(engine, tmp_path_factory.mktemp("a") / "adapter", rank=RANK)
    tensors = load_file(adapter / "adapter_model.safetensors")

    def logprobs(tokens: list[int]) -> torch.Tensor:
        weights = merged_parameters(model, from_peft_names(tensors), SCALE)
        output = torch.func.functional_call(
            model, weights, (torch.tensor([tokens[:-1]]),), tie_weights=False
        )
        found: torch.Tensor = output.logits[0].log_softmax(dim=-1)
        return found.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]

    def expected(tokens: list[int]) -> npt.NDArray[np.float32]:
        with torch.no_grad():
            return logprobs(tokens).numpy()

    def expected_gradients(tokens: list[int]) -> dict[str, torch.Tensor]:
        leaves = list(tensors.values())
        for leaf in leaves:
            leaf.requires_grad_()
        found = torch.autograd.grad(-logprobs(tokens).sum(), leaves)
        return dict(zip(tensors, found, strict=True))

    return Subject(engine, adapter, expected, expected_gradients)


@pytest.mark.parametrize("form", ["ranges", "table"])
def test_sampling_equals_a_pass_over_all_tokens(
    subject: Subject, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two samples of one prompt, a short prompt beside them, and the base model."""
    monkeypatch.setattr(cache_reads, "gather_is_cheaper", lambda *_: form == "table")
    requests = [
        request(PROMPT[:20], samples=2, max_tokens=80, seed=1, stop=[]),
        request(PROMPT[5:8], max_tokens=30, seed=2, stop=[]),
        request(PROMPT[:40], max_tokens=20, seed=3, stop=[]),
    ]
    first, second, _ = sample(subject.engine, requests, [subject.adapter, subject.adapter, None])
    for prompt, answer in ((PROMPT[:20], first), (PROMPT[5:8], second)):
        for sequence in answer.sequences:
            expected = subject.expected(prompt + sequence.tokens)[len(prompt) - 1 :]
            np.testing.assert_allclose(sequence.logprobs_np, expected, atol=1e-5)


def test_a_prompt_in_chunks_and_a_prefix_hit(subject: Subject) -> None:
    """The second prompt continues the first, of which full pages are in the cache."""
    sample(subject.engine, [request(PROMPT, max_tokens=1, seed=1)], [subject.adapter])
    prompt = [*PROMPT, *PROMPT[:10]]
    (answer,) = sample(
        subject.engine,
        [request(prompt, max_tokens=4, seed=1, stop=[], prompt_logprobs=True)],
        [subject.adapter],
    )
    expected = subject.expected(prompt + answer.sequences[0].tokens)
    np.testing.assert_allclose(
        answer.sequences[0].logprobs_np, expected[len(prompt) - 1 :], atol=1e-5
    )
    assert answer.prompt_logprobs is not None
    np.testing.assert_allclose(
        np.array(answer.prompt_logprobs[1:], np.float32), expected[: len(prompt) - 1], atol=1e-5
    )


def test_packed_rows_and_their_gradients(subject: Subject, tmp_path: Path) -> None:
    """Rows of different lengths in one batch, of one adapter and of the base model beside it."""
    engine, rows = subject.engine, [PROMPT, PROMPT[3:9], PROMPT[10:12]]
    model_from(engine, "m", subject.adapter)
    output = engine.run_pass("m", work([datum(row) for row in rows]), backward=True)
    for row, found in zip(rows, output.loss_fn_outputs, strict=True):
        np.testing.assert_allclose(found["logprobs"].to_numpy(), subject.expected(row), atol=1e-5)
    found_gradients = gradients(engine, "m", tmp_path / "snapshot")
    engine.drop("m")
    by_row = [subject.expected_gradients(row) for row in rows]
    for name in found_gradients:
        expected = torch.stack([each[name] for each in by_row]).sum(dim=0)
        gap = (found_gradients[name] - expected).abs().max() / expected.abs().max()
        assert gap < 1e-5, name


def datum(tokens: list[int]) -> Datum:
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": np.array(tokens[1:]),
            "weights": np.ones(len(tokens) - 1, np.float32),
        },
    )


def test_the_context_is_longer_than_the_window(subject: Subject) -> None:
    assert subject.engine.facts.max_context_length == 128


def test_a_window_that_the_models_code_does_not_ask_for_limits_the_context() -> None:
    config = transformers.MistralConfig(sliding_window=8, max_position_embeddings=64)
    shapes = CacheShapes((2, 8), (2, 8))
    asked, ignored = (SeenLayer(shapes, Scoring(1.0, window)) for window in (8, None))
    assert context_length(config, [asked, asked]) == 64
    assert context_length(config, [asked, ignored]) == 8
