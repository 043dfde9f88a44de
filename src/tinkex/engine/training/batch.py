"""Packs checked data into the tensors of one micro-batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinkex.engine.model.attention import Packing
from tinkex.engine.model.image_places import packed_positions
from tinkex.engine.training.request_checks import CheckedDatum

# N tokens of one datum, K targets of one token, T packed tokens


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The tokens of several data back to back, as tensors."""

    ids_T: Tensor
    packing: Packing
    targets_TK: Tensor


def count_fitting(lengths: Iterable[int], max_tokens: int) -> int:
    """How many of the next data fit one micro-batch. A datum longer than that runs alone."""
    tokens = count = 0
    for length in lengths:
        if count and tokens + length > max_tokens:
            break
        tokens += length
        count += 1
    return count


def pack(data: Sequence[CheckedDatum], device: torch.device) -> Batch:
    width = max(datum.targets_NK.shape[1] for datum in data)
    lengths = [len(datum.tokens_N) for datum in data]
    positions = packed_positions([(datum.images, 0, len(datum.tokens_N)) for datum in data])
    return Batch(
        ids_T=to_tensor([datum.tokens_N for datum in data], device),
        packing=Packing.of(lengths, device=device, positions=positions),
        targets_TK=to_tensor([pad_columns(datum.targets_NK, width) for datum in data], device),
    )


def pack_inputs(data: Sequence[CheckedDatum], device: torch.device) -> dict[str, Tensor]:
    """The loss inputs of several data as [T, K], where K is the largest number of targets."""
    width = max(datum.targets_NK.shape[1] for datum in data)
    return {
        name: to_tensor([pad_columns(datum.inputs_NK[name], width) for datum in data], device)
        for name in data[0].inputs_NK
    }


def to_tensor(parts: Sequence[npt.NDArray[np.generic]], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate(parts)).to(device)


def pad_columns(values_NK: npt.NDArray[np.generic], width: int) -> npt.NDArray[np.generic]:
    """Pads to `width` columns with zeros: weight 0 excludes them from loss and gradient."""
    missing = width - values_NK.shape[1]
    return np.pad(values_NK, ((0, 0), (0, missing))) if missing else values_NK
