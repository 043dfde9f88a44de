"""Only the request that crashes an engine fails, not those that ran beside it."""

import asyncio
import contextlib
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from server.echo import BASE, EchoExecutor
from server.hosting import Api, hosted
from tinkex.server.executor import (
    BatchFailed,
    EngineKilled,
    EngineLost,
    WorkFailed,
)
from tinkex.server.queued_request import Kind, QueuedRequest
from tinkex.server.scheduler import engine_client
from tinkex.server.scheduler.engine_client import MAX_SINGLY, CrashIsolation, group_size
from tinkex.wire.codec import decode_json
from tinkex.wire.proto.frames_pb2 import Done, Order
from tinkex.wire.sampling import SampleRequest
from waiting import until_async

pytestmark = pytest.mark.anyio

#: A prompt, or a number of tokens to train on, that crashes the engine.
POISON = 13


class CrashingExecutor(EchoExecutor):
    """Crashes on poison, and loses everything it is running."""

    def __init__(self) -> None:
        super().__init__()
        self.crashes = 0
        self.max_running = 0
        self._running: set[int] = set()

    async def run(self, base_model: str, work: Order, *, incarnation: int | None = None) -> Done:
        mine = self._incarnation
        self._running.add(id(work))
        try:
            # Like real work: others start in the meantime.
            await asyncio.sleep(0.005)
            if self._is_poison(work):
                self.crashes += 1
                self.max_running = max(self.max_running, len(self._running))
                self.die()
            if mine != self._incarnation:
                raise EngineLost("died")
            return await super().run(base_model, work, incarnation=incarnation)
        finally:
            self._running.discard(id(work))

    def _is_poison(self, work: Order) -> bool:
        if work.HasField("sample"):
            return (
                decode_json(SampleRequest, work.sample.payload.inline).prompt.to_ints()[0] == POISON
            )
        return (
            work.HasField("run_pass") and work.run_pass.payload.inline.count(bytes([5])) >= POISON
        )


async def sampled(api: Api, session: str, number: int, prompt: int) -> dict[str, Any]:
    body = {
        "session_id": session,
        "seq_id": number,
        "base_model": BASE,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [prompt]}]},
        "sampling_params": {"max_tokens": 1},
        "num_samples": 1,
    }
    made = await api.post("asample", body)
    assert made.status == 200, made
    answer: dict[str, Any] = await api.result(made.json["request_id"])
    return answer


async def test_of_samples_on_one_engine_only_the_one_that_crashes_it_fails(tmp_path: Path) -> None:
    executor = CrashingExecutor()
    async with hosted(executor, tmp_path) as api:
        session = await api.session()
        prompts = [1, 2, 3, POISON, 4, 5, 6, 7]
        answers = await asyncio.gather(
            *(sampled(api, session, number, prompt) for number, prompt in enumerate(prompts))
        )
        after = await sampled(api, session, 100, 8)
    failed = [prompt for prompt, answer in zip(prompts, answers, strict=True) if "error" in answer]
    assert failed == [POISON]
    poisonous = answers[prompts.index(POISON)]
    assert poisonous["category"] == "server"
    assert "died 3 times" in poisonous["error"]
    assert executor.crashes == 3
    assert executor.max_running > 1
    assert "error" not in after


async def test_many_isolated_requests_run_in_groups(tmp_path: Path) -> None:
    executor = CrashingExecutor()
    async with hosted(executor, tmp_path) as api:
        session = await api.session()
        prompts = [1] * 200
        prompts[150] = POISON
        answers = await asyncio.gather(
            *(sampled(api, session, number, prompt) for number, prompt in enumerate(prompts))
        )
    assert [number for number, answer in enumerate(answers) if "error" in answer] == [150]
    assert executor.crashes <= 6


async def test_samples_that_wait_for_admission_run_after_the_poisonous_one_failed(
    tmp_path: Path,
) -> None:
    executor = EchoExecutor()
    executor.open.clear()
    # An engine has at most eight requests of an owner.
    async with hosted(executor, tmp_path, max_sequences=4) as api, asyncio.timeout(20):
        session = await api.session()

        def send(first: int, count: int) -> list[asyncio.Task[dict[str, Any]]]:
            numbers = range(first, first + count)
            return [asyncio.create_task(sampled(api, session, number, 1)) for number in numbers]

        admitted = send(0, 8)
        for _ in range(2):
            for _ in range(8):
                await executor.entered.acquire()
            executor.die()
        # All are isolated now, and the first of them runs alone.
        await executor.entered.acquire()
        waiting = send(8, 4)
        assert api.app
        futures = api.app.state.context.futures
        await until_async(lambda: len(futures) == 12)
        executor.die()
        executor.open.set()
        answers = await asyncio.gather(*admitted, *waiting)
    assert ["error" in answer for answer in answers].count(True) == 1


