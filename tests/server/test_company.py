"""An engine that dies blames nobody who was beside the one that killed it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from server.echo import BASE, EchoExecutor
from server.hosting import Api, hosted
from tinkex.server.executor import EngineLost, Outcome, Task, Work, WorkFailed, WorkMuddled
from tinkex.server.scheduler.crash_isolation import FEW, Company, width
from tinkex.wire.codec import decode_json
from tinkex.wire.sampling import SampleRequest
from waiting import until_async

pytestmark = pytest.mark.anyio

#: A prompt, or a number of tokens to train on, of which engines die.
POISON = 13


class Mortal(EchoExecutor):
    """Dies of poison; everything that is with it is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.deaths = 0
        self.most_beside = 0
        self._here: set[int] = set()

    async def run(self, base_model: str, work: Work, *, incarnation: int | None = None) -> Outcome:
        mine = self._incarnation
        self._here.add(id(work))
        try:
            # As real work: others come in meanwhile.
            await asyncio.sleep(0.005)
            if self._is_poison(work):
                self.deaths += 1
                self.most_beside = max(self.most_beside, len(self._here))
                self.die()
            if mine != self._incarnation:
                raise EngineLost("died")
            return await super().run(base_model, work, incarnation=incarnation)
        finally:
            self._here.discard(id(work))

    def _is_poison(self, work: Work) -> bool:
        if work.task is Task.SAMPLE:
            return decode_json(SampleRequest, work.payload).prompt.to_ints()[0] == POISON
        return work.task is Task.PASS and work.payload.count(bytes([5])) >= POISON


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


async def test_of_samples_that_share_an_engine_only_the_deadly_one_fails(tmp_path: Path) -> None:
    executor = Mortal()
    async with hosted(executor, tmp_path) as api:
        session = await api.session()
        prompts = [1, 2, 3, POISON, 4, 5, 6, 7]
        answers = await asyncio.gather(
            *(sampled(api, session, number, prompt) for number, prompt in enumerate(prompts))
        )
        after = await sampled(api, session, 100, 8)
    failed = [prompt for prompt, answer in zip(prompts, answers, strict=True) if "error" in answer]
    assert failed == [POISON]
    deadly = answers[prompts.index(POISON)]
    assert deadly["category"] == "server"
    assert "died 3 times" in deadly["error"]
    assert executor.deaths == 3
    assert executor.most_beside > 1
    assert "error" not in after


async def test_many_suspects_are_narrowed_down_in_groups(tmp_path: Path) -> None:
    executor = Mortal()
    async with hosted(executor, tmp_path) as api:
        session = await api.session()
        prompts = [1] * 200
        prompts[150] = POISON
        answers = await asyncio.gather(
            *(sampled(api, session, number, prompt) for number, prompt in enumerate(prompts))
        )
    assert [number for number, answer in enumerate(answers) if "error" in answer] == [150]
    assert executor.deaths <= 6


async def test_samples_that_wait_for_a_place_run_after_the_deadly_one_has_failed(
    tmp_path: Path,
) -> None:
    executor = EchoExecutor()
    executor.open.clear()
    # At most eight of an owner are with an engine.
    async with hosted(executor, tmp_path, max_sequences=4) as api, asyncio.timeout(20):
        session = await api.session()

        def send(first: int, count: int) -> list[asyncio.Task[dict[str, Any]]]:
            numbers = range(first, first + count)
            return [asyncio.create_task(sampled(api, session, number, 1)) for number in numbers]

        inside = send(0, 8)
        for _ in range(2):
            for _ in range(8):
                await executor.entered.acquire()
            executor.die()
        # All are suspects now, and the first of them is tried alone.
        await executor.entered.acquire()
        outside = send(8, 4)
        assert api.app
        futures = api.app.state.context.futures
        await until_async(lambda: len(futures) == 12)
        executor.die()
        executor.open.set()
        answers = await asyncio.gather(*inside, *outside)
    assert ["error" in answer for answer in answers].count(True) == 1


