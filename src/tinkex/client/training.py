"""TrainingClient: the verbs of training, cut into chunks, sent in the order of the calls."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

from pydantic import BaseModel

from tinkex.client import custom_loss, tokenizer, user_warnings, validation
from tinkex.client.batching import cut, datum_bytes, merge
from tinkex.client.errors import APIStatusError, BadRequestError, UnprocessableEntityError
from tinkex.client.futures import Promise, awaits, refuse_to_block, submits, waits
from tinkex.client.http.api_calls import decode
from tinkex.client.http.polling import QueueLog, Wanted
from tinkex.client.http.retry import RetryConfig
from tinkex.client.http.transport import Kind
from tinkex.client.observe import instrumentation
from tinkex.client.sampling import SamplingClient, open_sampler
from tinkex.client.session import Connection, Session, closed
from tinkex.client.submission import (
    Accepted,
    Fate,
    Numbers,
    Part,
    Submission,
    Turnstile,
    all_of,
    compressed,
    filler,
    pass_encoder,
)
from tinkex.client.tokenizer import SpeaksText
from tinkex.wire.base import Payload
from tinkex.wire.checkpoints import (
    CONSOLE_URL,
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
from tinkex.wire.codec import PROTOBUF_TYPE, encode_json
from tinkex.wire.futures import UntypedAPIFuture
from tinkex.wire.inputs import Datum
from tinkex.wire.protobuf import decode_forward_backward_output
from tinkex.wire.sessions import GetInfoRequest, GetInfoResponse
from tinkex.wire.training import (
    AdamParams,
    ForwardBackwardInput,
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

log = logging.getLogger("tinkex.training")

R = TypeVar("R", bound=BaseModel | Payload)
T = TypeVar("T")

LossConfig = dict[str, float] | dict[str, str] | dict[str, float | str]


class TrainingClient(SpeaksText):
    """
    Trains one LoRA adapter.

        step = training.forward_backward(data, "cross_entropy")
        training.optim_step(tinkex.AdamParams(learning_rate=1e-4))
        print(step.result().metrics["loss:sum"])

    Operations are submitted in the order of the calls, from any thread or coroutine, and return
    a future at once, so that the next can be queued while one runs.
    """

    def __init__(self, holder: Session, model_seq_id: int, model_id: str) -> None:
        self.holder = holder
        self.model_id = model_id
        self._model_seq_id = model_seq_id
        self._turnstile = Turnstile()
        self._numbers = Numbers()
        self._pid = os.getpid()
        #: Where a custom loss of ours is being computed.
        self._loss_thread: int | None = None
        self._queue_log = QueueLog(f"Training of {model_id}", telemetry=lambda: holder.telemetry)

    def __repr__(self) -> str:
        return f"<TrainingClient of {self.model_id}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "A TrainingClient cannot be pickled: the order of its steps lives in this process. "
            "Send a SamplingClient, or the path of a checkpoint."
        )

    # -- passes ----------------------------------------------------------------------------------

    def forward(
        self,
        data: list[Datum],
        loss_fn: LossFnType,
        loss_fn_config: LossConfig | None = None,
    ) -> Promise[ForwardBackwardOutput]:
        """The loss and its outputs for a batch, without gradients."""
        return self._pass("Forward", data, loss_fn, loss_fn_config, forward_only=True)

    forward_async = submits(forward)

    def forward_backward(
        self,
        data: list[Datum],
        loss_fn: LossFnType,
        loss_fn_config: LossConfig | None = None,
    ) -> Promise[ForwardBackwardOutput]:
        """The loss of a batch; its gradients are added to those since the last `optim_step`."""
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
        parts = self._pass_parts(data, loss_fn, config, forward_only=forward_only)
        return self._step(parts, self._pass_wanted(request_type), merge)

    def _pass_parts(
        self,
        data: Sequence[Datum],
        loss_fn: LossFnType = "cross_entropy",
        config: dict[str, float | str] | None = None,
        *,
        forward_only: bool,
    ) -> Callable[[Connection], list[Part]]:
        data = validation.batch(data)
        validation.loss_name(loss_fn)
        # Checks the name of the loss here, where the caller sees it. The data were checked above.
        ForwardBackwardInput(data=[], loss_fn=loss_fn, loss_fn_config=config)
        sizes = [datum_bytes(datum) for datum in data]

        def parts(connection: Connection) -> list[Part]:
            return [
                Part(
                    path="forward_backward",
                    encode=pass_encoder(
                        self.model_id, data[piece], loss_fn, config, forward_only=forward_only
                    ),
                    size_bytes=sum(sizes[piece]),
                    content_type=PROTOBUF_TYPE,
                    adds_gradients=not forward_only,
                )
                for piece in cut(
                    sizes,
                    max_count=connection.config.fwdbwd_max_chunk_len,
                    max_bytes=connection.config.fwdbwd_max_chunk_bytes_count,
                )
            ]

        return parts

    @staticmethod
    def _pass_wanted(request_type: str) -> Wanted[ForwardBackwardOutput]:
        return Wanted(
            request_type=request_type,
            answer=ForwardBackwardOutput,
            read_protobuf=decode_forward_backward_output,
        )

    def _forward_backward_custom(
        self,
        data: list[Datum],
        loss_fn: CustomLoss,
        *,
        loss_type_input: Literal["logprobs"] | None = None,
    ) -> Promise[Promise[ForwardBackwardOutput]]:
        """
        `forward_backward` with a loss of your own: a function of (data, logprobs) or a `LossHandle`.

        Returns the future once the loss is computed, which happens on a thread of its own.
        """
        return custom_loss.start(self, data, loss_fn, loss_type_input)

    forward_backward_custom = waits(_forward_backward_custom)
    forward_backward_custom_async = awaits(_forward_backward_custom)

    # -- optimizer -------------------------------------------------------------------------------

    def optim_step(
        self,
        optim_params: AdamParams | OptimParamsBase | None = None,
        *,
        adam_params: AdamParams | OptimParamsBase | None = None,
    ) -> Promise[OptimStepResponse]:
        """Apply the gradients gathered since the last step, and forget them."""
        if optim_params is not None and adam_params is not None:
            raise ValueError("optim_params and adam_params are the same thing: give one of them.")
        params = optim_params if optim_params is not None else adam_params
        if not isinstance(params, AdamParams | OptimParamsBase):
            raise TypeError(
                f"optim_step() needs the parameters of an optimizer, such as "
                f"AdamParams(learning_rate=1e-4), not {type(params).__name__}."
            )

        def encode(number: int) -> bytes:
            return encode_json(
                OptimStepRequest(optim_params=params, model_id=self.model_id, seq_id=number)
            )

        return self._single("optim_step", encode, "OptimStep", OptimStepResponse, _same)

    optim_step_async = submits(optim_step)

    # -- checkpoints -----------------------------------------------------------------------------

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
    ) -> Promise[SaveWeightsResponse]:
        """Save weights and optimizer state, to go on training from."""

        def encode(number: int) -> bytes:
            return encode_json(
                SaveWeightsRequest(
                    model_id=self.model_id,
                    path=name,
                    seq_id=number,
                    ttl_seconds=ttl_seconds,
                    overwrite=overwrite,
                    user_metadata=user_metadata,
                )
            )

        return self._single("save_weights", encode, "SaveWeights", SaveWeightsResponse, _same)

    save_state_async = submits(save_state)

    def save_weights_for_sampler(
        self,
        name: str,
        ttl_seconds: int | None = None,
        user_metadata: dict[str, str] | None = None,
    ) -> Promise[SaveWeightsForSamplerResponse]:
        """Save weights under a name, to sample from."""

        def encode(number: int) -> bytes:
            return encode_json(
                SaveWeightsForSamplerRequest(
                    model_id=self.model_id,
                    path=name,
                    seq_id=number,
                    ttl_seconds=ttl_seconds,
                    user_metadata=user_metadata,
                )
            )

        return self._single(
            "save_weights_for_sampler",
            encode,
            "SaveWeightsForSampler",
            SaveWeightsForSamplerResponse,
            _same,
        )

    save_weights_for_sampler_async = submits(save_weights_for_sampler)

    def save_weights_external(
        self,
        name: str,
        ttl_seconds: int | None = None,
        age_encryption_recipients: list[str] | None = None,
    ) -> Promise[SaveWeightsExternalResponse]:
        """
        Save weights as files for other programs: an adapter folder of the PEFT library.

        `tinkex.download_checkpoint` fetches it. With age keys the files are locked, and only
        whoever has one of the matching secret keys can read them.
        """
        recipients = list(age_encryption_recipients) if age_encryption_recipients else None

        def encode(number: int) -> bytes:
            return encode_json(
                SaveWeightsExternalRequest(
                    model_id=self.model_id,
                    path=name,
                    seq_id=number,
                    ttl_seconds=ttl_seconds,
                    age_encryption_recipients=recipients,
                )
            )

        return self._single(
            "save_weights_external",
            encode,
            "SaveWeightsExternal",
            SaveWeightsExternalResponse,
            _same,
        )

    save_weights_external_async = submits(save_weights_external)

    def _save_weights_and_get_sampling_client(
        self,
        name: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> Promise[SamplingClient]:
        """A client that samples from the weights as they are at this point of the order."""
        if name is not None:
            user_warnings.warn(
                "`name` is ignored: these weights are not kept under a name. Use "
                "save_weights_for_sampler(name) for that.",
                DeprecationWarning,
            )

        def encode(number: int) -> bytes:
            return encode_json(
                SaveWeightsForSamplerRequest(
                    model_id=self.model_id,
                    sampling_session_seq_id=self.holder.next_sampler_number(),
                    seq_id=number,
                )
            )

        def sampler(saved: SaveWeightsForSamplerResponseInternal) -> SamplingClient:
            if saved.sampling_session_id is None:
                raise ValueError(
                    f"The server saved the weights of {self.model_id} but named no sampling "
                    "session. Use save_weights_for_sampler(name) and create_sampling_client()."
                )
            return SamplingClient(
                self.holder,
                sampling_session_id=saved.sampling_session_id,
                retry_config=retry_config,
                record_stability_info=record_stability_info,
            )

        return self._single(
            "save_weights_for_sampler",
            encode,
            "SaveWeightsForSampler",
            SaveWeightsForSamplerResponseInternal,
            sampler,
        )

    save_weights_and_get_sampling_client = waits(_save_weights_and_get_sampling_client)
    save_weights_and_get_sampling_client_async = awaits(_save_weights_and_get_sampling_client)

    def load_state(
        self, path: str, weights_access_token: str | None = None
    ) -> Promise[LoadWeightsResponse]:
        """Replace the weights by saved ones; the optimizer starts anew."""
        _deprecated("load_state", "create_training_client_from_state")
        return self._load(path, optimizer=False, weights_access_token=weights_access_token)

    load_state_async = submits(load_state)

    def load_state_with_optimizer(
        self, path: str, weights_access_token: str | None = None
    ) -> Promise[LoadWeightsResponse]:
        """Replace weights and optimizer state by saved ones."""
        _deprecated("load_state_with_optimizer", "create_training_client_from_state_with_optimizer")
        return self._load(path, optimizer=True, weights_access_token=weights_access_token)

    load_state_with_optimizer_async = submits(load_state_with_optimizer)

    def _load(
        self, path: str, *, optimizer: bool, weights_access_token: str | None
    ) -> Promise[LoadWeightsResponse]:
        def encode(number: int) -> bytes:
            return encode_json(
                LoadWeightsRequest(
                    model_id=self.model_id,
                    seq_id=number,
                    path=path,
                    optimizer=optimizer,
                    weights_access_token=weights_access_token,
                )
            )

        return self._single("load_weights", encode, "LoadWeights", LoadWeightsResponse, _same)

    def _create_sampling_client(
        self,
        model_path: str,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> Promise[SamplingClient]:
        """Samples from saved weights."""
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
        """What the server knows about this model. Takes no place in the order."""

        async def work() -> GetInfoResponse:
            connection = await self.holder.connect()
            return await connection.calls.call(
                "POST",
                "get_info",
                GetInfoRequest(model_id=self.model_id),
                answer=GetInfoResponse,
                kind=Kind.REST,
                about=f"asking about {self.model_id}",
            )

        return self.holder.run(work())

    get_info = waits(_get_info)
    get_info_async = awaits(_get_info)

    def get_tokenizer(self) -> Any:
        """The tokenizer of the base model."""
        refuse_to_block("get_tokenizer", "asyncio.to_thread(training.get_tokenizer)")
        info = self._get_info().block().model_data
        return tokenizer.load(info.model_name or "", info.tokenizer_id)

    def get_console_url(self) -> str:
        """The page of the hosted service about this run."""
        return f"{CONSOLE_URL}/training_runs/{self.model_id}"

    def get_telemetry(self) -> Telemetry | None:
        """What reports about this session; None if that is switched off."""
        return self.holder.telemetry

    # -- the end ---------------------------------------------------------------------------------

    def unload_model(self) -> Promise[UnloadModelResponse]:
        """
        Free what the model takes up on the server, now and not when the session ends.

        Checkpoints stay. What a later call to the model meets is the service's to say: ours loads
        it again, others may refuse it.

        Takes no place in the order: wait for what must be done first. Not every service has it.
        """

        async def work() -> UnloadModelResponse:
            return await self.holder.submit(
                await self.holder.connect(),
                "unload_model",
                UnloadModelRequest(model_id=self.model_id),
                Wanted(request_type="UnloadModel", answer=UnloadModelResponse),
                observer=self._queue_log,
            )

        return self.holder.run(work())

    unload_model_async = submits(unload_model)

    # -- the order -------------------------------------------------------------------------------

    def _single(
        self,
        path: str,
        encode: Callable[[int], bytes],
        request_type: str,
        answer: type[R],
        finish: Callable[[R], T],
    ) -> Promise[T]:
        return self._step(
            lambda _: [Part(path=path, encode=encode)],
            Wanted(request_type=request_type, answer=answer),
            lambda results: finish(results[0]),
        )

    def _step(
        self,
        parts: Callable[[Connection], list[Part]],
        wanted: Wanted[R],
        finish: Callable[[list[R]], T],
    ) -> Promise[T]:
        return self._place(lambda _: self._send(parts), wanted, finish)

    def _place(
        self,
        send: Callable[[Promise[T]], Coroutine[Any, Any, tuple[Connection, list[Accepted]]]],
        wanted: Wanted[R],
        finish: Callable[[list[R]], T],
    ) -> Promise[T]:
        """
        Take the next place in the order, here in the caller's thread, and do the rest later.

        The place is given up however the step ends: sent, refused, cancelled or never begun.
        """
        if self.holder.closed:
            raise closed()
        if self._pid != os.getpid():
            raise RuntimeError(
                f"{self!r} belongs to process {self._pid}; in a forked process its steps would "
                "be numbered twice. Create a client here from a checkpoint, or sample only."
            )
        if self._loss_thread == threading.get_ident():
            raise RuntimeError(
                "A custom loss cannot call the client whose step it belongs to: that call comes "
                "after the step, and the step waits for the loss. Other clients may be called."
            )
        self.holder.loop()  # raises here, before there is a ticket that nothing would spend
        promise: Promise[T] = Promise()
        ticket = self._turnstile.take()

        async def in_turn() -> tuple[Connection, list[Accepted]]:
            # From here on the step runs, whoever stops waiting; cancelled before, it never existed.
            if not promise.set_running_or_notify_cancel():
                raise asyncio.CancelledError
            return await send(promise)

        def begin() -> asyncio.Task[T]:
            submission: asyncio.Task[tuple[Connection, list[Accepted]]] | None = None

            def make() -> asyncio.Task[T]:
                nonlocal submission
                # Both at once, before anything can be cancelled: every ticket must be started.
                submission = self._turnstile.start(ticket, in_turn)
                self.holder.track(submission)
                return asyncio.create_task(self._finish(submission, wanted, finish))

            try:
                return instrumentation.Operation(
                    instrumentation.named(wanted.request_type), self.holder.tracing, self.model_id
                ).run(make)
            except BaseException:
                # The step never began. Later steps must not wait for its ticket.
                if submission is None:
                    self._turnstile.skip(ticket)
                else:
                    submission.cancel()
                raise

        self.holder.start(promise, begin)
        return promise

    @contextmanager
    def _computing_a_loss(self) -> Iterator[None]:
        """While a custom loss runs on this thread. One at a time: each has its place in the order."""
        self._loss_thread = threading.get_ident()
        try:
            yield
        finally:
            self._loss_thread = None

    async def _send(
        self, parts: Callable[[Connection], list[Part]]
    ) -> tuple[Connection, list[Accepted]]:
        """In our turn: number the parts, submit them, account for every number."""
        connection = await self.holder.connect()
        await self._fill_gaps(connection)
        first = self._numbers.next
        todo = [
            Submission(part=part, number=first + index)
            for index, part in enumerate(parts(connection))
        ]

        async def send(submission: Submission) -> None:
            try:
                submission.accepted = await self._submit(connection, submission)
            except Exception as error:  # noqa: BLE001 (kept, and raised once all are settled)
                submission.error = error

        try:
            if len(todo) > 1 and connection.config.parallel_fwdbwd_chunks:
                # The first goes last: the server then sees the whole batch before it starts.
                await asyncio.gather(*(send(each) for each in todo[1:]))
                if all(each.error is None for each in todo):
                    await send(todo[0])
            else:
                for each in todo:
                    await send(each)
                    if each.error is not None:
                        break
        finally:
            self._numbers.settle(
                [each.fate for each in todo],
                adds_gradients=any(each.part.adds_gradients for each in todo),
            )
        for each in todo:
            if each.error is not None:
                raise each.error
        return connection, [each.accepted for each in todo if each.accepted is not None]

    async def _submit(self, connection: Connection, submission: Submission) -> Accepted:
        calls, part, number = connection.calls, submission.part, submission.number
        async with connection.lane.training_bytes.hold(part.size_bytes):
            body = part.encode(number)
            headers = {}
            if part.content_type == PROTOBUF_TYPE and connection.config.proto_compress_fwdbwd:
                packed = await asyncio.to_thread(compressed, body)
                if packed is not None:
                    body, headers = packed, {"Content-Encoding": "zstd"}
            started = monotonic()
            about = f"step {number} of {self.model_id}"
            request = calls.request(
                "POST",
                part.path,
                body,
                kind=Kind.TRAIN,
                content_type=part.content_type,
                headers=headers,
            )

            async def attempt() -> UntypedAPIFuture:
                before = submission.fate
                try:
                    answer = await calls.once(request, about=about, sending=submission.leaves)
                except APIStatusError as error:
                    submission.refused(error, before=before)
                    raise
                return decode(UntypedAPIFuture, answer, about=about)

            promised = await calls.insisting(attempt, path=part.path, kind=Kind.TRAIN)
            submission.fate = Fate.ACCEPTED
            return Accepted(promised.request_id, monotonic() - started)

    async def _fill_gaps(self, connection: Connection) -> None:
        """Give the server something to run for numbers that an earlier call could not use."""
        for number, half_a_batch in sorted(self._numbers.gaps.items()):
            taken = await self._fill(connection, number, half_a_batch)
            if (
                not taken
                and half_a_batch
                and (taken := await self._fill(connection, number, False))
            ):
                # This server checks a pass before it takes it, so none can be made to fail.
                log.warning(
                    "A batch of %s was taken only in part. The gradients of that part are in the "
                    "next optim_step. To leave them out, go on from the last saved state.",
                    self.model_id,
                )
            if not taken:
                log.debug("step %d of %s needs no filling", number, self.model_id)
            del self._numbers.gaps[number]

    async def _fill(self, connection: Connection, number: int, half_a_batch: bool) -> bool:
        """Whether the server took the filler."""
        part = filler(self.model_id, half_a_batch)
        try:
            await self._submit(connection, Submission(part=part, number=number))
        except UnprocessableEntityError:
            # Taken by another kind of step: what we got no answer to had arrived after all.
            # Asked again and again, it would stop this client for good.
            return False
        except BadRequestError:
            if not half_a_batch:
                raise
            return False
        return True

    async def _finish(
        self,
        submission: asyncio.Task[tuple[Connection, list[Accepted]]],
        wanted: Wanted[R],
        finish: Callable[[list[R]], T],
    ) -> T:
        return finish(await self._fetch(*await asyncio.shield(submission), wanted))

    async def _fetch(
        self, connection: Connection, accepted: list[Accepted], wanted: Wanted[R]
    ) -> list[R]:
        return await all_of(
            connection.results.fetch(
                each.request_id,
                wanted,
                observer=self._queue_log,
                round_trip_s=each.round_trip_s,
            )
            for each in accepted
        )


def _same(value: R) -> R:
    return value


def _deprecated(name: str, instead: str) -> None:
    user_warnings.warn(
        f"{name}() is deprecated: make a new client with ServiceClient.{instead}().",
        FutureWarning,
    )
