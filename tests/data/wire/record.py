# ruff: noqa: T201, BLE001 - a command line tool that must answer whatever happens
"""
Record what an official client sends, and check that it reads what we answer.

    python tests/data/wire/record.py PYTHON_OF_AN_SDK [PYTHON_OF_ANOTHER ...]

Starts a small server on loopback that answers with our own encoders, runs `program.py` against it
under the given interpreter (whose environment has one release of the `tinker` package), and writes
every request to `tests/data/wire/VERSION/ENDPOINT.json`. The program checks what it got back, so a
recording also says that this release accepted our answers. What differs from run to run (ids,
times) is replaced. Tests read the recordings and never run this.
"""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from tinkex import types
from tinkex.wire import codec, protobuf
from tinkex.wire.dialect import Dialect, wants_protobuf

HERE = Path(__file__).resolve().parent
BASE_MODEL = "tiny/model"
SESSION = "session-1"

#: Headers a server acts on, and those that tell what a request is about.
KEPT_HEADERS = (
    "accept",
    "content-type",
    "content-encoding",
    "x-tinker-request-type",
    "x-tinker-sampling-backpressure",
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
    """Answers like a service with one tiny model, and remembers every request."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[dict[str, Any]] = []
        self.results: dict[str, Any] = {}
        self.asked: set[str] = set()
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

    def answer(self, path: str, body: bytes, content_type: str) -> Any:
        name = path.partition("?")[0].removeprefix("/api/v1/").replace("/", "_")
        if name.startswith("sessions_"):
            return {}
        handler = getattr(self, "on_" + name, None)
        if handler is None:
            return None
        return handler(body) if name != "forward_backward" else handler(body, content_type)

    def on_client_config(self, body: bytes) -> Any:
        request = codec.decode_json(types.ClientConfigRequest, body)
        self.version = request.sdk_version
        config = Dialect.of(request.sdk_version).client_config()
        if Dialect.of(request.sdk_version).reads_protobuf_only:
            config["fwdbwd_max_chunk_len"] = 2  # so that a small batch has several parts
        return config

    def on_client_dynamic_config(self, body: bytes) -> Any:
        return Dialect.of(self.version).dynamic_config()

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
            if not Dialect.of(self.version).unnamed_sampler_save_has_path:
                path = None
        return self.promise(
            types.SaveWeightsForSamplerResponseInternal(path=path, sampling_session_id=session)
        )

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
        return self.promise(_sample(request, ids), sample_sequence_ids=ids)

    def on_retrieve_future(self, body: bytes) -> Any:
        request = codec.decode_json(types.FutureRetrieveRequest, body)
        if not self.asked:  # the very first one is told to wait
            self.asked.add(request.request_id)
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
        prompt = [float("nan"), *(-0.5 * i for i in range(1, length))]
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

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        self._remember(body)
        try:
            answer = self.server.answer(self.path, body, self.headers.get("content-type") or "")
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
        dialect = Dialect.of(self.server.version)
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

    def _remember(self, body: bytes) -> None:
        kept = {name: self.headers[name] for name in KEPT_HEADERS if name in self.headers}
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
    return path.partition("?")[0].removeprefix("/api/v1/").replace("/", "_").replace(SESSION, "ID")


def write(version: str, requests: list[dict[str, Any]]) -> None:
    folder = HERE / version
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


def record(python: str) -> str:
    recorder = Recorder()
    thread = threading.Thread(target=recorder.serve_forever, daemon=True)
    thread.start()
    env = {"TINKER_API_KEY": "tml-recording", "PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
    command = [python, str(HERE / "program.py"), recorder.url]
    run = subprocess.run(command, env=env, timeout=300, check=False)
    recorder.shutdown()
    if run.returncode:
        raise SystemExit(f"the program failed under {python}; nothing was written.")
    write(recorder.version, recorder.requests)
    return recorder.version


if __name__ == "__main__":
    for interpreter in sys.argv[1:]:
        print("recorded", record(interpreter), file=sys.stderr)
