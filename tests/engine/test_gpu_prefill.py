"""The fused layers against the code of transformers: prefill in pieces, then decode steps."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tinkex.engine.adapters.adapters import SamplerAdapter
from tinkex.engine.model.attention import CacheLayer, Packing
from tinkex.engine.model.base_model import BaseModel
from tinkex.engine.model.fused_decoder import DecodeInputs, FusedDecoder
from tinkex.engine.model.lora import AdapterSegment, addresses
from tinkex.engine.model.stacked_weights import StackedWeights
from tinkex.engine.model.targets import make_layout
from tinkex.engine.sampling.decode_graphs import Ranks
from tinkex.engine.sampling.fused_prefill import FusedPrefill, PrefillRecipe, lay_out
from tinkex.engine.sampling.kv_pages import Pages
from tinkex.engine.sampling.scheduler import Prefill, PrefillChunk
from tinkex.engine.sampling.sequences import PromptLogprobRequest, Request, SamplingConfig, Stops
from tinkex.models.tiny_model import write_tiny_model

pytestmark = pytest.mark.gpu

#: With TRITON_INTERPRET=1 the kernels run on a CPU too, there in float32.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
BOUND = 3e-2 if DEVICE.type == "cuda" else 1e-4

#: Tokens of each sequence, and where its chunks end.
CHUNKS = {"a": [5, 90], "b": [64, 70, 200], "c": [33]}
PAGE = 64


class Ready:
    """A compiler that has compiled everything."""

    usable = True

    def ready(self, *_: Any) -> bool:
        return True


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    folder = write_tiny_model(tmp_path_factory.mktemp(request.param) / "m", request.param)
    model = BaseModel(folder, device=DEVICE, dtype=DTYPE)
    if model.fused is None:
        model.stacked = StackedWeights.of(model._decoder, model._embed, model.head)
        assert model.stacked is not None
        model.fused = FusedDecoder(model.stacked, model.head)
    assert model.fused is not None
    return model


def adapter(model: BaseModel, rank: int) -> SamplerAdapter:
    layout = make_layout([t for t in model.targets if t.kind != "unembed"], rank)
    generator = torch.Generator().manual_seed(rank)
    live = (torch.randn(layout.size, generator=generator) * 0.1).to(DEVICE, DTYPE)
    return SamplerAdapter(layout=layout, scale=0.7, live=live)


def poisoned_cache(model: BaseModel, slots: int) -> list[CacheLayer]:
    return [
        CacheLayer(
            *(torch.full((slots, *s), float("nan"), dtype=DTYPE, device=DEVICE) for s in shapes)
        )
        for shapes in model.cache_shapes
    ]


def prefill_of(tokens: list[int], adapter: str | None) -> Prefill:
    request = Request(
        ticket=0,
        adapter=adapter,
        prompt=tokens,
        samples=1,
        max_new_tokens=1,
        sampling=SamplingConfig(temperature=1.0, top_k=None, top_p=None, seed=0),
        stops=Stops(),
    )
    return Prefill(
        request=request,
        tokens=tokens,
        keys=request.prompt_keys,
        sequences=[],
        prompt_logprobs=PromptLogprobRequest(),
    )


def gap(found: Tensor, expected: Tensor) -> float:
    """Relative difference; NaN if anything is NaN."""
    found, expected = found.double().cpu(), expected.double().cpu()
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("adapted", [False, True])
@torch.inference_mode()
def test_prefill_in_chunks_and_decoding(
    model: BaseModel, adapted: bool, many: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tinkex.engine.sampling import fused_prefill

    monkeypatch.setattr(fused_prefill, "FEW_TOKENS", 0 if many else 1 << 20)
    monkeypatch.setattr(fused_prefill, "MAX_GATHERED", 100)
    assert model.fused is not None
    pages = Pages(12, PAGE)
    cache = poisoned_cache(model, 13 * PAGE)
    fused = FusedPrefill(model, cache, pages, Ready())  # type: ignore[arg-type]
    adapters = {"a": adapter(model, 8), "b": adapter(model, 3)} if adapted else {}
    generator = torch.Generator().manual_seed(1)
    prefills = {}
    for name, stops in CHUNKS.items():
        tokens = torch.randint(model.vocab_size, (stops[-1] + 1,), generator=generator).tolist()
        prefills[name] = prefill_of(tokens, name if name in adapters else None)
    # Pages of different sequences in turn, so that no sequence is contiguous.
    tables = {name: pages.allocate(1, max_pages=1) for name in prefills}
    for name, prefill in prefills.items():
        table = tables[name]
        assert table is not None
        while table.page_count < pages.needed(len(prefill.tokens)):
            assert pages.extend(table, max_pages=table.page_count + 1)
        prefill.page_table = table
    found: dict[str, list[Tensor]] = {name: [] for name in prefills}
    for step in range(3):
        chunks = [
            PrefillChunk(prefills[name], ([0, *stops])[step], stops[step])
            for name, stops in CHUNKS.items()
            if step < len(stops)
        ]
        hidden = fused.run(chunks, adapters)
        assert hidden is not None
        lengths = [chunk.stop - chunk.start for chunk in chunks]
        for chunk, part in zip(chunks, hidden.split(lengths), strict=True):
            name = next(n for n, p in prefills.items() if p is chunk.prefill)
            found[name].append(part)
    last = decode(model, cache, pages, prefills, adapters)
    for row, (name, prefill) in enumerate(prefills.items()):
        tokens = torch.tensor(prefill.tokens, device=DEVICE)
        segments = []
        if name in adapters:
            segments = [AdapterSegment(0, len(tokens), adapters[name].pairs)]
        expected = model.hidden(tokens, Packing.of([len(tokens)], device=DEVICE), segments)
        assert gap(torch.cat(found[name]), expected[:-1]) < BOUND
        assert gap(last[row], model.head.logits(expected[-1:])[0]) < BOUND


def decode(
    model: BaseModel,
    cache: list[CacheLayer],
    pages: Pages,
    prefills: dict[str, Prefill],
    adapters: dict[str, SamplerAdapter],
) -> Tensor:
    """Logits after the last token of each sequence, which a decode step computes."""
    from tinkex.engine.model.decode_ops import LoraTables

    assert model.fused is not None
    rows = len(prefills)
    table = torch.zeros(rows, 8, dtype=torch.int32, device=DEVICE)
    for row, prefill in enumerate(prefills.values()):
        own = [
            page
            for extent in prefill.page_table.extents
            for page in range(extent.first, extent.first + extent.count)
        ]
        table[row, : len(own)] = torch.tensor(own)
    fields = torch.tensor(
        [
            [prefill.tokens[-1] for prefill in prefills.values()],
            [len(prefill.tokens) - 1 for prefill in prefills.values()],
            [list(adapters).index(name) if name in adapters else -1 for name in prefills],
        ],
        dtype=torch.int32,
        device=DEVICE,
    )
    fields = torch.nn.functional.pad(fields, (0, 16 - rows))
    lora = None
    if adapters:
        both = [
            addresses(model.stacked.embedding, model.stacked.targets, one.pairs)
            for one in adapters.values()
        ]
        ranks = Ranks.of(list(adapters.values()))
        assert ranks is not None
        lora = LoraTables(
            base=model.stacked.embedding,
            offsets=torch.tensor([offsets for offsets, _ in both], device=DEVICE),
            ranks=torch.tensor([r for _, r in both], dtype=torch.int32, device=DEVICE),
            scales=torch.tensor([one.scale for one in adapters.values()], device=DEVICE),
            slots_B=fields[2, :rows],
            rank=ranks.largest,
            rank_step=ranks.step,
            counter=torch.zeros(1, dtype=torch.int32, device=DEVICE),
        )
    logits = torch.full((rows, model.vocab_size), float("nan"), device=DEVICE)
    model.fused.write_logits(
        DecodeInputs(
            ids_B=fields[0, :rows],
            positions_B=fields[1, :rows],
            last_B=fields[1, :rows],
            table=table,
        ),
        cache,
        page=PAGE,
        spare=pages.count,
        lora=lora,
        out_BV=logits,
    )
    return logits


@torch.inference_mode()
def test_the_comparison_and_the_compiling_step(model: BaseModel) -> None:
    assert model.fused is not None
    ids, expected = model.probed
    assert gap(model.fused.probe_logits(ids), expected) < BOUND
    pages = Pages(2, PAGE)
    cache = poisoned_cache(model, 3 * PAGE)
    fused = FusedPrefill(model, cache, pages, Ready())  # type: ignore[arg-type]
    for ranks in (Ranks(), Ranks(16, 1)):
        fused._dry(PrefillRecipe(ranks, many=False))
    # It writes to the spare page alone.
    assert all(cached[: 2 * PAGE].isnan().all() for layer in cache for cached in layer)


def test_keys_of_one_attention_call_are_limited() -> None:
    pages = Pages(8, PAGE)
    chunks = []
    for length in (100, 60, 130, 10):
        prefill = prefill_of(list(range(length)), None)
        table = pages.allocate(pages.needed(length), max_pages=3)
        assert table is not None
        prefill.page_table = table
        chunks.append(PrefillChunk(prefill, length // 2, length))
    layout = lay_out(pages, chunks, [0, -1, 1, 0], max_gathered=165)
    assert [read.key_starts.tolist() for read in layout.reads] == [[0, 100, 160], [0, 130, 140]]
    assert [read.query_starts.tolist() for read in layout.reads] == [[0, 50, 80], [0, 65, 70]]
    assert [read.queries for read in layout.reads] == [slice(0, 80), slice(80, 150)]
    assert layout.adapters.tolist() == [0] * 50 + [-1] * 30 + [1] * 65 + [0] * 5
    assert layout.positions[:50].tolist() == list(range(50, 100))
    assert layout.ids[50:80].tolist() == list(range(30, 60))
