"""Large snapshots are written rarely: decided by their bytes, the payloads and the computation."""

import json
import logging
from pathlib import Path

import pytest

from server.echo import EchoExecutor
from server.hosting import hosted
from server.scheduler.test_snapshots import before_snapshots
from tinkex.server.scheduler.model_states import is_worth_writing, replay_worth_s
from tinkex.wire.proto.frames_pb2 import Done, Order

GIB = 2**30


@pytest.mark.parametrize(
    ("size", "payload_bytes", "compute_s", "worth"),
    [
        (0, 0, 0.0, True),  # of an engine that does not say it
        (2**26, 0, 0.0, True),  # small ones cost nothing
        (2**26 + 1, 0, 0.0, False),
        (6 * 10**9, 0, 599.0, False),
        (6 * 10**9, 0, 600.0, True),  # written in 30 s, 5 % of that time
        (6 * 10**9, 5 * 10**9, 0.0, False),
        (6 * 10**9, 6 * 10**9, 0.0, True),  # it takes no more of the disk than the requests
    ],
)
def test_a_snapshot_must_save_more_than_it_costs(
    size: int, payload_bytes: int, compute_s: float, worth: bool
) -> None:
    assert is_worth_writing(size, payload_bytes=payload_bytes, compute_s=compute_s) is worth


class LargeModels(EchoExecutor):
    """A snapshot takes a gigabyte, and each pass ten seconds of computation."""

    async def run(self, base_model: str, work: Order, *, incarnation: int | None = None) -> Done:
        done = await super().run(base_model, work, incarnation=incarnation)
        if work.HasField("create"):
            return Done(result=json.dumps({"snapshot_bytes": 10**9}).encode())
        if work.HasField("run_pass"):
            return Done(result=done.result, compute_s=10.0)
        if work.HasField("snapshot"):
            return Done(result=done.result, compute_s=50.0)
        return done


@pytest.mark.anyio
async def test_a_model_with_large_snapshots_computes_longer_between_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tinkex.server.scheduler")
    executor = LargeModels()
    async with hosted(executor, tmp_path, snapshot_steps=4, janitor_s=0) as api:
        model = await api.model()
        for seq_id in range(1, 61, 2):
            await api.passed(await api.forward_backward(model, seq_id, tokens=1))
            await api.value(await api.optim_step(model, seq_id + 1))
    # At 100 s, which are ten passes and their steps. The time of writing does not count.
    assert replay_worth_s(10**9) == 100
    assert before_snapshots(executor) == [
        (20, "optim_step"),
        (40, "optim_step"),
        (60, "optim_step"),
    ]
    told = [record.message for record in caplog.records if "a snapshot of" in record.message]
    expected = "takes 1.0 GB: none is written before 100 s of computation, or requests of this size"
    assert told == [f"a snapshot of {model} {expected}"]
