"""Which device and number format to use, how much memory there is, and products in float32."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from tinkex.engine.settings import EngineSettings

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def choose_device(settings: EngineSettings) -> torch.device:
    if settings.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(settings.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device {settings.device!r} was asked for and this torch sees no GPU. "
            "Use --device cpu, or install a torch build with CUDA."
        )
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {settings.device!r} is not supported; use cpu, cuda or auto.")
    return device


def choose_dtype(settings: EngineSettings, device: torch.device) -> torch.dtype:
    if settings.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return DTYPES[settings.dtype]


def available_bytes(device: torch.device) -> int:
    """Memory that could be taken now without pushing anything out."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: half of what the machine has is the careful guess
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


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
