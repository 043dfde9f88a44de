"""Biases, penalties and grammars: they hold, and the same seed gives the same tokens in any company."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tinkex.engine import Engine
from tinkex.engine.sampling.guides import Guide, Guides
from tinkex.engine.sampling.sequences import SamplingConfig
from tinkex.engine.sampling.token_sampling import SampleStep, change_logits, sample_tokens
from tinkex.models.tokenizer import load_tokenizer
from tinkex.wire.errors import UserFailure
from tinkex.wire.inputs import ModelInput
from tinkex.wire.sample_controls import SampleControls, StoredSampleRequest
from tinkex.wire.sampling import SamplingParams

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


def controlled(seed: int, **controls: Any) -> StoredSampleRequest:
    return StoredSampleRequest(
        prompt=ModelInput.from_ints([1, 2, 3]),
        num_samples=2,
        sampling_params=SamplingParams(max_tokens=24, seed=seed, top_p=0.9 if seed % 2 else 1.0),
        controls=SampleControls(**controls),
    )


def run(engine: Engine, requests: list[StoredSampleRequest]) -> list[list[list[int]]]:
    for ticket, one in enumerate(requests):
        engine.submit(ticket, one, adapter=None)
    found: dict[int, Any] = {}
    while engine.sampling:
        found |= {one.ticket: one.outcome for one in engine.advance()}
    return [[each.tokens for each in found[at].sequences] for at in range(len(requests))]


def test_controls_give_the_same_tokens_alone_and_in_company(
    engine: Engine, tiny_folder: Path
) -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {"bias_tokens": [50, 60], "biases": [4.0, -100.0]},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"grammar": grammar(SCHEMA)},
    ]
    requests = [controlled(seed, **kinds[seed % 4]) for seed in range(12)]
    together = run(engine, requests)
    assert [run(engine, [one])[0] for one in requests] == together
    assert len({str(tokens) for tokens in together}) > 8
    tokenizer = load_tokenizer(tiny_folder)
    for tokens in together[3]:
        assert json.loads(tokenizer.decode(tokens, skip_special_tokens=True))["age"] <= 9


def test_a_grammar_that_fails_ends_its_own_request_only(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(engine, [controlled(0)])
    engine.submit(0, controlled(0), adapter=None)
    engine.submit(1, controlled(1, grammar=grammar(SCHEMA)), adapter=None)
    # A token that is not allowed: the matcher has an error from then on.
    monkeypatch.setattr(Guide, "accept", lambda guide, _: guide._matcher.consume_token(50))
    found: dict[int, Any] = {}
    while engine.sampling:
        found |= {one.ticket: one.outcome for one in engine.advance()}
    assert isinstance(found[1], UserFailure)
    assert [[each.tokens for each in found[0].sequences]] == whole
    assert not engine.sampling
