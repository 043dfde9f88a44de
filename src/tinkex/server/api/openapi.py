"""
The OpenAPI description.

FastAPI makes it from the signatures of the routes. Added here: titles, schemas of the answers and of
the types that are not pydantic models, and the refusals that all routes share.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from tinkex.wire import (
    billing,
    checkpoints,
    client_config,
    futures,
    sampling,
    sessions,
    telemetry,
)
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
    "503": "The disk or the database cannot store anything now; retry later",
}


#: Titles of routes whose function name is not one.
TITLES: Mapping[str, str] = {
    "asample": "Sample",
    "audit": "Read the audit log",
    "cancel_future": "Cancel a sample",
    "chat_completions": "Chat completion",
    "client_config": "Client configuration",
    "client_dynamic_config": "Client configuration that may change",
    "completions": "Completion",
    "current_storage": "Current storage of checkpoints",
    "download": "Download a file or an archive",
    "exchange": "Exchange a key for a token",
    "forward": "Forward pass",
    "forward_backward": "Forward and backward pass",
    "external_weights_urls": "Links to the files of an external checkpoint",
    "get_archive": "Link to the archive of a checkpoint",
    "get_info": "Describe a model",
    "get_model": "Describe a base model or checkpoint",
    "get_sampler": "Describe a sampler",
    "get_server_capabilities": "Server capabilities",
    "get_training_run_metrics": "Metrics of the steps of a run",
    "healthz": "Health check",
    "key_info": "Describe the key of this request",
    "list_models": "List base models and checkpoints",
    "list_run_checkpoints": "List the checkpoints of a run",
    "login_config": "Configuration of browser logins",
    "optim_step": "Optimizer step",
    "publish": "Publish a checkpoint",
    "retrieve_future": "Wait for a result",
    "retrieve_futures": "Wait for results of samples",
    "revoke_key": "Revoke the key of this request",
    "save_weights_external": "Save weights for use outside of this server",
    "save_weights_for_sampler": "Save weights for sampling",
    "session_heartbeat": "Keep a session alive",
    "set_project": "Set the project of a session",
    "set_ttl": "Set the expiry of a checkpoint",
    "status": "Status for local administration",
    "stream_sample": "Sample, and stream the tokens",
    "telemetry": "Send telemetry",
    "trace": "Read the trace of a session",
    "trace_export": "Link to the trace of a session",
    "unpublish": "Unpublish a checkpoint",
    "usage_by_key": "Usage by key",
    "usage_events": "Usage by hour",
    "weights_info": "Describe a checkpoint",
}

#: The type of the answer, by the name of the route's function.
ANSWERS: Mapping[str, type[BaseModel]] = {
    **dict.fromkeys(
        (
            "asample",
            "create_custom_loss",
            "create_model",
            "forward",
            "forward_backward",
            "load_weights",
            "optim_step",
            "save_weights",
            "save_weights_external",
            "save_weights_for_sampler",
            "unload_model",
        ),
        futures.UntypedAPIFuture,
    ),
    "audit": billing.AuditLogResponse,
    "client_config": client_config.ClientConfigResponse,
    "client_dynamic_config": client_config.ClientDynamicConfigResponse,
    "copy_weights": checkpoints.CopyWeightsResponse,
    "create_sampling_session": sampling.CreateSamplingSessionResponse,
    "create_session": sessions.CreateSessionResponse,
    "current_storage": billing.CurrentCheckpointStorageUsageResponse,
    "exchange": client_config.AuthTokenResponse,
    "external_weights_urls": checkpoints.ExternalWeightsUrlsResponse,
    "get_info": sessions.GetInfoResponse,
    "get_sampler": sampling.GetSamplerResponse,
    "get_server_capabilities": sessions.GetServerCapabilitiesResponse,
    "get_session": sessions.GetSessionResponse,
    "get_training_run": sessions.TrainingRun,
    "get_training_run_metrics": sessions.TrainingRunMetricsResponse,
    "healthz": client_config.HealthResponse,
    "join_sampling_session": sampling.JoinSamplingSessionResponse,
    "list_checkpoints": checkpoints.CheckpointsListResponse,
    "list_run_checkpoints": checkpoints.CheckpointsListResponse,
    "list_sessions": sessions.ListSessionsResponse,
    "list_training_runs": sessions.TrainingRunsResponse,
    "retrieve_futures": futures.FuturesRetrieveResponse,
    "search_sessions": sessions.SessionSearchResponse,
    "session_heartbeat": sessions.SessionHeartbeatResponse,
    "telemetry": telemetry.TelemetryResponse,
    "trace_export": sessions.TraceExportResponse,
    "usage_by_key": billing.UsageByKeyResponse,
    "usage_events": billing.BillingUsageResponse,
    "weights_info": checkpoints.WeightsInfoResponse,
}


def title(name: str) -> str:
    """The title of a route by the name of its function."""
    return TITLES.get(name) or name.replace("_", " ").capitalize()


def describe(app: FastAPI) -> None:
    """Make `app.openapi()` include what FastAPI does not see."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = generate()
            for route in app.routes:
                if isinstance(route, APIRoute) and route.include_in_schema:
                    for method in route.methods or ():
                        operation = schema["paths"][route.path_format][method.lower()]
                        _name(operation, route.endpoint.__name__)
            complete(schema)
        return app.openapi_schema or {}

    app.openapi = openapi  # type: ignore[method-assign]


def _name(operation: Schema, name: str) -> None:
    """Set the title of an operation and the type of its answer."""
    operation["summary"] = title(name)
    for response in operation["responses"].values():
        # FastAPI calls every answer JSON of any type; some are files, and some are empty.
        if response.get("content") == {JSON_TYPE: {"schema": {}}}:
            del response["content"]
    if name in ANSWERS:
        answer = {JSON_TYPE: {"schema": ref(ANSWERS[name].__name__)}}
        operation["responses"]["200"] = {"description": "Success", "content": answer}


def _answer_schemas() -> dict[str, Any]:
    """The schemas of all answers, and of the types in them."""
    modes: list[tuple[type[BaseModel], JsonSchemaMode]] = [
        (one, "serialization") for one in {one.__name__: one for one in ANSWERS.values()}.values()
    ]
    _, found = models_json_schema(modes, ref_template="#/components/schemas/{model}")
    schemas: dict[str, Any] = found["$defs"]
    return schemas


def complete(schema: Schema) -> None:
    """Add the schemas of answers and payloads, and the refusals."""
    schema["components"]["schemas"] = {**_answer_schemas(), **schema["components"]["schemas"]}
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
