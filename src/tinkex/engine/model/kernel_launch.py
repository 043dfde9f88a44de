"""Launches of Triton kernels that cost the processor little.

Triton finds the compiled form of a kernel anew for every launch, which takes several times as long as
the launch itself. Small models wait for that: a training step launches some hundred kernels. Here the
compiled form is found by what it can depend on: the format and the alignment of every tensor, and the
value of every other argument.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: Some arguments count tokens, so there is no end to the keys. More than this many are forgotten.
MAX_KEYS = 4096


class Launcher:
    """A kernel of Triton, as `kernel[grid](*args, **options)`, with its compiled forms."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[Any, Any] = {}

    def launch(self, grid: tuple[int, int, int], *args: Any, **options: Any) -> None:
        """`options` must follow from the arguments."""
        key = (
            torch.cuda.current_device() if args[0].is_cuda else None,
            *[(arg.dtype, arg.data_ptr() % 16) if isinstance(arg, Tensor) else arg for arg in args],
        )
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[grid](*args)
            return
        compiled = self._kernel[grid](*args, **options)
        if len(self._compiled) >= MAX_KEYS:
            self._compiled.clear()
        # Triton's interpreter returns nothing.
        if compiled is not None:
            self._compiled[key] = compiled
