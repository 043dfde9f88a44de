"""What the page at /docs says about bodies that routes read themselves, and about the hot routes."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from tinkex.wire.codec import JSON_TYPE, PROTOBUF_TYPE
from tinkex.wire.futures import (
    CompleteMetadata,
    FutureRetrieveRequest,
    FuturesRetrieveRequest,
    FuturesRetrieveResponse,
    RequestFailedResponse,
    TryAgainResponse,
    UntypedAPIFuture,
)
from tinkex.wire.sampling import SampleRequest

Schema = dict[str, Any]


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(required: Sequence[str], **properties: Any) -> Schema:
    return {"type": "object", "required": list(required), "properties": properties}


def _list(of: Schema) -> Schema:
    return {"type": "array", "items": of}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}

#: Types that carry tokens and tensors are not pydantic's, so they are described by hand.
PAYLOADS: Mapping[str, Schema] = {
    "TensorData": _object(
        ["data", "dtype"],
        data=_list(NUMBER),
        dtype={"enum": ["int64", "float32"]},
        shape=_or_null(_list({"type": "integer", "minimum": 0})),
        sparse_crow_indices=_or_null(_list(WHOLE)),
        sparse_col_indices=_or_null(_list(WHOLE)),
    ),
    "ModelInput": _object(
        ["chunks"],
        chunks=_list(
            {
                "anyOf": [
                    _object(
                        ["tokens"],
                        type={"const": "encoded_text"},
                        tokens=_list({"type": "integer", "minimum": 0}),
                    ),
                    _object(
                        ["data", "format"],
                        type={"const": "image"},
                        data=TEXT,
                        format={"enum": ["png", "jpeg"]},
                        expected_tokens=_or_null(WHOLE),
                    ),
                ]
            }
        ),
    ),
    "Datum": _object(
        ["model_input", "loss_fn_inputs"],
        model_input=ref("ModelInput"),
        loss_fn_inputs={"type": "object", "additionalProperties": ref("TensorData")},
    ),
    "ForwardBackwardInput": _object(
        ["data", "loss_fn"],
        data=_list(ref("Datum")),
        loss_fn=TEXT,
        loss_fn_config=_or_null(
            {"type": "object", "additionalProperties": {"type": ["number", "string"]}}
        ),
    ),
    "ForwardBackwardRequest": _object(
        ["forward_backward_input", "model_id", "seq_id"],
        forward_backward_input=ref("ForwardBackwardInput"),
        model_id=TEXT,
        seq_id={"type": "integer", "minimum": 1},
    ),
    "ForwardRequest": _object(
        ["forward_input", "model_id", "seq_id"],
        forward_input=ref("ForwardBackwardInput"),
        model_id=TEXT,
        seq_id={"type": "integer", "minimum": 1},
    ),
    "ForwardBackwardOutput": _object(
        ["loss_fn_output_type", "loss_fn_outputs", "metrics"],
        loss_fn_output_type=TEXT,
        loss_fn_outputs=_list({"type": "object", "additionalProperties": ref("TensorData")}),
        metrics={"type": "object", "additionalProperties": NUMBER},
    ),
    "ErrorDetail": _object(
        ["detail"],
        detail={
            "anyOf": [
                TEXT,
                _list(_object(["loc", "msg", "type"], loc=_list({}), msg=TEXT, type=TEXT)),
            ]
        },
    ),
}

HOT_MODELS: tuple[type[BaseModel], ...] = (
    CompleteMetadata,
    FutureRetrieveRequest,
    FuturesRetrieveRequest,
    FuturesRetrieveResponse,
    RequestFailedResponse,
    SampleRequest,
    TryAgainResponse,
    UntypedAPIFuture,
)


def _body(name: str, *, protobuf: bool = False) -> Schema:
    content: Schema = {JSON_TYPE: {"schema": ref(name)}}
    if protobuf:
        content[PROTOBUF_TYPE] = {"schema": {"type": "string", "format": "binary"}}
    return content


def _route(tag: str, summary: str, asks: str, answers: Schema, **more: Any) -> Schema:
    return {
        "post": {
            "tags": [tag],
            "summary": summary,
            "operationId": asks[0].lower() + asks[1:],
            "requestBody": {
                "required": True,
                "content": _body(asks, protobuf=asks == "ForwardBackwardRequest"),
            },
            "responses": {
                "200": {"description": "Successful Response", "content": answers},
                **{
                    status: {"description": told, "content": _body("ErrorDetail")}
                    for status, told in REFUSALS.items()
                },
                **more,
            },
        }
    }


REFUSALS: Mapping[str, str] = {
    "400": "Refused",
    "401": "Unknown key",
    "404": "No such thing, or not yours",
    "410": "The session is over, or the result is gone",
    "413": "Too large",
    "422": "Malformed",
    "429": "Too much at once",
}

_RESULT = {
    JSON_TYPE: {
        "schema": {
            "anyOf": [
                ref("ForwardBackwardOutput"),
                ref("RequestFailedResponse"),
                ref("CompleteMetadata"),
                {"type": "object", "description": "the result of any other request"},
            ]
        }
    },
    PROTOBUF_TYPE: {"schema": {"type": "string", "format": "binary"}},
}

_EVENTS = {
    "text/event-stream": {
        "schema": {
            "type": "string",
            "description": "Events `accepted` (`request_id`, `sample_sequence_ids`), `token` "
            "(`sequence`, `tokens`, `logprobs`) as they come, and `done` (the answer as JSON) or "
            "`error` (`error`, `category`).",
        }
    }
}

_STREAM = _route(
    "sampling", "Draw sequences, and read them while they are drawn", "SampleRequest", _EVENTS
)
_STREAM["post"]["operationId"] = "streamSample"  # `asample` has the name of the body

#: Path -> what it does.
HOT_PATHS: Mapping[str, Schema] = {
    "/api/v1/asample": _route(
        "sampling", "Draw sequences", "SampleRequest", _body("UntypedAPIFuture")
    ),
    "/api/v1/stream_sample": _STREAM,
    "/api/v1/forward": _route(
        "training",
        "A forward pass, as clients before 0.25 send it",
        "ForwardRequest",
        _body("UntypedAPIFuture"),
    ),
    "/api/v1/forward_backward": _route(
        "training",
        "A forward pass, and a backward pass unless `forward_only`",
        "ForwardBackwardRequest",
        _body("UntypedAPIFuture"),
    ),
    "/api/v1/retrieve_future": _route(
        "futures",
        "Wait for a result, about 30 s",
        "FutureRetrieveRequest",
        _RESULT,
        **{"408": {"description": "Not yet: ask again", "content": _body("TryAgainResponse")}},
    ),
    "/api/v1/retrieve_futures": _route(
        "futures",
        "Wait for results of a sampling session",
        "FuturesRetrieveRequest",
        _body("FuturesRetrieveResponse"),
    ),
}


def complete(schema: Schema, bodies: Sequence[type[BaseModel]]) -> None:
    """Add what FastAPI cannot see: bodies that routes read themselves, and the hot routes."""
    _, found = models_json_schema(
        [(body, "validation") for body in (*bodies, *HOT_MODELS)],
        ref_template="#/components/schemas/{model}",
    )
    components = schema.setdefault("components", {}).setdefault("schemas", {})
    components.update(found.get("$defs", {}))
    components.update(PAYLOADS)
    for name, component in components.items():
        if name not in PAYLOADS:
            components[name] = _with_payloads(component)
    paths = schema.setdefault("paths", {})
    paths.update(HOT_PATHS)
    for path in paths.values():
        for operation in path.values():
            for status, told in REFUSALS.items():
                refusal = {"description": told, "content": _body("ErrorDetail")}
                operation["responses"].setdefault(status, refusal)


def _with_payloads(schema: Any) -> Any:
    """The schema with each nameless object that stands for a payload replaced by the payload."""
    if isinstance(schema, list):
        return [_with_payloads(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("title") in PAYLOADS and schema.get("type") == "object":
        return ref(schema["title"])
    return {key: _with_payloads(value) for key, value in schema.items()}
