"""Two web processes and two workers on one database: any web process does, and no work is lost."""

import asyncio
import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from postgres import Postgres
from server.api.test_custom_losses import loss
from server.api.test_retrieve_futures import a_sampler, poll_for, sample
from server.cluster.conftest import Parts
from server.cluster_parts import Forgetful, a_web, a_worker
from server.echo import BASE, EchoExecutor
from server.hosting import Api
from server.streaming_executor import TOKENS_PER_UPDATE, StreamingExecutor, sample_body
from tinkex.server.settings import Settings, SettingsError
from tinkex.server.store import DatabaseRefused, open_store
from tinkex.server.store.workers import DRAINING
from waiting import until_async

pytestmark = pytest.mark.anyio
log = logging.getLogger(__name__)

#: A pass of so many tokens has a result that is in a file.
MANY_TOKENS = 20_000
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}


async def train(webs: list[Api], model: str, first: int, steps: int) -> list[float]:
    """Steps that alternate between web processes; each result is polled at the other one."""
    values = []
    for number in range(steps):
        here, there = webs[number % 2], webs[(number + 1) % 2]
        await here.forward_backward(model, first + 2 * number, tokens=1)
        step = await there.optim_step(model, first + 2 * number + 1)
        values.append(await here.value(step))
    return values


async def test_any_web_process_does(parts: Parts) -> None:
    model = await parts.webs[0].model()
    assert await train(parts.webs, model, 1, 4) == [1, 3, 7, 15]
    answer = await parts.webs[1].post(
        "asample",
        {"base_model": BASE, "prompt": PROMPT, "num_samples": 2, "sampling_params": {}},
    )
    result = await parts.webs[0].result(answer.json["request_id"])
    assert len(result["sequences"]) == 2


async def test_new_models_go_to_the_worker_with_the_fewest(parts: Parts) -> None:
    models = [await parts.webs[number % 2].model() for number in range(4)]
    homes = [parts.having(model) for model in models]
    assert sorted(homes) == ["one", "one", "two", "two"]


async def test_a_poll_at_another_web_process_is_held(parts: Parts) -> None:
    accepted, polled = parts.webs
    model = await accepted.model()
    executor = parts.executors[parts.having(model)]
    executor.open.clear()
    request = await accepted.forward_backward(model, 1)
    began_s = time.monotonic()
    assert (await polled.poll(request)).status == 408
    assert time.monotonic() - began_s > 1.8  # of 2
    # Woken by the result, not by the end of a poll.
    async with a_web(parts.db, parts.folder, long_poll_s=50.0) as patient:
        waiting = asyncio.create_task(patient.passed(request))
        await asyncio.sleep(0.1)
        executor.open.set()
        async with asyncio.timeout(20):
            await waiting


