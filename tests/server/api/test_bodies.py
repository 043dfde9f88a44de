"""Memory budgets for request bodies: many large bodies, small ones beside them, slow senders."""

import asyncio
import io
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from server.api.test_owner_limits import sample, sampler
from server.echo import EchoExecutor
from server.hosting import Api, connected, hosted
from server.scheduler.test_crash_files import SCRIPT
from tinkex.server.api.bodies import (
    MIN_BYTES_PER_S,
    SLOW_GRACE_S,
    SMALL_BYTES,
    BudgetExhausted,
    MemoryBudget,
)

pytestmark = pytest.mark.anyio

MEBIBYTE = 2**20
LARGE = 12 * MEBIBYTE
MOST = 3 * LARGE
UPLOADS = 30


def padded(body: dict[str, object], size: int) -> bytes:
    """The same request, padded to this size."""
    whole = json.dumps(body).encode()
    return whole[:-1] + b" " * (size - len(whole)) + b"}"


def peak_mib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmHWM"))


async def sent(api: Api, body: bytes) -> int:
    async with api.http.post("/api/v1/asample", data=io.BytesIO(body)) as got:
        return got.status


async def test_memory_stays_within_the_budget_and_small_requests_pass(
    tmp_path: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port, descriptor = listening.getsockname()[1], listening.fileno()
        settings = json.dumps({"max_arriving_bytes": MOST, "arriving_wait_s": 40.0})
        command = [sys.executable, str(SCRIPT), str(descriptor), str(tmp_path), "crash", settings]
        server = await asyncio.to_thread(subprocess.Popen, command, pass_fds=(descriptor,))
        try:
            async with connected(f"http://127.0.0.1:{port}") as api:
                mine = await sampler(api)
                before = peak_mib(server.pid)
                requested = [
                    asyncio.create_task(sent(api, padded(sample(mine, number), LARGE)))
                    for number in range(UPLOADS)
                ]
                small = 0
                while not all(task.done() for task in requested):
                    answer = await api.post("asample", sample(mine, UPLOADS + small))
                    assert answer.status == 200
                    small += 1
                assert {task.result() for task in requested} == {200}
                assert small > 1
                # Each body has several copies while it is decoded; all of them together would be
                # more than a gigabyte.
                assert peak_mib(server.pid) - before < 4 * MOST // MEBIBYTE
        finally:
            server.kill()
            server.wait()


async def upload(api: Api, sent: bytes, declared: int) -> asyncio.StreamWriter:
    """A connection that has sent part of a body and then nothing."""
    url = api.http._base_url
    assert url is not None
    _, writer = await asyncio.open_connection(url.host, url.port)
    head = "POST /api/v1/asample HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n"
    writer.write(head.format(declared).encode() + sent)
    return writer


async def test_a_body_over_the_budget_gets_a_429_and_is_accepted_later(
    echo: EchoExecutor, tmp_path: Path
) -> None:
    large = 4 * SMALL_BYTES
    limits = {"max_arriving_bytes": 2 * large, "arriving_wait_s": 0.2}
    async with hosted(echo, tmp_path, **limits) as api:
        mine = await sampler(api)
        assert api.app is not None
        memory = api.app.state.body_budgets.memory
        writers = [await upload(api, b" " * 100, large) for _ in range(2)]
        while memory.peak_bytes < 2 * large:
            await api.session()
        body = padded(sample(mine, 0), large)
        refused = await api.http.post("/api/v1/asample", data=body)
        assert refused.status == 429
        assert refused.headers["Retry-After"] == "1"
        assert f"{2 * large} of the {2 * large} bytes" in await refused.text()

        async def pieces():  # type: ignore[no-untyped-def]
            yield body[: large // 2]
            yield body[large // 2 :]

        # A body without Content-Length reserves the maximum.
        assert (await api.http.post("/api/v1/asample", data=pieces())).status == 429
        assert (await api.post("asample", sample(mine, 1))).status == 200
        writers[0].close()
        assert (await api.http.post("/api/v1/asample", data=body)).status == 200
        writers[1].close()
        assert (await api.http.post("/api/v1/asample", data=pieces())).status == 200
        # Aborted, refused and answered requests have released their reservations.
        last = await memory.reserve(2 * large)
        assert last is not None
        memory.release(last)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def test_a_slow_sender_loses_its_reservation_only_while_others_wait() -> None:
    clock = Clock()
    size = 100 * MIN_BYTES_PER_S
    memory = MemoryBudget(2 * size, wait_s=3.0, clock=clock)
    slow, quick = await memory.reserve(size), await memory.reserve(size)
    assert slow
    assert quick
    clock.now_s = SLOW_GRACE_S + 50
    memory.count(slow, 10 * MIN_BYTES_PER_S)
    memory.count(quick, 60 * MIN_BYTES_PER_S)
    # No request waits, so nothing is revoked.
    memory.count(slow, 1)
    third = await memory.reserve(80 * MIN_BYTES_PER_S)
    assert third
    memory.count(quick, 1)
    with pytest.raises(BudgetExhausted, match="slower than"):
        memory.count(slow, 1)
    # Its received bytes are still in memory and count.
    waiting = asyncio.create_task(memory.reserve(20 * MIN_BYTES_PER_S))
    await asyncio.sleep(0)
    assert not waiting.done()
    memory.release(slow)
    assert await waiting


async def test_reservations_are_granted_in_order_and_waits_time_out() -> None:
    clock = Clock()
    memory = MemoryBudget(3 * LARGE, wait_s=5.0, clock=clock)
    first = await memory.reserve(2 * LARGE)
    assert first
    large = asyncio.create_task(memory.reserve(3 * LARGE))
    await asyncio.sleep(0)
    small = asyncio.create_task(memory.reserve(LARGE))
    await asyncio.sleep(0.01)
    # It would fit, but then the large one would starve.
    assert not small.done()
    assert await memory.reserve(SMALL_BYTES) is None
    large.cancel()
    reservation = await small
    assert reservation
    memory.release(first)
    # Larger than the budget: it gets the whole budget.
    everything = asyncio.create_task(memory.reserve(100 * LARGE))
    await asyncio.sleep(0.01)
    assert not everything.done()
    memory.release(reservation)
    assert await everything
    late = asyncio.create_task(memory.reserve(LARGE))
    await asyncio.sleep(0)
    clock.now_s = 6.0
    with pytest.raises(BudgetExhausted, match="did not fit within 5 s"):
        await late
    assert memory.peak_bytes == 3 * LARGE
