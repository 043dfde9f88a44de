"""Parts of matrices in FP8, as the numbers that they mean."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tinkex.engine.ranks.fp8_parts import Fp8Slice, find_scales

#: The shapes of a matrix and of its scales: one for all, and one for each block.
SHAPES = [
    ((8, 12), ()),
    ((8, 12), (1,)),
    ((8, 12), (2, 3)),
    ((3, 8, 12), (3, 2, 3)),
]
PARTS: list[Any] = [
    slice(None),
    slice(3, 7),
    (slice(None), slice(5, 11)),
]


@pytest.mark.parametrize(("shape", "of_scales"), SHAPES)
def test_a_part_has_the_numbers_of_the_whole(
    shape: tuple[int, ...], of_scales: tuple[int, ...], tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(of_scales, generator=generator) + 0.5
    file = tmp_path / "model.safetensors"
    save_file({"m": matrix, "m_scale_inv": scales}, file)
    wide = scales
    if len(of_scales) > 1:
        wide = scales.repeat_interleave(4, dim=-2).repeat_interleave(4, dim=-1)
    expected = matrix.float() * wide
    with safe_open(file, framework="pt") as opened:
        read = Fp8Slice(opened.get_slice("m"), find_scales(tmp_path)["m"], "m")
        for part in PARTS:
            inner = part if isinstance(part, tuple) else (part,)
            index = (1, *inner) if len(shape) > 2 else part
            assert torch.equal(read[index], expected[index])
