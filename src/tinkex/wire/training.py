"""
Training: creating models, forward and backward passes, optimizer steps.

Passes are sent as protobuf (`protobuf.py`); everything else here is JSON.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeAlias, get_args

from pydantic import (
    AliasChoices,
    ConfigDict,
    Field,
    SerializationInfo,
    SerializeAsAny,
    field_validator,
    model_serializer,
    model_validator,
)

from tinkex import display
from tinkex.wire.base import LenientModel, Payload, StrictModel, json_kind
from tinkex.wire.errors import WireError
from tinkex.wire.inputs import Datum
from tinkex.wire.limits import (
    MAX_DATUMS,
    MAX_NAME_CHARS,
    MAX_TENSORS,
    MAX_TEXT_CHARS,
    check_count,
    check_finite,
    check_text,
)
from tinkex.wire.tensors import MAX_DENSE_CELLS, TensorData

__all__ = [
    "AdamOptimizerConfig",
    "AdamParams",
    "CreateModelRequest",
    "CreateModelResponse",
    "DimuonOptimizerConfig",
    "DimuonParams",
    "ForwardBackwardInput",
    "ForwardBackwardOutput",
    "ForwardBackwardRequest",
    "ForwardRequest",
    "LoraConfig",
    "LossFnOutput",
    "LossFnType",
    "ModelID",
    "OptimParams",
    "OptimParamsBase",
    "OptimStepRequest",
    "OptimStepResponse",
    "OptimizerConfig",
    "OptimizerConfigBase",
    "UnloadModelRequest",
    "UnloadModelResponse",
]

ModelID: TypeAlias = str

#: A closed set of names, never a path to a function.
LossFnType = Literal[
    "cross_entropy",
    "importance_sampling",
    "ppo",
    "cispo",
    "dro",
    "gspo",
    "stable_reinforce",
    "custom",
]

LossFnOutput: TypeAlias = dict[str, TensorData]


# -- adapters and optimizers ---------------------------------------------------------------------


class LoraConfig(StrictModel):
    """Settings of the LoRA adapter to train."""

    rank: int
    #: The same seed and base model give the same initial weights. None: the service chooses a seed.
    seed: int | None = None
    #: Which layers get an adapter: the output head, the MLP blocks, the attention blocks.
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfigBase(LenientModel):
    """An optimizer that this version does not know: passed on with all its fields."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    type: str


class AdamOptimizerConfig(StrictModel):
    """AdamW: the default."""

    type: Literal["adamw"] = "adamw"


class DimuonOptimizerConfig(StrictModel, OptimizerConfigBase):
    """Dimuon."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["dimuon"] = "dimuon"
    version: Literal[1] = 1


OptimizerConfig: TypeAlias = AdamOptimizerConfig | SerializeAsAny[OptimizerConfigBase]


class OptimParamsBase(LenientModel):
    """Parameters of an optimizer that this version does not know: passed on with all its fields."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    type: str


class AdamParams(StrictModel):
    """Parameters of an AdamW step. The defaults are those of the service, not of torch."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    #: Decoupled weight decay: weights are multiplied by 1 - learning_rate * weight_decay.
    weight_decay: float = 0.0
    #: Maximum global gradient norm; 0: no clipping.
    grad_clip_norm: float = 0.0


class DimuonParams(StrictModel, OptimParamsBase):
    """Parameters of a Dimuon step."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["dimuon"] = "dimuon"
    learning_rate: float = Field(ge=0)
    #: As in `AdamParams`.
    grad_clip_norm: float = 0.0
    beta1: float = Field(default=0.9, ge=0, lt=1)


OptimParams: TypeAlias = AdamParams | SerializeAsAny[OptimParamsBase]

_CONFIGS: dict[str, Any] = {"adamw": AdamOptimizerConfig, "dimuon": DimuonOptimizerConfig}


def optimizer_config_from(value: Any) -> Any:
    """Parse a config by its `type` tag; unknown optimizers keep all their fields."""
    if isinstance(value, Mapping):
        tag = value.get("type")
        config_type = _CONFIGS.get(tag, OptimizerConfigBase) if isinstance(tag, str) else None
        if config_type is not None:
            return config_type.model_validate(dict(value))
    return value


# -- models --------------------------------------------------------------------------------------


class CreateModelRequest(StrictModel):
    session_id: str
    #: Number of this model in its session, from 0. Repeating the request returns the same model.
    model_seq_id: int
    base_model: str
    user_metadata: dict[str, Any] | None = None
    #: None: train all weights.
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig = AdamOptimizerConfig()
    type: Literal["create_model"] = "create_model"

    @field_validator("optimizer_config", mode="before")
    @classmethod
    def _by_tag(cls, value: Any) -> Any:
        return optimizer_config_from(value)


class CreateModelResponse(LenientModel):
    model_id: ModelID
    type: Literal["create_model"] = "create_model"


class UnloadModelRequest(StrictModel):
    model_id: ModelID
    type: Literal["unload_model"] = "unload_model"


class UnloadModelResponse(LenientModel):
    model_id: ModelID
    type: Literal["unload_model"] | None = None


