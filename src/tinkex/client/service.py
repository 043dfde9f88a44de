"""ServiceClient: a session with a service; creates the other clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn, Self

from tinkex import display
from tinkex.client import custom_loss, user_warnings
from tinkex.client.auth.token_exchange import with_other_key
from tinkex.client.connection import Connection
from tinkex.client.futures import Promise, awaits, refuse_to_block, waits
from tinkex.client.http.polling import ExpectedResult
from tinkex.client.http.retry import RetryConfig
from tinkex.client.http.transport import Kind
from tinkex.client.observe.queue_states import QueueLog
from tinkex.client.rest import RestClient
from tinkex.client.sampling import SamplingClient
from tinkex.client.session import CloseStatus, Session, closed_error
from tinkex.client.settings import Settings
from tinkex.client.training import TrainingClient
from tinkex.client.validation import check_tinker_path
from tinkex.tracebacks import public_edge
from tinkex.wire.checkpoints import (
    LoadWeightsRequest,
    LoadWeightsResponse,
    WeightsInfoRequest,
    WeightsInfoResponse,
)
from tinkex.wire.custom_loss import CustomLossInputRank
from tinkex.wire.sessions import GetServerCapabilitiesResponse
from tinkex.wire.training import (
    AdamOptimizerConfig,
    CreateModelRequest,
    CreateModelResponse,
    LoraConfig,
    OptimizerConfig,
)

if TYPE_CHECKING:
    from tinkex.client.connection import MakeTransport
    from tinkex.client.custom_loss import LossHandle, PerDatumLossFn
    from tinkex.client.observe.telemetry import Telemetry


@public_edge
class ServiceClient:
    """
    The entry point of every program.

        with tinkex.ServiceClient(base_url="local") as service:
            training = service.create_lora_training_client("HuggingFaceTB/SmolLM2-135M-Instruct")

    Creating one sends nothing. Leaving the `with` block ends the session on the server.
    `base_url="local"` runs a server on this machine (see `tinkex.client.local_server`).
    """

    def __init__(
        self,
        user_metadata: dict[str, str] | None = None,
        project_id: str | None = None,
        *,
        display_name: str | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        default_headers_overrides: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        # For tests: `tinkex.testing.FakeService` replaces the network.
        """
        Creating a client sends nothing and finds no fault with an unreachable server.

        Args:
            user_metadata: Texts that are stored with the session, such as `{"team": "speech"}`.
            project_id: Project of the session; else `TINKER_PROJECT_ID`.
            display_name: Name of the session in lists.
            base_url: Address of the service, or `"local"`; else `TINKER_BASE_URL`, or the one of
                `tinkex use`. If there is no key either: the running server of this user.
            api_key: Key of the service; else `TINKER_API_KEY`, or the one of `tinkex auth login`.
            default_headers_overrides: Headers for every request; they win over the client's own.
            kwargs: `settings`: a `tinkex.Settings`, instead of the arguments that it contains.

        Raises:
            TinkerError: No service is named or found, or there is no key for it.
            ValueError: Both `settings` and an argument that it contains.

        Example:
            service = tinkex.ServiceClient(base_url="http://127.0.0.1:8000", api_key="tml-local")
        """
        make_transport: MakeTransport | None = kwargs.pop("_make_transport", None)
        settings: Settings | None = kwargs.pop("settings", None)
        if kwargs:
            user_warnings.warn(
                f"ServiceClient ignores {', '.join(sorted(kwargs))}: unknown arguments.",
                FutureWarning,
            )
        if settings is None:
            settings = Settings.resolve(
                base_url=base_url,
                api_key=api_key,
                project_id=project_id,
                headers=default_headers_overrides,
            )
        elif any(each is not None for each in (base_url, api_key, project_id)) or (
            default_headers_overrides is not None
        ):
            raise ValueError(
                "ServiceClient got settings together with base_url, api_key, project_id or "
                "headers: pass these to Settings.resolve(...) instead."
            )
        more: dict[str, Any] = {} if make_transport is None else {"make_transport": make_transport}
        self._session = Session(
            settings, user_metadata=user_metadata, display_name=display_name, **more
        )

    def __repr__(self) -> str:
        session = self._session
        shown: list[tuple[str, Any]] = [("base_url", session.settings.base_url)]
        if session.session_id is not None:
            shown.append(("session_id", session.session_id))
        if session.closed:
            shown.append(("closed", True))
        return display.call("ServiceClient", shown)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "A ServiceClient cannot be pickled: its session belongs to this process. "
            "Send a SamplingClient, or create a ServiceClient in the other process."
        )

    @property
    def holder(self) -> Session:
        """The session that this client shares with the clients created from it."""
        if self._session.closed:
            raise closed_error()
        return self._session

    def get_console_url(self) -> str:
        """
        The console page of this session, or of all sessions before it exists.

        A server of your own has a console, too. With `base_url="local"` the server is started if it
        does not run yet.

        Returns:
            The address of the page.

        Example:
            print(service.get_console_url())
        """
        session_id = self._session.session_id
        return f"{self._session.console}/sessions" + (f"/{session_id}" if session_id else "")

    def get_telemetry(self) -> Telemetry | None:
        """
        The telemetry reporter of this session.

        Returns:
            The reporter; None before the session exists, or if telemetry is off.

        Example:
            reporter = service.get_telemetry()
        """
        return self._session.telemetry

    # -- capabilities ----------------------------------------------------------------------------

    def _get_server_capabilities(self) -> Promise[GetServerCapabilitiesResponse]:
        """
        Which base models the server offers.

        Returns:
            The models, each with its name and context length.

        Example:
            for model in service.get_server_capabilities().supported_models:
                print(model.model_name, model.max_context_length)
        """

        async def work() -> GetServerCapabilitiesResponse:
            connection = await self.holder.connect()
            return await connection.calls.call(
                "GET",
                "get_server_capabilities",
                answer=GetServerCapabilitiesResponse,
                kind=Kind.REST,
                about="fetching the server's capabilities",
            )

        return self.holder.run(work())

    get_server_capabilities = waits(_get_server_capabilities)
    get_server_capabilities_async = awaits(_get_server_capabilities)

    # -- training --------------------------------------------------------------------------------

    def _create_lora_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: dict[str, str] | None = None,
        optimizer: OptimizerConfig | None = None,
    ) -> Promise[TrainingClient]:
        """
        Create a LoRA adapter on a base model.

        Args:
            base_model: Name of the base model, as in `get_server_capabilities`.
            rank: Rank of the adapter. A higher rank has more weights to train.
            seed: Seed of the initial weights. None: the service chooses one.
            train_mlp: Whether the MLP blocks get an adapter.
            train_attn: Whether the attention blocks get one.
            train_unembed: Whether the output head gets one.
            user_metadata: Texts that are stored with the run. `{"name": ...}` is shown in lists.
            optimizer: Kind of optimizer. None: AdamW.

        Returns:
            A client that trains the adapter.

        Raises:
            ValueError: All of `train_mlp`, `train_attn` and `train_unembed` are False.
            RequestFailedError: The server does not have the model or the rank.

        Example:
            training = service.create_lora_training_client(MODEL, rank=16, seed=0)
        """
        if not (train_mlp or train_attn or train_unembed):
            raise ValueError(
                "Nothing to train: set at least one of train_mlp, train_attn, train_unembed."
            )
        lora = LoraConfig(
            rank=rank,
            seed=seed,
            train_unembed=train_unembed,
            train_mlp=train_mlp,
            train_attn=train_attn,
        )
        return self.holder.run(self._create(base_model, lora, user_metadata, optimizer))

    create_lora_training_client = waits(_create_lora_training_client)
    create_lora_training_client_async = awaits(_create_lora_training_client)

    async def _create(
        self,
        base_model: str,
        lora: LoraConfig,
        user_metadata: dict[str, str] | None,
        optimizer: OptimizerConfig | None,
    ) -> TrainingClient:
        connection, session_id = await self.holder.open()
        base_model = await self.holder.served_name(connection, base_model)
        number = self.holder.next_model_number()
        created = await self.holder.submit(
            connection,
            "create_model",
            CreateModelRequest(
                session_id=session_id,
                model_seq_id=number,
                base_model=base_model,
                user_metadata=user_metadata,
                lora_config=lora,
                optimizer_config=optimizer or AdamOptimizerConfig(),
            ),
            ExpectedResult(request_type="CreateModel", answer=CreateModelResponse),
            observer=self._watching(f"Creation of a model on {base_model}"),
        )
        training = TrainingClient(self.holder, number, created.model_id)
        training._base_model, training._lora_rank = base_model, lora.rank
        return training

    def _watching(self, subject: str) -> QueueLog:
        return QueueLog(subject, telemetry=lambda: self._session.telemetry)

    def _create_training_client_from_state(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
        optimizer: OptimizerConfig | None = None,
    ) -> Promise[TrainingClient]:
        """
        Create a model from saved weights, with a new optimizer.

        Args:
            path: A checkpoint, `tinker://RUN/weights/NAME`.
            base_model: Base model of the new model. None: that of the checkpoint.
            user_metadata: Texts that are stored with the new run.
            weights_access_token: Key of the checkpoint's owner, if it is another account.
            optimizer: Kind of optimizer. None: that of the checkpoint.

        Returns:
            A client that trains the new model.

        Raises:
            ValueError: Not a path, or not a LoRA checkpoint.
            NotFoundError: No such checkpoint, or not yours.

        Example:
            path = training.save_state("before").result().path
            branch = service.create_training_client_from_state(path)
        """
        return self.holder.run(
            self._restore(path, base_model, user_metadata, weights_access_token, optimizer, False)
        )

    create_training_client_from_state = waits(_create_training_client_from_state)
    create_training_client_from_state_async = awaits(_create_training_client_from_state)

    def _create_training_client_from_state_with_optimizer(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
    ) -> Promise[TrainingClient]:
        """
        Create a model that continues a saved one exactly, including the optimizer.

        Args:
            path: A checkpoint, `tinker://RUN/weights/NAME`.
            base_model: Base model of the new model. None: that of the checkpoint.
            user_metadata: Texts that are stored with the new run.
            weights_access_token: Key of the checkpoint's owner, if it is another account.

        Returns:
            A client that trains the new model.

        Raises:
            ValueError: Not a path, or not a LoRA checkpoint.
            NotFoundError: No such checkpoint, or not yours.

        Example:
            path = training.save_state("latest", overwrite=True).result().path
            resumed = service.create_training_client_from_state_with_optimizer(path)
        """
        return self.holder.run(
            self._restore(path, base_model, user_metadata, weights_access_token, None, True)
        )

    create_training_client_from_state_with_optimizer = waits(
        _create_training_client_from_state_with_optimizer
    )
    create_training_client_from_state_with_optimizer_async = awaits(
        _create_training_client_from_state_with_optimizer
    )

    async def _restore(
        self,
        path: str,
        base_model: str | None,
        user_metadata: dict[str, str] | None,
        weights_access_token: str | None,
        optimizer: OptimizerConfig | None,
        with_optimizer: bool,
    ) -> TrainingClient:
        check_tinker_path(path)
        connection, session_id = await self.holder.open()
        await self.holder.serve_base_of(connection, path)
        if connection.config.create_model_via_load_weights:
            number = self.holder.next_model_number()
            await self.holder.submit(
                connection,
                "load_weights",
                LoadWeightsRequest(
                    session_id=session_id,
                    model_seq_id=number,
                    base_model=base_model,
                    user_metadata=user_metadata,
                    path=path,
                    optimizer=with_optimizer,
                    optimizer_config=optimizer,
                    weights_access_token=weights_access_token,
                ),
                ExpectedResult(request_type="LoadWeights", answer=LoadWeightsResponse),
                observer=self._watching(f"Restoring {path}"),
            )
            # For servers that set this flag, the format of ids is part of the protocol.
            return TrainingClient(self.holder, number, f"{session_id}:train:{number}")
        info = await self._weights_info(connection, path, weights_access_token)
        if not info.is_lora or info.lora_rank is None:
            raise ValueError(
                f"{path} is not a LoRA checkpoint with a rank, so a training client cannot be "
                "created from it."
            )
        lora = LoraConfig(
            rank=info.lora_rank,
            train_unembed=info.train_unembed is not False,
            train_mlp=info.train_mlp is not False,
            train_attn=info.train_attn is not False,
        )
        training = await self._create(
            base_model or info.base_model, lora, user_metadata, optimizer or info.optimizer_config
        )
        await training._load(
            path, optimizer=with_optimizer, weights_access_token=weights_access_token
        )
        return training

    async def _weights_info(
        self, connection: Connection, path: str, weights_access_token: str | None
    ) -> WeightsInfoResponse:
        calls = connection.calls
        if weights_access_token:
            # Another owner's checkpoint is read with the key that may read it.
            calls = await with_other_key(calls, connection.config, weights_access_token)
        return await calls.call(
            "POST",
            "weights_info",
            WeightsInfoRequest(tinker_path=path),
            answer=WeightsInfoResponse,
            kind=Kind.REST,
            about=f"looking up {path}",
        )

    def create_custom_loss(
        self, fn: PerDatumLossFn, input_ranks: Mapping[str, CustomLossInputRank]
    ) -> Promise[LossHandle]:
        """
        Create a custom loss for `forward_backward_custom`: traced once, run for each datum.

        Args:
            fn: `fn(logprobs, *loss_fn_inputs)` returns a scalar and a dict of metrics.
            input_ranks: Number of dimensions of each parameter of `fn`, by name.

        Returns:
            A future of the handle of the loss, for the training clients of this session.

        Raises:
            ValueError: The loss cannot be traced, or uses what losses may not use.

        Example:
            def squared(logprobs, weights):
                return (weights * logprobs**2).sum(), {}

            ranks = {"logprobs": 1, "weights": 1}
            loss = service.create_custom_loss(squared, ranks).result()
        """
        return custom_loss.create(self.holder, fn, input_ranks)

    # -- sampling --------------------------------------------------------------------------------

    def _create_sampling_client(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> Promise[SamplingClient]:
        """
        Create a client that samples from saved weights or from a base model.

        Args:
            model_path: A checkpoint, `tinker://RUN/sampler_weights/NAME`.
            base_model: Name of a base model, to sample from it as it is.
            retry_config: How the client retries; None: the defaults of `tinkex.RetryConfig`.
            record_stability_info: Whether the service records how stable the samples are.

        Returns:
            A client that samples.

        Raises:
            ValueError: Neither `model_path` nor `base_model`, or not a path.
            NotFoundError: No such checkpoint, or not yours.

        Example:
            sampling = service.create_sampling_client(base_model=MODEL)
        """
        return SamplingClient.create(
            self.holder,
            model_path=model_path,
            base_model=base_model,
            retry_config=retry_config,
            record_stability_info=record_stability_info,
        )

    create_sampling_client = waits(_create_sampling_client)
    create_sampling_client_async = awaits(_create_sampling_client)

    # -- REST -------------------------------------------------------------------------------------

    def create_rest_client(self) -> RestClient:
        """
        Deprecated: `RestClient()` needs no session.

        Returns:
            A client with the service and key of this one.

        Example:
            rest = tinkex.RestClient(base_url="http://127.0.0.1:8000", api_key="tml-local")
        """
        user_warnings.warn(
            "create_rest_client() is deprecated: use RestClient(base_url=..., api_key=...), "
            "which needs no ServiceClient.",
            FutureWarning,
        )
        return RestClient(self.holder)

    def copy_weights(
        self,
        path: str,
        *,
        ttl_seconds: int | None = None,
        weights_access_token: str | None = None,
    ) -> Promise[str]:
        """
        Copy a checkpoint into the project of this client.

        Args:
            path: The checkpoint to copy.
            ttl_seconds: Seconds until the copy expires. None: never.
            weights_access_token: Key of the checkpoint's owner, if it is another account.

        Returns:
            A future of the path of the copy.

        Raises:
            ValueError: Not a path, or the client has no project.

        Example:
            copy = service.copy_weights(path, ttl_seconds=86400).result()
        """
        return RestClient(self.holder).copy_weights(
            path, ttl_seconds=ttl_seconds, weights_access_token=weights_access_token
        )

    # -- the end ---------------------------------------------------------------------------------

    def close(self, status: CloseStatus, detail: str | None = None) -> Promise[None]:
        """
        End the session and close all clients created from it. Later calls have no effect.

        Args:
            status: How the program ended: `"success"`, `"errored"` or `"interrupted"`.
            detail: More about it, for lists of sessions.

        Returns:
            A future that is done when the server knows.

        Example:
            service.close("success").result()
        """
        return self._session.close(status, detail)

    def __enter__(self) -> Self:
        if self._session.closed:
            raise closed_error()
        return self

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        await self.close(*_reason(exc_type))

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        refuse_to_block("leaving `with ServiceClient`", "service.close")
        self.close(*_reason(exc_type)).block()


def _reason(raised: type[BaseException] | None) -> tuple[CloseStatus, str | None]:
    """How a block ended, for `close`. Only the type's name: a message may quote anything."""
    if raised is None:
        return "success", None
    return "errored" if issubclass(raised, Exception) else "interrupted", raised.__name__
