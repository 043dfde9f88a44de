"""Several engines of one base model: where work runs, and what happens when one is lost."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from server.api.test_custom_losses import loss
from server.echo import BASE, EchoExecutor, task_of
from server.hosting import Api, hosted
from server.replicated import ReplicatedExecutor
from tinkex.server.executor import EngineLost, WorkFailed
from tinkex.server.scheduler import model_copy, replicas
from tinkex.server.scheduler.model_copy import ModelCopy
from tinkex.server.scheduler.moves import LocalCopy, wait_for_copy_s
from tinkex.server.scheduler.replicas import (
    ReplicaLoad,
    choose_for_sample,
    choose_for_training,
    choose_move,
)
from tinkex.wire.proto.frames_pb2 import Done, Order
from waiting import until_async

pytestmark = pytest.mark.anyio


def loads(*sequences: int, down: Sequence[int] = ()) -> list[ReplicaLoad]:
    return [
        ReplicaLoad(name=f"b#{number}", sequences=count, is_up=number not in down)
        for number, count in enumerate(sequences)
    ]


def key(number: int) -> bytes:
    return str(number).encode()


# -- decisions --------------------------------------------------------------------------------------


def test_a_new_model_goes_where_the_fewest_models_are() -> None:
    def chosen(*models: int, down: int | None = None) -> int:
        found = [
            ReplicaLoad(name=f"b#{number}", models=count, is_up=number != down)
            for number, count in enumerate(models)
        ]
        return choose_for_training(found)

    assert chosen(0, 0) == 0
    assert chosen(1, 0, 0) == 1
    assert chosen(2, 3, 1) == 2
    assert chosen(5, 0, down=1) == 0
    assert chosen(3, down=0) == 0  # it waits there


def test_a_model_moves_only_if_that_evens_out_the_replicas() -> None:
    def chosen(*models: int) -> tuple[int, int] | None:
        return choose_move([ReplicaLoad(name="", models=count) for count in models])

    assert chosen(1, 0) is None
    assert chosen(2, 0) == (0, 1)
    assert chosen(1, 3, 2) == (1, 0)
    assert choose_move(loads(0, 0, down=[0, 1])) is None


def test_prompts_keep_their_replica_and_are_spread_evenly() -> None:
    idle = loads(0, 0, 0, 0)
    first = {number: choose_for_sample(key(number), idle, sequences=1) for number in range(1000)}
    again = {number: choose_for_sample(key(number), idle, sequences=1) for number in range(1000)}
    assert first == again
    assert all(200 <= count <= 300 for count in Counter(first.values()).values())


def test_a_lost_replica_moves_only_its_own_prompts() -> None:
    idle, lost = loads(0, 0, 0, 0), loads(0, 0, 0, 0, down=[2])
    for number in range(500):
        before = choose_for_sample(key(number), idle, sequences=1)
        after = choose_for_sample(key(number), lost, sequences=1)
        assert after == before or before == 2
        assert after != 2


def test_no_replica_has_much_more_than_the_average() -> None:
    """Also if half of all samples have the same prompt."""
    source, counts = random.Random(1), [0, 0, 0, 0]
    for _ in range(4000):
        prompt = key(0) if source.random() < 0.5 else key(source.randrange(100))
        number = choose_for_sample(prompt, loads(*counts), sequences=1)
        counts[number] += 1
        allowed = max(replicas.MAX_OVER_AVERAGE * sum(counts) / 4, replicas.FEW_SEQUENCES)
        assert counts[number] <= allowed
    assert min(counts) > 0


def test_few_samples_of_a_prompt_stay_together_and_a_large_one_goes_to_the_least_busy() -> None:
    best = choose_for_sample(b"x", loads(0, 0), sequences=1)
    counts = [0, 0]
    for _ in range(replicas.FEW_SEQUENCES):
        counts[choose_for_sample(b"x", loads(*counts), sequences=1)] += 1
    assert counts[best] == replicas.FEW_SEQUENCES
    assert choose_for_sample(b"x", loads(30, 10), sequences=500) == 1
    assert choose_for_sample(b"x", loads(0, 0, down=[0, 1]), sequences=1) in (0, 1)


def test_a_model_waits_a_moment_for_its_copy_then_longer_and_never_for_long() -> None:
    assert wait_for_copy_s(0.01, 0) == 0.2
    assert wait_for_copy_s(1.5, 4) == 1.5
    # Messages and reads may take longer than a batch.
    assert wait_for_copy_s(0.01, 5) == 0.4
    assert wait_for_copy_s(0.01, 15) == 1.6
    # A save may have taken minutes.
    assert wait_for_copy_s(600.0, 0) == wait_for_copy_s(3.0, 20) == 5.0


# -- the server -------------------------------------------------------------------------------------


@pytest.fixture
def quick_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas that are down are found at once."""
    monkeypatch.setattr(replicas, "DOWN_S", 0.0)
    monkeypatch.setattr("tinkex.server.scheduler.placement.REPLICA_CHECK_S", 0.05)


