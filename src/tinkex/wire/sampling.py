"""
Sampling requests and responses.

A request is sent as JSON, its result as protobuf (`protobuf.py`) or, to old clients, as JSON
(`sdk_versions.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeAlias, get_args

from pydantic import Field

from tinkex import display
from tinkex.wire.base import LenientModel, Payload, StrictModel, json_kind
from tinkex.wire.errors import UserFailure, WireError
from tinkex.wire.inputs import ModelInput
from tinkex.wire.tensors import TensorData

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = [
    "CreateSamplingSessionRequest",
    "CreateSamplingSessionResponse",
    "GetSamplerResponse",
    "JoinSamplingSessionRequest",
    "JoinSamplingSessionResponse",
    "PromptAltTokens",
    "SampleRequest",
    "SampleResponse",
    "SampledSequence",
    "SamplingParams",
    "StopReason",
    "TopkLogprobs",
]

#: `length`: `max_tokens` were sampled. `stop`: a stop token or string, or the end-of-text token.
StopReason = Literal["length", "stop"]

#: How a `SampleRequest` names what it samples from.
SampleMode = Literal["session", "model_path", "base_model"]

#: Padding of a top-k table.
EMPTY_TOKEN: Final = 0
EMPTY_LOGPROB: Final = -99999.0

#: A client with clone id N numbers its samples from N times this. Copies of a sampling client have
#: different clone ids, so their seq_ids differ.
CLONE_STRIDE: Final = 10**9

TopkRow: TypeAlias = list[tuple[int, float]] | None


class SamplingParams(StrictModel):
    """How tokens are sampled."""

    #: Stop after this many new tokens; None: as many as fit in the context.
    max_tokens: int | None = None
    #: Same seed, same prompt, same weights: same tokens.
    seed: int | None = None
    #: A string, strings, or token ids to stop at. None: stop only at the end-of-text token. An
    #: empty list: never stop.
    stop: str | Sequence[str] | Sequence[int] | None = None
    #: 0: always the most likely token.
    temperature: float = 1.0
    #: Sample from this many of the most likely tokens; -1: from all.
    top_k: int = -1
    #: Sample from the most likely tokens whose total probability reaches this.
    top_p: float = 1.0


class SampleRequest(StrictModel):
    """
    Sample sequences from a model.

    The model is named in one of three ways: by a sampling session (with `seq_id`), by a checkpoint,
    or by a base model.
    """

    #: Number of sequences for this prompt.
    num_samples: int = 1
    prompt: ModelInput
    sampling_params: SamplingParams
    base_model: str | None = None
    #: A `tinker://` path of a checkpoint.
    model_path: str | None = None
    sampling_session_id: str | None = None
    #: Number of this sample in its session; samples run in any order.
    seq_id: int | None = None
    #: Also return the logprob of each prompt token. None means false (upstream documents false as
    #: the default; the default of the field is None).
    prompt_logprobs: bool | None = None
    #: Also return this many of the most likely tokens for each prompt position.
    topk_prompt_logprobs: int = 0
    #: The same for each sampled position.
    topk_sample_logprobs: int = 0
    #: int64 [prompt length - 1, K]: tokens whose logprobs to return; row i is for prompt position
    #: i + 1, and -1 is padding.
    target_prompt_logprobs: TensorData | None = None
    #: Sample this many alternative tokens for each prompt position.
    prompt_alt_tokens_k: int = 0
    #: Limit `prompt_logprobs` to this many positions at the end of the prompt.
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None
    type: Literal["sample"] = "sample"

    @property
    def mode(self) -> SampleMode:
        """How the model is named; `UserFailure` if it is not named."""
        if self.sampling_session_id is not None:
            return "session"
        if self.model_path is not None:
            return "model_path"
        if self.base_model is not None:
            return "base_model"
        raise UserFailure(
            "this sample names no model. Set `sampling_session_id` and `seq_id`, or `model_path`, "
            "or `base_model`."
        )

    def check_agrees(self, *, base_model: str | None, model_path: str | None) -> None:
        """`UserFailure` if the request also names another model than the one found."""
        for name, requested, found in (
            ("base_model", self.base_model, base_model),
            ("model_path", self.model_path, model_path),
        ):
            if requested is not None and requested != found:
                raise UserFailure(
                    f"this sample names two models: {name} is {requested!r}, but its {self.mode} "
                    f"is {found!r}. Name the model in one way only."
                )


# -- responses -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TopkLogprobs(Payload):
    """The most likely tokens at each position. Rows may be padded with token 0, logprob -99999."""

    #: int32 [length, k]
    token_ids: npt.NDArray[np.int32]
    #: float32 [length, k]
    logprobs: npt.NDArray[np.float32]

    def __post_init__(self) -> None:
        import numpy as np

        object.__setattr__(self, "token_ids", _frozen(self.token_ids, np.int32))
        object.__setattr__(self, "logprobs", _frozen(self.logprobs, np.float32))
        if self.token_ids.ndim != 2 or self.token_ids.shape != self.logprobs.shape:
            raise WireError.at(
                ("token_ids",),
                "expected two tables of shape [length, k], not "
                f"{self.token_ids.shape} and {self.logprobs.shape}.",
            )

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[Sequence[float]] | None]) -> Self:
        """From a list of (token, logprob) pairs for each position, or None if it is empty."""
        import numpy as np

        k = max((len(row) for row in rows if row), default=0)
        ids = np.full((len(rows), k), EMPTY_TOKEN, dtype=np.int32)
        logprobs = np.full((len(rows), k), EMPTY_LOGPROB, dtype=np.float32)
        for position, row in enumerate(rows):
            if row:
                ids[position, : len(row)] = [pair[0] for pair in row]
                logprobs[position, : len(row)] = [pair[1] for pair in row]
        return cls(ids, logprobs)

    def rows(self) -> list[TopkRow]:
        """(token, logprob) pairs for each position without the padding; None for an empty row."""
        filled = (self.token_ids != EMPTY_TOKEN) | (self.logprobs != EMPTY_LOGPROB)
        rows: list[TopkRow] = []
        for ids, logprobs, used in zip(
            self.token_ids.tolist(), self.logprobs.tolist(), filled.tolist(), strict=True
        ):
            if not used or not used[0]:
                rows.append(None)
                continue
            last = len(used) - used[::-1].index(True)
            rows.append(list(zip(ids[:last], logprobs[:last], strict=True)))
        return rows

    def _shown(self) -> Iterable[tuple[str, Any]]:
        length, k = self.token_ids.shape
        return ("length", length), ("k", k)

    def _dump(self) -> dict[str, Any]:
        return {"token_ids": self.token_ids.tolist(), "logprobs": self.logprobs.tolist()}

    def _constructor_arguments(self) -> dict[str, Any]:
        return {"token_ids": self.token_ids, "logprobs": self.logprobs}

    def _key(self) -> Any:
        return self.token_ids.shape, self.token_ids.tobytes(), self.logprobs.tobytes()


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SampledSequence(Payload):
    """One sampled sequence. The arrays are stored; lists are made from them on first access."""

    stop_reason: StopReason
    #: Id of this sequence; empty if the service gave none.
    sequence_id: str
    #: int32: the sampled tokens, without the prompt.
    tokens_np: npt.NDArray[np.int32] | None = field(default=None, repr=False)
    #: float32, one for each token. None: not recorded.
    logprobs_np: npt.NDArray[np.float32] | None = field(default=None, repr=False)
    #: The most likely tokens at each sampled position, if requested.
    topk_logprobs_np: TopkLogprobs | None = field(default=None, repr=False)

    _lists: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        import numpy as np

        if self.stop_reason not in get_args(StopReason):
            raise WireError.at(
                ("stop_reason",), f"must be 'length' or 'stop', not {self.stop_reason!r}.", "enum"
            )
        if self.tokens_np is not None:
            object.__setattr__(self, "tokens_np", _frozen(self.tokens_np, np.int32))
        if self.logprobs_np is not None:
            object.__setattr__(self, "logprobs_np", _frozen(self.logprobs_np, np.float32))

    @classmethod
    def _read(cls, value: Mapping[str, Any]) -> Self:
        topk = value.get("topk_logprobs_np", value.get("topk_logprobs"))
        return cls(
            value.get("stop_reason"),  # type: ignore[arg-type]
            value.get("sequence_id") or "",
            value.get("tokens_np", value.get("tokens")),
            value.get("logprobs_np", value.get("logprobs")),
            _topk_from(topk, "topk_logprobs"),
        )

    @property
    def tokens(self) -> list[int]:
        if "tokens" not in self._lists:
            self._lists["tokens"] = [] if self.tokens_np is None else self.tokens_np.tolist()
        tokens: list[int] = self._lists["tokens"]
        return tokens

    @property
    def logprobs(self) -> list[float] | None:
        if "logprobs" not in self._lists and self.logprobs_np is not None:
            self._lists["logprobs"] = self.logprobs_np.tolist()
        return self._lists.get("logprobs")

    @property
    def topk_logprobs(self) -> list[TopkRow] | None:
        if "topk" not in self._lists and self.topk_logprobs_np is not None:
            self._lists["topk"] = self.topk_logprobs_np.rows()
        return self._lists.get("topk")

    def _shown(self) -> Iterable[tuple[str, Any]]:
        yield "tokens", display.numbers(() if self.tokens_np is None else self.tokens_np)
        yield "logprobs", None if self.logprobs_np is None else display.numbers(self.logprobs_np, 3)
        if self.topk_logprobs_np is not None:
            yield "topk_logprobs", self.topk_logprobs_np
        yield "stop_reason", self.stop_reason
        yield "sequence_id", self.sequence_id

    def _repr_html_(self) -> str:
        return _html([self])

    def _dump(self) -> dict[str, Any]:
        return {
            "stop_reason": self.stop_reason,
            "sequence_id": self.sequence_id,
            "tokens": self.tokens,
            "logprobs": self.logprobs,
            "topk_logprobs": _rows_as_lists(self.topk_logprobs),
        }

    def _constructor_arguments(self) -> dict[str, Any]:
        return {
            name: getattr(self, name)
            for name in (
                "stop_reason",
                "sequence_id",
                "tokens_np",
                "logprobs_np",
                "topk_logprobs_np",
            )
        }

    def _key(self) -> Any:
        return (
            self.stop_reason,
            self.sequence_id,
            _bytes(self.tokens_np),
            _bytes(self.logprobs_np),
            self.topk_logprobs_np,
        )


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class PromptAltTokens(Payload):
    """Alternative tokens sampled for each prompt position."""

    #: int64 [prompt positions, k]
    tokens: TensorData
    #: float32, the same shape.
    logprobs: TensorData

    def __post_init__(self) -> None:
        for name in ("tokens", "logprobs"):
            object.__setattr__(self, name, _tensor_at(name, getattr(self, name)))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SampleResponse(Payload):
    """All sequences of one request, and the requested values for its prompt."""

    sequences: Sequence[SampledSequence]
    #: float32, one for each prompt token; NaN where there is none, such as the first.
    prompt_logprobs_np: npt.NDArray[np.float32] | None = field(default=None, repr=False)
    #: The most likely tokens at each prompt position.
    topk_prompt_logprobs_np: TopkLogprobs | None = field(default=None, repr=False)
    #: The logprobs of the requested tokens, in the shape of the request.
    target_prompt_logprobs: TensorData | None = None
    #: Prompt tokens that were in the prefix cache.
    prompt_cache_hit_tokens: int = 0
    prompt_alt_tokens: PromptAltTokens | None = None

    _lists: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        import numpy as np

        if self.prompt_logprobs_np is not None:
            object.__setattr__(
                self, "prompt_logprobs_np", _frozen(self.prompt_logprobs_np, np.float32)
            )

    @classmethod
    def _read(cls, value: Mapping[str, Any]) -> Self:
        sequences = value.get("sequences")
        if not isinstance(sequences, (list, tuple)):
            raise WireError.at(("sequences",), f"expected a list, not {json_kind(sequences)}.")
        read = []
        for position, item in enumerate(sequences):
            try:
                read.append(SampledSequence.model_validate(item))
            except WireError as error:
                raise error.under("sequences", position) from None
        logprobs = value.get("prompt_logprobs_np", value.get("prompt_logprobs"))
        if isinstance(logprobs, list):
            logprobs = [float("nan") if number is None else number for number in logprobs]
        target, alt = value.get("target_prompt_logprobs"), value.get("prompt_alt_tokens")
        return cls(
            read,
            logprobs,
            _topk_from(
                value.get("topk_prompt_logprobs_np", value.get("topk_prompt_logprobs")),
                "topk_prompt_logprobs",
            ),
            None if target is None else _tensor_at("target_prompt_logprobs", target),
            value.get("prompt_cache_hit_tokens") or 0,
            None if alt is None else PromptAltTokens.model_validate(alt),
        )

    @property
    def prompt_logprobs(self) -> list[float | None] | None:
        """One for each prompt token; None where there is none."""
        import numpy as np

        array = self.prompt_logprobs_np
        if "prompt" not in self._lists and array is not None:
            self._lists["prompt"] = [
                None if absent else number
                for number, absent in zip(array.tolist(), np.isnan(array).tolist(), strict=True)
            ]
        return self._lists.get("prompt")

    @property
    def topk_prompt_logprobs(self) -> list[TopkRow] | None:
        if "topk" not in self._lists and self.topk_prompt_logprobs_np is not None:
            self._lists["topk"] = self.topk_prompt_logprobs_np.rows()
        return self._lists.get("topk")

    def _shown(self) -> Iterable[tuple[str, Any]]:
        yield "sequences", list(self.sequences)
        if self.prompt_logprobs_np is not None:
            yield "prompt_logprobs", display.numbers(self.prompt_logprobs_np, 3)
        if self.topk_prompt_logprobs_np is not None:
            yield "topk_prompt_logprobs", self.topk_prompt_logprobs_np
        if self.target_prompt_logprobs is not None:
            yield "target_prompt_logprobs", self.target_prompt_logprobs
        if self.prompt_cache_hit_tokens:
            yield "prompt_cache_hit_tokens", self.prompt_cache_hit_tokens
        if self.prompt_alt_tokens is not None:
            yield "prompt_alt_tokens", self.prompt_alt_tokens

    def _repr_html_(self) -> str:
        return _html(self.sequences)

    def _dump(self) -> dict[str, Any]:
        return {
            "sequences": list(self.sequences),
            "prompt_logprobs": self.prompt_logprobs,
            "topk_prompt_logprobs": _rows_as_lists(self.topk_prompt_logprobs),
            "target_prompt_logprobs": self.target_prompt_logprobs,
            "prompt_cache_hit_tokens": self.prompt_cache_hit_tokens,
            "prompt_alt_tokens": self.prompt_alt_tokens,
        }

    def _constructor_arguments(self) -> dict[str, Any]:
        return {
            name: getattr(self, name)
            for name in (
                "sequences",
                "prompt_logprobs_np",
                "topk_prompt_logprobs_np",
                "target_prompt_logprobs",
                "prompt_cache_hit_tokens",
                "prompt_alt_tokens",
            )
        }

    def _key(self) -> Any:
        return (
            list(self.sequences),
            _bytes(self.prompt_logprobs_np),
            self.topk_prompt_logprobs_np,
            self.target_prompt_logprobs,
            self.prompt_cache_hit_tokens,
            self.prompt_alt_tokens,
        )


def _html(sequences: Sequence[SampledSequence]) -> str:
    """A table of sampled sequences. It has tokens, because their text needs a tokenizer."""
    rows = [
        (
            position,
            0 if each.tokens_np is None else len(each.tokens_np),
            display.numbers(() if each.tokens_np is None else each.tokens_np, 24),
            None if each.logprobs_np is None else float(each.logprobs_np.sum()),
            each.stop_reason,
        )
        for position, each in enumerate(sequences)
    ]
    columns = ("sequence", "tokens", "first tokens", "sum of logprobs", "stop reason")
    return display.table(columns, rows, caption="Sampled sequences")


def _frozen(value: Any, dtype: type[np.generic]) -> npt.NDArray[Any]:
    """`value` as a read-only array of `dtype`; not copied if it already is one."""
    import numpy as np

    if isinstance(value, np.ndarray) and value.dtype == dtype and not value.flags.writeable:
        return value
    try:
        array = np.asarray(value)
        if array.size and (array.dtype.kind not in "iuf" or array.ndim > 2):
            raise TypeError
        if array.size and np.issubdtype(dtype, np.integer) and array.dtype.kind == "f":
            raise TypeError
        array = np.array(array, dtype=dtype)
    except (TypeError, ValueError, OverflowError):
        raise WireError(f"expected a list of numbers, not {str(value)[:60]}.") from None
    array.flags.writeable = False
    return array


def _tensor_at(name: str, value: Any) -> TensorData:
    try:
        return TensorData.model_validate(value)
    except WireError as error:
        raise error.under(name) from None


def _topk_from(value: Any, name: str) -> TopkLogprobs | None:
    """From a table, its dump, or the rows of (token, logprob) pairs in JSON."""
    if value is None or isinstance(value, TopkLogprobs):
        return value
    try:
        if isinstance(value, Mapping):
            return TopkLogprobs(value["token_ids"], value["logprobs"])
        return TopkLogprobs.from_rows(value)
    except (TypeError, ValueError, KeyError, IndexError, OverflowError):
        raise WireError.at((name,), "expected rows of [token, logprob] pairs, or null.") from None


def _rows_as_lists(rows: list[TopkRow] | None) -> list[list[list[float]] | None] | None:
    if rows is None:
        return None
    return [None if row is None else [list(pair) for pair in row] for row in rows]


def _bytes(array: npt.NDArray[Any] | None) -> bytes | None:
    return None if array is None else array.tobytes()


# -- sampling sessions ---------------------------------------------------------------------------


class CreateSamplingSessionRequest(StrictModel):
    session_id: str
    #: Number of this sampling session in its session, from 0.
    sampling_session_seq_id: int
    base_model: str | None = None
    #: A `tinker://` path of a checkpoint.
    model_path: str | None = None
    type: Literal["create_sampling_session"] = "create_sampling_session"


class CreateSamplingSessionResponse(LenientModel):
    type: Literal["create_sampling_session"] = "create_sampling_session"
    sampling_session_id: str


class JoinSamplingSessionRequest(StrictModel):
    sampling_session_id: str
    type: Literal["join_sampling_session"] = "join_sampling_session"


class JoinSamplingSessionResponse(LenientModel):
    type: Literal["join_sampling_session"] = "join_sampling_session"
    #: Clone id: unique among the clients of the sampling session, never 0.
    client_counter: int


class GetSamplerResponse(LenientModel):
    sampler_id: str
    base_model: str
    #: None: samples come from the base model itself.
    model_path: str | None = Field(default=None)
