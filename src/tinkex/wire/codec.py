"""
JSON encoding and decoding, and decompression of request bodies.

Decoding accepts messages of older and newer clients: unknown top-level fields are ignored, and
fields that clients before 0.18 omit get defaults. It is strict where a field changes the meaning of
a request: an unknown setting in `sampling_params`, the optimizer parameters or `lora_config` is a
`UserFailure`.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Final, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import from_json, to_json

from tinkex.extras import needs
from tinkex.wire.base import Payload, StrictModel, json_kind, unknown_field
from tinkex.wire.checkpoints import LoadWeightsRequest
from tinkex.wire.errors import FieldError, TooLarge, UserFailure, WireError
from tinkex.wire.limits import (
    MAX_COMPRESSED_FRAMES,
    MAX_NAME_CHARS,
    check_fields,
    check_finite,
    check_json,
)
from tinkex.wire.sample_controls import StoredSampleRequest
from tinkex.wire.sampling import SampleRequest, SamplingParams
from tinkex.wire.sessions import CreateSessionRequest
from tinkex.wire.telemetry import TelemetrySendRequest
from tinkex.wire.training import (
    AdamOptimizerConfig,
    AdamParams,
    CreateModelRequest,
    DimuonOptimizerConfig,
    DimuonParams,
    ForwardBackwardInput,
    ForwardBackwardRequest,
    ForwardRequest,
    LoraConfig,
    OptimStepRequest,
)

__all__ = [
    "JSON_TYPE",
    "NOT_JSON",
    "PROTOBUF_TYPE",
    "decode_forward_json",
    "decode_json",
    "decompress",
    "encode_json",
    "parse_json",
]

JSON_TYPE: Final = "application/json"
PROTOBUF_TYPE: Final = "application/x-protobuf"
#: Error type of a body that is not valid JSON.
NOT_JSON: Final = "json_invalid"

T = TypeVar("T")

log = logging.getLogger(__name__)


# -- encoding ------------------------------------------------------------------------------------


def encode_json(message: Any) -> bytes:
    """
    Compact UTF-8 JSON. `ValueError` for NaN and infinity, which JSON does not have.

    Fields of wire types that are None are omitted. Plain dicts are encoded unchanged, because in
    a body such as `{"ttl_seconds": null}` the null has a meaning.
    """
    if isinstance(message, BaseModel):
        # In one step, unless it has what may stand for NaN or infinity: in a field, that is null.
        body = message.__pydantic_serializer__.to_json(message, exclude_none=True)
        if not (b"null" in body or b"N" in body or b"I" in body):
            return body
    body = to_json(_plain(message), inf_nan_mode="constants")
    if b"NaN" in body or b"Infinity" in body:
        # These letters may be part of a string: parse to find out.
        try:
            check_finite((), from_json(body))
        except WireError as error:
            raise ValueError(
                f"a {type(message).__name__} with NaN or infinity cannot be sent as JSON: {error}"
            ) from None
    return body


def encode_plain_json(value: Mapping[str, Any]) -> bytes:
    """`encode_json` of plain values with finite numbers only: nothing is checked, for streams."""
    return to_json(value)


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_none=True)
    if isinstance(value, Payload):
        return value.model_dump(exclude_none=True)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not (value and isinstance(value[0], (int, float))):
        return [_plain(item) for item in value]
    return value


# -- decoding ------------------------------------------------------------------------------------

#: Defaults of fields that the newest version requires and older clients omit.
_DEFAULTS: Final[Mapping[type, Mapping[str, Any]]] = {
    CreateSessionRequest: {"tags": [], "user_metadata": None},
    LoadWeightsRequest: {"optimizer": False},  # before 0.6.0: weights only
    TelemetrySendRequest: {"process_uuid": ""},  # before 0.24.0
}

#: Nested objects in which an unknown field is an error, by their key. Where an object has a `type`
#: tag, the tag selects the model; objects with other tags are passed on and rejected by the engine.
_STRICT_PARTS: Final[
    Mapping[type, Mapping[str, Mapping[str, type[StrictModel]] | type[StrictModel]]]
] = {
    CreateModelRequest: {
        "lora_config": LoraConfig,
        "optimizer_config": {"adamw": AdamOptimizerConfig, "dimuon": DimuonOptimizerConfig},
    },
    LoadWeightsRequest: {
        "optimizer_config": {"adamw": AdamOptimizerConfig, "dimuon": DimuonOptimizerConfig},
    },
    OptimStepRequest: {
        "adam_params": AdamParams,
        "optimizer_params": {"dimuon": DimuonParams},
    },
    SampleRequest: {"sampling_params": SamplingParams},
    StoredSampleRequest: {"sampling_params": SamplingParams},
}


def decode_json(type_: type[T], body: bytes) -> T:
    """
    `body` as a `type_`.

    `WireError` with the path of each missing or mistyped field; `UserFailure` for an unknown
    setting, with the message's other fields in its `request`.
    """
    value = parse_json(body)
    kind: Any = type_  # a class or a union of classes
    if isinstance(kind, type) and issubclass(kind, StrictModel):
        value = _normalized(kind, value)
    elif isinstance(kind, type) and issubclass(kind, BaseModel) and isinstance(value, dict):
        _log_ignored(kind.__name__, value, kind.model_fields)
    return _validate(kind, value)  # type: ignore[no-any-return]


def decode_forward_json(body: bytes) -> tuple[ForwardBackwardRequest, bool]:
    """A pass sent as JSON, and whether it is forward only: the key of its input says so."""
    value = parse_json(body)
    if not isinstance(value, dict):
        raise WireError.at((), f"expected an object, not {json_kind(value)}.", "dict_type")
    forward_only = "forward_input" in value and "forward_backward_input" not in value
    known = {"model_id", "seq_id", "type", "forward_input", "forward_backward_input"}
    _log_ignored("ForwardRequest" if forward_only else "ForwardBackwardRequest", value, known)
    if not forward_only:
        both = ForwardBackwardRequest.model_validate(value)
        _check_tensors("forward_backward_input", both.forward_backward_input)
        return both, False
    request = ForwardRequest.model_validate(value)
    _check_tensors("forward_input", request.forward_input)
    return ForwardBackwardRequest(request.forward_input, request.model_id, request.seq_id), True


def _check_tensors(key: str, work: ForwardBackwardInput) -> None:
    """
    `WireError` for a tensor value that is valid JSON but overflows float64 (such as 1e999).

    Not for protobuf, which can represent NaN and infinity: there the loss decides what they mean.
    """
    import numpy as np

    for position, datum in enumerate(work.data):
        for name, tensor in datum.loss_fn_inputs.items():
            if tensor.dtype == "float32" and not np.isfinite(values := tensor.values_np).all():
                at = int(np.flatnonzero(~np.isfinite(values))[0])
                loc = (key, "data", position, "loss_fn_inputs", name, "data", at)
                check_finite(loc, float(values[at]))


def parse_json(body: bytes) -> Any:
    """Parse JSON of a bounded size and depth; `WireError` for anything else."""
    check_json(body)
    try:
        return from_json(body, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise WireError.at((), f"invalid JSON: {error}.", NOT_JSON) from None


def _normalized(type_: type[StrictModel], value: Any) -> Any:
    """A message from any SDK version, converted to the form of the newest."""
    if not isinstance(value, dict):
        return value
    known = type_.wire_names()
    _log_ignored(type_.__name__, value, known)
    # Clients before 0.18 send null for fields that are not set.
    normalized = {key: item for key, item in value.items() if key in known and item is not None}
    for key, item in normalized.items():
        _check_size((key,), item)
    check_fields(type_.__name__, normalized)
    for key, default in _DEFAULTS.get(type_, {}).items():
        normalized.setdefault(key, default)
    for key, part_type in _STRICT_PARTS.get(type_, {}).items():
        part = normalized.get(key)
        if not isinstance(part, dict):
            continue
        if isinstance(part_type, Mapping):
            tag = part.get("type")
            found = part_type.get(tag) if isinstance(tag, str) else None
        else:
            found = part_type
        if found is not None:
            _refuse_null_numbers(found, part, key)
        part = {name: item for name, item in part.items() if item is not None}
        if part_type is LoraConfig:
            for name, item in part.items():
                _check_size((key, name), item)
        if found is not None:
            _refuse_unknown(found, part, key, normalized)
        normalized[key] = part
    return normalized


def _check_size(loc: tuple[str, ...], value: Any) -> None:
    """JSON allows integers of any size; the database and seeds are limited to 64 bits."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise WireError.at(loc, f"{value} does not fit in 64 bits.", "int_size")