async def train(api: Api, model: str, first: int, steps: int) -> float:
    """The value of an echo model after these steps, of one token each."""
    value = 0.0
    for seq_id in range(first, first + 2 * steps, 2):
        await api.forward_backward(model, seq_id, tokens=1)
        value = await api.value(await api.optim_step(model, seq_id + 1))
    return value


async def sample(api: Api, prompt: int, **more: Any) -> str:
    body = {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [prompt, 2, 3]}]},
        "sampling_params": {"max_tokens": 1},
        "num_samples": 1,
        "base_model": BASE,
        **more,
    }
    answer = await api.post("asample", body)
    assert answer.status == 200, answer
    return str(answer.json["request_id"])


async def test_models_are_spread_and_stay_and_prompts_find_their_replica(tmp_path: Path) -> None:
    executor = ReplicatedExecutor(2)
    async with hosted(executor, tmp_path) as api, asyncio.timeout(60):
        session = await api.session()
        models = [await api.model(session, number=number) for number in range(4)]
        before = [executor.models(0), executor.models(1)]
        assert [len(each) for each in before] == [2, 2]
        assert [await train(api, model, 1, 3) for model in models] == [7.0] * 4
        assert [executor.models(0), executor.models(1)] == before
        for _ in range(3):
            await asyncio.gather(*[api.result(await sample(api, prompt)) for prompt in range(20)])
        counts = [executor.samples(number) for number in (0, 1)]
        assert sum(counts) == 60
        # Each prompt has one replica, so each count is a multiple of its repeats.
        assert all(count and count % 3 == 0 for count in counts)
        metrics = (await api.get("/metrics")).body.decode()
        for number in (0, 1):
            assert f'tinkex_engine_kv_pages{{base_model="{BASE}",replica="{number}"}}' in metrics


async def test_a_crash_of_one_engine_loses_nothing_and_stops_nobody_else(tmp_path: Path) -> None:
    executor = ReplicatedExecutor(2)
    async with hosted(executor, tmp_path) as api, asyncio.timeout(60):
        session = await api.session()
        models = [await api.model(session, number=number) for number in range(2)]
        assert [await train(api, model, 1, 2) for model in models] == [3.0, 3.0]
        here = 0 if models[0] in executor.models(0) else 1
        executor.engines[here].open.clear()
        waiting = [await sample(api, prompt) for prompt in range(20)]
        stuck = asyncio.create_task(train(api, models[0], 5, 1))
        await until_async(lambda: executor.samples(1 - here) > 0)
        # The other replica works while this one is stuck, and while it is down.
        assert await train(api, models[1], 5, 1) == 7.0
        executor.crash(here)
        executor.engines[here].open.set()
        assert await stuck == 7.0
        for request_id in waiting:
            assert "sequences" in await api.result(request_id)


@pytest.mark.usefixtures("quick_checks")
async def test_the_work_of_an_engine_that_stays_down_goes_to_the_others(tmp_path: Path) -> None:
    executor = ReplicatedExecutor(3)
    async with hosted(executor, tmp_path) as api, asyncio.timeout(60):
        session = await api.session()
        models = [await api.model(session, number=number) for number in range(6)]
        assert [await train(api, model, 1, 2) for model in models] == [3.0] * 6
        lost = executor.models(0)
        assert len(lost) == 2
        executor.engines[0].open.clear()
        running = [asyncio.create_task(train(api, model, 5, 1)) for model in models]
        waiting = [await sample(api, prompt) for prompt in range(30)]
        await until_async(lambda: executor.samples(1) + executor.samples(2) > 5)
        executor.crash(0, stays_down=True)
        assert await asyncio.gather(*running) == [7.0] * 6
        assert [len(executor.models(number)) for number in (1, 2)] == [3, 3]
        for request_id in waiting:
            assert "sequences" in await api.result(request_id)
        # It comes back empty, and gets its share again while the models train.
        executor.engines[0].open.set()
        executor.restart(0)
        running = [asyncio.create_task(train(api, model, 7, 20)) for model in models]
        await until_async(lambda: [len(executor.models(number)) for number in range(3)] == [2] * 3)
        assert await asyncio.gather(*running) == [2.0**23 - 1] * 6


