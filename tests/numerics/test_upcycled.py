"""Real weights behind experts: the embedded model as a Mixtral, judged by its text."""

import math
import runpy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers

from models.test_embedded_model import PROSE
from numerics.helpers import request, sample, work
from numerics.mixtures import engine_of
from numerics.test_mixtures import datum_of
from tinkex.engine import Engine
from tinkex.engine.adapters.merge import merge
from tinkex.engine.adapters.peft_export import export_adapter
from tinkex.engine.model.original_model import load
from tinkex.models.embedded import FetchFailed, ensure_embedded
from tinkex.models.tokenizer import Tokenizer, load_tokenizer
from tinkex.wire.training import AdamOptimizerConfig, AdamParams, LoraConfig

# The first use downloads 93 MB.
pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

EXAMPLE = Path(__file__).parents[2] / "examples" / "upcycle.py"
QUESTION = "The capital of France is"
LEARNED = " a ship, captain."


class Dense(NamedTuple):
    folder: Path
    tokenizer: Tokenizer
    prose: list[int]
    #: Of the tokens of the prose after the first.
    logprobs: torch.Tensor


@pytest.fixture(scope="module")
def dense() -> Dense:
    try:
        folder = ensure_embedded()
    except FetchFailed as error:
        pytest.skip(str(error))
    tokenizer = load_tokenizer(folder)
    prose = tokenizer.encode(PROSE)[:100]
    return Dense(folder, tokenizer, prose, logprobs_of(load(folder, torch.float32), prose))


def logprobs_of(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits = model(torch.tensor([tokens[:-1]])).logits[0]
    found: torch.Tensor = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    return found


class Mixture(NamedTuple):
    folder: Path
    engine: Engine


def upcycled(dense: Path, folder: Path, *, experts: int, copies: bool) -> Mixture:
    torch.manual_seed(1)
    runpy.run_path(str(EXAMPLE))["upcycle"](dense, folder, experts=experts, copies=copies)
    return Mixture(folder, engine_of(folder))


@pytest.fixture(scope="module")
def mixture(dense: Dense, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mixture]:
    """Four slices of each MLP."""
    folder = tmp_path_factory.mktemp("upcycled") / "mixture"
    yield upcycled(dense.folder, folder, experts=4, copies=False)
    shutil.rmtree(folder)  # half a gigabyte or more


def computes_the_same(engine: Engine, tokens: list[int], logprobs: torch.Tensor) -> np.ndarray:
    """Check the logprobs of a mixture, whose experts are all chosen by some token."""
    engine.create("m", LoraConfig(rank=4), AdamOptimizerConfig())
    output = engine.run_pass("m", work([datum_of(tokens)]), backward=False)
    engine.drop("m")
    found = output.loss_fn_outputs[0]["logprobs"].to_numpy()
    np.testing.assert_allclose(found, logprobs, atol=2e-3)
    assert output.metrics["e_frac_with_tokens:mean"] == 1.0
    return found


def test_the_mixture_reads_english_as_the_dense_model_does(mixture: Mixture, dense: Dense) -> None:
    found = computes_the_same(mixture.engine, dense.prose, dense.logprobs)
    assert 10 < math.exp(-found.mean()) < 40
    assert text_after(mixture, dense) == " Paris."


def test_copies_of_which_a_token_uses_two_compute_what_one_does(
    tiny_model: Path, tmp_path: Path
) -> None:
    tokens = load_tokenizer(tiny_model).encode(PROSE)[:100]
    logprobs = logprobs_of(load(tiny_model, torch.float32), tokens)
    mixture = upcycled(tiny_model, tmp_path / "mixture", experts=3, copies=True)
    computes_the_same(mixture.engine, tokens, logprobs)


def text_after(mixture: Mixture, dense: Dense, adapter: Path | None = None) -> str:
    prompt = dense.tokenizer.encode(QUESTION)
    count = len(dense.tokenizer.encode(LEARNED)) if adapter else 2
    asked = request(prompt, max_tokens=count, temperature=0.0, stop=[])
    (answer,) = sample(mixture.engine, [asked], [adapter])
    return dense.tokenizer.decode(answer.sequences[0].tokens)


def test_an_adapter_of_the_experts_learns_and_leaves(
    mixture: Mixture, dense: Dense, tmp_path: Path
) -> None:
    """It is trained, saved, sampled, merged and exported; all give the same text."""
    engine = mixture.engine
    tokens = dense.tokenizer.encode(QUESTION + LEARNED)
    experts = LoraConfig(rank=8, seed=1, train_attn=False, train_unembed=False)
    engine.create("m", experts, AdamOptimizerConfig())
    for _ in range(6):
        engine.run_pass("m", work([datum_of(tokens)]), backward=True)
        engine.optim_step("m", AdamParams(learning_rate=3e-3))
    (output,) = engine.run_pass("m", work([datum_of(tokens)]), backward=False).loss_fn_outputs
    ours = output["logprobs"].to_numpy()
    engine.save("m", tmp_path / "adapter", optimizer=False)
    engine.drop("m")
    assert text_after(mixture, dense, tmp_path / "adapter") == LEARNED
    merged = merge(mixture.folder, tmp_path / "adapter", tmp_path / "merged")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(merged.folder)
    np.testing.assert_allclose(logprobs_of(model, tokens), ours, atol=2e-3)
    prompt = torch.tensor([dense.tokenizer.encode(QUESTION)])
    answer = model.generate(prompt, max_new_tokens=len(tokens) - prompt.shape[1], do_sample=False)
    assert dense.tokenizer.decode(answer[0].tolist()) == QUESTION + LEARNED
    shutil.rmtree(merged.folder)

    from peft import PeftModel

    exported = tmp_path / "exported"
    exported.mkdir()
    shutil.copy(tmp_path / "adapter" / "adapter_config.json", exported)
    export_adapter(tmp_path / "adapter", exported, mixture.folder, "peft")
    base = transformers.AutoModelForCausalLM.from_pretrained(mixture.folder)
    opened = PeftModel.from_pretrained(base, exported)
    np.testing.assert_allclose(logprobs_of(opened, tokens), ours, atol=2e-3)
