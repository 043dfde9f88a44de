"""Checks of a training request.

`check_request` makes all of them before anything is computed, so a refused request changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from tinkex.engine.input_checks import (
    NONE_PREPARED,
    Limits,
    PreparedImages,
    check_input,
    check_vocabulary,
)
from tinkex.engine.model.image_places import NO_IMAGES, ImagePlaces
from tinkex.engine.training.losses import CUSTOM, LOSSES, AnyLoss, CustomLoss, Loss
from tinkex.wire.errors import UserFailure
from tinkex.wire.inputs import Datum
from tinkex.wire.tensors import TensorData
from tinkex.wire.training import ForwardBackwardInput

# N tokens of one datum, K targets of one token, T packed tokens

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class CheckedDatum:
    """One datum of a request that passed all checks."""

    #: With placeholders for images.
    tokens_N: Ints
    images: ImagePlaces = NO_IMAGES
    targets_NK: Ints
    #: Loss inputs, including config values repeated for every token. A custom loss gets its inputs
    #: in their original shapes and types.
    inputs_NK: Mapping[str, npt.NDArray[np.generic]]
    #: Original shape of `target_tokens`, [N] or [N, K]. The returned logprobs have the same shape.
    shape: tuple[int, ...]


def check_request(
    work: ForwardBackwardInput,
    limits: Limits,
    *,
    backward: bool,
    custom: Mapping[str, CustomLoss] = MappingProxyType({}),
    images: PreparedImages = NONE_PREPARED,
) -> tuple[AnyLoss, list[CheckedDatum]]:
    """The loss and the checked data of a request. Raises `UserFailure` that names what is wrong."""
    if work.loss_fn == CUSTOM:
        own = find_custom_loss(work.loss_fn_config or {}, custom)
        _check_not_empty(work)
        return own, [
            _check_custom_datum(index, datum, own, limits, images)
            for index, datum in enumerate(work.data)
        ]
    loss = LOSSES.get(work.loss_fn)
    if loss is None:
        raise UserFailure(
            f"loss_fn {work.loss_fn!r} is not supported by this server. "
            f"Supported: {', '.join((*LOSSES, CUSTOM))}."
        )
    config = check_config(loss, work.loss_fn_config or {})
    _check_not_empty(work)
    data = [
        _check_datum(index, datum, loss, config, limits, images, backward=backward)
        for index, datum in enumerate(work.data)
    ]
    return loss, data


def _check_not_empty(work: ForwardBackwardInput) -> None:
    if not work.data:
        raise UserFailure("`data` is empty; send at least one datum.")


def find_custom_loss(
    config: Mapping[str, float | str], custom: Mapping[str, CustomLoss]
) -> CustomLoss:
    """The registered loss that a request's config names."""
    loss_id = config.get("loss_id")
    if not isinstance(loss_id, str) or len(config) != 1:
        raise UserFailure(
            f"loss_fn_config of loss {CUSTOM!r} has {sorted(config) or 'no keys'}; it must have "
            "only `loss_id`, the id returned by create_custom_loss."
        )
    if loss_id not in custom:
        raise unknown_custom_loss(loss_id)
    return custom[loss_id]


def unknown_custom_loss(loss_id: str) -> UserFailure:
    return UserFailure(
        f"loss_fn_config: there is no custom loss {loss_id[:80]!r} in this session. Create it with "
        "create_custom_loss and use the id it returns."
    )


def check_config(loss: Loss, given: Mapping[str, float | str]) -> dict[str, float]:
    config = dict(loss.config)
    for key, value in given.items():
        if key not in config:
            allowed = ", ".join(config) or "none"
            raise UserFailure(
                f"loss_fn_config: {key!r} is unknown to loss {loss.name!r}. Its keys: {allowed}."
            )
        if isinstance(value, str) or not math.isfinite(value):
            raise UserFailure(f"loss_fn_config: {key} must be a finite number, not {value!r}.")
        config[key] = float(value)
    low, high = config.get("clip_low_threshold", 0.0), config.get("clip_high_threshold", math.inf)
    if low > high:
        raise UserFailure(
            f"loss_fn_config: clip_low_threshold {low} is above clip_high_threshold {high}. "
            "Both are absolute bounds of the ratio, such as 0.8 and 1.2."
        )
    return config


def _check_datum(
    index: int,
    datum: Datum,
    loss: Loss,
    config: Mapping[str, float],
    limits: Limits,
    images: PreparedImages,
    *,
    backward: bool,
) -> CheckedDatum:
    where = f"data[{index}]"
    tokens_N, places = check_input(datum.model_input, limits, images, where=f"{where}.model_input")
    given = datum.loss_fn_inputs
    known = {"target_tokens", *loss.inputs, *config}
    if unknown := sorted(set(given) - known):
        raise UserFailure(
            f"{where}.loss_fn_inputs: {unknown[0]!r} is not an input of loss {loss.name!r}. "
            f"Its inputs: {', '.join(sorted(known))}."
        )
    targets_NK, shape = _check_targets(
        given,
        len(tokens_N),
        name=loss.name,
        takes_2d=loss.takes_2d,
        limits=limits,
        where=where,
    )
    inputs: dict[str, Floats] = {}
    for name in loss.inputs:
        if name in given:
            inputs[name] = _check_floats(given[name], name, shape, where=where)
        elif name == "weights" and not backward:
            # A forward pass is usually run for its logprobs; without weights its loss is the sum.
            inputs[name] = np.ones(targets_NK.shape, np.float32)
        else:
            needed = " and ".join(loss.inputs)
            raise UserFailure(
                f"{where}.loss_fn_inputs: {name!r} is missing; loss {loss.name!r} needs "
                f"target_tokens and {needed}."
            )
    for name, value in config.items():
        if name in given:
            inputs[name] = _check_floats(given[name], name, shape, where=where)
        else:
            inputs[name] = np.full(targets_NK.shape, value, np.float32)
    if loss.name == "gspo":
        _check_sequence_mask(inputs, where=where)
    return CheckedDatum(
        tokens_N=tokens_N, images=places, targets_NK=targets_NK, inputs_NK=inputs, shape=shape
    )


