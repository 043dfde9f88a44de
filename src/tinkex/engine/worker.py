"""
The compute loop of an engine process.

Each iteration accepts orders, samples a burst of tokens (several decode steps), and runs at most
one training operation or one micro-batch. Sampling then gets its share of the time (`training_share`
in the settings) before the next piece of training, so no request waits for the whole step of another.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import logging
import os
import queue
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

from tinkex.engine import Engine
from tinkex.engine.connection import (
    Connection,
    done_report,
    failure_report,
    partial_output_report,
    shared_failure_report,
)
from tinkex.engine.device import is_device_lost, is_out_of_memory
from tinkex.engine.order_decoding import (
    DecodedPass,
    DecodedSample,
    OrderDecoder,
    payload_bytes,
)
from tinkex.engine.snapshot_writer import SnapshotWriter
from tinkex.engine.training.batch_mixer import BatchMixer, ModelQueue
from tinkex.engine.training.passes import Pass
from tinkex.engine.training.request_checks import unknown_custom_loss
from tinkex.wire import engine_protocol
from tinkex.wire.codec import decode_json, encode_json
from tinkex.wire.custom_loss import CreateCustomLossRequest
from tinkex.wire.errors import UserFailure, WireError
from tinkex.wire.proto import frames_pb2
from tinkex.wire.protobuf import (
    encode_forward_backward_output,
    encode_sample_response,
)
from tinkex.wire.training import (
    ForwardBackwardInput,
    LoraConfig,
    OptimParams,
    OptimStepRequest,
    OptimStepResponse,
    optimizer_config_from,
)

log = logging.getLogger("tinkex.engine.process")

#: A piece of training counts as at most this many seconds when sampling gets its share of the time:
#: a sequence that takes a minute does not stop training for a minute.
MAX_TRAINED_S = 1.0

#: Interval between stats reports while there is work.
STATS_INTERVAL_S = 1.0

#: Target duration of a micro-batch while sequences are being sampled, which wait meanwhile.
MAX_MICRO_BATCH_S = 0.5
#: A shortened micro-batch still has this many tokens, to keep training efficient.
MIN_BATCH_TOKENS = 256


def sampling_time(trained_s: float, training_share: float) -> float:
    """How long to sample after a piece of training, so that training gets its share of the time."""
    return min(trained_s, MAX_TRAINED_S) * (1 - training_share) / training_share


class AwaitedSample(NamedTuple):
    """A sample request that is being decoded, because of its images."""

    order: engine_protocol.Order
    decoded: Future[DecodedSample]


@dataclass(slots=True, eq=False)
class Job:
    """A training order and its progress."""

    order: engine_protocol.Order
    #: The request of a pass with its images, where images are read.
    decoded: Future[DecodedPass] | None = None
    training_pass: Pass | None = None
    compute_s: float = 0.0


class Worker:
    """Runs orders on an engine."""

    def __init__(
        self, engine: Engine, connection: Connection, *, compute_lock: Path | None
    ) -> None:
        self._engine = engine
        self._connection = connection
        self._compute_lock = compute_lock
        #: Training orders by model; the model that ran least recently comes first.
        self._training: OrderedDict[str, deque[Job]] = OrderedDict()
        self._mixer = BatchMixer()
        self._loss_sessions: dict[str, str] = {}
        #: Speed of the last micro-batch beside sampling.
        self._tokens_per_s = 0.0
        self._sample_began_s: dict[int, float] = {}
        #: Seconds of the last piece of training, and of sampling since then.
        self._trained_s = self._sampled_s = 0.0
        self._tokens_trained = 0
        self._stats_reported_s = 0.0
        self._reported_stats: frames_pb2.Stats | None = None
        self._snapshots = SnapshotWriter(connection)
        self._decoder = OrderDecoder(engine.images, connection.wake)
        self._awaited_samples: dict[int, AwaitedSample] = {}

    def run(self) -> None:
        while True:
            self.run_once()

    def run_once(self) -> None:
        """One iteration: accepts orders, samples a burst, and trains if sampling had its share."""
        self._accept_orders()
        with _locked(self._compute_lock):
            if self._can_sample():
                began_s = time.perf_counter()
                self._sample()
                self._sampled_s += time.perf_counter() - began_s
            if self._next_model() and not (self._can_sample() and self._sampling_is_next()):
                began_s = time.perf_counter()
                self._train_once()
                self._trained_s, self._sampled_s = time.perf_counter() - began_s, 0.0

    def _can_sample(self) -> bool:
        """Whether some sample can proceed without waiting for an adapter to be read from disk."""
        return self._engine.sampling and self._engine.awaited_read is None

    def _sampling_is_next(self) -> bool:
        """Whether sampling has had less than its share of the time since the last training."""
        share = self._engine.settings.training_share
        return self._sampled_s < sampling_time(self._trained_s, share)

    def _accept_orders(self) -> None:
        """Takes everything from the inbox; blocks only if there is no other work."""
        # Taken once, so that an adapter read that ends after this line still wakes this thread.
        reading = self._engine.awaited_read
        can_sample = self._engine.sampling and reading is None
        idle = not can_sample and self._next_model() is None
        self._report_stats(idle)
        if idle and reading is not None:
            reading.add_done_callback(self._connection.wake)
        with contextlib.suppress(queue.Empty):
            self._accept(self._connection.inbox.get(block=idle))
            while True:
                self._accept(self._connection.inbox.get_nowait())
        for ticket, awaited in list(self._awaited_samples.items()):
            if awaited.decoded.done():
                del self._awaited_samples[ticket]
                self._submit_decoded(awaited)

    def _report_stats(self, idle: bool) -> None:
        """Sends changed stats: at intervals while there is work, and once when it ends."""
        now_s = time.monotonic()
        if not idle and now_s - self._stats_reported_s < STATS_INTERVAL_S:
            return
        self._stats_reported_s = now_s
        stats = self._engine.stats()
        stats.samples_waiting += len(self._awaited_samples)
        stats.training_waiting = sum(len(jobs) for jobs in self._training.values())
        stats.models_training = len(self._training)
        stats.tokens_trained = self._tokens_trained
        if stats != self._reported_stats:
            self._reported_stats = stats
            self._connection.send(engine_protocol.Report(stats=stats))

    def _accept(self, order: engine_protocol.Order | None) -> None:
        if order is None:
            return
        match order.WhichOneof("work"):
            case "sample":
                self._submit(order)
            case "cancel":
                ticket = order.cancel.sample_ticket
                self._engine.cancel(ticket)
                self._sample_began_s.pop(ticket, None)
                awaited = self._awaited_samples.pop(ticket, None)
                if awaited is not None and not awaited.decoded.cancel():
                    awaited.decoded.add_done_callback(lambda _: self._decoder.release(ticket))
                self._decoder.release(ticket)
            case "register_loss":
                self._register_loss(order)
            case "forget_losses":
                self._drop_losses(order)
            case str(work):
                model_id = getattr(order, work).model_id
                job = Job(order)
                if work == "run_pass":
                    job.decoded = self._decoder.start_pass(order)
                self._training.setdefault(model_id, deque()).append(job)
            case None:
                self._connection.send(
                    failure_report(order.ticket, ValueError("the order has no `work` field"))
                )

    def _submit(self, order: engine_protocol.Order) -> None:
        self._sample_began_s[order.ticket] = time.perf_counter()
        try:
            decoded = self._decoder.sample(order)
        except Exception as error:  # noqa: BLE001  reported as the failure of this order
            self._refuse_sample(order, error)
            return
        if isinstance(decoded, Future):
            self._awaited_samples[order.ticket] = AwaitedSample(order, decoded)
        else:
            self._submit_sample(order, decoded)

    def _submit_decoded(self, awaited: AwaitedSample) -> None:
        try:
            decoded = awaited.decoded.result()
        except Exception as error:  # noqa: BLE001  reported as the failure of this order
            self._refuse_sample(awaited.order, error)
            return
        self._submit_sample(awaited.order, decoded)

    def _submit_sample(self, order: engine_protocol.Order, decoded: DecodedSample) -> None:
        folder = order.sample.adapter_folder
        try:
            self._engine.submit(
                order.ticket,
                decoded.request,
                adapter=Path(folder) if folder else None,
                owner=order.sample.owner,
                streams=order.sample.streams,
                images=decoded.images,
            )
        except Exception as error:  # noqa: BLE001  reported as the failure of this order
            self._refuse_sample(order, error)

    def _refuse_sample(self, order: engine_protocol.Order, error: Exception) -> None:
        _exit_if_device_lost_or_full(error)
        self._sample_began_s.pop(order.ticket, None)
        self._decoder.release(order.ticket)
        self._connection.send(failure_report(order.ticket, error))

    def _register_loss(self, order: engine_protocol.Order) -> None:
        work = order.register_loss
        try:
            loss = decode_json(CreateCustomLossRequest, payload_bytes(work.payload))
            self._engine.register_loss(work.loss_id, loss.name, loss.inputs, loss.graph)
        except Exception as error:  # noqa: BLE001  reported as the failure of this order
            self._connection.send(failure_report(order.ticket, error))
        else:
            self._loss_sessions[work.loss_id] = work.session_id
            self._connection.send(done_report(order.ticket, b"{}", 0.0))

    def _drop_losses(self, order: engine_protocol.Order) -> None:
        session_id = order.forget_losses.session_id
        for loss_id in [one for one, of in self._loss_sessions.items() if of == session_id]:
            del self._loss_sessions[loss_id]
            self._engine.drop_loss(loss_id)
        self._connection.send(done_report(order.ticket, b"{}", 0.0))

    def _sample(self) -> None:
        all_finished = self._engine.advance(wait_for_reads=False)
        for ticket, outputs in itertools.groupby(
            sorted(self._engine.partial_outputs(), key=lambda output: output.ticket),
            key=lambda output: output.ticket,
        ):
            self._connection.send(partial_output_report(ticket, outputs))
        for finished in all_finished:
            self._decoder.release(finished.ticket)
            began_s = self._sample_began_s.pop(finished.ticket, time.perf_counter())
            outcome = finished.outcome
            if isinstance(outcome, Exception):
                _exit_if_device_lost_or_full(outcome)
                self._connection.send(failure_report(finished.ticket, outcome))
            else:
                result = encode_sample_response(outcome)
                self._connection.send(
                    done_report(finished.ticket, result, time.perf_counter() - began_s)
                )

    def _next_model(self) -> str | None:
        """
        The model that ran least recently, of those that can run.

        A model whose next order is a snapshot waits while too many copies wait to be written, and
        one whose next pass has images until they are decoded.
        """
        full = self._snapshots.is_full
        return next(
            (
                model_id
                for model_id, jobs in self._training.items()
                if _is_decoded(jobs[0]) and not (full and _is_snapshot(jobs[0]))
            ),
            None,
        )

    def _train_once(self) -> None:
        """Runs one operation of the next model, or one micro-batch."""
        model_id = self._next_model()
        if model_id is None:
            return
        if _is_pass(self._training[model_id][0]):
            self._run_micro_batch()
        else:
            self._run_operation(model_id)

    def _run_operation(self, model_id: str) -> None:
        job = self._training[model_id][0]
        if _is_snapshot(job):
            self._snapshot(model_id, job)
            return
        began_s = time.perf_counter()
        try:
            result = self._apply(job)
        except Exception as error:  # noqa: BLE001  reported as the failure of this order
            self._fail(model_id, job, error)
        else:
            compute_s = time.perf_counter() - began_s
            self._finish(model_id, job, done_report(job.order.ticket, result, compute_s))

    def _snapshot(self, model_id: str, job: Job) -> None:
        try:
            files = self._engine.snapshot_files(model_id)
            reserve = self._engine.settings.disk_reserve_bytes
            self._snapshots.write(job.order, files, reserve=reserve)
        except Exception as error:  # noqa: BLE001  reported as the failure of this order
            self._fail(model_id, job, error)
        else:
            self._remove(model_id, job)

    def _run_micro_batch(self) -> None:
        """Runs one micro-batch with data from all passes that are ready."""
        passes = self._ready_passes()
        if not passes:
            return
        queues = [
            ModelQueue(
                model_id=model_id,
                backward=jobs[0].order.run_pass.backward,
                lengths=[
                    length
                    for _, training_pass in _started(jobs)
                    for length in training_pass.waiting
                ],
            )
            for model_id, jobs in passes.items()
        ]
        slices = [
            (job, training_pass, taken)
            for model_id, count in self._mixer.next_batch(queues, self._batch_tokens())
            for job, training_pass, taken in _distribute(passes[model_id], count)
        ]
        # Models that got no data go to the end too, so that operations of other models run next.
        for model_id in passes:
            self._training.move_to_end(model_id)
        before = [sum(training_pass.waiting) for _, training_pass, _ in slices]
        began_s = time.perf_counter()
        try:
            self._engine.run_micro_batch(
                [(training_pass, count) for _, training_pass, count in slices]
            )
        except Exception as error:  # noqa: BLE001  fails the passes in this micro-batch only
            self._fail_micro_batch([job for job, _, _ in slices], error)
            return
        elapsed_s = time.perf_counter() - began_s
        left = [sum(training_pass.waiting) for _, training_pass, _ in slices]
        finished: list[str] = []
        tokens = sum(before) - sum(left)
        self._tokens_trained += tokens
        for (job, training_pass, _), had, has in zip(slices, before, left, strict=True):
            job.compute_s += elapsed_s * (had - has) / max(1, tokens)
            if not has:
                self._finish(training_pass.model_id, job, _pass_report(job, training_pass))
                finished.append(training_pass.model_id)
        if self._engine.sampling:
            # Both share the time of the device, which may still compute gradients.
            self._engine.wait()
            self._tokens_per_s = tokens / max(time.perf_counter() - began_s, 1e-6)
        # Run the next operation of these models now. It is usually the optimizer step, which then
        # waits neither for another micro-batch nor for a burst of samples.
        for model_id in finished:
            if self._training.get(model_id) and _is_operation(self._training[model_id][0]):
                self._start_next_pass(model_id)
                self._run_operation(model_id)

    def _fail_micro_batch(self, jobs: Sequence[Job], error: Exception) -> None:
        """A pass alone in the micro-batch fails; several are reported for separate retries."""
        if len(jobs) == 1:
            self._fail(_model_of(jobs[0]), jobs[0], error)
            return
        # If the batch was too large for the memory, each pass alone may still fit.
        _exit_if_device_lost(error)
        log.error("a micro-batch of %d requests failed", len(jobs), exc_info=error)
        # Gradients may be partly added, so the server rebuilds these models. Later passes of the
        # same models must wait for that too.
        for model_id in dict.fromkeys(_model_of(job) for job in jobs):
            for job in [job for job in self._training[model_id] if _is_pass(job)]:
                self._finish(model_id, job, shared_failure_report(job.order.ticket, error))

    def _ready_passes(self) -> dict[str, list[Job]]:
        """The checked passes at the head of each model's queue, least recently run model first."""
        alone = self._engine.settings.deterministic
        passes: dict[str, list[Job]] = {}
        for model_id in list(self._training):
            # The first adapter is loaded if necessary. Others join only if they are on the device,
            # so that no adapter is evicted for them.
            if passes and (alone or not self._engine.resident(model_id)):
                continue
            for job in _leading_passes(self._training[model_id], 1 if alone else None):
                if self._start_pass(model_id, job):
                    passes.setdefault(model_id, []).append(job)
        return passes

    def _start_next_pass(self, model_id: str) -> None:
        """
        Decodes and checks the next pass of a model while the device still computes.

        A pass that is refused is refused again in its turn, so that reports keep their order.
        """
        job = next((job for job in self._training[model_id] if _is_pass(job)), None)
        if job is not None and _is_decoded(job):
            with contextlib.suppress(Exception):
                self._decode_pass(model_id, job)

    def _start_pass(self, model_id: str, job: Job) -> bool:
        """Decodes and checks a pass. Returns False after reporting a failure."""
        try:
            self._decode_pass(model_id, job)
        except Exception as error:  # noqa: BLE001  reported as the failure of this order
            self._fail(model_id, job, error)
            return False
        return True

    def _decode_pass(self, model_id: str, job: Job) -> None:
        if job.training_pass is not None:
            return
        order = job.order.run_pass
        if job.decoded is None:
            decoded = self._decoder.text_pass(job.order)
        else:
            decoded = job.decoded.result()
        self._check_loss(decoded.work, order.session_id)
        job.training_pass = self._engine.begin_pass(
            model_id, decoded.work, backward=order.backward, images=decoded.images
        )
        job.decoded = None

    def _check_loss(self, work: ForwardBackwardInput, session_id: str) -> None:
        """Raises `UserFailure` if the pass names a custom loss of another session."""
        loss_id = (work.loss_fn_config or {}).get("loss_id")
        if isinstance(loss_id, str) and self._loss_sessions.get(loss_id) != session_id:
            raise unknown_custom_loss(loss_id)

    def _batch_tokens(self) -> int:
        """Tokens of the next micro-batch; fewer while sequences are being sampled."""
        limit = self._engine.pass_tokens
        if self._engine.settings.deterministic or not self._engine.sampling:
            return limit
        return max(
            1, min(limit, max(MIN_BATCH_TOKENS, int(self._tokens_per_s * MAX_MICRO_BATCH_S)))
        )

    def _finish(self, model_id: str, job: Job, report: engine_protocol.Report) -> None:
        """Sends the report and removes the job; its model goes to the end of the model order."""
        self._connection.send(report)
        self._remove(model_id, job)

    def _fail(self, model_id: str, job: Job, error: Exception) -> None:
        _exit_if_device_lost_or_full(error)
        self._finish(model_id, job, failure_report(job.order.ticket, error))

    def _remove(self, model_id: str, job: Job) -> None:
        if job.decoded is None:
            self._decoder.release(job.order.ticket)
        else:
            # It may still be running, if an earlier pass of the model failed.
            job.decoded.add_done_callback(lambda _: self._decoder.release(job.order.ticket))
        waiting = self._training.pop(model_id)
        waiting.remove(job)
        if waiting:
            self._training[model_id] = waiting

    def _apply(self, job: Job) -> bytes:
        """Runs an order other than a pass or snapshot and returns its encoded result."""
        engine = self._engine
        order = job.order
        match order.WhichOneof("work"):
            case "create":
                return self._create(order.create)
            case "optim_step":
                return self._optim_step(order.optim_step)
            case "save":
                save = order.save
                folder = Path(save.folder)
                folder.parent.mkdir(parents=True, exist_ok=True)
                size_bytes = engine.save(save.model_id, folder, optimizer=save.optimizer)
                return json.dumps({"size_bytes": size_bytes}).encode()
            case "load":
                load = order.load
                engine.load(load.model_id, Path(load.folder), optimizer=load.optimizer)
            case "restore":
                engine.restore(order.restore.model_id, Path(order.restore.folder))
            case "clear_gradients":
                engine.clear_gradients(order.clear_gradients.model_id)
            case "drop":
                if engine.has(order.drop.model_id):
                    engine.drop(order.drop.model_id)
        return b"{}"

    def _create(self, create: frames_pb2.Create) -> bytes:
        """The result has the size of a snapshot, so that large ones are written rarely."""
        # A model that is rebuilt from its log starts from scratch.
        if self._engine.has(create.model_id):
            self._engine.drop(create.model_id)
        lora = decode_json(LoraConfig, create.lora_config)
        optimizer = optimizer_config_from(json.loads(create.optimizer_config))
        self._engine.create(create.model_id, lora, optimizer)
        size = self._engine.snapshot_bytes(create.model_id)
        return json.dumps({"snapshot_bytes": size}).encode()

    def _optim_step(self, work: frames_pb2.OptimStep) -> bytes:
        try:
            metrics = self._engine.optim_step(work.model_id, _optim_params(work.payload))
        except UserFailure:
            # A refused step also clears the gradients. Otherwise they would be added to the next
            # batch or, if they are not finite, make every later step fail.
            self._engine.clear_gradients(work.model_id)
            raise
        return encode_json(OptimStepResponse(metrics=metrics))


