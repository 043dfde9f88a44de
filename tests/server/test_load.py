"""Load: memory of waiting requests, full servers, and stalled connections."""

import asyncio
import gc
import json
import os
import socket
import struct
from pathlib import Path
from typing import Any

import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol

from server.echo import BASE, EchoExecutor
from server.hosting import Api, hosted
from server.tenants import new_key, with_key
from tinkex.server import process_setup, web_process
from tinkex.server.api.connection_limits import MIN_PROGRESS_BYTES, Phase, StallTimer
from tinkex.server.queued_request import Kind, Outcome, QueuedRequest
from tinkex.wire.proto.frames_pb2 import Done, Order
from waiting import until_async

pytestmark = pytest.mark.anyio

SESSIONS, QUEUED = 200, 5_000
#: An answer larger than any socket buffer.
LARGE = 2**24
#: Memory for one waiting sample of 100 tokens, with its connection's share, its task and its row.
MOST_BYTES_EACH = 20_000


class Held(EchoExecutor):
    """As simple as the real one: a waiting sample costs one task and one event."""

    async def run(self, base_model: str, work: Order, *, incarnation: int | None = None) -> Done:
        await self.open.wait()
        return Done(result=self._do(work))


def sample(sampler: str, number: int, tokens: int = 100) -> dict[str, Any]:
    return {
        "sampling_session_id": sampler,
        "seq_id": number,
        "prompt": {"chunks": [{"tokens": [1] * tokens}]},
        "sampling_params": {"max_tokens": 1},
    }


async def a_sampler(api: Api) -> str:
    body = {
        "session_id": await api.session(),
        "sampling_session_seq_id": 0,
        "base_model": api.base_model,
    }
    return str((await api.post("create_sampling_session", body)).json["sampling_session_id"])


def resident_bytes() -> int:
    gc.collect()
    if process_setup._malloc_trim is not None:
        process_setup._malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


# -- queues --------------------------------------------------------------------------------------


@pytest.mark.timeout(180)
async def test_five_thousand_samples_of_two_hundred_sessions_wait_in_bounded_memory(
    anyio_backend: str, tmp_path: Path
) -> None:
    held = Held()
    held.open.clear()
    async with hosted(held, tmp_path) as api:
        assert api.app is not None
        context = api.app.state.context
        samplers = [await a_sampler(api) for _ in range(SESSIONS)]
        await api.post("asample", sample(samplers[0], 10**6))
        before = resident_bytes()
        gate = asyncio.Semaphore(100)

        async def ask(number: int) -> str:
            async with gate:
                answer = await api.post("asample", sample(samplers[number % SESSIONS], number))
                assert answer.status == 200, answer
                return str(answer.json["request_id"])

        ids = await asyncio.gather(*map(ask, range(QUEUED)))
        assert len(context.futures) == QUEUED + 1
        each = (resident_bytes() - before) / QUEUED
        assert each < MOST_BYTES_EACH, f"{each:.0f} bytes for each waiting sample"
        # All of them finish, and only their results stay in memory.
        held.open.set()
        await until_async(lambda: not len(context.futures), 60)
        assert (await api.result(ids[-1]))["sequences"]
        assert not context.futures.loads
        assert not context.scheduler.replicas(BASE).engines[0].samples._running
        assert not context.scheduler._execution.payloads._kept_bytes


async def test_a_full_server_sends_retry_after_and_accepts_the_rest_later(
    anyio_backend: str, tmp_path: Path
) -> None:
    held = Held()
    held.open.clear()
    keys = [await new_key(tmp_path, owner) for owner in ("alice", "bob")]
    async with (
        hosted(held, tmp_path, max_open=3, long_poll_s=0.05) as api,
        with_key(api, keys[0]) as alice,
        with_key(api, keys[1]) as bob,
    ):
        mine, theirs = await a_sampler(alice), await a_sampler(bob)
        taken = [await alice.post("asample", sample(mine, number)) for number in range(3)]
        assert [answer.status for answer in taken] == [200] * 3
        # One owner cannot fill the server for others; a full server refuses everyone.
        assert (await bob.post("asample", sample(theirs, 1))).status == 200
        assert (await alice.post("asample", sample(mine, 3))).status == 429
        async with bob.http.post("/api/v1/asample", json=sample(theirs, 0)) as refused:
            assert refused.status == 429
            assert refused.headers["Retry-After"] == "1"
            assert "has 4 requests that are not finished, and takes 3" in await refused.text()
        waiting = await alice.poll(taken[0].json["request_id"])
        assert (waiting.status, waiting.json["type"]) == (408, "try_again")
        held.open.set()
        await alice.result(taken[2].json["request_id"])
        late = await bob.post("asample", sample(theirs, 0))
        assert late.status == 200
        assert (await bob.result(late.json["request_id"]))["sequences"]


