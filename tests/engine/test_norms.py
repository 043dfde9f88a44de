"""RMS norms are recognized by what they compute, and other modules are left alone."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHRMSNormGated
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from tinkex.engine.model.lora import AdapterContext
from tinkex.engine.model.norms import recorded_weight, replace_norms

SIZE = 48


class HalvedNorm(Qwen3RMSNorm):
    """The parts of an RMS norm, with another result."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "added"), [(Qwen3RMSNorm, 0.0), (Gemma2RMSNorm, 1.0)])
def test_weights_with_and_without_one_added(kind: Any, added: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = kind(SIZE)
    nn.init.normal_(module.weight, std=0.3)
    module = module.to(dtype)
    found = recorded_weight(module)
    assert found is not None
    assert torch.equal(found.float(), module.weight.detach().float() + added)


@pytest.mark.parametrize(
    "module",
    [
        nn.LayerNorm(SIZE),
        nn.Linear(SIZE, 1),
        HalvedNorm(SIZE),
        Qwen3NextRMSNormGated(SIZE),
        NemotronHRMSNormGated(SIZE, group_size=SIZE // 2),
    ],
    ids=lambda module: type(module).__name__,
)
def test_other_modules_stay_as_they_are(module: nn.Module) -> None:
    assert recorded_weight(module) is None


def test_passes_that_are_not_recorded_run_the_own_code() -> None:
    module = Qwen3RMSNorm(SIZE)
    x = torch.randn(3, SIZE)
    expected = module(x)
    assert replace_norms(nn.ModuleList([module]), AdapterContext()) == 1
    assert torch.equal(module(x), expected)
    assert torch.equal(module(hidden_states=x), expected)
