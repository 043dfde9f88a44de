"""Biases, penalties and grammars: they hold, and the same seed gives the same tokens in any company."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tinkex.engine.sampling.guides import Guides
from tinkex.engine.sampling.sequences import SamplingConfig
from tinkex.engine.sampling.token_sampling import SampleStep, change_logits, sample_tokens
from tinkex.models.tokenizer import load_tokenizer
from tinkex.wire.errors import UserFailure

llguidance = pytest.importorskip("llguidance")

VOCABULARY = 400
END = 2
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def config(**fields: Any) -> SamplingConfig:
    return SamplingConfig(**{"temperature": 1.0, "top_k": None, "top_p": None, "seed": 1, **fields})


def test_biases_and_penalties_are_those_of_the_definition() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=VOCABULARY).astype(np.float32)
    tokens = [5, 5, 7]
    how = config(
        bias_tokens=(5, 9), biases=(1.5, -100.0), presence_penalty=0.25, frequency_penalty=0.5
    )
    expected = logits.astype(np.float64)
    expected[5] += 1.5 - 0.25 - 2 * 0.5
    expected[7] -= 0.25 + 0.5
    expected[9] -= 100.0
    changed = torch.from_numpy(logits.copy())
    change_logits(changed, how, tokens)
    np.testing.assert_allclose(changed.numpy(), expected, rtol=1e-6)


def test_logprobs_are_after_biases_and_before_the_guide(tiny_model: Path) -> None:
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(1))
    guide = guides(tiny_model).start(grammar(SCHEMA))
    how = config(bias_tokens=(7,), biases=(2.0,), temperature=0.5, is_guided=True)
    sampled = sample_tokens(logits.clone(), [SampleStep(how, 0, 0, (), guide)])
    expected = logits[0].double()
    expected[7] += 2.0
    expected = (expected / 0.5).log_softmax(0)
    assert sampled.logprobs[0] == pytest.approx(expected[sampled.tokens[0]].item(), rel=1e-5)
    assert guide.allowed_V()[sampled.tokens[0]]


def guides(folder: Path) -> Guides:
    return Guides(folder, vocab_size=VOCABULARY, end_tokens=[END])


def grammar(schema: Any) -> str:
    style = {"whitespace_flexible": False}
    return str(llguidance.LLMatcher.grammar_from_json_schema({**schema, "x-guidance": style}))


@pytest.mark.parametrize("how", [{}, {"temperature": 0.0}, {"top_p": 0.1}, {"top_k": 1}])
def test_a_guided_sequence_of_random_logits_is_valid_and_ends(
    tiny_model: Path, how: dict[str, Any]
) -> None:
    tokenizer = load_tokenizer(tiny_model)
    guide = guides(tiny_model).start(grammar(SCHEMA))
    noise = torch.Generator().manual_seed(3)
    tokens: list[int] = []
    while not tokens or tokens[-1] != END:
        logits = torch.randn(1, VOCABULARY, generator=noise)
        step = SampleStep(config(is_guided=True, **how), 0, len(tokens), tokens, guide)
        (token,) = sample_tokens(logits, [step]).tokens
        guide.accept(token)
        tokens.append(token)
        assert len(tokens) < 100
    assert guide.error is None
    value = json.loads(tokenizer.decode(tokens[:-1]))
    assert value["name"] in ("Ann", "Bob")
    assert value["age"] <= 9


def test_copies_of_a_guide_are_independent(tiny_model: Path) -> None:
    first = guides(tiny_model).start(grammar({"type": "object"}))
    before = first.allowed_V()
    copy = first.copy()
    copy.accept(int(before.nonzero()[0]))
    assert torch.equal(first.allowed_V(), before)
    assert not torch.equal(copy.allowed_V(), before)


def test_a_wrong_grammar_or_a_model_without_an_end_is_refused(tiny_model: Path) -> None:
    with pytest.raises(UserFailure, match="cannot be followed"):
        guides(tiny_model).start("start: nothing")
    with pytest.raises(UserFailure, match="no end token"):
        Guides(tiny_model, vocab_size=VOCABULARY, end_tokens=[]).start(grammar({}))
