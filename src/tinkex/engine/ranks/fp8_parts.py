"""Weights in FP8: the part of a rank, multiplied by its scales when it is read.

A matrix has a scale for each of its blocks. A part may begin within a block.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from tinkex.engine.model.unsupported import UnsupportedModel
from tinkex.models.weight_file_checks import weight_files

#: What follows the name of a matrix in the name of its scales.
SCALES = "_scale_inv"
#: What safetensors calls the numbers.
FP8 = "F8_E4M3"


def find_scales(folder: Path) -> dict[str, Any]:
    """The scales in a folder, or slices of them, by the names of their matrices."""
    found: dict[str, Any] = {}
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as opened:
            names = [key for key in opened.keys() if key.endswith(SCALES)]  # noqa: SIM118
            for key in names:
                scales = opened.get_slice(key)
                # A slice of one number without dimensions cannot be read.
                found[key.removesuffix(SCALES)] = (
                    scales if scales.get_shape() else opened.get_tensor(key)[None]
                )
    return found


class Fp8Slice:
    """A matrix in a file, or one for each expert, as the numbers that it means."""

    def __init__(self, whole: Any, scales: Any, key: str) -> None:
        if whole.get_dtype() != FP8:
            raise UnsupportedModel(
                f"{key} has scales, but its numbers are {whole.get_dtype()}. With several GPUs, "
                f"only {FP8} is read. Serve it on one GPU (--gpus-per-replica 1)."
            )
        self._whole, self._scales = whole, scales

    def get_shape(self) -> list[int]:
        shape: list[int] = self._whole.get_shape()
        return shape

    def __getitem__(self, index: Any) -> Tensor:
        given = index if isinstance(index, tuple) else (index,)
        shape = self.get_shape()
        others = given[: len(shape) - 2]
        numbers: Tensor = self._whole[index].float()
        scales: Tensor = self._scales[others] if others else self._scales[:]
        if scales.dtype == torch.uint8:  # exponents
            scales = (scales.float() - 127).exp2()
        if scales.dim() < 2:  # one for all
            scales = scales.reshape(1, 1)
        for dim in (-2, -1):
            at = len(shape) + dim
            part = given[at] if at < len(given) else slice(None)
            block = shape[dim] // scales.shape[dim]
            blocks = torch.arange(shape[dim])[part] // block
            scales = scales.index_select(dim, blocks)
        return numbers * scales.float()
