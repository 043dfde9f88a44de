"""Decode steps of mixtures with the fused layers against the code of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from numerics.mixtures import logprobs_of, write_mixture
from tinkex.engine.adapters.adapters import SamplerAdapter
from tinkex.engine.model.attention import CacheLayer, Packing
from tinkex.engine.model.base_model import BaseModel
from tinkex.engine.model.experts import RoutedTokens
from tinkex.engine.model.fused_decoder import DecodeInputs, FusedDecoder
from tinkex.engine.model.lora import AdapterSegment, addresses
from tinkex.engine.model.model_experts import replayed_routing
from tinkex.engine.model.stacked_weights import StackedWeights
from tinkex.engine.model.targets import make_layout
from tinkex.engine.sampling.decode_graphs import Ranks

# Slow in the interpreter of Triton.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

#: With TRITON_INTERPRET=1 the kernels run on a CPU too, there in float32.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
BOUND = 3e-2 if DEVICE.type == "cuda" else 1e-4
PAGE = 16

#: Families whose attention is of the usual form, and what makes their tiny model so.
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"mlp_only_layers": [0]},  # a dense layer first
    "Mixtral": {"head_dim": 16},
    # An expert of all tokens with a gate.
    "Qwen2Moe": {"hidden_size": 64, "shared_expert_intermediate_size": 32},
    "GptOss": {},  # biases, sinks, a window, gate and up in turns
}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name = request.param
    return write_mixture(tmp_path_factory.mktemp(name), name, **FAMILIES[name])


@pytest.fixture(scope="module")
def model(folder: Path) -> BaseModel:
    model = BaseModel(folder, device=DEVICE, dtype=DTYPE)
    if model.fused is None:
        stacked = StackedWeights.of(model._decoder, model._embed, model.head)
        assert stacked is not None
        model.stacked = stacked.with_attention(seen(model), model.max_context_length)
        assert model.stacked is not None
        model.fused = FusedDecoder(model.stacked, model.head)
    return model


def seen(model: BaseModel) -> Any:
    """What the attention of every layer computes, of a pass of the model's own code."""
    found: dict[int, Any] = {}
    ids = torch.arange(4, device=DEVICE)
    packing = Packing.of([4], device=DEVICE, layers_seen=found)
    model._original_hidden(ids, packing, gradients=False)
    return [found[at] for at in sorted(found)]


def adapter(model: BaseModel, rank: int) -> SamplerAdapter:
    layout = make_layout([t for t in model.targets if t.kind != "unembed"], rank)
    generator = torch.Generator().manual_seed(rank)
    live = (torch.randn(layout.size, generator=generator) * 0.1).to(DEVICE, DTYPE)
    return SamplerAdapter(layout=layout, scale=0.7, live=live)


def gap(found: Tensor, expected: Tensor) -> float:
    """Relative difference; NaN if anything is NaN."""
    found, expected = found.double().cpu(), expected.double().cpu()
    return float((found - expected).norm() / expected.norm())


