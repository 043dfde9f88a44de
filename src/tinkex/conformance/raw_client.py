"""A minimal client for the server under test, independent of the real client; it never retries."""

from __future__ import annotations

import http.client
import itertools
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from tinkex.wire.codec import JSON_TYPE, PROTOBUF_TYPE
from tinkex.wire.errors import WireError
from tinkex.wire.inputs import Datum, ModelInput
from tinkex.wire.protobuf import (
    decode_forward_backward_output,
    decode_sample_response,
    encode_forward_backward_request,
)
from tinkex.wire.sampling import SampleResponse
from tinkex.wire.training import (
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
)

Floats = npt.NDArray[np.float32]

SDK_VERSION = "0.36.0"
#: The last release that reads results only as JSON.
JSON_VERSION = "0.16.1"
#: Timeout of one request, as in the official client.
TIMEOUT_S = 45.0

#: Token ids that exist in every vocabulary; their meaning does not matter.
TEXTS = [[20 + (7 * row + 3 * column) % 170 for column in range(12)] for row in range(4)]


class Unexpected(Exception):
    """A response with which a check cannot continue."""


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes
    content_type: str
    seconds: float

    @property
    def is_protobuf(self) -> bool:
        return PROTOBUF_TYPE in self.content_type

    @property
    def json(self) -> Any:
        try:
            return json.loads(self.body)
        except ValueError:
            raise Unexpected(f"HTTP {self.status} with a body that is not JSON: {self}") from None

    def __str__(self) -> str:
        text = self.body[:300].decode(errors="replace")
        return f"HTTP {self.status} {self.content_type} {text}"


@dataclass(frozen=True)
class Failure:
    """The error of a failed future."""

    error: str
    category: str


