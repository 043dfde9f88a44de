"""A model moves from one live worker to another while its client trains: no step is lost or doubled."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from server.api.test_custom_losses import loss
from server.cluster.conftest import Parts
from server.cluster_parts import Forgetful, a_web, a_worker
from server.echo import BASE, EchoExecutor, content, task_of
from server.hosting import Api
from server.scheduler.test_replicas import fail_once
from tinkex.server.cluster import moves
from tinkex.server.cluster.moves import RemoteCopy, choose_move
from tinkex.server.cluster.remote_scheduler import RemoteScheduler
from tinkex.server.queued_request import QueuedRequest
from tinkex.server.scheduler import moves as scheduler_moves
from tinkex.server.scheduler.model_states import ModelState
from tinkex.server.store.workers import UP, WorkerRow
from tinkex.wire.proto.frames_pb2 import Done, Order
from waiting import until_async

pytestmark = pytest.mark.anyio


class PacedExecutor(EchoExecutor):
    """
    An engine that takes a while for each order, and can be held up.

    The number of a model is the sum of its gradients: with one token in each step, how many steps it has.
    """

    def __init__(self, order_s: float = 0.005) -> None:
        super().__init__()
        self.order_s = order_s
        #: Orders for which this is true wait until `go` is set.
        self.holds: Callable[[Order], bool] = lambda _: False
        self.go = asyncio.Event()
        self.held = asyncio.Event()
        self._turn = asyncio.Lock()

    async def run(self, base_model: str, work: Order, *, incarnation: int | None = None) -> Done:
        if self.holds(work):
            self.held.set()
            await self.go.wait()
        if self.order_s:
            async with self._turn:
                await asyncio.sleep(self.order_s)
        return await super().run(base_model, work, incarnation=incarnation)

    def _do(self, work: Order) -> bytes:
        if task_of(work) == "optim_step":
            model = self.models[content(work).model_id]
            # `EchoExecutor` doubles it.
            model.gradient -= model.value
        return super()._do(work)


def of_model(model: str) -> Callable[[Order], bool]:
    return lambda order: getattr(content(order), "model_id", None) == model


class Cluster(Parts):
    """Two paced workers; `here` has the models of a test, and `there` is the other one."""

    executors: dict[str, PacedExecutor]  # type: ignore[assignment]
    here: str = "one"
    there: str = "two"

    def state(self, model: str) -> ModelState:
        state = self.workers[self.here]._scheduler._models.get(model)
        assert state is not None
        return state

    def begin_move(self, model: str) -> asyncio.Task[bool]:
        moving = self.workers[self.here]._moves.move(self.state(model), self.there)
        return asyncio.create_task(moving)


@pytest.fixture
async def cluster(db: str, tmp_path: Path) -> AsyncIterator[Cluster]:
    async with contextlib.AsyncExitStack() as stack:
        found = Cluster(db, tmp_path, [])
        for name in ("one", "two"):
            executor = found.executors[name] = PacedExecutor()
            worker = a_worker(db, tmp_path, name, executor, gap_s=30.0)
            found.workers[name] = await stack.enter_async_context(worker)
        for worker in found.workers.values():
            await worker.known.look()
        found.webs.append(await stack.enter_async_context(a_web(db, tmp_path)))
        yield found


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch, cluster: Cluster) -> list[int]:
    """Of each move: how many steps its copy lacked when the model stopped."""
    found: list[int] = []
    take_over = RemoteCopy.take_over

    async def counted(copy: RemoteCopy) -> None:
        model = copy._model_id
        here, there = (cluster.executors[name] for name in (copy._home, copy._target))
        if model in there.models:
            found.append(here.models[model].value - there.models[model].value)
        await take_over(copy)

    monkeypatch.setattr(RemoteCopy, "take_over", counted)
    return found


class Training:
    """A client that takes steps of one token each, one after the other, until it is told to stop."""

    def __init__(self, api: Api, model: str) -> None:
        self._api, self._model = api, model
        self.steps = 0
        self._next = 1
        self._stopped = False
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while not self._stopped:
            await self.step()

    async def step(self) -> None:
        await self._api.forward_backward(self._model, self._next, tokens=1)
        value = await self._api.value(await self._api.optim_step(self._model, self._next + 1))
        self._next += 2
        self.steps += 1
        # Neither lost nor doubled.
        assert value == self.steps

    async def reached(self, steps: int) -> None:
        while self.steps < steps:
            if self._task.done():
                await self._task
            await asyncio.sleep(0.01)

    async def stop(self) -> None:
        self._stopped = True
        await self._task


async def begin(cluster: Cluster, steps: int) -> tuple[str, Training]:
    model = await cluster.webs[0].model()
    cluster.here = cluster.having(model)
    (cluster.there,) = set(cluster.workers) - {cluster.here}
    training = Training(cluster.webs[0], model)
    await training.reached(steps)
    return model, training


async def test_a_model_moves_while_it_trains(cluster: Cluster, paused: list[int]) -> None:
    async with asyncio.timeout(25):
        model, training = await begin(cluster, 3)
        for executor in cluster.executors.values():
            executor.order_s = 0.01
        assert await cluster.begin_move(model)
        await training.reached(training.steps + 3)
        await training.stop()
        assert cluster.having(model) == cluster.there
        assert all(lacked < 2 for lacked in paused)
        # And back: what the first one had is gone.
        cluster.here, cluster.there = cluster.there, cluster.here
        assert await cluster.begin_move(model)
        await training.step()
        assert cluster.having(model) == cluster.there
        assert len(paused) == 2


async def test_a_model_waits_for_a_copy_that_comes_no_closer_and_stops_for_less_than_two_steps(
    cluster: Cluster, paused: list[int]
) -> None:
    async with asyncio.timeout(25):
        model, training = await begin(cluster, 2)
        here, there = (cluster.executors[name] for name in (cluster.here, cluster.there))
        there.holds = lambda order: task_of(order) == "restore"
        moving = cluster.begin_move(model)
        await there.held.wait()
        await training.reached(training.steps + 8)
        # The other engine is slower: by itself, the copy would never catch up.
        here.order_s, there.order_s = 0.05, 0.08
        there.go.set()
        assert await moving
        await training.reached(training.steps + 2)
        await training.stop()
        assert [lacked < 2 for lacked in paused] == [True]


async def test_a_model_goes_on_while_its_copy_is_stuck_and_stays_if_that_is_lost(
    cluster: Cluster,
) -> None:
    async with asyncio.timeout(25):
        model, training = await begin(cluster, 3)
        there = cluster.executors[cluster.there]
        there.holds = of_model(model)
        moving = cluster.begin_move(model)
        await there.held.wait()
        await training.reached(training.steps + 5)
        assert not moving.done()
        # The engine dies in the middle of the copy.
        there.die()
        there.go.set()
        assert not await moving
        await training.reached(training.steps + 2)
        # The worker dies in the middle of the next one.
        there.go.clear()
        there.held.clear()
        moving = cluster.begin_move(model)
        await there.held.wait()
        await silence(cluster, cluster.there)
        assert not await moving
        await training.reached(training.steps + 2)
        await training.stop()
        assert model in cluster.executors[cluster.here].models


async def silence(cluster: Cluster, name: str) -> None:
    """A worker that nobody hears of any more."""
    await cluster.workers[name]._beat_task.close()
    await cluster.workers[name]._look_task.close()


async def test_the_copy_is_used_if_the_old_worker_is_lost(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asyncio.timeout(25):
        model, training = await begin(cluster, 3)
        there = cluster.executors[cluster.there]
        take_over, stopped, continues = RemoteCopy.take_over, asyncio.Event(), asyncio.Event()

        async def stop_before(copy: RemoteCopy) -> None:
            await silence(cluster, cluster.here)
            stopped.set()
            await continues.wait()
            await take_over(copy)

        monkeypatch.setattr(RemoteCopy, "take_over", stop_before)
        moving = cluster.begin_move(model)
        await stopped.wait()
        await training.reached(training.steps + 2)
        # It was rebuilt from the copy.
        assert there.tasks("restore") == ["restore"]
        # The old worker continues, and may do nothing.
        continues.set()
        assert not await moving
        await until_async(lambda: model not in cluster.executors[cluster.here].models)
        await training.reached(training.steps + 2)
        await training.stop()


async def test_the_new_worker_is_lost_just_after_it_got_the_model(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asyncio.timeout(25):
        model, training = await begin(cluster, 3)
        there = cluster.executors[cluster.there]
        take_over = RemoteCopy.take_over

        async def then_silence(copy: RemoteCopy) -> None:
            there.holds = of_model(model)
            await silence(cluster, cluster.there)
            await take_over(copy)

        monkeypatch.setattr(RemoteCopy, "take_over", then_silence)
        assert await cluster.begin_move(model)
        await training.reached(training.steps + 3)
        await training.stop()
        assert model in cluster.executors[cluster.here].models


async def test_another_worker_takes_the_model_during_a_move(cluster: Cluster) -> None:
    async with asyncio.timeout(25):
        model, training = await begin(cluster, 3)
        here, there = (cluster.executors[name] for name in (cluster.here, cluster.there))
        there.holds = of_model(model)
        moving = cluster.begin_move(model)
        await there.held.wait()
        old = cluster.workers[cluster.here]
        await old._store.workers.hand_over(
            model, term=cluster.state(model).term or 0, to=cluster.there
        )
        there.go.set()
        assert not await moving
        await training.reached(training.steps + 3)
        await training.stop()
        await until_async(lambda: model not in here.models)


async def test_nothing_is_lost_although_every_second_notification_is(cluster: Cluster) -> None:
    async with asyncio.timeout(25):
        model, training = await begin(cluster, 2)
        with Forgetful():
            await cluster.workers[cluster.here].drain(5.0)
            await training.reached(training.steps + 2)
            await training.stop()
        assert cluster.having(model) == cluster.there


async def test_gradients_custom_losses_and_a_save_move_with_their_model(cluster: Cluster) -> None:
    web = cluster.webs[0]
    async with asyncio.timeout(25):
        session = await web.session()
        model = await web.model(session)
        cluster.here = cluster.having(model)
        (cluster.there,) = set(cluster.workers) - {cluster.here}
        here, there = (cluster.executors[name] for name in (cluster.here, cluster.there))
        await web.passed(await web.forward_backward(model, 1, tokens=2))
        there.holds = of_model(model)
        moving = cluster.begin_move(model)
        await there.held.wait()
        # Its client goes on: more gradients, a loss, and a save that takes a while.
        await web.passed(await web.forward_backward(model, 2, tokens=3))
        made = await web.result(await web.step("create_custom_loss", **loss(session)))
        assert made["loss_id"]
        here.holds = lambda order: task_of(order) == "save"
        saved = await web.step("save_weights_for_sampler", model_id=model, seq_id=3, path="a")
        await here.held.wait()
        there.go.set()
        await until_async(lambda: len(there.tasks("run_pass")) == 1)
        assert not moving.done()
        here.go.set()
        assert (await web.result(saved))["path"]
        assert await moving
        await web.passed(await web.forward_backward(model, 4, tokens=4))
        assert await web.value(await web.optim_step(model, 5)) == 2 + 3 + 4
        assert there.tasks("save") == []
        assert "register_loss" in there.tasks()
        assert cluster.having(model) == cluster.there


async def test_a_loss_that_is_accepted_while_its_model_moves_is_on_the_new_worker(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    web = cluster.webs[0]
    async with asyncio.timeout(25):
        # Losses go from worker to worker in the order of their names: from the last to the first.
        while "two" not in (homes := await having_models(web, cluster)):
            pass
        session, model = homes["two"]
        cluster.here, cluster.there = "two", "one"
        there = cluster.executors["one"]
        place = RemoteScheduler.place

        async def then_move(scheduler: RemoteScheduler, request: QueuedRequest) -> None:
            await place(scheduler, request)
            assert await cluster.begin_move(model)
            moved = lambda: cluster.workers["one"]._scheduler._models.get(model)
            await until_async(
                lambda: (state := moved()) is not None and state.loaded_in is not None
            )

        monkeypatch.setattr(RemoteScheduler, "place", then_move)
        made = await web.step("create_custom_loss", **loss(session))
        monkeypatch.setattr(RemoteScheduler, "place", place)
        assert (await web.result(made))["loss_id"]
        assert there.tasks("register_loss") == ["register_loss"]


async def test_a_worker_that_seemed_dead_has_the_losses_that_were_created_meanwhile(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    web = cluster.webs[0]
    async with asyncio.timeout(25):
        while "two" not in (homes := await having_models(web, cluster)):
            pass
        session, model = homes["two"]
        lost, engine = cluster.workers["two"], cluster.executors["two"]

        async def nothing(*_given: object, **_named: object) -> tuple[()]:
            return ()

        async def none(**_named: object) -> int:
            return 0

        with monkeypatch.context() as patch:
            # It tells nothing and hears nothing.
            patch.setattr(lost._store.workers, "beat", nothing)
            patch.setattr(lost._store.workers, "waiting_requests", nothing)
            patch.setattr(lost._store.requests, "count_waiting", none)
            await until_async(lambda: "two" not in cluster.workers["one"].known.live())
            made = await web.result(await web.step("create_custom_loss", **loss(session)))
            assert made["loss_id"]
        await until_async(lambda: "two" in cluster.workers["one"].known.live())
        assert engine.tasks("register_loss") == []
        await web.forward_backward(model, 1, tokens=1)
        assert await web.value(await web.optim_step(model, 2)) == 1
        assert engine.tasks("register_loss") == ["register_loss"]
        assert cluster.having(model) == "two"


async def having_models(web: Api, cluster: Cluster) -> dict[str, tuple[str, str]]:
    """Create a model in a session of its own; which worker has it."""
    session = await web.session()
    model = await web.model(session)
    return {cluster.having(model): (session, model)}


async def test_a_copy_reads_the_log_once_and_no_payload_by_itself(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asyncio.timeout(25):
        model, training = await begin(cluster, 5)
        await training.stop()
        requests = cluster.workers[cluster.there]._store.requests
        read: list[str] = []
        payload = requests.payload

        async def counted(request_id: str) -> bytes | Path:
            read.append(request_id)
            return await payload(request_id)

        monkeypatch.setattr(requests, "payload", counted)
        # Without a snapshot, the whole log is run.
        cluster.state(model).snapshots.steps = 0
        assert await cluster.begin_move(model)
        assert (
            cluster.executors[cluster.there].tasks("optim_step") == ["optim_step"] * training.steps
        )
        assert read == []


async def test_a_model_does_not_wait_long_for_a_copy_that_is_stuck(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_moves, "MAX_WAITED_S", 0.5)
    hand_over, slow = scheduler_moves._Move._hand_over, asyncio.Event()

    async def not_yet(move: scheduler_moves._Move, may_lack: int) -> bool:
        if not slow.is_set():
            cluster.executors[cluster.there].holds = of_model(model)
            slow.set()
            return False
        return await hand_over(move, may_lack)

    async with asyncio.timeout(25):
        model, training = await begin(cluster, 3)
        monkeypatch.setattr(scheduler_moves._Move, "_hand_over", not_yet)
        assert not await cluster.begin_move(model)
        assert slow.is_set()
        cluster.executors[cluster.there].go.set()
        await training.reached(training.steps + 2)
        await training.stop()
        assert cluster.having(model) == cluster.here


async def test_a_worker_keeps_nothing_of_a_model_that_it_had_only_in_part(
    cluster: Cluster,
) -> None:
    async with asyncio.timeout(25):
        model, training = await begin(cluster, 3)
        await training.stop()
        here = cluster.executors[cluster.here]
        await fail_once(cluster.webs[0], here, model, training._next)
        assert cluster.state(model).loaded_in is None
        assert await cluster.begin_move(model)
        await until_async(lambda: model not in here.models)
        training._next += 1
        await training.step()
        assert cluster.having(model) == cluster.there


async def test_a_worker_runs_no_batch_of_a_model_that_it_has_lost(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asyncio.timeout(25):
        model, training = await begin(cluster, 3)
        await training.stop()
        here, worker = cluster.executors[cluster.here], cluster.workers[cluster.here]
        ready, waits, continues = here.ready, asyncio.Event(), asyncio.Event()

        async def late(base_model: str) -> int:
            waits.set()
            await continues.wait()
            return await ready(base_model)

        monkeypatch.setattr(here, "ready", late)
        step = await cluster.webs[0].optim_step(model, training._next)
        await waits.wait()
        state = cluster.state(model)
        await worker._store.workers.hand_over(model, term=state.term or 0, to=cluster.there)
        worker._scheduler.disown(state)
        continues.set()
        assert await cluster.webs[0].value(step) == training.steps
        await until_async(lambda: model not in here.models)
        assert len(here.tasks("optim_step")) == training.steps


async def test_a_copy_holds_up_no_batch_of_another_owner(cluster: Cluster) -> None:
    """Also a batch that is larger than what the copy has left."""
    async with asyncio.timeout(25):
        model, training = await begin(cluster, 6)
        there = cluster.executors[cluster.there]
        # While the heartbeat that tells of the first model is late, both workers may look alike.
        while cluster.having(other := await cluster.webs[0].model()) != cluster.there:
            pass
        there.holds = lambda order: task_of(order) == "restore"
        moving = cluster.begin_move(model)
        await there.held.wait()
        state = cluster.workers[cluster.there]._scheduler._models.get(other)
        assert state is not None
        state.model = replace(state.model, owner="somebody")
        await cluster.webs[0].passed(
            await cluster.webs[0].forward_backward(other, 1, tokens=50_000)
        )
        assert not moving.done()
        there.go.set()
        assert await moving
        await training.stop()


async def test_a_drained_worker_moves_its_models_while_they_train(
    cluster: Cluster, paused: list[int]
) -> None:
    async with asyncio.timeout(25):
        model, training = await begin(cluster, 3)
        idle = [await cluster.webs[0].model() for _ in range(2)]
        for executor in cluster.executors.values():
            executor.order_s = 0.01
        await cluster.workers[cluster.here].drain(20.0)
        await training.reached(training.steps + 2)
        await training.stop()
        assert set(cluster.executors[cluster.there].models) == {model, *idle}
        assert all(lacked < 2 for lacked in paused)


async def test_a_drain_does_not_wait_for_a_copy_that_is_stuck(cluster: Cluster) -> None:
    async with asyncio.timeout(25):
        model, training = await begin(cluster, 3)
        there = cluster.executors[cluster.there]
        there.holds = of_model(model)
        await cluster.workers[cluster.here].drain(3.0)
        steps = training.steps
        await cluster.workers[cluster.here].close()
        there.go.set()
        await training.reached(steps + 2)
        await training.stop()
        assert cluster.having(model) == cluster.there


async def test_work_that_arrives_during_a_drain_does_not_wait_for_its_end(
    cluster: Cluster,
) -> None:
    web = cluster.webs[0]
    async with asyncio.timeout(25):
        model, training = await begin(cluster, 3)
        await training.stop()
        here = cluster.executors[cluster.here]
        # This step keeps the worker from leaving.
        here.holds = lambda order: task_of(order) == "optim_step"
        step = await web.optim_step(model, training._next)
        await here.held.wait()
        draining = asyncio.create_task(cluster.workers[cluster.here].drain(50.0))
        await until_async(lambda: cluster.workers[cluster.here]._scheduler.draining)
        # Web processes do not know yet.
        body = {
            "base_model": BASE,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
            "num_samples": 1,
            "sampling_params": {},
        }
        sampled = [(await web.post("asample", body)).json["request_id"] for _ in range(4)]
        created = [await web.model() for _ in range(2)]
        for request in sampled:
            assert (await web.result(request))["sequences"]
        assert not draining.done()
        assert all(one in cluster.executors[cluster.there].models for one in created)
        here.go.set()
        assert await web.value(step) == training.steps
        await draining


def row(name: str, training: int) -> WorkerRow:
    return WorkerRow(
        name=name,
        base_model=BASE,
        term=1,
        state=UP,
        silent_s=0.0,
        model={},
        stats={"training": training},
    )


def test_a_model_moves_only_if_workers_differ_by_two() -> None:
    assert choose_move([]) is None
    assert choose_move([row("a", 1), row("b", 0)]) is None
    assert choose_move([row("a", 2), row("b", 0)]) == ("a", "b")
    assert choose_move([row("a", 1), row("b", 3), row("c", 0)]) == ("b", "c")
    # All workers choose the same two.
    assert choose_move([row("a", 3), row("b", 3), row("c", 1)]) == ("b", "c")


async def test_models_move_to_a_worker_that_is_free(
    db: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moves, "UNEVEN_S", 0.5)
    first, second = PacedExecutor(), PacedExecutor()
    async with (
        asyncio.timeout(25),
        a_worker(db, tmp_path, "one", first),
        a_web(db, tmp_path) as web,
    ):
        trainings = [Training(web, await web.model()) for _ in range(4)]
        async with a_worker(db, tmp_path, "two", second):
            await until_async(lambda: len(second.models) == 2, within_s=30)
            for training in trainings:
                await training.reached(training.steps + 2)
            assert len(first.models) == len(second.models) == 2
            for training in trainings:
                await training.stop()


async def test_a_model_that_comes_while_its_copy_is_dropped_is_rebuilt(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with asyncio.timeout(25):
        model, training = await begin(cluster, 3)
        there = cluster.executors[cluster.there]
        there.holds = lambda order: task_of(order) == "drop"
        take_over, close = RemoteCopy.take_over, asyncio.Event()

        async def never(copy: RemoteCopy) -> None:
            close.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(RemoteCopy, "take_over", never)
        moving = cluster.begin_move(model)
        await close.wait()
        moving.cancel()
        await there.held.wait()
        monkeypatch.setattr(RemoteCopy, "take_over", take_over)
        old = cluster.workers[cluster.here]
        await old._store.workers.hand_over(
            model, term=cluster.state(model).term or 0, to=cluster.there
        )
        # Long enough to rebuild it, if that did not wait.
        await asyncio.sleep(1.5)
        there.go.set()
        await training.reached(training.steps + 3)
        await training.stop()
        assert model in there.models