# -- passes --------------------------------------------------------------------------------------


def _unknown_loss(name: str, known: tuple[str, ...]) -> str:
    # Only a name that is very near is a typing error: `dpo` is not meant to be `ppo`.
    names = ", ".join(each for each in known if each != "custom")
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    guess = f"; did you mean `{near[0]}`?" if near else "."
    return (
        f"unknown loss `{name}`{guess} The losses are {names}. Any other loss, such as "
        "DPO, is a function of your own: see forward_backward_custom()."
    )


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ForwardBackwardInput(Payload):
    """A batch and the loss to compute on it."""

    data: list[Datum]
    loss_fn: LossFnType
    #: Settings of the loss: numbers or (for `custom`) strings.
    loss_fn_config: Mapping[str, float | str] | None = None

    def __post_init__(self) -> None:
        known = get_args(LossFnType)
        if self.loss_fn not in known:
            raise ValueError(_unknown_loss(str(self.loss_fn)[:200], known))
        check_finite(("loss_fn_config",), self.loss_fn_config)
        data = [_datum_at(item, position) for position, item in enumerate(self.data)]
        object.__setattr__(self, "data", data)

    @classmethod
    def _of(
        cls, data: list[Datum], loss_fn: str, loss_fn_config: Mapping[str, float | str] | None
    ) -> Self:
        """For decoders: an unknown loss name is kept, and the engine rejects it."""
        self = cls.__new__(cls)
        for name, value in (
            ("data", data),
            ("loss_fn", loss_fn),
            ("loss_fn_config", loss_fn_config),
        ):
            object.__setattr__(self, name, value)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self)._of, (self.data, self.loss_fn, self.loss_fn_config)

    @classmethod
    def _read(cls, value: Mapping[str, Any]) -> Self:
        data = value.get("data")
        if not isinstance(data, list):
            raise _expected("data", data, "a list of examples")
        check_count(("data",), len(data), MAX_DATUMS, "examples")
        loss_fn = value.get("loss_fn")
        if not isinstance(loss_fn, str) or not loss_fn:
            raise _expected("loss_fn", loss_fn, "the name of a loss")
        config = value.get("loss_fn_config")
        if config is not None:
            if not isinstance(config, Mapping):
                raise _expected("loss_fn_config", config, "an object")
            for key, item in config.items():
                if isinstance(item, bool) or not isinstance(item, (int, float, str)):
                    raise _expected("loss_fn_config", item, "a number or a string", key)
                if isinstance(item, int) and abs(item) >= 2**1023:
                    raise WireError.at(
                        ("loss_fn_config", key),
                        f"a number of {item.bit_length()} bits is too large.",
                    )
            config = {
                key: item if isinstance(item, str) else float(item) for key, item in config.items()
            }
        work = cls._of(
            [_datum_at(item, position) for position, item in enumerate(data)], loss_fn, config
        )
        work.check_sizes()
        return work

    def check_sizes(self) -> None:
        """`WireError` for a batch that is too large, or a setting that is not finite."""
        check_text(("loss_fn",), self.loss_fn, MAX_NAME_CHARS)
        config = self.loss_fn_config or {}
        check_count(("loss_fn_config",), len(config), MAX_TENSORS, "settings")
        check_finite(("loss_fn_config",), config)
        for name, value in config.items():
            check_text(("loss_fn_config", name), name, MAX_NAME_CHARS)
            if isinstance(value, str):
                check_text(("loss_fn_config", name), value, MAX_TEXT_CHARS)
        # `TensorData` limits each tensor, but all tensors of a batch are dense at the same time.
        cells = 0
        for position, datum in enumerate(self.data):
            for name, tensor in datum.loss_fn_inputs.items():
                cells += tensor.size if tensor.is_sparse else 0
                if cells > MAX_DENSE_CELLS:
                    raise WireError.at(
                        ("data", position, "loss_fn_inputs", name, "shape"),
                        f"the sparse tensors up to this one have {cells} elements; at most "
                        f"{MAX_DENSE_CELLS} are allowed in one request. Send it in parts.",
                        "too_many",
                    )


def _datum_at(value: Any, position: int) -> Datum:
    try:
        return Datum.model_validate(value)
    except WireError as error:
        raise error.under("data", position) from None


def _expected(name: str, found: Any, expected: str, *inner: str) -> WireError:
    if found is None and not inner:
        return WireError.at((name,), "Field required", "missing")
    return WireError.at((name, *inner), f"expected {expected}, not {json_kind(found)}.")