class NoLook(TorchDispatchMode):
    """Fails on operations that wait for the device, which a CUDA graph cannot record."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "bincount"), name
        if name in ("index", "index_put", "index_put_"):
            assert not any(each is not None and each.dtype == torch.bool for each in args[1]), name
        return func(*args, **(kwargs or {}))


def test_a_look_at_the_device_is_seen() -> None:
    numbers = torch.ones(3, device=DEVICE)
    for look in (lambda: numbers.sum().item(), lambda: numbers[numbers > 0], numbers.nonzero):
        with NoLook(), pytest.raises(AssertionError):
            look()


def decode(model: BaseModel, tokens_BT: Tensor, adapters: list[SamplerAdapter | None]) -> Tensor:
    """Logits [T, B, V] of all tokens, one after another, in a cache of NaN. The last row is spare."""
    from tinkex.engine.model.decode_ops import LoraTables

    assert model.fused is not None
    assert model.stacked is not None
    count, length = tokens_BT.shape
    rows, pages = count + 1, -(-length // PAGE)
    cache = [
        CacheLayer(
            *(
                torch.full(((count * pages + 1) * PAGE, *s), float("nan"), dtype=DTYPE).to(DEVICE)
                for s in shapes
            )
        )
        for shapes in model.cache_shapes
    ]
    table = torch.randperm(count * pages).view(count, pages).int()
    table = torch.nn.functional.pad(table, (0, 0, 0, 1)).to(DEVICE)
    distinct = [each for each in dict.fromkeys(adapters) if each is not None]
    lora = None
    if distinct:
        both = [
            addresses(model.stacked.embedding, model.stacked.targets, one.pairs) for one in distinct
        ]
        ranks = Ranks.of(distinct)
        assert ranks is not None
        slots = [-1 if one is None else distinct.index(one) for one in adapters]
        lora = LoraTables(
            base=model.stacked.embedding,
            offsets=torch.tensor([offsets for offsets, _ in both], device=DEVICE),
            ranks=torch.tensor([r for _, r in both], dtype=torch.int32, device=DEVICE),
            scales=torch.tensor([one.scale for one in distinct], device=DEVICE),
            slots_B=torch.tensor([*slots, -1], dtype=torch.int32, device=DEVICE),
            rank=ranks.largest,
            rank_step=ranks.step,
            counter=torch.zeros(1, dtype=torch.int32, device=DEVICE),
        )
    steps = []
    for at in range(length):
        fields = torch.full((3, 16), at, dtype=torch.int32, device=DEVICE)
        fields[0, :count] = tokens_BT[:, at]
        fields[2, count:] = -1
        logits = torch.full((rows, model.vocab_size), float("nan"), device=DEVICE)
        inputs = DecodeInputs(
            ids_B=fields[0, :rows],
            positions_B=fields[1, :rows],
            last_B=fields[2, :rows],
            table=table,
        )
        with NoLook():
            model.fused.write_logits(
                inputs, cache, page=PAGE, spare=count * pages, lora=lora, out_BV=logits
            )
        steps.append(logits[:count])
    return torch.stack(steps)


@torch.inference_mode()
def test_decoding_equals_the_pass_of_the_whole_sequence(model: BaseModel) -> None:
    """A row without an adapter and rows of two adapters, beyond the window."""
    tokens = torch.randint(model.vocab_size, (3, 10), device=DEVICE)
    adapters = [None, adapter(model, 8), adapter(model, 3)]
    found = decode(model, tokens, adapters)
    for row, own in enumerate(adapters):
        segments = [] if own is None else [AdapterSegment(0, tokens.shape[1], own.pairs)]
        packing = Packing.of([tokens.shape[1]], device=DEVICE)
        expected = model.head.logits(model.hidden(tokens[row], packing, segments))
        assert gap(found[:, row], expected) < BOUND
        if segments:
            plain = model.head.logits(model.hidden(tokens[row], packing))
            assert gap(found[:, row], plain) > 10 * BOUND


@torch.inference_mode()
def test_one_row_has_the_logprobs_of_transformers(model: BaseModel, folder: Path) -> None:
    tokens = torch.randint(model.vocab_size, (1, 11), device=DEVICE)
    found = decode(model, tokens[:, :-1], [None])[:, 0].log_softmax(dim=-1)
    found = found.gather(1, tokens[0, 1:, None])[:, 0]
    assert gap(found, logprobs_of(folder, tokens[0].tolist())) < BOUND


@torch.inference_mode()
def test_the_comparison_before_use(model: BaseModel) -> None:
    assert model.fused is not None
    assert not model.fused.prefills
    ids, expected = model.probed
    assert gap(model.fused.probe_logits(ids), expected) < BOUND


@torch.inference_mode()
def test_the_comparison_uses_the_experts_that_the_original_model_chose(model: BaseModel) -> None:
    """An expert of a near tie may flip; a router that chooses others altogether is refused."""
    assert model.stacked is not None
    ids, _ = model.probed
    packing = Packing.of([len(ids)], device=DEVICE)
    model._original_hidden(ids, packing, gradients=False)
    routed, others = {}, {}
    for each in model.experts:
        index, count = each.routed_TK, len(each.weights.in_EHO)
        assert index is not None
        weights = torch.rand(index.shape, device=DEVICE).to(DTYPE)
        routed[each.name] = RoutedTokens(0, index, weights)
        others[each.name] = RoutedTokens(0, (index + 1) % count, weights)
    with replayed_routing(model.experts, routed, 0):
        expected = model.head.logits(model._original_hidden(ids, packing, gradients=False))[-1]
    found = FusedDecoder(model.stacked, model.head, routed).probe_logits(ids)
    assert gap(found, expected) < BOUND
    with pytest.raises(ArithmeticError, match="routers choose"):
        FusedDecoder(model.stacked, model.head, others).probe_logits(ids)


def test_training_runs_other_code(model: BaseModel) -> None:
    assert model.stacked is not None
    assert model.stacked.shape is None
    model.prepare_packed_layers()
    model.use_packed_layers()
    assert model._packed is None
    assert model.planned_bytes_per_token == model.bytes_per_token