def _optim_params(payload: frames_pb2.Payload) -> OptimParams:
    try:
        return decode_json(OptimStepRequest, payload_bytes(payload)).optim_params
    except WireError as error:
        # An older version may have accepted a request that does not fit the current types.
        raise UserFailure(str(error)) from error


def _model_of(job: Job) -> str:
    return str(job.order.run_pass.model_id)


def _is_pass(job: Job) -> bool:
    return job.order.WhichOneof("work") == "run_pass"


def _is_decoded(job: Job) -> bool:
    return job.decoded is None or job.decoded.done()


def _is_operation(job: Job) -> bool:
    return not _is_pass(job) and not _is_snapshot(job)


def _is_snapshot(job: Job) -> bool:
    return job.order.WhichOneof("work") == "snapshot"


def _leading_passes(waiting: Sequence[Job], limit: int | None) -> list[Job]:
    """The passes before the first other operation; all with gradients, or all without."""
    leading: list[Job] = []
    for job in waiting:
        if not _is_pass(job) or len(leading) == limit or not _is_decoded(job):
            break
        if leading and job.order.run_pass.backward != leading[0].order.run_pass.backward:
            break
        leading.append(job)
    return leading


def _started(jobs: Sequence[Job]) -> list[tuple[Job, Pass]]:
    return [(job, job.training_pass) for job in jobs if job.training_pass is not None]