def _read_step(value: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The three fields of a pass, with its input under `key`."""
    model_id, seq_id = value.get("model_id"), value.get("seq_id")
    if not isinstance(model_id, str):
        raise _expected("model_id", model_id, "a string")
    if seq_id is not None and (isinstance(seq_id, bool) or not isinstance(seq_id, int)):
        raise _expected("seq_id", seq_id, "an integer")
    if seq_id is not None and not 0 <= seq_id < 2**31:
        raise WireError.at(("seq_id",), f"{seq_id} is not an integer from 0 to 2**31 - 1.")
    if key not in value:
        raise WireError.at((key,), "Field required", "missing")
    try:
        work = ForwardBackwardInput.model_validate(value[key])
    except WireError as error:
        raise error.under(key) from None
    return {key: work, "model_id": model_id, "seq_id": seq_id}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ForwardBackwardRequest(Payload):
    """A forward and backward pass; adds to the gradients of the model."""

    forward_backward_input: ForwardBackwardInput
    model_id: ModelID
    #: Step number: steps of a model run in this order, each once. Clients always set it.
    seq_id: int | None = None

    @classmethod
    def _read(cls, value: Mapping[str, Any]) -> Self:
        return cls(**_read_step(value, "forward_backward_input"))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ForwardRequest(Payload):
    """A forward pass only; changes nothing."""

    forward_input: ForwardBackwardInput
    model_id: ModelID
    #: As in `ForwardBackwardRequest`.
    seq_id: int | None = None

    @classmethod
    def _read(cls, value: Mapping[str, Any]) -> Self:
        return cls(**_read_step(value, "forward_input"))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ForwardBackwardOutput(Payload):
    """The result of a pass. The loss is a metric: `metrics["loss:sum"]`."""

    #: The format of `loss_fn_outputs`.
    loss_fn_output_type: str
    #: For each example its tensors by name, usually `logprobs` in the shape of the targets.
    loss_fn_outputs: list[LossFnOutput]
    #: Keys are `name:reducer`; the reducer says how to merge the chunks of a batch.
    metrics: dict[str, float] = field(default_factory=dict)

    def _shown(self) -> Iterable[tuple[str, Any]]:
        yield "metrics", self.metrics
        yield "loss_fn_outputs", self.loss_fn_outputs
        yield "loss_fn_output_type", self.loss_fn_output_type

    def _repr_html_(self) -> str:
        return _metrics_html(self.metrics)

    def runs(self) -> Iterator[list[LossFnOutput]]:
        """Groups of adjacent outputs with the same names, dtypes and trailing shapes."""
        run: list[LossFnOutput] = []
        layout: dict[str, tuple[Any, ...]] = {}
        for output in self.loss_fn_outputs:
            here = {name: (t.dtype, *(t.shape or [0])[1:]) for name, t in output.items()}
            if run and here != layout:
                yield run
                run = []
            run.append(output)
            layout = here
        if run:
            yield run

    @classmethod
    def _read(cls, value: Mapping[str, Any]) -> Self:
        output_type = value.get("loss_fn_output_type")
        if not isinstance(output_type, str):
            raise _expected("loss_fn_output_type", output_type, "a string")
        outputs = value.get("loss_fn_outputs")
        if not isinstance(outputs, list):
            raise _expected("loss_fn_outputs", outputs, "a list")
        read = []
        for position, tensors in enumerate(outputs):
            if not isinstance(tensors, Mapping):
                raise WireError.at(
                    ("loss_fn_outputs", position), f"expected an object, not {json_kind(tensors)}."
                )
            try:
                read.append({name: TensorData.model_validate(t) for name, t in tensors.items()})
            except WireError as error:
                raise error.under("loss_fn_outputs", position) from None
        metrics = value.get("metrics")
        if metrics is None:
            metrics = {}
        if not isinstance(metrics, Mapping):
            raise _expected("metrics", metrics, "an object")
        for name, number in metrics.items():
            if isinstance(number, bool) or not isinstance(number, (int, float)):
                raise _expected("metrics", number, "a number", name)
        return cls(output_type, read, {name: float(number) for name, number in metrics.items()})


# -- optimizer steps -----------------------------------------------------------------------------


class OptimStepRequest(StrictModel):
    """Apply the accumulated gradients and clear them."""

    #: Sent as `adam_params` for AdamW and as `optimizer_params` for any other optimizer.
    optim_params: OptimParams = Field(
        validation_alias=AliasChoices("optim_params", "adam_params", "optimizer_params")
    )
    model_id: ModelID
    #: As in `ForwardBackwardRequest`.
    seq_id: int | None = None
    type: Literal["optim_step"] = "optim_step"

    @model_validator(mode="before")
    @classmethod
    def _by_tag(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        for key in ("optimizer_params", "optim_params"):
            params = value.get(key)
            if isinstance(params, Mapping) and params.get("type") == "dimuon":
                return {**value, key: DimuonParams.model_validate(dict(params))}
        return value

    @model_serializer(mode="plain")
    def _as_sent(self, info: SerializationInfo) -> dict[str, Any]:
        key = "adam_params" if isinstance(self.optim_params, AdamParams) else "optimizer_params"
        seq_id = {} if info.exclude_none and self.seq_id is None else {"seq_id": self.seq_id}
        params = self.optim_params.model_dump(exclude_none=bool(info.exclude_none))
        return {"model_id": self.model_id, **seq_id, "type": self.type, key: params}


class OptimStepResponse(LenientModel):
    """The result of an optimizer step."""

    #: Such as the gradient norm.
    metrics: dict[str, float] | None = None

    def _repr_html_(self) -> str:
        return _metrics_html(self.metrics or {})


def _metrics_html(metrics: Mapping[str, float]) -> str:
    return display.table(("metric", "value"), list(metrics.items()))
