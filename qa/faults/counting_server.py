"""The real application in a thread, with an executor that counts what it runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from server.echo import BASE, EchoExecutor
from server.hosting import hosted
from tinkex.wire.codec import decode_json, encode_json
from tinkex.wire.proto.frames_pb2 import Done, Order
from tinkex.wire.protobuf import encode_sample_response
from tinkex.wire.sampling import SampledSequence, SampleRequest, SampleResponse

PRIME = 1_000_003

__all__ = ["BASE", "CountingEcho", "echo_server"]


class CountingEcho(EchoExecutor):
    """Like `EchoExecutor`, but values stay small and samples depend on weights, seed and prompt."""

    async def run(self, base_model: str, work: Order, *, incarnation: int | None = None) -> Done:
        self.ran.append(work)
        return Done(result=self._do(work))

    def _do(self, work: Order) -> bytes:
        if work.HasField("optim_step"):
            model = self.models[work.optim_step.model_id]
            model.value, model.gradient = (3 * model.value + model.gradient + 1) % PRIME, 0
            return encode_json({"metrics": {"value:sum": float(model.value)}})
        return super()._do(work)

    def _sample(self, work: Order) -> bytes:
        request = decode_json(SampleRequest, work.sample.payload.inline)
        value = (
            int(Path(folder, "value").read_text()) if (folder := work.sample.adapter_folder) else 7
        )
        params = request.sampling_params
        mix = value + 31 * (params.seed or 0) + sum(request.prompt.to_ints())
        tokens = np.array([mix * (7 + i) % 1000 for i in range(params.max_tokens or 1)], np.int32)
        sequence = SampledSequence(
            "length", "", tokens_np=tokens, logprobs_np=np.float32(-0.5) * tokens
        )
        return encode_sample_response(SampleResponse(sequences=[sequence] * request.num_samples))

    def steps(self) -> dict[str, int]:
        """Number of optimizer steps that ran, by model."""
        counts: dict[str, int] = {}
        for work in self.ran:
            if work.HasField("optim_step"):
                model_id = work.optim_step.model_id
                counts[model_id] = counts.get(model_id, 0) + 1
        return counts

    def prompts(self) -> list[tuple[int, ...]]:
        """All sampled prompts, with repetitions."""
        return [
            tuple(decode_json(SampleRequest, work.sample.payload.inline).prompt.to_ints())
            for work in self.ran
            if work.HasField("sample")
        ]


@contextmanager
def echo_server(folder: Path) -> Iterator[tuple[str, CountingEcho]]:
    """The URL and the executor of a server that runs until the block ends."""
    ready: Future[tuple[str, CountingEcho]] = Future()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        executor = CountingEcho()
        async with hosted(executor, folder) as api:
            ready.set_result((str(api.http._base_url).rstrip("/"), executor))
            await stop.wait()

    def run() -> None:
        try:
            loop.run_until_complete(serve())
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error)
            raise

    thread = threading.Thread(target=run, name="echo-server", daemon=True)
    thread.start()
    try:
        yield ready.result(20)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(20)
        loop.close()
