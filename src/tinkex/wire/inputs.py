"""
Model inputs: prompts made of chunks, and training examples made of a prompt and tensors.

Tokens are numbers; a tokenizer is only needed for `ModelInput.from_text`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol, Self, TypeAlias

from pydantic.fields import FieldInfo

from tinkex.wire.base import ModelPayload, Payload, json_kind
from tinkex.wire.errors import WireError
from tinkex.wire.limits import (
    MAX_CHUNKS,
    MAX_NAME_CHARS,
    MAX_SPANS,
    MAX_TENSORS,
    check_count,
    check_text,
)
from tinkex.wire.prompt_chunks import (
    Chunk,
    DmelChunk,
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInputChunk,
    chunk_from,
)
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
]


class TextEncoder(Protocol):
    """A tokenizer from `tokenizers`, transformers or tinkex, or a tinkex client."""

    def encode(self, text: Any, /, *, add_special_tokens: bool) -> Any: ...


# -- prompts -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ModelInput(ModelPayload):
    """
    A prompt: text tokens, images and audio, in order.

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
                ("chunks",),
                f"expected a list of chunks, not {json_kind(self.chunks)}.",
                "list_type",
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
        if isinstance(value["chunks"], list):
            check_count(("chunks",), len(value["chunks"]), MAX_CHUNKS, "chunks")
        return cls(value["chunks"])

    @classmethod
    def from_ints(cls, tokens: Sequence[int] | npt.NDArray[Any]) -> ModelInput:
        """A prompt of text tokens."""
        return cls(chunks=[EncodedTextChunk(tokens)])

    @classmethod
    def from_text(
        cls, text: str, tokenizer: TextEncoder, *, add_special_tokens: bool = True
    ) -> ModelInput:
        """
        Encode text with a tokenizer, or with a client, which uses the tokenizer of its model.

        `add_special_tokens=False` leaves out the tokens that tokenizers add at the start of a text.
        """
        encoded = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return cls.from_ints(
            getattr(encoded, "ids", encoded)
        )  # `tokenizers` returns an object with `ids`

    @classmethod
    def empty(cls) -> ModelInput:
        return cls(chunks=[])

    def append(self, chunk: Chunk) -> ModelInput:
        """A new prompt that ends with `chunk`."""
        return type(self)(chunks=[*self.chunks, chunk])

    def append_int(self, token: int) -> ModelInput:
        """A new prompt that ends with `token`, which is added to the last chunk if that is text."""
        import numpy as np

        added = EncodedTextChunk([token])
        if not self.chunks or not isinstance(last := self.chunks[-1], EncodedTextChunk):
            return self.append(added)
        longer = EncodedTextChunk(np.concatenate([last.tokens_np, added.tokens_np]))
        return type(self)(chunks=[*self.chunks[:-1], longer])

    @property
    def length(self) -> int:
        """Number of tokens; `ValueError` if an image does not say how many it has."""
        return sum(chunk.length for chunk in self.chunks)

    @property
    def tokens_np(self) -> npt.NDArray[np.int32]:
        """All tokens, read-only; `ValueError` naming a chunk that is not text."""
        import numpy as np

        parts = []
        for position, chunk in enumerate(self.chunks):
            if not isinstance(chunk, EncodedTextChunk):
                raise ValueError(  # noqa: TRY004 - the official client raises ValueError too
                    f"chunks[{position}] has type {chunk.type!r}; only text chunks have token ids."
                )
            parts.append(chunk.tokens_np)
        if len(parts) == 1:
            return parts[0]
        tokens = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)
        tokens.flags.writeable = False
        return tokens

    def to_ints(self) -> list[int]:
        """All tokens as a list; `ValueError` if a chunk is not text."""
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
    #: Position in that prompt where the span starts.
    offset: int = 0
    #: Number of tokens.
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledProvenanceSpan:
    """These tokens were sampled earlier."""

    #: The sampled sequence they belong to.
    sequence_id: str
    #: Position in the sampled tokens where the span starts.
    offset: int = 0
    #: Number of tokens.
    length: int


ProvenanceSpans: TypeAlias = list[PromptProvenanceSpan | SampledProvenanceSpan]


# -- training examples ---------------------------------------------------------------------------

LossFnInputs: TypeAlias = dict[str, TensorData]

#: Dtypes of lists under these names; under other names the values decide.
LIST_DTYPES: Final[Mapping[str, TensorDtype]] = {
    "target_tokens": "int64",
    "weights": "float32",
    "advantages": "float32",
    "logprobs": "float32",
    "clip_low_threshold": "float32",
    "clip_high_threshold": "float32",
    "sequence_ratio_mask": "float32",
}

