"""Partial outputs of streamed requests."""

from collections import defaultdict
from typing import Any

from tinkex.engine import Engine
from tinkex.engine.sampling.interface import PartialOutput
from tinkex.wire.inputs import ModelInput
from tinkex.wire.sampling import SampleRequest, SampleResponse, SamplingParams


def request(*, num_samples: int = 1, **params: Any) -> SampleRequest:
    return SampleRequest(
        num_samples=num_samples,
        prompt=ModelInput.from_ints([1, 2, 3]),
        sampling_params=SamplingParams(**{"seed": 1, "stop": [], "max_tokens": 40, **params}),
    )


def run(engine: Engine) -> tuple[list[list[PartialOutput]], dict[int, SampleResponse]]:
    """The partial outputs of every burst, and the results."""
    partial, answers = [], {}
    while engine.sampling:
        for finished in engine.advance():
            assert not isinstance(finished.outcome, Exception)
            answers[finished.ticket] = finished.outcome
        partial.append(engine.partial_outputs())
    return partial, answers


def test_partial_outputs_add_up_to_the_result(engine: Engine) -> None:
    engine.submit(1, request(num_samples=3), adapter=None, streams=True)
    partial, answers = run(engine)
    assert len([burst for burst in partial if burst]) >= 5  # 40 tokens in bursts of 8
    tokens: defaultdict[int, list[int]] = defaultdict(list)
    logprobs: defaultdict[int, list[float]] = defaultdict(list)
    for output in (each for burst in partial for each in burst):
        assert output.ticket == 1
        assert output.start == len(tokens[output.sequence])
        tokens[output.sequence] += output.tokens
        logprobs[output.sequence] += output.logprobs
    for index, sequence in enumerate(answers[1].sequences):
        assert tokens[index] == sequence.tokens
        assert logprobs[index] == sequence.logprobs


def test_requests_without_streaming_have_no_partial_output(engine: Engine) -> None:
    engine.submit(1, request(), adapter=None)
    engine.submit(2, request(), adapter=None, streams=True)
    partial, answers = run(engine)
    assert {output.ticket for burst in partial for output in burst} == {2}
    assert answers[1].sequences[0].tokens == answers[2].sequences[0].tokens


def test_a_canceled_request_has_no_partial_output(engine: Engine) -> None:
    engine.submit(1, request(max_tokens=200), adapter=None, streams=True)
    engine.advance()
    engine.cancel(1)
    assert engine.partial_outputs() == []
