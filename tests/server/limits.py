"""
Every limit on a size: its name, its value, its setting, and a request that goes over it.

The page docs/reference/limits.md is written from this, and `test_limits_page` sends every request.
"""

import gzip
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import zstandard

from server.hosting import PROTOBUF, Answer, Api, pass_body
from tinkex.engine.training import custom_loss_graph, custom_loss_ops
from tinkex.server.api import (
    account,
    auth,
    bodies,
    http_limits,
    models,
    operations,
    report_limits,
    sampling,
    sessions,
    submit,
)
from tinkex.server.scheduler import checkpoints
from tinkex.server.settings import Settings
from tinkex.server.store import checkpoint_lists, events
from tinkex.server.store import sessions as stored_sessions
from tinkex.wire import errors, limits, tensors
from tinkex.wire.proto import tinkex_wire_pb2 as pb

#: Settings of the server that the cases are sent to: defaults would need gigabytes.
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
    #: What a client gets that goes over it; `user` is a failed request of that category.
    answer: str
    #: The field that is named, or a word of the answer.
    says: str
    case: Case | None
    setting: str = ""
    #: Where it is tried instead, when one request cannot show it.
    test: str = ""


def post(path: str, body: Any, headers: Mapping[str, str] | None = None) -> Case:
    """A body with words for ids."""

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
    """Packed when it is sent: small on the wire."""

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


def settled(case: Case) -> Case:
    """For what is accepted and fails when its turn comes."""

    async def send(api: Api, ids: Ids) -> Answer:
        answer = await case(api, ids)
        assert answer.status == 200, answer
        while (told := await api.poll(answer.json["request_id"])).status == 408:
            pass
        return told

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
    for _ in range(limits.MOST_CHUNKS):
        message.data[0].model_input.add().encoded_text.tokens = b"\1\0\0\0"


def _datums(message: pb.ForwardBackwardRequest) -> None:
    for _ in range(limits.MOST_DATUMS):
        message.data.add()


def _tensors(message: pb.ForwardBackwardRequest) -> None:
    for number in range(limits.MOST_TENSORS):
        message.data[0].loss_fn_inputs[str(number)].CopyFrom(
            message.data[0].loss_fn_inputs["weights"]
        )


def _spans(message: pb.ForwardBackwardRequest) -> None:
    for _ in range(limits.MAX_SPANS + 1):
        message.data[0].model_input_spans.add().prompt_tokens.length = 1


def _settings(message: pb.ForwardBackwardRequest) -> None:
    for number in range(limits.MOST_TENSORS + 1):
        message.loss_fn_config[str(number)] = 1.0


def _sparse(message: pb.ForwardBackwardRequest) -> None:
    """Two that may be as large as they are, and not both."""
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
    message.data[0].loss_fn_inputs["x" * (limits.LONGEST_NAME + 1)].CopyFrom(tensor)


def _loss(message: pb.ForwardBackwardRequest) -> None:
    message.loss_fn = "x" * (limits.LONGEST_NAME + 1)


GZIP = {**PROTOBUF, "Content-Encoding": "gzip"}
DEEP = b'{"tags": ' + b"[" * 300 + b"]" * 300 + b"}"
DEFAULTS = Settings()
NODE = {"op": "placeholder", "name": "logprobs", "target": "logprobs"}
QUOTED = "tests/server/test_limits_page.py::test_answers_quote_little_of_what_was_sent"
PAGE = "tests/server/test_limits_page.py"
ARRIVING = f"{PAGE}::test_bodies_that_an_owner_has_arriving_have_an_end_together"
UNPACKED = f"{PAGE}::test_many_small_bodies_do_not_become_large_at_once"
ROOM = (
    "tests/server/test_room.py::test_a_body_without_room_is_refused_after_a_while_and_let_in_later"
)
METADATA = f"{PAGE}::test_an_answer_holds_so_much_metadata"
BOUNDS = "tests/server/api/test_bounds.py"
MUCH = f"{BOUNDS}::test_an_owner_with_very_much_gets_bounded_answers_built_off_the_event_loop"
PARTS = f"{BOUNDS}::test_an_answer_in_parts_is_the_same_as_whole"
USAGE = f"{BOUNDS}::test_usage_of_too_much_is_refused_and_a_shorter_time_is_answered"
AROUND = "tests/server/test_limits_page.py::test_what_is_around_bodies_has_an_end"
ENGINE = "tests/engine/test_graphs.py::test_a_hostile_graph_is_refused_with_a_reason"

