"""The rows of a decode step on the host: what a graph reads of each sequence.

Most fields of a row stay the same as long as the same sequences run. They are written once; before
each burst only those that change with every token follow.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tinkex.engine.sampling.kv_pages import PageTable
from tinkex.engine.sampling.sequences import DEVICE_BIASES, SampleSequence
from tinkex.engine.sampling.token_sampling import sample_key

# S sequences

#: Fields of a row, all of 32 bits.
IDS, POSITION, LAST, SLOT, STEP, TICK, TEMPERATURE, KEY_LOW, KEY_HIGH = range(9)
#: What is added to the rotary position, the slot of the state of recurrent layers, and how many more
#: steps of the burst compute the same token again.
SHIFT, STATE, REPEATS = range(9, 12)
FIELDS = 12

_NO_LIMIT = np.iinfo(np.int32).max


class DecodeRows:
    """Row i belongs to the i-th sequence; the rows after the last sequence are spare."""

    def __init__(
        self,
        fields: npt.NDArray[np.int32],
        table: npt.NDArray[np.int32],
        *,
        spare_state: int = 0,
    ) -> None:
        """
        Fills `fields` [FIELDS, rows] and `table` [rows, pages], the pages of each row.

        `spare_state` is the slot of a state that belongs to no sequence.
        """
        self._fields, self._table, self._spare_state = fields, table, spare_state
        #: The adapters of the sequences. The slot of an adapter is its place in this list.
        self.adapters: list[str] = []
        #: Whether the device adds biases to the logits of some rows.
        self.biased = False
        # Weak, because an idle sampler should not keep the prompts of its last sequences.
        self._known: list[weakref.ref[SampleSequence]] = []
        #: What the rows of `table` hold.
        self._tabled: list[tuple[PageTable, int] | None] = [None] * len(table)
        #: Position of the last prompt token, most tokens of a look, most tokens of the sequence.
        self._prompt_S = self._most_ahead_S = self._max_new_S = np.zeros(0, np.int32)

    def choose(self, sequences: Sequence[SampleSequence]) -> None:
        """Sets the sequences, and all that stays the same as long as they run."""
        if [known() for known in self._known] == list(sequences):
            return
        self._known = []
        requests = [sequence.request for sequence in sequences]
        samplings = [request.sampling for request in requests]
        adapters = [request.adapter for request in requests]
        self.adapters = [key for key in dict.fromkeys(adapters) if key is not None]
        self.biased = any(each.bias_tokens and not each.needs_host for each in samplings)
        slots = {None: -1} | {key: at for at, key in enumerate(self.adapters)}
        self._prompt_S = np.array([len(request.prompt) - 1 for request in requests], np.int32)
        self._max_new_S = np.array([request.max_new_tokens for request in requests], np.int32)
        self._most_ahead_S = np.array(
            [1 if each.needs_host else _NO_LIMIT for each in samplings], np.int32
        )
        keys = np.array(
            [sample_key(each.request.sampling.seed, each.index) for each in sequences], np.uint64
        )
        fields, count = self._fields, len(sequences)
        fields[:] = 0
        fields[[LAST, SLOT]] = -1
        fields[STATE] = self._spare_state
        fields[SHIFT, :count] = [each.position - each.length + 1 for each in sequences]
        fields[SLOT, :count] = [slots[key] for key in adapters]
        fields[TICK, :count] = [-1 if each.needs_host else 0 for each in samplings]
        fields[TEMPERATURE, :count] = np.array(
            [each.temperature for each in samplings], np.float32
        ).view(np.int32)
        fields[KEY_LOW, :count] = keys.astype(np.uint32).view(np.int32)
        fields[KEY_HIGH, :count] = (keys >> np.uint64(32)).astype(np.uint32).view(np.int32)
        self._known = [weakref.ref(sequence) for sequence in sequences]

    def update(self, sequences: Sequence[SampleSequence], steps: int) -> bool:
        """Writes the position of each of the chosen sequences. Returns whether pages changed."""
        fields, count = self._fields, len(sequences)
        tokens_S = np.array([len(sequence.tokens) for sequence in sequences], np.int32)
        positions_S = self._prompt_S + tokens_S
        ahead_S = np.minimum(self._max_new_S - tokens_S, np.minimum(self._most_ahead_S, steps))
        fields[IDS, :count] = [sequence.tokens[-1] for sequence in sequences]
        fields[POSITION, :count] = positions_S
        fields[LAST, :count] = positions_S + ahead_S - 1
        fields[STEP, :count] = tokens_S
        fields[REPEATS, :count] = np.where(self._most_ahead_S == 1, steps - 1, 0)
        for row, sequence in enumerate(sequences):
            if sequence.state is not None:
                fields[STATE, row] = sequence.state
        changed = False
        for row, sequence in enumerate(sequences):
            pages, known = sequence.page_table, self._tabled[row]
            if known is None or known[0] is not pages or known[1] != pages.page_count:
                self._write_pages(row, pages)
                changed = True
        return changed

    def _write_pages(self, row: int, pages: PageTable) -> None:
        known, count = self._tabled[row], pages.page_count
        # A page table grows at its end.
        done = known[1] if known is not None and known[0] is pages else 0
        end = count
        for extent in reversed(pages.extents):
            begin = end - extent.count
            if end == done + 1:  # the usual case: one page more
                self._table[row, done] = extent.first + extent.count - 1
            elif end > done:
                self._table[row, begin:end] = np.arange(extent.first, extent.first + extent.count)
            else:
                break
            end = begin
        self._tabled[row] = pages, count


def pad_biases(
    sequences: Sequence[SampleSequence],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Tables [S, DEVICE_BIASES] of the rows that the device samples; the host adds its own."""
    tokens = np.zeros((len(sequences), DEVICE_BIASES), np.int64)
    biases = np.zeros((len(sequences), DEVICE_BIASES), np.float32)
    for row, sequence in enumerate(sequences):
        sampling = sequence.request.sampling
        if not sampling.needs_host and (count := len(sampling.bias_tokens)):
            tokens[row, :count] = sampling.bias_tokens
            biases[row, :count] = sampling.biases
    return tokens, biases
