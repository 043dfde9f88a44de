"""
JSON in and out, and unpacking of compressed bodies.

Reading is forgiving about what is merely new or old: fields this version does not know are ignored
at the level of the message, and what clients before 0.18 leave out is filled in. It is strict where
a field changes what was asked for: an unknown setting inside `sampling_params`, the optimizer's
parameters or `lora_config` is a `UserFailure`, never dropped.
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
#: The type of the error for a body that is not JSON at all.
NOT_JSON: Final = "json_invalid"

T = TypeVar("T")

log = logging.getLogger(__name__)


# -- out -----------------------------------------------------------------------------------------


def encode_json(message: Any) -> bytes:
    """
    Compact UTF-8. `ValueError` for a NaN or an infinity: JSON has neither.

    Fields of wire types that are None are left out. A plain dict is sent as it stands, because in
    a body such as `{"ttl_seconds": null}` the null is the message.
    """
    body = to_json(_plain(message), inf_nan_mode="constants")
    if b"NaN" in body or b"Infinity" in body:
        # Perhaps only inside a text; the strict parser knows.
        try:
            check_finite((), from_json(body))
        except WireError as error:
            raise ValueError(
                f"a {type(message).__name__} that holds NaN or an infinity cannot be sent as JSON: "
                f"{error}"
            ) from None
    return body


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


# -- in ------------------------------------------------------------------------------------------

#: Required in the newest version, absent from bodies of older ones.
_FILLED_IN: Final[Mapping[type, Mapping[str, Any]]] = {
    CreateSessionRequest: {"tags": [], "user_metadata": None},
    LoadWeightsRequest: {"optimizer": False},  # before 0.6.0: weights only
    TelemetrySendRequest: {"process_uuid": ""},  # before 0.24.0
}

#: Parts whose fields change what is asked for, by the key that holds them. Where a part is tagged,
#: the tag decides; a tag that is not here is passed on for the engine to refuse.
_PARTS: Final[Mapping[type, Mapping[str, Mapping[str, type[StrictModel]] | type[StrictModel]]]] = {
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
}


def decode_json(type_: type[T], body: bytes) -> T:
    """
    `body` as a `type_`.

    `WireError` with the path of each field that is missing or mistyped; `UserFailure` for a setting
    this version does not know, with the message's other fields in its `request`.
    """
    value = parse_json(body)
    kind: Any = type_  # a class, or a union of some
    if isinstance(kind, type) and issubclass(kind, StrictModel):
        value = _ready(kind, value)
    elif isinstance(kind, type) and issubclass(kind, BaseModel) and isinstance(value, dict):
        _note_ignored(kind.__name__, value, kind.model_fields)
    return _validate(kind, value)  # type: ignore[no-any-return]


def decode_forward_json(body: bytes) -> tuple[ForwardBackwardRequest, bool]:
    """A pass sent as JSON, and whether it is forward only: that shows in the key of its input."""
    value = parse_json(body)
    if not isinstance(value, dict):
        raise WireError.at((), f"an object is needed, not {json_kind(value)}.", "dict_type")
    forward_only = "forward_input" in value and "forward_backward_input" not in value
    known = {"model_id", "seq_id", "type", "forward_input", "forward_backward_input"}
    _note_ignored("ForwardRequest" if forward_only else "ForwardBackwardRequest", value, known)
    if not forward_only:
        both = ForwardBackwardRequest.model_validate(value)
        _check_tensors("forward_backward_input", both.forward_backward_input)
        return both, False
    request = ForwardRequest.model_validate(value)
    _check_tensors("forward_input", request.forward_input)
    return ForwardBackwardRequest(request.forward_input, request.model_id, request.seq_id), True


def _check_tensors(key: str, work: ForwardBackwardInput) -> None:
    """
    `WireError` for a number in a tensor that JSON could write and float64 cannot hold.

    Only JSON: protobuf has NaN and infinities, and what they mean there is for the loss to say.
    """
    import numpy as np

    for position, datum in enumerate(work.data):
        for name, tensor in datum.loss_fn_inputs.items():
            if tensor.dtype == "float32" and not np.isfinite(values := tensor.values_np).all():
                at = int(np.flatnonzero(~np.isfinite(values))[0])
                loc = (key, "data", position, "loss_fn_inputs", name, "data", at)
                check_finite(loc, float(values[at]))


def parse_json(body: bytes) -> Any:
    """Any JSON of a bounded size and depth; `WireError` for anything else."""
    check_json(body)
    try:
        return from_json(body, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise WireError.at((), f"this is not JSON: {error}.", NOT_JSON) from None


def _ready(type_: type[StrictModel], value: Any) -> Any:
    """A message of any version, made to fit the newest: the part of reading that forgives."""
    if not isinstance(value, dict):
        return value
    known = type_.wire_names()
    _note_ignored(type_.__name__, value, known)
    # Before 0.18 what was set to None was sent; it means the same as absent.
    ready = {key: item for key, item in value.items() if key in known and item is not None}
    for key, item in ready.items():
        _check_size((key,), item)
    check_fields(type_.__name__, ready)
    for key, default in _FILLED_IN.get(type_, {}).items():
        ready.setdefault(key, default)
    for key, part_type in _PARTS.get(type_, {}).items():
        part = ready.get(key)
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
            _refuse_unknown(found, part, key, ready)
        ready[key] = part
    return ready


def _check_size(loc: tuple[str, ...], value: Any) -> None:
    """Whole numbers beyond 64 bits are JSON, and fit neither the store nor a seed."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise WireError.at(loc, f"{value} does not fit 64 bits.", "int_size")


