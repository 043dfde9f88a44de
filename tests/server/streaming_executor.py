"""A fake executor that samples as many tokens as requested and streams them."""

import asyncio
from typing import Any

import numpy as np

from server.echo import BASE, EchoExecutor
from tinkex.wire.codec import decode_json
from tinkex.wire.proto.frames_pb2 import Done, Order, Tokens
from tinkex.wire.protobuf import encode_sample_response
from tinkex.wire.sampling import SampledSequence, SampleRequest, SampleResponse

#: Tokens per streamed update, and the time between updates.
TOKENS_PER_UPDATE, UPDATE_INTERVAL_S = 200, 0.005


class StreamingExecutor(EchoExecutor):
    """Samples quickly, whether or not the client reads."""

    def __init__(self) -> None:
        super().__init__()
        self.sampled: dict[bytes, int] = {}
        self.cancelled = 0

    async def run(self, base_model: str, work: Order, *, incarnation: int | None = None) -> Done:
        if not work.HasField("sample"):
            return await super().run(base_model, work, incarnation=incarnation)
        request = decode_json(SampleRequest, work.sample.payload.inline)
        most = request.sampling_params.max_tokens or 1
        try:
            for start in range(0, most, TOKENS_PER_UPDATE):
                if (on_tokens := self.on_tokens.get(id(work))) is not None:
                    reported = Tokens(sequence=0, start=start)
                    reported.tokens.extend(range(start, start + TOKENS_PER_UPDATE))
                    reported.logprobs.extend([-0.5] * TOKENS_PER_UPDATE)
                    on_tokens(reported)
                self.sampled[work.sample.payload.inline] = start + TOKENS_PER_UPDATE
                await asyncio.sleep(UPDATE_INTERVAL_S)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        sequence = SampledSequence(
            "length",
            "",
            tokens_np=np.arange(most, dtype=np.int32),
            logprobs_np=np.full(most, -0.5, np.float32),
        )
        return Done(
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
