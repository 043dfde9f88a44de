"""What the ranks of one engine tell each other: sums of tensors, and decisions of rank 0.

Tensors go through a process group of torch: NCCL between GPUs, gloo between CPUs. Decisions go
through a socket between rank 0 and each other rank (`messages`), in the order of the calls.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

import torch
import torch.distributed
from torch import Tensor

from tinkex.wire.engine_protocol import RANK_LOST_STATUS

#: Some of its names are in no stub.
dist: Any = torch.distributed

log = logging.getLogger("tinkex.engine.ranks")

T = TypeVar("T")


class Decisions(Protocol):
    """How rank 0 tells the others what it has decided."""

    def tell(self, value: object) -> None:
        """On rank 0."""
        ...

    def hear(self) -> Any:
        """On the others: waits for the next decision."""
        ...


class ProcessGroup:
    """
    The ranks of one engine. All of them make the same calls in the same order.

    A rank that does not answer in `timeout_s` ends the process, and so the engine: what it computed
    is rebuilt by the next one.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        device: torch.device,
        rendezvous: Path,
        decisions: Decisions,
        timeout_s: float,
        on_loss: Callable[[str], NoReturn] | None = None,
    ) -> None:
        """Waits until all ranks have joined. `rendezvous` is a file in a folder of this user."""
        self.rank, self.size = rank, size
        self._device = device
        self._decisions = decisions
        self._timeout_s = timeout_s
        self._on_loss = on_loss or end_process
        timeout = timedelta(seconds=timeout_s)
        store = dist.FileStore(str(rendezvous), size)
        store.set_timeout(timeout)
        backend: Any
        try:
            # All ranks are on this machine: nothing listens on its network.
            for library in ("GLOO", "NCCL"):
                os.environ.setdefault(f"{library}_SOCKET_IFNAME", loopback())
            if device.type == "cuda":
                torch.cuda.set_device(device)
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                backend = dist.ProcessGroupNCCL(store, rank, size, options)
            else:
                backend = dist.ProcessGroupGloo(store, rank, size, timeout)
            self._backend = backend
            # NCCL connects with the first collective.
            self.sum_(torch.zeros(1, device=device))
        except RuntimeError as error:
            self._lost(error)

    # -- tensors ----------------------------------------------------------------------------------

    def sum_(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place; equal on all of them."""
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def max_(self, tensor: Tensor) -> Tensor:
        """The largest over all ranks, in place."""
        return self._reduce(tensor, dist.ReduceOp.MAX)

    def first(self, tensor: Tensor) -> Tensor:
        """That of rank 0, on all ranks."""
        own = tensor.clone(memory_format=torch.contiguous_format)
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._wait(lambda: self._backend.broadcast([own], options))
        return own

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """On rank 0: the tensors of all ranks, which have one shape. Empty on the others."""
        own = tensor.contiguous()
        parts = [torch.empty_like(own) for _ in range(self.size if self.rank == 0 else 0)]
        options = dist.GatherOptions()
        options.rootRank = 0
        self._wait(lambda: self._backend.gather([parts] if parts else [], [own], options))
        return parts

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, which have one shape."""
        own = tensor.contiguous()
        parts = [torch.empty_like(own) for _ in range(self.size)]
        self._wait(lambda: self._backend.allgather([parts], [own]))
        return parts

    def sum_of(self, number: float) -> float:
        return float(self.sum_(torch.tensor(number, dtype=torch.float64, device=self._device)))

    def largest(self, number: float) -> float:
        return float(self.max_(torch.tensor(number, dtype=torch.float64, device=self._device)))

    def least(self, number: int) -> int:
        return -int(self.max_(torch.tensor(-number, dtype=torch.int64, device=self._device)))

    def _reduce(self, tensor: Tensor, operation: Any) -> Tensor:
        options = dist.AllreduceOptions()
        options.reduceOp = operation
        if tensor.is_contiguous():
            self._wait(lambda: self._backend.allreduce([tensor], options))
            return tensor
        whole = tensor.contiguous()
        self._wait(lambda: self._backend.allreduce([whole], options))
        return tensor.copy_(whole)

    def _wait(self, start: Callable[[], Any]) -> None:
        try:
            with torch.no_grad():
                start().wait()
        except RuntimeError as error:
            self._lost(error)

    def _lost(self, error: Exception) -> NoReturn:
        self._on_loss(
            f"rank {self.rank} of {self.size} lost the others, or one did not answer for "
            f"{self._timeout_s:g} s: {error}"
        )

    # -- decisions of rank 0 ----------------------------------------------------------------------

    def agree(self, decide: Callable[[], T]) -> T:
        """
        What rank 0 decides, on all ranks.

        For everything that depends on clocks, free memory, threads, files or randomness. If rank 0
        raises an error, all ranks raise it.
        """
        if self.rank:
            succeeded, value = self._decisions.hear()
            if not succeeded:
                raise value
            return value  # type: ignore[no-any-return]
        try:
            decided = decide()
        except Exception as error:
            self._decisions.tell((False, error))
            raise
        self._decisions.tell((True, decided))
        return decided

    def same_outcome(self, failed: bool) -> None:
        """Ends all ranks if what each has done by itself failed on some of them only."""
        count = int(self.sum_of(float(failed)))
        if count not in (0, self.size):
            self._on_loss(f"{count} of {self.size} ranks failed in what the others could do")

    def wait_for_all(self) -> None:
        """Returns when all ranks have called it."""
        self.same_outcome(False)

    def close(self) -> None:
        del self._backend


def agreed(group: ProcessGroup | None, decide: Callable[[], T]) -> T:
    """What rank 0 decides; without ranks, what this process does."""
    return decide() if group is None else group.agree(decide)


def end_process(reason: str) -> NoReturn:
    log.critical("%s; this process ends, and the engine with it", reason)
    os._exit(RANK_LOST_STATUS)


def loopback() -> str:
    """The name of the network interface of this machine for itself."""
    return "lo" if os.path.exists("/sys/class/net/lo") else "lo0"


def own_range(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """Which of `size` rows a rank has: as many as the others, give or take one."""
    return rank * size // ranks, (rank + 1) * size // ranks


def padded(tensor: Tensor, length: int, dim: int) -> Tensor:
    """The tensor with zeros up to this length, because collectives need equal shapes."""
    missing = length - tensor.shape[dim]
    if not missing:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_zeros(shape)], dim=dim)


def without_padding(parts: Sequence[Tensor], lengths: Sequence[int], dim: int) -> Tensor:
    """The parts of all ranks as one tensor."""
    return torch.cat(
        [part.narrow(dim, 0, length) for part, length in zip(parts, lengths, strict=True)], dim=dim
    )
