# ruff: noqa: BLE001 - a command line tool that must answer whatever happens
"""
Records the requests of an official client, and checks that it accepts our responses.

    python -m qa.recordings.record PYTHON_OF_AN_SDK [PYTHON_OF_ANOTHER ...]

    python -m qa.recordings.record --calls PYTHON_OF_0.36.0

Starts a small server on loopback that responds with our own encoders, and runs `basic_program.py` against
it with the given interpreter, whose environment has one release of the `tinker` package. Writes every
request to `tests/data/wire/VERSION/ENDPOINT.json`. With `--calls` it runs `all_calls_program.py` and
writes `tests/data/wire/calls.json`, including the headers of REST calls. The program checks the
responses, so a recording also shows that this release accepts them. Values that differ from run to run
(ids, times) are replaced. Tests read the recordings.
"""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np

import sdk_envs
from tinkex import types
from tinkex.wire import codec, protobuf
from tinkex.wire.sdk_versions import SdkVersion, wants_protobuf

HERE = Path(__file__).resolve().parent
DATA = HERE.parents[1] / "tests" / "data" / "wire"
BASE_MODEL = "tiny/model"
SESSION = "session-1"

#: Headers that a server evaluates, or that describe the request.
KEPT_HEADERS = (
    "accept",
    "content-type",
    "content-encoding",
    "x-tinker-request-type",
    "x-tinker-sampling-backpressure",
)
#: The headers that are recorded with --calls.
CALLS_HEADERS = (*KEPT_HEADERS, "x-tinker-weights-access-token")
#: Flags that the server sets with --calls.
CALLS_FLAGS = {
    "custom_loss_server_side": True,
    "sample_join_sampling_session": True,
    "sample_use_retrieve_futures": True,
}
NEVER = [6, 6, 6]
NEVER_READY = "never"

TIME = "2026-01-01T00:00:00Z"
RUN = {
    "training_run_id": "session-1:train:0",
    "base_model": BASE_MODEL,
    "model_owner": "owner",
    "is_lora": True,
    "lora_rank": 8,
    "last_request_time": TIME,
}
CHECKPOINT = {
    "checkpoint_id": "weights/first",
    "checkpoint_type": "training",
    "time": TIME,
    "tinker_path": "tinker://session-1:train:0/weights/first",
}
CURSOR = {"offset": 0, "limit": 20, "total_count": 1}
#: Responses of the REST routes: method, pattern of the path, body.
REST = (
    ("GET", r"training_runs", {"training_runs": [RUN], "cursor": CURSOR}),
    ("GET", r"(training_runs/[^/]+/)?checkpoints", {"checkpoints": [CHECKPOINT], "cursor": CURSOR}),
    ("GET", r"training_runs/[^/]+", RUN),
    ("GET", r".*/external_weights_urls", {"urls": {"a": "http://127.0.0.1:9/a"}, "expires": TIME}),
    ("DELETE", r"training_runs/.*", {}),
    ("POST", r"training_runs/.*/publish", {}),
    ("PUT", r"training_runs/.*/ttl", {}),
    ("POST", r"copy_weights", {"tinker_path": CHECKPOINT["tinker_path"]}),
    ("GET", r"sessions", {"sessions": [SESSION]}),
    ("GET", r"sessions/[^/]+", {"training_run_ids": [], "sampler_ids": []}),
    ("GET", r"sessions/.*/trace_export", {"status": "ready", "url": "http://127.0.0.1:9/trace"}),
    ("PUT", r"sessions/.*/project", {}),
    ("POST", r"sessions/search", {"sessions": []}),
    ("GET", r"samplers/.*", {"sampler_id": f"{SESSION}:sample:0", "base_model": BASE_MODEL}),
    ("GET", r"audit", {"entries": []}),
    ("GET", r"billing/usage/events", {"data": []}),
    ("GET", r"billing/usage/checkpoints/current", {"data": []}),
    ("POST", r"weights_info", {"base_model": BASE_MODEL, "is_lora": True, "lora_rank": 8}),
)

