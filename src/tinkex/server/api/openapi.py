"""
The OpenAPI description, and the page at /docs.

Routes read their bodies themselves and the most frequent ones bypass FastAPI, so their schemas are
added here. The page is plain HTML without scripts: it works without a network, and no third-party
script can tamper with it.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from tinkex.server.api.sessions import SetSessionProjectRequest
from tinkex.server.api.weights import WeightsInfoRequest
from tinkex.wire import checkpoints as wire_checkpoints
from tinkex.wire import client_config as wire_client_config
from tinkex.wire import custom_loss as wire_custom_loss
from tinkex.wire import futures as wire_futures
from tinkex.wire import sampling as wire_sampling
from tinkex.wire import sessions as wire_sessions
from tinkex.wire import telemetry as wire_telemetry
from tinkex.wire import training as wire_training
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

#: Types with tokens and tensors are not pydantic models, so their schemas are written by hand.
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


def _route(tag: str, summary: str, request: str, response: Schema, **more: Any) -> Schema:
    return {
        "post": {
            "tags": [tag],
            "summary": summary,
            "operationId": request[0].lower() + request[1:],
            "requestBody": {
                "required": True,
                "content": _body(request, protobuf=request == "ForwardBackwardRequest"),
            },
            "responses": {
                "200": {"description": "Successful Response", "content": response},
                **{
                    status: {"description": text, "content": _body("ErrorDetail")}
                    for status, text in REFUSALS.items()
                },
                **more,
            },
        }
    }


REFUSALS: Mapping[str, str] = {
    "400": "Refused",
    "401": "Unknown key",
    "404": "Not found, or another owner's",
    "410": "The session is finished, or the result has expired",
    "413": "Too large",
    "422": "Malformed",
    "429": "Over a limit; retry later",
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
            "(`sequence`, `tokens`, `logprobs`) as they are sampled, and `done` (the response as JSON) or "
            "`error` (`error`, `category`).",
        }
    }
}

_STREAM = _route("sampling", "Sample sequences, as a stream", "SampleRequest", _EVENTS)
_STREAM["post"]["operationId"] = "streamSample"  # `asample` has the default id

#: The OpenAPI entries of the most frequent routes.
HOT_PATHS: Mapping[str, Schema] = {
    "/api/v1/asample": _route(
        "sampling", "Sample sequences", "SampleRequest", _body("UntypedAPIFuture")
    ),
    "/api/v1/stream_sample": _STREAM,
    "/api/v1/forward": _route(
        "training",
        "A forward pass, as SDKs before 0.25 send it",
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
        "Wait for a result, up to about 30 s",
        "FutureRetrieveRequest",
        _RESULT,
        **{"408": {"description": "Not ready: poll again", "content": _body("TryAgainResponse")}},
    ),
    "/api/v1/retrieve_futures": _route(
        "futures",
        "Wait for results of a sampling session",
        "FuturesRetrieveRequest",
        _body("FuturesRetrieveResponse"),
    ),
}


#: Bodies that routes read themselves.
BODIES: tuple[type[BaseModel], ...] = (
    WeightsInfoRequest,
    SetSessionProjectRequest,
    wire_checkpoints.CopyWeightsRequest,
    wire_checkpoints.LoadWeightsRequest,
    wire_checkpoints.SaveWeightsExternalRequest,
    wire_checkpoints.SaveWeightsForSamplerRequest,
    wire_checkpoints.SaveWeightsRequest,
    wire_checkpoints.SetCheckpointTtlRequest,
    wire_custom_loss.CreateCustomLossRequest,
    wire_futures.CancelFutureRequest,
    wire_client_config.ClientConfigRequest,
    wire_sessions.CreateSessionRequest,
    wire_sessions.FinishSessionRequest,
    wire_sessions.GetInfoRequest,
    wire_sessions.SessionHeartbeatRequest,
    wire_sessions.SessionSearchRequest,
    wire_sampling.CreateSamplingSessionRequest,
    wire_sampling.JoinSamplingSessionRequest,
    wire_telemetry.TelemetrySendRequest,
    wire_training.CreateModelRequest,
    wire_training.OptimStepRequest,
    wire_training.UnloadModelRequest,
)


def describe_bodies(app: FastAPI) -> None:
    """Make `app.openapi()` include what FastAPI does not see."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            complete(generate(), BODIES)
        return app.openapi_schema or {}

    app.openapi = openapi  # type: ignore[method-assign]


def complete(schema: Schema, bodies: Sequence[type[BaseModel]]) -> None:
    """Add the bodies that routes read themselves, and the most frequent routes."""
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
            for status, text in REFUSALS.items():
                refusal = {"description": text, "content": _body("ErrorDetail")}
                operation["responses"].setdefault(status, refusal)


