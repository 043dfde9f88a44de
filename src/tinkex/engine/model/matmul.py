"""Matrix products with float32 results, and linear layers for few rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def mm_float32(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right` with a float32 result that was never rounded to a shorter format."""
    if left.dtype == torch.float32 and right.dtype == torch.float32:
        return left @ right
    if left.is_cuda and left.dtype == right.dtype:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def add_mm_float32(total: Tensor, left: Tensor, right: Tensor) -> None:
    """`total += left @ right` for a float32 `total`."""
    if left.dtype == torch.float32 and right.dtype == torch.float32:
        total.addmm_(left, right)
    else:
        total.add_(mm_float32(left, right))


#: Up to so many rows a CPU multiplies faster with the weight on the left. Measured on two cores
#: with MKL over a 135M model's layers and head: 1 row 43 -> 20 ms, 2 rows 72 -> 19, 4 rows 61 -> 25,
#: 8 rows 55 -> 44, from 12 rows on no gain.
FEW_TOKENS = 8


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`F.linear` for passes without gradients, quick for few rows too. The result is fresh."""
    rows = len(x_TI)
    if rows > FEW_TOKENS or x_TI.is_cuda or x_TI.dtype != torch.float32:
        return F.linear(x_TI, weight_OI, bias_O)
    # One row would be a matrix-vector product, which runs on one core: two rows cost half as much.
    columns = F.pad(x_TI, (0, 0, 0, 1)).t() if rows == 1 else x_TI.t()
    y_TO = torch.mm(weight_OI, columns)[:, :rows].t().contiguous()
    return y_TO if bias_O is None else y_TO.add_(bias_O)
