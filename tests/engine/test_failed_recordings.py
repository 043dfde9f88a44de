"""A recording that fails leaves torch's allocator, and the engine's path without graphs, as before."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from numerics.helpers import VOCABULARY, request, sample
from numerics.mixtures import write_mixture
from tinkex.engine import Engine, EngineSettings
from tinkex.engine.sampling import kernel_compiler
from tinkex.engine.sampling.decode_graphs import end_allocations

POOL = (0, 7)


class Allocator:
    """What torch's allocator remembers of a recording, by torch's rules."""

    def __init__(self, *, underway: bool) -> None:
        self.underway, self.users = underway, 1

    def end(self, device: int, pool: tuple[int, int]) -> None:
        assert (device, pool) == (3, POOL)
        if not self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway = False

    def release(self, device: int, pool: tuple[int, int]) -> None:
        assert (device, pool) == (3, POOL)
        self.users -= 1


@pytest.mark.parametrize("underway", [True, False])
def test_allocations_end_once(underway: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(underway=underway)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", allocator.end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", allocator.release, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    end_allocations(POOL)
    assert not allocator.underway
    # The graph releases the pool itself if torch has ended the recording.
    assert allocator.users == (0 if underway else 1)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="records CUDA graphs")
def test_a_step_that_waits_for_the_device_runs_without_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(
        EngineSettings(
            name="mixture",
            folder=write_mixture(tmp_path / "model", "Qwen3Moe"),
            device="cuda",
            dtype="bfloat16",
            kv_tokens=2048,
            memory_bytes=4 << 30,
        )
    )
    kind: Any = type(engine.model.decoder)
    write_logits = kind.write_logits

    def waiting(self: Any, *args: Any, **others: Any) -> None:
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
        write_logits(self, *args, **others)

    monkeypatch.setattr(kind, "write_logits", waiting)
    prompt = np.random.default_rng(0).integers(0, VOCABULARY, 70).tolist()
    requests = [request(prompt, samples=3, max_tokens=20, seed=1, stop=[])]
    sample(engine, requests)  # makes the sampler
    assert engine._sampler is not None
    runner = engine._sampler._runner
    assert runner.compiler is not None
    runner.compiler.waits = True
    (answer,) = sample(engine, requests)
    assert [len(one.tokens) for one in answer.sequences] == [20, 20, 20]
    assert runner.compiler.refused == {kernel_compiler.COMPARISON}
    assert runner.decode_steps == 1
    # torch refuses both as long as it takes a recording for underway.
    torch.cuda.empty_cache()
    graph, x = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
    with torch.cuda.graph(graph):
        x += 1
    graph.replay()
    assert int(x) == 1