async def test_a_step_that_crashes_engines_fails_and_other_models_continue(tmp_path: Path) -> None:
    executor = CrashingExecutor()
    async with hosted(executor, tmp_path) as api:
        session = await api.session()
        models = [await api.model(session, number=number) for number in range(3)]
        passes = [
            await api.forward_backward(model, 1, tokens=POISON if model == models[1] else 3)
            for model in models
        ]
        steps = [await api.optim_step(model, 2) for model in models]
        results = [await api.result(step) for step in steps]
        poisonous = await api.result(passes[1])
        # Only that step fails; the model continues.
        await api.forward_backward(models[1], 3, tokens=4)
        again = await api.value(await api.optim_step(models[1], 4))
    assert poisonous["category"] == "server"
    assert "died 3 times" in poisonous["error"]
    assert results[0]["metrics"]["value:sum"] == results[2]["metrics"]["value:sum"] == 3
    assert "step 1 before this optim_step failed" in results[1]["error"]
    assert again == 4
    assert executor.crashes == 3


class KilledFromOutside(EchoExecutor):
    """Is killed from outside during each of the first passes."""

    def __init__(self, kills: int) -> None:
        super().__init__()
        self.kills = kills

    async def run(self, base_model: str, work: Order, *, incarnation: int | None = None) -> Done:
        if work.HasField("run_pass") and self.kills:
            self.kills -= 1
            self.die()
            raise EngineKilled("killed")
        return await super().run(base_model, work, incarnation=incarnation)


async def test_kills_from_outside_fail_nothing_however_often(tmp_path: Path) -> None:
    executor = KilledFromOutside(kills=7)
    async with hosted(executor, tmp_path) as api:
        model = await api.model()
        await api.forward_backward(model, 1)
        assert await api.value(await api.optim_step(model, 2)) == 3
        assert api.app
        assert await api.app.state.context.store.attempts.counted() == {}
    assert executor.kills == 0


class CrashingReplays(CrashingExecutor):
    """Crashes on poison only once it was killed: then the pass is replayed."""

    def _is_poison(self, work: Order) -> bool:
        return self._incarnation > 1 and super()._is_poison(work)


async def test_a_log_that_crashes_engines_fails_its_model_and_others_continue(
    tmp_path: Path,
) -> None:
    executor = CrashingReplays()
    async with hosted(executor, tmp_path) as api:
        session = await api.session()
        models = [await api.model(session, number=number) for number in range(3)]
        for model in models:
            tokens = POISON if model == models[1] else 3
            await api.passed(await api.forward_backward(model, 1, tokens=tokens))
        executor.die()
        steps = [await api.optim_step(model, 2) for model in models]
        results = [await api.result(step) for step in steps]
        # Its next step does not try again.
        crashes = executor.crashes
        again = await api.result(await api.forward_backward(models[1], 3))
        last = [await api.value(await api.optim_step(model, 3)) for model in models[::2]]
    assert results[0]["metrics"]["value:sum"] == results[2]["metrics"]["value:sum"] == 3
    assert last == [6, 6]
    for failed in (results[1], again):
        assert failed["category"] == "server"
        assert "could not be rebuilt from its log: the engine died 3 times" in failed["error"]
    assert executor.crashes == crashes == 3


