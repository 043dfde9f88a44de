"""The chunks of a prompt: text tokens, images, audio."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, Self, TypeAlias

from pydantic import (
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    field_serializer,
    field_validator,
)
from pydantic.fields import FieldInfo

from tinkex.wire.base import ModelPayload, StrictModel, json_kind
from tinkex.wire.errors import FieldError, WireError
from tinkex.wire.varint import read_varint

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = [
    "Chunk",
    "DmelChunk",
    "EncodedTextChunk",
    "ImageAssetPointerChunk",
    "ImageChunk",
    "ModelInputChunk",
    "chunk_from",
]

ImageFormat = Literal["png", "jpeg"]


@dataclass(frozen=True, slots=True, init=False, eq=False, repr=False)
class EncodedTextChunk(ModelPayload):
    """Text, as token ids."""

    #: Token ids as a list, made on first access; the stored form is `tokens_np`.
    tokens: list[int]
    type: Literal["encoded_text"] = "encoded_text"

    _ids: npt.NDArray[np.int32] = field(default=None, repr=False)  # type: ignore[arg-type]

    # For programs that inspect a model's fields.
    model_config: ClassVar[dict[str, Any]] = {"extra": "forbid", "frozen": True}
    model_fields: ClassVar[dict[str, FieldInfo]] = {
        "tokens": FieldInfo(annotation=Sequence[int]),
        "type": FieldInfo(annotation=Literal["encoded_text"], default="encoded_text"),
    }

    def __init__(
        self,
        tokens: Sequence[int] | npt.NDArray[Any],
        type: Literal["encoded_text"] = "encoded_text",
    ) -> None:
        if type != "encoded_text":
            raise ValueError(
                f"the type of an EncodedTextChunk must be 'encoded_text', not {type!r}."
            )
        object.__setattr__(self, "type", type)
        ids = _token_ids(tokens)
        ids.flags.writeable = False
        object.__setattr__(self, "_ids", ids)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name != "tokens":
                raise AttributeError(f"EncodedTextChunk has no attribute {name!r}")
            tokens = self._ids.tolist()
            object.__setattr__(self, "tokens", tokens)
            return tokens

    @classmethod
    def _of(cls, ids: npt.NDArray[np.int32]) -> Self:
        """From an int32 array that the caller no longer writes to; not copied."""
        self = cls.__new__(cls)
        ids.flags.writeable = False
        object.__setattr__(self, "type", "encoded_text")
        object.__setattr__(self, "_ids", ids)
        return self

    @classmethod
    def _read(cls, value: Mapping[str, Any]) -> Self:
        tokens = value.get("tokens")
        if not isinstance(tokens, list):
            raise WireError.at(
                ("tokens",), f"expected a list of token ids, not {json_kind(tokens)}."
            )
        if bool in set(map(type, tokens)):  # NumPy would convert them to 1 and 0
            raise WireError.at(("tokens",), "true and false are not token ids.")
        try:
            return cls._of(_token_ids(tokens))
        except ValueError as error:
            raise WireError.at(("tokens",), str(error)) from None

    @property
    def tokens_np(self) -> npt.NDArray[np.int32]:
        """Token ids, read-only."""
        return self._ids

    @property
    def length(self) -> int:
        return int(self._ids.size)

    def __repr__(self) -> str:
        some = ", ".join(map(str, self._ids[:16].tolist()))
        dots = f", ... {self.length} in all" if self.length > 16 else ""
        return f"EncodedTextChunk(tokens=[{some}{dots}], type='encoded_text')"

    def _dump(self) -> dict[str, Any]:
        return {"tokens": self._ids.tolist(), "type": "encoded_text"}

    def _constructor_arguments(self) -> dict[str, Any]:
        return {"tokens": self._ids}

    def _key(self) -> Any:
        return self._ids.tobytes()


def _token_ids(tokens: Any) -> npt.NDArray[np.int32]:
    """A new int32 array of token ids."""
    import numpy as np

    if type(tokens).__module__.partition(".")[0] == "torch":
        tokens = tokens.detach().cpu().numpy()
    try:
        ids = np.asarray(tokens)
    except ValueError:
        raise ValueError("tokens must be a flat list of integers.") from None
    if ids.size == 0:
        return np.zeros(0, dtype=np.int32)
    if ids.dtype == object:  # integers too large for any NumPy type
        for one in ids.flat:
            if isinstance(one, int) and not -(2**31) <= one < 2**31:
                raise ValueError(f"token {one} does not fit in 32 bits.")
    if ids.ndim != 1 or ids.dtype.kind not in "iuf":
        if isinstance(tokens, Mapping) and "input_ids" in tokens:
            raise ValueError(
                "tokens must be a flat list of integers; this is the mapping that a tokenizer "
                "returns. Use its ['input_ids'], or call apply_chat_template(return_dict=False)."
            )
        raise ValueError(
            f"tokens must be a flat list of integers, not {ids.dtype} of shape {ids.shape}."
        )
    low, high = ids.min(), ids.max()
    if not (low >= -(2**31) and high < 2**31):
        bad = low if not low >= -(2**31) else high
        raise ValueError(f"token {bad} does not fit in 32 bits.")
    if ids.dtype.kind == "f" and (ids != np.trunc(ids)).any():
        raise ValueError(f"tokens must be integers; found {ids[ids != np.trunc(ids)][0]}.")
    return np.array(ids, dtype=np.int32)


def _from_base64(value: Any, what: str) -> Any:
    """Decode a base64 string; other values are returned unchanged."""
    if isinstance(value, str):
        try:
            return base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError):
            raise ValueError(f"{what} given as a string must be base64.") from None
    return value


class ImageChunk(StrictModel):
    """An image, sent with the request. Bytes in Python, base64 in JSON."""

    #: The bytes of the file; a base64 string is accepted too.
    data: bytes
    format: ImageFormat
    #: Number of tokens that the sender expects. Only a check: the server computes its own.
    expected_tokens: int | None = Field(default=None)
    type: Literal["image"] = "image"

    @field_validator("data", mode="before")
    @classmethod
    def validate_data(cls, value: bytes | str) -> bytes:
        return _from_base64(value, "image data")  # type: ignore[no-any-return]

    @field_serializer("data")
    def serialize_data(self, value: bytes) -> str:
        return base64.b64encode(value).decode("ascii")

    @property
    def length(self) -> int:
        return _expected(self.expected_tokens, "image")


class ImageAssetPointerChunk(StrictModel):
    """An image that the service already has, by its location. Only in JSON."""

    format: ImageFormat
    #: Where the service finds the image.
    location: str
    #: As for `ImageChunk`.
    expected_tokens: int | None = Field(default=None)
    type: Literal["image_asset_pointer"] = "image_asset_pointer"

    @property
    def length(self) -> int:
        return _expected(self.expected_tokens, "image")


def _expected(tokens: int | None, what: str) -> int:
    if tokens is None:
        raise ValueError(f"the length of this {what} chunk is not known; set `expected_tokens`.")
    return tokens


class DmelChunk(StrictModel):
    """Audio, as a container of mel features. Bytes in Python, base64 in JSON."""

    dmel: bytes
    type: Literal["dmel"] = "dmel"

    @field_validator("dmel", mode="before")
    @classmethod
    def validate_dmel(cls, value: bytes | str) -> bytes:
        return _from_base64(value, "dmel")  # type: ignore[no-any-return]

    @field_serializer("dmel")
    def serialize_dmel(self, value: bytes) -> str:
        return base64.b64encode(value).decode("ascii")

    @property
    def length(self) -> int:
        """Number of tokens: the first dimension in the header of the container."""
        return _container_length(self.dmel)


def _container_length(container: bytes) -> int:
    """
    Dimension 0 of a tensor container.

    Header: optionally the byte 254 (a constant tensor), a byte for the dtype (0 to 7), then
    varints: the number of dimensions, and the size of each.
    """
    at = 1 if container[:1] == b"\xfe" else 0
    if len(container) <= at or container[at] > 7:
        raise ValueError("dmel: the header of the container has no known dtype.")
    truncated = ValueError("dmel: the header of the container is truncated.")
    dimensions, at = read_varint(container, at + 1)
    if at < 0:
        raise truncated
    if dimensions == 0:
        raise ValueError("dmel: the tensor in the container has no dimensions.")
    length, at = read_varint(container, at)
    if at < 0:
        raise truncated
    return length


_CHUNKS: Final[dict[str, Any]] = {
    "encoded_text": EncodedTextChunk,
    "image": ImageChunk,
    "image_asset_pointer": ImageAssetPointerChunk,
    "dmel": DmelChunk,
}


def chunk_from(value: Any) -> Chunk:
    """A chunk from JSON data. Clients before 0.18 omit `type`; it is inferred from the keys."""
    if isinstance(value, (EncodedTextChunk, ImageAssetPointerChunk, ImageChunk, DmelChunk)):
        return value
    if not isinstance(value, Mapping):
        raise WireError.at((), f"expected a chunk object, not {json_kind(value)}.", "dict_type")
    name = value.get("type") or _inferred_type(value)
    chunk_type = _CHUNKS.get(name) if isinstance(name, str) else None
    if chunk_type is None:
        raise WireError.at(
            ("type",),
            f"the type of a chunk must be one of {', '.join(_CHUNKS)}, not {name!r}.",
            "union_tag_invalid",
        )
    if chunk_type is EncodedTextChunk:
        return EncodedTextChunk._read(value)
    fields = {key: item for key, item in value.items() if key in chunk_type.model_fields}
    if "expected_tokens" in chunk_type.model_fields and isinstance(value.get("tokens"), int):
        fields.setdefault("expected_tokens", value["tokens"])  # 0.4.1 to 0.5.1
    expected = fields.get("expected_tokens")
    if isinstance(expected, int) and not 0 <= expected < 2**31:
        raise WireError.at(
            ("expected_tokens",), f"{expected} is not an integer from 0 to 2**31 - 1."
        )
    try:
        return chunk_type.model_validate(fields)  # type: ignore[no-any-return]
    except ValidationError as error:
        raise WireError(
            [FieldError(tuple(e["loc"]), e["msg"], e["type"]) for e in error.errors()]
        ) from None


def _inferred_type(value: Mapping[str, Any]) -> str | None:
    # In this order: images of the oldest clients have `tokens` too, as a number.
    if "location" in value:
        return "image_asset_pointer"
    if "data" in value:
        return "image"
    if "dmel" in value:
        return "dmel"
    return "encoded_text" if isinstance(value.get("tokens"), list) else None


Chunk: TypeAlias = EncodedTextChunk | ImageAssetPointerChunk | ImageChunk | DmelChunk
ModelInputChunk: TypeAlias = Annotated[
    Chunk,
    PlainValidator(chunk_from),
    PlainSerializer(lambda chunk, info: chunk.model_dump(exclude_none=info.exclude_none)),
]
