"""Decode steps in the form that CUDA graphs record, run one by one and compared with whole passes.

Sequences of several lengths, with adapters of several ranks and without one, in shuffled pages. All
memory that has no value is NaN.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from numerics.hybrids import HYBRIDS, write_hybrid
from numerics.mixtures import MIXTURES, write_mixture
from numerics.pictures import IMAGE_MODELS, write_image_model
from numerics.test_families import SERVED, write_model
from numerics.test_windows import MODELS
from tinkex.engine.model.attention import CacheLayer, CacheUse, Packing, StateLayer, StateUse
from tinkex.engine.model.base_model import BaseModel
from tinkex.engine.model.device_waits import NothingWaits
from tinkex.engine.model.fused_decoder import DecodeInputs, StateInputs
from tinkex.engine.model.lora import AdapterSegment, Pair, addresses, make_pairs
from tinkex.engine.model.targets import make_layout

#: Dense models with something that the fused layers do not compute, and windows and caps.
OTHERS = {name: SERVED[name] for name in ("Gemma2", "Gemma3Text", "Phi3", "GPTNeoX", "Glm4")}
OTHERS |= {"Granite": {"residual_multiplier": 0.22, "embedding_multiplier": 3.0}}
OTHERS |= {name: MODELS[name] for name in ("Gemma2", "Youtu")}

WRITERS: dict[str, Callable[[Path, str], Path]] = {
    **dict.fromkeys(MIXTURES, write_mixture),
    **dict.fromkeys(HYBRIDS, write_hybrid),
    **dict.fromkeys(OTHERS, lambda folder, family: write_model(folder, family, **OTHERS[family])),
    **dict.fromkeys(IMAGE_MODELS, write_image_model),
}

PAGE = 16
#: Tokens of a prompt, its adapter, and by how much later tokens are behind their places, as after an
#: image. A page ends within the first steps of most rows.
ROWS = [(5, 0, 0), (31, 0, -3), (40, None, 0), (15, 1, 2), (16, 1, 0)]
RANKS = [8, 3]
#: This row is at its last token after two steps, this one is computed again in the first four.
ENDS, REPEATS = 1, 2
STEPS = 6
VOCABULARY = 380


class Steps:
    def __init__(self, model: BaseModel, tables: Callable[..., object]) -> None:
        """`tables` makes `LoraTables`."""
        decoder = model.original_decoder({})
        assert decoder is not None
        self.model, self.decoder = model, decoder
        self.pairs = [adapter(model, rank) for rank in RANKS]
        generator = torch.Generator().manual_seed(0)
        self.tokens = [
            torch.randint(VOCABULARY, (length + STEPS,), generator=generator).tolist()
            for length, _, _ in ROWS
        ]
        count = len(ROWS) * 4
        order = torch.randperm(count, generator=generator).tolist()
        self.spare = count
        self.table = torch.full((len(ROWS) + 1, 6), 1 << 30, dtype=torch.int32)
        self.slots: list[list[int]] = []
        for row, (length, _, _) in enumerate(ROWS):
            pages = [order.pop() for _ in range(-(-(length + STEPS) // PAGE))]
            self.table[row, : len(pages)] = torch.tensor(pages)
            self.slots.append([page * PAGE + at for page in pages for at in range(PAGE)])
        nan = float("nan")
        self.cache = [
            CacheLayer(*(torch.full(((count + 1) * PAGE, *shape), nan) for shape in shapes))
            for shapes in model.cache_shapes
        ]
        #: State slots of the rows; others belong to nobody, and the last is spare.
        self.state_slots = [2, 0, 5, 1, 4]
        self.states = {
            at: StateLayer(*(torch.full((7, *shape), nan) for shape in shapes))
            for at, shapes in model.state_shapes.items()
        }
        self.last = [len(tokens) - 1 for tokens in self.tokens]
        self.last[ENDS] = ROWS[ENDS][0] + 1
        slots = [-1 if key is None else key for _, key, _ in ROWS]
        found = [addresses(decoder.embedding, decoder.targets, pairs) for pairs in self.pairs]
        self.tables = tables(
            base=decoder.embedding,
            offsets=torch.tensor([offsets for offsets, _ in found]),
            ranks=torch.tensor([ranks for _, ranks in found], dtype=torch.int32),
            scales=torch.tensor([0.5, 0.8]),
            slots_B=torch.tensor([*slots, -1], dtype=torch.int32),
            rank=16,
            rank_step=1,
            counter=torch.zeros(1, dtype=torch.int32),
        )

    def positions(self, row: int, stop: int) -> Tensor:
        length, _, shift = ROWS[row]
        at = torch.arange(stop)
        return torch.where(at < length // 2, at, at + shift)

    def segments(self, lengths: list[int]) -> list[AdapterSegment]:
        ends = torch.tensor(lengths).cumsum(0).tolist()
        return [
            AdapterSegment(end - length, end, self.pairs[key])
            for (_, key, _), length, end in zip(ROWS, lengths, ends, strict=True)
            if key is not None
        ]

    def prefill(self) -> None:
        lengths = [length for length, _, _ in ROWS]
        slots = [slot for own, n in zip(self.slots, lengths, strict=True) for slot in own[:n]]
        use = {}
        if self.states:
            states = StateUse(
                torch.tensor(self.state_slots), torch.ones(len(ROWS), dtype=torch.bool)
            )
            use = {"state_layers": self.states, "states": states}
        cache = CacheUse(
            layers=self.cache,
            write_slots_T=torch.tensor(slots),
            prefixes=[None] * len(ROWS),
            **use,  # type: ignore[arg-type]
        )
        self.hidden([own[:n] for own, n in zip(self.tokens, lengths, strict=True)], cache)

    def hidden(self, tokens: list[list[int]], cache: CacheUse | None = None) -> Tensor:
        lengths = [len(each) for each in tokens]
        packing = Packing.of(
            lengths,
            device=torch.device("cpu"),
            positions=torch.cat([self.positions(row, n) for row, n in enumerate(lengths)]),
            cache=cache,
        )
        ids = torch.tensor([token for each in tokens for token in each])
        return self.model.hidden(ids, packing, self.segments(lengths))

    def expected(self, at: list[int]) -> Tensor:
        """Logits after the token of each row at this position, from passes over whole sequences."""
        hidden = self.hidden([own[: n + 1] for own, n in zip(self.tokens, at, strict=True)])
        ends = torch.tensor([n + 1 for n in at]).cumsum(0) - 1
        return self.model.head.logits(hidden[ends], self.segments([1] * len(at)))

    def step(self, at: list[int], repeats: int) -> Tensor:
        """Logits of a step with the rows at these positions, and with a spare row."""
        rows = len(ROWS) + 1

        def ints(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32)

        out = torch.full((rows, self.model.vocab_size), float("nan"))
        ids = [own[min(n, len(own) - 1)] for own, n in zip(self.tokens, at, strict=True)]
        states = StateInputs(
            layers=self.states,
            slots_B=ints([*self.state_slots, 6]),
            repeats_B=ints([repeats if row == REPEATS else 0 for row in range(rows)]),
        )
        self.decoder.write_logits(
            DecodeInputs(
                ids_B=ints([*ids, 0]),
                positions_B=ints([*at, 0]),
                last_B=ints([*self.last, -1]),
                table=self.table,
                shifts_B=ints([*(shift for _, _, shift in ROWS), 0]),
                states=states,
            ),
            self.cache,
            page=PAGE,
            spare=self.spare,
            lora=self.tables,  # type: ignore[arg-type]
            lora_head=True,
            out_BV=out,
        )
        return out

    @torch.inference_mode()
    def check(self, tolerance: float) -> None:
        self.prefill()
        at = [length for length, _, _ in ROWS]
        ended: dict[int, list[Tensor]] = {}
        for step in range(STEPS):
            if at[ENDS] == self.last[ENDS] + 1:
                ended = {key: [each[0].clone() for each in self.states[key]] for key in self.states}
            found = self.step(at, max(0, 3 - step))
            expected = self.expected([min(n, own) for n, own in zip(at, self.last, strict=True)])
            for row in range(len(ROWS)):
                if at[row] <= self.last[row]:
                    gap = (found[row] - expected[row]).abs().max() / expected[row].abs().max()
                    assert gap < tolerance, (step, row, float(gap))
            at = [n if row == REPEATS and step < 3 else n + 1 for row, n in enumerate(at)]
        # What belongs to no row stays as it was: unused states, and that of a row that ended.
        for key, layer in self.states.items():
            for states, kept in zip(layer, ended[key], strict=True):
                assert torch.equal(states[0], kept)
                assert states[3].isnan().all()
        used = {slot for own in self.slots for slot in own}
        used |= {self.spare * PAGE + at for at in range(PAGE)}
        others = [slot for slot in range(len(self.cache[0].keys)) if slot not in used]
        for layer in self.cache:
            assert all(cached[others].isnan().all() for cached in layer)


def adapter(model: BaseModel, rank: int) -> dict[str, Pair]:
    layout = make_layout(model.targets, rank)
    generator = torch.Generator().manual_seed(rank)
    live = torch.randn(layout.size, generator=generator) * 0.1
    return make_pairs(layout, live, scale=0.5 if rank == RANKS[0] else 0.8)


def load(folder: Path, family: str) -> BaseModel:
    WRITERS[family](folder, family)
    return BaseModel(folder, device=torch.device("cpu"), dtype=torch.float32)


@torch.inference_mode()
def check_that_nothing_waits(model: BaseModel) -> None:
    """
    A step on a device whose numbers cannot be read, and which shares no tensors with the host.

    The model cannot be used after it.
    """
    decoder = model.original_decoder({})
    assert decoder is not None
    device = torch.device("meta")
    model._decoder.to(device)
    model._embed.to(device)
    head = model.head
    head.weight_VH = head.weight_VH.to(device)
    head.bias_V = None if head.bias_V is None else head.bias_V.to(device)
    with device:
        ints = torch.zeros(5, dtype=torch.int32)
        cache = [
            CacheLayer(*(torch.empty(64, *s) for s in shapes)) for shapes in model.cache_shapes
        ]
        pool = {
            at: StateLayer(*(torch.empty(7, *s) for s in shapes))
            for at, shapes in model.state_shapes.items()
        }
        out = torch.empty(5, model.vocab_size)
        inputs = DecodeInputs(
            ids_B=ints,
            positions_B=ints,
            last_B=ints,
            table=torch.zeros(5, 6, dtype=torch.int32),
            shifts_B=ints,
            states=StateInputs(layers=pool, slots_B=ints, repeats_B=ints),
        )
    with NothingWaits(device):
        decoder.write_logits(inputs, cache, page=PAGE, spare=3, lora=None, out_BV=out)
