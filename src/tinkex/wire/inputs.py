"""
What a model reads: prompts made of chunks, and training examples made of a prompt and tensors.

Knows nothing of tokenizers: a token is a number.
"""

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

from tinkex.wire.base import Payload, StrictModel, _kind
from tinkex.wire.errors import FieldError, WireError
from tinkex.wire.tensors import TensorData, TensorDtype, compact_from_torch, tensor_from

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = [
    "Datum",
    "DmelChunk",
    "EncodedTextChunk",
    "ImageAssetPointerChunk",
    "ImageChunk",
    "LossFnInputs",
    "ModelInput",
    "ModelInputChunk",
    "PromptProvenanceSpan",
    "ProvenanceSpans",
    "SampledProvenanceSpan",
    "chunk_from",
]

ImageFormat = Literal["png", "jpeg"]


# -- chunks --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, init=False, eq=False, repr=False)
class EncodedTextChunk(Payload):
    """A run of tokens."""

    #: Token ids. A list made when first asked for; `tokens_np` is what is stored.
    tokens: list[int]
    type: Literal["encoded_text"] = "encoded_text"

    _ids: npt.NDArray[np.int32] = field(default=None, repr=False)  # type: ignore[arg-type]

    # Programs that look at a model's fields find them here too.
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
            raise ValueError(f"the type of an EncodedTextChunk is 'encoded_text', not {type!r}.")
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
        """From an int32 array nobody else writes to: no copy is made."""
        self = cls.__new__(cls)
        ids.flags.writeable = False
        object.__setattr__(self, "type", "encoded_text")
        object.__setattr__(self, "_ids", ids)
        return self

    @classmethod
    def _read(cls, value: Mapping[str, Any]) -> Self:
        tokens = value.get("tokens")
        if not isinstance(tokens, list):
            raise WireError.at(("tokens",), f"a list of token ids is needed, not {_kind(tokens)}.")
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
        raise ValueError("tokens must be a flat list of whole numbers.") from None
    if ids.size == 0:
        return np.zeros(0, dtype=np.int32)
    if ids.ndim != 1 or ids.dtype.kind not in "iuf":
        raise ValueError(
            f"tokens must be a flat list of whole numbers, not {ids.dtype} of shape {ids.shape}."
        )
    low, high = ids.min(), ids.max()
    if not (low >= -(2**31) and high < 2**31):
        bad = low if not low >= -(2**31) else high
        raise ValueError(f"token {bad} does not fit 32 bits.")
    if ids.dtype.kind == "f" and (ids != np.trunc(ids)).any():
        raise ValueError(f"tokens must be whole numbers; found {ids[ids != np.trunc(ids)][0]}.")
    return np.array(ids, dtype=np.int32)


def _from_base64(value: Any, what: str) -> Any:
    """Bytes as they are; text as standard base64."""
    if isinstance(value, str):
        try:
            return base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError):
            raise ValueError(f"{what} given as text must be base64.") from None
    return value


class ImageChunk(StrictModel):
    """A picture, sent along. Bytes in Python, base64 in JSON."""

    #: The file's bytes; base64 text is accepted too.
    data: bytes
    format: ImageFormat
    #: How many tokens the sender thinks it is worth. A check only: the server counts for itself.
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
    """A picture the service already has, by its address. Travels in JSON only."""

    format: ImageFormat
    #: Where the service finds it.
    location: str
    #: As for `ImageChunk`.
    expected_tokens: int | None = Field(default=None)
    type: Literal["image_asset_pointer"] = "image_asset_pointer"

    @property
    def length(self) -> int:
        return _expected(self.expected_tokens, "image")


def _expected(tokens: int | None, what: str) -> int:
    if tokens is None:
        raise ValueError(
            f"the length of this {what} chunk is not known here; give it `expected_tokens`."
        )
    return tokens


class DmelChunk(StrictModel):
    """Sound, as a container of mel features. Bytes in Python, base64 in JSON."""

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
        """Tokens: the first dimension in the container's header."""
        return _container_length(self.dmel)