async def test_a_large_result_that_is_read_slowly_holds_up_no_other(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    web = parts.webs[0]
    models = [await web.model() for _ in range(2)]
    assert web.app is not None
    requests = web.app.state.context.store.requests
    read, reading, readable = requests._get, asyncio.Event(), asyncio.Event()

    async def slowly(request_id: str, what: str, *given: Any, **named: Any) -> bytes:
        reading.set()
        await readable.wait()
        return bytes(await read(request_id, what, *given, **named))

    monkeypatch.setattr(requests, "_get", slowly)
    for executor in parts.executors.values():
        executor.open.clear()
    large = asyncio.create_task(
        web.passed(await web.forward_backward(models[0], 1, tokens=MANY_TOKENS))
    )
    small = asyncio.create_task(web.passed(await web.forward_backward(models[1], 1)))
    await asyncio.sleep(0.2)  # until both are polled
    parts.executors[parts.having(models[0])].open.set()
    await asyncio.wait_for(reading.wait(), 10)
    parts.executors[parts.having(models[1])].open.set()
    await asyncio.wait_for(small, 5)
    assert not large.done()
    readable.set()
    await asyncio.wait_for(large, 10)


async def test_events_of_samples_arrive_at_any_web_process(parts: Parts) -> None:
    sampler = await a_sampler(parts.webs[0])
    with Forgetful():
        sent = [await sample(parts.webs[number % 2], sampler, number) for number in range(20)]
        for web in parts.webs:
            events, cursor = await poll_for(web, sampler, 20)
            assert sorted(event["request_id"] for event in events) == sorted(sent)
            assert cursor == 20


async def test_promises_hold_although_every_second_notification_is_lost(parts: Parts) -> None:
    with Forgetful():
        models = [await parts.webs[number].model() for number in range(2)]
        results = await asyncio.gather(*(train(parts.webs, model, 1, 5) for model in models))
    assert results == [[1, 3, 7, 15, 31]] * 2


async def test_a_dead_worker_is_replaced_by_another(parts: Parts) -> None:
    web = parts.webs[0]
    model = await web.model()
    dead = parts.having(model)
    (other,) = set(parts.workers) - {dead}
    assert await train(parts.webs, model, 1, 2) == [1, 3]
    # It computes on, but nobody hears of it any more.
    parts.executors[dead].open.clear()
    await parts.workers[dead]._beat_task.close()
    await parts.workers[dead]._look_task.close()
    await web.forward_backward(model, 5, tokens=1)
    lost = await web.optim_step(model, 6)
    assert web.app is not None
    futures = web.app.state.context.futures
    parts.executors[other].open.clear()
    await until_async(lambda: futures.unfinished_request(lost).home == other)
    parts.executors[other].open.set()
    assert await web.value(lost) == 7
    assert model in parts.executors[other].models
    scheduler = parts.workers[dead]._scheduler
    parts.executors[dead].open.set()
    await until_async(lambda: scheduler._models.get(model) is None)
    assert await train(parts.webs, model, 7, 2) == [15, 31]


async def test_after_an_outage_the_first_worker_leaves_the_models_to_those_that_return(
    parts: Parts,
) -> None:
    web = parts.webs[0]
    model = await web.model()
    home = parts.having(model)
    (other,) = set(parts.workers) - {home}
    workers = [parts.workers[other], parts.workers[home]]
    parts.executors[home].open.clear()
    step = await web.optim_step(model, 1)
    # Nobody writes a heartbeat for longer than it takes until a worker counts as dead.
    for worker in workers:
        await worker._beat_task.close()
        await worker._look_task.close()
    await asyncio.sleep(2.2)
    for worker in workers:
        worker._beat_task.start(worker._beat, 1.0, what="the heartbeat", log=log, after_s=0.0)
        worker._look_task.start(worker._look, 0.1, what="looking at the tables", log=log)
        await asyncio.sleep(1.0)
    parts.executors[home].open.set()
    assert await web.value(step) == 0
    assert parts.having(model) == home


async def test_a_draining_worker_hands_its_models_over(parts: Parts) -> None:
    model = await parts.webs[0].model()
    leaving = parts.having(model)
    (other,) = set(parts.workers) - {leaving}
    assert await train(parts.webs, model, 1, 3) == [1, 3, 7]
    await parts.workers[leaving].drain(5.0)
    await parts.workers[leaving].close()
    assert await train(parts.webs, model, 7, 2) == [15, 31]
    # From the snapshot: no step of the log was run again.
    assert parts.executors[other].tasks("optim_step", "restore") == ["restore"] + ["optim_step"] * 2
    later = [await parts.webs[0].model() for _ in range(2)]
    assert [parts.having(one) for one in later] == [other, other]


async def test_a_draining_worker_does_not_wait_for_a_model_that_it_lost(parts: Parts) -> None:
    web = parts.webs[0]
    model = await web.model()
    name = parts.having(model)
    leaving, executor = parts.workers[name], parts.executors[name]
    executor.open.clear()
    step = await web.optim_step(model, 1)
    await until_async(lambda: executor.entered._value > 1)
    drained = asyncio.create_task(leaving.drain(60.0))
    state = leaving._scheduler._models.get(model)
    assert state is not None
    await until_async(lambda: bool(state.between))
    (other,) = set(parts.workers) - {name}
    await leaving._store.workers.hand_over(model, term=state.term or 0, to=other)
    leaving._scheduler.disown_all([model])
    executor.open.set()
    await asyncio.wait_for(drained, 10)
    assert await web.value(step) == 0


async def test_a_second_worker_of_one_name_replaces_the_first(parts: Parts) -> None:
    model = await parts.webs[0].model()
    name = parts.having(model)
    executor = EchoExecutor()
    async with a_worker(parts.db, parts.folder, name, executor):
        await asyncio.wait_for(parts.workers[name].replaced.wait(), 10)
        assert await train(parts.webs, model, 1, 2) == [1, 3]
        assert model in executor.models


async def test_a_name_with_another_base_model_leaves_the_old_models_to_others(
    parts: Parts,
) -> None:
    web = parts.webs[0]
    model = await web.model()
    name = parts.having(model)
    (other,) = set(parts.workers) - {name}
    assert await train(parts.webs, model, 1, 2) == [1, 3]
    executor = EchoExecutor("test/another")
    async with a_worker(parts.db, parts.folder, name, executor) as renamed:
        await asyncio.wait_for(parts.workers[name].replaced.wait(), 10)
        assert await train(parts.webs, model, 5, 2) == [7, 15]
        assert model in parts.executors[other].models
        assert model not in executor.models
        assert name not in renamed.known.live(BASE)


async def test_requests_wait_while_no_worker_runs(db: str, tmp_path: Path) -> None:
    async with a_web(db, tmp_path) as web:
        async with a_worker(db, tmp_path, "first", EchoExecutor()) as worker:
            await until_async(lambda: worker.known.live())
            await asyncio.sleep(1.2)  # until the web process knows it
            model = await web.model()
            await worker.drain(1.0)
        request = await web.forward_backward(model, 1, tokens=1)
        answer = await web.poll(request)
        assert answer.status == 408
        assert "no worker of test/echo is running" in answer.json["queue_state_reason"]
        async with a_worker(db, tmp_path, "second", EchoExecutor()):
            await web.passed(request)


async def test_a_sample_is_cancelled_at_any_web_process(parts: Parts) -> None:
    for executor in parts.executors.values():
        executor.open.clear()
    body = {"base_model": BASE, "prompt": PROMPT, "num_samples": 1, "sampling_params": {}}
    with Forgetful():
        request = (await parts.webs[0].post("asample", body)).json["request_id"]
        await parts.webs[1].post("cancel_future", {"request_id": request})
        result = await parts.webs[0].result(request)
    assert "cancelled" in result["error"]


async def test_a_poll_elsewhere_keeps_a_sample_whose_stream_broke(parts: Parts) -> None:
    for executor in parts.executors.values():
        executor.open.clear()
    first, second = parts.webs
    body = {"base_model": BASE, "prompt": PROMPT, "num_samples": 1, "sampling_params": {}}
    kept, given_up = [(await first.post("asample", body)).json["request_id"] for _ in range(2)]
    polling = asyncio.create_task(second.result(kept))
    await asyncio.sleep(0.1)
    assert first.app is not None
    context = first.app.state.context
    for request in (kept, given_up):
        owner = context.futures.unfinished_request(request).owner
        context.scheduler.cancel_unless_polled(request, owner=owner, after_s=0.1)
    end_s = time.monotonic() + 10
    while (await context.store.requests.get(given_up)).outcome is None:
        assert time.monotonic() < end_s
        await asyncio.sleep(0.1)
    for executor in parts.executors.values():
        executor.open.set()
    assert len((await polling)["sequences"]) == 1


async def test_tokens_are_streamed_from_a_worker(db: str, tmp_path: Path) -> None:
    async with (
        a_worker(db, tmp_path, "one", StreamingExecutor()),
        a_web(db, tmp_path) as web,
    ):
        tokens: list[int] = []
        events = 0
        body = sample_body(20 * TOKENS_PER_UPDATE)
        async with web.http.post("/api/v1/stream_sample", json=body) as answer:
            async for line in answer.content:
                if (
                    line.startswith(b"data: ")
                    and b'"tokens"' in line
                    and b"stop_reason" not in line
                ):
                    tokens += json.loads(line[6:])["tokens"]
                    events += 1
        assert tokens == list(range(20 * TOKENS_PER_UPDATE))
        # Not all at the end.
        assert events > 3


async def test_limits_of_an_owner_count_at_all_web_processes(db: str, tmp_path: Path) -> None:
    executor = EchoExecutor()
    async with (
        a_worker(db, tmp_path, "one", executor),
        a_web(db, tmp_path, max_requests=2) as first,
        a_web(db, tmp_path, max_requests=2) as second,
    ):
        executor.open.clear()
        body = {"base_model": BASE, "prompt": PROMPT, "num_samples": 1, "sampling_params": {}}
        sent = [(await first.post("asample", body)).json["request_id"] for _ in range(2)]
        await asyncio.sleep(1.5)
        assert (await second.post("asample", body)).status == 429
        executor.open.set()
        for request in sent:
            await second.result(request)
        # At once, although the other process does not know yet that they are finished.
        assert (await second.post("asample", body)).status == 200


async def test_a_refused_step_does_not_block_later_ones(parts: Parts) -> None:
    model = await parts.webs[0].model()
    with Forgetful():
        refused = await parts.webs[0].post("optim_step", {"model_id": model, "seq_id": "one"})
        assert refused.status == 422
        body = {"model_id": model, "seq_id": 1, "adam_params": {"learning_rate": []}}
        assert (await parts.webs[0].post("optim_step", body)).status in (400, 422)
        later = await parts.webs[1].optim_step(model, 2)
        async with asyncio.timeout(10):  # gap_s is 30
            assert await parts.webs[1].value(later) == 0


async def test_a_refused_step_goes_with_its_model_to_another_worker(parts: Parts) -> None:
    web = parts.webs[0]
    model = await web.model()
    leaving = parts.workers[parts.having(model)]
    body = {"model_id": model, "seq_id": 1, "adam_params": {"learning_rate": []}}
    assert (await web.post("optim_step", body)).status in (400, 422)

    def is_known() -> bool:
        state = leaving._scheduler._models.get(model)
        return state is not None and 1 in state.queue.refused

    await until_async(is_known)
    await leaving.drain(5.0)
    later = await web.optim_step(model, 2)
    async with asyncio.timeout(10):  # gap_s is 30
        assert await web.value(later) == 0
    assert await leaving._store.workers.refused([model]) == []


async def test_a_finished_session_is_finished_everywhere(parts: Parts) -> None:
    session = await parts.webs[0].session()
    model = await parts.webs[0].model(session)
    await parts.webs[1].forward_backward(model, 1)
    body = {"reason": {"type": "success"}}
    assert (await parts.webs[0].post(f"sessions/{session}/finish", body)).status == 200

    async def status() -> int:
        return (await parts.webs[1].post("session_heartbeat", {"session_id": session})).status

    end_s = time.monotonic() + 10
    while await status() != 410:
        assert time.monotonic() < end_s
        await asyncio.sleep(0.2)
    # Its worker frees the memory.
    await until_async(lambda: not any(model in one.models for one in parts.executors.values()))


async def test_work_at_another_web_process_keeps_a_session(db: str, tmp_path: Path) -> None:
    short: dict[str, Any] = {"session_grace_s": 4.0}
    async with (
        a_worker(db, tmp_path, "one", EchoExecutor()),
        a_web(db, tmp_path, **short) as first,
        a_web(db, tmp_path, **short) as second,
    ):
        session = await first.session()
        model = await first.model(session)
        for number in range(1, 8):
            await second.passed(await second.forward_backward(model, number))
            await asyncio.sleep(0.8)
        assert first.app is not None
        store = first.app.state.context.store
        assert await store.sessions.timed_out_sessions() == []
        end_s = time.monotonic() + 20
        while await store.sessions.timed_out_sessions() != [session]:
            assert time.monotonic() < end_s
            await asyncio.sleep(0.2)
        for web in (first, second):
            assert web.app is not None
            timeouts = web.app.state.context.session_timeouts
            await until_async(lambda: session in timeouts.timed_out)  # noqa: B023
        # And it comes back.
        await second.passed(await second.forward_backward(model, 8))
        while await store.sessions.timed_out_sessions():
            assert time.monotonic() < end_s
            await asyncio.sleep(0.2)


async def test_a_custom_loss_reaches_all_workers_of_its_session(parts: Parts) -> None:
    web = parts.webs[0]
    session = await web.session()
    homes = {parts.having(await web.model(session, number=number)) for number in range(2)}
    assert homes == {"one", "two"}
    made = await web.result(await web.step("create_custom_loss", **loss(session)))
    assert made["loss_id"]
    for executor in parts.executors.values():
        assert executor.tasks("register_loss") == ["register_loss"]


async def test_a_custom_loss_of_a_dead_worker_reaches_one_that_drains(
    parts: Parts, tmp_path: Path
) -> None:
    web = parts.webs[0]
    session = await web.session()
    homes = {parts.having(await web.model(session, number=number)) for number in range(2)}
    assert homes == {"one", "two"}
    # Its model does not move: it may be in the middle of a long step.
    drained, dead = parts.workers["two"], parts.workers["one"]
    drained._state = DRAINING
    await drained._beat()
    await dead._beat_task.close()
    await dead._look_task.close()
    parts.executors["one"].open.clear()
    async with a_worker(parts.db, tmp_path, "zero", EchoExecutor()):
        made = await web.result(await web.step("create_custom_loss", **loss(session)))
        assert made["loss_id"]
        assert parts.executors["two"].tasks("register_loss") == ["register_loss"]


async def test_requests_that_were_lost_stay_suspect_on_another_worker(parts: Parts) -> None:
    web = parts.webs[0]
    model = await web.model()
    name = parts.having(model)
    executor, worker = parts.executors[name], parts.workers[name]
    (other,) = set(parts.workers) - {name}
    executor.open.clear()
    request = await web.forward_backward(model, 1, tokens=1)
    await until_async(lambda: "run_pass" not in executor.tasks() and executor.entered._value > 1)
    executor.die()
    assert worker._store is not None

    async def deaths() -> int:
        counts = await worker._store.attempts.counted()
        return counts.get(BASE, {}).get(request, 0)

    end_s = time.monotonic() + 10
    while await deaths() != 1:
        assert time.monotonic() < end_s
        await asyncio.sleep(0.05)
    await worker._beat_task.close()
    await worker._look_task.close()
    isolation = parts.workers[other]._scheduler.replicas(BASE).lost
    parts.executors[other].open.clear()
    await until_async(lambda: isolation.counts.get(request) == 1)
    parts.executors[other].open.set()
    await web.passed(request)


async def test_metrics_name_the_workers(parts: Parts) -> None:
    await parts.webs[0].model()
    page = (await parts.webs[0].get("/metrics")).body.decode()
    assert 'tinkex_requests_finished_total{kind="create_model",outcome="done"} 1.0' in page


async def test_a_server_that_is_alone_is_refused_beside_them(parts: Parts, tmp_path: Path) -> None:
    with pytest.raises(DatabaseRefused, match=r"another server \(tinkex w"):
        await asyncio.to_thread(
            open_store,
            db_url=parts.db,
            storage_url=str(tmp_path / "storage"),
            folder=tmp_path / "alone",
            exclusive=True,
        )


def test_they_are_refused_beside_a_server_that_is_alone(postgres: Postgres, tmp_path: Path) -> None:
    db = postgres.database()
    given = {"db_url": db, "storage_url": str(tmp_path / "storage")}
    alone = open_store(**given, folder=tmp_path / "alone", exclusive=True)
    try:
        with pytest.raises(DatabaseRefused, match="tinkex serve"):
            open_store(**given, folder=tmp_path / "web", role="web")
    finally:
        alone.close()


def test_sqlite_and_a_storage_of_its_own_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="needs a PostgreSQL database"):
        Settings(data=str(tmp_path)).check_shared("tinkex web")
    with pytest.raises(SettingsError, match="needs a storage that all"):
        Settings(data=str(tmp_path), db="postgresql://h/d").check_shared("tinkex worker")