async def test_a_step_that_kills_engines_fails_and_other_models_go_on(tmp_path: Path) -> None:
    executor = Mortal()
    async with hosted(executor, tmp_path) as api:
        session = await api.session()
        models = [await api.model(session, number=number) for number in range(3)]
        passes = [
            await api.forward_backward(model, 1, tokens=POISON if model == models[1] else 3)
            for model in models
        ]
        steps = [await api.optim_step(model, 2) for model in models]
        results = [await api.result(step) for step in steps]
        deadly = await api.result(passes[1])
        # The model itself is not lost: only that step is.
        await api.forward_backward(models[1], 3, tokens=4)
        again = await api.value(await api.optim_step(models[1], 4))
    assert deadly["category"] == "server"
    assert "died 3 times" in deadly["error"]
    assert results[0]["metrics"]["value:sum"] == results[2]["metrics"]["value:sum"] == 3
    assert "step 1 before this optim_step failed" in results[1]["error"]
    assert again == 4
    assert executor.deaths == 3


class Muddling(EchoExecutor):
    """A batch that holds a poisonous pass beside others fails as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.together: set[int] = set()
        self.batches: list[int] = []

    async def run(self, base_model: str, work: Work, *, incarnation: int | None = None) -> Outcome:
        if work.task is not Task.PASS:
            return await super().run(base_model, work, incarnation=incarnation)
        self.together.add(id(work))
        await asyncio.sleep(0.02)
        beside = len(self.together)
        self.batches.append(beside)
        # Half of the gradient is there already when it fails.
        self.models[work.model_id].gradient += 1000
        await asyncio.sleep(0.02)
        self.together.discard(id(work))
        if beside > 1:
            raise WorkMuddled("a batch of several requests failed")
        self.models[work.model_id].gradient -= 1000
        if work.payload.count(bytes([5])) >= POISON:
            raise WorkFailed("server", "the engine failed unexpectedly")
        return await super().run(base_model, work, incarnation=incarnation)


async def test_what_fails_in_a_shared_batch_is_tried_apart(tmp_path: Path) -> None:
    executor = Muddling()
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
    # Built again from the log: nothing is left of what was half added.
    assert results[0]["metrics"]["value:sum"] == results[2]["metrics"]["value:sum"] == 3


def test_a_few_suspects_are_tried_one_by_one_and_many_in_ever_smaller_groups() -> None:
    assert width(FEW, 2) == 1
    assert [width(5000, deaths) for deaths in (2, 3, 4, 5, 6)] == [625, 78, 9, 1, 1]


async def test_visitors_come_in_by_turns_and_a_suspect_is_alone() -> None:
    company = Company()
    async with company.visit("a") as first:
        company.lost("a", first)
        company.lost("a", first)
    inside: list[str] = []
    leave = asyncio.Event()

    async def come(name: str) -> bool:
        async with company.visit(name) as visit:
            inside.append(name)
            await leave.wait()
            inside.remove(name)
            return visit.alone

    tasks = []
    for name in ("b", "a", "c", "d"):
        tasks.append(asyncio.create_task(come(name)))
        await asyncio.sleep(0)
    assert inside == ["b"]
    assert [name for name in "abcd" if company.keeps_out(name)] == ["a", "c", "d"]
    leave.set()
    assert await asyncio.gather(*tasks) == [True, True, False, False]
    assert not any(company.keeps_out(name) for name in "abcd")


async def test_one_that_gives_up_waiting_keeps_nobody_out() -> None:
    company = Company()
    async with company.visit("a") as visit:
        company.lost("s", visit, times=2)

        async def come() -> None:
            async with company.visit("s"):
                raise AssertionError("a suspect came in beside others")

        waiting = asyncio.create_task(come())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        async with asyncio.timeout(5), company.visit("b"):
            pass
