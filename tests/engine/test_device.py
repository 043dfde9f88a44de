"""The choice of a device: what cannot be used says what can."""

from pathlib import Path

import pytest
import torch

from tinkex.engine.device import UnusableDevice, choose_device, total_bytes, used_bytes
from tinkex.wire.engine_settings import EngineSettings


def chosen(device: str) -> torch.device:
    return choose_device(EngineSettings(name="a", folder=Path("/"), device=device))


@pytest.mark.parametrize(
    ("device", "gpus", "says", "hint"),
    [
        ("cuda", 0, "the device is 'cuda', but torch finds no GPU", "Use --device cpu"),
        ("cuda:1", 1, "the device is 'cuda:1', but torch finds 1 GPU.", "Use --device cuda:0."),
        ("cuda:8", 2, "but torch finds 2 GPUs.", "Use --device cuda:0 to cuda:1."),
        ("tpu", 1, "the device 'tpu' is not supported.", "Use --device cpu"),
        ("mps", 0, "the device 'mps' is not supported.", "Use --device cpu"),
    ],
)
def test_a_device_that_cannot_be_used_says_what_can(
    monkeypatch: pytest.MonkeyPatch, device: str, gpus: int, says: str, hint: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(UnusableDevice) as refused:
        chosen(device)
    assert says in str(refused.value)
    assert refused.value.hint.startswith(hint)


def test_the_memory_of_a_cpu_is_measured() -> None:
    cpu = torch.device("cpu")
    assert 10 * 2**20 < used_bytes(cpu) < total_bytes(cpu)
