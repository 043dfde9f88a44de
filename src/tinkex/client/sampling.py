"""SamplingClient: sequences and logprobs from one set of weights."""

from __future__ import annotations

import inspect
import math
import os
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any, Concatenate, ParamSpec, TypeVar
from urllib.parse import quote

from tinkex import display
from tinkex.client import sampler_pickling, tokenizer, validation
from tinkex.client.futures import Promise, as_written, awaits, refuse_to_block, waits
from tinkex.client.http.retry import RetryConfig
from tinkex.client.observe.queue_states import QueueLog
from tinkex.client.observe.telemetry import Telemetry
from tinkex.client.sample_queue import RetryHandler, SampleQueue
from tinkex.client.sample_stream import PartialOutput, SampleStream
from tinkex.client.sampler_pickling import SamplerHandle
from tinkex.client.session import Session
from tinkex.client.tokenizer import TextMixin
from tinkex.tracebacks import public_edge
from tinkex.wire.inputs import ModelInput
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
R = TypeVar("R")
P = ParamSpec("P")


def _takes(
    build: Callable[Concatenate[Any, P], SampleRequest],
) -> Callable[[Callable[[Any, SampleRequest], R]], Callable[Concatenate[Any, P], R]]:
    """Gives a method that takes a request the parameters from which `build` makes it."""

    def decorate(method: Callable[[Any, SampleRequest], R]) -> Callable[Concatenate[Any, P], R]:
        build_named = _renamed(build, method.__qualname__)

        def variant(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
            return method(self, build_named(self, *args, **kwargs))

        returns = inspect.signature(method).return_annotation
        return as_written(variant, method.__name__, build, method.__doc__, returns)

    return decorate


def _renamed(function: Callable[P, R], name: str) -> Callable[P, R]:
    """A copy, so that a TypeError about arguments has the name of the method that was called."""
    assert isinstance(function, FunctionType)
    duplicate = FunctionType(function.__code__, function.__globals__, argdefs=function.__defaults__)
    duplicate.__kwdefaults__ = function.__kwdefaults__
    duplicate.__qualname__ = name
    return duplicate


class Sampler(GetSamplerResponse):
    """The server's description of a sampler; tinkex servers add the location of the tokenizer."""

    tokenizer_id: str | None = None


@public_edge
class SamplingClient(TextMixin):
    """
    Samples from one set of weights.

        answer = sampling.sample(prompt, 4, tinkex.SamplingParams(max_tokens=64)).result()
        answer = await sampling.sample_async(prompt, 4, tinkex.SamplingParams(max_tokens=64))

    Any number of calls may be pending; they wait in a fair queue in the client, not at the server.
    Can be pickled: the copy samples from the same weights. The API key is not included; the other
    process reads its own from the environment.
    """

    #: The retries of this client; its `config` is the `retry_config`.
    retry_handler: RetryHandler
    #: For the repr; None until they are known.
    _base_model: str | None = None
    _model_path: str | None = None

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
        #: Names in TINKER_FEATURE_GATES, for programs that read them; not used here.
        self.feature_gates = set(holder.settings.feature_gates)
        self._sampling_session_id = sampling_session_id
        self._retry = retry_config
        self._record_stability_info = record_stability_info
        #: What waits, in the words of the log.
        self.subject = f"Sampling from {sampling_session_id}"
        self._queue_log = QueueLog(self.subject, telemetry=lambda: holder.telemetry)
        self._reset_queue(shadow)

    def _reset_queue(self, own_clone_id: bool) -> None:
        self.retry_handler = RetryHandler(self._retry or RetryConfig(max_connections=None))
        self._sample_queue = SampleQueue(
            self.holder,
            self._sampling_session_id,
            own_clone_id=own_clone_id,
            handler=self.retry_handler,
            observer=self,
        )

    @staticmethod
    def create(
        holder: Session,
        *,
        model_path: str | None = None,
        base_model: str | None = None,
        sampling_session_id: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> Promise[SamplingClient]:
        """
        A client of saved weights, of a base model, or of an existing sampling session.

        Programs call `ServiceClient.create_sampling_client`.

        Args:
            holder: The session of a service client.
            model_path: A checkpoint, `tinker://RUN/sampler_weights/NAME`.
            base_model: Name of a base model.
            sampling_session_id: Id of an existing sampling session.
            retry_config: How the client retries; None: the defaults of `tinkex.RetryConfig`.
            record_stability_info: Whether the service records how stable the samples are.

        Returns:
            A future of the client.

        Raises:
            ValueError: Nothing to sample from, or not a path.

        Example:
            sampling = tinkex.SamplingClient.create(service.holder, base_model=MODEL).result()
        """
        if sampling_session_id is not None:
            made: Promise[SamplingClient] = Promise()
            made.finish(
                SamplingClient(
                    holder,
                    sampling_session_id=sampling_session_id,
                    retry_config=retry_config,
                    record_stability_info=record_stability_info,
                )
            )
            return made
        if model_path is None and base_model is None:
            raise ValueError("Pass what to sample from: model_path='tinker://...' or base_model.")
        if model_path is not None:
            validation.check_tinker_path(model_path)
        return holder.run(
            open_sampler(
                holder,
                model_path=model_path,
                base_model=base_model,
                retry_config=retry_config,
                record_stability_info=record_stability_info,
            )
        )

    def __repr__(self) -> str:
        shown = {
            "model_path": self._model_path,
            "base_model": self._base_model,
            "sampling_session_id": self._sampling_session_id,
        }
        return display.call(
            "SamplingClient", ((name, each) for name, each in shown.items() if each is not None)
        )

    # -- other processes -------------------------------------------------------------------------

    def __reduce__(self) -> tuple[Any, ...]:
        sampler_pickling.remember_original(self.holder)
        return _copied, (self._sampler_handle(),)

    def get_sampler_handle(self) -> str:
        """
        Text from which another process creates a client of the same weights.

        Returns:
            The text. It contains no key.

        Example:
            handle = sampling.get_sampler_handle()
        """
        sampler_pickling.remember_original(self.holder)
        return self._sampler_handle().to_text()

    @staticmethod
    def from_sampler_handle(handle: str, *, api_key: str | None = None) -> SamplingClient:
        """
        A client from the text of `get_sampler_handle`, in another process.

        A handle names the service that gets your key: use only handles from sources you trust.

        Args:
            handle: The text.
            api_key: Key of the service; None: as for a new client.

        Returns:
            A client of the same weights.

        Raises:
            ValueError: Not a handle.

        Example:
            sampling = tinkex.SamplingClient.from_sampler_handle(handle, api_key="tml-local")
        """
        source = SamplerHandle.from_text(handle)
        return _copied(source, sampler_pickling.joined_session(source, api_key=api_key))

    def _sampler_handle(self) -> SamplerHandle:
        return SamplerHandle(
            session_id=self.holder.session_id,
            sampling_session_id=self._sampling_session_id,
            base_url=self.holder.settings.base_url,
            retry_config=self._retry,
            record_stability_info=self._record_stability_info,
        )

    # -- sampling --------------------------------------------------------------------------------

    def _request(
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
    ) -> SampleRequest:
        """The parameters of `sample` and `sample_stream`."""
        if target_prompt_logprobs is not None:
            target = target_prompt_logprobs
            if target.dtype != "int64" or target.shape is None or len(target.shape) != 2:
                raise ValueError(
                    "target_prompt_logprobs must be int64 of shape [prompt length - 1, K]; it is "
                    f"{target.dtype} of shape {target.shape}."
                )
        if prompt_alt_tokens_k < 0:
            raise ValueError(f"prompt_alt_tokens_k is {prompt_alt_tokens_k}; it must be 0 or more.")
        if prompt_logprobs_last_n is not None:
            if prompt_logprobs_last_n < 1:
                raise ValueError(
                    f"prompt_logprobs_last_n is {prompt_logprobs_last_n}; it must be 1 or more."
                )
            if not include_prompt_logprobs:
                raise ValueError("prompt_logprobs_last_n needs include_prompt_logprobs=True.")
        return SampleRequest(
            num_samples=num_samples,
            prompt=validation.prompt(prompt),
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

    @_takes(_request)
    def sample(self, request: SampleRequest) -> Promise[SampleResponse]:
        """
        Sample sequences that continue a prompt.

        Args:
            prompt: The tokens to continue.
            num_samples: Number of sequences.
            sampling_params: Length, temperature, stop texts and seed.
            include_prompt_logprobs: Whether to return the logprob of each prompt token.
            topk_prompt_logprobs: Return so many of the most likely tokens at each prompt position.
            topk_sample_logprobs: The same at each sampled position.
            target_prompt_logprobs: int64 `[prompt length - 1, K]`: tokens whose logprobs to return.
            prompt_alt_tokens_k: Sample so many other tokens for each prompt position.
            prompt_logprobs_last_n: Return prompt logprobs for so many positions at the end only.

        Returns:
            A future of the sequences, each with tokens, logprobs and the reason why it stopped.

        Raises:
            ValueError: An argument of the wrong shape or range.

        Example:
            params = tinkex.SamplingParams(max_tokens=8, temperature=0.7)
            for sequence in sampling.sample(prompt, 2, params).result().sequences:
                print(sequence.tokens, sequence.stop_reason)
        """
        return self._run(request, _checked)

    sample_async = awaits(sample)

    @_takes(_request)
    def sample_stream(self, request: SampleRequest) -> SampleStream:
        """
        `sample`, with tokens read as they are generated.

        A service without streams sends everything at the end.

        Args:
            prompt: The tokens to continue.
            num_samples: Number of sequences.
            sampling_params: Length, temperature, stop texts and seed.
            include_prompt_logprobs: Whether to return the logprob of each prompt token.
            topk_prompt_logprobs: Return so many of the most likely tokens at each prompt position.
            topk_sample_logprobs: The same at each sampled position.
            target_prompt_logprobs: int64 `[prompt length - 1, K]`: tokens whose logprobs to return.
            prompt_alt_tokens_k: Sample so many other tokens for each prompt position.
            prompt_logprobs_last_n: Return prompt logprobs for so many positions at the end only.

        Returns:
            A stream, for `for` or `async for`. Its `response()` is the result of `sample`.

        Raises:
            ValueError: An argument of the wrong shape or range.

        Example:
            params = tinkex.SamplingParams(max_tokens=8)
            with sampling.sample_stream(prompt, 1, params) as stream:
                for event in stream:
                    print(event.tokens)
        """
        partial = PartialOutput()
        return SampleStream(self._run(request, _checked, partial=partial), partial)

    def compute_logprobs(
        self, prompt: ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> Promise[list[float | None]]:
        """
        The logprob of each prompt token.

        Args:
            prompt: The tokens.
            prompt_logprobs_last_n: For so many positions at the end only. None: for all.

        Returns:
            A future of a list. The first is None: it has no context.

        Example:
            total = sum(sampling.compute_logprobs(prompt).result()[1:])
        """
        request = SampleRequest(
            num_samples=1,
            prompt=validation.prompt(prompt),
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
                    "The server returned no prompt logprobs; it may be too old to support them."
                )
            return list(found)

        # Retried even if the server asks clients not to retry samples: the result is not random.
        return self._run(request, logprobs, always_retry=True)

    compute_logprobs_async = awaits(compute_logprobs)

    # -- about the weights -----------------------------------------------------------------------

    def _get_base_model(self) -> Promise[str]:
        """
        The name of the base model that the weights belong to.

        Returns:
            The name.

        Example:
            print(sampling.get_base_model())
        """

        async def work() -> str:
            return (await self._ask()).base_model

        return self.holder.run(work())

    get_base_model = waits(_get_base_model)
    get_base_model_async = awaits(_get_base_model)

    def get_tokenizer(self) -> Any:
        """
        The tokenizer of the base model.

        Returns:
            The tokenizer of transformers if that is installed, else a light one of tinkex.

        Raises:
            TokenizerUnavailable: No tokenizer was found; the message says where.

        Example:
            tokens = sampling.get_tokenizer().encode("Ahoy!")
        """
        refuse_to_block("get_tokenizer", "asyncio.to_thread(sampling.get_tokenizer)")
        return self._load_tokenizer()

    def _load_tokenizer(self, *, light: bool = False) -> Any:
        sampler = self._get_sampler().block()
        return tokenizer.load(sampler.base_model, sampler.tokenizer_id, light=light)

    def _get_sampler(self) -> Promise[Sampler]:
        return self.holder.run(self._ask())

    async def _ask(self) -> Sampler:
        connection = await self.holder.connect()
        sampler = await connection.calls.call(
            "GET",
            f"samplers/{quote(self._sampling_session_id, safe=':')}",
            answer=Sampler,
            about=f"looking up {self._sampling_session_id}",
        )
        self._base_model, self._model_path = sampler.base_model, sampler.model_path
        return sampler

    def get_telemetry(self) -> Telemetry | None:
        """
        The telemetry reporter of this client's session.

        Returns:
            The reporter; None if telemetry is off.

        Example:
            reporter = sampling.get_telemetry()
        """
        return self.holder.telemetry

    # -- submission ------------------------------------------------------------------------------

    def _run(
        self,
        request: SampleRequest,
        finish: Callable[[SampleRequest, SampleResponse], T],
        *,
        always_retry: bool = False,
        partial: PartialOutput | None = None,
    ) -> Promise[T]:
        if self._sample_queue.pid != os.getpid():
            # The client in a forked child is a copy, like an unpickled one.
            self._reset_queue(own_clone_id=True)
        return self._sample_queue.submit(
            request, finish, always_retry=always_retry, partial=partial
        )

    def on_queue_state_change(self, queue_state: str, queue_state_reason: str | None) -> None:
        """
        Called when the reason why samples wait changes. May be overridden.

        Args:
            queue_state: `"active"`, `"paused_capacity"` or `"paused_rate_limit"`.
            queue_state_reason: Why, in words of the server.

        Example:
            sampling.on_queue_state_change("paused_capacity", "two jobs are ahead")
        """
        self._queue_log.on_queue_state_change(queue_state, queue_state_reason)


async def open_sampler(
    holder: Session,
    *,
    model_path: str | None,
    base_model: str | None,
    retry_config: RetryConfig | None,
    record_stability_info: bool,
) -> SamplingClient:
    """Create a sampling session on the server, and a client of it."""
    connection, session_id = await holder.open()
    if base_model is not None:
        base_model = await holder.served_name(connection, base_model)
    elif model_path is not None:
        await holder.serve_base_of(connection, model_path)
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
    sampling = SamplingClient(
        holder,
        sampling_session_id=created.sampling_session_id,
        retry_config=retry_config,
        record_stability_info=record_stability_info,
    )
    sampling._base_model, sampling._model_path = base_model, model_path
    return sampling


def draw(holder: Session, request: SampleRequest) -> Promise[SampleResponse]:
    """
    Submit one sample request as it is, for options that `SamplingClient` does not offer.

    The request names its model by `sampling_session_id`, `model_path` or `base_model`. The usual
    limits and retries apply.
    """
    if not (request.sampling_session_id or request.model_path or request.base_model):
        raise ValueError(
            "This SampleRequest names no model. Set one of sampling_session_id, model_path "
            "('tinker://...') and base_model."
        )
    queue = _direct_queues.get(holder)
    if queue is None or queue.pid != os.getpid():
        queue = _direct_queues[holder] = SampleQueue(
            holder,
            None,
            own_clone_id=True,  # its seq_ids must differ from those of the session's own client
            handler=RetryHandler(RetryConfig(max_connections=None)),
            observer=QueueLog("Sampling", telemetry=lambda: holder.telemetry),
        )
    return queue.submit(request, _checked)


_direct_queues: weakref.WeakKeyDictionary[Session, SampleQueue] = weakref.WeakKeyDictionary()


def _copied(source: SamplerHandle, holder: Session | None = None) -> SamplingClient:
    return SamplingClient(
        holder or sampler_pickling.joined_session(source),
        sampling_session_id=source.sampling_session_id,
        shadow=True,
        retry_config=source.retry_config,
        record_stability_info=source.record_stability_info,
    )


def _checked(request: SampleRequest, answer: SampleResponse) -> SampleResponse:
    """Check that the requested fields are present: old servers ignore unknown options."""
    if request.prompt_alt_tokens_k and answer.prompt_alt_tokens is None:
        raise RuntimeError(
            "The server returned no prompt_alt_tokens; it may be too old to support them. "
            "Omit prompt_alt_tokens_k, or update the server."
        )
    last_n, logprobs = request.prompt_logprobs_last_n, answer.prompt_logprobs_np
    if last_n is not None and logprobs is not None:
        early = logprobs[: max(0, len(logprobs) - last_n)].tolist()
        if not all(map(math.isnan, early)):
            raise RuntimeError(
                "The server returned logprobs outside the last "
                f"{last_n} positions; it may be too old to support prompt_logprobs_last_n."
            )
    return answer
