"""The object store of a cluster is silent or refuses connections, and comes back: nothing is lost."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from object_store import BUCKET, ObjectStore, object_store
from server.cluster.conftest import Parts
from server.cluster_parts import a_web, a_worker
from server.echo import BASE, EchoExecutor
from server.hosting import PROTOBUF, Api, pass_body
from tinkex.server.store import blobs

pytestmark = pytest.mark.anyio

#: Payload and result of so many tokens are objects.
LARGE = 40_000
SOON_S = 30.0


@pytest.fixture(scope="module")
def running() -> Iterator[ObjectStore]:
    with object_store() as store:
        yield store


@pytest.fixture
async def stored_parts(
    running: ObjectStore, db: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Parts]:
    """Two web processes and two workers, with objects in the store and short timeouts."""
    for name, value in running.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(blobs._S3, "read_timeout", 1)
    storage = f"s3://{BUCKET}/{tmp_path.name}"
    async with contextlib.AsyncExitStack() as stack:
        found = Parts(db, tmp_path, [])
        for name in ("one", "two"):
            executor = found.executors[name] = EchoExecutor()
            worker = a_worker(db, tmp_path, name, executor, storage=storage)
            found.workers[name] = await stack.enter_async_context(worker)
        for _ in range(2):
            web = a_web(db, tmp_path, storage=storage)
            found.webs.append(await stack.enter_async_context(web))
        yield found


@pytest.mark.parametrize("outage", ["paused", "refusing"])
async def test_nothing_is_lost_while_the_object_store_is_away(
    stored_parts: Parts, running: ObjectStore, outage: str
) -> None:
    one, two = stored_parts.webs
    model = await one.model()
    executor = stored_parts.executors[stored_parts.having(model)]
    executor.open.clear()
    passed = await one.forward_backward(model, 1, tokens=LARGE)
    stepped = await two.optim_step(model, 2)
    saved = await one.step("save_weights_for_sampler", model_id=model, seq_id=3, path="a")
    with getattr(running, outage)():
        executor.open.set()
        # Accepted work waits, and both web processes say why.
        for web, request in ((two, passed), (one, stepped), (two, saved)):
            assert "object store" in await reason(web, request)
        # What needs the store is refused at once; its client repeats it.
        refused = await one.post("forward_backward", pass_body(model, 4, LARGE), headers=PROTOBUF)
        assert refused.status == 503
        assert "object store" in refused.body.decode()
        # A sample needs no object. The other web process has not met the outage.
        body = {
            "base_model": BASE,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
            "sampling_params": {},
        }
        sampled = (await two.post("asample", body)).json["request_id"]
        assert (await two.result(sampled))["sequences"]
    assert (await two.passed(passed)).metrics
    assert await one.value(stepped) == LARGE
    path = (await two.result(saved))["path"]
    await until_accepted(one, model)
    assert await two.value(await two.optim_step(model, 5)) == 3 * LARGE
    sampled = (await one.post("asample", {**body, "base_model": None, "model_path": path})).json
    assert (await two.result(sampled["request_id"]))["sequences"][0]["tokens"] == [LARGE]


@pytest.mark.parametrize("outage", ["paused", "refusing"])
async def test_a_worker_that_is_drained_while_the_object_store_is_away_loses_nothing(
    stored_parts: Parts, running: ObjectStore, outage: str
) -> None:
    one, two = stored_parts.webs
    model = await one.model()
    here = stored_parts.having(model)
    (there,) = set(stored_parts.workers) - {here}
    await two.passed(await one.forward_backward(model, 1, tokens=LARGE))
    with getattr(running, outage)():
        # No snapshot can be written, and the payload of the log cannot be read elsewhere.
        await stored_parts.workers[here].drain(3.0)
        await stored_parts.workers[here].close()
        stepped = await two.optim_step(model, 2)
        assert "object store" in await reason(one, stepped)
    assert await one.value(stepped) == LARGE
    assert stored_parts.having(model) == there


async def reason(web: Api, request_id: str) -> str:
    """Why a request waits: soon, its web process knows."""
    end_s = time.monotonic() + SOON_S
    while not (found := (await web.poll(request_id)).json.get("queue_state_reason")):
        assert time.monotonic() < end_s
    return str(found)


async def until_accepted(web: Api, model: str) -> None:
    """The pass that was refused, once the web process sees that the store is back."""
    end_s = time.monotonic() + SOON_S
    body = pass_body(model, 4, LARGE)
    while (await web.post("forward_backward", body, headers=PROTOBUF)).status == 503:
        assert time.monotonic() < end_s
        await asyncio.sleep(0.1)