def _check_sequence_mask(inputs: Mapping[str, Floats], *, where: str) -> None:
    where = f"{where}.loss_fn_inputs.sequence_ratio_mask"
    mask = inputs["sequence_ratio_mask"]
    if not np.isin(mask, (0.0, 1.0)).all():
        other = mask[~np.isin(mask, (0.0, 1.0))][0]
        raise UserFailure(
            f"{where}: contains {other}; allowed are 1.0, which includes a token in the sequence "
            "ratio, and 0.0, which excludes it."
        )
    if not mask.any() and inputs["advantages"].any():
        raise UserFailure(
            f"{where}: is 0.0 everywhere, so the sequence has no ratio. Set it to 1.0 for the "
            "sampled tokens."
        )


def _check_custom_datum(
    index: int, datum: Datum, loss: CustomLoss, limits: Limits, images: PreparedImages
) -> CheckedDatum:
    where = f"data[{index}]"
    tokens_N, places = check_input(datum.model_input, limits, images, where=f"{where}.model_input")
    given = datum.loss_fn_inputs
    # A datum may have inputs that the loss does not declare; they are ignored. `logprobs` are
    # always those of the model, even if the datum has an input of that name.
    own, *declared = loss.graph.inputs
    known = {"target_tokens", *(one.name for one in declared)}
    targets_NK, shape = _check_targets(
        given,
        len(tokens_N),
        name=loss.graph.name,
        takes_2d=own.rank == 2,
        limits=limits,
        where=where,
    )
    if len(shape) != own.rank:
        raise UserFailure(
            f"{where}.loss_fn_inputs.target_tokens: has shape {list(shape)}; custom loss "
            f"{loss.graph.name!r} expects logprobs of {own.rank} dimensions."
        )
    inputs = {}
    for one in declared:
        if one.name not in given:
            raise UserFailure(
                f"{where}.loss_fn_inputs: {one.name!r} is missing; custom loss "
                f"{loss.graph.name!r} needs {', '.join(sorted(known))}."
            )
        values = given[one.name].to_numpy()
        if values.ndim != one.rank:
            raise UserFailure(
                f"{where}.loss_fn_inputs.{one.name}: has shape {list(values.shape)}; custom loss "
                f"{loss.graph.name!r} expects {one.rank} dimensions."
            )
        inputs[one.name] = values
    return CheckedDatum(
        tokens_N=tokens_N, images=places, targets_NK=targets_NK, inputs_NK=inputs, shape=shape
    )


def _check_targets(
    given: Mapping[str, TensorData],
    length: int,
    *,
    name: str,
    takes_2d: bool,
    limits: Limits,
    where: str,
) -> tuple[Ints, tuple[int, ...]]:
    where = f"{where}.loss_fn_inputs.target_tokens"
    if "target_tokens" not in given:
        raise UserFailure(f"{where}: is missing; every loss needs one target for each token.")
    tensor = given["target_tokens"]
    if tensor.dtype != "int64":
        raise UserFailure(f"{where}: has dtype {tensor.dtype}; token ids are int64.")
    # Cells missing from a sparse tensor are token 0, because clients drop explicit zeros.
    targets = tensor.to_numpy()
    if targets.ndim == 2 and not takes_2d:
        raise UserFailure(
            f"{where}: has shape {list(targets.shape)}; loss {name!r} takes one target for "
            "each token, shape [N]. Of the built-in losses only cross_entropy takes [N, K]."
        )
    if targets.ndim not in (1, 2) or targets.shape[0] != length or 0 in targets.shape:
        raise UserFailure(
            f"{where}: has shape {list(targets.shape)} for {length} input tokens; give one target "
            f"for each token, shape [{length}]" + (f" or [{length}, K]." if takes_2d else ".")
        )
    check_vocabulary(targets, limits, where=where)
    return targets.reshape(length, -1), targets.shape


def _check_floats(tensor: TensorData, name: str, shape: tuple[int, ...], *, where: str) -> Floats:
    where = f"{where}.loss_fn_inputs.{name}"
    values = tensor.to_numpy().astype(np.float32)
    if values.shape != shape:
        raise UserFailure(
            f"{where}: has shape {list(values.shape)} and target_tokens {list(shape)}; give one "
            "number for each target (0.0 excludes a token from the loss)."
        )
    if not np.isfinite(values).all():
        bad = values[~np.isfinite(values)][0]
        raise UserFailure(f"{where}: contains {bad}; only finite numbers are allowed.")
    return values.reshape(shape[0], -1)
