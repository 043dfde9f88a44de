"""
The OpenAPI description.

FastAPI makes it from the signatures of the routes. Added here: schemas of the types that are not
pydantic models, and the refusals that all routes share.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI

from tinkex.wire.codec import JSON_TYPE

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

REFUSALS: Mapping[str, str] = {
    "400": "Refused",
    "401": "Unknown key",
    "404": "Not found, or another owner's",
    "410": "The session is finished, or the result has expired",
    "413": "Too large",
    "422": "Malformed",
    "429": "Over a limit; retry later",
}


def describe(app: FastAPI) -> None:
    """Make `app.openapi()` include what FastAPI does not see."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            complete(generate())
        return app.openapi_schema or {}

    app.openapi = openapi  # type: ignore[method-assign]


def complete(schema: Schema) -> None:
    """Add the schemas of payloads, and the refusals."""
    content = {JSON_TYPE: {"schema": ref("ErrorDetail")}}
    refusals = {
        status: {"description": text, "content": content} for status, text in REFUSALS.items()
    }
    schema["paths"] = _with_payloads(schema["paths"])
    for path in schema["paths"].values():
        for operation in path.values():
            operation["responses"].update(refusals)
    described = _with_payloads(schema["components"]["schemas"])
    # FastAPI's own format of a 422, which this server does not use.
    unused = {"HTTPValidationError", "ValidationError"}
    schema["components"]["schemas"] = {
        **{name: one for name, one in described.items() if name not in unused},
        **PAYLOADS,
    }


def _with_payloads(schema: Any) -> Any:
    """The schema with references in place of the untyped objects that stand for payloads."""
    if isinstance(schema, list):
        return [_with_payloads(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("title") in PAYLOADS and schema.get("type") == "object":
        return ref(schema["title"])
    return {key: _with_payloads(value) for key, value in schema.items()}
