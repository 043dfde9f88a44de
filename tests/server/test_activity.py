"""The activity line: its text, and that an idle server does nothing for it."""

import asyncio
import logging
from pathlib import Path

import pytest

from server.echo import BASE, EchoExecutor
from server.hosting import hosted
from tinkex.server.activity import Activity, busy_line, idle_line
from tinkex.wire.proto.frames_pb2 import Stats
from waiting import until_async

GB = 10**9


def test_a_busy_line_says_what_happened_since_the_last() -> None:
    before = Activity(at_s=100.0, tokens_trained=1000, tokens_sampled=50)
    now = Activity(
        at_s=110.0,
        tokens_trained=1980,
        tokens_sampled=450,
        runs=2,
        sequences=6,
        queue=3,
        kv_pages=200,
        kv_pages_used=24,
        adapter_bytes=1_200_000_000,
        adapter_budget_bytes=9_700_000_000,
    )
    assert busy_line(before, now) == (
        "training 2 runs, 98 tok/s; sampling 6 sequences, 40 tok/s; queue 3; KV cache 12 %; "
        "adapters 1.2 GB of 9.7 GB"
    )


def test_a_busy_line_leaves_out_what_does_not_happen() -> None:
    before = Activity(at_s=0.0)
    assert busy_line(before, Activity(at_s=10.0, queue=1_234)) == "queue 1,234"
    waiting = Activity(at_s=10.0, queue=1, waiting_for="the engine of a/b is starting")
    assert busy_line(before, waiting) == "queue 1; the engine of a/b is starting"
    between = Activity(at_s=10.0, tokens_sampled=500)
    assert busy_line(before, between) == "sampling 50 tok/s; queue 0"
    # Rebuilding models, or steps of sessions that were closed since.
    assert (
        busy_line(before, Activity(at_s=10.0, tokens_trained=500)) == "training 50 tok/s; queue 0"
    )
    prompts = Activity(at_s=10.0, tokens_prefilled=9_000, tokens_sampled=5, sequences=1)
    assert busy_line(before, prompts) == (
        "sampling 1 sequence, 0.5 tok/s, prompts 900 tok/s; queue 0"
    )


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(1.0, "1 second"), (45.0, "45 seconds"), (180.0, "3 minutes"), (9000.0, "2.5 hours")],
)
def test_an_idle_line_sums_up(seconds: float, said: str) -> None:
    first = Activity(at_s=7.0, tokens_trained=10)
    last = Activity(at_s=7.0 + seconds, tokens_trained=1_214, tokens_sampled=300)
    assert idle_line(first, last) == (f"idle: 1,204 tokens trained, 300 sampled in the last {said}")


class Counting(EchoExecutor):
    """Reports these statistics, and counts how often they are read."""

    def __init__(self) -> None:
        super().__init__(BASE, "test/unused")
        self.current = Stats(adapter_budget_bytes=GB)
        self.reads = 0

    def waiting_for(self, base_model: str) -> str | None:
        return None if base_model == BASE else f"the engine of {base_model} is starting"

    def stats(self, base_model: str) -> Stats | None:
        self.reads += 1
        return self.current if base_model == BASE else None


@pytest.mark.anyio
async def test_nothing_runs_while_the_server_is_idle(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    executor = Counting()

    def said() -> list[str]:
        return [one.getMessage() for one in caplog.records if one.name.endswith(".activity")]

    async with hosted(executor, tmp_path, activity_s=0.05) as api:
        await asyncio.sleep(0.2)
        assert executor.reads == 0
        model = await api.model()
        executor.open.clear()
        passed = await api.forward_backward(model, 1)
        executor.current = Stats(adapter_budget_bytes=GB, tokens_trained=3, models_training=1)
        await until_async(said)
        assert said()[0].startswith("training 1 run, ")
        # Nobody waits for the engine of the other model.
        assert said()[0].endswith("; queue 0; adapters 0 B of 1.0 GB")
        executor.open.set()
        await api.passed(passed)
        await until_async(lambda: said()[-1].startswith("idle: 3 tokens trained, 0 sampled"))
        reads = executor.reads
        await asyncio.sleep(0.2)
        assert executor.reads == reads
        # It begins again with the next request.
        await api.passed(await api.forward_backward(model, 2))
        await asyncio.sleep(0.2)
        assert executor.reads > reads


@pytest.mark.anyio
async def test_an_interval_of_0_logs_nothing(tmp_path: Path) -> None:
    executor = Counting()
    async with hosted(executor, tmp_path, activity_s=0) as api:
        await api.model()
        await asyncio.sleep(0.1)
        assert executor.reads == 0
        model = await api.model()
        await api.passed(await api.forward_backward(model, 1))
        assert executor.reads == 0
