"""Every limit has an error that names the field, and docs/reference/limits.md lists all limits."""

import asyncio
import contextlib
import gzip
import json
import resource
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import zstandard

from qa.reference_pages.limits import PAGE, ROOT, page
from server.echo import EchoExecutor
from server.hosting import PROTOBUF, Api, hosted
from server.limits import LIMITS, SMALL, Ids, Limit
from server.tenants import new_key, with_key
from tinkex.server.api import bodies, connection_limits, operations, sessions
from tinkex.server.store import checkpoint_catalog, events
from tinkex.wire import errors, limits
from waiting import until_async

pytestmark = pytest.mark.anyio

TRIED = [limit for limit in LIMITS if limit.case is not None]


@pytest.fixture(scope="module")
async def small(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Api]:
    """One server for all cases: it must survive each."""
    folder = tmp_path_factory.mktemp("small")
    async with hosted(EchoExecutor(), folder, long_poll_s=0.1, **SMALL) as api:
        yield api


async def ids_of(api: Api) -> Ids:
    session = await api.session()
    model = await api.model(session)
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": api.base_model}
    sampler = await api.post("create_sampling_session", body)
    return Ids(session, model, sampler.json["sampling_session_id"])


@pytest.mark.parametrize("limit", TRIED, ids=[limit.what for limit in TRIED])
async def test_each_limit_has_a_clear_error(small: Api, limit: Limit) -> None:
    assert limit.case
    answer = await limit.case(small, await ids_of(small))
    text = answer.body.decode()
    assert len(text) < 20_000
    assert limit.says in text, text[:500]
    if limit.answer == "user":
        assert answer.json["category"] == "user"
        return
    assert answer.status == int(limit.answer), text[:500]
    if limit.answer == "422":
        assert any(limit.says in map(str, error["loc"]) for error in answer.json["detail"]) or (
            limit.says == "recursion"
        ), text[:500]


def test_the_page_of_limits_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run: python -m qa.reference_pages.limits"
    for limit in LIMITS:
        if limit.case is None:
            file, _, name = limit.test.partition("::")
            assert f"def {name}(" in (ROOT / file).read_text(), f"{limit.what}: {limit.test}"


async def test_answers_quote_little_of_what_was_sent(small: Api) -> None:
    body = {"tags": list(range(900)), "user_metadata": {}, "sdk_version": "0.36.0"}
    answer = await small.post("create_session", body)
    assert answer.status == 422
    assert len(answer.json["detail"]) == errors.MAX_ERRORS_SENT
    datum = {
        "model_input": {"chunks": [{"tokens": [1]}]},
        "loss_fn_inputs": {"w": {"data": [1.0], "dtype": "float32", "shape": ["x" * 100_000]}},
    }
    sent = {
        "model_id": "m",
        "seq_id": 1,
        "forward_backward_input": {"data": [datum], "loss_fn": "x"},
    }
    answer = await small.post("forward_backward", sent)
    assert answer.status == 422
    assert "shape" in answer.json["detail"][0]["loc"]
    assert len(answer.body) < 2 * errors.MAX_ERROR_CHARS


