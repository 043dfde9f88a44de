"""
Every size limit: its name, value and setting, and a request that exceeds it.

docs/reference/limits.md is generated from this list, and `test_limits_page` sends every request.
"""

import gzip
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import zstandard

from server.hosting import PROTOBUF, Answer, Api, pass_body
from tinkex.engine.training import custom_loss_graph, custom_loss_parser, custom_loss_sizes
from tinkex.server.api import (
    account,
    auth,
    bodies,
    connection_limits,
    models,
    openai_prompts,
    operations,
    response_limits,
    sampling,
    sessions,
    submit,
)
from tinkex.server.scheduler import checkpoints
from tinkex.server.settings import Settings
from tinkex.server.store import checkpoint_catalog, events
from tinkex.server.store import sessions as stored_sessions
from tinkex.wire import errors, limits, tensors
from tinkex.wire.proto import tinkex_wire_pb2 as pb

#: Settings of the test server: the defaults would need gigabytes.
SMALL = {"max_body_bytes": 900_000, "max_decoded_bytes": 9_000_000, "max_message_bytes": 400_000}


@dataclass(frozen=True)
class Ids:
    session: str
    model: str
    sampler: str


Case = Callable[[Api, Ids], Awaitable[Answer]]


@dataclass(frozen=True)
class Limit:
    what: str
    value: int | str
    #: The answer over the limit; `user` is a failed request of that category.
    answer: str
    #: The field that the answer names, or a word of the answer.
    says: str
    case: Case | None
    setting: str = ""
    #: The test of the limit, if one request cannot show it.
    test: str = ""


def post(path: str, body: Any, headers: Mapping[str, str] | None = None) -> Case:
    """Post a body with placeholders for ids."""

    async def send(api: Api, ids: Ids) -> Answer:
        sent = body
        if not isinstance(body, bytes):
            text = json.dumps(body)
            for name, value in vars(ids).items():
                text = text.replace("{" + name + "}", value)
            sent = text.encode()
        return await api.post(path, sent, headers=dict(headers or {}))

    return send


def packed(path: str, body: bytes, headers: Mapping[str, str] | None = None) -> Case:
    """Post a compressed body, which is small on the wire."""

    async def send(api: Api, _ids: Ids) -> Answer:
        sent = {**(headers or {}), "Content-Encoding": "zstd"}
        return await api.post(path, zstandard.compress(body, 1), headers=sent)

    return send


def get(path: str) -> Case:
    async def send(api: Api, ids: Ids) -> Answer:
        return await api.get(path.format(**vars(ids)))

    return send


def passed(change: Callable[[pb.ForwardBackwardRequest], None]) -> Case:
    async def send(api: Api, ids: Ids) -> Answer:
        message = pb.ForwardBackwardRequest.FromString(pass_body(ids.model, 1))
        change(message)
        return await api.post("forward_backward", message.SerializeToString(), headers=PROTOBUF)

    return send


def checked_result(case: Case) -> Case:
    """For requests that are accepted and fail later."""

    async def send(api: Api, ids: Ids) -> Answer:
        answer = await case(api, ids)
        assert answer.status == 200, answer
        while (reported := await api.poll(answer.json["request_id"])).status == 408:
            pass
        return reported

    return send


def session(**changes: Any) -> Case:
    body = {"tags": [], "user_metadata": {}, "sdk_version": "0.36.0", **changes}
    return post("create_session", body)


def sample(**changes: Any) -> Case:
    body = {
        "sampling_session_id": "{sampler}",
        "seq_id": 1,
        "prompt": {"chunks": [{"tokens": [1]}]},
        "sampling_params": {"max_tokens": 1},
    }
    return post("asample", body | changes)


def _chunks(message: pb.ForwardBackwardRequest) -> None:
    for _ in range(limits.MAX_CHUNKS):
        message.data[0].model_input.add().encoded_text.tokens = b"\1\0\0\0"


def _datums(message: pb.ForwardBackwardRequest) -> None:
    for _ in range(limits.MAX_DATUMS):
        message.data.add()


def _tensors(message: pb.ForwardBackwardRequest) -> None:
    for number in range(limits.MAX_TENSORS):
        message.data[0].loss_fn_inputs[str(number)].CopyFrom(
            message.data[0].loss_fn_inputs["weights"]
        )


def _spans(message: pb.ForwardBackwardRequest) -> None:
    for _ in range(limits.MAX_SPANS + 1):
        message.data[0].model_input_spans.add().prompt_tokens.length = 1


