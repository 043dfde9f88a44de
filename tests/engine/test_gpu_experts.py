"""The kernels of experts of a decode step against plain torch, with NaN where there is no value."""

from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tinkex.engine.model.experts import ExpertWeights
from tinkex.engine.model.lora import matrices
from tinkex.engine.model.targets import make_layout

pytestmark = pytest.mark.gpu

#: With TRITON_INTERPRET=1 the kernels run on a CPU too.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter of Triton multiplies bfloat16 as integers.
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16
BOUND = 1e-2
#: Whether kernels start before the ones before them have ended.
EARLY = [False, True] if DEVICE == "cuda" else [False]


@pytest.fixture(scope="module")
def decode() -> ModuleType:
    from tinkex.engine.model import expert_decode

    return expert_decode


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).to(DEVICE, DTYPE)


def gap(found: Tensor, expected: Tensor) -> float:
    """Relative difference; NaN if anything is NaN."""
    found, expected = found.double().cpu(), expected.double().cpu()
    return float((found - expected).norm() / expected.norm())


class Form(NamedTuple):
    """How a family stores its experts, and how it gates."""

    gated: bool = True
    interleaved: bool = False
    transposed: bool = False
    biased: bool = False
    swiglu: bool = False


FORMS = {
    "qwen3_moe": Form(swiglu=True),
    "another gate": Form(),
    "gpt_oss": Form(interleaved=True, transposed=True, biased=True),
    "nemotron_h": Form(gated=False),
}


def gate_of(form: Form) -> Any:
    def gate(gate_up: Tensor) -> Tensor:
        if not form.gated:
            return F.relu(gate_up).square()
        if form.interleaved:
            left, right = gate_up[..., ::2].clamp(max=7), gate_up[..., 1::2].clamp(-7, 7)
            return left * torch.sigmoid(1.702 * left) * (right + 1)
        left, right = gate_up.chunk(2, dim=-1)
        return F.silu(left) * right if form.swiglu else F.gelu(left) * right

    return gate


def random_weights(form: Form, experts: int, hidden: int, inner: int) -> ExpertWeights:
    outputs = inner * (2 if form.gated else 1)
    columns = {"w1": slice(None)}
    if form.gated:
        columns = {"w1": slice(0, inner), "w3": slice(inner, 2 * inner)}
    if form.interleaved:
        columns = {"w1": slice(0, None, 2), "w3": slice(1, None, 2)}
    first = random(experts, outputs, hidden, scale=hidden**-0.5).mT
    down = random(experts, hidden, inner, scale=inner**-0.5).mT
    if form.transposed:
        first, down = first.contiguous(), down.contiguous()
    biases = [random(experts, n) if form.biased else None for n in (outputs, hidden)]
    return ExpertWeights(first, biases[0], down, biases[1], gate_of(form), columns, form.swiglu)


class Adapters:
    """Adapters of different ranks, with NaN around their matrices, as tables and one by one."""

    def __init__(
        self,
        weights: ExpertWeights,
        ranks: list[int],
        slots: list[int],
        missing: tuple[int, str] | None = None,
    ) -> None:
        from tinkex.engine.model.decode_ops import LoraTables

        self.slots, self.scales = slots, [0.5 + at for at in range(len(ranks))]
        names = ["other", *(f"e.{part}" for part in weights.columns), "e.w2"]
        self.targets = {name.removeprefix("e."): at for at, name in enumerate(names) if at}
        self.base = random(8)
        self.matrices: list[dict[str, tuple[Tensor, Tensor]]] = []
        offsets = torch.zeros(len(ranks), len(names), 2, dtype=torch.int64)
        table = torch.zeros(len(ranks), len(names), dtype=torch.int32)
        self._kept = []
        for at, rank in enumerate(ranks):
            targets = [t for t in weights.targets("e") if (at, t.name[2:]) != missing]
            layout = make_layout(targets, rank)
            flat = torch.full((layout.size + 64,), float("nan"), device=DEVICE, dtype=DTYPE)
            self._kept.append(flat)
            own = {}
            for name, placement in layout.placements.items():
                both = matrices(flat[32:-32], placement)
                for which, matrix in enumerate(both):
                    # The sum over inputs, or over the rank, has about the size of its terms.
                    matrix.copy_(random(*matrix.shape, scale=matrix.shape[-1] ** -0.5))
                    offset = (matrix.data_ptr() - self.base.data_ptr()) // 2
                    offsets[at, names.index(name), which] = offset
                table[at, names.index(name)] = rank
                own[name[2:]] = both
            self.matrices.append(own)
        rank = 16
        while rank < max(ranks):
            rank *= 2
        self.tables = LoraTables(
            base=self.base,
            offsets=offsets.to(DEVICE),
            ranks=table.to(DEVICE),
            scales=torch.tensor(self.scales, device=DEVICE),
            slots_B=torch.tensor(slots, dtype=torch.int32, device=DEVICE),
            rank=rank,
            rank_step=8 if all(each % 8 == 0 for each in ranks) else 1,
        )


