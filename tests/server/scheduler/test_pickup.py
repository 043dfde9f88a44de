"""Committed requests run, whatever happens between the commit and the scheduler."""

import asyncio
import gc
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from server.api.test_custom_losses import loss
from server.echo import BASE, EchoExecutor
from server.hosting import PROTOBUF, Answer, Api, hosted, pass_body
from server.store.test_store import opened
from server.stored_requests import unfinished
from tinkex.server.queued_request import Kind, QueuedRequest
from tinkex.server.scheduler.fairness import Load
from tinkex.server.scheduler.pickup import PICKUP_BATCH, Pickup
from tinkex.server.store import StorageError
from tinkex.server.store.storage_health import UNREACHABLE, StorageProblem
from waiting import until_async

pytestmark = pytest.mark.anyio

TROUBLE = StorageError(StorageProblem(kind=UNREACHABLE, reason="a test says so"))


def sample(session: str, number: int) -> dict[str, Any]:
    return {
        "session_id": session,
        "seq_id": number,
        "base_model": BASE,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
        "sampling_params": {"max_tokens": 1},
        "num_samples": 1,
    }


def numbered_sample(session: str) -> dict[str, Any]:
    """Of a sampling session: a repeated request finds the first one."""
    body = sample(session, 1)
    del body["session_id"], body["base_model"]
    return {**body, "sampling_session_id": f"{session}:sample:0"}


async def send(api: Api, kind: Kind, session: str) -> Answer:
    """A request of this kind, the same each time."""
    model = f"{session}:train:0"
    named = {"model_id": model, "seq_id": 2}
    path = f"tinker://{model}/weights/first"
    bodies: dict[Kind, tuple[str, Any]] = {
        Kind.CREATE_MODEL: (
            "create_model",
            {
                "session_id": session,
                "model_seq_id": 1,
                "base_model": BASE,
                "lora_config": {"rank": 8, "seed": 1},
            },
        ),
        Kind.FORWARD: ("forward", pass_body(model, 2, forward_only=True)),
        Kind.FORWARD_BACKWARD: ("forward_backward", pass_body(model, 2)),
        Kind.OPTIM_STEP: ("optim_step", {**named, "adam_params": {}}),
        Kind.SAVE_WEIGHTS: ("save_weights", {**named, "path": "second"}),
        Kind.SAVE_FOR_SAMPLER: ("save_weights_for_sampler", {**named, "path": "second"}),
        Kind.SAVE_EXTERNAL: ("save_weights_external", {**named, "path": "second"}),
        Kind.LOAD_WEIGHTS: (
            "load_weights",
            {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True},
        ),
        Kind.UNLOAD_MODEL: ("unload_model", {"model_id": model}),
        Kind.SAMPLE: ("asample", numbered_sample(session)),
        Kind.CREATE_CUSTOM_LOSS: ("create_custom_loss", loss(session)),
    }
    route, body = bodies[kind]
    return await api.post(route, body, headers=PROTOBUF if isinstance(body, bytes) else None)


async def prepared(api: Api) -> str:
    """A session with a model that has a checkpoint, and a sampler."""
    session = await api.session()
    model = await api.model(session)
    await api.result(await api.step("save_weights", model_id=model, seq_id=1, path="first"))
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
    assert (await api.post("create_sampling_session", body)).status == 200
    return session


