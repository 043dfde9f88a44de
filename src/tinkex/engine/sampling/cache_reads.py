"""Plans how a step reads the KV cache: which slots, and on a CPU in which contiguous ranges."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.model.attention import DecodeReads, GatheredTable, ReadRound, SlotRange
from tinkex.engine.model.base_model import BaseModel
from tinkex.engine.sampling.kv_pages import Pages
from tinkex.engine.sampling.scheduler import PrefillChunk
from tinkex.engine.sampling.sequences import SampleSequence

#: Costs of attention on a CPU, measured on two cores with 32 sequences of 32 to 512 tokens: a call
#: costs as much as reading CALL_SLOTS slots, and a gathered table as much as GATHER_CALLS calls.
CALL_SLOTS = 200
GATHER_CALLS = 8
#: Relative cost of a gathered slot, which is copied before it is read.
COPY_FACTOR = 1.3
#: Longer sequences do not fit the processor's cache, which makes copies more expensive.
MAX_GATHER_TOKENS = 384


def plan_decode_reads(
    pages: Pages,
    sequences: Sequence[SampleSequence],
    model: BaseModel,
    windows: Collection[int],
) -> dict[int | None, DecodeReads]:
    """What a decode step reads in layers without a window (None) and with each of `windows`."""
    longest = max(sequence.length for sequence in sequences)
    found: dict[int | None, DecodeReads] = {None: _decode_reads(pages, sequences, model, None)}
    for window in windows:
        slides = window < longest
        found[window] = _decode_reads(pages, sequences, model, window) if slides else found[None]
    return found


def _decode_reads(
    pages: Pages, sequences: Sequence[SampleSequence], model: BaseModel, window: int | None
) -> DecodeReads:
    if model.device.type == "cpu":
        rounds = plan_range_reads(pages, sequences, window)
        lengths = [sequence.length for sequence in sequences]
        if window is not None:
            lengths = [min(length, window) for length in lengths]
        if not gather_is_cheaper(rounds, lengths):
            return DecodeReads(rounds=rounds)
    return DecodeReads(table=gathered_table(pages, sequences, model, window))


def slot_ranges(
    pages: Pages, sequence: SampleSequence, window: int | None
) -> Iterator[tuple[int, int]]:
    """The contiguous slot ranges of the last `window` tokens of a sequence, or of all."""
    skipped = 0 if window is None else max(0, sequence.length - window)
    for start, stop in pages.slot_ranges(sequence.page_table, sequence.length):
        first = min(stop, start + skipped)
        skipped -= first - start
        if first < stop:
            yield first, stop


def plan_range_reads(
    pages: Pages, sequences: Sequence[SampleSequence], window: int | None = None
) -> list[ReadRound]:
    """
    The contiguous slot ranges that each sequence reads. Round i has the i-th range of each.

    Adjacent sequences with the same prefix read it together. If the ranges of some of them continue
    after it, these need additional calls, so they read it together only if that saves more.
    """
    left = [list(slot_ranges(pages, sequence, window))[::-1] for sequence in sequences]
    rounds: list[ReadRound] = []
    while reading := [at for at, ranges in enumerate(left) if ranges]:
        ranges_read: list[SlotRange] = []
        first = 0
        while first < len(reading):
            at = reading[first]
            start, stop = left[at][-1]
            last = first + 1
            while (
                last < len(reading)
                and reading[last] == at + last - first
                and left[reading[last]][-1][0] == start
            ):
                last += 1
            group = reading[first:last]
            common = min(left[one][-1][1] for one in group)
            longer = sum(1 for one in group if left[one][-1][1] > common)
            if longer and common - start < CALL_SLOTS * longer / max(1, len(group) - 1):
                # Not worth it: only sequences with exactly the same range read together.
                common = stop
                same = [left[one][-1][1] == stop for one in group]
                group = group[: same.index(False)] if False in same else group
            for one in group:
                end = left[one].pop()[1]
                if end > common:
                    left[one].append((common, end))
            ranges_read.append(SlotRange(start, common, at, at + len(group)))
            first += len(group)
        # All sequences have a first range.
        rounds.append(ReadRound(ranges_read, torch.tensor(reading) if rounds else None))
    return rounds


def gather_is_cheaper(rounds: Sequence[ReadRound], lengths: Sequence[int]) -> bool:
    """Whether gathering all slots into one table is cheaper than reading range by range."""
    if max(lengths) > MAX_GATHER_TOKENS:
        return False
    ranges = [each for read_round in rounds for each in read_round.ranges]
    by_range = len(ranges) * CALL_SLOTS + sum(each.stop - each.start for each in ranges)
    gathered = max(lengths) * len(lengths) * COPY_FACTOR
    return GATHER_CALLS * CALL_SLOTS + gathered < by_range


def rectangles(lengths: Sequence[int], max_slots: int) -> Iterator[tuple[int, int]]:
    """
    Ranges of adjacent sequences, each decoded in one step.

    A table has a row for each sequence, as long as the longest. It has at most `max_slots`, or one
    row.
    """
    first, longest = 0, 0
    for at, length in enumerate(lengths):
        longest = max(longest, length)
        if at > first and (at + 1 - first) * longest > max_slots:
            yield first, at
            first, longest = at, length
    yield first, len(lengths)


def slots_of(pages: Pages, chunk: PrefillChunk) -> Tensor:
    """The cache slots of a prefill's tokens up to the end of the chunk."""
    ranges = pages.slot_ranges(chunk.prefill.page_table, chunk.stop)
    return torch.cat([torch.arange(start, stop) for start, stop in ranges])


def gathered_table(
    pages: Pages,
    sequences: Sequence[SampleSequence],
    model: BaseModel,
    window: int | None = None,
) -> GatheredTable:
    """All slots that a decode step reads, as one padded table."""
    longest = max(sequence.length for sequence in sequences)
    if window is not None:
        longest = min(longest, window)
    slots = np.zeros((len(sequences), longest), np.int64)
    bias = np.zeros((len(sequences), longest), np.float32)
    for at, sequence in enumerate(sequences):
        begin = 0
        for start, stop in slot_ranges(pages, sequence, window):
            slots[at, begin : begin + stop - start] = np.arange(start, stop)
            begin += stop - start
        # Pad with an initialized slot: uninitialized cache may hold NaN, and masking does not
        # remove NaN (0 * NaN = NaN).
        slots[at, begin:] = slots[at, 0]
        bias[at, begin:] = -np.inf
    return GatheredTable(
        torch.from_numpy(slots.reshape(-1)).to(model.device),
        torch.from_numpy(bias[:, None, None, :]).to(model.device, model.dtype),
    )