class Remote:
    """A Tinker server under test."""

    def __init__(
        self,
        url: str,
        *,
        key: str = "tml-conformance",
        base_model: str | None = None,
        other_key: str | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.key = key
        self.other_key = other_key
        self._base_model = base_model
        self._sampler_numbers = itertools.count()
        self._model_numbers = itertools.count()

    # -- plain HTTP

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.request("POST", path, data, {"Content-Type": JSON_TYPE, **named})

    def get(self, path: str) -> Answer:
        return self.request("GET", path, None, {})

    def request(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> Answer:
        sent = {
            "X-API-Key": self.key,
            "User-Agent": f"AsyncTinker/Python {SDK_VERSION}",
            "Accept": JSON_TYPE,
            **headers,
        }
        request = urllib.request.Request(
            f"{self.url}/api/v1/{path}", data=body, headers=sent, method=method
        )
        began = time.monotonic()
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as got:
                status, found, kind = got.status, got.read(), got.headers.get("Content-Type", "")
        except urllib.error.HTTPError as error:
            with error:
                status, found, kind = error.code, error.read(), error.headers.get("Content-Type")
        except (OSError, http.client.HTTPException) as error:
            raise Unexpected(f"{method} {path}: no response: {error!r}") from error
        return Answer(status, found, kind or "", time.monotonic() - began)

    def expect_ok(self, answer: Answer) -> Any:
        """The JSON body of a 200; `Unexpected` for any other status."""
        if answer.status != 200:
            raise Unexpected(f"expected status 200: {answer}")
        return answer.json

    # -- sessions and models

    @cached_property
    def session(self) -> str:
        return self.new_session()

    def new_session(self, sdk_version: str = SDK_VERSION) -> str:
        body = {
            "tags": ["conformance"],
            "user_metadata": {},
            "sdk_version": sdk_version,
            "type": "create_session",
        }
        found = self.expect_ok(self.post("create_session", body)).get("session_id")
        if not isinstance(found, str):
            raise Unexpected(f"create_session returned session_id {found!r}")
        return found

    @cached_property
    def base_model(self) -> str:
        """The given base model, or the first trainable one that the server lists."""
        if self._base_model is not None:
            return self._base_model
        for model in self.served_models:
            if model.get("trainable", True) and model.get("model_name"):
                return str(model["model_name"])
        raise Unexpected("get_server_capabilities lists no model; name one")

    @cached_property
    def served_models(self) -> list[dict[str, Any]]:
        found = self.expect_ok(self.get("get_server_capabilities")).get("supported_models")
        if not isinstance(found, list):
            raise Unexpected(f"get_server_capabilities returned supported_models {found!r}")
        return found

    def model_body(self, session: str | None = None, **lora: Any) -> dict[str, Any]:
        return {
            "session_id": session or self.session,
            "model_seq_id": next(self._model_numbers),
            "base_model": self.base_model,
            "lora_config": {"rank": 4, "seed": 7, **lora},
            "type": "create_model",
        }

    def model(self, session: str | None = None, **lora: Any) -> TrainingModel:
        """Create a model and wait until it is ready."""
        return self.created_model(self.post("create_model", self.model_body(session, **lora)))

    def created_model(self, answer: Answer) -> TrainingModel:
        result = self.result(self.request_id(answer))
        if not isinstance(result, dict) or not isinstance(result.get("model_id"), str):
            raise Unexpected(f"create_model returned {result!r}")
        return TrainingModel(self, result["model_id"])

    # -- futures

    def request_id(self, answer: Answer) -> str:
        """The request id in the response to a submission."""
        request_id = self.expect_ok(answer).get("request_id")
        if not isinstance(request_id, str):
            raise Unexpected(f"a submission returned request_id {request_id!r}")
        return request_id

    def poll(self, request_id: str, accept: str = JSON_TYPE) -> Answer:
        body = {"request_id": request_id, "allow_metadata_only": False}
        return self.post("retrieve_future", body, Accept=accept)

    def wait_for(self, request_id: str, accept: str = JSON_TYPE, within_s: float = 180.0) -> Answer:
        """Poll a future until it has a result."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            answer = self.poll(request_id, accept)
            pending = answer.status == 408 or (
                answer.status == 200
                and not answer.is_protobuf
                and answer.json.get("type") == "try_again"
            )
            if not pending:
                if answer.status != 200:
                    raise Unexpected(f"retrieve_future: {answer}")
                return answer
        raise Unexpected(f"a future did not finish within {within_s:.0f} s")

    def result(self, request_id: str) -> dict[str, Any] | Failure:
        """The JSON result of a future."""
        return _json_result(self.wait_for(request_id))

    def pass_result(self, request_id: str) -> ForwardBackwardOutput | Failure:
        answer = self.wait_for(request_id, PROTOBUF_TYPE)
        if not answer.is_protobuf:
            found = _json_result(answer)
            if isinstance(found, Failure):
                return found
            raise Unexpected(f"protobuf was requested, but the response is JSON: {answer}")
        try:
            return decode_forward_backward_output(answer.body)
        except WireError as error:
            raise Unexpected(f"not a ForwardBackwardOutput: {error}") from error

    def sample_result(self, request_id: str) -> SampleResponse | Failure:
        answer = self.wait_for(request_id, PROTOBUF_TYPE)
        if not answer.is_protobuf:
            found = _json_result(answer)
            if isinstance(found, Failure):
                return found
            raise Unexpected(f"protobuf was requested, but the response is JSON: {answer}")
        try:
            return decode_sample_response(answer.body)
        except WireError as error:
            raise Unexpected(f"not a SampleResponse: {error}") from error

    # -- samplers

    def sampler_body(self, **source: str) -> dict[str, Any]:
        return {
            "session_id": self.session,
            "sampling_session_seq_id": next(self._sampler_numbers),
            **source,
            "type": "create_sampling_session",
        }

    def sampler(self, **source: str) -> Sampler:
        """A sampler of `base_model`, or of `model_path`."""
        answer = self.post("create_sampling_session", self.sampler_body(**source))
        return Sampler(self, str(self.expect_ok(answer).get("sampling_session_id")))

    def next_sampler_number(self) -> int:
        return next(self._sampler_numbers)


def _json_result(answer: Answer) -> dict[str, Any] | Failure:
    found = answer.json
    if not isinstance(found, dict):
        raise Unexpected(f"a result that is not an object: {answer}")
    if "error" in found:
        return Failure(str(found["error"]), str(found.get("category")))
    return found


def datum(tokens: Sequence[int], weight: float = 1.0) -> Datum:
    return Datum(
        model_input=ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={
            "target_tokens": list(tokens[1:]),
            "weights": [weight] * (len(tokens) - 1),
        },
    )


def batch(texts: Sequence[Sequence[int]] = TEXTS, weight: float = 1.0) -> list[Datum]:
    return [datum(tokens, weight) for tokens in texts]


class TrainingModel:
    """A model to train; its steps are numbered from 1."""

    def __init__(self, remote: Remote, model_id: str) -> None:
        self.remote = remote
        self.model_id = model_id
        self.next = 1

    def number(self) -> int:
        taken, self.next = self.next, self.next + 1
        return taken

    def submit_pass(
        self,
        data: Sequence[Datum],
        loss: str = "cross_entropy",
        *,
        number: int | None = None,
        forward_only: bool = False,
        config: Mapping[str, float | str] | None = None,
    ) -> Answer:
        work = ForwardBackwardInput._of(list(data), loss, config)
        request = ForwardBackwardRequest(
            forward_backward_input=work,
            model_id=self.model_id,
            seq_id=self.number() if number is None else number,
        )
        body = encode_forward_backward_request(request, forward_only=forward_only)
        return self.remote.post("forward_backward", body, Content_Type=PROTOBUF_TYPE)

    def submit_step(self, number: int | None = None, **params: float) -> Answer:
        body = {
            "model_id": self.model_id,
            "seq_id": self.number() if number is None else number,
            "adam_params": {"learning_rate": 1e-2, **params},
            "type": "optim_step",
        }
        return self.remote.post("optim_step", body)

    def backward(self, data: Sequence[Datum]) -> ForwardBackwardOutput:
        return self._output(self.submit_pass(data))

    def forward(self, data: Sequence[Datum]) -> ForwardBackwardOutput:
        return self._output(self.submit_pass(data, forward_only=True))

    def _output(self, answer: Answer) -> ForwardBackwardOutput:
        output = self.remote.pass_result(self.remote.request_id(answer))
        if isinstance(output, Failure):
            raise Unexpected(f"a pass failed: {output}")
        return output

    def step(self, **params: float) -> None:
        result = self.remote.result(self.remote.request_id(self.submit_step(None, **params)))
        if isinstance(result, Failure):
            raise Unexpected(f"optim_step failed: {result}")

    def train(self, steps: int, data: Sequence[Datum] | None = None) -> None:
        for _ in range(steps):
            self.backward(batch() if data is None else data)
            self.step()

    def logprobs(self, texts: Sequence[Sequence[int]] = TEXTS) -> Floats:
        """The current logprob of each target."""
        return all_logprobs(self.forward(batch(texts)))

    def save(self, route: str, **fields: Any) -> dict[str, Any]:
        body = {"model_id": self.model_id, "seq_id": self.number(), "type": route, **fields}
        result = self.remote.result(self.remote.request_id(self.remote.post(route, body)))
        if isinstance(result, Failure):
            raise Unexpected(f"{route} failed: {result}")
        return result

    def save_state(self, name: str) -> str:
        return str(self.save("save_weights", path=name).get("path"))

    def sampler(self) -> Sampler:
        """A sampler of the current weights."""
        number = self.remote.next_sampler_number()
        result = self.save("save_weights_for_sampler", sampling_session_seq_id=number)
        if not isinstance(result.get("sampling_session_id"), str):
            raise Unexpected(f"an unnamed sampler save returned {result!r}")
        return Sampler(self.remote, result["sampling_session_id"])

    def load(self, path: str, *, optimizer: bool = False) -> dict[str, Any] | Failure:
        body = {
            "model_id": self.model_id,
            "seq_id": self.number(),
            "path": path,
            "optimizer": optimizer,
            "type": "load_weights",
        }
        return self.remote.result(self.remote.request_id(self.remote.post("load_weights", body)))


class Sampler:
    """A sampling session."""

    def __init__(self, remote: Remote, sampling_session_id: str) -> None:
        self.remote = remote
        self.sampling_session_id = sampling_session_id
        self.next = 0

    def body(
        self, prompt: Sequence[int], *, samples: int = 1, number: int | None = None, **rest: Any
    ) -> dict[str, Any]:
        """An `asample` body; `prompt*` and `topk*` are top-level, the rest is `sampling_params`."""
        if number is None:
            number, self.next = self.next, self.next + 1
        top_level = {
            name: rest.pop(name) for name in list(rest) if name.startswith(("prompt", "topk"))
        }
        return {
            "sampling_session_id": self.sampling_session_id,
            "seq_id": number,
            "num_samples": samples,
            "prompt": {"chunks": [{"tokens": list(prompt), "type": "encoded_text"}]},
            "sampling_params": {"max_tokens": 8, "temperature": 1.0, **rest},
            "prompt_logprobs": False,
            "type": "sample",
            **top_level,
        }

    def try_sample(self, prompt: Sequence[int], **rest: Any) -> SampleResponse | Failure:
        answer = self.remote.post("asample", self.body(prompt, **rest))
        return self.remote.sample_result(self.remote.request_id(answer))

    def sample(self, prompt: Sequence[int], **rest: Any) -> SampleResponse:
        found = self.try_sample(prompt, **rest)
        if isinstance(found, Failure):
            raise Unexpected(f"a sample failed: {found}")
        return found

    def prompt_logprobs(self, prompt: Sequence[int]) -> Floats:
        """One for each token of the prompt; the first is NaN."""
        found = self.sample(prompt, max_tokens=1, prompt_logprobs=True).prompt_logprobs_np
        if found is None:
            raise Unexpected("prompt logprobs were requested but not returned")
        return found


def all_logprobs(output: ForwardBackwardOutput) -> Floats:
    parts = [out["logprobs"].to_numpy().ravel() for out in output.loss_fn_outputs]
    return np.concatenate(parts).astype(np.float32)


def max_difference(first: Floats, second: Floats) -> float:
    """The largest difference; infinite if there is nothing to compare."""
    if first.shape != second.shape or first.size == 0:
        return float("inf")
    return float(np.abs(first.astype(np.float64) - second).max())
