"""Every kernel of a decode step against plain torch, with NaN in all memory that has no value."""

from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tinkex.engine.model.attention_scores import Scoring
from tinkex.engine.model.lora import matrices
from tinkex.engine.model.targets import Target, make_layout
from tinkex.engine.sampling.sequences import SamplingConfig
from tinkex.engine.sampling.token_sampling import SampleStep, sample_key, sample_tokens

pytestmark = pytest.mark.gpu

#: With TRITON_INTERPRET=1 the kernels run on a CPU too.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter of Triton multiplies bfloat16 as integers.
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16
PAGE = 64
#: Whether kernels start before the ones before them have ended.
EARLY = [False, True] if DEVICE == "cuda" else [False]


@pytest.fixture(scope="module")
def ops() -> ModuleType:
    from tinkex.engine.model import decode_ops

    return decode_ops


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).to(DEVICE, DTYPE)


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def poisoned(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def gap(found: Tensor, expected: Tensor) -> float:
    """Relative difference; NaN if anything is NaN."""
    found, expected = found.double().cpu(), expected.double().cpu()
    return float((found - expected).norm() / expected.norm())


class PagedCache:
    """Keys and values of some sequences in shuffled pages, and NaN everywhere else."""

    def __init__(
        self, lengths: list[int], heads: int, size: int, value_size: int | None = None
    ) -> None:
        counts = [-(-max(length, 1) // PAGE) for length in lengths]
        order = torch.randperm(sum(counts) + 3).tolist()
        self.spare = order.pop()
        slots = (sum(counts) + 3) * PAGE
        sizes = (size, value_size or size)
        self.keys, self.values = (poisoned(slots, heads, each) for each in sizes)
        self.table = torch.full((len(lengths), max(counts) + 2), 1 << 30, dtype=torch.int32)
        self.slots = []
        for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            pages = [order.pop() for _ in range(count)]
            self.table[row, :count] = torch.tensor(pages)
            slots_of = [page * PAGE + at for page in pages for at in range(PAGE)]
            self.slots.append(slots_of)
            for cached in (self.keys, self.values):
                cached[slots_of[:length]] = random(length, *cached.shape[1:])
        self.table = self.table.to(DEVICE)


@pytest.mark.parametrize("splits", [1, 4, 32])
@pytest.mark.parametrize(
    ("groups", "heads", "size", "value_size"),
    # The last but one has the widths of MLA; the last reads fewer keys at a time.
    [(2, 2, 64, 64), (3, 2, 128, 128), (1, 3, 80, 80), (1, 4, 24, 12), (2, 1, 512, 512)],
)
def test_attention_over_pages(
    ops: ModuleType, splits: int, groups: int, heads: int, size: int, value_size: int
) -> None:
    lengths = [1, 200, 64, 65, 0, 127]
    cache = PagedCache(lengths, heads, size, value_size)
    q = random(len(lengths), groups * heads, size)
    positions = [length - 1 for length in lengths]
    found = ops.attend(
        q,
        keys=cache.keys,
        values=cache.values,
        # A row whose position is past its last one reads only up to the last.
        positions_B=ints([p + 5 if row == 1 else max(p, 0) for row, p in enumerate(positions)]),
        last_B=ints(positions),
        table=cache.table,
        page=PAGE,
        scoring=Scoring(0.1),
        splits=splits,
    )
    for row, length in enumerate(lengths):
        if not length:
            assert found[row].isfinite().all()
            continue
        k, v = (
            c[cache.slots[row][:length]].float().repeat_interleave(groups, dim=1).transpose(0, 1)
            for c in (cache.keys, cache.values)
        )
        scores = (q[row].float().unsqueeze(1) @ k.mT) * 0.1
        expected = (scores.softmax(dim=-1) @ v).squeeze(1)
        assert gap(found[row], expected) < 1e-2


class Adapters:
    """Adapters of different ranks and targets, in their own memory, and a loop over them."""

    def __init__(
        self,
        ops: ModuleType,
        sizes: list[tuple[str, int, int]],
        ranks: list[int],
        slots: list[int],
        missing: tuple[int, str] | None = None,
    ) -> None:
        self.base = random(8)
        self.slots = slots
        names = [name for name, _, _ in sizes]
        self.pairs: list[dict[str, tuple[Tensor, Tensor]]] = []
        self.scales = [0.5 + at for at in range(len(ranks))]
        offsets = torch.zeros(len(ranks), len(sizes), 2, dtype=torch.int64)
        table = torch.zeros(len(ranks), len(sizes), dtype=torch.int32)
        self.kept = []
        for at, rank in enumerate(ranks):
            targets = [
                Target(name=name, kind="attn", inputs=i, outputs=o, group="one")
                for name, i, o in sizes
                if (at, name) != missing
            ]
            layout = make_layout(targets, rank)
            flat = random(layout.size, scale=0.3)
            self.kept.append(flat)
            own = {n: matrices(flat, p) for n, p in layout.placements.items()}
            self.pairs.append(own)
            for name, both in own.items():
                target = names.index(name)
                table[at, target] = rank
                for which, matrix in enumerate(both):
                    offsets[at, target, which] = (matrix.data_ptr() - self.base.data_ptr()) // 2
        rank = 16
        while rank < max(ranks):
            rank *= 2
        self.tables = ops.LoraTables(
            base=self.base,
            offsets=offsets.to(DEVICE),
            ranks=table.to(DEVICE),
            scales=torch.tensor(self.scales, device=DEVICE),
            slots_B=ints(slots),
            rank=rank,
            rank_step=8 if all(each % 8 == 0 for each in ranks) else 1,
        )

    def product(self, x: Tensor, name: str) -> Tensor:
        rows = []
        for row, slot in enumerate(self.slots):
            pair = None if slot < 0 else self.pairs[slot].get(name)
            if pair is None:
                rows.append(torch.zeros(1, device=DEVICE))
            else:
                h = (x[row].double() @ pair[0].double().T) * self.scales[slot]
                rows.append(h @ pair[1].double().T)
        width = max(len(row) for row in rows)
        return torch.stack([row.double().expand(width) for row in rows])


SLOTS = [-1] * 3 + [0] * 9 + [1] * 6 + [2] * 2 + [-1]


@pytest.mark.parametrize("ranks", [[8, 32, 16], [1, 3, 20], [128, 8, 64]])
@pytest.mark.parametrize("dtype", [DTYPE, torch.float32])
def test_lora_product(ops: ModuleType, ranks: list[int], dtype: torch.dtype) -> None:
    adapters = Adapters(
        ops, [("a", 96, 48), ("b", 96, 144), ("c", 96, 80)], ranks, SLOTS, missing=(1, "b")
    )
    x = random(len(SLOTS), 96)
    shrunk = ops.shrink(x, adapters.tables, 1, 1)
    y = random(len(SLOTS), 144).to(dtype)
    expected = y.double() + adapters.product(x, "b")
    ops.add_expanded(y, shrunk, exact=dtype == torch.float32)
    assert gap(y, expected) < (1e-5 if dtype == torch.float32 else 5e-3)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("which", ["A", "B", "both"])
def test_a_broken_adapter_does_not_reach_the_rows_of_others(ops: ModuleType, which: str) -> None:
    """Infinite matrices in one slot: rows of other slots in the same tile get the same bits."""
    sizes = [("a", 96, 16), ("b", 96, 144)]
    broken = [row for row, slot in enumerate(SLOTS) if slot == 1]
    others = [row for row, slot in enumerate(SLOTS) if slot != 1]
    adapters = Adapters(ops, sizes, [8, 32, 16], SLOTS)
    x, given = random(len(SLOTS), 96), random(len(SLOTS), 144)
    found = []
    for fill in (None, float("inf"), float("nan")):
        A, B = adapters.pairs[1]["b"]
        if fill is not None:
            for name, matrix in (("A", A), ("B", B)):
                if which in (name, "both"):
                    matrix.fill_(fill)
        for exact in (False, True):
            y = given.float() if exact else given.clone()
            ops.add_expanded(y, ops.shrink(x, adapters.tables, 1, 1), exact=exact)
            found.append(y)
    for at, y in enumerate(found):
        assert torch.equal(y[others], found[at % 2][others])
        assert at < 2 or not y[broken].isfinite().all(dim=1).any()


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("size", [64, 80])
def test_heads(ops: ModuleType, norm: bool, lora: bool, size: int) -> None:
    """LoRA, norm and rotation of q and k; keys and values go to the last slot of each sequence."""
    query, key, hidden = 4, 2, 64
    lengths = [1 + 37 * row for row in range(len(SLOTS))]
    lengths[-1] = 0
    cache = PagedCache(lengths, key, size)
    sizes = [("q", hidden, query * size), ("k", hidden, key * size), ("v", hidden, key * size)]
    adapters = Adapters(ops, sizes, [8, 32, 16], SLOTS, missing=(0, "k"))
    x, y = random(len(SLOTS), hidden), random(len(SLOTS), (query + 2 * key) * size)
    full = y.double()
    if lora:
        full = full + torch.cat([adapters.product(x, name) for name in "qkv"], dim=1)
    q, k, v = (
        t.unflatten(1, (-1, size))
        for t in full.split([query * size, key * size, key * size], dim=1)
    )
    norms = (1 + random(size, scale=0.1), 1 + random(size, scale=0.1))
    if norm:
        q, k = (
            F.rms_norm(t, (size,), w.double(), 1e-5) for t, w in zip((q, k), norms, strict=True)
        )
    frequencies = 1.0 / (10_000 ** (torch.arange(0, size, 2, device=DEVICE) / size))
    positions = ints([max(length - 1, 0) for length in lengths])
    angle = positions.double()[:, None] * frequencies.double()
    cos, sin = (torch.cat([t, t], dim=1)[:, None] * 1.1 for t in (angle.cos(), angle.sin()))

    def rotated(t: Tensor) -> Tensor:
        one, two = t.chunk(2, dim=-1)
        return t * cos + torch.cat([-two, one], dim=-1) * sin

    before = cache.keys.clone()
    found = ops.heads(
        y,
        keys=cache.keys,
        values=cache.values,
        query_heads=query,
        norms=norms if norm else None,
        eps=1e-5,
        frequencies=frequencies,
        rope_scale=1.1,
        positions_B=positions,
        last_B=ints([length - 1 for length in lengths]),
        table=cache.table,
        page=PAGE,
        spare=cache.spare,
        shrunk=ops.shrink(x, adapters.tables, 0, 3) if lora else None,
    )
    assert gap(found, rotated(q)) < 1e-2
    written = [cache.slots[row][length - 1] for row, length in enumerate(lengths) if length]
    assert gap(cache.keys[written], rotated(k)[:-1]) < 1e-2
    assert gap(cache.values[written], v[:-1]) < 1e-2
    spare = range(cache.spare * PAGE, (cache.spare + 1) * PAGE)
    others = [at for at in range(len(before)) if at not in written and at not in spare]
    assert torch.equal(cache.keys[others].nan_to_num(nan=7.0), before[others].nan_to_num(nan=7.0))


@pytest.mark.parametrize("lora", [True, False])
def test_swiglu(ops: ModuleType, lora: bool) -> None:
    adapters = Adapters(ops, [("g", 64, 144), ("u", 64, 144)], [8, 32, 16], SLOTS)
    x, y = random(len(SLOTS), 64), random(len(SLOTS), 288)
    gate, up = y.double().chunk(2, dim=1)
    if lora:
        gate, up = gate + adapters.product(x, "g"), up + adapters.product(x, "u")
    found = ops.swiglu(y, ops.shrink(x, adapters.tables, 0, 2) if lora else None)
    assert gap(found, F.silu(gate) * up) < 1e-2


@pytest.mark.parametrize("size", [64, 80, 1024])
def test_norm(ops: ModuleType, size: int) -> None:
    x, y, weight = random(5, size), random(5, size), random(size)
    total = (x + y).double()
    expected = F.rms_norm(total, (size,), weight.double(), 1e-6)
    assert gap(ops.add_norm(x, y, weight, 1e-6), expected) < 1e-2
    assert gap(x, total) < 1e-3
    expected = F.rms_norm(x.double(), (size,), weight.double(), 1e-6)
    assert gap(ops.add_norm(x, None, weight, 1e-6), expected) < 1e-2
    parts = torch.randn(4, 5, size, device=DEVICE)
    total = x.double() + parts.double().sum(dim=0)
    expected = F.rms_norm(total, (size,), weight.double(), 1e-6)
    assert gap(ops.add_norm(x, parts, weight, 1e-6), expected) < 1e-2


@pytest.mark.parametrize(("size", "outputs"), [(64, 48), (512, 80), (1536, 24)])
@pytest.mark.parametrize("rows", [1, 5, 16, 17])
@pytest.mark.parametrize("bias", [True, False])
def test_linear(ops: ModuleType, size: int, outputs: int, rows: int, bias: bool) -> None:
    x, weight = random(rows, size), random(outputs, size)
    add = random(outputs) if bias else None
    expected = x.double() @ weight.double().T + (0 if add is None else add.double())
    assert gap(ops.linear(x, weight, add), expected) < 1e-2
    found = ops.linear(x, weight, add, parts=True)
    assert gap(found.double().sum(dim=0) if found.dim() == 3 else found, expected) < 1e-2


FEW_SLOTS = [-1, 0, 0, 2]


@pytest.mark.parametrize("early", EARLY)
@pytest.mark.parametrize("ranks", [[8, 32, 16], [128, 8, 64]])
@pytest.mark.parametrize("size", [512, 1536])
def test_products_with_A_in_the_launch_of_a_linear_layer(
    ops: ModuleType, ranks: list[int], size: int, early: bool
) -> None:
    """The same parts, bit by bit, as those of launches of their own."""
    sizes = [("a", size, 48), ("b", size, 144), ("c", size, 80)]
    adapters = Adapters(ops, sizes, ranks, FEW_SLOTS, missing=(0, "b"))
    x, weight, bias = random(len(FEW_SLOTS), size), random(272, size), random(272)
    for add, parts in ((bias, False), (None, True)):
        expected = (
            ops.shrink(x, adapters.tables, 1, 2),
            ops.linear(x, weight, add, parts=parts),
        )
        y, shrunk = ops.linear_and_shrink(
            x, weight, add, adapters.tables, 1, 2, parts=parts, early=early
        )
        assert shrunk.target == 1
        assert torch.equal(shrunk.parts, expected[0].parts)
        assert torch.equal(y, expected[1])


@pytest.mark.parametrize("early", EARLY)
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("size", [80, 1024])
def test_products_with_B_in_the_launch_of_a_norm(
    ops: ModuleType, size: int, rows: int, early: bool
) -> None:
    slots = FEW_SLOTS[-rows:]
    adapters = Adapters(ops, [("a", 64, 16), ("b", 64, size)], [8, 32, 16], slots)
    read, weight, counter = random(rows, 64), random(size), ints([0])
    shrunk = ops.shrink(read, replace(adapters.tables, counter=counter), 1, 1)
    # The second launch must find the counter as the first one found it.
    for _ in range(2):
        x, parts = random(rows, size), torch.randn(4, rows, size, device=DEVICE)
        total = x.double() + parts.double().sum(dim=0) + adapters.product(read, "b")
        expected = F.rms_norm(total, (size,), weight.double(), 1e-6)
        normed = ops.add_norm(x, parts, weight, 1e-6, shrunk=shrunk, early=early)
        assert gap(x, total) < 5e-3
        assert gap(normed, expected) < 1e-2
        assert not counter.any()


def test_sampling_equals_that_of_the_host() -> None:
    """The same noise: the same tokens and logprobs, step by step, greedy rows too.

    The last row has a negative tick and stays as it is.
    """
    from tinkex.engine.model.sampling_kernels import sample

    rows, vocabulary, steps = 7, 9001, 3
    temperatures = [1.0, 0.0, 0.7, 1.5, 1.0, 2.0, 1.0]
    seeds = [(3, 0), (3, 1), (7, 0), (2**63 + 5, 2), (0, 0), (11, 9), (1, 1)]
    fields: dict[str, Any] = {
        "temperatures_B": torch.tensor(temperatures, device=DEVICE),
        "ids_B": ints([0] * rows),
        "positions_B": ints(list(range(rows))),
        "steps_B": ints([5] * rows),
        "ticks_B": ints([0] * (rows - 1) + [-1]),
        "ring_tokens": torch.zeros(steps, 16, dtype=torch.int32, device=DEVICE),
        "ring_logprobs": poisoned(steps, 16, dtype=torch.float32),
    }
    keys = np.array([sample_key(*seed) for seed in seeds], np.uint64)
    both = np.stack([keys.astype(np.uint32), (keys >> np.uint64(32)).astype(np.uint32)])
    fields["keys_2B"] = torch.from_numpy(both.view(np.int32).copy()).to(DEVICE)
    for step in range(steps):
        logits = torch.randn(rows, vocabulary, device=DEVICE) * 3
        sample(logits.clone(), **fields)
        wanted = [
            SampleStep(SamplingConfig(temperature=t, top_k=None, top_p=None, seed=seed), at, 5 + step)
            for t, (seed, at) in zip(temperatures, seeds, strict=True)
        ]  # fmt: skip
        expected = sample_tokens(logits, wanted)
        assert fields["ring_tokens"][step, : rows - 1].tolist() == expected.tokens[:-1]
        assert fields["ids_B"].tolist() == [*expected.tokens[:-1], 0]
        found = fields["ring_logprobs"][step, : rows - 1].cpu()
        assert torch.allclose(found, torch.tensor(expected.logprobs[:-1]), atol=1e-4)
    assert fields["positions_B"].tolist() == [*range(steps, rows - 1 + steps), rows - 1]
    assert fields["steps_B"].tolist() == [5 + steps] * (rows - 1) + [5]
    assert not fields["ring_tokens"][:, rows - 1 :].any()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
def test_logits_that_are_no_numbers_give_a_token_of_the_vocabulary() -> None:
    """What a broken adapter samples has no meaning, but it must not be a place outside of a table."""
    from tinkex.engine.model.sampling_kernels import SAMPLE_BLOCK, sample

    rows, vocabulary = 4, 2 * SAMPLE_BLOCK + 9  # three blocks, read as four
    nan = float("nan")
    logits = torch.randn(rows, vocabulary, device=DEVICE)
    logits[0] = nan
    logits[1, -1] = nan
    logits[2] = -float("inf")
    fields: dict[str, Any] = {
        "temperatures_B": torch.tensor([1.0, 0.0, 1.0, 1.0], device=DEVICE),
        "ids_B": ints([-1] * rows),
        "positions_B": ints([0] * rows),
        "steps_B": ints([0] * rows),
        "ticks_B": ints([0] * rows),
        "ring_tokens": torch.zeros(1, 16, dtype=torch.int32, device=DEVICE),
        "ring_logprobs": poisoned(1, 16, dtype=torch.float32),
        "keys_2B": torch.zeros(2, rows, dtype=torch.int32, device=DEVICE),
    }
    torch.use_deterministic_algorithms(True)  # fills new memory with the largest numbers
    try:
        sample(logits, **fields)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(0 <= token < vocabulary for token in fields["ids_B"].tolist())
    logprobs = fields["ring_logprobs"][0, :rows]
    assert logprobs.isnan().tolist() == [True, True, True, False]