REPLACEMENTS = (
    (re.compile(r'(elapsed_time\\":)[0-9.e-]+'), r"\g<1>0.5"),
    (re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"), "UUID"),
    (
        re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)"),
        "2026-01-01T00:00:00Z",
    ),
)


class Recorder(ThreadingHTTPServer):
    """Responds like a service with one tiny model, and records every request."""

    daemon_threads = True

    def __init__(self, *, calls: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.calls = calls
        #: Counters that a program waits for.
        self.seen: Counter[str] = Counter()
        self.requests: list[dict[str, Any]] = []
        self.results: dict[str, Any] = {}
        self.polled: set[str] = set()
        self.reported: set[str] = set()
        self.waiting_in_vain = False
        self.version = ""
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def promise(self, result: Any, **more: Any) -> dict[str, Any]:
        with self.lock:
            request_id = f"request-{len(self.results)}"
            self.results[request_id] = result
        return {"request_id": request_id, **more}

    # -- one method for each kind of request ---------------------------------------------------

    def answer(self, method: str, path: str, body: bytes, content_type: str) -> Any:
        route, _, endpoint = path.partition("?")[0].partition("/api/v1/")
        if route.startswith("/seen/"):
            return {"count": self.seen[unquote(route.removeprefix("/seen/"))]}
        name = endpoint.replace("/", "_")
        self.seen[name] += 1
        if self.waiting_in_vain and name.startswith("retrieve_future"):
            self.seen["unanswered polls"] += 1
        if route == "/plain" and name == "client_config":
            return {}
        for verb, pattern, answer in REST:
            if verb == method and re.fullmatch(pattern, endpoint):
                return answer
        if name.startswith("sessions_"):
            return {}
        handler = getattr(self, "on_" + name, None)
        if handler is None:
            return None
        return handler(body) if name != "forward_backward" else handler(body, content_type)

    def on_client_config(self, body: bytes) -> Any:
        request = codec.decode_json(types.ClientConfigRequest, body)
        self.version = request.sdk_version
        config = SdkVersion.of(request.sdk_version).client_config()
        if SdkVersion.of(request.sdk_version).reads_protobuf_only:
            config["fwdbwd_max_chunk_len"] = 2  # so that a small batch has several chunks
        return config | CALLS_FLAGS if self.calls else config

    def on_client_dynamic_config(self, body: bytes) -> Any:
        return SdkVersion.of(self.version).dynamic_config()

    def on_get_server_capabilities(self, body: bytes) -> Any:
        model = types.SupportedModel(
            model_name=BASE_MODEL, max_context_length=128, trainable=True, sampleable=True
        )
        return types.GetServerCapabilitiesResponse(supported_models=[model])

    def on_create_session(self, body: bytes) -> Any:
        request = codec.decode_json(types.CreateSessionRequest, body)
        self.version = request.sdk_version
        return types.CreateSessionResponse(session_id=SESSION)

    def on_session_heartbeat(self, body: bytes) -> Any:
        codec.decode_json(types.SessionHeartbeatRequest, body)
        return types.SessionHeartbeatResponse()

    def on_telemetry(self, body: bytes) -> Any:
        codec.decode_json(types.TelemetrySendRequest, body)
        return types.TelemetryResponse(status="accepted")

    def on_create_model(self, body: bytes) -> Any:
        request = codec.decode_json(types.CreateModelRequest, body)
        model_id = f"{request.session_id}:train:{request.model_seq_id}"
        return self.promise(types.CreateModelResponse(model_id=model_id), model_id=model_id)

    def on_get_info(self, body: bytes) -> Any:
        request = codec.decode_json(types.GetInfoRequest, body)
        data = types.ModelData(arch="tiny", model_name=BASE_MODEL, tokenizer_id=BASE_MODEL)
        return types.GetInfoResponse(
            model_data=data, model_id=request.model_id, is_lora=True, lora_rank=8
        )

    def on_forward(self, body: bytes) -> Any:
        request, forward_only = codec.decode_forward_json(body)
        assert forward_only
        return self.promise(self._output(request))

    def on_forward_backward(self, body: bytes, content_type: str) -> Any:
        if content_type.startswith(codec.PROTOBUF_TYPE):
            request, _ = protobuf.decode_forward_backward_request(body)
        else:
            request, forward_only = codec.decode_forward_json(body)
            assert not forward_only
        return self.promise(self._output(request))

    def _output(self, request: types.ForwardBackwardRequest) -> types.ForwardBackwardOutput:
        outputs = []
        for datum in request.forward_backward_input.data:
            shape = datum.loss_fn_inputs["target_tokens"].to_numpy().shape
            logprobs = -0.5 * np.arange(1, int(np.prod(shape)) + 1, dtype=np.float32)
            outputs.append({"logprobs": types.TensorData.from_numpy(logprobs.reshape(shape))})
        return types.ForwardBackwardOutput("ArrayRecord", outputs, {"loss:sum": 1.5})

    def on_optim_step(self, body: bytes) -> Any:
        codec.decode_json(types.OptimStepRequest, body)
        return self.promise(types.OptimStepResponse(metrics={"grad_norm:mean": 2.5}))

    def on_save_weights(self, body: bytes) -> Any:
        request = codec.decode_json(types.SaveWeightsRequest, body)
        return self.promise(
            types.SaveWeightsResponse(path=f"tinker://{request.model_id}/weights/{request.path}")
        )

    def on_save_weights_for_sampler(self, body: bytes) -> Any:
        request = codec.decode_json(types.SaveWeightsForSamplerRequest, body)
        path = f"tinker://{request.model_id}/sampler_weights/{request.path or 'unnamed'}"
        session = None
        if request.path is None:
            session = f"{SESSION}:sample:{request.sampling_session_seq_id}"
            if not SdkVersion.of(self.version).unnamed_sampler_save_has_path:
                path = None
        return self.promise(
            types.SaveWeightsForSamplerResponseInternal(path=path, sampling_session_id=session)
        )

    def on_save_weights_external(self, body: bytes) -> Any:
        request = codec.decode_json(types.SaveWeightsExternalRequest, body)
        path = f"tinker://{request.model_id}/external_weights/{request.path}"
        return self.promise(types.SaveWeightsExternalResponse(path=path))

    def on_create_custom_loss(self, body: bytes) -> Any:
        codec.decode_json(types.CreateCustomLossRequest, body)
        return self.promise(types.CreateCustomLossResponse(loss_id="loss-1"))

    def on_join_sampling_session(self, body: bytes) -> Any:
        codec.decode_json(types.JoinSamplingSessionRequest, body)
        return types.JoinSamplingSessionResponse(client_counter=1)

    def on_cancel_future(self, body: bytes) -> Any:
        return {}

    def on_retrieve_futures(self, body: bytes) -> Any:
        """All completions that the client has not acknowledged, immediately or a little later."""
        request = codec.decode_json(types.FuturesRetrieveRequest, body)
        with self.lock:
            self.reported.update(request.retrieved_request_ids)
            done = [
                {"state": "finished", "request_id": name}
                for name, result in self.results.items()
                if isinstance(result, types.SampleResponse) and name not in self.reported
            ]
        if not done:
            time.sleep(0.05)
        return {"completions": done, "cursor": 1}

    def on_load_weights(self, body: bytes) -> Any:
        request = codec.decode_json(types.LoadWeightsRequest, body)
        return self.promise(types.LoadWeightsResponse(path=request.path))

    def on_create_sampling_session(self, body: bytes) -> Any:
        request = codec.decode_json(types.CreateSamplingSessionRequest, body)
        return types.CreateSamplingSessionResponse(
            sampling_session_id=f"{SESSION}:sample:{request.sampling_session_seq_id}"
        )

    def on_asample(self, body: bytes) -> Any:
        request = codec.decode_json(types.SampleRequest, body)
        ids = [f"sequence-{i}" for i in range(request.num_samples)]
        if request.prompt.chunks[0].length == 3 and request.prompt.to_ints() == NEVER:
            self.waiting_in_vain = True
            return {"request_id": NEVER_READY, "sample_sequence_ids": ids}
        return self.promise(_sample(request, ids), sample_sequence_ids=ids)

    def on_retrieve_future(self, body: bytes) -> Any:
        request = codec.decode_json(types.FutureRetrieveRequest, body)
        if request.request_id == NEVER_READY:
            time.sleep(0.05)
            return 408, types.TryAgainResponse(request_id=NEVER_READY, queue_state="active")
        if not self.polled:  # the first poll of all gets 408
            self.polled.add(request.request_id)
            return 408, types.TryAgainResponse(
                request_id=request.request_id,
                queue_state="paused_capacity",
                queue_state_reason="one moment",
            )
        return self.results[request.request_id]


def _sample(request: types.SampleRequest, ids: list[str]) -> types.SampleResponse:
    length = request.prompt.length
    sequences = []
    for position, name in enumerate(ids):
        tokens = [5, 6, 7] if position == 0 else [5, 6]
        topk = None
        if request.topk_sample_logprobs:
            topk = types.TopkLogprobs.from_rows([[(token, -0.5)] for token in tokens])
        sequences.append(
            types.SampledSequence(
                "length" if position == 0 else "stop",
                name,
                tokens,
                [-0.5, -0.25, -1.0][: len(tokens)],
                topk,
            )
        )
    prompt = topk_prompt = target = alt = None
    if request.prompt_logprobs:
        first = max(1, length - (request.prompt_logprobs_last_n or length))
        prompt = [-0.5 * i if i >= first else float("nan") for i in range(length)]
    if request.topk_prompt_logprobs:
        rows = [None, *[[(3, -0.5), (4, -1.5)] for _ in range(1, length)]]
        rows[2] = [(3, -0.5)]
        topk_prompt = types.TopkLogprobs.from_rows(rows)
    if request.target_prompt_logprobs is not None:
        shape = request.target_prompt_logprobs.shape
        target = types.TensorData.from_numpy(np.full(shape, -1.0))
    if request.prompt_alt_tokens_k:
        shape = (length, request.prompt_alt_tokens_k)
        alt = types.PromptAltTokens(
            types.TensorData.from_numpy(np.full(shape, 9)),
            types.TensorData.from_numpy(np.full(shape, -0.75)),
        )
    return types.SampleResponse(sequences, prompt, topk_prompt, target, 2, alt)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Recorder

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def do_PUT(self) -> None:
        self._serve()

    def do_DELETE(self) -> None:
        self._serve()

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        self._record(body)
        try:
            kind = self.headers.get("content-type") or ""
            answer = self.server.answer(self.command, self.path, body, kind)
        except Exception as error:
            print("cannot answer", self.path, repr(error), body[:400], file=sys.stderr)
            return self._send(500, codec.JSON_TYPE, codec.encode_json({"detail": repr(error)}))
        status = 200
        if isinstance(answer, tuple):
            status, answer = answer
        if answer is None:
            print("unknown request", self.path, file=sys.stderr)
            return self._send(404, codec.JSON_TYPE, b'{"detail":"unknown"}')
        return self._send(status, *self._encoded(answer))

    def _encoded(self, answer: Any) -> tuple[str, bytes]:
        dialect = SdkVersion.of(self.server.version)
        binary = wants_protobuf(self.headers.get("accept"))
        if isinstance(answer, types.SampleResponse):
            if binary:
                return codec.PROTOBUF_TYPE, protobuf.encode_sample_response(answer)
            answer = dialect.sample_json(answer)
        if isinstance(answer, types.ForwardBackwardOutput):
            if binary and dialect.reads_as_protobuf(answer):
                return codec.PROTOBUF_TYPE, protobuf.encode_forward_backward_output(answer)
            answer = dialect.forward_backward_json(answer)
        return codec.JSON_TYPE, codec.encode_json(answer)

    def _record(self, body: bytes) -> None:
        if self.path.startswith("/seen/"):
            return
        names = CALLS_HEADERS if self.server.calls else KEPT_HEADERS
        kept = {name: self.headers[name] for name in names if name in self.headers}
        request = {"method": self.command, "path": self.path, "headers": kept}
        if "protobuf" in kept.get("content-type", ""):
            request["body_base64"] = base64.b64encode(body).decode()
        elif body:
            request["body"] = body.decode()
        with self.server.lock:
            self.server.requests.append(request)

    def _send(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def endpoint(path: str) -> str:
    return path.partition("?")[0].partition("/api/v1/")[2].replace("/", "_").replace(SESSION, "ID")


def write(version: str, requests: list[dict[str, Any]]) -> None:
    folder = DATA / version
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.json"):
        old.unlink()
    groups: dict[str, list[dict[str, Any]]] = {}
    for request in requests:
        groups.setdefault(endpoint(request["path"]), []).append(request)
    for name, group in groups.items():
        if name in ("retrieve_future", "session_heartbeat"):
            group = list({json.dumps(r, sort_keys=True): r for r in group}.values())[:12]
        text = json.dumps(group, indent=1, ensure_ascii=False)
        for pattern, replacement in REPLACEMENTS:
            text = pattern.sub(replacement, text)
        (folder / f"{name}.json").write_text(text + "\n")


def run(command: list[str], recorder: Recorder, **environment: str) -> None:
    """Runs a program against the recorder until it ends."""
    threading.Thread(target=recorder.serve_forever, daemon=True).start()
    env = {"TINKER_API_KEY": "tml-recording", "PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
    try:
        subprocess.run(command, env=env | environment, timeout=300, check=True)
    finally:
        recorder.shutdown()
        recorder.server_close()


def record(python: str) -> str:
    recorder = Recorder()
    run([python, str(HERE / "basic_program.py"), recorder.url], recorder)
    write(recorder.version, recorder.requests)
    return recorder.version


#: Endpoints whose number of requests depends on time.
TIMER_DRIVEN = ("retrieve_future", "retrieve_futures", "session_heartbeat", "telemetry")


def comparable(requests: list[dict[str, Any]]) -> dict[str, Any]:
    """
    The comparable part of a recording: requests in order without values that differ from run to run,
    and the distinct shapes of requests on endpoints that are driven by timers.
    """
    text = json.dumps([request | {"path": unquote(request["path"])} for request in requests])
    for pattern, replacement in REPLACEMENTS:
        text = pattern.sub(replacement, text)
    compared: list[dict[str, Any]] = []
    kinds: dict[str, list[Any]] = {name: [] for name in TIMER_DRIVEN}
    for request in json.loads(text):
        name = endpoint(request["path"])
        if name not in kinds:
            compared.append(request)
        elif (kind := shape(json.loads(request["body"]))) not in kinds[name]:
            kinds[name].append(kind)
    return {"requests": compared, "by the clock": {n: sorted(k, key=str) for n, k in kinds.items()}}


def shape(value: Any) -> Any:
    """The fields of a message and their types; for a list, those of its first object."""
    if isinstance(value, dict):
        return {name: shape(item) for name, item in sorted(value.items())}
    if isinstance(value, list):
        return [shape(item) for item in value[:1] if isinstance(item, dict)]
    return type(value).__name__


def record_calls(python: str) -> str:
    recorder = Recorder(calls=True)
    torch = str(sdk_envs.ensure_torch())
    run([python, str(HERE / "all_calls_program.py"), recorder.url, torch], recorder)
    text = json.dumps(comparable(recorder.requests), indent=1, ensure_ascii=False)
    (DATA / "calls.json").write_text(text + "\n")
    return recorder.version


if __name__ == "__main__":
    if sys.argv[1] == "--calls":
        print("recorded", record_calls(sys.argv[2]), file=sys.stderr)
    else:
        for interpreter in sys.argv[1:]:
            print("recorded", record(interpreter), file=sys.stderr)