def _settings(message: pb.ForwardBackwardRequest) -> None:
    for number in range(limits.MAX_TENSORS + 1):
        message.loss_fn_config[str(number)] = 1.0


def _sparse(message: pb.ForwardBackwardRequest) -> None:
    """Each of the two is allowed; both together are not."""
    for name in ("target_tokens", "weights"):
        tensor = message.data[0].loss_fn_inputs[name]
        tensor.sparse_csr.values = b""
        tensor.sparse_csr.crow_indices = bytes(16)
        tensor.sparse_csr.col_indices = b""
        tensor.shape[:] = [1, tensors.MAX_DENSE_CELLS]


def _shape(*sizes: int) -> Callable[[pb.ForwardBackwardRequest], None]:
    def change(message: pb.ForwardBackwardRequest) -> None:
        message.data[0].loss_fn_inputs["weights"].shape[:] = sizes

    return change


def _name(message: pb.ForwardBackwardRequest) -> None:
    tensor = message.data[0].loss_fn_inputs["weights"]
    message.data[0].loss_fn_inputs["x" * (limits.MAX_NAME_CHARS + 1)].CopyFrom(tensor)


def _loss(message: pb.ForwardBackwardRequest) -> None:
    message.loss_fn = "x" * (limits.MAX_NAME_CHARS + 1)


GZIP = {**PROTOBUF, "Content-Encoding": "gzip"}
DEEP = b'{"tags": ' + b"[" * 300 + b"]" * 300 + b"}"
DEFAULTS = Settings()
NODE = {"op": "placeholder", "name": "logprobs", "target": "logprobs"}
QUOTED = "tests/server/test_limits_page.py::test_answers_quote_little_of_what_was_sent"
PAGE = "tests/server/test_limits_page.py"
ARRIVING = f"{PAGE}::test_the_arriving_bytes_of_an_owner_are_limited"
UNPACKED = f"{PAGE}::test_only_a_few_bodies_are_decompressed_at_the_same_time"
BUDGET = (
    "tests/server/api/test_bodies.py::test_a_body_over_the_budget_gets_a_429_and_is_accepted_later"
)
METADATA = f"{PAGE}::test_the_metadata_of_an_answer_is_limited"
BOUNDS = "tests/server/api/test_response_limits.py"
MUCH = f"{BOUNDS}::test_an_owner_with_much_data_gets_bounded_answers_built_off_the_event_loop"
PARTS = f"{BOUNDS}::test_an_answer_encoded_in_parts_is_identical"
USAGE = f"{BOUNDS}::test_usage_over_the_limit_is_refused_and_a_shorter_time_is_answered"
AROUND = "tests/server/test_limits_page.py::test_trailers_and_pipelined_requests_are_limited"
ENGINE = "tests/engine/test_custom_loss_graph.py::test_a_hostile_graph_is_refused_with_a_reason"
OPENAI = "tests/server/api/test_openai.py"
UNFIT = f"{OPENAI}::test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenized_or_stored"

