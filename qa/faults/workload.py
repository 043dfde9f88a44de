"""
What a busy user does: several sessions, trainers in threads, samplers in coroutines, all at once.

Run twice against one kind of server, it must come to the same results: every number here depends
on the plan alone, never on time. What the user gives up in between is not part of the results.
"""

from __future__ import annotations

import asyncio
import random
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import tinkex
from tinkex import types

SESSIONS = 3
TRAINERS = 4
#: Steps that are submitted before the oldest is waited for.
AHEAD = 6
#: A batch has this many examples, the server's chunks two.
BATCH = 5
CHUNKS = 3
CONFIG = {"fwdbwd_max_chunk_len": 2}
ADAM = types.AdamParams(learning_rate=1e-2)
#: A limit on every wait, so that a result that never comes is a failure with a name.
PATIENCE_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    base_model: str
    steps: int
    samples: int
    #: Tokens are below this.
    vocabulary: int = 200
    max_tokens: int = 4
    #: Steps between two samplers, two saves, two loads of the last save.
    sampler_every: int = 20
    save_every: int = 35
    load_every: int = 90

    @property
    def steps_each(self) -> int:
        return self.steps // TRAINERS

    @property
    def bursts(self) -> int:
        """Of all trainers: each of a sampler of its own, in the middle of training."""
        return TRAINERS * len(range(0, self.steps_each, self.sampler_every))


@dataclass
class Results:
    """By what was asked: what came. Equal for equal plans."""

    found: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    #: Paths of the weights at the end, by trainer.
    final: dict[int, str] = field(default_factory=dict)
    model_ids: dict[int, str] = field(default_factory=dict)
    #: Prompts whose samples were waited for, and those that were given up.
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    given_up: set[tuple[int, ...]] = field(default_factory=set)


def run(url: str, plan: Plan) -> Results:
    """The whole plan against a server."""
    results = Results()
    with ExitStack() as stack:
        services = [
            stack.enter_context(tinkex.ServiceClient(base_url=url)) for _ in range(SESSIONS)
        ]
        pool = stack.enter_context(ThreadPoolExecutor(TRAINERS + 1))
        work = [
            pool.submit(_Trainer(number, services[number % SESSIONS], plan, results).run)
            for number in range(TRAINERS)
        ]
        half = plan.samples - plan.bursts * _burst(plan)
        work.append(
            pool.submit(lambda: asyncio.run(_sample_the_base(services, plan, half, results)))
        )
        for each in work:
            each.result()
    return results


def _burst(plan: Plan) -> int:
    """Samples of one trainer's sampler: together they are half of all."""
    return plan.samples // 2 // plan.bursts