async def test_telemetry_over_its_limits_is_accepted_and_not_kept(tmp_path: Path) -> None:
    """Clients retry any other status every second."""
    async with hosted(EchoExecutor(), tmp_path) as api:
        assert api.app
        store = api.app.state.context.store
        event = {"event": "GENERIC_EVENT", "event_id": "x" * 5_000}
        few = {"session_id": "few", "events": [event] * (events.MAX_EVENTS // 2)}
        many = {"session_id": "many", "events": [{}] * (events.MAX_EVENTS + 9)}
        large = {"session_id": "large", "events": [{}], "x": "x" * operations.MAX_TELEMETRY_BYTES}
        deep = b"[" * 500_000
        for body in (few, many, large, deep):
            sent = body if isinstance(body, bytes) else json.dumps(body).encode()
            headers = {"Content-Encoding": "gzip"}
            answer = await api.post("telemetry", gzip.compress(sent), headers=headers)
            assert answer.status == 200
        # Telemetry is written with the next commit.
        await store.keys.create(owner="carol")
        for name, kept in (("few", 50), ("many", 100), ("large", 0)):
            found = await store.telemetry.of_session(name, owner="local")
            assert len(found) == kept
            assert len(str(found)) < 100 * 1_000


async def test_telemetry_per_hour_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One owner cannot fill the disk with it."""
    monkeypatch.setattr(events, "MAX_CHARACTERS_PER_HOUR", 5_000)
    keys = [await new_key(tmp_path, owner) for owner in ("alice", "bob")]
    batch = {"session_id": "s", "events": [{"event_id": "x" * 450}] * 4}
    async with hosted(EchoExecutor(), tmp_path) as api:
        assert api.app
        store = api.app.state.context.store
        for key in (keys[0], keys[0], keys[0], keys[0], keys[1]):
            async with with_key(api, key) as client:
                assert (await client.post("telemetry", batch)).status == 200
        # Telemetry is written with the next commit.
        await store.keys.create(owner="carol")
        assert len(await store.telemetry.of_session("s", owner="alice")) == 10
        assert len(await store.telemetry.of_session("s", owner="bob")) == 4


async def test_a_small_body_is_refused_before_it_expands(
    tmp_path: Path,
) -> None:
    """Messages of two bytes and objects of three are hundreds of times larger in memory."""
    async with hosted(EchoExecutor(), tmp_path) as api:
        await api.model()
        began = time.monotonic()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        packed = {**PROTOBUF, "Content-Encoding": "zstd"}
        many = zstandard.compress(b"\x1a\x00" * 2**24)
        assert (await api.post("forward_backward", many, headers=packed)).status == 413
        objects = zstandard.compress(b'{"prompt": [' + b"{}," * 2**23 + b"{}]}")
        headers = {"Content-Encoding": "zstd"}
        assert (await api.post("asample", objects, headers=headers)).status == 413
        grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
    # Refused while counting, and not parsed again to find the step.
    assert time.monotonic() - began < 15
    # Both are at most 32 MiB decompressed; as objects they would be 1 GiB and more.
    assert grown_mib < 250
    assert limits.MAX_FIELDS < 2**24


async def test_a_session_can_be_finished_with_a_detail_of_any_length(small: Api) -> None:
    session = await small.session()
    words = {"reason": {"type": "errored"}, "detail": "x" * 100_000}
    assert await small.call("POST", f"sessions/{session}/finish", words) == 200
    found = await small.post("sessions/search", {"session_id": session})
    assert len(found.json["sessions"][0]["status"]["detail"]) == sessions.MAX_FINISH_DETAIL_LENGTH


@pytest.mark.parametrize("head", [b"GET /", b"GET / HTTP/1.1\r\nX-Long: ", b"GET / HTTP/1.1\r\n"])
async def test_endless_headers_are_refused(small: Api, head: bytes) -> None:
    url = small.http._base_url
    assert url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    piece = b"a: b\r\n" * 500 if head.endswith(b"\n") else b"x" * 4_000
    try:
        writer.write(head)
        for _ in range(100):  # 400 kB, in pieces
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
    except ConnectionError:
        pass  # refused while it was still sent
    with contextlib.suppress(ConnectionError):
        answer = await reader.read()
        assert not answer or answer.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400"))
    writer.close()
    assert (await small.get("/api/v1/healthz")).status == 200


CHUNKED = b"POST /api/v1/asample HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("begun", "piece"),
    [
        pytest.param(CHUNKED + b"1\r\n{\r\n0\r\n", b"a: b\r\n" * 10_000, id="trailers"),
        pytest.param(CHUNKED + b"1\r\n{\r\n0\r\na: ", b"x" * 60_000, id="one trailer"),
        pytest.param(CHUNKED + b"1;", b"x" * 60_000, id="extension of a piece"),
        pytest.param(
            b"", b"GET /api/v1/healthz HTTP/1.1\r\nHost: a\r\n\r\n" * 2_000, id="requests ahead"
        ),
    ],
)
async def test_trailers_and_pipelined_requests_are_limited(
    small: Api, begun: bytes, piece: bytes
) -> None:
    """None of this needs a key."""
    url = small.http._base_url
    assert url
    assert small.server
    _, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(begun)
    connections = small.server.server_state.connections

    async def send() -> None:
        for _ in range(500):  # 30 MB
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
            ahead = [len(vars(one).get("pipeline") or ()) for one in connections]
            assert max(ahead, default=0) <= connection_limits.MAX_PIPELINED

    with pytest.raises(ConnectionError):
        await send()
    writer.close()
    assert (await small.get("/api/v1/healthz")).status == 200


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(b"GET / HTTP/1.1\r\n", id="no host"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: b\r\n", id="two hosts"),
        pytest.param(b"GET / HTTP/1.0\r\nHost: 127.0.0.1\r\nHOST: b\r\n", id="two in 1.0"),
        *(
            pytest.param(
                b"POST /api/v1/create_session HTTP/1.1\r\nHost: 127.0.0.1\r\n"
                b"Transfer-Encoding: " + encoding + b"\r\n",
                id=encoding.decode(),
            )
            for encoding in (
                b"gzip, chunked",
                b"identity",
                b"chunked, chunked",
                b"xchunked",
                b"chunked\r\nTransfer-Encoding: chunked",
            )
        ),
    ],
)
async def test_ambiguous_framing_is_refused(small: Api, head: bytes) -> None:
    """A proxy may read it differently."""
    url = small.http._base_url
    assert url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(head + b"\r\n2\r\n{}\r\n0\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(), 10)
    assert answer.startswith(b"HTTP/1.1 400"), answer
    assert answer.count(b"HTTP/1.1 400") == 1
    writer.close()


@pytest.mark.parametrize("value", [b"chunked", b" Chunked "])
async def test_unambiguous_framing_is_accepted(small: Api, value: bytes) -> None:
    url = small.http._base_url
    assert url
    for head, body in (
        (b"GET /api/v1/healthz HTTP/1.0\r\n\r\n", b""),
        (
            b"POST /api/v1/session_heartbeat HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            b"Transfer-Encoding:" + value + b"\r\n\r\n",
            b"2\r\n{}\r\n0\r\n\r\n",
        ),
    ):
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(head + body)
        answer = await asyncio.wait_for(reader.read(), 10)
        assert answer.startswith((b"HTTP/1.1 200", b"HTTP/1.1 422")), answer
        writer.close()


async def test_a_trailer_is_not_taken_for_a_header(small: Api) -> None:
    url = small.http._base_url
    assert url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(CHUNKED.replace(b"asample", b"create_session"))
    body = b'{"tags": [], "user_metadata": {}, "sdk_version": "0.36.0"}'
    for _ in range(2):  # with the key as a header, the second call would return the first session
        writer.write(b"%x\r\n%s\r\n0\r\nX-Idempotency-Key: one\r\n\r\n" % (len(body), body))
        writer.write(CHUNKED.replace(b"asample", b"create_session"))
    answers = b""
    while answers.count(b"session_id") < 2:
        answers += await reader.read(65536)
    writer.close()
    first, second = (part[:40] for part in answers.split(b'"session_id":"')[1:])
    assert first != second


def peak_mib(*, reset: bool = False) -> int:
    """The peak memory of this process since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmHWM"))


async def test_only_a_few_bodies_are_decompressed_at_the_same_time(tmp_path: Path) -> None:
    most = 24 * 2**20
    async with hosted(EchoExecutor(), tmp_path, max_decoded_bytes=most) as api:
        ids = await ids_of(api)
        sample = {
            "sampling_session_id": ids.sampler,
            "prompt": {"chunks": [{"tokens": [1]}]},
            "sampling_params": {"max_tokens": 1},
        }
        whole = json.dumps(sample).encode()
        packed = zstandard.compress(whole[:-1] + b" " * (most - len(whole)) + b"}")
        assert len(packed) < 10_000
        headers = {"Content-Encoding": "zstd"}
        before = peak_mib(reset=True)
        requested = [api.post("asample", packed, headers=headers) for _ in range(16)]
        assert [answer.status for answer in await asyncio.gather(*requested)] == [200] * 16
        # Two at a time, with two copies each, and what the allocator keeps; all would be 384 MiB and more.
        assert peak_mib() - before < 260


async def test_the_arriving_bytes_of_an_owner_are_limited(tmp_path: Path) -> None:
    keys = [await new_key(tmp_path, owner) for owner in ("alice", "bob")]
    body = b"x" * 90_000
    head = (
        "POST /api/v1/asample HTTP/1.1\r\nHost: 127.0.0.1\r\nX-API-Key: {}\r\n"
        "Content-Length: 100000\r\n\r\n"
    )
    async with hosted(EchoExecutor(), tmp_path, max_body_bytes=100_000) as api:
        url = api.http._base_url
        assert url
        assert api.app
        held = api.app.state.body_budgets.owners._bytes
        writers = []
        for key in (*[keys[0]] * 2 * bodies.MAX_BODIES_PER_OWNER, keys[1]):
            _, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(head.format(key).encode() + body)
            writers.append(writer)
        # Half of Alice's are refused, and wait for the rest of their bodies.
        await until_async(lambda: held.get("alice", 0) > 800_000 - len(body) and "bob" in held)
        async with with_key(api, keys[0]) as alice, with_key(api, keys[1]) as bob:
            full = await alice.post("asample", body)
            assert full.status == 429
            assert "sending now have more than 800000 bytes" in full.json["detail"]
            assert (await bob.post("asample", body)).status == 422
            for writer in writers:
                writer.close()
            await until_async(lambda: not held)
            assert (await alice.post("asample", body)).status == 422


async def test_the_metadata_of_an_answer_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_catalog, "MAX_METADATA_CHARACTERS", 50_000)
    said = {"a": "x" * 12_000, "b": "y" * 12_000}
    async with hosted(EchoExecutor(), tmp_path) as api:
        session = {"tags": [], "user_metadata": said, "sdk_version": "0.36.0"}
        for _ in range(3):
            body: dict[str, Any] = {
                "session_id": (await api.post("create_session", session)).json["session_id"]
            }
            body |= {"model_seq_id": 0, "base_model": api.base_model, "user_metadata": said}
            made = await api.post("create_model", {**body, "lora_config": {"rank": 8}})
            model = (await api.result(made.json["request_id"]))["model_id"]
            await api.passed(await api.forward_backward(model, 1))
        for seq_id in range(2, 5):
            step = {"model_id": model, "seq_id": seq_id, "path": str(seq_id)}
            await api.result(await api.step("save_weights", **step, user_metadata=said))
        now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
        hours = {"starting_on": now - timedelta(hours=1), "ending_before": now + timedelta(hours=2)}
        usage = "&".join(f"{name}={at:%Y-%m-%dT%H:%M:%SZ}" for name, at in hours.items())
        for path, fewer in (
            ("training_runs", "training_runs?limit=1"),
            ("checkpoints", "checkpoints?limit=2"),
            (f"training_runs/{model}/checkpoints", f"training_runs/{model}"),
            (f"billing/usage/events?{usage}", "billing/usage/checkpoints/current"),
        ):
            answer = await api.get(f"/api/v1/{path}")
            assert (path, answer.status) == (path, 400), answer.body[:500]
            assert "more than 50000 characters of metadata" in answer.json["detail"]
            assert (await api.get(f"/api/v1/{fewer}")).status == 200
