"""Training over packed tokens with fused kernels, against the code of transformers and autograd.

With TRITON_INTERPRET=1 and Triton installed, the kernels run on a CPU in float32, where both paths
must agree to rounding; on a GPU they run in bfloat16, where both are compared with float32.
"""

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_models import write_model
from tinkex.engine.model.attention import Packing
from tinkex.engine.model.base_model import BaseModel
from tinkex.engine.model.lora import AdapterSegment, Pair, make_pairs
from tinkex.engine.model.stacked_weights import StackedWeights
from tinkex.engine.model.targets import make_layout

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
#: Largest relative difference from float32: rounding of bfloat16, or nearly none.
BOUND = 6e-2 if DEVICE.type == "cuda" else 1e-5

LENGTHS = [5, 9, 70, 3]
TOKENS = sum(LENGTHS)
#: Rank and kinds of targets.
ADAPTERS = [(8, ("attn", "mlp")), (32, ("attn", "mlp")), (3, ("attn",)), (200, ("attn", "mlp"))]

#: Which tokens use which adapter. One has tokens in two places, some tokens have none.
BATCHES: dict[str, list[tuple[int, int, int]]] = {
    "base model": [],
    "one adapter": [(0, TOKENS, 1)],
    "several adapters": [(0, 5, 0), (5, 40, 1), (40, 60, 2), (60, TOKENS, 0)],
    "a large rank, and tokens without adapter": [(0, 30, 3), (40, 60, 1)],
}


class Adapter:
    def __init__(self, model: BaseModel, rank: int, kinds: tuple[str, ...]) -> None:
        layout = make_layout([t for t in model.targets if t.kind in kinds], rank)
        generator = torch.Generator().manual_seed(rank)
        live = (torch.randn(layout.size, generator=generator) * 0.05).to(torch.bfloat16)
        self.grad = torch.zeros(layout.size, device=DEVICE)
        self.pairs: Mapping[str, Pair] = make_pairs(
            layout, live.to(DEVICE, model.dtype), scale=32 / rank, grad=self.grad
        )


class Run:
    """One forward and backward pass."""

    def __init__(
        self,
        model: BaseModel,
        batch: list[tuple[int, int, int]],
        hidden_with_backward: Callable[..., tuple[Tensor, Callable[[Tensor], None]]],
        **options: bool,
    ) -> None:
        torch.manual_seed(0)
        ids = torch.randint(0, model.vocab_size, (TOKENS,)).to(DEVICE)
        adapters = [Adapter(model, rank, kinds) for rank, kinds in ADAPTERS]
        self.segments = [
            AdapterSegment(start, stop, adapters[at].pairs) for start, stop, at in batch
        ]
        packing = Packing.of(LENGTHS, device=DEVICE)
        self.inputs = (ids, packing, self.segments)
        hidden_TH, backward = hidden_with_backward(*self.inputs, **options)
        self.hidden = hidden_TH.float()
        backward(torch.randn(hidden_TH.shape).to(DEVICE, hidden_TH.dtype))
        self.grads = [adapter.grad for adapter in adapters]


def gap(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp(min=1e-20))


@pytest.fixture(scope="module", params=["qwen3", "qwen2", "llama"])
def models(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[BaseModel, BaseModel]:
    """The model in float32 with the code of transformers, and the model under test."""
    folder = write_model(tmp_path_factory.mktemp(request.param), request.param, layers=2)
    exact = BaseModel(folder, device=DEVICE, dtype=torch.float32, kernels=False)
    model = BaseModel(folder, device=DEVICE, dtype=DTYPE)
    if DEVICE.type == "cuda":
        model.prepare_packed_layers()
        model.use_packed_layers()
    else:
        from tinkex.engine.model.packed_layers import PackedLayers

        stacked = StackedWeights.of(model._decoder, model._embed, model.head)
        assert stacked is not None
        model._packed = PackedLayers(stacked)
    assert model._packed is not None
    return exact, model


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.timeout(600)
def test_hidden_states_and_gradients(
    models: tuple[BaseModel, BaseModel], name: str, checkpoint: bool
) -> None:
    exact, model = models
    batch = BATCHES[name]
    expected = Run(exact, batch, exact.hidden_with_backward)
    found = Run(model, batch, model.hidden_with_backward, checkpoint=checkpoint)
    assert gap(found.hidden, expected.hidden) < BOUND
    assert gap(model.hidden(*found.inputs).float(), expected.hidden) < BOUND
    for mine, theirs in zip(found.grads, expected.grads, strict=True):
        assert gap(mine, theirs) < BOUND


def test_softmax_of_the_logits_and_its_gradient() -> None:
    from tinkex.engine.model import packed_kernels as kernels

    torch.manual_seed(0)
    logits = torch.randn(7, 9_001, device=DEVICE) * 5
    targets = torch.randint(0, 9_001, (7, 2), device=DEVICE)
    g = torch.randn(7, 2, device=DEVICE)
    lse = kernels.log_sum_exp(logits)
    assert gap(lse, torch.logsumexp(logits, dim=1)) < 1e-6
    rows = torch.tensor([5, 0, 3], device=DEVICE)
    found = kernels.logits_gradient(logits, rows, lse, targets, g, torch.float32)
    probabilities = logits.softmax(dim=1)
    onehot = (F.one_hot(targets, 9_001) * g.unsqueeze(2)).sum(dim=1)
    expected = onehot - probabilities * g.sum(dim=1, keepdim=True)
    assert gap(found, expected[rows]) < 1e-5


def test_planned_memory_is_what_a_pass_takes(models: tuple[BaseModel, BaseModel]) -> None:
    model = models[1]
    if DEVICE.type != "cuda":
        pytest.skip("torch counts the memory of GPUs only")
    lengths = [512] * 16
    packing = Packing.of(lengths, device=DEVICE)
    adapter = Adapter(model, 32, ("attn", "mlp"))
    ids = torch.zeros(sum(lengths), dtype=torch.long, device=DEVICE)
    segments = [AdapterSegment(0, len(ids), adapter.pairs)]
    for checkpoint, planned in (
        (False, model.bytes_per_token),
        (True, model.checkpoint_bytes_per_token),
    ):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        hidden, backward = model.hidden_with_backward(ids, packing, segments, checkpoint=checkpoint)
        backward(torch.zeros_like(hidden))
        taken = (torch.cuda.max_memory_allocated() - before) / len(ids)
        assert taken < 1.25 * planned
