"""
A real server whose disk becomes full and free again: no step is lost, without a restart.

A limit on file sizes (`ulimit -f`) of the web process simulates the full disk: every write of SQLite
and of files fails from one moment on.
"""

import asyncio
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from processes import children
from server.hosting import Api, connected
from serving import TINY, Server

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]


@contextmanager
def full_disk(server: Server) -> Iterator[None]:
    """The web process cannot write to any file until the block ends."""
    (web,) = children(server.process.pid)
    before = resource.prlimit(web, resource.RLIMIT_FSIZE)
    resource.prlimit(web, resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.prlimit(web, resource.RLIMIT_FSIZE, before)


async def until_writable(api: Api) -> None:
    """New requests are refused until the server has seen that it can write again."""
    for _ in range(300):
        if (await api.get("/api/v1/healthz")).status == 200:
            return
        await asyncio.sleep(0.1)
    pytest.fail("the server does not notice that it can write again")


async def loss(api: Api, request_id: str) -> float:
    return (await api.passed(request_id)).metrics["loss:sum"]


async def test_steps_continue_when_there_is_free_space_again(server: Server) -> None:
    async with connected(server.url, TINY) as api:
        model = await api.model()
        first = await api.forward_backward(model, 1, tokens=8)
        known = await loss(api, first)
        # Waits for its seq_id, so that it runs while nothing can be written.
        behind = await api.optim_step(model, 3, learning_rate=1e-2)
        with full_disk(server):
            body = {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 1e-2}}
            refused = await api.post("optim_step", body)
            assert refused.status == 503
            assert "disk" in refused.json["detail"]
            health = await api.get("/api/v1/healthz")
            assert health.status == 503
            # Existing results are still returned.
            assert await loss(api, first) == known
            assert (await api.get(f"/api/v1/training_runs/{model}")).status == 200
        # Its client retries, as after any 503.
        for _ in range(300):
            taken = await api.post("optim_step", body)
            if taken.status == 200:
                break
            await asyncio.sleep(0.1)
        assert "metrics" in await api.result(taken.json["request_id"])
        assert "metrics" in await api.result(behind)
        await until_writable(api)
        assert await loss(api, await api.forward_backward(model, 4, tokens=8)) < known
        assert (await api.get("/api/v1/healthz")).status == 200


async def test_a_result_waits_until_it_can_be_written(server: Server) -> None:
    async with connected(server.url, TINY) as api:
        model = await api.model()
        passes = [await api.forward_backward(model, number, tokens=8) for number in range(1, 9)]
        step = await api.optim_step(model, 9, learning_rate=1e-2)
        with full_disk(server):
            # Until a result cannot be stored, unless all are done already.
            for _ in range(50):
                if (await api.get("/api/v1/healthz")).status == 503:
                    break
                await asyncio.sleep(0.02)
        losses = [await loss(api, one) for one in passes]
        # No step came between them. Passes of another company differ in the last bits.
        assert losses == pytest.approx([losses[0]] * 8, rel=1e-5)
        assert "metrics" in await api.result(step)
        await until_writable(api)
        later = await api.forward_backward(model, 10, tokens=8)
        assert await loss(api, later) < losses[0]