def _prompts(kind: int, number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Prompts that occur once in the whole plan, so that a sample is known by its prompt."""
    for index in range(count):
        yield (kind, number % 100, number // 100, index % 100, index // 100)


def _params(plan: Plan, prompt: tuple[int, ...]) -> types.SamplingParams:
    seed = random.Random(str(prompt)).randrange(2**31)
    return types.SamplingParams(max_tokens=plan.max_tokens, seed=seed, temperature=1.0)


def _told(answer: types.SampleResponse) -> Any:
    """Everything of an answer but its ids, which are the server's to choose."""
    return [(each.stop_reason, each.tokens, each.logprobs) for each in answer.sequences]


class _Trainer:
    """One training client in a thread of its own."""

    def __init__(
        self, number: int, service: tinkex.ServiceClient, plan: Plan, results: Results
    ) -> None:
        self.number, self.service, self.plan, self.results = number, service, plan, results
        self.rng = random.Random(number)
        self.waiting: list[tuple[tuple[Any, ...], Any]] = []
        self.samples: list[tuple[tuple[int, ...], Any]] = []

    def run(self) -> None:
        plan, number = self.plan, self.number
        training = self.service.create_lora_training_client(plan.base_model, rank=4, seed=number)
        self.results.model_ids[number] = training.model_id
        saved: str | None = None
        for step in range(plan.steps_each):
            data = self.batch()
            self.ask(("pass", step), training.forward_backward(data, "cross_entropy"))
            self.ask(("step", step), training.optim_step(ADAM))
            if step % 7 == 3:
                self.change_of_mind(training, data, step)
            if step % plan.save_every == plan.save_every - 1:
                saved = training.save_state(f"at-{step}").result(PATIENCE_S).path
                self.note(("save", step), saved.partition("/weights/")[2])
            if saved and step % plan.load_every == plan.load_every - 1:
                with warnings.catch_warnings():  # it is deprecated, and used
                    warnings.simplefilter("ignore", FutureWarning)
                    training.load_state_with_optimizer(saved)
            if step % plan.sampler_every == 0:
                self.sample(training.save_weights_and_get_sampling_client(), step)
            while len(self.waiting) > 2 * AHEAD:
                self.settle_one()
        while self.waiting:
            self.settle_one()
        self.settle_samples()
        data = self.batch()
        self.note("end", _passed(training.forward(data, "cross_entropy").result(PATIENCE_S)))
        saving = training.save_weights_for_sampler("final")
        self.results.final[number] = saving.result(PATIENCE_S).path

    def batch(self) -> list[types.Datum]:
        data = []
        for _ in range(BATCH):
            tokens = [self.rng.randrange(self.plan.vocabulary) for _ in range(8)]
            inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
            data.append(
                types.Datum(
                    model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs
                )
            )
        return data

    def ask(self, name: tuple[Any, ...], future: Any) -> None:
        self.waiting.append((name, future))

    def note(self, name: Any, value: Any) -> None:
        self.results.found["train", self.number, name] = value

    def settle_one(self) -> None:
        name, future = self.waiting.pop(0)
        if self.rng.random() < 0.1:  # a time-out loses nothing
            with suppress(TimeoutError):
                future.result(0.001)
        result = future.result(PATIENCE_S)
        self.note(name, _passed(result) if name[0] == "pass" else result.metrics)

    def change_of_mind(
        self, training: tinkex.TrainingClient, data: list[types.Datum], step: int
    ) -> None:
        """A pass without gradients that is given up: sent or not, nothing may come of it."""
        future = training.forward(data, "cross_entropy")
        if self.rng.random() < 0.5:
            future.cancel()
        else:
            self.ask(("pass", step, "forward"), future)

    def sample(self, sampling: tinkex.SamplingClient, step: int) -> None:
        kind = 1 + self.number
        for prompt in _prompts(kind, step, _burst(self.plan)):
            given = types.ModelInput.from_ints(list(prompt))
            future = sampling.sample(given, 1, _params(self.plan, prompt))
            if self.rng.random() < 0.05:
                future.cancel()
                self.results.given_up.add(prompt)
            else:
                self.samples.append((prompt, future))
        if len(self.samples) > 200:
            self.settle_samples()

    def settle_samples(self) -> None:
        for prompt, future in self.samples:
            self.results.found["sample", prompt] = _told(future.result(PATIENCE_S))
            self.results.prompts.append(prompt)
        self.samples.clear()


def _passed(output: types.ForwardBackwardOutput) -> Any:
    tensors = [
        {name: tensor.tolist() for name, tensor in each.items()} for each in output.loss_fn_outputs
    ]
    return output.loss_fn_output_type, tensors, output.metrics


async def _sample_the_base(
    services: list[tinkex.ServiceClient], plan: Plan, count: int, results: Results
) -> None:
    """Samples of the untrained model by coroutines: whole, streamed, as logprobs; some given up."""
    samplers = [
        await service.create_sampling_client_async(base_model=plan.base_model)
        for service in services
    ]
    gate = asyncio.Semaphore(400)  # in flight together, so that training gets its turn as well
    rng = random.Random(0)

    async def whole(sampling: tinkex.SamplingClient, prompt: tuple[int, ...]) -> Any:
        given = types.ModelInput.from_ints(list(prompt))
        return _told(await sampling.sample_async(given, 1, _params(plan, prompt)))

    async def streamed(sampling: tinkex.SamplingClient, prompt: tuple[int, ...]) -> Any:
        given = types.ModelInput.from_ints(list(prompt))
        tokens: list[int] = []
        with sampling.sample_stream(given, 1, _params(plan, prompt)) as stream:
            async for event in stream:
                tokens += event.tokens
            answer = await stream.response_async(PATIENCE_S)
        assert tokens == answer.sequences[0].tokens, "the events and the answer differ"
        return _told(answer)

    async def one(index: int, prompt: tuple[int, ...], *, give_up: bool) -> None:
        sampling = samplers[index % len(samplers)]
        async with gate:
            ask = streamed if index % 10 == 0 else whole
            task = asyncio.ensure_future(ask(sampling, prompt))
            if give_up:
                results.given_up.add(prompt)
                await asyncio.sleep(0.01 * (index % 5))
                task.cancel()
                await asyncio.wait([task])
                return
            async with asyncio.timeout(PATIENCE_S):
                results.found["sample", prompt] = await task
            results.prompts.append(prompt)

    async with asyncio.TaskGroup() as group:
        for index, prompt in enumerate(_prompts(0, 0, count)):
            group.create_task(one(index, prompt, give_up=rng.random() < 0.05))
