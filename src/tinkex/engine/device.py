"""Which device and number format to use, and how much memory there is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

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


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device had no memory for it."""
    return isinstance(error, torch.OutOfMemoryError)


def is_device_lost(error: BaseException) -> bool:
    """
    Whether the device may be lost to this process: after such an error every call may fail.

    Not all of them have a type of their own. Without memory for its kernels, or after a failed
    assertion on the device, cuBLAS says that it could not do a product.
    """
    if not isinstance(error, RuntimeError) or is_out_of_memory(error):
        return False
    return any(words in str(error) for words in _DEVICE_ERRORS)


_DEVICE_ERRORS = ("CUDA error", "cuDNN error", "Triton Error")


def prepare_determinism() -> None:
    """Before the first product: what `deterministic_kernels` needs of libraries."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Nothing here reads what it has not written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@contextmanager
def deterministic_kernels(wanted: bool) -> Iterator[None]:
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