def _refuse_null_numbers(part_type: type[StrictModel], part: Mapping[str, Any], key: str) -> None:
    """
    Reject null where the protocol requires a number, instead of treating it as absent.

    Official clients never send None there, but they write NaN and infinity as null. Using the
    default would hide that the user computed an invalid number.
    """
    for name, item in part.items():
        if item is None and name in _numbers(part_type):
            raise WireError.at(
                (key, name),
                "null is not a number. Clients send null for NaN and infinity. Send a finite "
                "number, or omit the field to use its default.",
                "null_number",
            )


@cache
def _numbers(part_type: type[StrictModel]) -> frozenset[str]:
    fields = part_type.model_fields.items()
    return frozenset(name for name, field in fields if field.annotation in (float, int))


def _refuse_unknown(
    part_type: type[StrictModel], part: Mapping[str, Any], key: str, message: Mapping[str, Any]
) -> None:
    known = part_type.wire_names()
    for name in part:
        if name not in known:
            text = unknown_field(name, known)
            valid = {field: item for field, item in message.items() if isinstance(item, (str, int))}
            raise UserFailure(f"{key}: {text} Nothing was done.", request=valid)


def _validate(kind: Any, value: Any) -> Any:
    try:
        if isinstance(kind, type) and issubclass(kind, StrictModel):
            # Strict: strings are not converted to numbers, nor numbers to strings.
            return kind.model_validate(value, strict=True)
        if isinstance(kind, type) and issubclass(kind, (BaseModel, Payload)):
            return kind.model_validate(value)
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        raise WireError(_field_errors(error)) from None