async def test_the_model_of_a_finished_client_is_evicted_until_it_is_used(api: Api) -> None:
    assert api.app is not None
    scheduler = api.app.state.context.scheduler
    session = await api.session()
    model = await api.model(session)
    await api.value(await api.optim_step(model, 1))
    assert [run.model.model_id for run in scheduler._models.opened()] == [model]
    finish = {"reason": {"type": "success"}, "detail": None}
    assert (await api.post(f"sessions/{session}/finish", finish)).status == 200
    await until_async(lambda: not list(scheduler._models.opened()))
    assert not scheduler._models._opening


async def test_a_model_whose_client_is_back_stays(api: Api, echo: EchoExecutor) -> None:
    assert api.app is not None
    scheduler = api.app.state.context.scheduler
    session = await api.session()
    model = await api.model(session)
    echo.open.clear()
    first = await api.optim_step(model, 1)
    scheduler.unload_session(session)
    second = await api.optim_step(model, 2)
    echo.open.set()
    await asyncio.gather(api.value(first), api.value(second))
    # The same while the client is away.
    await asyncio.sleep(0)
    assert [run.loaded_in for run in scheduler._models.opened()] == [1]
    scheduler.unload_session(session)
    await until_async(lambda: not list(scheduler._models.opened()))
    assert await api.value(await api.optim_step(model, 3)) == 0.0


# -- connections ---------------------------------------------------------------------------------


def connected(api: Api, *, receive_bytes: int = 0) -> socket.socket:
    url = api.http._base_url
    assert url is not None
    made = socket.socket()
    if receive_bytes:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    made.connect((url.host, url.port))
    made.setblocking(False)
    return made


def request(route: str, body: bytes, length: int | None = None) -> bytes:
    return (
        f"POST /api/v1/{route} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body) if length is None else length}\r\n\r\n"
    ).encode() + body