async def test_a_model_moves_while_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = ReplicatedExecutor(2)
    async with hosted(executor, tmp_path) as api, asyncio.timeout(60):
        model = await api.model()
        assert api.app is not None
        scheduler = api.app.state.context.scheduler
        here, there = scheduler.replicas(BASE).engines
        state = here.models[model]
        assert await train(api, model, 1, 30) == 2.0**30 - 1
        running = asyncio.create_task(train(api, model, 61, 15))
        take_over, paused = LocalCopy.take_over, []

        async def counted(copy: LocalCopy) -> None:
            before = len(executor.engines[1].ran)
            await take_over(copy)
            paused.append(executor.engines[1].tasks()[before:])

        monkeypatch.setattr(LocalCopy, "take_over", counted)
        assert await there.move_here(state)
        assert state.engine is there
        # While it paused, the copy ran less than two steps.
        assert [ran.count("optim_step") <= 1 for ran in paused] == [True]
        assert await running == 2.0**45 - 1
        assert executor.models(0) == set()
        assert executor.models(1) == {model}
        # And back, while nothing runs; then the engine is lost.
        assert await here.move_here(state)
        assert await train(api, model, 91, 1) == 2.0**46 - 1
        executor.crash(0)
        assert await train(api, model, 93, 1) == 2.0**47 - 1


@pytest.mark.parametrize(("most", "within_s"), [(3, 5.0), (64, 0.0)])
async def test_a_copy_that_runs_its_log_in_pieces_has_all_of_it_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, within_s: float
) -> None:
    monkeypatch.setattr(model_copy, "MAX_READ", most)
    monkeypatch.setattr(model_copy, "MAX_CATCH_UP_S", within_s)
    # It changes engines before the copy has run anything by itself.
    monkeypatch.setattr("tinkex.server.scheduler.moves.MAX_OPTIM_STEPS", 100)
    executor = ReplicatedExecutor(2)
    async with hosted(executor, tmp_path) as api, asyncio.timeout(60):
        model = await api.model()
        assert api.app is not None
        here, there = api.app.state.context.scheduler.replicas(BASE).engines
        assert await train(api, model, 1, 10) == 2.0**10 - 1
        # Without a snapshot, the whole log is run.
        here.models[model].snapshots.steps = 0
        assert await there.move_here(here.models[model])
        assert executor.engines[1].tasks("optim_step") == ["optim_step"] * 10
        assert await train(api, model, 21, 1) == 2.0**11 - 1


async def test_a_custom_loss_that_is_created_while_the_model_changes_engines_is_on_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = ReplicatedExecutor(2)
    async with hosted(executor, tmp_path) as api, asyncio.timeout(60):
        session = await api.session()
        model = await api.model(session)
        assert api.app is not None
        here, there = api.app.state.context.scheduler.replicas(BASE).engines
        assert await train(api, model, 1, 3) == 7.0
        catch_up, take_over, made = ModelCopy.catch_up, LocalCopy.take_over, []

        async def then_create(copy: ModelCopy) -> int:
            position = await catch_up(copy)
            made.append(await api.result(await api.step("create_custom_loss", **loss(session))))
            return position

        async def with_a_loss(copy: LocalCopy) -> None:
            # The model stands still, and the copy has just read the losses.
            monkeypatch.setattr(ModelCopy, "catch_up", then_create)
            await take_over(copy)

        monkeypatch.setattr(LocalCopy, "take_over", with_a_loss)
        assert await there.move_here(here.models[model])
        assert made[0]["loss_id"]
        registered = [task for task in executor.engines[1].ran if task.HasField("register_loss")]
        assert [one.register_loss.loss_id for one in registered] == [made[0]["loss_id"]]


