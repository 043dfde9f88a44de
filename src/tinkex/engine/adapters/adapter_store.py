"""Keeps training adapters on the device, in host memory or on disk, and loads them when needed.

When memory is short, the least recently used adapters are evicted. Adapters that a micro-batch uses
stay on the device. The spill folder belongs to the running engine; leftovers of an earlier engine
are removed.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tinkex.engine.adapters import checkpoints
from tinkex.engine.adapters.adapters import TrainingAdapter
from tinkex.engine.adapters.memory_plan import (
    MemoryPlan,
    Resident,
    Tier,
    choose_evictions,
)
from tinkex.engine.device import available_bytes, used_bytes
from tinkex.engine.ranks.process_group import ProcessGroup, agreed
from tinkex.engine.sampling.interface import Sampler
from tinkex.wire.errors import UserFailure
from tinkex.wire.text_format import format_bytes

log = logging.getLogger(__name__)

HOST = torch.device("cpu")

#: Fraction of the free host memory for adapters evicted from the device.
HOST_FRACTION = 0.5

#: The plan is intact if this process has, or can get, at least this fraction of its memory.
OWN_FRACTION = 0.95


@dataclass(kw_only=True, eq=False)
class _Entry:
    adapter: TrainingAdapter
    size: int
    tier: Tier = Tier.DEVICE
    last_used: int = 0
    #: Its folder while it is on disk.
    folder: Path | None = None
    #: Pass slices that use it. Weak references: a failed pass must not pin the adapter forever.
    users: weakref.WeakSet[object] = field(default_factory=weakref.WeakSet)


@dataclass(frozen=True, kw_only=True)
class TierUsage:
    count: int
    size: int


class AdapterStore:
    def __init__(
        self,
        *,
        plan: MemoryPlan,
        device: torch.device,
        base_model: str,
        folder: Path | None,
        host_bytes: int | None,
        limit_bytes: int | None,
        disk_reserve: int = 0,
        clock: Callable[[], int],
        group: ProcessGroup | None = None,
    ) -> None:
        """With `group`, each rank has its part of all adapters, and all ranks move the same ones."""
        self._group = group
        self._plan = plan
        self._device = device
        self._base_model = base_model
        self._host_bytes = host_bytes
        #: Memory limit for everything together, if one is set.
        self._limit_bytes = limit_bytes
        #: Free space on the disk that adapters leave.
        self._disk_reserve = disk_reserve
        #: Counts uses, together with those of the sampler's adapters.
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._spills = 0
        #: Adapter being loaded back; excluded from the host usage.
        self._loading: _Entry | None = None
        #: Adapter that room is being made for; never evicted by that call.
        self._protected: _Entry | None = None
        self._folder = folder
        if folder is not None and folder.exists() and (group is None or not group.rank):
            shutil.rmtree(folder)
        self.sampler: Sampler | None = None
        #: Size of the KV cache, once it is created.
        self.cache_bytes = 0

    # -- a mapping from model ids to adapters on the device ---------------------------------------

    def __contains__(self, model_id: str) -> bool:
        return model_id in self._entries

    def __getitem__(self, model_id: str) -> TrainingAdapter:
        """The adapter, loaded onto the device if necessary, which may evict others."""
        entry = self._entries[model_id]
        entry.last_used = self._clock()
        if entry.tier is not Tier.DEVICE:
            self._load(model_id, entry)
        return entry.adapter

    def __delitem__(self, model_id: str) -> None:
        entry = self._entries.pop(model_id)
        if entry.folder is not None:
            self._remove_folder(entry.folder)

    def add(self, model_id: str, size: int, what: str, make: Callable[[], TrainingAdapter]) -> None:
        """Makes room for a new adapter, then creates it."""
        self.make_adapter_room(size, what)
        self._entries[model_id] = _Entry(adapter=make(), size=size, last_used=self._clock())

    def on_device(self, model_id: str) -> bool:
        return self._entries[model_id].tier is Tier.DEVICE

    def pin(self, model_id: str, user: object) -> None:
        """Keeps the adapter on the device as long as `user` exists."""
        self._entries[model_id].users.add(user)

    def usage(self, tier: Tier) -> TierUsage:
        sizes = [entry.size for entry in self._entries.values() if entry.tier is tier]
        return TierUsage(count=len(sizes), size=sum(sizes))

    # -- eviction ---------------------------------------------------------------------------------

    def make_adapter_room(self, size: int, what: str) -> None:
        """Evicts adapters until one of this size fits. Raises `UserFailure` with the sizes."""
        if size > self._plan.adapters:
            raise UserFailure(
                f"{what} needs {format_bytes(size)}; the server has "
                f"{format_bytes(self._plan.adapters)} for adapters ({self._plan.describe()}). Use "
                "a smaller rank, train fewer kinds of layers, or give the server more memory."
            )
        over = sum(resident.size for resident in self._residents()) + size - self._plan.adapters
        self._evict(max(over, size - self.available()))
        self._require(size, what, "Use a smaller rank, or train fewer kinds of layers")

    def must_wait(self, size: int) -> bool:
        """Whether an adapter of this size fits only after adapters in use become idle."""
        if size > self._plan.adapters:
            return False
        residents = self._residents()
        busy = sum(resident.size for resident in residents if resident.busy)
        idle = sum(resident.size for resident in residents) - busy
        return busy + size > self._plan.adapters or size > self.available() + idle

    def make_pass_room(self, model_id: str, size: int, what: str, advice: str) -> None:
        """
        Makes room for the activations of a pass of this model, besides its own adapter.

        The plan includes them, but other programs may use that memory.
        """
        self._protected = self._entries[model_id]
        try:
            self._evict(size - self.available())
            self._require(size, what, advice)
        finally:
            self._protected = None

    def available(self) -> int:
        """Memory that can be allocated now, within the limit if one is set."""
        free = shared_bytes(self._device, self._group)
        if self._limit_bytes is None:
            return free
        used = self._plan.base + self.cache_bytes + sum(r.size for r in self._residents())
        return max(0, min(free, self._limit_bytes - used))

    def explain_full(self, error: Exception) -> Exception:
        """
        The failure of a request that does not fit in memory alone, with the numbers.

        If other programs have taken memory that belongs to the plan, the error itself: then the
        engine ends, and the next one waits until the memory is free again.
        """
        own = available_bytes(self._device) + used_bytes(self._device)
        if own < OWN_FRACTION * self._plan.total:
            return error
        return UserFailure(
            f"this request does not fit in the memory of the server, even alone: "
            f"{format_bytes(self.available())} are free ({self._plan.describe()}). Shorten the "
            "prompt, request fewer logprobs, or give the server more memory."
        )

    def _require(self, size: int, what: str, advice: str) -> None:
        available = self.available()
        if size > available:
            busy = sum(resident.size for resident in self._residents() if resident.busy)
            raise UserFailure(
                f"{what} needs about {format_bytes(size)}; {format_bytes(available)} are free on "
                f"the server (base model {format_bytes(self._plan.base)}, cache "
                f"{format_bytes(self.cache_bytes)}, adapters in use {format_bytes(busy)}). "
                f"{advice}, or give the server more memory."
            )

    def _residents(self) -> list[Resident]:
        """All adapters on the device, including those of the sampler."""
        own = [
            Resident(
                name=model_id,
                size=entry.size,
                last_used=entry.last_used,
                busy=bool(entry.users) or entry is self._protected,
            )
            for model_id, entry in self._entries.items()
            if entry.tier is Tier.DEVICE
        ]
        return own if self.sampler is None else [*own, *self.sampler.adapter_residents()]

    def _evict(self, shortage: int) -> None:
        # Passes that have failed may keep their adapters longer on one rank than on another.
        chosen = agreed(self._group, lambda: choose_evictions(self._residents(), shortage))
        for name in chosen:
            if name in self._entries:
                self._spill(name, self._entries[name])
            elif self.sampler is not None:
                self.sampler.drop_adapter(name)

    # -- moves between device, host memory and disk -----------------------------------------------

    def _spill(self, model_id: str, entry: _Entry) -> None:
        if self._device.type == "cpu" or not self._make_host_room(entry.size):
            self._to_disk(model_id, entry)
            return
        log.info(
            "adapter of model %s moved to host memory (%s)", model_id, format_bytes(entry.size)
        )
        entry.adapter.move(HOST)
        entry.tier = Tier.HOST

    def _make_host_room(self, size: int) -> bool:
        budget = self._host_bytes
        residents = [
            Resident(name=model_id, size=entry.size, last_used=entry.last_used)
            for model_id, entry in self._entries.items()
            if entry.tier is Tier.HOST and entry is not self._loading
        ]
        used = sum(resident.size for resident in residents)
        if budget is None:
            # Adapters already in host memory are part of the budget.
            budget = int((shared_bytes(HOST, self._group) + used) * HOST_FRACTION)
        if size > budget:
            return False
        for name in choose_evictions(residents, used + size - budget):
            self._to_disk(name, self._entries[name])
        return True

    def _to_disk(self, model_id: str, entry: _Entry) -> None:
        self._spills += 1
        folder = self._spill_folder() / str(self._spills)
        log.info("adapter of model %s written to disk (%s)", model_id, format_bytes(entry.size))
        if (failure := self._write(entry, folder)) is not None:
            raise checkpoints.WriteFailed(
                f"the adapter of model {model_id} cannot leave the memory for others: {failure}"
            )
        entry.adapter.release()
        entry.tier, entry.folder = Tier.DISK, folder

    def _write(self, entry: _Entry, folder: Path) -> str | None:
        """Writes the adapter, or the part of this rank. Returns why that failed, on all ranks."""
        failure = None
        try:
            with entry.adapter.alone():
                files = checkpoints.snapshot_files(entry.adapter, self._base_model)
                checkpoints.write(files, self._own(folder), reserve=self._disk_reserve)
        except checkpoints.WriteFailed as error:
            failure = str(error)
        if self._group is not None and self._group.largest(failure is not None):
            self._remove_folder(folder)  # of the ranks that could write
            return failure or "another rank could not write its part"
        return failure

    def _own(self, folder: Path) -> Path:
        """Each rank has a part of its own, with the bits of its gradients."""
        return folder if self._group is None else folder / str(self._group.rank)

    def _load(self, model_id: str, entry: _Entry) -> None:
        self._loading = entry
        try:
            self.make_adapter_room(entry.size, f"model {model_id}")
        finally:
            self._loading = None
        if entry.tier is Tier.HOST:
            entry.adapter.move(self._device)
        elif entry.folder is not None:
            entry.adapter.allocate(self._device)
            try:
                with entry.adapter.alone():
                    checkpoints.restore(entry.adapter, self._own(entry.folder))
            except BaseException:
                entry.adapter.release()  # it is still complete on disk
                raise
            self._remove_folder(entry.folder)
        log.info(
            "adapter of model %s loaded to the device (%s)", model_id, format_bytes(entry.size)
        )
        entry.tier, entry.folder = Tier.DEVICE, None

    def _remove_folder(self, folder: Path) -> None:
        if self._group is not None:
            self._group.wait_for_all()  # they may still read it
            if self._group.rank:
                return
        shutil.rmtree(folder, ignore_errors=True)

    def _spill_folder(self) -> Path:
        if self._folder is None:
            self._folder = agreed(self._group, self._make_spill_folder)
        return self._folder

    def _make_spill_folder(self) -> Path:
        folder = Path(tempfile.mkdtemp(prefix="tinkex-spill-"))
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        return folder


def shared_bytes(device: torch.device, group: ProcessGroup | None) -> int:
    """Memory that each rank can allocate now: the least of all; they share that of the host."""
    free = available_bytes(device)
    if group is None:
        return free
    return group.least(free if device.type == "cuda" else free // group.size)