def reference(
    x: Tensor, index: Tensor, p: Tensor, weights: ExpertWeights, adapters: Adapters | None
) -> Tensor:
    """Row by row and expert by expert, in float64."""
    rows = []
    for b in range(len(x)):
        row = x[b].double()
        slot = -1 if adapters is None else adapters.slots[b]
        own = {} if adapters is None or slot < 0 else adapters.matrices[slot]
        scale = 0.0 if adapters is None else adapters.scales[slot]
        total = torch.zeros_like(row)
        for k in range(index.shape[1]):
            e = int(index[b, k])
            h = row @ weights.in_EHO[e].double()
            if weights.in_bias_EO is not None:
                h = h + weights.in_bias_EO[e].double()
            for part, columns in weights.columns.items():
                if part in own:
                    A, B = own[part]
                    h[columns] += scale * (row @ A.double().T) @ B[e].double().T
            act = weights.gate(h)
            out = act @ weights.down_EIH[e].double()
            if weights.down_bias_EH is not None:
                out = out + weights.down_bias_EH[e].double()
            if "w2" in own:
                A, B = own["w2"]
                out = out + scale * (act @ A[e].double().T) @ B.double().T
            total = total + p[b, k].double() * out
        rows.append(total)
    return torch.stack(rows)


def choices(kind: str, rows: int, experts: int, each: int) -> Tensor:
    if kind == "skewed":  # all choose the last expert, none the first
        others = torch.stack([1 + torch.randperm(experts - 2)[: each - 1] for _ in range(rows)])
        last = torch.full((rows, 1), experts - 1)
        return torch.cat([others, last], dim=1).to(DEVICE)
    return torch.stack([torch.randperm(experts)[:each] for _ in range(rows)]).to(DEVICE)