async def test_an_engine_keeps_nothing_of_a_model_that_it_had_only_in_part(tmp_path: Path) -> None:
    executor = ReplicatedExecutor(2)
    async with hosted(executor, tmp_path) as api, asyncio.timeout(60):
        model = await api.model()
        assert api.app is not None
        here, there = api.app.state.context.scheduler.replicas(BASE).engines
        state = here.models[model]
        assert await train(api, model, 1, 3) == 7.0
        await fail_once(api, executor.engines[0], model, 7)
        assert (state.loaded_in, executor.models(0)) == (None, {model})
        # There is nothing to copy: it is rebuilt over there.
        assert await there.move_here(state)
        assert executor.models(0) == set()
        assert await train(api, model, 8, 1) == 15.0
        # The same during a move, just before the model changes engines.
        engine, run = executor.engines[0], executor.engines[0].run
        copying = asyncio.Event()

        async def pausing(base_model: str, work: Order, **more: Any) -> Done:
            if task_of(work) == "restore":
                copying.set()
                await failed.wait()
            return await run(base_model, work, **more)

        failed = asyncio.Event()
        engine.run = pausing  # type: ignore[method-assign]
        moving = asyncio.create_task(here.move_here(state))
        await copying.wait()
        await fail_once(api, executor.engines[1], model, 10)
        failed.set()
        assert await moving
        assert executor.models(1) == set()
        assert await train(api, model, 11, 1) == 31.0


async def fail_once(api: Api, engine: EchoExecutor, model: str, seq_id: int) -> None:
    """A step of this model fails in its engine, which may have done half of it."""
    plain = engine._do

    def fail(work: Order) -> bytes:
        engine._do = plain  # type: ignore[method-assign]
        raise WorkFailed("server", "a fault")

    engine._do = fail  # type: ignore[method-assign]
    assert "a fault" in (await api.result(await api.optim_step(model, seq_id)))["error"]


async def test_a_model_stays_if_its_new_engine_is_lost(tmp_path: Path) -> None:
    executor = ReplicatedExecutor(2)
    async with hosted(executor, tmp_path) as api, asyncio.timeout(60):
        model = await api.model()
        assert api.app is not None
        here, there = api.app.state.context.scheduler.replicas(BASE).engines
        assert await train(api, model, 1, 3) == 7.0
        executor.engines[1].open.clear()
        moving = asyncio.create_task(there.move_here(here.models[model]))
        await until_async(lambda: bool(executor.engines[1].entered._value))
        executor.crash(1)
        executor.engines[1].open.set()
        assert await moving is False
        assert await train(api, model, 7, 3) == 63.0
        assert executor.models(1) == set()


async def begin_move(api: Api, executor: ReplicatedExecutor) -> tuple[str, list[str]]:
    """
    A session and its two models, of value 7. Both train on engine 0, and one is moving to engine 1.

    Engine 1 pauses at the first order of the copy, until the test opens it.
    """
    executor.crash(1, stays_down=True)
    session = await api.session()
    models = [await api.model(session, number=number) for number in range(2)]
    assert [await train(api, model, 1, 3) for model in models] == [7.0, 7.0]
    assert executor.models(0) == set(models)
    executor.engines[1].open.clear()
    executor.restart(1)
    await until_async(lambda: bool(executor.engines[1].entered._value))
    return session, models


@pytest.mark.usefixtures("quick_checks")
async def test_no_step_runs_twice_if_the_old_engine_is_lost_during_a_move(tmp_path: Path) -> None:
    executor = ReplicatedExecutor(2)
    async with hosted(executor, tmp_path) as api, asyncio.timeout(60):
        _, models = await begin_move(api, executor)
        assert api.app is not None
        _, there = api.app.state.context.scheduler.replicas(BASE).engines
        running = [asyncio.create_task(train(api, model, 7, 3)) for model in models]
        executor.crash(0, stays_down=True)
        # The model that does not move is taken over.
        await until_async(lambda: bool(there.models))
        await asyncio.sleep(0.1)
        executor.engines[1].open.set()
        assert await asyncio.gather(*running) == [63.0, 63.0]
        await until_async(lambda: set(there.models) == set(models))
        assert [await train(api, model, 13, 1) for model in models] == [127.0, 127.0]


