"""`FakeService`: a Tinker service in memory."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from tinkex.client.http.transport import Transport
from tinkex.testing.fake_steps import STEPS, Result
from tinkex.testing.fake_store import FakeStore, Model
from tinkex.testing.fake_transport import MAX_BODY_BYTES, FakeTransport, Loopback
from tinkex.testing.faults import Answer, Hold, Lost, Seen
from tinkex.testing.toy_model import toy_sample
from tinkex.wire.checkpoints import WeightsInfoRequest
from tinkex.wire.codec import JSON_TYPE, PROTOBUF_TYPE, decode_json, decompress, encode_json
from tinkex.wire.errors import UserFailure, WireError
from tinkex.wire.futures import FutureRetrieveRequest, FuturesRetrieveRequest
from tinkex.wire.protobuf import encode_sample_response
from tinkex.wire.sampling import (
    CLONE_STRIDE,
    CreateSamplingSessionRequest,
    JoinSamplingSessionRequest,
    SampleRequest,
)
from tinkex.wire.sdk_versions import wants_protobuf
from tinkex.wire.sessions import CreateSessionRequest
from tinkex.wire.training import CreateModelRequest, UnloadModelRequest

if TYPE_CHECKING:
    from tinkex.client.service import ServiceClient
    from tinkex.client.settings import Settings

#: The limits of the real server.
MAX_RANK = 512
MAX_SAMPLES = 1024


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
        #: All requests, in order of arrival.
        self.requests: list[Seen] = []
        #: The steps that ran, in order: (model_id, seq_id, kind).
        self.ran: list[tuple[str, int, str]] = []
        #: Ids of requests that clients cancelled.
        self.cancelled: list[str] = []
        self._config = dict(config or {})
        self._dynamic_config = dict(dynamic_config or {})
        self._hold_s = hold_s
        #: Duration of a sample that is not streamed.
        self._sample_s = sample_s
        self._ids = itertools.count(1)
        self._store = FakeStore()
        self._by_number: dict[tuple[str, int], dict[str, Any]] = {}
        self._kinds: dict[tuple[str, int], str] = {}
        self._results: dict[str, Result | UserFailure] = {}
        self._ready: dict[str, asyncio.Event] = {}
        #: Ids of finished samples by sampling session and clone, and an event for new ones.
        self._finished: dict[tuple[str, int], list[str]] = defaultdict(list)
        self._more: dict[tuple[str, int], asyncio.Event] = defaultdict(asyncio.Event)
        self._clones = itertools.count(1)
        self._scripts: dict[str, list[Answer | Lost]] = defaultdict(list)
        self._holds: dict[str, Hold] = {}

    def client(self, **settings: Any) -> ServiceClient:
        """A client of this service; takes the arguments of `ServiceClient`."""
        from tinkex.client.service import ServiceClient

        settings = {"base_url": "http://fake.invalid", "api_key": "tml-fake", **settings}
        return ServiceClient(**settings, _make_transport=self.transport)

    def transport(self, base_url: str, settings: Settings | None = None) -> Transport:
        """A transport that sends requests to this service."""
        return FakeTransport(self)

    def serve(self) -> Loopback:
        """
        Serve this fake on a local socket, for programs in other processes.

            with fake.serve() as running:
                subprocess.run([...], env={"TINKER_BASE_URL": running.url, ...})
        """
        return Loopback(self)

    def script(self, endpoint: str, *answers: Answer | Lost) -> None:
        """
        Set responses or connection failures for the next requests to an endpoint, in this order.

        An endpoint is the path after `/api/v1/`, without the query: "asample", "sessions/ID".
        """
        self._scripts[endpoint] += answers

    def hold(self, endpoint: str) -> Hold:
        """Make requests to an endpoint wait until `release()` is called on the result."""
        hold = self._holds[endpoint] = Hold()
        return hold

    # -- one request -----------------------------------------------------------------------------

    async def answer(
        self, method: str, endpoint: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Status, headers and body for one request; `Unreachable` if the script says so."""
        headers = {name.lower(): value for name, value in headers.items()}
        self.requests.append(Seen(method, endpoint, headers, body))
        path = endpoint.partition("?")[0]
        if hold := self._holds.get(path):
            await hold.wait()
        script = self._scripts[path]
        fault = script.pop(0) if script else None
        if isinstance(fault, Lost) and not fault.after:
            raise fault.error()
        if isinstance(fault, Answer):
            return fault.status, fault.headers, b"" if fault.body is None else _body(fault.body)
        status, kind, answer = await self._route(method, endpoint, headers, body)
        if isinstance(fault, Lost):
            raise fault.error()
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
                return self._store.lists(first, unquote(rest))
            case "POST" | "PUT" | "DELETE", "training_runs":
                self._store.change(method, unquote(rest), body)
                return {}
            case "GET", "healthz":
                return {"status": "ok"}
            case "GET", "get_server_capabilities":
                models = [{"model_name": name} for name in self.base_models]
                return {"supported_models": models}
            case "GET", "samplers":
                return self._store.samplers[unquote(rest)]
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
                model = self._store.models[model_id]
                data = {"arch": "fake", "model_name": model.base_model}
                return {"model_id": model_id, "model_data": data, "lora_rank": model.rank}
            case "POST", "weights_info":
                path = decode_json(WeightsInfoRequest, body).tinker_path
                saved = self._store.checkpoints[path]
                return {
                    "base_model": saved.base_model,
                    "is_lora": True,
                    "lora_rank": saved.rank,
                }
            case "POST", "create_sampling_session":
                opened = decode_json(CreateSamplingSessionRequest, body)
                number = opened.sampling_session_seq_id
                return self._store.open_sampler(
                    f"{opened.session_id}:sample:{number}", opened.base_model, opened.model_path
                )
            case "POST", "join_sampling_session":
                self._store.samplers[
                    decode_json(JoinSamplingSessionRequest, body).sampling_session_id
                ]
                return {"client_counter": next(self._clones)}
            case "POST", "create_model":
                return self._create_model(decode_json(CreateModelRequest, body))
            case "POST", "unload_model":
                return self._unload(decode_json(UnloadModelRequest, body))
            case "POST", "asample":
                return self._sample(decode_json(SampleRequest, body))
            case "POST", _ if first in STEPS:
                return self._step(first, headers, body)
        raise KeyError(
            f"endpoint {method} {endpoint} in the fake service: use script() to set a response"
        )

    # -- futures ---------------------------------------------------------------------------------

    def _new_future(self) -> str:
        request_id = f"r-{next(self._ids)}"
        self._ready[request_id] = asyncio.Event()
        return request_id

    def _resolve(self, request_id: str, result: Result | UserFailure) -> None:
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
        """Samples of one client that finished since its last poll."""
        request = decode_json(FuturesRetrieveRequest, body)
        target = (request.target.sampling_session_id, request.target.cloned_sampler_id)
        self._store.samplers[target[0]]
        finished = self._finished[target]
        if len(finished) <= request.prev_cursor:
            self._more[target].clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._hold_s):
                    await self._more[target].wait()
        return {
            "completions": [self._event(each) for each in finished[request.prev_cursor :]],
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
        request_id = self._new_future()
        accepted = self._by_number[model_id, 0] = {"request_id": request_id, "model_id": model_id}
        if request.base_model not in self.base_models:
            names = ", ".join(self.base_models)
            failure = UserFailure(f"no base model {request.base_model!r}; there is: {names}")
            self._resolve(request_id, failure)
        elif not 1 <= rank <= MAX_RANK:
            failure = UserFailure(f"lora_config.rank is {rank}; ranks go from 1 to {MAX_RANK}.")
            self._resolve(request_id, failure)
        else:
            metadata = request.user_metadata
            noted = None if metadata is None else {k: str(v) for k, v in metadata.items()}
            self._store.models[model_id] = Model(request.base_model, rank, user_metadata=noted)
            self._resolve(request_id, ({"model_id": model_id}, None))
        return accepted

    def _unload(self, request: UnloadModelRequest) -> dict[str, Any]:
        del self._store.models[request.model_id]
        request_id = self._new_future()
        self._resolve(request_id, ({"model_id": request.model_id}, None))
        return {"request_id": request_id}

    def _step(self, kind: str, headers: Mapping[str, str], body: bytes) -> dict[str, Any]:
        """Accept a step, and run all steps whose predecessors have run."""
        model_id, number, name, run = STEPS[kind](self._store, headers, body)
        model = self._store.models[model_id]
        if not number or number < 1:
            raise WireError(f"seq_id: must be 1 or greater, not {number}.")
        first = self._kinds.setdefault((model_id, number), name)
        if first != name:
            raise WireError(
                f"seq_id: step {number} of this model was already used for {first}, so it cannot "
                f"be {name}."
            )
        if (known := self._by_number.get((model_id, number))) is not None:
            return known
        request_id = self._new_future()
        accepted = self._by_number[model_id, number] = {"request_id": request_id}

        def run_and_resolve() -> None:
            self.ran.append((model_id, number, name))
            try:
                self._resolve(request_id, run(model))
            except UserFailure as failure:
                self._resolve(request_id, failure)

        model.waiting[number] = run_and_resolve
        while (step := model.waiting.pop(model.next, None)) is not None:
            model.next += 1
            step()
        return accepted

    # -- sampling --------------------------------------------------------------------------------

    def _sample(self, request: SampleRequest) -> dict[str, Any]:
        sampler_id, number = request.sampling_session_id or "", request.seq_id or 0
        path = request.model_path
        if sampler_id:
            path = self._store.samplers[sampler_id]["model_path"]
            if (known := self._by_number.get((sampler_id, number))) is not None:
                return known
        elif path is None and request.base_model not in self.base_models:
            raise KeyError(f"base model {request.base_model!r}")
        if not 1 <= request.num_samples <= MAX_SAMPLES:
            raise WireError.at(
                ("num_samples",),
                f"{request.num_samples} samples were requested; 1 to {MAX_SAMPLES} are allowed.",
            )
        request_id = self._new_future()
        accepted = {
            "request_id": request_id,
            "sample_sequence_ids": [f"q-{request_id}-{i}" for i in range(request.num_samples)],
        }
        if sampler_id:
            self._by_number[sampler_id, number] = accepted
        steps = self._store.checkpoints[path].steps if path else 0

        def finish() -> None:
            try:
                response = toy_sample(request, steps)
            except UserFailure as failure:
                self._resolve(request_id, failure)
            else:
                self._resolve(request_id, (response.model_dump(), encode_sample_response(response)))
            target = (sampler_id, number // CLONE_STRIDE)
            self._finished[target].append(request_id)
            self._more[target].set()

        if self._sample_s:
            asyncio.get_running_loop().call_later(self._sample_s, finish)
        else:
            finish()
        return accepted

    def _stream(self, request: SampleRequest) -> bytes:
        """The events of a sample: the first token, the other tokens, and the final response."""
        accepted = self._sample(request)
        result = self._results[accepted["request_id"]]
        events: list[tuple[str, Any]] = [("accepted", accepted)]
        if isinstance(result, UserFailure):
            events.append(("error", {"error": str(result), "category": "user"}))
        else:
            sequences = list(enumerate(result[0]["sequences"]))
            for part in (slice(None, 1), slice(1, None)):
                for index, sequence in sequences:
                    tokens, logprobs = sequence["tokens"][part], sequence["logprobs"][part]
                    piece = {"sequence": index, "tokens": tokens, "logprobs": logprobs}
                    events.append(("token", piece))
            ids = {"sample_sequence_ids": accepted["sample_sequence_ids"]}
            events.append(("done", {**result[0], **ids}))
        return b"".join(
            b"event: %s\ndata: %s\n\n" % (name.encode(), _body(data)) for name, data in events
        )


def _body(value: Any) -> bytes:
    return value if isinstance(value, bytes) else encode_json(value)
