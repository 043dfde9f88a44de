"""
For tests of programs that use tinkex: a service without network, model or server.

    from tinkex.testing import FakeService

    fake = FakeService()
    with fake.client() as service:
        training = service.create_lora_training_client("fake/model")
        training.forward_backward(data, "cross_entropy").result()
    assert [r.endpoint for r in fake.requests][-1] == "sessions/s-1/finish"

The fake stands where the network begins: everything above it, from encoding to ordering, retries
and futures, is the real client. It keeps the protocol's promises (steps run by number and once,
results stay readable) and has a toy for a model: each `optim_step` makes every token likelier.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self
from urllib.parse import unquote

from tinkex.client.transport import Request, Response, Streamed, TooSlow, Transport, Unreachable
from tinkex.wire.checkpoints import (
    LoadWeightsRequest,
    ParsedCheckpointTinkerPath,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
    WeightsInfoRequest,
)
from tinkex.wire.codec import (
    JSON_TYPE,
    PROTOBUF_TYPE,
    decode_forward_json,
    decode_json,
    decompress,
    encode_json,
)
from tinkex.wire.dialect import wants_protobuf
from tinkex.wire.errors import UserFailure, WireError
from tinkex.wire.futures import FutureRetrieveRequest, FuturesRetrieveRequest
from tinkex.wire.protobuf import (
    decode_forward_backward_request,
    encode_forward_backward_output,
    encode_sample_response,
)
from tinkex.wire.runs import CreateSessionRequest
from tinkex.wire.sampling import (
    CreateSamplingSessionRequest,
    JoinSamplingSessionRequest,
    PromptAltTokens,
    SampledSequence,
    SampleRequest,
    SampleResponse,
    TopkLogprobs,
)
from tinkex.wire.tensors import TensorData
from tinkex.wire.training import (
    CreateModelRequest,
    ForwardBackwardInput,
    ForwardBackwardOutput,
    OptimStepRequest,
    UnloadModelRequest,
)

if TYPE_CHECKING:
    from aiohttp import web

    from tinkex.client.service import ServiceClient
    from tinkex.client.settings import Settings

__all__ = ["Answer", "FakeService", "Hold", "Loopback", "Lost", "Seen", "write_tiny_model"]

#: When everything happened, as lists tell it.
A_TIME = "2026-01-01T00:00:00Z"
MAX_BODY_BYTES = 512 * 1024 * 1024
#: What a server refuses is refused here too.
MAX_RANK = 512
MOST_SAMPLES = 1024
SHORTEST_TTL_S = 3600
LONGEST_TTL_S = 10 * 365 * 24 * 3600
#: Clones of a sampling client number their samples from multiples of this.
CLONE_STRIDE = 10**9


def write_tiny_model(
    folder: str | Path, arch: Literal["qwen3", "llama"] = "qwen3", seed: int = 0
) -> Path:
    """A small random model that learns in seconds, for `tinkex serve`. Needs the extra `engine`."""
    from tinkex.engine.tiny import write_tiny_model as write

    return write(Path(folder), arch=arch, seed=seed)


# -- what can be made to go wrong --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer of your choice, instead of the service's."""

    status: int = 200
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Lost:
    """The connection breaks: before the service saw the request, or after it did its work."""

    after: bool = False
    #: The client notices by waiting too long, rather than by a reset.
    slow: bool = False


class Hold:
    """Requests to one endpoint wait here until they are released."""

    def __init__(self) -> None:
        #: Set once a request has arrived.
        self.arrived = threading.Event()
        self._released = False
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self._lock = threading.Lock()

    def release(self) -> None:
        with self._lock:
            self._released = True
            waiting, self._waiting = self._waiting, []
        for loop, event in waiting:
            loop.call_soon_threadsafe(event.set)

    async def _wait(self) -> None:
        event = asyncio.Event()
        with self._lock:
            if self._released:
                return
            self._waiting.append((asyncio.get_running_loop(), event))
        self.arrived.set()
        await event.wait()