LIMITS = [
    # Of a whole request.
    Limit(
        "bytes of the request line and headers",
        connection_limits.MAX_HEAD_BYTES,
        "431",
        "head",
        get("/api/v1/sessions?x=" + "x" * 70_000),
    ),
    Limit(
        "bytes of trailers, and of anything else that is not a body",
        connection_limits.MAX_HEAD_BYTES,
        "the connection is closed",
        "",
        None,
        test=AROUND,
    ),
    Limit(
        "requests that a connection sends before the first is answered",
        connection_limits.MAX_PIPELINED,
        "the connection is closed",
        "",
        None,
        test=AROUND,
    ),
    Limit(
        "bytes of a pass or a sample before decompression",
        DEFAULTS.max_body_bytes,
        "413",
        "bytes",
        post("asample", b" " * (SMALL["max_body_bytes"] + 1)),
        setting="max_body_bytes",
    ),
    Limit(
        "bytes of a pass or a sample after decompression",
        DEFAULTS.max_decoded_bytes,
        "413",
        "bytes",
        packed("forward_backward", bytes(50_000_000), PROTOBUF),
        setting="max_decoded_bytes",
    ),
    Limit(
        "bytes of any other message, before and after decompression",
        DEFAULTS.max_message_bytes,
        "413",
        "bytes",
        post("create_session", b" " * (SMALL["max_message_bytes"] + 1)),
        setting="max_message_bytes",
    ),
    Limit(
        "bytes of arriving bodies of one owner",
        bodies.MAX_BODIES_PER_OWNER * DEFAULTS.max_body_bytes,
        "429",
        "",
        None,
        setting="max_body_bytes",
        test=ARRIVING,
    ),
    Limit(
        "large bodies of one owner that are decoded at the same time",
        bodies.MAX_DECODES_PER_OWNER,
        "further ones wait",
        "",
        None,
        test=UNPACKED,
    ),
    Limit(
        "bytes of large bodies of all owners, until their requests are stored or answered",
        DEFAULTS.max_arriving_bytes,
        "429 after `arriving_wait_s`",
        "",
        None,
        setting="max_arriving_bytes",
        test=BUDGET,
    ),
    Limit(
        "members of a gzip body, frames of a zstd body",
        limits.MAX_COMPRESSED_FRAMES,
        "413",
        "compressed frames",
        post("forward_backward", gzip.compress(b"x") * (limits.MAX_COMPRESSED_FRAMES + 1), GZIP),
    ),
    Limit(
        "objects and lists in a JSON body of more than 1 MiB",
        limits.MAX_CONTAINERS,
        "413",
        "objects and lists",
        packed("asample", b'{"prompt": [' + b"{}, " * limits.MAX_CONTAINERS + b"1]}"),
    ),
    Limit(
        "values in a JSON body of more than 1 MiB",
        limits.MAX_VALUES,
        "413",
        "values",
        packed("asample", b'{"prompt": [' + b"1," * limits.MAX_VALUES + b"1]}"),
    ),
    Limit("nesting depth of JSON", 200, "422", "recursion", post("create_session", DEEP)),
    Limit(
        "fields in a protobuf body of more than 1 MiB",
        limits.MAX_FIELDS,
        "413",
        "fields",
        packed("forward_backward", b"\x1a\x00" * (limits.MAX_FIELDS + 1), PROTOBUF),
    ),
    # Of a pass or a sample.
    Limit("examples in a pass", limits.MAX_DATUMS, "422", "data", passed(_datums)),
    Limit(
        "chunks of a prompt or an example",
        limits.MAX_CHUNKS,
        "422",
        "model_input",
        passed(_chunks),
    ),
    Limit("tensors of an example", limits.MAX_TENSORS, "422", "loss_fn_inputs", passed(_tensors)),
    Limit("settings of a loss", limits.MAX_TENSORS, "422", "loss_fn_config", passed(_settings)),
    Limit(
        "spans (`model_input_spans`) of an example",
        limits.MAX_SPANS,
        "422",
        "model_input_spans",
        passed(_spans),
    ),
    Limit(
        "characters of the name of a tensor or a setting",
        limits.MAX_NAME_CHARS,
        "422",
        "loss_fn_inputs",
        passed(_name),
    ),
    Limit(
        "characters of the name of a loss", limits.MAX_NAME_CHARS, "422", "loss_fn", passed(_loss)
    ),
    Limit("dimensions of a tensor", 16, "422", "shape", passed(_shape(*[1] * 17))),
    Limit("one dimension of a tensor", 2**31 - 1, "422", "shape", passed(_shape(2**40))),
    Limit(
        "cells of a dense tensor", "those of its data", "422", "shape", passed(_shape(2**31 - 1, 8))
    ),
    Limit("negative dimensions", "none", "422", "shape", passed(_shape(-1, -3))),
    Limit(
        "product of the nonzero dimensions of an empty tensor",
        tensors.MAX_DENSE_CELLS,
        "422",
        "shape",
        passed(_shape(0, 2**31 - 1, 2**31 - 1)),
    ),
    Limit(
        "cells of all sparse tensors of a pass",
        tensors.MAX_DENSE_CELLS,
        "422",
        "shape",
        passed(_sparse),
    ),
    Limit(
        "number of a step",
        submit.MAX_SEQ_ID,
        "422",
        "seq_id",
        post("optim_step", {"model_id": "{model}", "seq_id": 2**31, "adam_params": {}}),
    ),
    Limit(
        "sequences of one sample",
        sampling.MAX_SEQUENCES,
        "422",
        "num_samples",
        sample(num_samples=sampling.MAX_SEQUENCES + 1),
    ),
    Limit(
        "characters of a prompt of OpenAI's API, for each token of the model's context",
        openai_prompts.MAX_CHARS_PER_TOKEN,
        "400",
        "",
        None,
        test=UNFIT,
    ),
    Limit(
        "stop texts or stop tokens",
        limits.MAX_ITEMS,
        "422",
        "sampling_params",
        sample(sampling_params={"stop": ["x"] * (limits.MAX_ITEMS + 1)}),
    ),
    Limit(
        "characters of a stop text",
        limits.MAX_TEXT_CHARS,
        "422",
        "sampling_params",
        sample(sampling_params={"stop": "x" * (limits.MAX_TEXT_CHARS + 1)}),
    ),
    Limit(
        "chunks of a prompt in JSON",
        limits.MAX_CHUNKS,
        "422",
        "chunks",
        sample(prompt={"chunks": [{"tokens": [1]}] * (limits.MAX_CHUNKS + 1)}),
    ),
    # Of any message.
    Limit(
        "characters of any text",
        limits.MAX_TEXT_CHARS,
        "422",
        "sdk_version",
        session(sdk_version="x" * (limits.MAX_TEXT_CHARS + 1)),
    ),
    Limit(
        "items of any list: tags",
        limits.MAX_ITEMS,
        "422",
        "tags",
        session(tags=["x"] * (limits.MAX_ITEMS + 1)),
    ),
    Limit(
        "keys of any object: metadata",
        limits.MAX_KEYS,
        "422",
        "user_metadata",
        session(user_metadata={str(key): 1 for key in range(limits.MAX_KEYS + 1)}),
    ),
    Limit(
        "characters of a key of metadata",
        limits.MAX_NAME_CHARS,
        "422",
        "user_metadata",
        session(user_metadata={"x" * (limits.MAX_NAME_CHARS + 1): 1}),
    ),
    Limit(
        "characters of one field in total",
        limits.MAX_FIELD_CHARS,
        "422",
        "user_metadata",
        session(user_metadata={str(key): "x" * 3_900 for key in range(20)}),
    ),
    Limit(
        "integers",
        2**63 - 1,
        "422",
        "custom_loss_seq_id",
        post("create_custom_loss", {"session_id": "{session}", "custom_loss_seq_id": 2**63}),
    ),
    Limit(
        "characters of a project",
        sessions.MAX_PROJECT_LENGTH,
        "422",
        "project_id",
        session(project_id="x" * (sessions.MAX_PROJECT_LENGTH + 1)),
    ),
    Limit(
        "characters of a display name",
        sessions.MAX_DISPLAY_NAME_LENGTH,
        "422",
        "display_name",
        session(display_name="x" * (sessions.MAX_DISPLAY_NAME_LENGTH + 1)),
    ),
    Limit(
        "characters of the detail of a finished session",
        sessions.MAX_FINISH_DETAIL_LENGTH,
        "200, the rest is cut off",
        "",
        None,
        test="tests/server/test_limits_page.py::test_a_session_can_be_finished_with_a_detail_of_any_length",
    ),
    Limit(
        "bytes of the name of a checkpoint",
        checkpoints.MAX_NAME_BYTES,
        "user",
        "checkpoint name",
        checked_result(
            post(
                "save_weights",
                {
                    "model_id": "{model}",
                    "seq_id": 1,
                    "path": "x" * (checkpoints.MAX_NAME_BYTES + 1),
                },
            )
        ),
    ),
    Limit(
        "fetched request ids in a poll",
        limits.MAX_RETRIEVED_IDS,
        "422",
        "retrieved_request_ids",
        post(
            "retrieve_futures",
            {
                "target": {
                    "type": "sampling_session",
                    "sampling_session_id": "{sampler}",
                    "cloned_sampler_id": 0,
                },
                "prev_cursor": 0,
                "retrieved_request_ids": ["x"] * (limits.MAX_RETRIEVED_IDS + 1),
            },
        ),
    ),
    Limit("entries of a page", 10_000, "422", "limit", get("/api/v1/checkpoints?limit=10001")),
    Limit(
        "entries of a page of search results",
        200,
        "422",
        "limit",
        post("sessions/search", {"limit": 201}),
    ),
    Limit(
        "offset of a page",
        2**53,
        "422",
        "offset",
        get(f"/api/v1/training_runs?offset={2**53 + 1}"),
    ),
    Limit(
        "bytes of a token (JWT)",
        auth.MAX_JWT_BYTES,
        "401",
        "",
        None,
        test="tests/server/api/test_auth.py::test_a_changed_or_expired_token_is_refused",
    ),
    # Of telemetry, which is always answered with 200.
    Limit(
        "bytes of telemetry",
        operations.MAX_TELEMETRY_BYTES,
        "200, dropped",
        "accepted",
        None,
        test="tests/server/test_limits_page.py::test_telemetry_over_its_limits_is_accepted_and_not_kept",
    ),
    Limit(
        "characters of telemetry of one owner that are kept per hour",
        events.MAX_CHARACTERS_PER_HOUR,
        "200, the rest is dropped",
        "",
        None,
        test="tests/server/test_limits_page.py::test_telemetry_per_hour_is_limited",
    ),
    Limit(
        "events of one batch of telemetry that are kept",
        events.MAX_EVENTS,
        "200, the rest is dropped",
        "accepted",
        None,
        test="tests/server/test_limits_page.py::test_telemetry_over_its_limits_is_accepted_and_not_kept",
    ),
    # Of answers.
    Limit(
        "characters of metadata in one answer",
        checkpoint_catalog.MAX_METADATA_CHARACTERS,
        "400",
        "",
        None,
        test=METADATA,
    ),
    Limit(
        "bytes of a list, search, trace or report",
        response_limits.MAX_REPORT_BYTES,
        "400",
        "",
        None,
        test=PARTS,
    ),
    Limit(
        "checkpoints of a run, or runs or samplers of a session, in one answer",
        response_limits.MAX_REPORT_ENTRIES,
        "400",
        "",
        None,
        test=MUCH,
    ),
    Limit("events in one usage report", account.MAX_EVENTS, "400", "", None, test=USAGE),
    Limit(
        "checkpoints that one usage report counts",
        account.MAX_CHECKPOINTS,
        "400",
        "",
        None,
        test=f"{BOUNDS}::test_the_number_of_checkpoints_in_a_report_is_limited",
    ),
    Limit(
        "sessions that one search examines",
        stored_sessions.MAX_SEARCHED,
        "a cursor to continue",
        "",
        None,
        test=f"{BOUNDS}::test_a_search_examines_a_limited_number_of_sessions_and_returns_a_cursor",
    ),
    Limit("requests in a trace", stored_sessions.MAX_SPANS, "the newest", "", None, test=MUCH),
    Limit(
        "lists, searches and reports of one owner at the same time",
        response_limits.MAX_REPORTS_PER_OWNER,
        "further ones wait",
        "",
        None,
        test=f"{BOUNDS}::test_an_owner_gets_one_report_at_a_time_and_others_do_not_wait",
    ),
    Limit("errors that a 422 lists", errors.MAX_ERRORS_SENT, "the first", "", None, test=QUOTED),
    Limit("characters of each error", errors.MAX_ERROR_CHARS, "truncated", "", None, test=QUOTED),
    # Of custom losses.
    Limit(
        "custom losses of a session",
        models.MAX_LOSSES_PER_SESSION,
        "422",
        "custom_loss_seq_id",
        post(
            "create_custom_loss",
            {
                "session_id": "{session}",
                "custom_loss_seq_id": models.MAX_LOSSES_PER_SESSION,
                "name": "x",
                "inputs": [],
                "graph": {"nodes": []},
            },
        ),
    ),
    Limit(
        "nodes of a custom loss that are parsed",
        limits.MAX_NODES,
        "422",
        "nodes",
        post(
            "create_custom_loss",
            {
                "session_id": "{session}",
                "custom_loss_seq_id": 0,
                "name": "n",
                "inputs": [],
                "graph": {"format": 1, "nodes": [NODE] * (limits.MAX_NODES + 1)},
            },
        ),
    ),
    Limit(
        "characters of the name of a custom loss",
        custom_loss_graph.MAX_NAME,
        "user",
        "",
        None,
        test=ENGINE,
    ),
    Limit("inputs of a custom loss", custom_loss_parser.MAX_INPUTS, "user", "", None, test=ENGINE),
    Limit("nodes of a custom loss", custom_loss_parser.MAX_NODES, "user", "", None, test=ENGINE),
    Limit(
        "nesting depth of an argument",
        custom_loss_parser.MAX_DEPTH,
        "user",
        "",
        None,
        test=ENGINE,
    ),
    Limit("constants over all nodes", custom_loss_parser.MAX_VALUES, "user", "", None, test=ENGINE),
    Limit("items of a list", custom_loss_sizes.MAX_ITEMS, "user", "", None, test=ENGINE),
    Limit("characters of a text", custom_loss_sizes.MAX_TEXT, "user", "", None, test=ENGINE),
    Limit("dimensions of a value", custom_loss_sizes.MAX_RANK, "user", "", None, test=ENGINE),
    Limit("metrics", custom_loss_parser.MAX_METRICS, "user", "", None, test=ENGINE),
    Limit(
        "elements of a value, an empty dimension counted as one (or 64 times the largest input)",
        custom_loss_graph.MAX_VALUE_ELEMENTS,
        "user",
        "",
        None,
        test=ENGINE,
    ),
]
