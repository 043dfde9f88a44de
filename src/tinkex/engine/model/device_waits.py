"""Finds code that waits for the device, which a CUDA graph cannot record.

CUDA refuses such code only while a graph is recorded, and then nothing is computed. This finds it
without a recording, on a device of any kind, and names the operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: Operations whose result the host reads, or whose shape depends on numbers of the device.
READS = frozenset(
    {
        *("_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero"),
        *("bincount", "nonzero_static", "_unique2", "unique_consecutive", "unique_dim"),
    }
)
#: Operations that wait if an index is a mask or is on the host. A list of numbers is not seen: torch
#: moves it to the device before.
INDEXED = frozenset({"_unsafe_index", "index", "index_put", "index_put_", "_index_put_impl_"})
#: Operations that may copy between the host and the device.
COPIES = frozenset({"_to_copy", "copy_"})


class WaitsForDevice(RuntimeError):
    """The message names the operation."""


class NothingWaits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises `WaitsForDevice` for an operation that waits. Only in the thread that enters it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device.type

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():
            # Here operations come whole, as made of others.
            with self:
                decomposed = func.decompose(*args, **kwargs)
            if decomposed is not NotImplemented:
                return decomposed
        name = func.overloadpacket.__name__
        if (
            name in READS
            or (name in INDEXED and self._has_waiting_index(args[1]))
            or (name == "repeat_interleave" and func._overloadname.endswith("Tensor"))
        ):
            raise WaitsForDevice(f"{func} waits for the device")
        result = func(*args, **kwargs)
        # A tensor of numbers of the host: `torch.tensor` on the device.
        if name == "lift_fresh" and result.device.type == self._device:
            raise WaitsForDevice("a tensor of constants is copied to the device")
        if name in COPIES:
            tensors = [each for each in (*tree_leaves(args), result) if isinstance(each, Tensor)]
            if len({each.device.type for each in tensors}) > 1:
                raise WaitsForDevice(f"{func} copies between the host and the device")
        return result

    def _has_waiting_index(self, indices: Sequence[Tensor | None]) -> bool:
        masks = (torch.bool, torch.uint8)
        return any(
            each is not None and (each.dtype in masks or each.device.type != self._device)
            for each in indices
        )
