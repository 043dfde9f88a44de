"""The fence: a stopped worker continues after another has taken its model, and publishes nothing."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from postgres import Postgres
from processes import children
from server.hosting import Api, connected
from serving import TINY
from waiting import until_async

pytestmark = pytest.mark.anyio

PROGRAM = Path(__file__).resolve().parents[1] / "server" / "shared_worker.py"


@dataclass
class Worker:
    process: subprocess.Popen[str]
    url: str
    log: Path

    def signal(self, number: int) -> None:
        """To the process and its engine."""
        for pid in (self.process.pid, *children(self.process.pid)):
            os.kill(pid, number)


@contextmanager
def worker(name: str, url: str, folder: Path, model: Path) -> Iterator[Worker]:
    log = folder.with_name(f"{name}.log")
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, PROGRAM, name, url, folder, model],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    assert process.stdout
    assert process.stdin
    try:
        found = process.stdout.readline().strip()
        assert found.startswith("http"), log.read_text()
        yield Worker(process, found, log)
    finally:
        process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


async def new_model(api: Api) -> str:
    session = await api.session()
    body = {
        "session_id": session,
        "model_seq_id": 0,
        "base_model": TINY,
        "lora_config": {"rank": 4, "seed": 7},
    }
    answer = await api.post("create_model", body)
    await api.result(answer.json["request_id"])
    return str(answer.json["model_id"])


async def submit(api: Api, model: str, first: int) -> str:
    """A pass and a step; the id of the step."""
    await api.forward_backward(model, first, tokens=6)
    return await api.optim_step(model, first + 1, learning_rate=0.01)


async def logprobs(api: Api, model: str, seq_id: int) -> list[float]:
    output = await api.passed(await api.forward_backward(model, seq_id, tokens=6))
    found: list[float] = output.loss_fn_outputs[0]["logprobs"].tolist()
    return found


async def undisturbed(api: Api) -> list[float]:
    model = await new_model(api)
    for first in (1, 3, 5):
        await api.result(await submit(api, model, first))
    return await logprobs(api, model, 7)


@pytest.mark.timeout(180)
async def test_a_stopped_worker_publishes_nothing_and_no_step_is_lost_or_doubled(
    postgres: Postgres, tiny_model: Path, tmp_path: Path
) -> None:
    url, folder = postgres.database(), tmp_path / "data"
    with worker("one", url, folder, tiny_model) as one:
        async with connected(one.url, TINY) as api:
            expected = await undisturbed(api)
            model = await new_model(api)
            await api.result(await submit(api, model, 1))
            # Its engine stops first, so that it has the next step when all of it stops.
            (engine,) = children(one.process.pid)
            os.kill(engine, signal.SIGSTOP)
            lost = await submit(api, model, 3)
            await asyncio.sleep(0.5)
            one.signal(signal.SIGSTOP)
            with worker("two", url, folder, tiny_model) as two:
                async with connected(two.url, TINY) as other:
                    await other.result(lost)
                    one.signal(signal.SIGCONT)
                    await until_async(lambda: "another worker has" in one.log.read_text())
                    await other.result(await submit(other, model, 5))
                    assert await logprobs(other, model, 7) == expected
    with postgres.connect(url.rpartition("/")[2]) as connection:
        rows = connection.execute(
            "SELECT seq_id, status FROM requests WHERE model_id = %s ORDER BY seq_id", (model,)
        ).fetchall()
        (steps,) = connection.execute(
            "SELECT count(*) FROM step_metrics WHERE model_id = %s AND finished_s IS NOT NULL",
            (model,),
        ).fetchone() or (0,)
    assert rows == [(number, "done") for number in range(8)]
    assert steps == 3
