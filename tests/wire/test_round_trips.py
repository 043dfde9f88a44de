"""Random objects go through JSON and protobuf, both ways, and come back equal."""

import random

import numpy as np
import pytest

from tinkex import types
from tinkex.wire.codec import decode_forward_json, decode_json, encode_json
from tinkex.wire.protobuf import (
    decode_forward_backward_output,
    decode_forward_backward_request,
    decode_sample_response,
    encode_forward_backward_output,
    encode_forward_backward_request,
    encode_sample_response,
)

ROUNDS = 60
WORDS = ["", "a", "é", "weights", "a.b:c", "\n", "x" * 40]


class Maker:
    """Random wire objects."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.np = np.random.default_rng(seed)

    def some(self, make, most=4):
        return [make() for _ in range(self.rng.randrange(most))]

    def maybe(self, make):
        return make() if self.rng.random() < 0.5 else None

    def name(self):
        return self.rng.choice(WORDS) + str(self.rng.randrange(100))

    def floats(self, *shape):
        return self.np.normal(size=shape).astype(np.float32)

    def ints(self, *shape):
        return self.np.integers(-(2**62), 2**62, size=shape)

    def tensor(self):
        rng = self.rng
        kind = rng.randrange(4)
        if kind == 0:
            return types.TensorData(data=self.ints(rng.randrange(5)), dtype="int64")
        if kind == 1:
            shape = [rng.randrange(1, 4) for _ in range(rng.randrange(1, 4))]
            return types.TensorData.from_numpy(self.floats(*shape))
        if kind == 2:
            return types.TensorData.from_numpy(self.floats(rng.randrange(3), 2))
        rows, columns = rng.randrange(1, 5), rng.randrange(1, 6)
        mask = self.np.random((rows, columns)) < 0.4
        return types.TensorData(
            data=self.floats(int(mask.sum())),
            dtype="float32",
            shape=[rows, columns],
            sparse_crow_indices=[0, *np.cumsum(mask.sum(axis=1)).tolist()],
            sparse_col_indices=np.nonzero(mask)[1].tolist(),
        )

    def chunk(self, *, pointer):
        kind = self.rng.randrange(4 if pointer else 3)
        count = self.maybe(lambda: self.rng.randrange(100))
        if kind == 0:
            tokens = self.np.integers(0, 2**31 - 1, size=self.rng.randrange(6))
            return types.EncodedTextChunk(tokens=tokens)
        if kind == 1:
            data = self.rng.randbytes(self.rng.randrange(9))
            return types.ImageChunk(data=data, format="png", expected_tokens=count)
        if kind == 2:
            return types.DmelChunk(dmel=self.rng.randbytes(5))
        return types.ImageAssetPointerChunk(location="a", format="jpeg", expected_tokens=count)

    def prompt(self, *, pointer=False):
        return types.ModelInput(chunks=self.some(lambda: self.chunk(pointer=pointer)))

    def span(self):
        kind = self.rng.choice([types.PromptProvenanceSpan, types.SampledProvenanceSpan])
        return kind(
            sequence_id=self.name(), offset=self.rng.randrange(9), length=self.rng.randrange(9)
        )

    def datum(self):
        inputs = {self.name(): self.tensor() for _ in range(self.rng.randrange(4))}
        if self.rng.random() < 0.5:
            return types.Datum(self.prompt(), inputs)
        return types.Datum(self.prompt(), inputs, [self.span()], [self.span(), self.span()])

    def request(self):
        config = {self.name(): self.rng.choice([0.5, -1.0, "text", ""]) for _ in range(3)}
        loss = self.rng.choice(["cross_entropy", "ppo", "custom"])
        work = types.ForwardBackwardInput(self.some(self.datum), loss, self.maybe(lambda: config))
        return types.ForwardBackwardRequest(work, "m" + self.name(), self.rng.randrange(1, 2**31))

    def output(self):
        outputs = []
        for _ in range(self.rng.randrange(5)):
            shape = self.rng.choice([(3,), (1, 2), (2, 2), (0,)])
            tensors = {"logprobs": types.TensorData.from_numpy(self.floats(*shape))}
            outputs.append(tensors if self.rng.random() < 0.8 else {})
        metrics = {self.name(): self.rng.uniform(-9, 9) for _ in range(3)}
        return types.ForwardBackwardOutput("ArrayRecord", outputs, metrics)

    def topk(self, length):
        k = self.rng.randrange(1, 4)
        rows = [
            self.maybe(lambda: [(self.rng.randrange(1, 99), -0.5) for _ in range(k)])
            for _ in range(length)
        ]
        table = types.TopkLogprobs.from_rows(rows)
        return table if table.token_ids.size else None

    def sequence(self):
        length = self.rng.randrange(1, 6)
        return types.SampledSequence(
            self.rng.choice(["stop", "length"]),
            self.name(),
            self.np.integers(0, 999, size=length),
            self.maybe(lambda: self.floats(length)),
            self.maybe(lambda: self.topk(length)),
        )

    def sample(self):
        return types.SampleResponse(
            self.some(self.sequence),
            self.maybe(lambda: np.concatenate([[np.nan], self.floats(3)])),
            self.maybe(lambda: self.topk(4)),
            self.maybe(self.tensor),
            self.rng.randrange(9),
            self.maybe(lambda: types.PromptAltTokens(self.tensor(), self.tensor())),
        )

    def sample_request(self):
        return types.SampleRequest(
            num_samples=self.rng.randrange(1, 9),
            prompt=self.prompt(pointer=True),
            sampling_params=types.SamplingParams(
                max_tokens=self.maybe(lambda: self.rng.randrange(99)),
                seed=self.maybe(lambda: self.rng.randrange(2**31)),
                stop=self.rng.choice([None, "x", ["x", "é"], [1, 2], []]),
                temperature=self.rng.random(),
            ),
            base_model=self.maybe(self.name),
            sampling_session_id=self.maybe(self.name),
            seq_id=self.maybe(lambda: self.rng.randrange(10**18)),
            prompt_logprobs=self.rng.choice([None, True, False]),
            target_prompt_logprobs=self.maybe(self.tensor),
        )


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_passes(seed):
    request = Maker(seed).request()

    body = encode_forward_backward_request(request)

    assert decode_forward_backward_request(body) == (request, False)
    assert decode_forward_json(encode_json(request)) == (request, False)
    work = request.forward_backward_input
    forward = types.ForwardRequest(work, request.model_id, request.seq_id)
    assert decode_forward_json(encode_json(forward)) == (request, True)


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_results_of_passes(seed):
    output = Maker(seed).output()

    assert decode_forward_backward_output(encode_forward_backward_output(output)) == output
    assert decode_json(types.ForwardBackwardOutput, encode_json(output)) == output


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_samples(seed):
    response = Maker(seed).sample()
    ids = [sequence.sequence_id for sequence in response.sequences]

    assert decode_sample_response(encode_sample_response(response), ids) == response
    assert decode_json(types.SampleResponse, encode_json(response)) == response


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_requests_for_samples(seed):
    request = Maker(seed).sample_request()

    assert decode_json(types.SampleRequest, encode_json(request)) == request