#: 2-D torch tensors under these names are sent as CSR where that is smaller.
_SPARSE_INPUTS: Final = frozenset({"target_tokens", "weights"})


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Datum(Payload):
    """
    One training example: the input of the model and the tensors of its loss.

        Datum(
            model_input=ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
        )

    Values may be torch tensors, NumPy arrays, (nested) lists or `TensorData`; they are copied.
    """

    model_input: ModelInput
    #: By name. After construction every value is a `TensorData`.
    loss_fn_inputs: LossFnInputs = field(default_factory=dict)
    #: Provenance of the tokens of `model_input`; set together with the next field or not at all.
    model_input_spans: ProvenanceSpans | None = None
    #: Provenance of the `target_tokens`.
    loss_fn_input_spans: ProvenanceSpans | None = None

    if TYPE_CHECKING:
        # The constructor accepts more types than the fields have: lists and arrays become tensors.
        def __init__(
            self,
            model_input: ModelInput,
            loss_fn_inputs: Mapping[str, Any] = ...,
            model_input_spans: ProvenanceSpans | None = None,
            loss_fn_input_spans: ProvenanceSpans | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        put = object.__setattr__
        if not isinstance(self.model_input, ModelInput):
            try:
                put(self, "model_input", ModelInput.model_validate(self.model_input))
            except WireError as error:
                raise error.under("model_input") from None
        if not isinstance(self.loss_fn_inputs, Mapping):
            raise TypeError(
                f"loss_fn_inputs must map names to tensors, not {type(self.loss_fn_inputs).__name__}."
            )
        put(
            self,
            "loss_fn_inputs",
            {key: _loss_input(key, value) for key, value in self.loss_fn_inputs.items()},
        )
        if (self.model_input_spans is None) != (self.loss_fn_input_spans is None):
            raise WireError.at(
                ("model_input_spans",),
                "provenance must be given for both the model input and the targets or neither.",
            )

    @classmethod
    def _read(cls, value: Mapping[str, Any]) -> Self:
        if "model_input" not in value:
            raise WireError.at(("model_input",), "Field required", "missing")
        inputs = value.get("loss_fn_inputs")
        if inputs is None:
            inputs = {}
        if not isinstance(inputs, Mapping):
            raise WireError.at(("loss_fn_inputs",), f"expected an object, not {json_kind(inputs)}.")
        check_count(("loss_fn_inputs",), len(inputs), MAX_TENSORS, "tensors")
        tensors = {}
        for key, item in inputs.items():
            check_text(("loss_fn_inputs", key), key, MAX_NAME_CHARS)
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
        """The same example with the provenance of its tokens; the spans must cover them exactly."""
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
    if key in _SPARSE_INPUTS and getattr(value, "ndim", 0) == 2 and hasattr(value, "detach"):
        return compact_from_torch(value, key=key)
    dtype = LIST_DTYPES.get(key)
    try:
        return tensor_from(value, key=key, list_dtype=dtype)
    except ValueError:
        # The official client sends a list of booleans as 1.0 and 0.0. Checked only here, after a
        # failure, so that other lists cost nothing extra.
        mask = _mask(value) if dtype == "float32" and isinstance(value, (list, tuple)) else None
        if mask is None:
            raise
        return tensor_from(mask, key=key)


def _mask(value: Any) -> npt.NDArray[np.float32] | None:
    """A (nested) list of booleans as floats; None for any other list."""
    import numpy as np

    try:
        array = np.asarray(value)
    except ValueError:
        return None
    return array.astype(np.float32) if array.dtype == np.bool_ else None


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
        raise WireError.at((name,), f"expected a list, not {json_kind(value)}.", "list_type")
    check_count((name,), len(value), MAX_SPANS, "spans")
    spans: ProvenanceSpans = []
    for position, item in enumerate(value):
        if isinstance(item, (PromptProvenanceSpan, SampledProvenanceSpan)):
            spans.append(item)
            continue
        try:
            fields = dict(item)
            span = _SPANS[fields.pop("type")](**fields)
        except (KeyError, TypeError, ValueError):
            raise WireError.at(
                (name, position), "a span must have `type`, `sequence_id`, `offset` and `length`."
            ) from None
        if not isinstance(span.sequence_id, str):
            raise WireError.at((name, position, "sequence_id"), "expected a string.")
        check_text((name, position, "sequence_id"), span.sequence_id, MAX_NAME_CHARS)
        for key, number in (("offset", span.offset), ("length", span.length)):
            if type(number) is not int or not 0 <= number < 2**63:
                raise WireError.at(
                    (name, position, key), "expected an integer from 0 to 2**63 - 1."
                )
        spans.append(span)
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
