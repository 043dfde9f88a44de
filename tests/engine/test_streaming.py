"""Tokens told as they are drawn."""

from collections import defaultdict
from typing import Any

from tinkex.engine import Engine
from tinkex.engine.sampling.sampler import PartialOutput
from tinkex.wire.inputs import ModelInput
from tinkex.wire.sampling import SampleRequest, SampleResponse, SamplingParams


def request(*, num_samples: int = 1, **params: Any) -> SampleRequest:
    return SampleRequest(
        num_samples=num_samples,
        prompt=ModelInput.from_ints([1, 2, 3]),
        sampling_params=SamplingParams(**{"seed": 1, "stop": [], "max_tokens": 40, **params}),
    )


def run(engine: Engine) -> tuple[list[list[PartialOutput]], dict[int, SampleResponse]]:
    """What every burst told, and what was answered."""
    told, answers = [], {}
    while engine.sampling:
        for finished in engine.advance():
            assert not isinstance(finished.outcome, Exception)
            answers[finished.ticket] = finished.outcome
        told.append(engine.partial_outputs())
    return told, answers


def test_partial_outputs_add_up_to_the_result(engine: Engine) -> None:
    engine.submit(1, request(num_samples=3), adapter=None, streams=True)
    told, answers = run(engine)
    assert len([burst for burst in told if burst]) >= 5  # 40 tokens in bursts of 8
    tokens: defaultdict[int, list[int]] = defaultdict(list)
    logprobs: defaultdict[int, list[float]] = defaultdict(list)
    for grown in (each for burst in told for each in burst):
        assert grown.ticket == 1
        assert grown.start == len(tokens[grown.sequence])
        tokens[grown.sequence] += grown.tokens
        logprobs[grown.sequence] += grown.logprobs
    for index, sequence in enumerate(answers[1].sequences):
        assert tokens[index] == sequence.tokens
        assert logprobs[index] == sequence.logprobs


def test_requests_without_streaming_have_no_partial_output(engine: Engine) -> None:
    engine.submit(1, request(), adapter=None)
    engine.submit(2, request(), adapter=None, streams=True)
    told, answers = run(engine)
    assert {grown.ticket for burst in told for grown in burst} == {2}
    assert answers[1].sequences[0].tokens == answers[2].sequences[0].tokens


def test_a_canceled_request_has_no_partial_output(engine: Engine) -> None:
    engine.submit(1, request(max_tokens=200), adapter=None, streams=True)
    engine.advance()
    engine.cancel(1)
    assert engine.partial_outputs() == []
