"""The rows of a decode step, which a GPU reads, equal what each sequence says of itself."""

import dataclasses
import random
import weakref

import numpy as np
import numpy.typing as npt

from tinkex.engine.sampling.decode_rows import (
    FIELDS,
    IDS,
    KEY_HIGH,
    KEY_LOW,
    LAST,
    POSITION,
    REPEATS,
    SHIFT,
    SLOT,
    STATE,
    STEP,
    TEMPERATURE,
    TICK,
    DecodeRows,
    pad_biases,
)
from tinkex.engine.sampling.kv_pages import Pages
from tinkex.engine.sampling.sequences import Request, SampleSequence, SamplingConfig, Stops
from tinkex.engine.sampling.token_sampling import sample_key

ROWS = 16
SPARE_STATE = 40
SAMPLING = SamplingConfig(temperature=1.0, top_k=None, top_p=None, seed=0)
BIASED = dataclasses.replace(SAMPLING, bias_tokens=(7, 9), biases=(1.5, -100.0))


def sequence_with(
    sampling: SamplingConfig, *, prompt: int = 4, new: int = 40, adapter: str | None = None
) -> SampleSequence:
    request = Request(
        ticket=1,
        adapter=adapter,
        prompt=list(range(prompt)),
        samples=1,
        max_new_tokens=new,
        sampling=sampling,
        stops=Stops(),
    )
    return SampleSequence(request=request, index=prompt % 3)


def random_sequence(rng: random.Random, pages: Pages) -> SampleSequence:
    sampling = dataclasses.replace(
        rng.choice([SAMPLING, SAMPLING, BIASED]),
        temperature=rng.choice([0.0, 0.7, 1.0]),
        seed=rng.getrandbits(62),
        top_k=rng.choice([None, None, 5]),
    )
    adapter = rng.choice([None, "a", "b", "c"])
    sequence = sequence_with(
        sampling, prompt=rng.randint(1, 30), new=rng.randint(2, 60), adapter=adapter
    )
    sequence.tokens.append(rng.randrange(100))
    page_table = pages.allocate(pages.needed(sequence.length), max_pages=30)
    assert page_table is not None
    sequence.page_table = page_table
    sequence.state = rng.randrange(SPARE_STATE)
    return sequence


def expected_row(sequence: SampleSequence, adapters: list[str], steps: int) -> dict[int, int]:
    request = sequence.request
    key = sample_key(request.sampling.seed, sequence.index)
    position = sequence.length - 1
    low, high = np.array([key & 0xFFFFFFFF, key >> 32], np.uint32).view(np.int32).tolist()
    return {
        IDS: sequence.tokens[-1],
        POSITION: position,
        LAST: position + sequence.tokens_ahead(steps) - 1,
        SLOT: -1 if request.adapter is None else adapters.index(request.adapter),
        STEP: len(sequence.tokens),
        TICK: -1 if request.sampling.needs_host else 0,
        TEMPERATURE: int(np.array(request.sampling.temperature, np.float32).view(np.int32)),
        KEY_LOW: low,
        KEY_HIGH: high,
        SHIFT: 0,
        STATE: SPARE_STATE if sequence.state is None else sequence.state,
        REPEATS: steps - 1 if request.sampling.needs_host else 0,
    }


def check(
    rows: DecodeRows,
    fields: npt.NDArray[np.int32],
    table: npt.NDArray[np.int32],
    running: list[SampleSequence],
    steps: int,
) -> None:
    assert set(rows.adapters) == {s.request.adapter for s in running} - {None}
    assert rows.biased == pad_biases(running)[1].any()
    for row, sequence in enumerate(running):
        found = {name: int(fields[name, row]) for name in range(FIELDS)}
        assert found == expected_row(sequence, rows.adapters, steps)
        pages = [
            page
            for extent in sequence.page_table.extents
            for page in range(extent.first, extent.first + extent.count)
        ]
        assert table[row, : len(pages)].tolist() == pages
    # Spare rows read and write nothing.
    assert (fields[[LAST, SLOT], len(running) :] == -1).all()
    assert (fields[STATE, len(running) :] == SPARE_STATE).all()


def test_rows_follow_sequences_that_grow_come_and_go() -> None:
    rng = random.Random(1)
    pages = Pages(400, 4)
    fields, table = np.zeros((FIELDS, ROWS), np.int32), np.zeros((ROWS, 30), np.int32)
    rows = DecodeRows(fields, table, spare_state=SPARE_STATE)
    running: list[SampleSequence] = []
    for _ in range(300):
        for sequence in [s for s in running if s.tokens_left == 0 or rng.random() < 0.01]:
            pages.release(sequence.page_table)
            running.remove(sequence)
        while not running or (len(running) < ROWS and rng.random() < 0.1):
            running.insert(rng.randint(0, len(running)), random_sequence(rng, pages))
        steps = rng.choice([1, 8])
        rows.choose(tuple(running))
        rows.update(tuple(running), steps)
        check(rows, fields, table, running, steps)
        for sequence in running:
            for _ in range(sequence.tokens_ahead(steps)):
                sequence.tokens.append(rng.randrange(100))
            while pages.needed(sequence.length) > sequence.page_table.page_count:
                assert pages.extend(sequence.page_table, max_pages=30)


def test_a_sequence_that_was_preempted_has_its_new_pages() -> None:
    rng, pages = random.Random(0), Pages(40, 4)
    fields, table = np.zeros((FIELDS, ROWS), np.int32), np.zeros((ROWS, 30), np.int32)
    rows = DecodeRows(fields, table, spare_state=SPARE_STATE)
    sequence = random_sequence(rng, pages)
    rows.choose((sequence,))
    assert rows.update((sequence,), 1)
    assert not rows.update((sequence,), 1)
    taken = pages.allocate(1, max_pages=1)
    count = sequence.page_table.page_count
    pages.release(sequence.page_table)
    moved = pages.allocate(count, max_pages=30)
    assert taken is not None
    assert moved is not None
    sequence.page_table, sequence.state = moved, 5
    rows.choose((sequence,))
    assert rows.update((sequence,), 1)
    check(rows, fields, table, [sequence], 1)


def test_rows_do_not_keep_finished_sequences() -> None:
    fields, table = np.zeros((FIELDS, ROWS), np.int32), np.zeros((ROWS, 30), np.int32)
    rows = DecodeRows(fields, table, spare_state=SPARE_STATE)
    sequence = random_sequence(random.Random(0), Pages(40, 4))
    rows.choose((sequence,))
    rows.update((sequence,), 1)
    kept = weakref.ref(sequence)
    del sequence
    assert kept() is None


def test_biases_of_sequences_that_a_device_samples_are_in_its_tables() -> None:
    truncated = dataclasses.replace(BIASED, top_p=0.5)
    many = dataclasses.replace(SAMPLING, bias_tokens=tuple(range(65)), biases=(1.0,) * 65)
    sequences = [sequence_with(each) for each in (SAMPLING, BIASED, truncated, many)]
    assert [one.request.sampling.needs_host for one in sequences] == [False, False, True, True]
    tokens, biases = pad_biases(sequences)
    assert tokens.shape == biases.shape == (4, 64)
    assert tokens[1, :3].tolist() == [7, 9, 0]
    assert biases[1, :3].tolist() == [1.5, -100.0, 0.0]
    # Others have nothing to add: the host adds the biases of those that it samples.
    assert not biases[[0, 2, 3]].any()
