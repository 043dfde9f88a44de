"""SamplingClient: sequences and logprobs from one set of weights, within the budget."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Any, TypeVar
from urllib.parse import quote

from tinkex.client import tokenizer
from tinkex.client.backpressure import Budget
from tinkex.client.chunks import input_bytes
from tinkex.client.errors import APIConnectionError, APIStatusError, RequestFailedError
from tinkex.client.futures import Promise, awaits, refuse_to_block, waits
from tinkex.client.results import QueueLog, Wanted
from tinkex.client.retry import RetryConfig, is_retryable, is_user_error
from tinkex.client.session import Connection, Session
from tinkex.client.settings import Settings
from tinkex.client.transport import Kind, Request
from tinkex.wire.codec import encode_json
from tinkex.wire.futures import UntypedAPIFuture
from tinkex.wire.inputs import ModelInput
from tinkex.wire.protobuf import decode_sample_response
from tinkex.wire.sampling import (
    CreateSamplingSessionRequest,
    CreateSamplingSessionResponse,
    GetSamplerResponse,
    SampleRequest,
    SampleResponse,
    SamplingParams,
)
from tinkex.wire.tensors import TensorData

T = TypeVar("T")

#: Each clone numbers its samples from a multiple of this.
CLONE_STRIDE = 1_000_000_000
#: A token in the JSON of a prompt has about this many bytes.
BYTES_PER_TOKEN = 10
#: "Busy" with a prompt above this size is waited out longer.
LARGE_PROMPT_BYTES = 128 * 1024


class Sampler(GetSamplerResponse):
    """What a server says about a sampler; ours also say where its tokenizer is."""

    tokenizer_id: str | None = None


class SamplingClient:
    """
    Samples from one set of weights.

        answer = sampling.sample(prompt, 4, tinkex.SamplingParams(max_tokens=64)).result()
        answer = await sampling.sample_async(prompt, 4, tinkex.SamplingParams(max_tokens=64))

    Any number of calls may be under way; they queue here, fairly, rather than at the server.
    Can be pickled: the copy samples from the same weights. The key does not travel with it; the
    other process takes its own from the environment.
    """

    def __init__(
        self,
        holder: Session,
        *,
        sampling_session_id: str,
        shadow: bool = False,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> None:
        self.holder = holder
        self._sampling_session_id = sampling_session_id
        self._retry = retry_config
        self._record_stability_info = record_stability_info
        self._queue_log = QueueLog(f"Sampling from {sampling_session_id}")
        self._rng = random.Random()
        self._begin(shadow)

    def _begin(self, clone: bool) -> None:
        self._pid = os.getpid()
        # A copy must not number its samples like the original: equal numbers are one request.
        clone_id = random.SystemRandom().randint(1, CLONE_STRIDE) if clone else 0
        self._numbers = itertools.count(CLONE_STRIDE * clone_id)
        self._slots: Budget | None = None
        self._progress = _Progress()

    def __repr__(self) -> str:
        return f"<SamplingClient of {self._sampling_session_id}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (
            _Pickled(
                session_id=self.holder.session_id,
                sampling_session_id=self._sampling_session_id,
                base_url=self.holder.settings.base_url,
                retry_config=self._retry,
                record_stability_info=self._record_stability_info,
            ),
        )

    # -- sampling --------------------------------------------------------------------------------

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
    ) -> Promise[SampleResponse]:
        """Draw `num_samples` sequences that continue the prompt."""
        if target_prompt_logprobs is not None:
            target = target_prompt_logprobs
            if target.dtype != "int64" or target.shape is None or len(target.shape) != 2:
                raise ValueError(
                    "target_prompt_logprobs must be int64 of shape [prompt length - 1, K]; it is "
                    f"{target.dtype} of shape {target.shape}."
                )
        if prompt_alt_tokens_k < 0:
            raise ValueError(f"prompt_alt_tokens_k is {prompt_alt_tokens_k}; it counts from 0.")
        if prompt_logprobs_last_n is not None:
            if prompt_logprobs_last_n < 1:
                raise ValueError(
                    f"prompt_logprobs_last_n is {prompt_logprobs_last_n}; it counts from 1."
                )
            if not include_prompt_logprobs:
                raise ValueError("prompt_logprobs_last_n needs include_prompt_logprobs=True.")
        request = SampleRequest(
            num_samples=num_samples,
            prompt=prompt,
            sampling_params=sampling_params,
            sampling_session_id=self._sampling_session_id,
            prompt_logprobs=include_prompt_logprobs,
            topk_prompt_logprobs=topk_prompt_logprobs,
            topk_sample_logprobs=topk_sample_logprobs,
            target_prompt_logprobs=target_prompt_logprobs,
            prompt_alt_tokens_k=prompt_alt_tokens_k,
            prompt_logprobs_last_n=prompt_logprobs_last_n,
            record_stability_info=self._record_stability_info,
        )
        return self._run(request, _checked)

    sample_async = awaits(sample)

    def compute_logprobs(
        self, prompt: ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> Promise[list[float | None]]:
        """The logprob of each token of the prompt; None for the first, which nothing precedes."""
        request = SampleRequest(
            num_samples=1,
            prompt=prompt,
            sampling_params=SamplingParams(max_tokens=1),
            sampling_session_id=self._sampling_session_id,
            prompt_logprobs=True,
            prompt_logprobs_last_n=prompt_logprobs_last_n,
            record_stability_info=self._record_stability_info,
        )

        def logprobs(request: SampleRequest, answer: SampleResponse) -> list[float | None]:
            found = _checked(request, answer).prompt_logprobs
            if found is None:
                raise RuntimeError(
                    "The server answered without prompt logprobs; it may predate them."
                )
            return list(found)

        return self._run(request, logprobs)

    compute_logprobs_async = awaits(compute_logprobs)

    # -- about the weights -----------------------------------------------------------------------

    def _get_base_model(self) -> Promise[str]:
        """The name of the base model that the weights belong to."""

        async def work() -> str:
            return (await self._ask()).base_model

        return self.holder.run(work())

    get_base_model = waits(_get_base_model)
    get_base_model_async = awaits(_get_base_model)

    def get_tokenizer(self) -> Any:
        """The tokenizer of the base model."""
        refuse_to_block("get_tokenizer", "asyncio.to_thread(sampling.get_tokenizer)")
        sampler = self._get_sampler().block()
        return tokenizer.load(sampler.base_model, sampler.tokenizer_id)

    def _get_sampler(self) -> Promise[Sampler]:
        return self.holder.run(self._ask())

    async def _ask(self) -> Sampler:
        connection = await self.holder.connect()
        return await connection.calls.call(
            "GET",
            f"samplers/{quote(self._sampling_session_id, safe=':')}",
            answer=Sampler,
            about=f"asking about {self._sampling_session_id}",
        )

    # -- the work --------------------------------------------------------------------------------

    def _run(
        self, request: SampleRequest, finish: Callable[[SampleRequest, SampleResponse], T]
    ) -> Promise[T]:
        if self._pid != os.getpid():
            self._begin(clone=True)  # a forked child is a copy too

        async def work() -> T:
            return finish(request, await self._sample(request))

        return self.holder.run(work(), yields_to_waiter=True)

    async def _sample(self, request: SampleRequest) -> SampleResponse:
        connection, _ = await self.holder.open()
        config = self._retry or RetryConfig(max_connections=None)
        if self._slots is None:
            self._slots = Budget(config.max_connections or 2**31)
        stuck_s = None
        if config.enable_stuck_detection and connection.config.sample_enable_stuck_detection:
            stuck_s = config.progress_timeout
        with self._progress.watch(stuck_s):
            async with self._slots.hold(1), connection.lane.samples.hold(1):
                attempt = 0
                while True:
                    attempt += 1
                    try:
                        answer = await self._attempt(connection, request)
                    except Exception as error:
                        if not config.enable_retry_logic or connection.config.sample_no_retries:
                            raise
                        if not _worth_starting_over(error, config):
                            raise
                        self._progress.last_error = error
                        await asyncio.sleep(config.delay_s(attempt, rng=self._rng))
                    else:
                        self._progress.succeeded()
                        return answer

    async def _attempt(self, connection: Connection, request: SampleRequest) -> SampleResponse:
        """One submission and its result, under a number of its own."""
        number = next(self._numbers)
        size = input_bytes(request.prompt, per_token=BYTES_PER_TOKEN)
        started = monotonic()
        async with connection.lane.sample_bytes.hold(size):
            promised = await connection.calls.call(
                "POST",
                "asample",
                encode_json(request.model_copy(update={"seq_id": number})),
                answer=UntypedAPIFuture,
                kind=Kind.SAMPLE,
                headers={"X-Tinker-Sampling-Backpressure": "1"},
                busy_s=5.0 if size > LARGE_PROMPT_BYTES else 1.0,
                about=f"sample {number} of {self._sampling_session_id}",
            )

        def read(body: bytes) -> SampleResponse:
            return decode_sample_response(body, promised.sample_sequence_ids)

        try:
            return await connection.results.fetch(
                promised.request_id,
                Wanted(request_type="Sample", answer=SampleResponse, read_protobuf=read),
                observer=self,
                round_trip_s=monotonic() - started,
            )
        except asyncio.CancelledError:
            self.holder.cancel_later(connection, promised.request_id)
            raise

    def on_queue_state_change(self, queue_state: str, queue_state_reason: str | None) -> None:
        """Called while samples wait; logs the reason, at most once a minute. May be overridden."""
        self._queue_log.on_queue_state_change(queue_state, queue_state_reason)


async def open_sampler(
    holder: Session,
    *,
    model_path: str | None,
    base_model: str | None,
    retry_config: RetryConfig | None,
    record_stability_info: bool,
) -> SamplingClient:
    """A sampling session of its own on the server, and the client of it."""
    connection, session_id = await holder.open()
    created = await connection.calls.call(
        "POST",
        "create_sampling_session",
        CreateSamplingSessionRequest(
            session_id=session_id,
            sampling_session_seq_id=holder.next_sampler_number(),
            base_model=base_model,
            model_path=model_path,
        ),
        answer=CreateSamplingSessionResponse,
        about=f"creating a sampler of {model_path or base_model}",
    )
    return SamplingClient(
        holder,
        sampling_session_id=created.sampling_session_id,
        retry_config=retry_config,
        record_stability_info=record_stability_info,
    )


def _worth_starting_over(error: Exception, config: RetryConfig) -> bool:
    """Whether a failed sample may be sent again under a new number."""
    if isinstance(error, RequestFailedError):
        return not is_user_error(error)
    if isinstance(error, APIStatusError) and error.status_code == 410:
        return True  # the result is gone; a sample can simply be drawn again
    return is_retryable(error) or isinstance(error, config.retryable_exceptions)


def _checked(request: SampleRequest, answer: SampleResponse) -> SampleResponse:
    """What was asked for must be there: an old server ignores what it does not know."""
    if request.prompt_alt_tokens_k and answer.prompt_alt_tokens is None:
        raise RuntimeError(
            "The server answered without prompt_alt_tokens; it may predate them. "
            "Ask without prompt_alt_tokens_k, or update the server."
        )
    last_n, logprobs = request.prompt_logprobs_last_n, answer.prompt_logprobs_np
    if last_n is not None and logprobs is not None:
        early = logprobs[: max(0, len(logprobs) - last_n)].tolist()
        if not all(map(math.isnan, early)):
            raise RuntimeError(
                "The server answered with logprobs outside the last "
                f"{last_n} positions; it may predate prompt_logprobs_last_n."
            )
    return answer


class _Progress:
    """Notices when no sample of a client has finished for too long, and fails all that wait."""

    def __init__(self) -> None:
        self.last_error: Exception | None = None
        self._waiting: set[asyncio.Task[Any]] = set()
        self._stuck: set[asyncio.Task[Any]] = set()
        self._last = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def succeeded(self) -> None:
        self._last = monotonic()

    def watch(self, timeout_s: float | None) -> _Watch:
        return _Watch(self, timeout_s)

    def _enter(self, task: asyncio.Task[Any], timeout_s: float | None) -> None:
        if timeout_s is None:
            return
        if not self._waiting:
            self._last = monotonic()  # it was idle until now
        self._waiting.add(task)
        if self._timer is None:
            self._arm(timeout_s, timeout_s)

    def _arm(self, delay_s: float, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(delay_s, self._look, timeout_s)

    def _look(self, timeout_s: float) -> None:
        self._timer = None
        if not self._waiting:
            return
        left = self._last + timeout_s - monotonic()
        if left > 0:
            self._arm(left, timeout_s)
            return
        for task in self._waiting:
            self._stuck.add(task)
            task.cancel()

    def _leave(self, task: asyncio.Task[Any]) -> bool:
        """Whether the task was given up as stuck."""
        self._waiting.discard(task)
        if not self._waiting and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        was_stuck = task in self._stuck
        self._stuck.discard(task)
        return was_stuck


class _Watch:
    def __init__(self, progress: _Progress, timeout_s: float | None) -> None:
        self._progress = progress
        self._timeout_s = timeout_s

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "samples run in tasks"
        self._task = task
        self._progress._enter(task, self._timeout_s)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        stuck = self._progress._leave(self._task)
        if stuck and kind is not None and issubclass(kind, asyncio.CancelledError):
            self._task.uncancel()
            seen = self._progress.last_error
            raise APIConnectionError(
                Request(method="POST", url="asample"),
                f"No sample of this client finished for {self._timeout_s:g} s, so all that wait "
                f"are given up (RetryConfig.progress_timeout). Last error: {seen or 'none'}.",
            )


@dataclass(frozen=True, kw_only=True)
class _Pickled:
    """What a copy needs to know. No key: that is found again where the copy is made."""

    session_id: str | None
    sampling_session_id: str
    base_url: str
    retry_config: RetryConfig | None
    record_stability_info: bool


def _unpickle(state: _Pickled) -> SamplingClient:
    return SamplingClient(
        Session(Settings.resolve(base_url=state.base_url), session_id=state.session_id),
        sampling_session_id=state.sampling_session_id,
        shadow=True,
        retry_config=state.retry_config,
        record_stability_info=state.record_stability_info,
    )