class SharedBatches(EchoExecutor):
    """A batch with a poisonous pass fails as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.together: set[int] = set()
        self.batches: list[int] = []

    async def run(self, base_model: str, work: Order, *, incarnation: int | None = None) -> Done:
        if not work.HasField("run_pass"):
            return await super().run(base_model, work, incarnation=incarnation)
        self.together.add(id(work))
        await asyncio.sleep(0.02)
        beside = len(self.together)
        self.batches.append(beside)
        # Half of the gradient is there already when it fails.
        self.models[work.run_pass.model_id].gradient += 1000
        await asyncio.sleep(0.02)
        self.together.discard(id(work))
        if beside > 1:
            raise BatchFailed("a batch of several requests failed")
        self.models[work.run_pass.model_id].gradient -= 1000
        if work.run_pass.payload.inline.count(bytes([5])) >= POISON:
            raise WorkFailed("server", "the engine failed unexpectedly")
        return await super().run(base_model, work, incarnation=incarnation)


async def test_requests_that_fail_in_a_shared_batch_run_alone_next(tmp_path: Path) -> None:
    executor = SharedBatches()
    async with hosted(executor, tmp_path) as api:
        session = await api.session()
        models = [await api.model(session, number=number) for number in range(3)]
        passes = await asyncio.gather(
            *(
                api.forward_backward(model, 1, tokens=POISON if model == models[1] else 3)
                for model in models
            )
        )
        steps = [await api.optim_step(model, 2) for model in models]
        results = [await api.result(step) for step in steps]
        bad = await api.result(passes[1])
    assert max(executor.batches) > 1
    assert bad["error"] == "the engine failed unexpectedly"
    # Rebuilt from the log: nothing is left of the half-added gradients.
    assert results[0]["metrics"]["value:sum"] == results[2]["metrics"]["value:sum"] == 3


def test_few_isolated_requests_run_one_by_one_and_many_in_shrinking_groups() -> None:
    assert group_size(MAX_SINGLY, 2) == 1
    assert [group_size(5000, crashes) for crashes in (2, 3, 4, 5, 6)] == [625, 78, 9, 1, 1]


async def test_attempts_start_in_order_and_an_isolated_one_is_alone() -> None:
    isolation = CrashIsolation()
    async with isolation.attempt("a") as first:
        assert not isolation.count("a", first, 1)
        assert not isolation.count("a", first, 1)
    running: list[str] = []
    finish = asyncio.Event()

    async def run(name: str) -> bool:
        async with isolation.attempt(name) as attempt:
            running.append(name)
            await finish.wait()
            running.remove(name)
            return attempt.alone

    tasks = []
    for name in ("b", "a", "c", "d"):
        tasks.append(asyncio.create_task(run(name)))
        await asyncio.sleep(0)
    assert running == ["b"]
    assert [name for name in "abcd" if isolation.is_held(name)] == ["a", "c", "d"]
    finish.set()
    assert await asyncio.gather(*tasks) == [True, True, False, False]
    assert not any(isolation.is_held(name) for name in "abcd")


async def test_a_cancelled_attempt_does_not_block_others() -> None:
    isolation = CrashIsolation()
    async with isolation.attempt("a") as attempt:
        isolation.count("s", attempt, 2)

        async def run() -> None:
            async with isolation.attempt("s"):
                raise AssertionError("an isolated request ran beside others")

        waiting = asyncio.create_task(run())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        async with asyncio.timeout(5), isolation.attempt("b"):
            pass


async def test_the_cost_of_an_attempt_does_not_grow_with_those_in_flight() -> None:
    """Counts the lines that run, which do not depend on the machine."""

    async def lines(in_flight: int) -> int:
        isolation = CrashIsolation()
        isolation.lost.restore({f"s{number}": 2 for number in range(in_flight)}, None)
        async with contextlib.AsyncExitStack() as stack:
            for number in range(in_flight):
                await stack.enter_async_context(isolation.attempt(f"r{number}"))

            async def isolated(number: int) -> None:
                async with isolation.attempt(f"s{number}"):
                    pass

            waiting = [asyncio.create_task(isolated(number)) for number in range(in_flight)]
            await asyncio.sleep(0)
            ran = 0

            def trace(frame: FrameType, event: str, _: Any) -> Any:
                nonlocal ran
                if frame.f_code.co_filename == engine_client.__file__:
                    ran += event == "line"
                    return trace
                return None

            late = asyncio.create_task(isolated(0))
            sys.settrace(trace)
            try:
                await asyncio.sleep(0)
                late.cancel()
                await asyncio.gather(late, return_exceptions=True)
            finally:
                sys.settrace(None)
        await asyncio.gather(*waiting)
        return ran

    assert await lines(20) == await lines(500) > 0


async def test_an_isolated_request_does_not_wait_for_a_sample_that_is_being_prepared(
    tmp_path: Path,
) -> None:
    """A sample may have to wait for an object store before the engine gets it."""
    async with hosted(EchoExecutor(), tmp_path) as api:
        assert api.app
        client = api.app.state.context.scheduler.replicas(BASE).engines[0].client
        preparing = asyncio.Event()

        async def prepare() -> tuple[Order, None]:
            preparing.set()
            await asyncio.Event().wait()
            return Order(), None

        request = QueuedRequest(request_id="slow", owner="a", kind=Kind.SAMPLE, base_model=BASE)
        sample = asyncio.create_task(client.run_request(request, prepare))
        await preparing.wait()
        client.isolation.lost.restore({"suspect": 2}, None)
        async with asyncio.timeout(5), client.isolation.attempt("suspect") as attempt:
            assert attempt.alone
        sample.cancel()
