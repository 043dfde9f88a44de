"""Checked rows as packed tensors: one micro-batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinkex.engine.model.attention import Packing
from tinkex.engine.training.request_checks import CheckedDatum

# N tokens of one datum, K targets of one token, T packed tokens


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows back to back, as tensors."""

    ids_T: Tensor
    packing: Packing
    targets_TK: Tensor


def count_fitting(lengths: Iterable[int], max_tokens: int) -> int:
    """How many of the next rows go into one micro-batch; a longer one goes alone."""
    tokens = count = 0
    for length in lengths:
        if count and tokens + length > max_tokens:
            break
        tokens += length
        count += 1
    return count


def pack(rows: Sequence[CheckedDatum], device: torch.device) -> Batch:
    width = max(row.targets_NK.shape[1] for row in rows)
    return Batch(
        ids_T=to_tensor([row.tokens_N for row in rows], device),
        packing=Packing.of([len(row.tokens_N) for row in rows], device=device),
        targets_TK=to_tensor([pad_columns(row.targets_NK, width) for row in rows], device),
    )


def pack_inputs(rows: Sequence[CheckedDatum], device: torch.device) -> dict[str, Tensor]:
    """What a loss reads of the tokens of several rows: [T, K], K the widest of theirs."""
    width = max(row.targets_NK.shape[1] for row in rows)
    return {
        name: to_tensor([pad_columns(row.inputs_NK[name], width) for row in rows], device)
        for name in rows[0].inputs_NK
    }


def to_tensor(parts: Sequence[npt.NDArray[np.generic]], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate(parts)).to(device)


def pad_columns(values_NK: npt.NDArray[np.generic], width: int) -> npt.NDArray[np.generic]:
    """Padded to `width` columns with zeros: weight 0 leaves them out of loss and gradient."""
    missing = width - values_NK.shape[1]
    return np.pad(values_NK, ((0, 0), (0, missing))) if missing else values_NK
