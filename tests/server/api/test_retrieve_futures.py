"""`retrieve_futures` and `join_sampling_session`: every finished sample is reported once, in order."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from server.echo import BASE, EchoExecutor
from server.hosting import Api, hosted
from tinkex.server.scheduler import result_waiters

pytestmark = pytest.mark.anyio

CLONE = 10**9


async def a_sampler(api: Api) -> str:
    session_id = await api.session()
    answer = await api.post(
        "create_sampling_session",
        {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": BASE},
    )
    return str(answer.json["sampling_session_id"])


async def sample(api: Api, sampler: str, seq_id: int, **params: Any) -> str:
    body = {
        "prompt": {"chunks": [{"tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": 1, **params},
        "sampling_session_id": sampler,
        "seq_id": seq_id,
    }
    return await api.step("asample", **body)


async def poll(
    api: Api, sampler: str, cursor: int, *, clone: int = 0, **more: Any
) -> tuple[list[Any], int]:
    target = {
        "type": "sampling_session",
        "sampling_session_id": sampler,
        "cloned_sampler_id": clone,
    }
    body = {"target": target, "prev_cursor": cursor, "retrieved_request_ids": [], **more}
    answer = await api.post("retrieve_futures", body)
    assert answer.status == 200, answer
    return answer.json["completions"], answer.json["cursor"]


async def poll_for(api: Api, sampler: str, count: int, *, clone: int = 0) -> tuple[list[Any], int]:
    """Poll from the beginning until this many events have arrived."""
    found: list[Any] = []
    cursor = 0
    while len(found) < count:
        events, cursor = await poll(api, sampler, cursor, clone=clone)
        found += events
    return found, cursor


async def test_every_sample_is_reported_once_with_the_size_of_its_result(api: Api) -> None:
    sampler = await a_sampler(api)
    ids = [await sample(api, sampler, number) for number in range(20)]
    events, cursor = await poll_for(api, sampler, 20)
    assert sorted(event["request_id"] for event in events) == sorted(ids)
    assert {event["state"] for event in events} == {"finished"}
    result = await api.poll(ids[0], accept="application/x-protobuf")
    sizes = {event["request_id"]: event["response_payload_uncompressed_size"] for event in events}
    assert sizes[ids[0]] == len(result.body) > 0
    # No more events; with a timeout of 0 the answer comes at once.
    assert await poll(api, sampler, cursor, timeout=0) == ([], cursor)


async def test_earlier_events_can_be_polled_again(api: Api) -> None:
    sampler = await a_sampler(api)
    first = await sample(api, sampler, 0)
    await api.result(first)
    events, cursor = await poll(api, sampler, 0)
    assert [event["request_id"] for event in events] == [first]
    second = await sample(api, sampler, 1)
    later, after = await poll(api, sampler, cursor)
    assert [event["request_id"] for event in later] == [second]
    assert after > cursor
    # The answer was lost.
    assert await poll(api, sampler, after, timeout=0) == ([], after)
    assert (await poll(api, sampler, cursor))[0] == later
    assert (await poll(api, sampler, 0))[0] == events + later


async def test_a_poll_waits_for_the_next_sample(api: Api, echo: EchoExecutor) -> None:
    sampler = await a_sampler(api)
    echo.open.clear()
    request_id = await sample(api, sampler, 0)
    polling = asyncio.create_task(poll(api, sampler, 0))
    await echo.entered.acquire()
    assert not (await asyncio.wait({polling}, timeout=0.1))[0]
    echo.open.set()
    events, _ = await polling
    assert [event["request_id"] for event in events] == [request_id]


async def test_a_timeout_has_an_empty_answer_and_the_same_cursor(api: Api) -> None:
    sampler = await a_sampler(api)
    began_s = time.monotonic()
    assert await poll(api, sampler, 17, timeout=0.2) == ([], 17)
    assert 0.2 <= time.monotonic() - began_s < 5.0


async def test_clones_of_a_client_get_their_own_samples_only(api: Api) -> None:
    sampler = await a_sampler(api)
    mine = await sample(api, sampler, 5)
    theirs = await sample(api, sampler, 3 * CLONE + 5)
    events, _ = await poll_for(api, sampler, 1)
    assert [event["request_id"] for event in events] == [mine]
    events, _ = await poll_for(api, sampler, 1, clone=3)
    assert [event["request_id"] for event in events] == [theirs]


async def test_a_long_log_is_sent_in_pages_from_memory_and_disk(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_waiters, "MAX_EVENTS_PER_POLL", 3)
    sampler = await a_sampler(api)
    ids = [await sample(api, sampler, number) for number in range(8)]
    for request_id in ids:
        await api.result(request_id)
    # Without an earlier poll, these are on disk only; new events are in memory as well.
    found, cursor = await poll(api, sampler, 0)
    assert len(found) == 3
    ids += [await sample(api, sampler, 8 + number) for number in range(8)]
    for request_id in ids:
        await api.result(request_id)
    sizes = []
    while len(found) < 16:
        events, cursor = await poll(api, sampler, cursor, timeout=0)
        sizes.append(len(events))
        found += events
    assert max(sizes) == 3
    assert sorted(event["request_id"] for event in found) == sorted(ids)
    assert await poll(api, sampler, cursor, timeout=0) == ([], cursor)


async def test_unused_logs_leave_memory_and_are_read_again(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert api.app is not None
    kept = api.app.state.context.futures.completion_log._recent
    samplers = [await a_sampler(api) for _ in range(5)]
    request_id = await sample(api, samplers[0], 0)
    (event,), cursor = await poll(api, samplers[0], 0)
    assert event["request_id"] == request_id
    # Too many logs: the least recently read are evicted.
    monkeypatch.setattr(result_waiters, "MAX_CLIENTS", 2)
    for sampler in samplers[1:3]:
        await poll(api, sampler, 0, timeout=0)
    assert [client[0] for client in kept] == samplers[1:3]
    # Logs that were not read for long are evicted when another one is added.
    monkeypatch.setattr(result_waiters, "UNREAD_TTL_S", 0.0)
    await poll(api, samplers[3], 0, timeout=0)
    assert [client[0] for client in kept] == samplers[3:4]
    assert await poll(api, samplers[0], 0) == ([event], cursor)


async def test_a_failed_sample_is_reported_as_failed(api: Api, echo: EchoExecutor) -> None:
    sampler = await a_sampler(api)
    bad = await sample(api, sampler, 0, unheard_of=3)
    events, _ = await poll_for(api, sampler, 1)
    assert events == [{"state": "failed", "request_id": bad}]
    # A cancelled sample is reported as well.
    echo.open.clear()
    given_up = await sample(api, sampler, 1)
    await echo.entered.acquire()
    await api.post("cancel_future", {"request_id": given_up})
    events, _ = await poll_for(api, sampler, 2)
    assert events[1] == {"state": "failed", "request_id": given_up}


async def test_ids_of_fetched_results_may_be_repeated_and_unknown(api: Api) -> None:
    sampler = await a_sampler(api)
    request_id = await sample(api, sampler, 0)
    _, cursor = await poll_for(api, sampler, 1)
    for _ in range(2):
        ids = [request_id, "an unknown id"]
        assert await poll(api, sampler, cursor, timeout=0, retrieved_request_ids=ids) == (
            [],
            cursor,
        )
    assert (await api.poll(request_id)).status == 200


async def test_only_a_wrong_target_is_refused(api: Api) -> None:
    body = {"target": {"type": "sampling_session", "sampling_session_id": "no:sample:0"}}
    assert (await api.post("retrieve_futures", body)).status == 404
    sampler = await a_sampler(api)
    for wrong in ({"prev_cursor": -1}, {"prev_cursor": 10**30}, {"timeout": "soon"}):
        target = {"type": "sampling_session", "sampling_session_id": sampler}
        assert (await api.post("retrieve_futures", {"target": target, **wrong})).status == 422


async def test_the_log_survives_a_restart(tmp_path: Path) -> None:
    async with hosted(EchoExecutor(), tmp_path) as api:
        sampler = await a_sampler(api)
        ids = [await sample(api, sampler, number) for number in range(3)]
        before, cursor = await poll_for(api, sampler, 3)
    async with hosted(EchoExecutor(), tmp_path) as api:
        assert await poll(api, sampler, 0) == (before, cursor)
        ids.append(await sample(api, sampler, 3))
        events, after = await poll(api, sampler, cursor)
        assert [event["request_id"] for event in events] == ids[3:]
        assert after > cursor
        # A number given before the restart is not given again.
        joined = [await join(api, sampler) for _ in range(3)]
    assert joined == [1, 2, 3]
    async with hosted(EchoExecutor(), tmp_path) as api:
        assert await join(api, sampler) == 4


async def join(api: Api, sampler: str) -> int:
    answer = await api.post("join_sampling_session", {"sampling_session_id": sampler})
    assert answer.status == 200, answer
    return int(answer.json["client_counter"])


async def test_clones_that_join_concurrently_get_different_numbers(api: Api) -> None:
    sampler = await a_sampler(api)
    numbers = await asyncio.gather(*(join(api, sampler) for _ in range(20)))
    assert sorted(numbers) == list(range(1, 21))


async def test_concurrent_polls_of_one_client_lose_nothing(api: Api) -> None:
    """A client that polls again before its first poll has ended."""
    sampler = await a_sampler(api)
    polls = [asyncio.create_task(poll_for(api, sampler, 50)) for _ in range(4)]
    ids = await asyncio.gather(*(sample(api, sampler, number) for number in range(50)))
    for events, _ in await asyncio.gather(*polls):
        assert sorted(event["request_id"] for event in events) == sorted(ids)
