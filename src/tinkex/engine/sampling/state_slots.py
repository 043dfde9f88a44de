"""Slots for the states of recurrent layers: one for each sequence, and states kept for prefixes.

A state stands for all tokens before it, and cannot be cut like keys and values. So a sequence can use
cached pages only up to a place where the state was kept. A slot holds the states of all recurrent
layers. This module handles slot numbers only; the model runner has the tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple


class CopyState(NamedTuple):
    """A state to copy before the next step. Copies are made in their order."""

    source: int
    target: int


class StateSlots:
    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count))[::-1]
        #: Slots with kept states, least recently used first, and what forgets each.
        self._kept: OrderedDict[int, Callable[[], None]] = OrderedDict()

    @property
    def kept(self) -> int:
        return len(self._kept)

    def take(self) -> int:
        """A slot for a sequence. Forgets a kept state if no other slot is free."""
        slot = self._free_slot()
        if slot is None:
            raise IndexError(f"all {self.count} states belong to sequences")
        return slot

    def keep(self, forget: Callable[[], None]) -> int | None:
        """A slot for a state to keep; None if sequences have all. `forget` is called when it goes."""
        slot = self._free_slot()
        if slot is not None:
            self._kept[slot] = forget
        return slot

    def touch(self, slot: int) -> None:
        """Marks a kept state as used."""
        self._kept.move_to_end(slot)

    def release(self, slot: int) -> None:
        self._kept.pop(slot, None)
        self._free.append(slot)

    def _free_slot(self) -> int | None:
        if not self._free and self._kept:
            slot, forget = self._kept.popitem(last=False)
            forget()
            self._free.append(slot)
        return self._free.pop() if self._free else None
