"""An executor that draws as many tokens as are asked for, and tells them as it goes."""

import asyncio
from typing import Any

import numpy as np

from server.echo import BASE, EchoExecutor
from tinkex.server.executor import Outcome, Task, Work
from tinkex.wire.codec import decode_json
from tinkex.wire.proto.frames_pb2 import Tokens
from tinkex.wire.protobuf import encode_sample_response
from tinkex.wire.sampling import SampledSequence, SampleRequest, SampleResponse

#: So many tokens are told at a time, and that often.
TOGETHER, EVERY_S = 200, 0.005


class StreamingExecutor(EchoExecutor):
    """Draws as many tokens as are asked for, quickly, whoever reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: dict[bytes, int] = {}
        self.given_up = 0

    async def run(self, base_model: str, work: Work, *, incarnation: int | None = None) -> Outcome:
        if work.task is not Task.SAMPLE:
            return await super().run(base_model, work, incarnation=incarnation)
        request = decode_json(SampleRequest, work.payload)
        most = request.sampling_params.max_tokens or 1
        try:
            for start in range(0, most, TOGETHER):
                if work.on_tokens is not None:
                    told = Tokens(sequence=0, start=start)
                    told.tokens.extend(range(start, start + TOGETHER))
                    told.logprobs.extend([-0.5] * TOGETHER)
                    work.on_tokens(told)
                self.drawn[work.payload] = start + TOGETHER
                await asyncio.sleep(EVERY_S)
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        sequence = SampledSequence(
            "length",
            "",
            tokens_np=np.arange(most, dtype=np.int32),
            logprobs_np=np.full(most, -0.5, np.float32),
        )
        return Outcome(
            result=encode_sample_response(SampleResponse(sequences=[sequence])), compute_s=0.0
        )


def sample_body(most: int, **fields: Any) -> dict[str, Any]:
    return {
        "prompt": {"chunks": [{"tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": most},
        "num_samples": 1,
        "base_model": BASE,
        **fields,
    }
