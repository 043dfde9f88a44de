"""An executor whose samples are long and stream their tokens."""

import asyncio
from typing import Any

import numpy as np

from server.echo import BASE, EchoExecutor
from tinkex.server.executor import Outcome, Task, Work
from tinkex.wire.codec import decode_json
from tinkex.wire.proto.frames_pb2 import Tokens
from tinkex.wire.protobuf import encode_sample_response
from tinkex.wire.sampling import SampledSequence, SampleRequest, SampleResponse

CHUNK_TOKENS = 200
CHUNK_INTERVAL_S = 0.005


class StreamingExecutor(EchoExecutor):
    """Generates `max_tokens` tokens in quick chunks, whether or not a client reads them."""

    def __init__(self) -> None:
        super().__init__()
        #: Number of generated tokens, by payload.
        self.drawn: dict[bytes, int] = {}
        self.cancelled = 0

    async def run(self, base_model: str, work: Work, *, incarnation: int | None = None) -> Outcome:
        if work.task is not Task.SAMPLE:
            return await super().run(base_model, work, incarnation=incarnation)
        request = decode_json(SampleRequest, work.payload)
        max_tokens = request.sampling_params.max_tokens or 1
        try:
            for start in range(0, max_tokens, CHUNK_TOKENS):
                if work.on_tokens is not None:
                    chunk = Tokens(sequence=0, start=start)
                    chunk.tokens.extend(range(start, start + CHUNK_TOKENS))
                    chunk.logprobs.extend([-0.5] * CHUNK_TOKENS)
                    work.on_tokens(chunk)
                self.drawn[work.payload] = start + CHUNK_TOKENS
                await asyncio.sleep(CHUNK_INTERVAL_S)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        sequence = SampledSequence(
            "length",
            "",
            tokens_np=np.arange(max_tokens, dtype=np.int32),
            logprobs_np=np.full(max_tokens, -0.5, np.float32),
        )
        return Outcome(
            result=encode_sample_response(SampleResponse(sequences=[sequence])), compute_s=0.0
        )


def sample_body(max_tokens: int, **fields: Any) -> dict[str, Any]:
    return {
        "prompt": {"chunks": [{"tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": max_tokens},
        "num_samples": 1,
        "base_model": BASE,
        **fields,
    }