@dataclass(frozen=True)
class Seen:
    """A request as the service saw it."""

    method: str
    #: The path below /api/v1/.
    endpoint: str
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


# -- the service -------------------------------------------------------------------------------------


@dataclass
class _Model:
    base_model: str
    rank: int
    steps: int = 0
    next: int = 1
    waiting: dict[int, Callable[[], Any]] = field(default_factory=dict)


#: A result: its JSON form, and its protobuf form if it has one.
_Result = tuple[Any, bytes | None]


class FakeService:
    """A Tinker service in memory. One instance may serve any number of clients."""

    def __init__(
        self,
        *,
        config: Mapping[str, Any] | None = None,
        dynamic_config: Mapping[str, Any] | None = None,
        base_models: tuple[str, ...] = ("fake/model",),
        hold_s: float = 0.2,
        sample_s: float = 0.0,
    ) -> None:
        self.base_models = base_models
        #: Everything that arrived, in order of arrival.
        self.requests: list[Seen] = []
        #: What the models ran, in the order they ran it: (model_id, seq_id, kind).
        self.ran: list[tuple[str, int, str]] = []
        #: Requests that clients took back.
        self.cancelled: list[str] = []
        self._config = dict(config or {})
        self._dynamic_config = dict(dynamic_config or {})
        self._hold_s = hold_s
        #: A sample that is not streamed takes this long.
        self._sample_s = sample_s
        self._ids = itertools.count(1)
        self._models: dict[str, _Model] = {}
        self._checkpoints: dict[str, _Model] = {}
        self._samplers: dict[str, dict[str, Any]] = {}
        self._by_number: dict[tuple[str, int], dict[str, Any]] = {}
        self._kinds: dict[tuple[str, int], str] = {}
        self._results: dict[str, _Result | UserFailure] = {}
        self._ready: dict[str, asyncio.Event] = {}
        #: The ids of finished samples by sampling session and clone, and who waits for more.
        self._finished: dict[tuple[str, int], list[str]] = defaultdict(list)
        self._more: dict[tuple[str, int], asyncio.Event] = defaultdict(asyncio.Event)
        self._clones = itertools.count(1)
        self._scripts: dict[str, list[Answer | Lost]] = defaultdict(list)
        self._holds: dict[str, Hold] = {}

    def client(self, **settings: Any) -> ServiceClient:
        """A client of this service; takes what `ServiceClient` takes."""
        from tinkex.client.service import ServiceClient

        settings = {"base_url": "http://fake.invalid", "api_key": "tml-fake", **settings}
        return ServiceClient(**settings, _make_transport=self.transport)

    def transport(self, base_url: str, settings: Settings | None = None) -> Transport:
        """The network, as a client sees it."""
        return _FakeTransport(self)

    def serve(self) -> Loopback:
        """
        The same service on a real socket of this machine, for programs in other processes.

            with fake.serve() as running:
                subprocess.run([...], env={"TINKER_BASE_URL": running.url, ...})
        """
        return Loopback(self)

    def script(self, endpoint: str, *answers: Answer | Lost) -> None:
        """
        What the next requests to an endpoint meet, in this order, before normal work goes on.

        An endpoint is what follows `/api/v1/`, without the query: "asample", "sessions/ID".
        """
        self._scripts[endpoint] += answers

    def hold(self, endpoint: str) -> Hold:
        """Make requests to an endpoint wait until the hold is released."""
        hold = self._holds[endpoint] = Hold()
        return hold

    # -- one request -----------------------------------------------------------------------------

    async def answer(
        self, method: str, endpoint: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Status, headers and body for one request. Raises `Unreachable` where that is scripted."""
        headers = {name.lower(): value for name, value in headers.items()}
        self.requests.append(Seen(method, endpoint, headers, body))
        place = endpoint.partition("?")[0]
        if hold := self._holds.get(place):
            await hold._wait()
        script = self._scripts[place]
        fault = script.pop(0) if script else None
        if isinstance(fault, Lost) and not fault.after:
            raise _lost(fault)
        if isinstance(fault, Answer):
            return fault.status, fault.headers, b"" if fault.body is None else _body(fault.body)
        status, kind, answer = await self._route(method, endpoint, headers, body)
        if isinstance(fault, Lost):
            raise _lost(fault)
        return status, {"content-type": kind}, answer

    async def _route(
        self, method: str, endpoint: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[int, str, bytes]:
        try:
            if endpoint == "retrieve_future":
                return await self._retrieve(headers, body)
            if endpoint == "retrieve_futures":
                return 200, JSON_TYPE, _body(await self._events(body))
            if endpoint == "stream_sample":
                return 200, "text/event-stream", self._stream(decode_json(SampleRequest, body))
            body = decompress(body, headers.get("content-encoding"), max_bytes=MAX_BODY_BYTES)
            found = self._handle(method, endpoint, headers, body)
        except WireError as error:
            return 422, JSON_TYPE, _body({"detail": error.detail()})
        except UserFailure as failure:
            return 400, JSON_TYPE, _body({"detail": str(failure)})
        except KeyError as error:
            return 404, JSON_TYPE, _body({"detail": f"there is no {error.args[0]}"})
        return 200, JSON_TYPE, _body(found)

    def _handle(self, method: str, endpoint: str, headers: Mapping[str, str], body: bytes) -> Any:
        first, _, rest = endpoint.partition("?")[0].partition("/")
        match method, first:
            case "GET", "training_runs" | "checkpoints":
                return self._lists(first, unquote(rest))
            case "POST" | "PUT" | "DELETE", "training_runs":
                self._change(method, unquote(rest), body)
                return {}
            case "GET", "healthz":
                return {"status": "ok"}
            case "GET", "get_server_capabilities":
                models = [{"model_name": name} for name in self.base_models]
                return {"supported_models": models}
            case "GET", "samplers":
                return self._samplers[unquote(rest)]
            case "POST", "client":
                return self._config if rest == "config" else self._dynamic_config
            case "POST", "create_session":
                decode_json(CreateSessionRequest, body)
                return {"session_id": f"s-{next(self._ids)}"}
            case "POST", "session_heartbeat" | "sessions" | "telemetry":
                return {"status": "accepted"} if first == "telemetry" else {}
            case "POST", "cancel_future":
                self.cancelled.append(json.loads(body)["request_id"])
                return {}
            case "POST", "get_info":
                model_id = json.loads(body)["model_id"]
                model = self._models[model_id]
                data = {"arch": "fake", "model_name": model.base_model}
                return {"model_id": model_id, "model_data": data, "lora_rank": model.rank}
            case "POST", "weights_info":
                path = decode_json(WeightsInfoRequest, body).tinker_path
                saved = self._checkpoints[path]
                return {
                    "base_model": saved.base_model,
                    "is_lora": True,
                    "lora_rank": saved.rank,
                }
            case "POST", "create_sampling_session":
                opened = decode_json(CreateSamplingSessionRequest, body)
                number = opened.sampling_session_seq_id
                return self._open_sampler(
                    f"{opened.session_id}:sample:{number}", opened.base_model, opened.model_path
                )
            case "POST", "join_sampling_session":
                self._samplers[decode_json(JoinSamplingSessionRequest, body).sampling_session_id]
                return {"client_counter": next(self._clones)}
            case "POST", "create_model":
                return self._create_model(decode_json(CreateModelRequest, body))
            case "POST", "unload_model":
                return self._unload(decode_json(UnloadModelRequest, body))
            case "POST", "asample":
                return self._sample(decode_json(SampleRequest, body))
            case "POST", _ if first in _STEPS:
                return self._step(first, headers, body)
        raise KeyError(
            f"endpoint {method} {endpoint} in the fake service: script() an answer to it"
        )

    # -- promises --------------------------------------------------------------------------------

    def _promise(self) -> str:
        request_id = f"r-{next(self._ids)}"
        self._ready[request_id] = asyncio.Event()
        return request_id

    def _keep(self, request_id: str, result: _Result | UserFailure) -> None:
        self._results[request_id] = result
        self._ready[request_id].set()

    async def _retrieve(self, headers: Mapping[str, str], body: bytes) -> tuple[int, str, bytes]:
        request_id = decode_json(FutureRetrieveRequest, body).request_id
        ready = self._ready[request_id]
        try:
            async with asyncio.timeout(self._hold_s):
                await ready.wait()
        except TimeoutError:
            pending = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
            return 408, JSON_TYPE, _body(pending)
        result = self._results[request_id]
        if isinstance(result, UserFailure):
            return 200, JSON_TYPE, _body({"error": str(result), "category": "user"})
        plain, packed = result
        if packed is not None and wants_protobuf(headers.get("accept")):
            return 200, PROTOBUF_TYPE, packed
        return 200, JSON_TYPE, _body(plain)

    async def _events(self, body: bytes) -> dict[str, Any]:
        """Which samples of one client have finished since its last question."""
        asked = decode_json(FuturesRetrieveRequest, body)
        target = (asked.target.sampling_session_id, asked.target.cloned_sampler_id)
        self._samplers[target[0]]
        finished = self._finished[target]
        if len(finished) <= asked.prev_cursor:
            self._more[target].clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._hold_s):
                    await self._more[target].wait()
        return {
            "completions": [self._event(each) for each in finished[asked.prev_cursor :]],
            "cursor": len(finished),
        }

    def _event(self, request_id: str) -> dict[str, Any]:
        result = self._results[request_id]
        if isinstance(result, UserFailure):
            return {"state": "failed", "request_id": request_id}
        size = len(result[1] or b"")
        return {
            "state": "finished",
            "request_id": request_id,
            "response_payload_uncompressed_size": size,
        }

    # -- models and their steps ------------------------------------------------------------------

    def _create_model(self, request: CreateModelRequest) -> dict[str, Any]:
        model_id = f"{request.session_id}:train:{request.model_seq_id}"
        if (known := self._by_number.get((model_id, 0))) is not None:
            return known
        if request.lora_config is None:
            raise UserFailure('create_model needs a "lora_config", such as {"rank": 32}.')
        rank = request.lora_config.rank
        request_id = self._promise()
        accepted = self._by_number[model_id, 0] = {"request_id": request_id, "model_id": model_id}
        if request.base_model not in self.base_models:
            names = ", ".join(self.base_models)
            failure = UserFailure(f"no base model {request.base_model!r}; there is: {names}")
            self._keep(request_id, failure)
        elif not 1 <= rank <= MAX_RANK:
            failure = UserFailure(f"lora_config.rank is {rank}; ranks go from 1 to {MAX_RANK}.")
            self._keep(request_id, failure)
        else:
            self._models[model_id] = _Model(request.base_model, rank)
            self._keep(request_id, ({"model_id": model_id}, None))
        return accepted

    def _unload(self, request: UnloadModelRequest) -> dict[str, Any]:
        del self._models[request.model_id]
        request_id = self._promise()
        self._keep(request_id, ({"model_id": request.model_id}, None))
        return {"request_id": request_id}

    def _step(self, kind: str, headers: Mapping[str, str], body: bytes) -> dict[str, Any]:
        """Accept a step at once, and run all steps whose turn has come."""
        model_id, number, name, run = _STEPS[kind](self, headers, body)
        model = self._models[model_id]
        if not number or number < 1:
            raise WireError(f"seq_id: steps are numbered from 1, not {number}.")
        first = self._kinds.setdefault((model_id, number), name)
        if first != name:
            raise WireError(
                f"seq_id: step {number} of this model was already used for {first}, so it cannot "
                f"be {name}."
            )
        if (known := self._by_number.get((model_id, number))) is not None:
            return known
        request_id = self._promise()
        accepted = self._by_number[model_id, number] = {"request_id": request_id}

        def run_and_keep() -> None:
            self.ran.append((model_id, number, name))
            try:
                self._keep(request_id, run(model))
            except UserFailure as failure:
                self._keep(request_id, failure)

        model.waiting[number] = run_and_keep
        while (turn := model.waiting.pop(model.next, None)) is not None:
            model.next += 1
            turn()
        return accepted

    def _pass(self, headers: Mapping[str, str], body: bytes) -> _Step:
        if headers.get("content-type") == PROTOBUF_TYPE:
            request, forward_only = decode_forward_backward_request(body)
        else:
            request, forward_only = decode_forward_json(body)

        def run(model: _Model) -> _Result:
            output = _toy_pass(request.forward_backward_input, model.steps)
            return output.model_dump(), encode_forward_backward_output(output)

        name = "forward" if forward_only else "forward_backward"
        return request.model_id, request.seq_id, name, run

    def _optim_step(self, headers: Mapping[str, str], body: bytes) -> _Step:
        request = decode_json(OptimStepRequest, body)

        def run(model: _Model) -> _Result:
            model.steps += 1
            return {"metrics": {"grad_norm:mean": 1.0}}, None

        return request.model_id, request.seq_id, "optim_step", run

    def _save_weights(self, headers: Mapping[str, str], body: bytes) -> _Step:
        request = decode_json(SaveWeightsRequest, body)

        def run(model: _Model) -> _Result:
            path = self._save(
                request.model_id,
                "weights",
                request.path,
                model,
                ttl_s=request.ttl_seconds,
                overwrite=request.overwrite,
            )
            return {"path": path}, None

        return request.model_id, request.seq_id, "save_weights", run

    def _save_for_sampler(self, headers: Mapping[str, str], body: bytes) -> _Step:
        request = decode_json(SaveWeightsForSamplerRequest, body)

        def run(model: _Model) -> _Result:
            kind, ttl_s = "sampler_weights", request.ttl_seconds
            path = self._save(request.model_id, kind, request.path, model, ttl_s=ttl_s)
            if request.path is not None:
                return {"path": path}, None
            session_id = request.model_id.partition(":")[0]
            sampler = f"{session_id}:sample:{request.sampling_session_seq_id}"
            return self._open_sampler(sampler, None, path), None

        return request.model_id, request.seq_id, "save_weights_for_sampler", run

    def _save_external(self, headers: Mapping[str, str], body: bytes) -> _Step:
        request = decode_json(SaveWeightsExternalRequest, body)

        def run(model: _Model) -> _Result:
            kind, ttl_s = "external_weights", request.ttl_seconds
            path = self._save(request.model_id, kind, request.path, model, ttl_s=ttl_s)
            return {"path": path}, None

        return request.model_id, request.seq_id, "save_weights_external", run

    def _load_weights(self, headers: Mapping[str, str], body: bytes) -> _Step:
        request = decode_json(LoadWeightsRequest, body)

        def run(model: _Model) -> _Result:
            if (saved := self._checkpoints.get(request.path)) is None:
                raise UserFailure(f"there is no checkpoint {request.path!r}")
            model.steps = saved.steps
            return {"path": request.path}, None

        return request.model_id or "", request.seq_id, "load_weights", run

    def _save(
        self,
        model_id: str,
        kind: str,
        name: str | None,
        model: _Model,
        *,
        ttl_s: int | None,
        overwrite: bool = False,
    ) -> str:
        _check_ttl(ttl_s)
        path = f"tinker://{model_id}/{kind}/{name or f'unnamed-{next(self._ids)}'}"
        try:
            ParsedCheckpointTinkerPath.from_tinker_path(path)
        except ValueError as error:
            raise UserFailure(f"checkpoint name {name!r} cannot be used: {error}") from error
        if path in self._checkpoints and not overwrite:
            raise UserFailure(f"{path} exists already; choose another name, or overwrite it")
        self._checkpoints[path] = _Model(model.base_model, model.rank, model.steps)
        return path

    def _change(self, method: str, rest: str, body: bytes) -> None:
        """Delete a checkpoint; publishing it and saying how long it is kept is only looked at."""
        run, _, name = rest.partition("/checkpoints/")
        for wish in ("/publish", "/ttl"):
            if name.endswith(wish):
                self._checkpoints[f"tinker://{run}/{name.removesuffix(wish)}"]
                if wish == "/ttl":
                    _check_ttl(json.loads(body)["ttl_seconds"])
                return
        if method == "DELETE":
            del self._checkpoints[f"tinker://{run}/{name}"]

    def _lists(self, what: str, rest: str) -> dict[str, Any]:
        """Runs and checkpoints, as the `RestClient` asks for them; everything is on one page."""
        run, _, part = rest.partition("/")
        if run and run not in self._models:
            raise KeyError(f"training run {run}")
        if what == "checkpoints" or part:
            found = [_checkpoint(path) for path in self._checkpoints if run in path]
            return {"checkpoints": found, "cursor": _page(found)}
        runs = [self._run(name) for name in self._models if name == (run or name)]
        return runs[0] if run else {"training_runs": runs, "cursor": _page(runs)}

    def _run(self, model_id: str) -> dict[str, Any]:
        model = self._models[model_id]
        return {
            "training_run_id": model_id,
            "base_model": model.base_model,
            "model_owner": "fake",
            "is_lora": True,
            "lora_rank": model.rank,
            "last_request_time": A_TIME,
        }

    # -- sampling --------------------------------------------------------------------------------

    def _open_sampler(
        self, sampler_id: str, base_model: str | None, model_path: str | None
    ) -> dict[str, Any]:
        if model_path is not None:
            base_model = self._checkpoints[model_path].base_model
        sampler = {"sampler_id": sampler_id, "base_model": base_model, "model_path": model_path}
        self._samplers[sampler_id] = sampler
        return {"sampling_session_id": sampler_id}

    def _sample(self, request: SampleRequest) -> dict[str, Any]:
        sampler_id, number = request.sampling_session_id or "", request.seq_id or 0
        path = request.model_path
        if sampler_id:
            path = self._samplers[sampler_id]["model_path"]
            if (known := self._by_number.get((sampler_id, number))) is not None:
                return known
        elif path is None and request.base_model not in self.base_models:
            raise KeyError(f"base model {request.base_model!r}")
        if not 1 <= request.num_samples <= MOST_SAMPLES:
            raise WireError.at(
                ("num_samples",),
                f"{request.num_samples} samples were asked for; 1 to {MOST_SAMPLES} are allowed.",
            )
        request_id = self._promise()
        accepted = {
            "request_id": request_id,
            "sample_sequence_ids": [f"q-{request_id}-{i}" for i in range(request.num_samples)],
        }
        if sampler_id:
            self._by_number[sampler_id, number] = accepted
        steps = self._checkpoints[path].steps if path else 0

        def draw() -> None:
            try:
                response = _toy_sample(request, steps)
            except UserFailure as failure:
                self._keep(request_id, failure)
            else:
                self._keep(request_id, (response.model_dump(), encode_sample_response(response)))
            target = (sampler_id, number // CLONE_STRIDE)
            self._finished[target].append(request_id)
            self._more[target].set()

        if self._sample_s:
            asyncio.get_running_loop().call_later(self._sample_s, draw)
        else:
            draw()
        return accepted

    def _stream(self, request: SampleRequest) -> bytes:
        """The events of a sample: the first token, the others, and the answer."""
        accepted = self._sample(request)
        result = self._results[accepted["request_id"]]
        events: list[tuple[str, Any]] = [("accepted", accepted)]
        if isinstance(result, UserFailure):
            events.append(("error", {"error": str(result), "category": "user"}))
        else:
            drawn = list(enumerate(result[0]["sequences"]))
            for part in (slice(None, 1), slice(1, None)):
                for index, sequence in drawn:
                    tokens, logprobs = sequence["tokens"][part], sequence["logprobs"][part]
                    told = {"sequence": index, "tokens": tokens, "logprobs": logprobs}
                    events.append(("token", told))
            ids = {"sample_sequence_ids": accepted["sample_sequence_ids"]}
            events.append(("done", {**result[0], **ids}))
        return b"".join(
            b"event: %s\ndata: %s\n\n" % (name.encode(), _body(data)) for name, data in events
        )


_Step = tuple[str, "int | None", str, Callable[[_Model], _Result]]
_STEPS: dict[str, Callable[[FakeService, Mapping[str, str], bytes], _Step]] = {
    "forward_backward": FakeService._pass,
    "forward": FakeService._pass,
    "optim_step": FakeService._optim_step,
    "save_weights": FakeService._save_weights,
    "save_weights_for_sampler": FakeService._save_for_sampler,
    "save_weights_external": FakeService._save_external,
    "load_weights": FakeService._load_weights,
}


def toy_logprob(steps: int) -> float:
    """What every token has after so many optimizer steps."""
    return -math.log(2) / (1 + steps)


def _toy_pass(work: ForwardBackwardInput, steps: int) -> ForwardBackwardOutput:
    known = {"clip_low_threshold", "clip_high_threshold", "beta"}
    if unknown := set(work.loss_fn_config or ()) - known:
        raise UserFailure(f"loss_fn_config: no setting {', '.join(sorted(unknown))}")
    outputs, loss = [], 0.0
    for index, datum in enumerate(work.data):
        targets = datum.loss_fn_inputs.get("target_tokens")
        if targets is None:
            raise UserFailure(f"datum {index} has no target_tokens")
        values = [toy_logprob(steps)] * len(targets.data)
        weights = datum.loss_fn_inputs.get("weights")
        loss -= sum(
            logprob * weight
            for logprob, weight in zip(
                values, weights.data if weights else [1.0] * len(values), strict=True
            )
        )
        outputs.append({"logprobs": TensorData(data=values, dtype="float32", shape=targets.shape)})
    return ForwardBackwardOutput("ArrayRecord", outputs, {"loss:sum": loss})


def _check_ttl(ttl_s: int | None) -> None:
    if ttl_s is not None and not SHORTEST_TTL_S <= ttl_s <= LONGEST_TTL_S:
        raise UserFailure(
            f"ttl_seconds is {ttl_s}; {SHORTEST_TTL_S} to {LONGEST_TTL_S} are allowed."
        )


def _toy_sample(request: SampleRequest, steps: int) -> SampleResponse:
    """Repeats the prompt as long as asked."""
    prompt = request.prompt.to_ints()
    if not prompt:
        raise UserFailure("the prompt is empty")
    logprob = toy_logprob(steps)
    count = request.sampling_params.max_tokens or len(prompt)
    tokens = list(itertools.islice(itertools.cycle(prompt), count))
    sequence = SampledSequence(
        "length",
        "",
        tokens,  # type: ignore[arg-type]
        [logprob] * count,  # type: ignore[arg-type]
    )
    if request.topk_sample_logprobs:
        rows = [[(token, logprob)] for token in tokens]
        sequence = sequence.model_copy(update={"topk_logprobs_np": TopkLogprobs.from_rows(rows)})
    answer: dict[str, Any] = {"sequences": [sequence] * request.num_samples}
    if request.prompt_logprobs:
        told = request.prompt_logprobs_last_n or len(prompt)
        first = max(1, len(prompt) - told)
        answer["prompt_logprobs_np"] = [math.nan] * first + [logprob] * (len(prompt) - first)
    if request.topk_prompt_logprobs:
        rows = [[(token, logprob)] for token in prompt[1:]]
        answer["topk_prompt_logprobs_np"] = TopkLogprobs.from_rows([None, *rows])
    if (wanted := request.target_prompt_logprobs) is not None:
        shape = list(wanted.to_numpy().shape)
        answer["target_prompt_logprobs"] = _filled(logprob, "float32", shape)
    if request.prompt_alt_tokens_k:
        shape = [len(prompt), request.prompt_alt_tokens_k]
        answer["prompt_alt_tokens"] = PromptAltTokens(
            _filled(prompt[0], "int64", shape), _filled(logprob, "float32", shape)
        )
    return SampleResponse(**answer)


def _filled(value: float, dtype: Literal["int64", "float32"], shape: list[int]) -> TensorData:
    return TensorData(data=[value] * math.prod(shape), dtype=dtype, shape=shape)


def _checkpoint(path: str) -> dict[str, Any]:
    kind, name = path.split("/")[-2:]
    return {
        "checkpoint_id": f"{kind}/{name}",
        "checkpoint_type": {"weights": "training", "sampler_weights": "sampler"}[kind],
        "time": A_TIME,
        "tinker_path": path,
    }


def _page(found: list[Any]) -> dict[str, int]:
    return {"offset": 0, "limit": len(found), "total_count": len(found)}


class _FakeTransport:
    def __init__(self, service: FakeService) -> None:
        self._service = service
        self._closed = False

    async def send(self, request: Request) -> Response:
        if self._closed:
            raise Unreachable("closed")
        # Every real request takes at least one turn of the loop.
        await asyncio.sleep(0)
        _, _, endpoint = request.url.partition("/api/v1/")
        try:
            async with asyncio.timeout(request.deadline_s):
                status, headers, body = await self._service.answer(
                    request.method, endpoint, request.headers, request.body or b""
                )
        except TimeoutError as error:
            raise TooSlow(f"no answer within {request.deadline_s:g} s") from error
        return Response(
            status_code=status,
            headers={name.lower(): value for name, value in headers.items()},
            content=body,
            request=request.bare(),
        )

    async def stream(self, request: Request) -> Streamed:
        """Whole events one after the other, as a service sends them that draws token by token."""
        answer = await self.send(request)
        pieces = iter(re.split(rb"(?<=\n\n)", answer.content))

        async def read() -> bytes:
            await asyncio.sleep(0)
            return next(filter(None, pieces), b"")

        return Streamed(
            status_code=answer.status_code,
            headers=answer.headers,
            request=answer.request,
            read=read,
            close=lambda: None,
        )

    async def close(self) -> None:
        self._closed = True


def _lost(fault: Lost) -> Unreachable:
    return TooSlow("no answer in time") if fault.slow else Unreachable("connection reset")


def _body(value: Any) -> bytes:
    return value if isinstance(value, bytes) else encode_json(value)


# -- on a socket ---------------------------------------------------------------------------------


class Loopback:
    """A fake service behind a real socket, on a thread of its own; see `FakeService.serve`."""

    def __init__(self, fake: FakeService) -> None:
        self.fake = fake
        #: Where it listens; set once it runs.
        self.url = ""
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    async def _serve(self) -> None:
        from aiohttp import web

        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_route("*", "/{tail:.*}", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        _, _, endpoint = request.path.partition("/api/v1/")
        try:
            status, headers, body = await self.fake.answer(
                request.method, endpoint, request.headers, await request.read()
            )
        except Unreachable:
            assert request.transport is not None
            request.transport.abort()
            raise web.HTTPInternalServerError from None
        return web.Response(status=status, headers=headers, body=body)