def _refuse_null_numbers(part_type: type[StrictModel], part: Mapping[str, Any], key: str) -> None:
    """
    A null where the protocol has a number and no null is refused, not read as absent.

    No client lets its user write None there. The official ones write null for a NaN or an
    infinity, so the default would stand in for a number that somebody computed wrong.
    """
    for name, item in part.items():
        if item is None and name in _numbers(part_type):
            raise WireError.at(
                (key, name),
                "null is not a number. Clients send null for NaN and for infinities: send a finite "
                "number, or leave the field out for its default.",
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
            sound = {field: item for field, item in message.items() if isinstance(item, (str, int))}
            raise UserFailure(f"{key}: {text} Nothing was done.", request=sound)


def _validate(kind: Any, value: Any) -> Any:
    try:
        if isinstance(kind, type) and issubclass(kind, StrictModel):
            # A number is no text and a text is no number: requests say what they mean.
            return kind.model_validate(value, strict=True)
        if isinstance(kind, type) and issubclass(kind, (BaseModel, Payload)):
            return kind.model_validate(value)
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        raise WireError(_field_errors(error)) from None


#: Names pydantic puts into a path for the choices of a union. The sender does not know them, and
#: of what is wrong with the known choice and with the one for unknown families only the first helps.
_CHOICES: Final = frozenset({"AdamParams", "AdamOptimizerConfig"})
_CATCH_ALLS: Final = frozenset({"OptimParamsBase", "OptimizerConfigBase"})


def _field_errors(error: ValidationError) -> Iterable[FieldError]:
    items = error.errors(include_url=False, include_input=False)
    if unions := list(_union_errors(items)):
        items = [item for item in items if not _STOP.issubset(item["loc"])]
        yield from unions
    helpful = [item for item in items if not _CATCH_ALLS.intersection(item["loc"])]
    for item in helpful or items:
        item["loc"] = tuple(part for part in item["loc"] if part not in _CHOICES | _CATCH_ALLS)
        inner = item.get("ctx", {}).get("error")
        if isinstance(inner, WireError):
            yield from inner.under(*item["loc"]).errors
        else:
            loc = tuple(item["loc"])
            if item["type"] == "missing" and loc == ("optim_params",):
                loc = ("adam_params",)  # its name on the wire
            yield FieldError(loc, item["msg"], item["type"])


#: A field with many shapes: what is wrong with each of them helps nobody.
_STOP: Final = frozenset({"sampling_params", "stop"})


def _union_errors(items: Sequence[Any]) -> Iterable[FieldError]:
    if any(_STOP.issubset(item["loc"]) for item in items):
        yield FieldError(
            ("sampling_params", "stop"),
            "a text, a list of texts or a list of token ids is needed.",
            "stop_type",
        )


_noted: set[tuple[str, str]] = set()


def _note_ignored(message: str, value: Mapping[str, Any], known: Iterable[str]) -> None:
    """Say once what is ignored. The set is bounded: the names are the sender's."""
    for key in value.keys() - set(known):
        key = key[:MAX_NAME_CHARS]
        if (message, key) not in _noted and len(_noted) < 1000:
            _noted.add((message, key))
            log.debug("ignored field", extra={"message_type": message, "field": key})


# -- compression ---------------------------------------------------------------------------------


def decompress(body: bytes, content_encoding: str | None, *, max_bytes: int) -> bytes:
    """The body as it was before `Content-Encoding`; `TooLarge` before more than that is unpacked."""
    encoding = (content_encoding or "identity").strip().lower()
    if encoding == "identity":
        unpacked = body
    elif encoding == "zstd":
        unpacked = _unzstd(body, max_bytes)
    elif encoding == "gzip":
        unpacked = _gunzip(body, max_bytes)
    else:
        raise WireError.at((), f"Content-Encoding is zstd or gzip, not {content_encoding!r}.")
    if len(unpacked) > max_bytes:
        raise TooLarge(f"the body is larger than the {max_bytes} bytes that are allowed.")
    return unpacked


#: Bytes handed to the unpacker at once. A block of 4 bytes may unpack to 128 KiB, so this much
#: input makes at most 32 MiB before the limit is looked at again.
_ZSTD_SLICE: Final = 1024


def _unzstd(body: bytes, max_bytes: int) -> bytes:
    with needs("A body compressed with zstd"):
        import zstandard

    parts: list[bytes] = []
    size = at = members = 0
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
                members += 1
                if at < len(body):
                    _check_members(members)
                    unpacker = zstandard.ZstdDecompressor(max_window_size=2**27).decompressobj()
    except zstandard.ZstdError as error:
        raise WireError.at((), f"this is not zstd: {error}.") from None
    if size <= max_bytes and not unpacker.eof:
        raise WireError.at((), "this zstd body is cut off.")
    return b"".join(parts)


def _gunzip(body: bytes, max_bytes: int) -> bytes:
    unpacked = bytearray()
    rest = body
    members = 0
    while rest:
        _check_members(members)
        members += 1
        unpacker = zlib.decompressobj(wbits=31)
        try:
            unpacked += unpacker.decompress(rest, max_bytes + 1 - len(unpacked))
        except zlib.error as error:
            raise WireError.at((), f"this is not gzip: {error}.") from None
        if len(unpacked) > max_bytes:
            break
        if not unpacker.eof:
            raise WireError.at((), "this gzip body is cut off.")
        rest = unpacker.unused_data
    return bytes(unpacked)


def _check_members(members: int) -> None:
    """Thousands of tiny ones would take a server minutes."""
    if members >= MAX_COMPRESSED_FRAMES:
        raise TooLarge(
            f"the body is packed in more than {MAX_COMPRESSED_FRAMES} parts, which is the most that is "
            "allowed. Compress it in one."
        )
