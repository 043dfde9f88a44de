"""Which device and number format to use, how much memory there is, and products in float32."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
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


def is_full(error: BaseException) -> bool:
    """Whether the device had no memory for it."""
    return isinstance(error, torch.OutOfMemoryError)


def is_broken(error: BaseException) -> bool:
    """
    Whether the device may be lost to this process: after such an error every call may fail.

    Not all of them have a type of their own. Without memory for its kernels, or after a failed
    assertion on the device, cuBLAS says that it could not do a product.
    """
    if not isinstance(error, RuntimeError) or is_full(error):
        return False
    return any(words in str(error) for words in _DEVICE_ERRORS)


_DEVICE_ERRORS = ("CUDA error", "cuDNN error", "Triton Error")


def prepare_to_repeat() -> None:
    """Before the first product: what `repeating` needs of libraries."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Nothing here reads what it has not written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@contextmanager
def repeating(wanted: bool) -> Iterator[None]:
    """
    Kernels that add in a fixed order; those of attention's gradients add as blocks come.

    For a backward pass alone: there are kernels without such an order, which would be refused.
    """
    torch.use_deterministic_algorithms(wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def available_bytes(device: torch.device) -> int:
    """Memory that could be taken now without pushing anything out."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # torch keeps what was freed for itself: to us it is free all the same.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free) + kept
    limits = [size for size in (_machine_bytes(), _container_bytes()) if size is not None]
    if limits:
        return min(limits)
    # Not Linux: half of what the machine has is the careful guess.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _machine_bytes() -> int | None:
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _container_bytes() -> int | None:
    """What a container may still take; the machine's own figure knows nothing of that limit."""
    try:
        most = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        taken = int(Path("/sys/fs/cgroup/memory.current").read_text())
        # Pages of files that were read are given up when somebody needs the memory.
        files = 0
        for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines():
            if line.startswith("inactive_file "):
                files = int(line.split()[1])
    except (OSError, ValueError):
        return None
    return None if most == "max" else max(0, int(most) - taken + files)


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
FEW_ROWS = 8


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`F.linear` for passes without gradients, quick for few rows too. The result is fresh."""
    rows = len(x_TI)
    if rows > FEW_ROWS or x_TI.is_cuda or x_TI.dtype != torch.float32:
        return F.linear(x_TI, weight_OI, bias_O)
    # One row would be a matrix-vector product, which runs on one core: two rows cost half as much.
    columns = F.pad(x_TI, (0, 0, 0, 1)).t() if rows == 1 else x_TI.t()
    y_TO = torch.mm(weight_OI, columns)[:, :rows].t().contiguous()
    return y_TO if bias_O is None else y_TO.add_(bias_O)