#: Type names that pydantic adds to the path for each member of a union. They mean nothing to the
#: sender and are removed. Errors of the catch-all member are shown only if there are no others.
_UNION_MEMBERS: Final = frozenset({"AdamParams", "AdamOptimizerConfig"})
_CATCH_ALLS: Final = frozenset({"OptimParamsBase", "OptimizerConfigBase"})


def _field_errors(error: ValidationError) -> Iterable[FieldError]:
    items = error.errors(include_url=False, include_input=False)
    if unions := list(_union_errors(items)):
        items = [item for item in items if not _STOP.issubset(item["loc"])]
        yield from unions
    helpful = [item for item in items if not _CATCH_ALLS.intersection(item["loc"])]
    for item in helpful or items:
        item["loc"] = tuple(
            part for part in item["loc"] if part not in _UNION_MEMBERS | _CATCH_ALLS
        )
        inner = item.get("ctx", {}).get("error")
        if isinstance(inner, WireError):
            yield from inner.under(*item["loc"]).errors
        else:
            loc = tuple(item["loc"])
            if item["type"] == "missing" and loc == ("optim_params",):
                loc = ("adam_params",)  # the name on the wire
            yield FieldError(loc, item["msg"], item["type"])


#: A union with so many members that one summary replaces their separate errors.
_STOP: Final = frozenset({"sampling_params", "stop"})


def _union_errors(items: Sequence[Any]) -> Iterable[FieldError]:
    if any(_STOP.issubset(item["loc"]) for item in items):
        yield FieldError(
            ("sampling_params", "stop"),
            "expected a string, a list of strings or a list of token ids.",
            "stop_type",
        )


_logged: set[tuple[str, str]] = set()


def _log_ignored(message: str, value: Mapping[str, Any], known: Iterable[str]) -> None:
    """Log each ignored field once. The set is bounded because senders choose the names."""
    for key in value.keys() - set(known):
        key = key[:MAX_NAME_CHARS]
        if (message, key) not in _logged and len(_logged) < 1000:
            _logged.add((message, key))
            log.debug("ignored field", extra={"message_type": message, "field": key})


# -- compression ---------------------------------------------------------------------------------


def decompress(body: bytes, content_encoding: str | None, *, max_bytes: int) -> bytes:
    """Undo `Content-Encoding`; `TooLarge` as soon as the output exceeds `max_bytes`."""
    encoding = (content_encoding or "identity").strip().lower()
    if encoding == "identity":
        unpacked = body
    elif encoding == "zstd":
        unpacked = _unzstd(body, max_bytes)
    elif encoding == "gzip":
        unpacked = _gunzip(body, max_bytes)
    else:
        raise WireError.at((), f"Content-Encoding must be zstd or gzip, not {content_encoding!r}.")
    if len(unpacked) > max_bytes:
        raise TooLarge(f"the body is larger than the limit of {max_bytes} bytes.")
    return unpacked


#: Input bytes per decompression call. A block of 4 bytes may expand to 128 KiB, so one call yields
#: at most 32 MiB before the limit is checked again.
_ZSTD_SLICE: Final = 1024


def _unzstd(body: bytes, max_bytes: int) -> bytes:
    with needs("A body compressed with zstd"):
        import zstandard

    parts: list[bytes] = []
    size = at = frames = 0
    unpacker = zstandard.ZstdDecompressor(max_window_size=2**27).decompressobj()
    try:
        while at < len(body):
            taken = body[at : at + _ZSTD_SLICE]
            part = unpacker.decompress(taken)
            at += len(taken)
            parts.append(part)
            size += len(part)
            if size > max_bytes:
                break
            if unpacker.eof:
                at -= len(unpacker.unused_data)
                frames += 1
                if at < len(body):
                    _check_frame_count(frames)
                    unpacker = zstandard.ZstdDecompressor(max_window_size=2**27).decompressobj()
    except zstandard.ZstdError as error:
        raise WireError.at((), f"invalid zstd: {error}.") from None
    if size <= max_bytes and not unpacker.eof:
        raise WireError.at((), "the zstd body is truncated.")
    return b"".join(parts)


def _gunzip(body: bytes, max_bytes: int) -> bytes:
    unpacked = bytearray()
    rest = body
    frames = 0
    while rest:
        _check_frame_count(frames)
        frames += 1
        unpacker = zlib.decompressobj(wbits=31)
        try:
            unpacked += unpacker.decompress(rest, max_bytes + 1 - len(unpacked))
        except zlib.error as error:
            raise WireError.at((), f"invalid gzip: {error}.") from None
        if len(unpacked) > max_bytes:
            break
        if not unpacker.eof:
            raise WireError.at((), "the gzip body is truncated.")
        rest = unpacker.unused_data
    return bytes(unpacked)


def _check_frame_count(frames: int) -> None:
    """Decompressing thousands of tiny frames would take minutes."""
    if frames >= MAX_COMPRESSED_FRAMES:
        raise TooLarge(
            f"the body has more than {MAX_COMPRESSED_FRAMES} compressed frames, the limit. "
            "Compress it as one."
        )