async def closed(held: socket.socket, within_s: float = 20.0) -> bool:
    """Whether the server closes the connection, with or without an answer."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(within_s):
        try:
            while await loop.sock_recv(held, 65536):
                pass
        except ConnectionError:
            pass
    held.close()
    return True


@pytest.mark.parametrize("parser", ["the quick one", "h11"])
async def test_stalled_connections_are_closed(
    tmp_path: Path, parser: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if parser == "h11":
        monkeypatch.setattr(web_process, "HttpToolsProtocol", H11Protocol)
    async with hosted(Held(), tmp_path, head_s=0.4, stall_s=0.4) as api:
        assert api.server is not None
        state = api.server.server_state
        loop = asyncio.get_running_loop()
        silent = connected(api)
        half_head, half_body, drop_by_drop = (connected(api) for _ in range(3))
        await loop.sock_sendall(half_head, b"POST /api/v1/asample HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        await loop.sock_sendall(half_body, request("asample", b'{"prompt":', 10_000))

        async def drop() -> None:
            """Endless headers, one byte at a time."""
            for byte in b"GET /api/v1/healthz HTTP/1.1\r\nX-Long: " + b"a" * 500:
                await loop.sock_sendall(drop_by_drop, bytes([byte]))
                await asyncio.sleep(0.05)

        dropping = asyncio.create_task(drop())
        for held in (silent, half_head, half_body, drop_by_drop):
            assert await closed(held)
        dropping.cancel()
        await asyncio.gather(dropping, return_exceptions=True)
        await until_async(lambda: not state.connections and not state.tasks)
        assert (await api.get("/api/v1/healthz")).status == 200


async def test_waiting_and_idle_connections_are_not_closed(tmp_path: Path) -> None:
    held = Held()
    held.open.clear()
    async with hosted(held, tmp_path, head_s=0.2, stall_s=0.2, long_poll_s=1.0) as api:
        requested = await api.post("asample", sample(await a_sampler(api), 0))
        idle = connected(api)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(idle, b"GET /api/v1/healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert await loop.sock_recv(idle, 65536)
        # Five times the limit.
        assert (await api.poll(requested.json["request_id"])).status == 408
        await loop.sock_sendall(idle, b"GET /api/v1/healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert (await loop.sock_recv(idle, 65536)).startswith(b"HTTP/1.1 200")
        idle.close()


async def test_an_unread_answer_is_aborted_and_a_slowly_read_one_is_not(
    tmp_path: Path,
) -> None:
    async with hosted(Held(), tmp_path, head_s=0.4, stall_s=0.4) as api:
        assert api.app is not None
        assert api.server is not None
        state = api.server.server_state
        large = QueuedRequest(
            request_id="large",
            owner="local",
            kind=Kind.SAVE_WEIGHTS,
            base_model=BASE,
            outcome=Outcome(result=b"x" * LARGE),
        )
        api.app.state.context.futures.finish(large)
        asking = request("retrieve_future", json.dumps({"request_id": "large"}).encode())
        loop = asyncio.get_running_loop()
        by_bytes, slowly = connected(api, receive_bytes=4096), connected(api)
        for one in (by_bytes, slowly):
            await loop.sock_sendall(one, asking)

        async def byte_by_byte() -> None:
            for _ in range(10**6):
                await loop.sock_recv(by_bytes, 1)
                await asyncio.sleep(0.1)

        async def in_pieces() -> int:
            """Read slowly, for several times the limit."""
            read = 0
            while read < LARGE:
                piece = await loop.sock_recv(slowly, 2**17)
                assert piece, f"closed after {read} bytes"
                read += len(piece)
                await asyncio.sleep(0.02)
            return read

        reading = asyncio.create_task(byte_by_byte())
        assert await in_pieces() >= LARGE
        slowly.close()
        await until_async(lambda: not state.connections and not state.tasks)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        by_bytes.close()


async def test_clients_that_vanish_during_a_poll_leave_nothing_behind(tmp_path: Path) -> None:
    held = Held()
    held.open.clear()
    async with hosted(held, tmp_path, long_poll_s=50.0) as api:
        assert api.app is not None
        assert api.server is not None
        state, futures = api.server.server_state, api.app.state.context.futures
        requested = await api.post("asample", sample(await a_sampler(api), 0))
        request_id = requested.json["request_id"]
        polling = request("retrieve_future", json.dumps({"request_id": request_id}).encode())
        loop = asyncio.get_running_loop()
        vanishing = [connected(api) for _ in range(100)]
        for one in vanishing:
            await loop.sock_sendall(one, polling)
        await until_async(lambda: len(futures._unfinished[request_id].waiters) == 100)
        for number, one in enumerate(vanishing):
            if number % 2:  # a reset without a FIN
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one.close()
        # Their polls end with their connections, long before the timeout.
        await until_async(lambda: len(state.connections) <= 2)
        await until_async(lambda: not futures.is_polled(request_id) and not state.tasks)
        held.open.set()
        assert (await api.result(request_id))["sequences"]


async def test_connections_over_the_maximum_get_a_503(tmp_path: Path) -> None:
    async with hosted(Held(), tmp_path, max_connections=5) as api:
        others = [connected(api) for _ in range(5)]
        assert api.server is not None
        state = api.server.server_state
        await until_async(lambda: len(state.connections) >= 5)
        assert (await api.get("/api/v1/healthz")).status == 503
        for one in others:
            one.close()
        await until_async(lambda: len(state.connections) < 4)
        assert (await api.get("/api/v1/healthz")).status == 200


async def test_tcp_keepalive_is_enabled(api: Api) -> None:
    assert api.server is not None
    assert (await api.get("/api/v1/healthz")).status == 200
    (connection,) = api.server.server_state.connections
    made = connection.transport.get_extra_info("socket")
    assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000


# -- the stall timer -----------------------------------------------------------------------------


def test_headers_have_a_time_limit_however_they_arrive() -> None:
    timer = StallTimer(head_s=30, stall_s=60)
    for now_s in range(30):
        assert not timer.is_over(
            Phase.HEAD, request=0, moved=now_s * MIN_PROGRESS_BYTES, now_s=now_s
        )
    assert timer.is_over(Phase.HEAD, request=0, moved=30 * MIN_PROGRESS_BYTES, now_s=30)


def test_a_body_that_makes_progress_has_no_time_limit() -> None:
    timer = StallTimer(head_s=30, stall_s=60)
    for minute in range(100):
        moved = minute * MIN_PROGRESS_BYTES
        assert not timer.is_over(Phase.BODY, request=1, moved=moved, now_s=60 * minute)
    assert timer.is_over(Phase.BODY, request=1, moved=99 * MIN_PROGRESS_BYTES + 1, now_s=6000)


def test_work_and_idle_phases_have_no_time_limit() -> None:
    timer = StallTimer(head_s=30, stall_s=60)
    for phase in (Phase.WORK, Phase.IDLE):
        assert not timer.is_over(phase, request=1, moved=0, now_s=0)
        assert not timer.is_over(phase, request=1, moved=0, now_s=10**6)


def test_each_request_restarts_the_timer() -> None:
    timer = StallTimer(head_s=30, stall_s=60)
    assert not timer.is_over(Phase.ANSWER, request=1, moved=-100, now_s=0)
    assert not timer.is_over(Phase.ANSWER, request=2, moved=-100, now_s=60)
    assert timer.is_over(Phase.ANSWER, request=2, moved=-100, now_s=120)
