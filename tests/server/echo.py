"""
A fake executor: integers instead of tensors.

A model is one number and a gradient. A backward pass adds its number of tokens to the gradient. A
step sets the number to `2 * number + gradient`, so that the order of steps is visible. A forward pass
returns the number. Tests can observe and pause the work.
"""

import asyncio
import atexit
import functools
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tinkex.models.tiny_model import write_tiny_tokenizer
from tinkex.server.executor import (
    EngineKilled,
    EngineLost,
    OnTokens,
    ServedModel,
    WorkFailed,
)
from tinkex.wire.codec import decode_json, encode_json
from tinkex.wire.errors import UserFailure
from tinkex.wire.proto.frames_pb2 import Done, Order, Ready, Stats
from tinkex.wire.protobuf import (
    decode_forward_backward_request,
    encode_forward_backward_output,
    encode_sample_response,
)
from tinkex.wire.sampling import SampledSequence, SampleRequest, SampleResponse
from tinkex.wire.tensors import TensorData
from tinkex.wire.training import ForwardBackwardOutput, OptimStepRequest

BASE = "test/echo"


@functools.cache
def tokenizer_folder() -> Path:
    """The folder of a model that has nothing but a small tokenizer."""
    folder = Path(tempfile.mkdtemp(prefix="tinkex-echo-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_tiny_tokenizer(folder)
    return folder


def task_of(order: Order) -> str:
    """The kind of an order, such as `run_pass`."""
    return order.WhichOneof("work") or ""


def content(order: Order) -> Any:
    """What an order contains, such as a `Pass`."""
    return getattr(order, task_of(order))


@dataclass
class Number:
    value: int = 0
    gradient: int = 0


class EchoExecutor:
    """Runs work on the event loop, immediately unless paused."""

    def __init__(self, *names: str, folder: Path | None = None) -> None:
        folder = folder or tokenizer_folder()
        self.served = tuple(ServedModel(name=name, folder=folder) for name in names or (BASE,))
        self.models: dict[str, Number] = {}
        #: All work that was run, in order.
        self.ran: list[Order] = []
        #: The token callbacks of streamed samples, by `id(order)`.
        self.on_tokens: dict[int, OnTokens] = {}
        self.open = asyncio.Event()
        self.open.set()
        self.entered = asyncio.Semaphore(0)
        self._incarnation = 1
        self._died = asyncio.Event()

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def ready(self, base_model: str) -> int:
        return self._incarnation

    async def run(self, base_model: str, work: Order, *, incarnation: int | None = None) -> Done:
        mine = self._incarnation
        if incarnation is not None and incarnation != mine:
            raise EngineKilled("another one")
        self.entered.release()
        opened = asyncio.create_task(self.open.wait())
        died = asyncio.create_task(self._died.wait())
        await asyncio.wait({opened, died}, return_when=asyncio.FIRST_COMPLETED)
        opened.cancel()
        died.cancel()
        if mine != self._incarnation:
            raise EngineLost("died")
        self.ran.append(work)
        try:
            return Done(result=self._do(work))
        except UserFailure as failure:
            raise WorkFailed("user", str(failure)) from failure

    async def send(
        self,
        base_model: str,
        order: Order,
        *,
        incarnation: int | None = None,
        on_tokens: OnTokens | None = None,
    ) -> asyncio.Future[Done]:
        if on_tokens is not None:
            self.on_tokens[id(order)] = on_tokens
        return asyncio.create_task(self.run(base_model, order, incarnation=incarnation))

    def waiting_for(self, base_model: str) -> str | None:
        return None

    def facts(self, base_model: str) -> Ready | None:
        return None

    def stats(self, base_model: str) -> Stats | None:
        return None

    def die(self) -> None:
        """Crash: lose the memory and all running work, and restart at once."""
        self._incarnation += 1
        self.models.clear()
        died, self._died = self._died, asyncio.Event()
        died.set()

    def tasks(self, *kinds: str) -> list[str]:
        """The finished work of these kinds."""
        return [task_of(work) for work in self.ran if not kinds or task_of(work) in kinds]

    def _do(self, work: Order) -> bytes:
        order = content(work)
        match task_of(work):
            case "create":
                if json.loads(order.lora_config)["rank"] > 1000:
                    raise UserFailure("rank is too large; 1 to 1000 are supported")
                self.models[order.model_id] = Number()
            case "run_pass":
                return self._pass(work)
            case "optim_step":
                decode_json(OptimStepRequest, order.payload.inline)
                model = self.models[order.model_id]
                model.value, model.gradient = 2 * model.value + model.gradient, 0
                return encode_json({"metrics": {"value:sum": float(model.value)}})
            case "clear_gradients":
                self.models[order.model_id].gradient = 0
            case "save":
                Path(order.folder).mkdir(parents=True)
                (Path(order.folder) / "value").write_text(str(self.models[order.model_id].value))
                return b'{"size_bytes": 1}'
            case "load":
                value = int((Path(order.folder) / "value").read_text())
                self.models[order.model_id] = Number(value=value)
            case "snapshot":
                Path(order.folder).mkdir(parents=True)
                model = self.models[order.model_id]
                (Path(order.folder) / "number").write_text(f"{model.value} {model.gradient}")
                return b'{"size_bytes": 3}'
            case "restore":
                value, gradient = (Path(order.folder) / "number").read_text().split()
                self.models[order.model_id] = Number(value=int(value), gradient=int(gradient))
            case "drop":
                self.models.pop(order.model_id, None)
            case "sample":
                return self._sample(work)
        return b"{}"

    def _pass(self, work: Order) -> bytes:
        order = work.run_pass
        file = order.payload.file
        body = Path(file).read_bytes() if file else order.payload.inline
        request, _ = decode_forward_backward_request(body)
        requested = request.forward_backward_input
        if requested.loss_fn != "cross_entropy":
            raise UserFailure(f"loss {requested.loss_fn} is not known; cross_entropy is")
        model = self.models[order.model_id]
        try:
            lengths = [datum.model_input.length for datum in requested.data]
        except ValueError as unknown:  # an image of unknown length; engines refuse all images
            raise UserFailure(str(unknown)) from unknown
        if order.backward:
            model.gradient += sum(lengths)
        return encode_forward_backward_output(
            ForwardBackwardOutput(
                loss_fn_output_type="ArrayRecord",
                loss_fn_outputs=[
                    {"logprobs": TensorData(data=[0.5] * length, dtype="float32")}
                    for length in lengths
                ],
                metrics={"loss:sum": float(model.value), "gradient:sum": float(model.gradient)},
            )
        )

    def _sample(self, work: Order) -> bytes:
        request = decode_json(SampleRequest, work.sample.payload.inline)
        folder = work.sample.adapter_folder
        value = int((Path(folder) / "value").read_text()) if folder else 7
        tokens, logprobs = np.array([value], np.int32), np.array([-0.5], np.float32)
        sequence = SampledSequence("length", "", tokens_np=tokens, logprobs_np=logprobs)
        return encode_sample_response(SampleResponse(sequences=[sequence] * request.num_samples))
