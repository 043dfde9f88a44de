"""The sizes of the experts (`experts`) of a model that is not loaded."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from tinkex.engine.model.targets import ROUTERS

Shape = tuple[int, ...]

#: The last projection of an expert, in files with a matrix or with a tensor for each projection.
DOWN = frozenset({"down_proj", "w2", "output_linear"})

_EXPERT = re.compile(r"^(.*\bexperts)\.(\d+)\.(.+)$")


@dataclass(frozen=True, kw_only=True)
class ExpertsShape:
    """The routed experts of a layer."""

    count: int
    hidden: int
    inner: int
    gated: bool


def is_of_expert(name: str) -> bool:
    """Whether a tensor of a layer belongs to one of its experts."""
    return _EXPERT.match(name) is not None


def is_router(path: str) -> bool:
    return bool(ROUTERS & set(path.split(".")))


def find_experts(tensors: Mapping[str, Shape], hidden: int) -> dict[str, ExpertsShape]:
    """The experts of a layer by their path."""
    counts: defaultdict[str, int] = defaultdict(int)
    #: The numbers of one expert's first and last projections.
    first: defaultdict[str, int] = defaultdict(int)
    last: defaultdict[str, int] = defaultdict(int)
    for key, shape in tensors.items():
        if (match := _EXPERT.match(key)) is not None:
            counts[match[1]] = max(counts[match[1]], int(match[2]) + 1)
            if match[2] == "0" and len(shape) == 2:
                sizes = last if DOWN & set(match[3].split(".")) else first
                sizes[match[1]] += math.prod(shape)
        elif len(shape) == 3 and not key.endswith("conv1d.weight"):
            parent, _, leaf = key.removesuffix(".weight").rpartition(".")
            # Granite has them beside the router.
            path = parent if parent.endswith("experts") else f"{parent}.experts"
            counts[path] = shape[0]
            (last if leaf in DOWN else first)[path] += math.prod(shape[1:])
    return {
        path: ExpertsShape(
            count=count,
            hidden=hidden,
            inner=last[path] // hidden,
            gated=first[path] == 2 * last[path],
        )
        for path, count in counts.items()
    }
