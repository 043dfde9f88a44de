"""
Faulty servers: a proxy in front of a correct server that introduces one fault.

Each fault was found in a self-hosted server. A fault may change the request before it is forwarded,
and the response before it is returned.
"""

import asyncio
import itertools
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from tinkex.wire.codec import PROTOBUF_TYPE
from tinkex.wire.inputs import Datum
from tinkex.wire.protobuf import (
    decode_forward_backward_output,
    decode_forward_backward_request,
    decode_sample_response,
    encode_forward_backward_output,
    encode_forward_backward_request,
    encode_sample_response,
)
from tinkex.wire.sampling import SampledSequence
from tinkex.wire.tensors import TensorData
from tinkex.wire.training import (
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
)


@dataclass
class Message:
    """A request or response body."""

    path: str
    body: bytes
    content_type: str
    status: int = 200

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @json.setter
    def json(self, value: Any) -> None:
        self.body = json.dumps(value).encode()

    def read(self) -> dict[str, Any]:
        """The body if it is a JSON object, else an empty dict."""
        try:
            found = json.loads(self.body)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}


class Fault:
    """No fault."""

    def request(self, message: Message) -> Message | None:
        """Changes a request; a returned message is used as the response."""
        return None

    def answer(self, request: Message, message: Message) -> None:
        """Changes a response."""


def is_pass(message: Message) -> bool:
    return message.path.endswith("/forward_backward") and message.content_type == PROTOBUF_TYPE


class Averages(Fault):
    """The loss is the mean over tokens."""

    def request(self, message: Message) -> Message | None:
        if is_pass(message) and message.body[:1] != b"\xff":
            decoded, forward_only = decode_forward_backward_request(message.body)
            data = decoded.forward_backward_input.data
            tokens = sum(datum.model_input.length for datum in data)
            averaged = []
            for datum in data:
                inputs = dict(datum.loss_fn_inputs)
                if "weights" in inputs:
                    inputs["weights"] = TensorData.from_numpy(inputs["weights"].to_numpy() / tokens)
                averaged.append(Datum(model_input=datum.model_input, loss_fn_inputs=inputs))
            message.body = encode_forward_backward_request(
                ForwardBackwardRequest(
                    forward_backward_input=ForwardBackwardInput._of(
                        averaged, decoded.forward_backward_input.loss_fn, None
                    ),
                    model_id=decoded.model_id,
                    seq_id=decoded.seq_id,
                ),
                forward_only=forward_only,
            )
        return None


class ReplacesLosses(Fault):
    """Unknown losses run as cross-entropy."""

    def request(self, message: Message) -> Message | None:
        if is_pass(message):
            message.body = message.body.replace(b"\x0cno_such_loss", b"\x0dcross_entropy")
        return None


class IgnoresSamplingParameter(Fault):
    """One sampling parameter is ignored."""

    def __init__(self, name: str) -> None:
        self.name = name

    def request(self, message: Message) -> Message | None:
        if message.path.endswith("/asample") and (body := message.read()):
            body.get("sampling_params", {}).pop(self.name, None)
            message.json = body
        return None


class NewIdsForRepeats(Fault):
    """A repeated submission gets a new id."""

    def __init__(self) -> None:
        self.real: dict[str, str] = {}
        self.numbers = itertools.count()

    def request(self, message: Message) -> Message | None:
        if message.path.endswith("/retrieve_future") and (body := message.read()):
            message.json = {**body, "request_id": self.real.get(body.get("request_id", ""), "-")}
        return None

    def answer(self, request: Message, message: Message) -> None:
        found = message.read()
        if message.status == 200 and "request_id" in found and "queue_state" not in found:
            alias = f"again-{next(self.numbers)}"
            self.real[alias] = found["request_id"]
            message.json = {**found, "request_id": alias}


class FollowsTraining(Fault):
    """Every sampler uses the newest weights."""

    def __init__(self) -> None:
        self.newest: str | None = None

    def request(self, message: Message) -> Message | None:
        if message.path.endswith("/asample") and self.newest and (body := message.read()):
            message.json = {**body, "sampling_session_id": self.newest, "seq_id": None}
        return None

    def answer(self, request: Message, message: Message) -> None:
        if found := message.read().get("sampling_session_id"):
            self.newest = found