def fail_after_the_commit(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next acceptance of a request commits and then fails, as if a later read had failed."""
    assert api.app
    store = api.app.state.context.store

    def failing(accept: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def accepts(*given: Any, **named: Any) -> Any:
            await accept(*given, **named)
            monkeypatch.undo()
            raise TROUBLE

        return accepts

    for place, name in (
        (store.requests, "accept"),
        (store.models, "create_model"),
        (store.models, "create_custom_loss"),
    ):
        monkeypatch.setattr(place, name, failing(getattr(place, name)))


async def finished(api: Api, kind: Kind) -> list[str]:
    """Wait until all requests of a kind are finished. Returns the kinds that are not."""
    assert api.app
    async with asyncio.timeout(10):
        while True:
            waiting = await unfinished(api.app.state.context.store)
            if kind not in {row.kind for row in waiting}:
                return [row.kind for row in waiting]
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("kind", list(Kind))
async def test_a_committed_request_that_was_not_submitted_is_found_without_a_restart(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinkex.server.scheduler.scheduler.PICKUP_INTERVAL_S", 0.05)
    async with hosted(EchoExecutor(), tmp_path, janitor_s=0) as api:
        session = await prepared(api)
        with monkeypatch.context() as patched:
            fail_after_the_commit(api, patched)
            assert (await send(api, kind, session)).status == 503
        assert await finished(api, kind) == []


#: A repeat of these is a new request: they have no number.
UNNUMBERED = {Kind.UNLOAD_MODEL}


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind not in UNNUMBERED])
async def test_a_repeated_request_that_was_not_submitted_is_submitted(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hosted(EchoExecutor(), tmp_path, janitor_s=0) as api:
        session = await prepared(api)
        with monkeypatch.context() as patched:
            fail_after_the_commit(api, patched)
            assert (await send(api, kind, session)).status == 503
        again = await send(api, kind, session)
        assert again.status == 200, again
        async with asyncio.timeout(4):
            result = await api.poll(again.json["request_id"])
            while result.status == 408:
                result = await api.poll(again.json["request_id"])
        assert b'"error"' not in result.body


async def test_a_step_is_not_lost_when_its_model_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinkex.server.scheduler.scheduler.PICKUP_INTERVAL_S", 0.05)
    async with hosted(EchoExecutor(), tmp_path, janitor_s=0) as api:
        model = await api.model()
        await api.value(await api.optim_step(model, 1))
    # A new process has to read the model before it can run its steps.
    async with hosted(EchoExecutor(), tmp_path, janitor_s=0) as api:
        assert api.app
        snapshots, times = api.app.state.context.store.snapshots, 0
        newest = snapshots.newest

        async def fails(model_id: str) -> Any:
            nonlocal times
            times += 1
            if times <= 2:
                raise TROUBLE
            return await newest(model_id)

        monkeypatch.setattr(snapshots, "newest", fails)
        first = await api.forward_backward(model, 2, tokens=3)
        second = await api.optim_step(model, 3)
        async with asyncio.timeout(10):
            assert "error" not in await api.result(first)
            assert await api.value(second) == 3
        assert times > 2


async def test_a_stored_step_is_not_treated_as_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hosted(EchoExecutor(), tmp_path, janitor_s=0, gap_s=0.2) as api:
        model = await api.model()
        with monkeypatch.context() as patched:
            fail_after_the_commit(api, patched)
            body = {"model_id": model, "seq_id": 1, "adam_params": {}}
            assert (await api.post("optim_step", body)).status == 503
        async with asyncio.timeout(4):
            assert await api.value(await api.optim_step(model, 2)) == 0


async def test_a_gap_is_closed_after_a_database_outage_at_its_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hosted(EchoExecutor(), tmp_path, janitor_s=0, gap_s=0.1) as api:
        assert api.app
        model = await api.model()
        requests, times = api.app.state.context.store.requests, 0
        waiting_steps = requests.waiting_steps

        async def fails_twice(model_id: str) -> Any:
            nonlocal times
            times += 1
            if times <= 2:
                raise TROUBLE
            return await waiting_steps(model_id)

        monkeypatch.setattr(requests, "waiting_steps", fails_twice)
        async with asyncio.timeout(10):
            result = await api.result(await api.optim_step(model, 2))
        assert "step 1 of this model never arrived" in result["error"]
        assert times == 3


@pytest.mark.parametrize("restarted", [False, True])
async def test_requests_that_were_picked_up_count_in_the_load(
    tmp_path: Path, restarted: bool
) -> None:
    held = EchoExecutor()
    held.open.clear()
    body = {**sample("", 1), "num_samples": 3}
    body["prompt"]["chunks"][0]["tokens"] = [1] * 100
    async with hosted(held, tmp_path, janitor_s=0) as api:
        assert api.app
        context = api.app.state.context
        if not restarted:
            pick_up_before_submit(context)
        await api.post("asample", {**body, "session_id": await api.session()})
        assert list(context.futures.loads.values()) == [Load(requests=1, tokens=100, samples=3)]
    if restarted:
        async with hosted(held, tmp_path, janitor_s=0) as api:
            assert api.app
            loads = api.app.state.context.futures.loads
            await until_async(lambda: len(loads) == 1)
            assert list(loads.values()) == [Load(requests=1, tokens=100, samples=3)]


async def test_a_stream_gets_tokens_although_pickup_found_its_sample_first(
    tmp_path: Path,
) -> None:
    echo = EchoExecutor()
    async with hosted(echo, tmp_path, janitor_s=0) as api:
        assert api.app
        session = await api.session()
        pick_up_before_submit(api.app.state.context)
        answer = await api.post("stream_sample", sample(session, 1))
        assert answer.status == 200, answer
        (sampled,) = (work for work in echo.ran if work.HasField("sample"))
        assert sampled.sample.streams


def pick_up_before_submit(context: Any) -> None:
    """Committed requests are picked up before the route that accepted them submits them."""
    requests = context.store.requests
    accept = requests.accept

    async def accepts(new: QueuedRequest) -> Any:
        first = await accept(new)
        for row in await unfinished(context.store):
            context.scheduler.submit(row)
        return first

    requests.accept = accepts


async def test_a_poll_for_a_request_that_was_not_submitted_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hosted(EchoExecutor(), tmp_path, janitor_s=0, long_poll_s=0.3) as api:
        session = await prepared(api)
        with monkeypatch.context() as patched:
            fail_after_the_commit(api, patched)
            await send(api, Kind.SAMPLE, session)
        assert api.app
        (row,) = await unfinished(api.app.state.context.store)
        began_s = time.monotonic()
        assert (await api.poll(row.request_id)).status == 408
        assert time.monotonic() - began_s >= 0.3


async def test_requests_of_owners_are_picked_up_in_turn_smallest_first(tmp_path: Path) -> None:
    store = opened(tmp_path)
    try:
        for owner, count in (("flood", 2 * PICKUP_BATCH + 1), ("few", 3), ("one", 1)):
            for number in range(count):
                payload = json.dumps(number).encode()
                new = QueuedRequest(owner=owner, kind=Kind.SAMPLE, base_model=BASE, payload=payload)
                await store.requests.accept(new)
        submitted: list[str] = []
        read = []
        execution = SimpleNamespace(store=store, claimed=set(), closing=False)
        pickup = Pickup(
            execution,  # type: ignore[arg-type]
            lambda row: submitted.append(row.owner),
            lambda base_model: True,
        )
        waiting_of = store.requests.waiting_of

        async def batch(owner: str, *, after: Any, limit: int, home: str | None) -> Any:
            found = await waiting_of(owner, after=after, limit=limit, home=home)
            read.append(len(found[0]))
            return found

        store.requests.waiting_of = batch  # type: ignore[method-assign]
        await pickup.look()
    finally:
        store.close()
    assert submitted[:4] == ["one", "few", "few", "few"]
    assert submitted[4:] == ["flood"] * (2 * PICKUP_BATCH + 1)
    assert max(read) == PICKUP_BATCH


async def test_requests_of_a_model_that_is_not_served_wait_until_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(tmp_path)
    submitted: list[str] = []
    served = {BASE}
    try:
        for base_model in (BASE, "other", "other"):
            await store.requests.accept(
                QueuedRequest(owner="a", kind=Kind.SAMPLE, base_model=base_model, payload=b"{}")
            )
        execution = SimpleNamespace(store=store, claimed=set(), closing=False)
        pickup = Pickup(
            execution,  # type: ignore[arg-type]
            lambda row: submitted.append(row.base_model),
            lambda base_model: base_model in served,
        )
        looks = []
        look = pickup.look

        async def counted() -> None:
            looks.append(1)
            await look()

        pickup.look = counted  # type: ignore[method-assign]
        await pickup.run()
        assert submitted == [BASE]
        assert "2 requests wait for other" in caplog.text
        # What waits is not read again and again.
        execution.claimed.add("the first")
        await pickup.run()
        assert len(looks) == 1
        served.add("other")
        await pickup.run()
        assert submitted.count("other") == 2
    finally:
        store.close()


async def test_the_payload_of_a_step_whose_model_is_not_open_is_in_no_memory(
    tmp_path: Path,
) -> None:
    """After a restart, the first step of a model waits for a rebuild, maybe for long."""
    async with hosted(EchoExecutor(), tmp_path, janitor_s=0) as api:
        model = await api.model()
    held = EchoExecutor()
    held.open.clear()
    async with hosted(held, tmp_path, janitor_s=0) as api:
        large = await api.forward_backward(model, 1, tokens=50_000)
        assert api.app
        scheduler = api.app.state.context.scheduler
        await until_async(lambda: large in scheduler._execution.claimed)
        (tracked,) = api.app.state.context.futures._unfinished.values()
        assert tracked.request.request_id == large
        assert tracked.request.payload is None
        held.open.set()
        await api.passed(large)


async def test_a_request_that_failed_for_now_takes_no_memory(tmp_path: Path) -> None:
    async with hosted(EchoExecutor(), tmp_path, janitor_s=0) as api:
        model = await api.model()
        assert api.app
        scheduler = api.app.state.context.scheduler
        failed = asyncio.Event()

        async def fail(request: QueuedRequest) -> None:
            assert request.payload
            failed.set()
            raise TROUBLE

        scheduler._unload = fail
        await api.step("unload_model", model_id=model)
        await failed.wait()
        await until_async(lambda: scheduler._execution.payloads._kept_bytes == 0)


async def test_a_model_that_cannot_be_opened_leaves_nothing_in_memory(tmp_path: Path) -> None:
    """On a worker, this is each model that another one has by then."""
    async with hosted(EchoExecutor(), tmp_path, janitor_s=0) as api:
        model = await api.model()
        assert api.app
        states = api.app.state.context.scheduler._models
        await states.open(model)
        with pytest.raises(LookupError):
            await states.open("deleted:train:0")
        gc.collect()
        assert list(states._opening) == []
