"""
A concurrent workload: several sessions, trainers in threads, and samplers in coroutines.

Two runs against the same kind of server must have the same results: they depend on the plan alone,
never on time. Requests that the client cancels are not part of the results.
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
#: Number of steps that are pending before the client waits for the oldest.
MAX_PENDING = 6
#: Examples of a batch; the server's chunks have two.
BATCH = 5
CHUNKS = 3
CONFIG = {"fwdbwd_max_chunk_len": 2}
ADAM = types.AdamParams(learning_rate=1e-2)
#: Timeout of every wait, so that a lost result fails with a clear error.
TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    base_model: str
    steps: int
    samples: int
    #: Token ids are below this.
    vocabulary: int = 200
    max_tokens: int = 4
    #: Steps between two samplers, two saves, and two loads of the last save.
    sampler_every: int = 20
    save_every: int = 35
    load_every: int = 90

    @property
    def steps_each(self) -> int:
        return self.steps // TRAINERS

    @property
    def bursts(self) -> int:
        """Number of sample bursts of all trainers; each burst uses its own sampler during training."""
        return TRAINERS * len(range(0, self.steps_each, self.sampler_every))


@dataclass
class Results:
    """Results by request; equal for equal plans."""

    found: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    #: Paths of the final weights by trainer.
    final: dict[int, str] = field(default_factory=dict)
    model_ids: dict[int, str] = field(default_factory=dict)
    #: Prompts whose samples were awaited, and prompts whose samples were cancelled.
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    abandoned: set[tuple[int, ...]] = field(default_factory=set)


def run(url: str, plan: Plan) -> Results:
    """Runs the whole plan against a server."""
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
        base_samples = plan.samples - plan.bursts * _burst(plan)
        work.append(
            pool.submit(
                lambda: asyncio.run(_sample_the_base(services, plan, base_samples, results))
            )
        )
        for each in work:
            each.result()
    return results


def _burst(plan: Plan) -> int:
    """Number of samples in one burst; all bursts together are half of the samples."""
    return plan.samples // 2 // plan.bursts


def _prompts(kind: int, number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Prompts that are unique in the plan, so that a prompt identifies its sample."""
    for index in range(count):
        yield (kind, number % 100, number // 100, index % 100, index // 100)


def _params(plan: Plan, prompt: tuple[int, ...]) -> types.SamplingParams:
    seed = random.Random(str(prompt)).randrange(2**31)
    return types.SamplingParams(max_tokens=plan.max_tokens, seed=seed, temperature=1.0)


def _content(answer: types.SampleResponse) -> Any:
    """The content of a response without ids, which the server chooses."""
    return [(each.stop_reason, each.tokens, each.logprobs) for each in answer.sequences]


class _Trainer:
    """One training client in its own thread."""

    def __init__(
        self, number: int, service: tinkex.ServiceClient, plan: Plan, results: Results
    ) -> None:
        self.number, self.service, self.plan, self.results = number, service, plan, results
        self.rng = random.Random(number)
        self.pending: list[tuple[tuple[Any, ...], Any]] = []
        self.samples: list[tuple[tuple[int, ...], Any]] = []

    def run(self) -> None:
        plan, number = self.plan, self.number
        training = self.service.create_lora_training_client(plan.base_model, rank=4, seed=number)
        self.results.model_ids[number] = training.model_id
        saved: str | None = None
        for step in range(plan.steps_each):
            data = self.batch()
            self.add(("pass", step), training.forward_backward(data, "cross_entropy"))
            self.add(("step", step), training.optim_step(ADAM))
            if step % 7 == 3:
                self.submit_optional_forward(training, data, step)
            if step % plan.save_every == plan.save_every - 1:
                saved = training.save_state(f"at-{step}").result(TIMEOUT_S).path
                self.record(("save", step), saved.partition("/weights/")[2])
            if saved and step % plan.load_every == plan.load_every - 1:
                with warnings.catch_warnings():  # deprecated, but supported
                    warnings.simplefilter("ignore", FutureWarning)
                    training.load_state_with_optimizer(saved)
            if step % plan.sampler_every == 0:
                self.sample(training.save_weights_and_get_sampling_client(), step)
            while len(self.pending) > 2 * MAX_PENDING:
                self.wait_for_oldest()
        while self.pending:
            self.wait_for_oldest()
        self.wait_for_samples()
        data = self.batch()
        self.record("end", _pass_content(training.forward(data, "cross_entropy").result(TIMEOUT_S)))
        saving = training.save_weights_for_sampler("final")
        self.results.final[number] = saving.result(TIMEOUT_S).path

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

    def add(self, name: tuple[Any, ...], future: Any) -> None:
        self.pending.append((name, future))

    def record(self, name: Any, value: Any) -> None:
        self.results.found["train", self.number, name] = value

    def wait_for_oldest(self) -> None:
        name, future = self.pending.pop(0)
        if self.rng.random() < 0.1:  # a timeout must not lose the result
            with suppress(TimeoutError):
                future.result(0.001)
        result = future.result(TIMEOUT_S)
        self.record(name, _pass_content(result) if name[0] == "pass" else result.metrics)

    def submit_optional_forward(
        self, training: tinkex.TrainingClient, data: list[types.Datum], step: int
    ) -> None:
        """Submits a forward pass and cancels it in half the cases; it must have no effect."""
        future = training.forward(data, "cross_entropy")
        if self.rng.random() < 0.5:
            future.cancel()
        else:
            self.add(("pass", step, "forward"), future)

    def sample(self, sampling: tinkex.SamplingClient, step: int) -> None:
        kind = 1 + self.number
        for prompt in _prompts(kind, step, _burst(self.plan)):
            given = types.ModelInput.from_ints(list(prompt))
            future = sampling.sample(given, 1, _params(self.plan, prompt))
            if self.rng.random() < 0.05:
                future.cancel()
                self.results.abandoned.add(prompt)
            else:
                self.samples.append((prompt, future))
        if len(self.samples) > 200:
            self.wait_for_samples()

    def wait_for_samples(self) -> None:
        for prompt, future in self.samples:
            self.results.found["sample", prompt] = _content(future.result(TIMEOUT_S))
            self.results.prompts.append(prompt)
        self.samples.clear()


def _pass_content(output: types.ForwardBackwardOutput) -> Any:
    tensors = [
        {name: tensor.tolist() for name, tensor in each.items()} for each in output.loss_fn_outputs
    ]
    return output.loss_fn_output_type, tensors, output.metrics


async def _sample_the_base(
    services: list[tinkex.ServiceClient], plan: Plan, count: int, results: Results
) -> None:
    """Samples the base model in coroutines, whole or streamed; cancels some of the samples."""
    samplers = [
        await service.create_sampling_client_async(base_model=plan.base_model)
        for service in services
    ]
    in_flight = asyncio.Semaphore(400)  # limits samples in flight, so that training makes progress
    rng = random.Random(0)

    async def whole(sampling: tinkex.SamplingClient, prompt: tuple[int, ...]) -> Any:
        given = types.ModelInput.from_ints(list(prompt))
        return _content(await sampling.sample_async(given, 1, _params(plan, prompt)))

    async def streamed(sampling: tinkex.SamplingClient, prompt: tuple[int, ...]) -> Any:
        given = types.ModelInput.from_ints(list(prompt))
        tokens: list[int] = []
        with sampling.sample_stream(given, 1, _params(plan, prompt)) as stream:
            async for event in stream:
                tokens += event.tokens
            answer = await stream.response_async(TIMEOUT_S)
        assert tokens == answer.sequences[0].tokens, "the streamed tokens differ from the response"
        return _content(answer)

    async def one(index: int, prompt: tuple[int, ...], *, abandon: bool) -> None:
        sampling = samplers[index % len(samplers)]
        async with in_flight:
            sample = streamed if index % 10 == 0 else whole
            task = asyncio.ensure_future(sample(sampling, prompt))
            if abandon:
                results.abandoned.add(prompt)
                await asyncio.sleep(0.01 * (index % 5))
                task.cancel()
                await asyncio.wait([task])
                return
            async with asyncio.timeout(TIMEOUT_S):
                results.found["sample", prompt] = await task
            results.prompts.append(prompt)

    async with asyncio.TaskGroup() as group:
        for index, prompt in enumerate(_prompts(0, 0, count)):
            group.create_task(one(index, prompt, abandon=rng.random() < 0.05))