LIMITS = [
    # Of a whole request.
    Limit(
        "bytes of the address and the headers",
        http_limits.LONGEST_HEAD,
        "431",
        "head",
        get("/api/v1/sessions?x=" + "x" * 70_000),
    ),
    Limit(
        "bytes of trailers, and of anything else around a body",
        http_limits.LONGEST_HEAD,
        "the connection is closed",
        "",
        None,
        test=AROUND,
    ),
    Limit(
        "requests that a connection sends before the first is answered",
        http_limits.MOST_AHEAD,
        "the connection is closed",
        "",
        None,
        test=AROUND,
    ),
    Limit(
        "bytes of a pass or a sample as it arrives",
        DEFAULTS.max_body_bytes,
        "413",
        "bytes",
        post("asample", b" " * (SMALL["max_body_bytes"] + 1)),
        setting="max_body_bytes",
    ),
    Limit(
        "bytes of it after decompression",
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
        "bytes of bodies that one owner has arriving at once",
        bodies.BODIES * DEFAULTS.max_body_bytes,
        "429",
        "",
        None,
        setting="max_body_bytes",
        test=ARRIVING,
    ),
    Limit(
        "large bodies of one owner that are unpacked and decoded at once",
        bodies.AT_ONCE,
        "the next wait",
        "",
        None,
        test=UNPACKED,
    ),
    Limit(
        "bytes of large bodies of everybody, from their head to their answer",
        DEFAULTS.max_arriving_bytes,
        "429 after `arriving_wait_s`",
        "",
        None,
        setting="max_arriving_bytes",
        test=ROOM,
    ),
    Limit(
        "members of a gzip body, frames of a zstd body",
        limits.MOST_MEMBERS,
        "413",
        "parts",
        post("forward_backward", gzip.compress(b"x") * (limits.MOST_MEMBERS + 1), GZIP),
    ),
    Limit(
        "objects and lists in a JSON body of more than 1 MiB",
        limits.MOST_CONTAINERS,
        "413",
        "objects and lists",
        packed("asample", b'{"prompt": [' + b"{}, " * limits.MOST_CONTAINERS + b"1]}"),
    ),
    Limit(
        "values in a JSON body of more than 1 MiB",
        limits.MOST_VALUES,
        "413",
        "values",
        packed("asample", b'{"prompt": [' + b"1," * limits.MOST_VALUES + b"1]}"),
    ),
    Limit(
        "objects and lists inside each other", 200, "422", "recursion", post("create_session", DEEP)
    ),
    Limit(
        "fields in a protobuf body of more than 1 MiB",
        limits.MOST_FIELDS,
        "413",
        "fields",
        packed("forward_backward", b"\x1a\x00" * (limits.MOST_FIELDS + 1), PROTOBUF),
    ),
    # Of a pass or a sample.
    Limit("examples in a pass", limits.MOST_DATUMS, "422", "data", passed(_datums)),
    Limit(
        "chunks of a prompt or an example",
        limits.MOST_CHUNKS,
        "422",
        "model_input",
        passed(_chunks),
    ),
    Limit("tensors of an example", limits.MOST_TENSORS, "422", "loss_fn_inputs", passed(_tensors)),
    Limit("settings of a loss", limits.MOST_TENSORS, "422", "loss_fn_config", passed(_settings)),
    Limit(
        "runs of tokens of known origin, of an example",
        limits.MAX_SPANS,
        "422",
        "model_input_spans",
        passed(_spans),
    ),
    Limit(
        "characters of the name of a tensor or a setting",
        limits.LONGEST_NAME,
        "422",
        "loss_fn_inputs",
        passed(_name),
    ),
    Limit("characters of the name of a loss", limits.LONGEST_NAME, "422", "loss_fn", passed(_loss)),
    Limit("dimensions of a tensor", 16, "422", "shape", passed(_shape(*[1] * 17))),
    Limit("one dimension of a tensor", 2**31 - 1, "422", "shape", passed(_shape(2**40))),
    Limit(
        "cells of a dense tensor", "those of its data", "422", "shape", passed(_shape(2**31 - 1, 8))
    ),
    Limit("sizes below zero", "none", "422", "shape", passed(_shape(-1, -3))),
    Limit(
        "sizes of an empty tensor, multiplied without the zeros",
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
        submit.LARGEST_SEQ_ID,
        "422",
        "seq_id",
        post("optim_step", {"model_id": "{model}", "seq_id": 2**31, "adam_params": {}}),
    ),
    Limit(
        "sequences of one sample",
        sampling.MOST_SEQUENCES,
        "422",
        "num_samples",
        sample(num_samples=sampling.MOST_SEQUENCES + 1),
    ),
    Limit(
        "stop texts or stop tokens",
        limits.MOST_ITEMS,
        "422",
        "sampling_params",
        sample(sampling_params={"stop": ["x"] * (limits.MOST_ITEMS + 1)}),
    ),
    Limit(
        "characters of a stop text",
        limits.LONGEST_TEXT,
        "422",
        "sampling_params",
        sample(sampling_params={"stop": "x" * (limits.LONGEST_TEXT + 1)}),
    ),
    Limit(
        "chunks of a prompt in JSON",
        limits.MOST_CHUNKS,
        "422",
        "chunks",
        sample(prompt={"chunks": [{"tokens": [1]}] * (limits.MOST_CHUNKS + 1)}),
    ),
    # Of any message.
    Limit(
        "characters of any text",
        limits.LONGEST_TEXT,
        "422",
        "sdk_version",
        session(sdk_version="x" * (limits.LONGEST_TEXT + 1)),
    ),
    Limit(
        "items of any list: tags",
        limits.MOST_ITEMS,
        "422",
        "tags",
        session(tags=["x"] * (limits.MOST_ITEMS + 1)),
    ),
    Limit(
        "keys of any object: metadata",
        limits.MOST_KEYS,
        "422",
        "user_metadata",
        session(user_metadata={str(key): 1 for key in range(limits.MOST_KEYS + 1)}),
    ),
    Limit(
        "characters of a key of metadata",
        limits.LONGEST_NAME,
        "422",
        "user_metadata",
        session(user_metadata={"x" * (limits.LONGEST_NAME + 1): 1}),
    ),
    Limit(
        "characters of one field in all",
        limits.LARGEST_FIELD,
        "422",
        "user_metadata",
        session(user_metadata={str(key): "x" * 3_900 for key in range(20)}),
    ),
    Limit(
        "whole numbers",
        2**63 - 1,
        "422",
        "custom_loss_seq_id",
        post("create_custom_loss", {"session_id": "{session}", "custom_loss_seq_id": 2**63}),
    ),
    Limit(
        "characters of a project",
        sessions.LONGEST_PROJECT,
        "422",
        "project_id",
        session(project_id="x" * (sessions.LONGEST_PROJECT + 1)),
    ),
    Limit(
        "characters of a display name",
        sessions.LONGEST_DISPLAY_NAME,
        "422",
        "display_name",
        session(display_name="x" * (sessions.LONGEST_DISPLAY_NAME + 1)),
    ),
    Limit(
        "characters of why a session was finished",
        sessions.LONGEST_FINISH,
        "200, the rest is cut off",
        "",
        None,
        test="tests/server/test_limits_page.py::test_a_session_can_be_finished_with_any_words",
    ),
    Limit(
        "bytes of the name of a checkpoint",
        checkpoints.LONGEST_NAME,
        "user",
        "checkpoint name",
        settled(
            post(
                "save_weights",
                {"model_id": "{model}", "seq_id": 1, "path": "x" * (checkpoints.LONGEST_NAME + 1)},
            )
        ),
    ),
    Limit(
        "requests that a poll says it has fetched",
        limits.MOST_FETCHED,
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
                "retrieved_request_ids": ["x"] * (limits.MOST_FETCHED + 1),
            },
        ),
    ),
    Limit("entries of a page", 10_000, "422", "limit", get("/api/v1/checkpoints?limit=10001")),
    Limit(
        "entries of a page of found sessions",
        200,
        "422",
        "limit",
        post("sessions/search", {"limit": 201}),
    ),
    Limit(
        "where a page begins",
        2**53,
        "422",
        "offset",
        get(f"/api/v1/training_runs?offset={2**53 + 1}"),
    ),
    Limit(
        "bytes of a token (JWT)",
        auth.LONGEST_TOKEN,
        "401",
        "",
        None,
        test="tests/server/api/test_keys.py::test_a_token_that_was_changed_or_is_over_says_nothing",
    ),
    # Of telemetry, which is always answered with 200.
    Limit(
        "bytes of telemetry",
        operations.MOST_BYTES,
        "200, and not kept",
        "accepted",
        None,
        test="tests/server/test_limits_page.py::test_telemetry_over_its_limits_is_accepted_and_not_kept",
    ),
    Limit(
        "characters of telemetry of one owner that are kept in an hour",
        events.MAX_CHARACTERS_PER_HOUR,
        "200, the rest not kept",
        "",
        None,
        test="tests/server/test_limits_page.py::test_telemetry_of_an_hour_has_an_end",
    ),
    Limit(
        "events of one batch of telemetry that are kept",
        events.MAX_EVENTS,
        "200, the rest not kept",
        "accepted",
        None,
        test="tests/server/test_limits_page.py::test_telemetry_over_its_limits_is_accepted_and_not_kept",
    ),
    # Of answers.
    Limit(
        "characters of metadata in one answer",
        checkpoint_lists.MAX_METADATA_CHARACTERS,
        "400",
        "",
        None,
        test=METADATA,
    ),
    Limit(
        "bytes of a list, search, trace or report",
        report_limits.MOST_BYTES,
        "400",
        "",
        None,
        test=PARTS,
    ),
    Limit(
        "checkpoints of a run, or runs or samplers of a session, in one answer",
        report_limits.MOST_LISTED,
        "400",
        "",
        None,
        test=MUCH,
    ),
    Limit("events in one answer about usage", account.MOST_EVENTS, "400", "", None, test=USAGE),
    Limit(
        "checkpoints that one answer about usage counts",
        account.MOST_STORED,
        "400",
        "",
        None,
        test=f"{BOUNDS}::test_the_number_of_checkpoints_in_a_report_has_an_end",
    ),
    Limit(
        "sessions that one search looks at",
        stored_sessions.MAX_SEARCHED,
        "a cursor to go on with",
        "",
        None,
        test=f"{BOUNDS}::test_a_search_looks_at_so_many_sessions_and_says_where_to_go_on",
    ),
    Limit("requests in a trace", stored_sessions.MAX_SPANS, "the newest", "", None, test=MUCH),
    Limit(
        "lists, searches and reports of an owner that are made at once",
        bodies.REPORTS_AT_ONCE,
        "the next wait",
        "",
        None,
        test=f"{BOUNDS}::test_one_owner_makes_one_report_at_a_time_and_others_do_not_wait",
    ),
    Limit("errors that a 422 lists", errors.MOST_TOLD, "the first", "", None, test=QUOTED),
    Limit("characters of each", errors.LONGEST_TOLD, "cut short", "", None, test=QUOTED),
    # Of custom losses.
    Limit(
        "custom losses of a session",
        models.MOST_LOSSES,
        "422",
        "custom_loss_seq_id",
        post(
            "create_custom_loss",
            {
                "session_id": "{session}",
                "custom_loss_seq_id": models.MOST_LOSSES,
                "name": "x",
                "inputs": [],
                "graph": {"nodes": []},
            },
        ),
    ),
    Limit(
        "nodes of it that are read at all",
        limits.MOST_NODES,
        "422",
        "nodes",
        post(
            "create_custom_loss",
            {
                "session_id": "{session}",
                "custom_loss_seq_id": 0,
                "name": "n",
                "inputs": [],
                "graph": {"format": 1, "nodes": [NODE] * (limits.MOST_NODES + 1)},
            },
        ),
    ),
    Limit("characters of its name", custom_loss_graph.MAX_NAME, "user", "", None, test=ENGINE),
    Limit("inputs", custom_loss_graph.MAX_INPUTS, "user", "", None, test=ENGINE),
    Limit("nodes", custom_loss_graph.MAX_NODES, "user", "", None, test=ENGINE),
    Limit(
        "lists inside lists of an argument",
        custom_loss_graph.MAX_DEPTH,
        "user",
        "",
        None,
        test=ENGINE,
    ),
    Limit("constants over all nodes", custom_loss_graph.MAX_VALUES, "user", "", None, test=ENGINE),
    Limit("items of a list", custom_loss_ops.MAX_ITEMS, "user", "", None, test=ENGINE),
    Limit("characters of a text", custom_loss_ops.MAX_TEXT, "user", "", None, test=ENGINE),
    Limit("dimensions of a value", custom_loss_ops.MAX_RANK, "user", "", None, test=ENGINE),
    Limit("metrics", custom_loss_graph.MAX_METRICS, "user", "", None, test=ENGINE),
    Limit(
        "elements of a value, an empty dimension counted as one (or 64 times the largest input)",
        custom_loss_graph.LARGEST_VALUE,
        "user",
        "",
        None,
        test=ENGINE,
    ),
]
