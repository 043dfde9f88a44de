"""Many large bodies at once: memory has an end, small requests pass, and whoever waits gets in."""

import asyncio
import io
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from server.api.test_limits import sample, sampler
from server.echo import EchoExecutor
from server.hosting import Api, connected, hosted
from server.scheduler.test_in_flight_file import SCRIPT
from tinkex.server.api.bodies import MOMENT_S, PACE_BYTES_S, SMALL_BYTES, NoRoom, Room

pytestmark = pytest.mark.anyio

MEBIBYTE = 2**20
LARGE = 12 * MEBIBYTE
MOST = 3 * LARGE
UPLOADS = 30


def padded(body: dict[str, object], size: int) -> bytes:
    """The same request with so many bytes."""
    whole = json.dumps(body).encode()
    return whole[:-1] + b" " * (size - len(whole)) + b"}"


def peak_mib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmHWM"))


async def sent(api: Api, body: bytes) -> int:
    async with api.http.post("/api/v1/asample", data=io.BytesIO(body)) as got:
        return got.status


async def test_memory_stays_within_the_room_whoever_sends_and_small_requests_pass(
    tmp_path: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port, descriptor = listening.getsockname()[1], listening.fileno()
        settings = json.dumps({"max_arriving_bytes": MOST, "arriving_wait_s": 40.0})
        command = [sys.executable, str(SCRIPT), str(descriptor), str(tmp_path), "both", settings]
        server = await asyncio.to_thread(subprocess.Popen, command, pass_fds=(descriptor,))
        try:
            async with connected(f"http://127.0.0.1:{port}") as api:
                mine = await sampler(api)
                before = peak_mib(server.pid)
                asked = [
                    asyncio.create_task(sent(api, padded(sample(mine, number), LARGE)))
                    for number in range(UPLOADS)
                ]
                small = 0
                while not all(task.done() for task in asked):
                    answer = await api.post("asample", sample(mine, UPLOADS + small))
                    assert answer.status == 200
                    small += 1
                assert {task.result() for task in asked} == {200}
                assert small > 1
                # Each is here in parts, whole, and as text while it is decoded; all of them would
                # be more than a gigabyte.
                assert peak_mib(server.pid) - before < 4 * MOST // MEBIBYTE
        finally:
            server.kill()
            server.wait()


async def upload(api: Api, sent: bytes, declared: int) -> asyncio.StreamWriter:
    """A connection that has sent some of a body, and is silent now."""
    url = api.http._base_url
    assert url is not None
    _, writer = await asyncio.open_connection(url.host, url.port)
    head = "POST /api/v1/asample HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n"
    writer.write(head.format(declared).encode() + sent)
    return writer


async def test_a_body_without_room_is_refused_after_a_while_and_let_in_later(
    echo: EchoExecutor, tmp_path: Path
) -> None:
    large = 4 * SMALL_BYTES
    limits = {"max_arriving_bytes": 2 * large, "arriving_wait_s": 0.2}
    async with hosted(echo, tmp_path, **limits) as api:
        mine = await sampler(api)
        assert api.app is not None
        room = api.app.state.context.room
        writers = [await upload(api, b" " * 100, large) for _ in range(2)]
        while room.peak_bytes < 2 * large:
            await api.session()
        body = padded(sample(mine, 0), large)
        refused = await api.http.post("/api/v1/asample", data=body)
        assert refused.status == 429
        assert refused.headers["Retry-After"] == "1"
        assert f"{2 * large} of the {2 * large} bytes" in await refused.text()

        async def pieces():  # type: ignore[no-untyped-def]
            yield body[: large // 2]
            yield body[large // 2 :]

        # What does not say how long it is counts as the longest that is allowed.
        assert (await api.http.post("/api/v1/asample", data=pieces())).status == 429
        assert (await api.post("asample", sample(mine, 1))).status == 200
        writers[0].close()
        assert (await api.http.post("/api/v1/asample", data=body)).status == 200
        writers[1].close()
        assert (await api.http.post("/api/v1/asample", data=pieces())).status == 200
        # Nothing that was given up, refused or answered has kept any.
        last = await room.take(2 * large)
        assert last is not None
        room.leave(last)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def test_whoever_sends_too_slowly_loses_its_room_only_to_others() -> None:
    clock = Clock()
    size = 100 * PACE_BYTES_S
    room = Room(2 * size, wait_s=3.0, clock=clock)
    slow, quick = await room.take(size), await room.take(size)
    assert slow
    assert quick
    clock.now_s = MOMENT_S + 50
    room.arrived(slow, 10 * PACE_BYTES_S)
    room.arrived(quick, 60 * PACE_BYTES_S)
    # Nobody waits, nobody minds.
    room.arrived(slow, 1)
    third = await room.take(80 * PACE_BYTES_S)
    assert third
    room.arrived(quick, 1)
    with pytest.raises(NoRoom, match="slower than"):
        room.arrived(slow, 1)
    # What has arrived of it is still in memory, and counts.
    waiting = asyncio.create_task(room.take(20 * PACE_BYTES_S))
    await asyncio.sleep(0)
    assert not waiting.done()
    room.leave(slow)
    assert await waiting


async def test_room_is_given_in_order_and_nobody_waits_for_ever() -> None:
    clock = Clock()
    room = Room(3 * LARGE, wait_s=5.0, clock=clock)
    first = await room.take(2 * LARGE)
    assert first
    large = asyncio.create_task(room.take(3 * LARGE))
    await asyncio.sleep(0)
    small = asyncio.create_task(room.take(LARGE))
    await asyncio.sleep(0.01)
    # It would fit; but then the large one would never.
    assert not small.done()
    assert await room.take(SMALL_BYTES) is None
    large.cancel()
    place = await small
    assert place
    room.leave(first)
    # Larger than everything: it gets everything.
    everything = asyncio.create_task(room.take(100 * LARGE))
    await asyncio.sleep(0.01)
    assert not everything.done()
    room.leave(place)
    assert await everything
    late = asyncio.create_task(room.take(LARGE))
    await asyncio.sleep(0)
    clock.now_s = 6.0
    with pytest.raises(NoRoom, match="did not fit within 5 s"):
        await late
    assert room.peak_bytes == 3 * LARGE
