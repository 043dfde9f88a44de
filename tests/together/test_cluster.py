"""
Real processes: two web processes and two workers on PostgreSQL and an S3 API.

The fence, end to end: a worker is stopped for longer than the take-over time, its model continues on
another one, and the first one continues. Nothing of it is published, and the weights have the same bits
as without all that. `make cluster` runs longer.
"""

import asyncio
import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import Cluster, Process, cluster
from object_store import BUCKET, object_store
from postgres import Postgres
from processes import children
from server.hosting import Api, connected
from serving import TINY
from waiting import until, until_async

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def running(
    postgres: Postgres, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    with object_store() as store:
        storage, env = f"s3://{BUCKET}/cluster", store.environment
        db = postgres.database()
        with cluster(db, folder, tiny_model, storage=storage, env=env) as found:
            # The first one creates the tables; then all start at once.
            found.web()
            workers = [found.worker(name, "--deterministic", wait=False) for name in ("one", "two")]
            found.web()
            for worker in workers:
                assert found.said(worker) == f"tinkex worker {worker.said} ready", worker.log
            for url in found.urls:
                until(lambda url=url: TINY in served(url))
            yield found


def served(url: str) -> str:
    """What a web process serves: it reads the rows of workers once a second."""
    request = urllib.request.Request(f"{url}/api/v1/get_server_capabilities")
    with urllib.request.urlopen(request, timeout=10) as answer:
        return str(answer.read().decode())


def home_of(running: Cluster, postgres: Postgres, model: str) -> Process:
    with postgres.connect(running.db.rpartition("/")[2]) as connection:
        row = connection.execute("SELECT home FROM models WHERE model_id = %s", (model,)).fetchone()
    assert row is not None
    return next(one for one in running.started if one.said == row[0])


async def new_model(api: Api) -> str:
    body = {
        "session_id": await api.session(),
        "model_seq_id": 0,
        "base_model": TINY,
        "lora_config": {"rank": 4, "seed": 7},
    }
    answer = await api.post("create_model", body)
    assert answer.status == 200, answer
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


@pytest.mark.timeout(240)
@pytest.mark.parametrize("stopped_s", [0.0, pytest.param(30.0, marks=pytest.mark.cluster)])
async def test_a_stopped_worker_publishes_nothing_and_no_step_is_lost_or_doubled(
    running: Cluster, postgres: Postgres, stopped_s: float
) -> None:
    """It is stopped until another one has its model, and at least for this long."""
    one, two = running.urls
    async with connected(one, TINY) as api, connected(two, TINY) as other:
        undisturbed = await new_model(api)
        for first in (1, 3, 5):
            await other.result(await submit(api, undisturbed, first))
        expected = await logprobs(other, undisturbed, 7)

        model = await new_model(other)
        await api.result(await submit(other, model, 1))
        stopped = home_of(running, postgres, model)
        # Its engine stops first, so that it has the next step when all of it stops.
        (engine,) = children(stopped.process.pid)
        os.kill(engine, signal.SIGSTOP)
        lost = await submit(api, model, 3)
        await asyncio.sleep(0.5)
        os.kill(stopped.process.pid, signal.SIGSTOP)
        continues_s = time.monotonic() + stopped_s
        await other.result(lost)
        assert home_of(running, postgres, model).said != stopped.said
        await asyncio.sleep(continues_s - time.monotonic())
        stopped.signal(signal.SIGCONT)
        noticed = ("nothing more is stored here", "other workers may have its models")
        await until_async(lambda: any(text in stopped.log for text in noticed), within_s=60)
        await api.result(await submit(other, model, 5))
        assert await logprobs(api, model, 7) == expected
    with postgres.connect(running.db.rpartition("/")[2]) as connection:
        rows = connection.execute(
            "SELECT seq_id, status FROM requests WHERE model_id = %s ORDER BY seq_id", (model,)
        ).fetchall()
        (steps,) = connection.execute(
            "SELECT count(*) FROM step_metrics WHERE model_id = %s AND finished_s IS NOT NULL",
            (model,),
        ).fetchone() or (0,)
    assert rows == [(number, "done") for number in range(8)]
    assert steps == 3


@pytest.mark.timeout(240)
async def test_killed_and_restarted_web_processes_and_a_drained_worker_lose_nothing(
    running: Cluster, postgres: Postgres
) -> None:
    one, two = running.urls
    async with connected(one, TINY) as api, connected(two, TINY) as other:
        model = await new_model(api)
        saved = await api.result(await submit(api, model, 1))
        assert saved is not None
        request = await api.step("save_weights_for_sampler", model_id=model, seq_id=3, path="x")
        path = (await other.result(request))["path"]
        # The supervisor starts another web process on the same socket; the other one goes on.
        (web,) = children(running.started[0].process.pid)
        os.kill(web, signal.SIGKILL)
        await other.result(await submit(other, model, 4))
        leaving = home_of(running, postgres, model)
        # Its client trains on meanwhile.
        stopping = asyncio.create_task(asyncio.to_thread(leaving.stop))
        last = 6
        while not stopping.done() or last < 18:
            await other.result(await submit(api, model, last))
            last += 2
        assert await stopping == 0
        assert home_of(running, postgres, model).said != leaving.said
        assert f"{model} moved to the worker" in leaving.log
        # A web process restarts, as for an upgrade; the other one goes on.
        restarting = asyncio.create_task(asyncio.to_thread(running.restart, two))
        while not restarting.done():
            await api.result(await submit(api, model, last))
            last += 2
        await restarting
        undisturbed = await new_model(api)
        await api.result(await submit(api, undisturbed, 1))
        for first in range(3, last - 1, 2):
            await api.result(await submit(api, undisturbed, first))
        assert await logprobs(api, model, last) == await logprobs(other, undisturbed, last - 1)
        body = {
            "model_path": path,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
            "num_samples": 2,
            "sampling_params": {"max_tokens": 4, "seed": 1},
        }
        sampled = await api.result((await other.post("asample", body)).json["request_id"])
        assert len(sampled["sequences"]) == 2
    # The other test needs two workers, and may come after this one.
    running.worker("three", "--deterministic")