@pytest.mark.usefixtures("quick_checks")
async def test_a_model_whose_session_ends_during_a_move_leaves_both_engines(tmp_path: Path) -> None:
    executor = ReplicatedExecutor(2)
    async with hosted(executor, tmp_path) as api, asyncio.timeout(60):
        session, models = await begin_move(api, executor)
        assert api.app is not None
        scheduler = api.app.state.context.scheduler
        here, there = scheduler.replicas(BASE).engines
        scheduler.unload_session(session)
        await until_async(lambda: len(here.models) < 2)
        await asyncio.sleep(0.1)
        executor.engines[1].open.set()
        await until_async(lambda: not scheduler.placement.moves)
        await until_async(lambda: not here.models and not there.models)
        await until_async(lambda: not executor.models(0) and not executor.models(1))
        assert [await train(api, model, 7, 1) for model in models] == [15.0, 15.0]


@pytest.mark.usefixtures("quick_checks")
async def test_samples_of_an_adapter_leave_an_engine_that_stays_down(tmp_path: Path) -> None:
    executor = ReplicatedExecutor(2)
    async with hosted(executor, tmp_path) as api, asyncio.timeout(60):
        model = await api.model()
        assert await train(api, model, 1, 3) == 7.0
        step = await api.step("save_weights_for_sampler", model_id=model, seq_id=7, path="a")
        adapter = {"base_model": None, "model_path": (await api.result(step))["path"]}
        for prompt in range(20):
            await api.result(await sample(api, prompt, **adapter))
        assert executor.samples(0)
        assert executor.samples(1)
        # Both are down when the samples come, so some wait for the one that stays down.
        for number in (0, 1):
            executor.crash(number, stays_down=True)
        waiting = [await sample(api, prompt, **adapter) for prompt in range(20)]
        executor.restart(1)
        for request_id in waiting:
            assert (await api.result(request_id))["sequences"][0]["tokens"] == [7]


async def test_a_model_that_is_forgotten_during_a_move_is_not_taken_over(tmp_path: Path) -> None:
    executor = ReplicatedExecutor(2)
    async with hosted(executor, tmp_path) as api, asyncio.timeout(60):
        session = await api.session()
        model = await api.model(session)
        assert api.app is not None
        scheduler = api.app.state.context.scheduler
        here, there = scheduler.replicas(BASE).engines
        assert await train(api, model, 1, 3) == 7.0
        executor.engines[1].open.clear()
        moving = asyncio.create_task(there.move_here(here.models[model]))
        await until_async(lambda: bool(executor.engines[1].entered._value))
        scheduler.unload_session(session)
        await until_async(lambda: not here.models)
        executor.engines[1].open.set()
        assert await moving is False
        assert not there.models
        assert executor.models(1) == set()


async def test_a_request_that_crashes_engines_is_found_on_whichever_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = ReplicatedExecutor(2)
    for engine in executor.engines:
        plain = engine._do

        def crash(work: Any, plain: Any = plain, engine: Any = engine) -> bytes:
            if work.HasField("sample") and b"[666," in work.sample.payload.inline.replace(
                b" ", b""
            ):
                engine.die()
                raise EngineLost("died")
            result: bytes = plain(work)
            return result

        monkeypatch.setattr(engine, "_do", crash)
    async with hosted(executor, tmp_path) as api, asyncio.timeout(60):
        bad = await sample(api, 666)
        good = [await sample(api, prompt) for prompt in range(20)]
        answer = await api.poll(bad)
        while answer.status == 408:
            answer = await api.poll(bad)
        assert "the engine died 3 times" in answer.json["error"]
        for request_id in good:
            assert "sequences" in await api.result(request_id)


async def test_streams_and_cancellation_find_their_replica(tmp_path: Path) -> None:
    executor = ReplicatedExecutor(2)
    async with hosted(executor, tmp_path) as api, asyncio.timeout(60):
        for engine in executor.engines:
            engine.open.clear()
        requests = [await sample(api, prompt) for prompt in range(10)]
        await until_async(lambda: all(engine.entered._value for engine in executor.engines))
        assert api.app is not None
        scheduler = api.app.state.context.scheduler
        for request_id in requests:
            scheduler.cancel(request_id, owner="local")
        for request_id in requests:
            assert "cancelled" in (await api.poll(request_id)).json["error"]
        assert scheduler.replicas(BASE).loads() == [
            ReplicaLoad(name=name) for name in executor.served[0].engines
        ]