class RefusesOutOfOrder(Fault):
    """A step that arrives out of order is a 409."""

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}

    def request(self, message: Message) -> Message | None:
        if is_pass(message) and message.body[:1] != b"\xff":
            decoded, _ = decode_forward_backward_request(message.body)
            model, number = decoded.model_id, decoded.seq_id or 0
        elif message.path.endswith("/optim_step"):
            body = message.read()
            model, number = body.get("model_id", ""), body.get("seq_id") or 0
        else:
            return None
        if number > self.seen.get(model, 0) + 1:
            return Message(message.path, b'{"detail":"too early"}', "application/json", 409)
        self.seen[model] = max(number, self.seen.get(model, 0))
        return None


class OddMetrics(Fault):
    """Metrics without a reducer."""

    def answer(self, request: Message, message: Message) -> None:
        if message.content_type == PROTOBUF_TYPE and b"loss:sum" in message.body:
            found = decode_forward_backward_output(message.body)
            message.body = encode_forward_backward_output(
                ForwardBackwardOutput(
                    loss_fn_output_type=found.loss_fn_output_type,
                    loss_fn_outputs=found.loss_fn_outputs,
                    metrics={"loss": found.metrics["loss:sum"]},
                )
            )


class OtherLogprobs(Fault):
    """Samples use other weights than training."""

    def answer(self, request: Message, message: Message) -> None:
        if message.content_type == PROTOBUF_TYPE and b":sum" not in message.body:
            found = decode_sample_response(message.body)
            sequences = [
                SampledSequence(
                    sequence.stop_reason,
                    "",
                    tokens_np=sequence.tokens_np,
                    logprobs_np=sequence.logprobs_np - 0.1,
                )
                for sequence in found.sequences
            ]
            message.body = encode_sample_response(found.model_copy(update={"sequences": sequences}))


class ServerErrorForEverything(Fault):
    """Client errors are a 500."""

    def answer(self, request: Message, message: Message) -> None:
        if message.status in (400, 404, 422):
            message.status = 500


class NeverHolds(Fault):
    """Polls are not held: clients poll in a busy loop."""


class Proxy:
    """Forwards everything to a correct server, through a fault."""

    def __init__(self, url: str, fault: Fault, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.fault = fault
        self.session = session

    async def handle(self, request: web.Request) -> web.Response:
        message = Message(
            request.path, await request.read(), request.headers.get("Content-Type", "")
        )
        got = self.fault.request(message)
        if got is None:
            got = await self.forward(request, message)
            self.fault.answer(message, got)
        return web.Response(
            status=got.status, body=got.body, headers={"Content-Type": got.content_type}
        )

    async def forward(self, request: web.Request, message: Message) -> Message:
        headers = {
            name: value
            for name, value in request.headers.items()
            if name.lower() not in ("host", "content-length")
        }
        is_poll = request.path.endswith("/retrieve_future")
        never_holds = is_poll and isinstance(self.fault, NeverHolds)
        try:
            async with self.session.request(
                request.method,
                f"{self.url}{request.raw_path}",
                data=message.body,
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=0.05 if never_holds else 60),
            ) as answered:
                kind = answered.headers.get("Content-Type", "")
                return Message(request.path, await answered.read(), kind, answered.status)
        except TimeoutError:
            pending = {"type": "try_again", "request_id": "-", "queue_state": "active"}
            return Message(request.path, json.dumps(pending).encode(), "application/json", 408)


@contextmanager
def in_front_of(url: str, fault: Fault) -> Iterator[str]:
    """The URL of a proxy with the fault, which runs until the block ends."""
    address: Future[str] = Future()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        async with aiohttp.ClientSession() as session:
            app = web.Application(client_max_size=2**26)
            app.router.add_route("*", "/{path:.*}", Proxy(url, fault, session).handle)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
            try:
                await runner.setup()
                await web.TCPSite(runner, "127.0.0.1", 0).start()
                address.set_result(f"http://127.0.0.1:{runner.addresses[0][1]}")
            except Exception as error:
                address.set_exception(error)
                raise
            await stop.wait()
            await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    try:
        yield address.result(10)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()
