"""Selects device and number format, measures free memory, and classifies device errors."""

from __future__ import annotations

import importlib.util
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from tinkex.engine import machine_memory
from tinkex.models.cache import cache_folder
from tinkex.wire.engine_settings import EngineSettings

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class SamplingProfile:
    """How sampling suits a kind of device."""

    #: Tokens in a page of the KV cache. Small pages waste little at the end of a sequence. A CPU
    #: reads contiguous pages as one range, a GPU kernel reads one page at a time.
    page_tokens: int
    #: Maximum prompt tokens of a prefill step, alone and while sequences are decoding.
    max_prefill_tokens: int
    max_prefill_tokens_while_decoding: int
    #: Limits of idle pages in the prefix cache, as a fraction of all pages and in bytes. On a CPU
    #: pages that were never written take no memory, so without a limit an idle server would grow.
    max_idle_fraction: float
    max_idle_bytes: int
    #: Number of noise values generated at a time.
    noise_block: int


SAMPLING_PROFILES = {
    "cpu": SamplingProfile(
        page_tokens=16,
        max_prefill_tokens=2048,
        max_prefill_tokens_while_decoding=512,
        max_idle_fraction=0.25,
        max_idle_bytes=1 << 29,
        # Small, so that the noise stays in the processor's cache.
        noise_block=1 << 16,
    ),
    "cuda": SamplingProfile(
        page_tokens=64,
        max_prefill_tokens=8192,
        max_prefill_tokens_while_decoding=2048,
        max_idle_fraction=1.0,
        max_idle_bytes=1 << 40,
        noise_block=1 << 26,
    ),
}


class UnusableDevice(ValueError):
    """The device does not exist or is not supported; the hint says what to use."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def choose_device(settings: EngineSettings) -> torch.device:
    if settings.device == "auto":
        if not torch.cuda.is_available():
            return torch.device("cpu")
        count = torch.cuda.device_count()
        return torch.device("cuda" if count == 1 else f"cuda:{settings.gpu % count}")
    try:
        device = torch.device(settings.device)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UnusableDevice(
            f"the device {settings.device!r} is not supported.",
            hint="Use --device cpu, --device cuda (or cuda:1, ...), or leave it out.",
        )
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UnusableDevice(
            f"the device is {settings.device!r}, but torch finds no GPU on this machine.",
            hint="Use --device cpu, or install a torch build with CUDA.",
        )
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        found, names = ("1 GPU", "cuda:0") if count == 1 else (f"{count} GPUs", "")
        raise UnusableDevice(
            f"the device is {settings.device!r}, but torch finds {found}.",
            hint=f"Use --device {names or f'cuda:0 to cuda:{count - 1}'}.",
        )
    return device


def choose_dtype(settings: EngineSettings, device: torch.device) -> torch.dtype:
    if settings.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return DTYPES[settings.dtype]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error means that the device ran out of memory."""
    return isinstance(error, torch.OutOfMemoryError)


def is_device_lost(error: BaseException) -> bool:
    """
    Whether this process can no longer use the device: after such an error any call may fail.

    Recognized by the message, because not all of these errors have their own type: after a failed
    device-side assertion, or without memory for its kernels, cuBLAS raises a plain RuntimeError.
    """
    if not isinstance(error, RuntimeError) or is_out_of_memory(error):
        return False
    return any(words in str(error) for words in _DEVICE_ERRORS)


_DEVICE_ERRORS = ("CUDA error", "cuDNN error", "Triton Error")


def prepare_kernels() -> bool:
    """
    Whether Triton kernels can be used. Call before the first import of Triton.

    Compiled kernels are executable code: they are kept where only the user can write.
    """
    if "TRITON_CACHE_DIR" not in os.environ:
        folder = cache_folder() / "kernels"
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o700)
            os.environ["TRITON_CACHE_DIR"] = str(folder)
    return importlib.util.find_spec("triton") is not None


def prepare_determinism() -> None:
    """Library settings that `deterministic_kernels` needs; call before the first matrix product."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # The engine never reads uninitialized memory, so filling it would only cost time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@contextmanager
def deterministic_kernels(enabled: bool) -> Iterator[None]:
    """
    Uses kernels that add in a fixed order; the default gradient kernels of attention do not.

    Use it around the backward pass only: elsewhere torch rejects kernels without such a variant.
    """
    torch.use_deterministic_algorithms(enabled)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def available_bytes(device: torch.device) -> int:
    """Memory that can be allocated now without freeing any."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # Memory that torch's caching allocator holds but does not use counts as free.
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free) + cached
    return machine_memory.free_bytes()


def release_cached(device: torch.device) -> None:
    """Returns memory that torch holds and does not use: its pieces may be too small to use."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def total_bytes(device: torch.device) -> int:
    """All memory of the device, used or not; on a CPU at most the container's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return machine_memory.total_bytes()


def used_bytes(device: torch.device) -> int:
    """Memory of the device that this process uses now."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        # Not Linux: the peak so far, in bytes on macOS.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
