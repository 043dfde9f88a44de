"""Whether a model fits a machine, before it is loaded: for the engine, and for `tinkex models`.

Without torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tinkex.engine.adapters.memory_plan import (
    BATCH_TOKENS,
    MIN_STATES,
    MIN_TOKENS,
    SLACK_FRACTION,
    DoesNotFit,
    plan_memory,
    reserved_of,
)
from tinkex.engine.adapters.model_needs import ModelNeeds, predicted_needs, read_shape
from tinkex.engine.model.image_models import IMAGE_TYPES
from tinkex.engine.model.model_shape import LayerShape, ModelShape, UnknownShape
from tinkex.engine.model.step_memory import PLANNED_RANK
from tinkex.engine.model.targets import Target
from tinkex.engine.model.tower_shape import IMAGE_TOKENS
from tinkex.engine.model.unsupported import UnsupportedModel, refuse_quantization
from tinkex.engine.ranks.divided_shape import fitting_counts
from tinkex.models.families import family_of
from tinkex.models.gguf import GgufError
from tinkex.models.line_up import ASSUMED_TOWER, LineUpModel, line_up, tensors_of
from tinkex.models.weight_file_checks import RefusedFolder
from tinkex.wire.engine_settings import EngineSettings
from tinkex.wire.text_format import format_bytes


def smallest_total(needs: ModelNeeds, settings: EngineSettings, *, adapters: int = 0) -> int:
    """The memory with which a plan works and has this much for adapters."""
    max_batch_tokens = settings.max_batch_tokens or BATCH_TOKENS[needs.device]
    fixed = reserved_of(needs, settings, max_batch_tokens, beside=0) + adapters
    fixed += MIN_TOKENS * (needs.activation_bytes_per_token + needs.kv_bytes_per_token)
    fixed += MIN_STATES * needs.state_bytes
    fixed += IMAGE_TOKENS[needs.device] * needs.image_bytes_per_token
    return needs.weights + math.ceil(fixed / (1 - SLACK_FRACTION)) + 1


#: A model is divided over the GPUs of one machine.
MAX_GPUS = 8


class Division(NamedTuple):
    """Over how many GPUs a model is divided, and how many adapters then train at once."""

    gpus: int
    adapters: int


def smallest_division(
    shape: ModelShape,
    settings: EngineSettings,
    *,
    element: int,
    free: int,
    rank: int = PLANNED_RANK,
) -> Division | None:
    """The fewest GPUs, more than one, on which a model and an adapter in training fit."""
    family = family_of(str(shape.config.get("model_type")))
    if family is None or not family.divided:
        return None
    for gpus in fitting_counts(shape, MAX_GPUS)[1:]:
        needs = predicted_needs(shape, device="cuda", element=element, rank=rank, gpus=gpus)
        try:
            plan = plan_memory(needs, settings, free=free - needs.weights)
        except DoesNotFit:
            continue
        if adapters := plan.adapters // needs.training_adapter:
            return Division(gpus, adapters)
    return None


def refuse_too_large(
    needs: ModelNeeds,
    settings: EngineSettings,
    *,
    free: int,
    division: Callable[[], Division | None] = lambda: None,
) -> None:
    """
    Raises `DoesNotFit` with the numbers if a model that is not loaded yet cannot be served.

    `division` finds on how many GPUs it could be.
    """
    try:
        plan_memory(needs, settings, free=free - needs.weights)
    except DoesNotFit:
        pass
    else:
        return
    kind = "the GPU" if needs.device == "cuda" else "this machine"
    dtype = "float32" if needs.element == 4 else "bfloat16"
    least = smallest_total(needs, settings)
    with_adapter = smallest_total(
        needs, settings, adapters=needs.training_adapter + needs.sampler_adapter
    )
    limits = [f"{format_bytes(max(0, free))} are free on {kind}"]
    if settings.memory_bytes is not None:
        limits.append(f"--memory-gb allows {format_bytes(settings.memory_bytes)}")
    elif least <= free:
        limits.append("by default other programs keep half of what the weights leave")
    raise DoesNotFit(
        f"in {dtype} it needs at least {format_bytes(least)} of memory, of which the weights take "
        f"{format_bytes(needs.weights)}, and {format_bytes(with_adapter)} with an adapter of rank "
        f"{needs.rank} on all layers in training and for sampling; {', and '.join(limits)}.",
        hint=_advice(
            *(needs, settings, division()), least=least, with_adapter=with_adapter, free=free
        ),
    )


def _advice(
    needs: ModelNeeds,
    settings: EngineSettings,
    division: Division | None,
    *,
    least: int,
    with_adapter: int,
    free: int,
) -> str:
    advice = []
    if division is not None:
        advice.append(f"divide it over {division.gpus} GPUs (--gpus-per-replica {division.gpus})")
    if least <= free:
        tenths = min(math.ceil(with_adapter / 1e8), math.floor(free / 1e8))
        advice.append(f"allow more memory with --memory-gb {tenths / 10}")
    if needs.element == 4 and needs.weights // 2 < free:
        advice.append(
            f"use --dtype bfloat16, whose weights take {format_bytes(needs.weights // 2)}"
        )
    machine = "a GPU" if needs.device == "cuda" else "a machine or a GPU"
    advice.append(f"use {machine} with at least {format_bytes(with_adapter)}")
    advice.append("serve a smaller model (`tinkex models` lists what fits)")
    text = ", or ".join(advice)
    return f"{text[0].upper()}{text[1:]}."


# -- models that might be served -------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A device that a model would be served on."""

    #: cpu or cuda.
    device: str
    name: str
    free: int
    total: int


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A model that might be served."""

    name: str
    type: str
    #: None if the family is not tested: then the engine finds out when it loads the model.
    served: bool | None
    #: Why it is not served, or what is not known.
    reason: str
    #: Which layers adapters change.
    trained: str
    #: None if it is not public, or cannot be read.
    shape: ModelShape | None
    #: Of all weights in bfloat16, where that is all that is known.
    weights: int | None = None

    @classmethod
    def of_line_up(cls, model: LineUpModel) -> Candidate:
        family = family_of(model.type)
        served = model.refused is None and family is not None and family.served
        reason = "" if served else model.refused or (family.notes if family else "not tested")
        shape = None
        if model.config is not None:
            config = model.config
            # The engine loads it too, and reserves memory for images.
            if images := model.type in IMAGE_TYPES:
                config = {"vision_config": ASSUMED_TOWER, **config}
            shape = ModelShape.of(config, tensors_of(config), images=images)
        return cls(
            name=model.name,
            type=model.type,
            served=served,
            reason=reason,
            trained=(model.trained or ("" if shape is None else trained(shape))) if served else "",
            shape=shape,
            weights=None if model.gigabytes is None else int(model.gigabytes * 1e9),
        )

    @classmethod
    def of_folder(cls, folder: Path) -> Candidate:
        """Raises `UnknownShape` if there is no config.json."""
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            kind = str(config["model_type"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise UnknownShape(
                f"{folder} has no config.json of a model ({error!r:.100})"
            ) from error
        family = family_of(kind)
        served = None if family is None else family.served
        shape, reason = None, ""
        try:
            shape = read_shape(folder)
        except (UnknownShape, RefusedFolder, GgufError) as error:
            reason = str(error)
        if family is not None and not family.served:
            reason = family.notes
        elif family is None:
            reason = reason or "this family is not tested: the engine compares its logits at start"
        try:
            refuse_quantization(config.get("quantization_config"))
        except UnsupportedModel as error:
            served, reason = False, str(error)
        return cls(
            name=folder.resolve().name,
            type=kind,
            served=served,
            reason=reason,
            trained="" if shape is None else trained(shape),
            shape=shape,
        )


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A candidate on a machine."""

    candidate: Candidate
    #: None if the sizes of the model are not known.
    needs: ModelNeeds | None
    weights: int | None
    #: Whether the model and an adapter in training fit; None if that is not known.
    fits: bool | None
    #: How many adapters in training fit.
    adapters: int | None
    #: The memory that the model needs with one adapter; None if it is not known.
    needed: int | None
    #: How it fits on several GPUs like this one, if it does not fit on one.
    division: Division | None = None


