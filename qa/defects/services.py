"""Fake services that misbehave in the way that shows a defect."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from tinkex.testing import Answer, FakeService


class Slow(FakeService):
    """Delays the responses of some endpoints."""

    def __init__(self, delays: Mapping[str, float], **settings: Any) -> None:
        super().__init__(**settings)
        self._delays = delays

    async def answer(self, method: str, endpoint: str, headers: Any, body: bytes) -> Any:
        await asyncio.sleep(self._delays.get(endpoint, 0.0))
        return await super().answer(method, endpoint, headers, body)


class Failing(FakeService):
    """Always gives the same response on some endpoints."""

    def __init__(self, answers: Mapping[str, Answer], **settings: Any) -> None:
        super().__init__(**settings)
        self._answers = answers

    async def answer(self, method: str, endpoint: str, headers: Any, body: bytes) -> Any:
        if endpoint in self._answers:
            self.script(endpoint, self._answers[endpoint])
        return await super().answer(method, endpoint, headers, body)


class FirstPassFails(FakeService):
    """Rejects the first pass that arrives, which may be any chunk of a batch."""

    def __init__(self) -> None:
        super().__init__(config={"fwdbwd_max_chunk_len": 2})
        self.script("forward_backward", Answer(status=422, body={"detail": "refused"}))


def requests_of(fake: FakeService, endpoint: str) -> list[Any]:
    return [seen for seen in fake.requests if seen.endpoint == endpoint]


def bodies_of(fake: FakeService, *endpoints: str) -> list[dict[str, Any]]:
    return [seen.json() for seen in fake.requests if seen.endpoint in endpoints]


def scripted(endpoint: str, *answers: Answer) -> FakeService:
    fake = FakeService()
    fake.script(endpoint, *answers)
    return fake


class MetricWithoutColon(FakeService):
    """Reports a metric whose name has no colon."""

    async def answer(self, method: str, endpoint: str, headers: Any, body: bytes) -> Any:
        from tinkex.wire.protobuf import (
            decode_forward_backward_output,
            encode_forward_backward_output,
        )
        from tinkex.wire.training import ForwardBackwardOutput

        status, sent, answer = await super().answer(method, endpoint, headers, body)
        if endpoint == "retrieve_future" and "protobuf" in sent.get("content-type", ""):
            output = decode_forward_backward_output(answer)
            answer = encode_forward_backward_output(
                ForwardBackwardOutput(
                    loss_fn_output_type=output.loss_fn_output_type,
                    loss_fn_outputs=output.loss_fn_outputs,
                    metrics={**output.metrics, "plain": 1.0},
                )
            )
        return status, sent, answer


class Bfloat16(FakeService):
    """Returns the target logprobs of a sample, all 1.0, as bfloat16."""

    async def answer(self, method: str, endpoint: str, headers: Any, body: bytes) -> Any:
        from tinkex.wire.proto import tinkex_wire_pb2 as pb

        status, sent, answer = await super().answer(method, endpoint, headers, body)
        if endpoint == "retrieve_future" and "protobuf" in sent.get("content-type", ""):
            message = pb.SampleResponse.FromString(answer)
            tensor = message.target_prompt_logprobs
            tensor.dtype = pb.DTYPE_BFLOAT16
            tensor.dense = b"\x80\x3f" * 3
            tensor.shape[:] = [3, 1]
            answer = message.SerializeToString()
        return status, sent, answer