@pytest.fixture
def _poisoned_memory() -> Any:
    """New memory has NaN, so that a value which nothing wrote is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def slots_of(rows: int, adapters: int) -> list[int]:
    """Rows without an adapter first, then those of each adapter."""
    return [at * (adapters + 1) // rows - 1 for at in range(rows)]


@pytest.mark.usefixtures("_poisoned_memory")
@pytest.mark.parametrize("early", EARLY)
@pytest.mark.parametrize("ranks", [None, [8, 32], [1, 3, 20]])
@pytest.mark.parametrize(
    ("rows", "experts", "each", "kind"),
    [
        (1, 8, 4, "spread"),  # a program for each slot
        (5, 24, 4, "skewed"),  # for each place
        (64, 4, 2, "skewed"),  # for each expert, several tiles
        (7, 5, 1, "spread"),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_experts(
    decode: ModuleType,
    form: str,
    rows: int,
    experts: int,
    each: int,
    kind: str,
    ranks: list[int] | None,
    early: bool,
) -> None:
    hidden, inner = 80, 144
    weights = random_weights(FORMS[form], experts, hidden, inner)
    x, index = random(rows, hidden), choices(kind, rows, experts, each)
    p = torch.rand(rows, each, device=DEVICE)
    adapters = None
    if ranks is not None:
        slots = slots_of(rows, len(ranks)) if rows > 1 else [1]
        adapters = Adapters(weights, ranks, slots, missing=(0, "w2"))
    found = decode.run_experts(
        x,
        index,
        p,
        weights,
        None if adapters is None else adapters.tables,
        {} if adapters is None else adapters.targets,
        early=early,
    )
    assert found.dtype == DTYPE
    assert gap(found, reference(x, index, p, weights, adapters)) < BOUND


def test_shapes_that_fill_whole_blocks(decode: ModuleType) -> None:
    """The sizes of real models are multiples of a block, which are read without masks."""
    weights = random_weights(FORMS["qwen3_moe"], 4, 256, 128)
    x, index = random(3, 256), choices("spread", 3, 4, 2)
    p = torch.rand(3, 2, device=DEVICE).to(DTYPE)
    found = decode.run_experts(x, index, p, weights, None, {})
    assert gap(found, reference(x, index, p, weights, None)) < BOUND


def test_slots_are_sorted_by_expert_and_then_by_row(decode: ModuleType) -> None:
    from tinkex.engine.model import expert_kernels

    index = torch.randint(0, 7, (600, 4), device=DEVICE)
    slots = decode._Slots.of(index, 9, False)
    assert slots.by == expert_kernels.BY_EXPERT.value
    flat = index.flatten()
    assert slots.order.tolist() == flat.sort(stable=True).indices.tolist()
    counts = torch.bincount(flat, minlength=9)
    assert slots.starts.tolist() == [0, *counts.cumsum(0).tolist()]


def test_numbers_of_experts_that_do_not_exist_write_nothing_outside(decode: ModuleType) -> None:
    """What a router of NaN chooses: the nearest expert that exists."""
    weights = random_weights(FORMS["gpt_oss"], 4, 80, 48)
    x, p = random(9, 80), torch.rand(9, 2, device=DEVICE)
    for rows in (1, 2, 9):  # one way of sharing the work each
        index = choices("spread", 9, 4, 2)[:rows]
        index[0] = torch.tensor([-(1 << 40), 1 << 20])
        index[-1, 0] = 4
        found = decode.run_experts(x[:rows], index, p[:rows], weights, None, {})
        expected = reference(x[:rows], index.clamp(0, 3), p[:rows], weights, None)
        assert gap(found, expected) < BOUND


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("which", ["w1", "w3", "w2", "x", "router"])
@pytest.mark.parametrize("fill", [float("nan"), float("inf")])
def test_what_is_broken_in_one_row_stays_there(decode: ModuleType, which: str, fill: float) -> None:
    rows = 24
    weights = random_weights(FORMS["qwen3_moe"], 4, 80, 48)
    adapters = Adapters(weights, [8, 32, 16], slots_of(rows, 3))
    x, p = random(rows, 80), torch.rand(rows, 2, device=DEVICE)
    index = choices("skewed", rows, 4, 2)
    before = decode.run_experts(x, index, p, weights, adapters.tables, adapters.targets)
    broken = [row for row, slot in enumerate(adapters.slots) if slot == 1]
    if which == "x":
        x[broken] = fill
    elif which == "router":
        p[broken] = fill
    else:
        for matrix in adapters.matrices[1][which]:
            matrix.fill_(fill)
    after = decode.run_experts(x, index, p, weights, adapters.tables, adapters.targets)
    others = [row for row in range(rows) if row not in broken]
    assert torch.equal(after[others], before[others])
    assert not after[broken].isfinite().all(dim=1).any()


def test_the_same_step_gives_the_same_bits(decode: ModuleType) -> None:
    rows = 33
    weights = random_weights(FORMS["qwen3_moe"], 8, 80, 48)
    adapters = Adapters(weights, [8, 32], slots_of(rows, 2))
    x, p = random(rows, 80), torch.rand(rows, 3, device=DEVICE)
    index = choices("spread", rows, 8, 3)
    tables = replace(adapters.tables)
    runs = [decode.run_experts(x, index, p, weights, tables, adapters.targets) for _ in range(3)]
    assert all(torch.equal(run, runs[0]) for run in runs[1:])