def _with_payloads(schema: Any) -> Any:
    """The schema with references in place of the untyped objects that stand for payloads."""
    if isinstance(schema, list):
        return [_with_payloads(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("title") in PAYLOADS and schema.get("type") == "object":
        return ref(schema["title"])
    return {key: _with_payloads(value) for key, value in schema.items()}


#: The page loads and runs nothing, and cannot be framed.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #222; background: #fff; }
code, .method { font: 0.9em ui-monospace, monospace; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid #ccc; }
details { margin: 0.4rem 0; padding: 0.3rem 0.6rem; border: 1px solid #ddd; border-radius: 4px; }
summary { cursor: pointer; overflow-wrap: anywhere; }
.method { font-weight: bold; text-transform: uppercase; }
.about { color: #666; }
table { border-collapse: collapse; margin: 0.4rem 0; width: 100%; }
td, th { text-align: left; vertical-align: top; padding: 0.2rem 0.8rem 0.2rem 0; }
tr + tr { border-top: 1px solid #eee; }
@media (prefers-color-scheme: dark) {
  body { color: #ddd; background: #181818; }
  a { color: #8ab4f8; }
  h2, details, tr + tr { border-color: #444; }
  .about { color: #999; }
}
"""

SchemaLike = Mapping[str, Any]


async def docs(request: Request) -> Response:
    """The page at /docs: all routes and schemas."""
    return HTMLResponse(page(request.app.openapi()), headers=HEADERS)


def page(described: SchemaLike) -> str:
    """The HTML page of an OpenAPI description."""
    about = described["info"]
    schemas = described.get("components", {}).get("schemas", {})
    return "".join(
        (
            (
                "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
                "<meta name='viewport' content='width=device-width'>"
                f"<title>{escape(about['title'])}</title><style>{STYLE}</style></head><body>"
            ),
            f"<h1>{escape(about['title'])}</h1><p>{escape(about.get('description', ''))} ",
            "For programs: <a href='openapi.json'>openapi.json</a>.</p>",
            *_routes(described["paths"]),
            "<h2 id='schemas'>Schemas</h2>",
            *(_schema(name, schema) for name, schema in sorted(schemas.items())),
            "</body></html>\n",
        )
    )


def _routes(paths: SchemaLike) -> Iterator[str]:
    by_tag: defaultdict[str, list[str]] = defaultdict(list)
    for path, methods in sorted(paths.items()):
        for method, operation in methods.items():
            (tag, *_) = operation.get("tags") or ["other"]
            by_tag[tag].append(_operation(method, path, operation))
    for tag, operations in sorted(by_tag.items()):
        yield f"<h2 id='{escape(tag)}'>{escape(tag.capitalize())}</h2>"
        yield from operations


def _operation(method: str, path: str, operation: SchemaLike) -> str:
    parts = [
        (
            f"<details><summary><span class='method'>{escape(method)}</span> "
            f"<code>{escape(path)}</code> "
            f"<span class='about'>{escape(operation.get('summary', ''))}</span></summary>"
        )
    ]
    if text := operation.get("description"):
        parts.append(f"<p>{escape(text)}</p>")
    if parameters := operation.get("parameters"):
        rows = (
            (one["name"], _type(one.get("schema", {})), _about(one, required=one.get("required")))
            for one in parameters
        )
        parts.append(_table(("Parameter", "Type", ""), rows))
    if body := operation.get("requestBody"):
        parts.append(f"<p>Body: {_content(body.get('content', {}))}</p>")
    rows = (
        (status, _content(response.get("content", {})), escape(response.get("description", "")))
        for status, response in sorted(operation.get("responses", {}).items())
    )
    parts.append(_table(("Response", "", ""), rows))
    return "".join((*parts, "</details>"))


def _schema(name: str, schema: SchemaLike) -> str:
    required = set(schema.get("required", ()))
    fields = [
        (field, _type(one), _about(one, required=field in required))
        for field, one in schema.get("properties", {}).items()
    ]
    body = _table(("Field", "Type", ""), fields) if fields else f"<p>{_type(schema)}</p>"
    about = escape(schema.get("description", ""))
    return (
        f"<details id='{escape(name)}' open><summary><code>{escape(name)}</code> "
        f"<span class='about'>{about}</span></summary>{body}</details>"
    )


def _about(one: SchemaLike, *, required: bool | None) -> str:
    parts = [escape(one.get("description", ""))]
    if required:
        parts.append("required")
    default = one.get("default", one.get("schema", {}).get("default"))
    if default is not None:
        parts.append(f"default <code>{escape(repr(default))}</code>")
    return ", ".join(part for part in parts if part)


def _content(content: SchemaLike) -> str:
    return ", ".join(
        f"{_type(one.get('schema', {}))} <span class='about'>{escape(kind)}</span>"
        for kind, one in content.items()
    )


def _type(schema: Any) -> str:
    """A short description of a type, with links to its schemas."""
    if not isinstance(schema, Mapping) or not schema:
        return "any"
    if target := schema.get("$ref"):
        name = target.rpartition("/")[2]
        return f"<a href='#{escape(name)}'><code>{escape(name)}</code></a>"
    for choice in ("anyOf", "oneOf", "allOf"):
        if choice in schema:
            return " or ".join(_type(one) for one in schema[choice])
    if "const" in schema:
        return f"<code>{escape(repr(schema['const']))}</code>"
    if "enum" in schema:
        return " or ".join(f"<code>{escape(repr(one))}</code>" for one in schema["enum"])
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type(schema.get('items'))}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), Mapping):
        return f"map of string to {_type(schema['additionalProperties'])}"
    return escape(" or ".join(kind) if isinstance(kind, list) else kind)


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table; the first cell of each row is plain text, the others are HTML."""
    lines = "".join(
        f"<tr><td><code>{escape(name)}</code></td>{''.join(f'<td>{cell}</td>' for cell in cells)}"
        "</tr>"
        for name, *cells in rows
    )
    return f"<table><tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>{lines}</table>"