def _container_length(container: bytes) -> int:
    """
    Dimension 0 of a tensor container.

    Header: perhaps the byte 254 (a constant tensor), a byte for the dtype (0 to 7), then LEB128
    numbers: how many dimensions, and each of them.
    """
    at = 1 if container[:1] == b"\xfe" else 0
    if len(container) <= at or container[at] > 7:
        raise ValueError("dmel: the container's header has no known dtype.")
    at += 1
    dimensions, at = _leb128(container, at)
    if dimensions == 0:
        raise ValueError("dmel: the container holds a tensor without dimensions.")
    length, _ = _leb128(container, at)
    return length


def _leb128(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise ValueError("dmel: the container's header is cut off.")


_CHUNKS: Final[dict[str, Any]] = {
    "encoded_text": EncodedTextChunk,
    "image": ImageChunk,
    "image_asset_pointer": ImageAssetPointerChunk,
    "dmel": DmelChunk,
}


def chunk_from(value: Any) -> Chunk:
    """A chunk from what JSON holds. Clients before 0.18 leave out `type`: it shows in the keys."""
    if isinstance(value, (EncodedTextChunk, ImageAssetPointerChunk, ImageChunk, DmelChunk)):
        return value
    if not isinstance(value, Mapping):
        raise WireError.at((), f"a chunk is an object, not {_kind(value)}.", "dict_type")
    name = value.get("type") or _inferred_type(value)
    chunk_type = _CHUNKS.get(name) if isinstance(name, str) else None
    if chunk_type is None:
        raise WireError.at(
            ("type",), f"a chunk is one of {', '.join(_CHUNKS)}, not {name!r}.", "union_tag_invalid"
        )
    if chunk_type is EncodedTextChunk:
        return EncodedTextChunk._read(value)
    fields = {key: item for key, item in value.items() if key in chunk_type.model_fields}
    if "expected_tokens" in chunk_type.model_fields and isinstance(value.get("tokens"), int):
        fields.setdefault("expected_tokens", value["tokens"])  # 0.4.1 to 0.5.1
    try:
        return chunk_type.model_validate(fields)  # type: ignore[no-any-return]
    except ValidationError as error:
        raise WireError(
            [FieldError(tuple(e["loc"]), e["msg"], e["type"]) for e in error.errors()]
        ) from None


def _inferred_type(value: Mapping[str, Any]) -> str | None:
    # In this order: an image of the oldest clients has `tokens` too, as a number.
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


# -- prompts -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class ModelInput(Payload):
    """
    What the model reads: text tokens, pictures and sound, in order.

        ModelInput.from_ints([1, 2, 3]).append_int(4)
    """

    chunks: list[Chunk]

    model_config: ClassVar[dict[str, Any]] = {"extra": "forbid", "frozen": True}
    model_fields: ClassVar[dict[str, FieldInfo]] = {
        "chunks": FieldInfo(annotation=list[ModelInputChunk]),
    }

    def __post_init__(self) -> None:
        if not isinstance(self.chunks, (list, tuple)):
            raise WireError.at(
                ("chunks",), f"a list of chunks is needed, not {_kind(self.chunks)}.", "list_type"
            )
        chunks = []
        for position, value in enumerate(self.chunks):
            try:
                chunks.append(chunk_from(value))
            except WireError as error:
                raise error.under("chunks", position) from None
        object.__setattr__(self, "chunks", chunks)

    @classmethod
    def _read(cls, value: Mapping[str, Any]) -> Self:
        if "chunks" not in value:
            raise WireError.at(("chunks",), "Field required", "missing")
        return cls(value["chunks"])

    @classmethod
    def from_ints(cls, tokens: Sequence[int] | npt.NDArray[Any]) -> ModelInput:
        """A prompt of text tokens."""
        return cls(chunks=[EncodedTextChunk(tokens)])

    @classmethod
    def empty(cls) -> ModelInput:
        return cls(chunks=[])

    def append(self, chunk: Chunk) -> ModelInput:
        """A new prompt that ends with `chunk`."""
        return type(self)(chunks=[*self.chunks, chunk])

    def append_int(self, token: int) -> ModelInput:
        """A new prompt that ends with `token`, as a chunk of its own."""
        return self.append(EncodedTextChunk([token]))

    @property
    def length(self) -> int:
        """Tokens in all; `ValueError` when that of an image is not known."""
        return sum(chunk.length for chunk in self.chunks)

    @property
    def tokens_np(self) -> npt.NDArray[np.int32]:
        """All tokens, read-only; `ValueError` naming the chunk that is not text."""
        import numpy as np

        parts = []
        for position, chunk in enumerate(self.chunks):
            if not isinstance(chunk, EncodedTextChunk):
                raise ValueError(  # noqa: TRY004 - the official client raises ValueError too
                    f"chunks[{position}] is of type {chunk.type!r}; only text has token ids."
                )
            parts.append(chunk.tokens_np)
        if len(parts) == 1:
            return parts[0]
        tokens = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)
        tokens.flags.writeable = False
        return tokens

    def to_ints(self) -> list[int]:
        """All tokens as a list; `ValueError` when a chunk is not text."""
        tokens: list[int] = self.tokens_np.tolist()
        return tokens

    def _key(self) -> Any:
        return self.chunks


