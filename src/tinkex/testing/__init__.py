"""
A fake Tinker service for tests of programs that use tinkex: no network, model or server.

    from tinkex.testing import FakeService

    fake = FakeService()
    with fake.client() as service:
        training = service.create_lora_training_client("fake/model")
        training.forward_backward(data, "cross_entropy").result()
    assert [r.endpoint for r in fake.requests][-1] == "sessions/s-1/finish"

The fake replaces the transport: encoding, ordering, retries and futures are the real client's. It
follows the protocol (steps run once and in the order of their numbers, results can be fetched
again). Its model is a toy: each `optim_step` makes every token more likely.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from tinkex.testing.fake_service import FakeService
from tinkex.testing.fake_transport import Loopback
from tinkex.testing.faults import Answer, Hold, Lost, Seen

__all__ = ["Answer", "FakeService", "Hold", "Loopback", "Lost", "Seen", "write_tiny_model"]


def write_tiny_model(
    folder: str | Path, arch: Literal["qwen3", "llama"] = "qwen3", seed: int = 0
) -> Path:
    """Write a small random model that can be trained in seconds. Needs the extra `engine`."""
    from tinkex.models.tiny_model import write_tiny_model as write

    return write(Path(folder), arch=arch, seed=seed)
