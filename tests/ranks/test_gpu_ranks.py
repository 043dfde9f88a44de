"""Ranks on a GPU. Machines with several were not available, so two ranks share one.

NCCL refuses two ranks on one GPU: their tensors then go through host memory, and NCCL itself is
tried with one rank. Without a GPU the tests run on the CPU, where they show nothing new.
"""

import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed

from numerics.helpers import random_adapter, request, sample, weighted, work
from ranks.ranked import follow, forked, ranked
from ranks.test_agreement import PARAMS, create, outputs, tensors
from tinkex.engine.ranks import engine as ranked_engine
from tinkex.engine.ranks import follower
from tinkex.engine.ranks.process_group import ProcessGroup
from tinkex.testing import write_tiny_model

pytestmark = pytest.mark.gpu

CUDA = torch.cuda.is_available()
DEVICE = "cuda:0" if CUDA else "cpu"
dist: Any = torch.distributed

#: Of the largest number. The ranks add in another order.
TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2}


class Done:
    def wait(self) -> None:
        pass


class HostBackend:
    """The calls of NCCL's backend that ranks make, through host memory."""

    Options = dist.ProcessGroupNCCL.Options if CUDA else None

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self._gloo = dist.ProcessGroupGloo(store, rank, size, options._timeout)

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Done:
        return self._through_host(self._gloo.allreduce, tensors, options)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Done:
        return self._through_host(self._gloo.broadcast, tensors, options)

    def gather(
        self, parts: list[list[torch.Tensor]], own: list[torch.Tensor], options: Any
    ) -> Done:
        on_host = [[part.cpu() for part in each] for each in parts]
        self._gloo.gather(on_host, [each.cpu() for each in own], options).wait()
        return self._copied(parts, on_host)

    def allgather(self, parts: list[list[torch.Tensor]], own: list[torch.Tensor]) -> Done:
        on_host = [[part.cpu() for part in each] for each in parts]
        self._gloo.allgather(on_host, [each.cpu() for each in own]).wait()
        return self._copied(parts, on_host)

    def _through_host(self, call: Any, tensors: list[torch.Tensor], options: Any) -> Done:
        on_host = [each.cpu() for each in tensors]
        call(on_host, options).wait()
        return self._copied([tensors], [on_host])

    def _copied(self, to: list[list[torch.Tensor]], found: list[list[torch.Tensor]]) -> Done:
        for targets, sources in zip(to, found, strict=True):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
        return Done()


def share_gpu() -> None:
    """Puts all ranks on one GPU, for this process."""
    if CUDA:
        dist.ProcessGroupNCCL = HostBackend
        for module in (follower, ranked_engine):
            module.settings_of_rank = lambda settings, rank: settings


def follow_on_shared_gpu(settings: str, rank: int, control: socket.socket) -> None:
    share_gpu()
    follow(settings, rank, control)


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Starts the other ranks on the GPU of this process."""
    for module in (follower, ranked_engine):
        monkeypatch.setattr(module, "settings_of_rank", module.settings_of_rank)
    if CUDA:
        monkeypatch.setattr(dist, "ProcessGroupNCCL", dist.ProcessGroupNCCL)
    share_gpu()
    return forked(follow_on_shared_gpu)


def assert_near(one: dict[str, Any], two: dict[str, Any], tolerance: float) -> None:
    assert one.keys() == two.keys()
    largest = max(float(np.abs(np.asarray(each)).max()) for each in one.values())
    for name, value in one.items():
        gap = float(np.abs(np.asarray(value) - np.asarray(two[name])).max())
        assert gap <= tolerance * largest, (name, gap, largest)


@pytest.mark.parametrize("dtype", TOLERANCES if CUDA else ["float32"])
def test_two_ranks_that_share_a_gpu_compute_what_one_does(
    dtype: str, one_gpu: Any, tmp_path: Path
) -> None:
    folder = write_tiny_model(tmp_path / "model", arch="qwen3")
    tolerance = TOLERANCES[dtype]
    data = work([weighted(np.random.default_rng(0), length) for length in (20, 7)])
    settings = {"device": DEVICE, "dtype": dtype, "memory_bytes": 4 << 30}
    with (
        ranked(folder, 1, **settings) as one,
        ranked(folder, 2, start=one_gpu, **settings) as two,
    ):
        adapter = random_adapter(one, tmp_path / "adapter")
        for engine in (one, two):
            create(engine, "m")
            engine.load("m", adapter, optimizer=False)
        assert_near(
            *(outputs(engine, "m", data, backward=True) for engine in (one, two)), tolerance
        )
        assert_near(*(tensors(engine, "m") for engine in (one, two)), tolerance)
        for engine in (one, two):
            engine.optim_step("m", PARAMS["adamw"])
        if dtype == "float32":
            assert_near(*(tensors(engine, "m") for engine in (one, two)), tolerance)
        asked = [request([5, 6, 7, 8], samples=2, max_tokens=12, seed=1, stop=[])]
        (first,), (second,) = (sample(engine, asked, [adapter]) for engine in (one, two))
        if dtype == "float32":
            assert [each.tokens for each in first.sequences] == [
                each.tokens for each in second.sequences
            ]


def test_nccl_makes_the_calls_of_a_rank(tmp_path: Path) -> None:
    """With one rank: that it takes these arguments, types and shapes."""
    group = ProcessGroup(
        rank=0,
        size=1,
        device=torch.device(DEVICE),
        rendezvous=tmp_path / "store",
        decisions=None,  # type: ignore[arg-type]
        timeout_s=60,
    )
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        numbers = torch.arange(12, device=DEVICE).to(dtype).reshape(3, 4)
        for found in (
            group.sum_(numbers.clone()),
            group.sum_(numbers.clone().t()).t(),
            group.max_(numbers.clone()),
            group.first(numbers),
            *group.gather(numbers),
            *group.all_gather(numbers),
        ):
            assert torch.equal(found, numbers)
    assert group.sum_of(1.5) == group.largest(1.5) == 1.5
    assert group.least(7) == 7
    group.wait_for_all()
    group.close()


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_nccl_refuses_two_ranks_on_one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, the first test can use NCCL."""
    folder = write_tiny_model(tmp_path / "model", arch="qwen3")
    monkeypatch.setattr(ranked_engine, "settings_of_rank", lambda settings, rank: settings)
    with (
        pytest.raises(AssertionError, match="lost the others"),
        ranked(folder, 2, start=forked(follow_same_gpu), device=DEVICE, rank_timeout_s=30),
    ):
        pass


def follow_same_gpu(settings: str, rank: int, control: socket.socket) -> None:
    follower.settings_of_rank = lambda settings, rank: settings
    follow(settings, rank, control)