def candidates(folders: Iterable[Path] = ()) -> list[Candidate]:
    """The models in these folders, and the line-up of the hosted service."""
    return [*map(Candidate.of_folder, folders), *_of_line_up()]


@cache
def _of_line_up() -> tuple[Candidate, ...]:
    return tuple(map(Candidate.of_line_up, line_up()))


def fit(candidate: Candidate, machine: Machine, *, element: int, rank: int) -> Fit:
    """`element` is the size of a number in the weights."""
    if candidate.shape is None:
        weights = candidate.weights and candidate.weights * element // 2
        too_large = weights is not None and weights > machine.free
        return Fit(
            candidate=candidate,
            needs=None,
            weights=weights,
            fits=False if too_large else None,
            adapters=None,
            needed=None,
        )
    needs = predicted_needs(candidate.shape, device=machine.device, element=element, rank=rank)
    settings = EngineSettings(name=candidate.name, folder=Path())
    try:
        plan = plan_memory(needs, settings, free=machine.free - needs.weights)
        adapters = plan.adapters // needs.training_adapter
    except DoesNotFit:
        adapters = 0
    division = None
    if not adapters and machine.device == "cuda":
        division = smallest_division(
            candidate.shape, settings, element=element, free=machine.free, rank=rank
        )
    return Fit(
        candidate=candidate,
        needs=needs,
        weights=needs.weights,
        fits=adapters > 0,
        adapters=adapters,
        needed=smallest_total(
            needs, settings, adapters=needs.training_adapter + needs.sampler_adapter
        ),
        division=division,
    )


#: Projections in the order in which a layer computes them.
PROJECTIONS = ("q_a", "kv_a", "q", "k", "v", "z", "o", "gate", "up", "x", "down", "out")
#: The parts of a model in the order in which they are named.
PARTS = ("attention", "recurrent", "MLP", "experts", "shared experts", "output")


def trained(shape: ModelShape) -> str:
    """Which projections have adapters, in words."""
    parts: dict[str, set[str]] = {part: set() for part in PARTS}
    for layer in shape.layers:
        for target in layer.targets:
            parts[_part(layer, target)].add(_short(target))
    words = [
        "experts (shared-outer)"
        if part == "experts"
        else f"{part} ({' '.join(sorted(found, key=_order))})"
        for part, found in parts.items()
        if found
    ]
    return ", ".join([*words, "output"])


def _order(projection: str) -> tuple[int, str]:
    known = PROJECTIONS.index(projection) if projection in PROJECTIONS else len(PROJECTIONS)
    return known, projection


def _part(layer: LayerShape, target: Target) -> str:
    if target.experts is not None:
        return "experts"
    if target.kind == "attn":
        return "attention" if layer.recurrent is None else "recurrent"
    return "shared experts" if "shared_expert" in target.name else "MLP"


def _short(target: Target) -> str:
    leaf = target.name.rpartition(".")[2]
    return leaf.removeprefix("in_proj_").removesuffix("_with_mqa").removesuffix("_proj")