def _distribute(jobs: Sequence[Job], count: int) -> Iterator[tuple[Job, Pass, int]]:
    """Distributes the next `count` data of a model over its passes, in order."""
    for job, training_pass in _started(jobs):
        if not count:
            return
        taken = min(count, len(training_pass.waiting))
        count -= taken
        yield job, training_pass, taken


def _pass_report(job: Job, training_pass: Pass) -> engine_protocol.Report:
    try:
        result = encode_forward_backward_output(training_pass.output())
    except Exception as error:  # noqa: BLE001  reported as the failure of this order
        return failure_report(job.order.ticket, error)
    return done_report(job.order.ticket, result, job.compute_s)


def _exit_if_device_lost(error: Exception) -> None:
    """Ends the process if it can no longer use the device; a new process can."""
    if is_device_lost(error):
        _exit(error)


def _exit_if_device_lost_or_full(error: Exception) -> None:
    """Also ends it if the device is out of memory: a new process starts with all memory free."""
    if is_device_lost(error) or is_out_of_memory(error):
        _exit(error)


def _exit(error: Exception) -> NoReturn:
    log.critical(
        "this process cannot use the device any longer, or the device is out of memory; exiting",
        exc_info=error,
    )
    os._exit(engine_protocol.DEVICE_LOST_STATUS)


@contextlib.contextmanager
def _locked(file: Path | None) -> Iterator[None]:
    """Holds the lock that engines on one CPU share. The system releases it if the process dies."""
    if file is None:
        yield
        return
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