# -- provenance ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptProvenanceSpan:
    """These tokens were part of the prompt of an earlier sample."""

    #: The sampled sequence whose prompt it was.
    sequence_id: str
    #: Where in that prompt the run starts.
    offset: int = 0
    #: How many tokens.
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledProvenanceSpan:
    """These tokens were drawn by an earlier sample."""

    #: The sampled sequence they belong to.
    sequence_id: str
    #: Where in the sampled tokens the run starts.
    offset: int = 0
    #: How many tokens.
    length: int


ProvenanceSpans: TypeAlias = list[PromptProvenanceSpan | SampledProvenanceSpan]


# -- training examples ---------------------------------------------------------------------------

LossFnInputs: TypeAlias = dict[str, TensorData]

#: What lists under these names become; under another name their values decide.
LIST_DTYPES: Final[Mapping[str, TensorDtype]] = {
    "target_tokens": "int64",
    "weights": "float32",
    "advantages": "float32",
    "logprobs": "float32",
    "clip_low_threshold": "float32",
    "clip_high_threshold": "float32",
    "sequence_ratio_mask": "float32",
}

#: 2-D torch tensors under these names travel as CSR where that is smaller.
_COMPACT: Final = frozenset({"target_tokens", "weights"})


@dataclass(frozen=True, slots=True, eq=False)
class Datum(Payload):
    """
    One training example: what the model reads, and the tensors its loss needs.

        Datum(
            model_input=ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
        )

    Values may be torch tensors, NumPy arrays, (nested) lists or `TensorData`; they are copied.
    """

    model_input: ModelInput
    #: By name. After construction every value is a `TensorData`.
    loss_fn_inputs: LossFnInputs = field(default_factory=dict)
    #: Where the tokens of `model_input` came from; given together with the next one or not at all.
    model_input_spans: ProvenanceSpans | None = None
    #: Where the `target_tokens` came from.
    loss_fn_input_spans: ProvenanceSpans | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        if not isinstance(self.model_input, ModelInput):
            try:
                put(self, "model_input", ModelInput.model_validate(self.model_input))
            except WireError as error:
                raise error.under("model_input") from None
        if not isinstance(self.loss_fn_inputs, Mapping):
            raise TypeError(
                f"loss_fn_inputs maps names to tensors; got {type(self.loss_fn_inputs).__name__}."
            )
        put(
            self,
            "loss_fn_inputs",
            {key: _loss_input(key, value) for key, value in self.loss_fn_inputs.items()},
        )
        if (self.model_input_spans is None) != (self.loss_fn_input_spans is None):
            raise WireError.at(
                ("model_input_spans",),
                "provenance is given for both the model input and the targets, or for neither.",
            )

    @classmethod
    def _read(cls, value: Mapping[str, Any]) -> Self:
        if "model_input" not in value:
            raise WireError.at(("model_input",), "Field required", "missing")
        inputs = value.get("loss_fn_inputs")
        if inputs is None:
            inputs = {}
        if not isinstance(inputs, Mapping):
            raise WireError.at(("loss_fn_inputs",), f"an object is needed, not {_kind(inputs)}.")
        tensors = {}
        for key, item in inputs.items():
            try:
                tensors[key] = TensorData.model_validate(item)
            except WireError as error:
                raise error.under("loss_fn_inputs", key) from None
        try:
            model_input = ModelInput.model_validate(value["model_input"])
        except WireError as error:
            raise error.under("model_input") from None
        return cls(
            model_input,
            tensors,
            _spans_from(value.get("model_input_spans"), "model_input_spans"),
            _spans_from(value.get("loss_fn_input_spans"), "loss_fn_input_spans"),
        )

    def _dump(self) -> dict[str, Any]:
        return {
            "model_input": self.model_input,
            "loss_fn_inputs": self.loss_fn_inputs,
            "model_input_spans": _spans_dump(self.model_input_spans),
            "loss_fn_input_spans": _spans_dump(self.loss_fn_input_spans),
        }

    def _constructor_arguments(self) -> dict[str, Any]:
        return {
            "model_input": self.model_input,
            "loss_fn_inputs": self.loss_fn_inputs,
            "model_input_spans": self.model_input_spans,
            "loss_fn_input_spans": self.loss_fn_input_spans,
        }

    def with_provenance(
        self, model_input: ProvenanceSpans, loss_fn_inputs: ProvenanceSpans
    ) -> Self:
        """The same example with the origin of its tokens; the runs must cover them exactly."""
        _check_cover("model_input", model_input, self.model_input.length)
        targets = self.loss_fn_inputs.get("target_tokens")
        if targets is not None and (targets.shape is None or len(targets.shape) == 1):
            _check_cover("target_tokens", loss_fn_inputs, len(targets))
        return self.model_copy(
            update={
                "model_input_spans": list(model_input),
                "loss_fn_input_spans": list(loss_fn_inputs),
            }
        )


