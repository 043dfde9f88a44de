"""TrainingClient: forward and backward passes, optimizer steps, and checkpoints of one model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

from pydantic import BaseModel

from tinkex import display
from tinkex.client import custom_loss, tokenizer, user_warnings, validation
from tinkex.client.batching import merge
from tinkex.client.futures import Promise, awaits, refuse_to_block, submits, waits
from tinkex.client.http.polling import ExpectedResult
from tinkex.client.http.retry import RetryConfig
from tinkex.client.http.transport import Kind
from tinkex.client.observe.instrumentation import operation_name
from tinkex.client.observe.queue_states import QueueLog
from tinkex.client.sampling import SamplingClient, open_sampler
from tinkex.client.session import Session
from tinkex.client.submission import Part, StepSubmitter, pass_parts, pass_result
from tinkex.client.tokenizer import TextMixin
from tinkex.tracebacks import public_edge
from tinkex.wire.base import Payload
from tinkex.wire.checkpoints import (
    LoadWeightsRequest,
    LoadWeightsResponse,
    SaveWeightsExternalRequest,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerRequest,
    SaveWeightsForSamplerResponse,
    SaveWeightsForSamplerResponseInternal,
    SaveWeightsRequest,
    SaveWeightsResponse,
)
from tinkex.wire.codec import encode_json
from tinkex.wire.inputs import Datum
from tinkex.wire.sessions import GetInfoRequest, GetInfoResponse
from tinkex.wire.training import (
    AdamParams,
    ForwardBackwardOutput,
    LossFnType,
    OptimParamsBase,
    OptimStepRequest,
    OptimStepResponse,
    UnloadModelRequest,
    UnloadModelResponse,
)

if TYPE_CHECKING:
    from tinkex.client.custom_loss import CustomLoss
    from tinkex.client.observe.telemetry import Telemetry

R = TypeVar("R", bound=BaseModel | Payload)
T = TypeVar("T")
S = TypeVar("S", SaveWeightsResponse, SaveWeightsForSamplerResponse)

LossConfig = dict[str, float] | dict[str, str] | dict[str, float | str]


def _same(value: R) -> R:
    return value


@public_edge
class TrainingClient(TextMixin):
    """
    Trains one LoRA adapter.

        step = training.forward_backward(data, "cross_entropy")
        training.optim_step(tinkex.AdamParams(learning_rate=1e-4))
        print(step.result().metrics["loss:sum"])

    Operations are submitted in the order of the calls, from any thread or coroutine. Each returns
    a future immediately, so the next operation can be queued while one runs.
    """

    #: For the repr; None until they are known.
    _base_model: str | None = None
    _lora_rank: int | None = None

    def __init__(self, holder: Session, model_seq_id: int, model_id: str) -> None:
        self.holder = holder
        self.model_id = model_id
        self._model_seq_id = model_seq_id
        self._queue_log = QueueLog(f"Training of {model_id}", telemetry=lambda: holder.telemetry)
        self._steps = StepSubmitter(holder, model_id, self._queue_log)

    def __repr__(self) -> str:
        shown = {
            "model_id": self.model_id,
            "base_model": self._base_model,
            "lora_rank": self._lora_rank,
        }
        return display.call(
            "TrainingClient", ((name, each) for name, each in shown.items() if each is not None)
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "A TrainingClient cannot be pickled: this process keeps the order of its steps. "
            "Send a SamplingClient, or the path of a checkpoint."
        )

    # -- passes ----------------------------------------------------------------------------------

    def forward(
        self,
        data: list[Datum],
        loss_fn: LossFnType,
        loss_fn_config: LossConfig | None = None,
    ) -> Promise[ForwardBackwardOutput]:
        """
        Compute the loss and its outputs for a batch, without gradients.

        Args:
            data: The training examples.
            loss_fn: Name of the loss, such as `"cross_entropy"`; see docs/reference/losses.md.
            loss_fn_config: Settings of the loss, such as `{"clip_low_threshold": 0.8}`.

        Returns:
            A future of the metrics, and of the tensors for each example.

        Raises:
            ValueError: An unknown loss, or examples that cannot be sent.

        Example:
            passed = training.forward(data, "cross_entropy").result()
            print(passed.metrics["loss:sum"])
        """
        return self._pass("Forward", data, loss_fn, loss_fn_config, forward_only=True)

    forward_async = submits(forward)

    def forward_backward(
        self,
        data: list[Datum],
        loss_fn: LossFnType,
        loss_fn_config: LossConfig | None = None,
    ) -> Promise[ForwardBackwardOutput]:
        """
        Compute the loss of a batch; add its gradients to those since the last `optim_step`.

        Args:
            data: The training examples. A large batch is sent in parts; the result is the same.
            loss_fn: Name of the loss, such as `"cross_entropy"`; see docs/reference/losses.md.
            loss_fn_config: Settings of the loss, such as `{"clip_low_threshold": 0.8}`.

        Returns:
            A future of the metrics (`loss:sum` is the loss), and of the tensors for each example.

        Raises:
            ValueError: An unknown loss, or examples that cannot be sent.

        Example:
            passed = training.forward_backward(data, "cross_entropy")
            training.optim_step(tinkex.AdamParams(learning_rate=1e-4))
            print(passed.result().metrics["loss:sum"])
        """
        return self._pass("ForwardBackward", data, loss_fn, loss_fn_config, forward_only=False)

    forward_backward_async = submits(forward_backward)

    def _pass(
        self,
        request_type: str,
        data: Sequence[Datum],
        loss_fn: LossFnType,
        loss_fn_config: LossConfig | None,
        *,
        forward_only: bool,
    ) -> Promise[ForwardBackwardOutput]:
        config = validation.loss_config(loss_fn_config)
        parts = pass_parts(self.model_id, data, loss_fn, config, forward_only=forward_only)
        return self._steps.submit(parts, pass_result(request_type), merge)

    def _forward_backward_custom(
        self,
        data: list[Datum],
        loss_fn: CustomLoss,
        *,
        loss_type_input: Literal["logprobs"] | None = None,
    ) -> Promise[Promise[ForwardBackwardOutput]]:
        """
        `forward_backward` with a loss of your own. The loss runs on a separate thread.

        Args:
            data: The training examples.
            loss_fn: A function of `(data, logprobs)` that returns a scalar and a dict of metrics,
                or a handle from `create_custom_loss`.
            loss_type_input: What the function gets; only `"logprobs"` is supported.

        Returns:
            The future of the pass, once the loss is computed.

        Example:
            def loss(data, logprobs):
                return -sum(each.sum() for each in logprobs), {}

            print(training.forward_backward_custom(data, loss).result().metrics)
        """
        return custom_loss.start(self, self._steps, data, loss_fn, loss_type_input)

    forward_backward_custom = waits(_forward_backward_custom)
    forward_backward_custom_async = awaits(_forward_backward_custom)

    # -- optimizer -------------------------------------------------------------------------------

    def optim_step(
        self,
        optim_params: AdamParams | OptimParamsBase | None = None,
        *,
        adam_params: AdamParams | OptimParamsBase | None = None,
    ) -> Promise[OptimStepResponse]:
        """
        Apply the gradients accumulated since the last step, and clear them.

        Args:
            optim_params: Learning rate and other numbers of this step.
            adam_params: The same under its older name. Pass only one of them.

        Returns:
            A future of the metrics of the step, such as the norm of the gradients.

        Raises:
            TypeError: No optimizer parameters.

        Example:
            training.forward_backward(data, "cross_entropy")
            stepped = training.optim_step(tinkex.AdamParams(learning_rate=1e-4)).result()
        """
        if optim_params is not None and adam_params is not None:
            raise ValueError("optim_params and adam_params are aliases: pass only one of them.")
        params = optim_params if optim_params is not None else adam_params
        if not isinstance(params, AdamParams | OptimParamsBase):
            raise TypeError(
                f"optim_step() needs optimizer parameters, such as "
                f"AdamParams(learning_rate=1e-4), not {type(params).__name__}."
            )
        return self._single(OptimStepRequest, OptimStepResponse, optim_params=params)

    optim_step_async = submits(optim_step)

    # -- checkpoints -----------------------------------------------------------------------------

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
    ) -> Promise[SaveWeightsResponse]:
        """
        Save weights and optimizer state, to resume training from.

        Args:
            name: Name of the checkpoint in this run.
            ttl_seconds: Seconds until it expires. None: never.
            overwrite: Whether to replace a checkpoint of the same name.
            user_metadata: Texts that are stored with it.

        Returns:
            A future of its path, `tinker://RUN/weights/NAME`.

        Raises:
            RequestFailedError: There is a checkpoint of this name.

        Example:
            path = training.save_state("step-100", ttl_seconds=86400).result().path
        """
        return self._single(
            SaveWeightsRequest,
            SaveWeightsResponse,
            self._with_console,
            path=name,
            ttl_seconds=ttl_seconds,
            overwrite=overwrite,
            user_metadata=user_metadata,
        )

    save_state_async = submits(save_state)

    def save_weights_for_sampler(
        self,
        name: str,
        ttl_seconds: int | None = None,
        user_metadata: dict[str, str] | None = None,
    ) -> Promise[SaveWeightsForSamplerResponse]:
        """
        Save weights under a name, to sample from.

        Args:
            name: Name of the checkpoint in this run.
            ttl_seconds: Seconds until it expires. None: never.
            user_metadata: Texts that are stored with it.

        Returns:
            A future of its path, `tinker://RUN/sampler_weights/NAME`.

        Raises:
            RequestFailedError: There is a checkpoint of this name.

        Example:
            path = training.save_weights_for_sampler("pirate").result().path
            sampling = service.create_sampling_client(path)
        """
        return self._single(
            SaveWeightsForSamplerRequest,
            SaveWeightsForSamplerResponse,
            self._with_console,
            path=name,
            ttl_seconds=ttl_seconds,
            user_metadata=user_metadata,
        )

    save_weights_for_sampler_async = submits(save_weights_for_sampler)

    def _with_console(self, saved: S) -> S:
        saved._console = self.holder.console
        return saved

    def save_weights_external(
        self,
        name: str,
        ttl_seconds: int | None = None,
        age_encryption_recipients: list[str] | None = None,
    ) -> Promise[SaveWeightsExternalResponse]:
        """
        Save weights as files for other programs, in the adapter format of the PEFT library.

        `tinkex.download_checkpoint` downloads them. With age keys the files are encrypted; only the
        owners of the matching secret keys can read them.

        Args:
            name: Name of the checkpoint in this run.
            ttl_seconds: Seconds until it expires. None: never.
            age_encryption_recipients: Public keys of `age`, at most 10. None: not encrypted.

        Returns:
            A future of its path, `tinker://RUN/external_weights/NAME`.

        Example:
            path = training.save_weights_external("release").result().path
        """
        recipients = list(age_encryption_recipients) if age_encryption_recipients else None
        return self._single(
            SaveWeightsExternalRequest,
            SaveWeightsExternalResponse,
            path=name,
            ttl_seconds=ttl_seconds,
            age_encryption_recipients=recipients,
        )

    save_weights_external_async = submits(save_weights_external)

    def _save_weights_and_get_sampling_client(
        self,
        name: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> Promise[SamplingClient]:
        """
        A client that samples from the weights as they are after the steps submitted so far.

        Args:
            name: Ignored, with a warning. `save_weights_for_sampler` saves under a name.
            retry_config: How the client retries; None: the defaults of `tinkex.RetryConfig`.
            record_stability_info: Whether the service records how stable the samples are.

        Returns:
            The client. Later steps do not change its weights.

        Example:
            sampling = training.save_weights_and_get_sampling_client()
        """
        if name is not None:
            user_warnings.warn(
                "`name` is ignored: these weights are not saved under a name. Use "
                "save_weights_for_sampler(name) for that.",
                DeprecationWarning,
            )

        def sampler(saved: SaveWeightsForSamplerResponseInternal) -> SamplingClient:
            if saved.sampling_session_id is None:
                raise ValueError(
                    f"The server saved the weights of {self.model_id} but returned no sampling "
                    "session. Use save_weights_for_sampler(name) and create_sampling_client()."
                )
            sampling = SamplingClient(
                self.holder,
                sampling_session_id=saved.sampling_session_id,
                retry_config=retry_config,
                record_stability_info=record_stability_info,
            )
            sampling._base_model = self._base_model
            return sampling

        return self._single(
            SaveWeightsForSamplerRequest,
            SaveWeightsForSamplerResponseInternal,
            sampler,
            # Numbered when it is sent.
            sampling_session_seq_id=self.holder.next_sampler_number,
        )

    save_weights_and_get_sampling_client = waits(_save_weights_and_get_sampling_client)
    save_weights_and_get_sampling_client_async = awaits(_save_weights_and_get_sampling_client)

    def load_state(
        self, path: str, weights_access_token: str | None = None
    ) -> Promise[LoadWeightsResponse]:
        """
        Replace the weights with saved ones; the optimizer state is reset.

        Deprecated: `ServiceClient.create_training_client_from_state` creates a new client.

        Args:
            path: A checkpoint, `tinker://RUN/weights/NAME`.
            weights_access_token: Key of the checkpoint's owner, if it is another account.

        Returns:
            A future that is done when the weights are loaded.

        Example:
            training.load_state(path).result()
        """
        _deprecated("load_state", "create_training_client_from_state")
        return self._load(path, optimizer=False, weights_access_token=weights_access_token)

    load_state_async = submits(load_state)

    def load_state_with_optimizer(
        self, path: str, weights_access_token: str | None = None
    ) -> Promise[LoadWeightsResponse]:
        """
        Replace weights and optimizer state with saved ones.

        Deprecated: `ServiceClient.create_training_client_from_state_with_optimizer` creates a new
        client.

        Args:
            path: A checkpoint, `tinker://RUN/weights/NAME`.
            weights_access_token: Key of the checkpoint's owner, if it is another account.

        Returns:
            A future that is done when the state is loaded.

        Example:
            training.load_state_with_optimizer(path).result()
        """
        _deprecated("load_state_with_optimizer", "create_training_client_from_state_with_optimizer")
        return self._load(path, optimizer=True, weights_access_token=weights_access_token)

    load_state_with_optimizer_async = submits(load_state_with_optimizer)

    def _load(
        self, path: str, *, optimizer: bool, weights_access_token: str | None
    ) -> Promise[LoadWeightsResponse]:
        return self._single(
            LoadWeightsRequest,
            LoadWeightsResponse,
            path=path,
            optimizer=optimizer,
            weights_access_token=weights_access_token,
        )

    def _create_sampling_client(
        self,
        model_path: str,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> Promise[SamplingClient]:
        """
        Create a client that samples from saved weights.

        Args:
            model_path: A checkpoint, `tinker://RUN/sampler_weights/NAME`.
            retry_config: How the client retries; None: the defaults of `tinkex.RetryConfig`.
            record_stability_info: Whether the service records how stable the samples are.

        Returns:
            A client that samples.

        Raises:
            NotFoundError: No such checkpoint, or not yours.

        Example:
            path = training.save_weights_for_sampler("latest").result().path
            sampling = training.create_sampling_client(path)
        """
        return self.holder.run(
            open_sampler(
                self.holder,
                model_path=model_path,
                base_model=None,
                retry_config=retry_config,
                record_stability_info=record_stability_info,
            )
        )

    create_sampling_client = waits(_create_sampling_client)
    create_sampling_client_async = awaits(_create_sampling_client)

    # -- about the model -------------------------------------------------------------------------

    def _get_info(self) -> Promise[GetInfoResponse]:
        """
        What the server knows about this model. Not ordered with the steps.

        Returns:
            The base model, the rank and the tokenizer of the model.

        Example:
            print(training.get_info().lora_rank)
        """

        async def work() -> GetInfoResponse:
            connection = await self.holder.connect()
            info = await connection.calls.call(
                "POST",
                "get_info",
                GetInfoRequest(model_id=self.model_id),
                answer=GetInfoResponse,
                kind=Kind.REST,
                about=f"looking up {self.model_id}",
            )
            self._base_model = info.model_data.model_name or self._base_model
            self._lora_rank = info.lora_rank or self._lora_rank
            return info

        return self.holder.run(work())

    get_info = waits(_get_info)
    get_info_async = awaits(_get_info)

    def get_tokenizer(self) -> Any:
        """
        The tokenizer of the base model.

        Returns:
            The tokenizer of transformers if that is installed, else a light one of tinkex.

        Raises:
            TokenizerUnavailable: No tokenizer was found; the message says where.

        Example:
            tokens = training.get_tokenizer().encode("Ahoy!")
        """
        refuse_to_block("get_tokenizer", "asyncio.to_thread(training.get_tokenizer)")
        info = self._get_info().block().model_data
        return tokenizer.load(info.model_name or "", info.tokenizer_id)

    def get_console_url(self) -> str:
        """
        The page of this run in the console of its service, or of your own server.

        Returns:
            The address of the page.

        Example:
            print(training.get_console_url())
        """
        return f"{self.holder.console}/training_runs/{self.model_id}"

    def get_telemetry(self) -> Telemetry | None:
        """
        The telemetry reporter of this session.

        Returns:
            The reporter; None if telemetry is off.

        Example:
            reporter = training.get_telemetry()
        """
        return self.holder.telemetry

    # -- the end ---------------------------------------------------------------------------------

    def unload_model(self) -> Promise[UnloadModelResponse]:
        """
        Free the model's memory on the server now, instead of when the session ends.

        Checkpoints are kept. A tinkex server reloads the model at the next call; other services may
        reject that call. Not every service supports it.

        Not ordered with the steps: wait for pending results first.

        Returns:
            A future that is done when the memory is free.

        Example:
            training.unload_model().result()
        """

        async def work() -> UnloadModelResponse:
            return await self.holder.submit(
                await self.holder.connect(),
                "unload_model",
                UnloadModelRequest(model_id=self.model_id),
                ExpectedResult(request_type="UnloadModel", answer=UnloadModelResponse),
                observer=self._queue_log,
            )

        return self.holder.run(work())

    unload_model_async = submits(unload_model)

    # -- submission ------------------------------------------------------------------------------

    def _single(
        self,
        request: Callable[..., BaseModel],
        answer: type[R],
        finish: Callable[[R], T] = _same,  # type: ignore[assignment]
        **fields: Any,
    ) -> Promise[T]:
        """A step of one request. Its type names it; fields that are functions are called late."""
        request_type = request.__name__.removesuffix("Request")

        def encode(seq_id: int) -> bytes:
            given = {name: each() if callable(each) else each for name, each in fields.items()}
            return encode_json(request(model_id=self.model_id, seq_id=seq_id, **given))

        return self._steps.submit(
            lambda _: [Part(path=operation_name(request_type), encode=encode)],
            ExpectedResult(request_type=request_type, answer=answer),
            lambda results: finish(results[0]),
        )


def _deprecated(name: str, instead: str) -> None:
    user_warnings.warn(
        f"{name}() is deprecated: create a new client with ServiceClient.{instead}().",
        FutureWarning,
    )