def _loss_input(key: str, value: Any) -> TensorData:
    if key in _COMPACT and getattr(value, "ndim", 0) == 2 and hasattr(value, "detach"):
        return compact_from_torch(value, key=key)
    return tensor_from(value, key=key, list_dtype=LIST_DTYPES.get(key))


def _check_cover(what: str, spans: ProvenanceSpans, length: int) -> None:
    covered = sum(span.length for span in spans)
    if covered != length:
        raise ValueError(
            f"the provenance of `{what}` covers {covered} tokens, but there are {length}."
        )


_SPANS: Final[dict[str, type[PromptProvenanceSpan | SampledProvenanceSpan]]] = {
    "prompt": PromptProvenanceSpan,
    "sampled": SampledProvenanceSpan,
}


def _spans_from(value: Any, name: str) -> ProvenanceSpans | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise WireError.at((name,), f"a list is needed, not {_kind(value)}.", "list_type")
    spans: ProvenanceSpans = []
    for position, item in enumerate(value):
        if isinstance(item, (PromptProvenanceSpan, SampledProvenanceSpan)):
            spans.append(item)
            continue
        try:
            fields = dict(item)
            spans.append(_SPANS[fields.pop("type")](**fields))
        except (KeyError, TypeError, ValueError):
            raise WireError.at(
                (name, position), "a span has `type`, `sequence_id`, `offset` and `length`."
            ) from None
    return spans


def _spans_dump(spans: ProvenanceSpans | None) -> list[dict[str, Any]] | None:
    if spans is None:
        return None
    return [
        {
            "type": "prompt" if isinstance(span, PromptProvenanceSpan) else "sampled",
            "sequence_id": span.sequence_id,
            "offset": span.offset,
            "length": span.length,
        }
        for span in spans
    ]
