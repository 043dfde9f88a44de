"""
An engine as a process: orders come in over a socket, reports go out. Knows no SQL and no HTTP.

    python -m tinkex.engine.process --fd N --name NAME --folder FOLDER

One thread reads, so that a hung-up web process ends this one at once, whatever it computes; saves
are written whole or not at all. The other computes in turns: admit samples, decode bursts for as
long as the last part of training took, at most one training operation or one micro-batch, again.
Nobody waits for somebody else's whole step.
"""

import argparse
import contextlib
import fcntl
import itertools
import json
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NoReturn

from tinkex.engine import Engine, EngineSettings, reports
from tinkex.engine.adapters.checkpoints import memory_bytes
from tinkex.engine.device import is_broken, is_full
from tinkex.engine.snapshot_writer import SnapshotWriter, Written
from tinkex.engine.training.batch_mixer import Mixer, Queue
from tinkex.engine.training.passes import Pass
from tinkex.engine.training.request_checks import no_custom_loss
from tinkex.wire import engine_protocol
from tinkex.wire.codec import decode_json, encode_json
from tinkex.wire.custom_loss import CreateCustomLossRequest
from tinkex.wire.errors import UserFailure, WireError
from tinkex.wire.proto import frames_pb2
from tinkex.wire.protobuf import (
    decode_forward_backward_request,
    encode_forward_backward_output,
    encode_sample_response,
)
from tinkex.wire.redaction import RedactingFormatter
from tinkex.wire.sampling import SampleRequest
from tinkex.wire.training import (
    ForwardBackwardInput,
    LoraConfig,
    OptimParams,
    OptimStepRequest,
    OptimStepResponse,
    optimizer_config_from,
)

log = logging.getLogger("tinkex.engine.process")

#: Sampling and training take turns of about equal length, up to so many seconds.
LONGEST_DEBT_S = 1.0

#: How often sizes and counts are told while there is work.
STATS_S = 1.0

#: While samples run, a micro-batch takes about this long at most: so long they stand still.
SAMPLES_WAIT_S = 0.5
#: And has this many tokens at least, or training would crawl.
FEWEST_TOKENS = 256

#: Copies of models that wait to be written take this much of the host's memory, and one copy more.
COPIES_BYTES = 256 * 2**20


class Wire:
    """The socket to the web process."""

    def __init__(self, descriptor: int, roll: int | None = None) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._roll = roll
        self.inbox: queue.SimpleQueue[engine_protocol.Order | Written | AdapterRead] = (
            queue.SimpleQueue()
        )
        self._sending = threading.Lock()

    def listen(self) -> None:
        """Read orders for ever, in a thread of its own."""
        threading.Thread(target=self._read, name="tinkex-orders", daemon=True).start()

    def send(self, report: engine_protocol.Report) -> None:
        try:
            # Snapshots are answered by the thread that wrote them.
            with self._sending:
                self._socket.sendall(engine_protocol.frame(report))
        except OSError:
            self._leave()

    def _read(self) -> None:
        try:
            with self._socket.makefile("rb") as stream:
                while head := stream.read(engine_protocol.LENGTH_PREFIX.size):
                    body = stream.read(engine_protocol.body_length(head))
                    self.inbox.put(engine_protocol.Order.FromString(body))
        except ConnectionError:
            pass  # it died with reports of ours unread
        except Exception:
            log.exception("orders cannot be read any more")
        finally:
            self._leave()

    def _leave(self) -> None:
        """The web process is gone, so nobody can hear an answer: stop in the middle of anything."""
        if self._roll is not None:
            # For the next web process: this engine was well, and nothing killed it.
            with contextlib.suppress(OSError):
                os.pwrite(self._roll, engine_protocol.CLEAN_EXIT, 0)
        os._exit(0)


@dataclass(slots=True, eq=False)
class Job:
    """A training order and how far it has come."""

    order: engine_protocol.Order
    running: Pass | None = None
    compute_s: float = 0.0


class AdapterRead:
    """Samples waited for an adapter to be read, and it was: the worker need not wait any longer."""


class Worker:
    """The computing thread: an engine and what waits for it."""

    def __init__(self, engine: Engine, wire: Wire, *, turn_file: Path | None) -> None:
        self._engine = engine
        self._wire = wire
        self._turn_file = turn_file
        #: Training orders of each model, models in the order of their last turn.
        self._training: OrderedDict[str, deque[Job]] = OrderedDict()
        self._mixer = Mixer()
        self._loss_sessions: dict[str, str] = {}
        #: Of the last micro-batch.
        self._tokens_per_s = 0.0
        self._sample_began_s: dict[int, float] = {}
        #: Seconds of the last part of training, and of sampling since.
        self._trained_s = self._sampled_s = 0.0
        self._told_s = 0.0
        self._told: frames_pb2.Stats | None = None
        self._snapshots = SnapshotWriter(wire)
        #: Of copies that are not written yet.
        self._copies_bytes = 0

    def run(self) -> None:
        while True:
            self.turn()

    def turn(self) -> None:
        """One round: what arrived, a burst of samples, and a part of training if it is due."""
        self._admit()
        with _turn(self._turn_file):
            if self._can_sample():
                began_s = time.perf_counter()
                self._decode()
                self._sampled_s += time.perf_counter() - began_s
            # Samples get bursts until they had as much time as the last part of training.
            if self._next_model() and not (self._can_sample() and self._behind()):
                began_s = time.perf_counter()
                self._train_once()
                self._trained_s, self._sampled_s = time.perf_counter() - began_s, 0.0

    def _can_sample(self) -> bool:
        """Whether there are samples, and not only such that wait for an adapter to be read."""
        return self._engine.sampling and self._engine.awaited_read is None

    def _behind(self) -> bool:
        """Whether sampling is still owed time; a long operation is not paid back in full."""
        return self._sampled_s < min(self._trained_s, LONGEST_DEBT_S)

    def _admit(self) -> None:
        """Take in everything that has arrived; wait only when there is nothing else to do."""
        # Asked once: a read that ends from here on still wakes this thread.
        reading = self._engine.awaited_read
        can_sample = self._engine.sampling and reading is None
        idle = not can_sample and self._next_model() is None
        self._tell_stats(idle)
        if idle and reading is not None:
            reading.add_done_callback(lambda _: self._wire.inbox.put(AdapterRead()))
        with contextlib.suppress(queue.Empty):
            self._sort(self._wire.inbox.get(block=idle))
            while True:
                self._sort(self._wire.inbox.get_nowait())

    def _tell_stats(self, idle: bool) -> None:
        """Now and then while there is work, and once it has ended."""
        now_s = time.monotonic()
        if not idle and now_s - self._told_s < STATS_S:
            return
        self._told_s = now_s
        waiting = sum(len(jobs) for jobs in self._training.values())
        stats = frames_pb2.Stats(training_waiting=waiting, **asdict(self._engine.stats()))
        if stats != self._told:
            self._told = stats
            self._wire.send(engine_protocol.Report(stats=stats))

    def _sort(self, order: engine_protocol.Order | Written | AdapterRead) -> None:
        if isinstance(order, Written):
            self._copies_bytes -= order.size_bytes
            return
        if isinstance(order, AdapterRead):
            return
        match order.WhichOneof("work"):
            case "sample":
                self._submit(order)
            case "cancel":
                self._engine.cancel(order.cancel.sample_ticket)
                self._sample_began_s.pop(order.cancel.sample_ticket, None)
            case "register_loss":
                self._register_loss(order)
            case "forget_losses":
                self._forget_losses(order)
            case str(work):
                model_id = getattr(order, work).model_id
                self._training.setdefault(model_id, deque()).append(Job(order))
            case None:
                self._wire.send(reports.failed(order.ticket, ValueError("an order without work")))

    def _submit(self, order: engine_protocol.Order) -> None:
        folder = order.sample.adapter_folder
        try:
            request = decode_json(SampleRequest, _bytes(order.sample.payload))
            self._sample_began_s[order.ticket] = time.perf_counter()
            self._engine.submit(
                order.ticket,
                request,
                adapter=Path(folder) if folder else None,
                owner=order.sample.owner,
                streams=order.sample.streams,
            )
        except Exception as error:  # noqa: BLE001  every failure is an answer to one order
            _exit_if_device_lost_or_full(error)
            self._sample_began_s.pop(order.ticket, None)
            self._wire.send(reports.failed(order.ticket, error))

    def _register_loss(self, order: engine_protocol.Order) -> None:
        work = order.register_loss
        try:
            asked = decode_json(CreateCustomLossRequest, _bytes(work.payload))
            self._engine.register_loss(work.loss_id, asked.name, asked.inputs, asked.graph)
        except Exception as error:  # noqa: BLE001  every failure is an answer to one order
            self._wire.send(reports.failed(order.ticket, error))
        else:
            self._loss_sessions[work.loss_id] = work.session_id
            self._wire.send(reports.done(order.ticket, b"{}", 0.0))

    def _forget_losses(self, order: engine_protocol.Order) -> None:
        session_id = order.forget_losses.session_id
        for loss_id in [one for one, of in self._loss_sessions.items() if of == session_id]:
            del self._loss_sessions[loss_id]
            self._engine.forget_loss(loss_id)
        self._wire.send(reports.done(order.ticket, b"{}", 0.0))

    def _decode(self) -> None:
        answered = self._engine.advance(wait_for_reads=False)
        for ticket, grown in itertools.groupby(
            sorted(self._engine.grown(), key=lambda grown: grown.ticket),
            key=lambda grown: grown.ticket,
        ):
            self._wire.send(reports.grown(ticket, grown))
        for finished in answered:
            began_s = self._sample_began_s.pop(finished.ticket, time.perf_counter())
            outcome = finished.outcome
            if isinstance(outcome, Exception):
                _exit_if_device_lost_or_full(outcome)
                self._wire.send(reports.failed(finished.ticket, outcome))
            else:
                result = encode_sample_response(outcome)
                self._wire.send(
                    reports.done(finished.ticket, result, time.perf_counter() - began_s)
                )

    def _next_model(self) -> str | None:
        """
        The model whose last turn is longest ago, of those that can go on.

        One whose snapshot is next waits while there are too many copies. The others do not.
        """
        full = self._copies_bytes >= COPIES_BYTES
        return next(
            (
                model_id
                for model_id, jobs in self._training.items()
                if not (full and _is_snapshot(jobs[0]))
            ),
            None,
        )

    def _train_once(self) -> None:
        """One operation of the model whose turn it is, or one micro-batch."""
        model_id = self._next_model()
        if model_id is None:
            return
        if _is_pass(self._training[model_id][0]):
            self._run_passes()
        else:
            self._operate(model_id)

    def _operate(self, model_id: str) -> None:
        job = self._training[model_id][0]
        if _is_snapshot(job):
            self._snapshot(model_id, job)
            return
        began_s = time.perf_counter()
        try:
            result = self._train(job)
        except Exception as error:  # noqa: BLE001  every failure is an answer to one order
            _exit_if_device_lost_or_full(error)
            self._finish(model_id, job, reports.failed(job.order.ticket, error))
        else:
            compute_s = time.perf_counter() - began_s
            self._finish(model_id, job, reports.done(job.order.ticket, result, compute_s))

    def _snapshot(self, model_id: str, job: Job) -> None:
        """Copies the model now; another thread writes the copy while everybody goes on."""
        order = job.order
        try:
            copied = self._engine.copy(model_id, {})
        except Exception as error:  # noqa: BLE001  every failure is an answer to one order
            _exit_if_device_lost_or_full(error)
            self._finish(model_id, job, reports.failed(order.ticket, error))
            return
        self._copies_bytes += memory_bytes(copied)
        self._snapshots.put(order.ticket, Path(order.snapshot.folder), copied)
        self._over(model_id, job)

    def _run_passes(self) -> None:
        """One micro-batch, of rows from every model that has a pass in front and can join."""
        passes = self._open_passes()
        if not passes:
            return
        queues = [
            Queue(
                model_id=model_id,
                backward=jobs[0].order.run_pass.backward,
                lengths=[length for _, running in _begun(jobs) for length in running.waiting],
            )
            for model_id, jobs in passes.items()
        ]
        cuts = [
            (job, running, taken)
            for model_id, count in self._mixer.next_batch(queues, self._batch_tokens())
            for job, running, taken in _spread(passes[model_id], count)
        ]
        # Their turn is over even for those who got nothing: operations of others come next.
        for model_id in passes:
            self._training.move_to_end(model_id)
        before = [sum(running.waiting) for _, running, _ in cuts]
        began_s = time.perf_counter()
        try:
            self._engine.run_together([(running, count) for _, running, count in cuts])
        except Exception as error:  # noqa: BLE001  it fails those who took part, and nobody else
            self._fail_together([job for job, _, _ in cuts], error)
            return
        elapsed_s = time.perf_counter() - began_s
        left = [sum(running.waiting) for _, running, _ in cuts]
        self._tokens_per_s = (sum(before) - sum(left)) / max(elapsed_s, 1e-6)
        for (job, running, _), had, has in zip(cuts, before, left, strict=True):
            job.compute_s += elapsed_s * (had - has) / max(1, sum(before) - sum(left))
            if not has:
                self._finish(running.model_id, job, _answered(job, running))

    def _fail_together(self, took_part: Sequence[Job], error: Exception) -> None:
        """A micro-batch failed: one that was alone in it is to blame; several are tried apart."""
        if len(took_part) == 1:
            (job,) = took_part
            _exit_if_device_lost_or_full(error)
            self._finish(_model_of(job), job, reports.failed(job.order.ticket, error))
            return
        # A batch of several that did not fit may fit in parts.
        _exit_if_device_lost(error)
        log.error("a micro-batch of %d requests failed", len(took_part), exc_info=error)
        # With those behind them: gradients may be half added, so their models are built again.
        for model_id in dict.fromkeys(_model_of(job) for job in took_part):
            for job in [job for job in self._training[model_id] if _is_pass(job)]:
                self._finish(model_id, job, reports.muddled(job.order.ticket, error))

    def _open_passes(self) -> dict[str, list[Job]]:
        """The passes in front of each model's line, checked and ready; models in their turn."""
        alone = self._engine.settings.deterministic
        passes: dict[str, list[Job]] = {}
        for model_id in list(self._training):
            # The first in turn comes in from wherever it is; others join if nobody has to leave.
            if passes and (alone or not self._engine.resident(model_id)):
                continue
            for job in _front_passes(self._training[model_id], 1 if alone else None):
                if self._begin(model_id, job):
                    passes.setdefault(model_id, []).append(job)
        return passes

    def _begin(self, model_id: str, job: Job) -> bool:
        """Whether a pass can run; if not, its order is answered."""
        if job.running is not None:
            return True
        order = job.order.run_pass
        try:
            request, _ = decode_forward_backward_request(_bytes(order.payload))
            self._check_loss(request.forward_backward_input, order.session_id)
            job.running = self._engine.begin_pass(
                model_id, request.forward_backward_input, backward=order.backward
            )
        except Exception as error:  # noqa: BLE001  every failure is an answer to one order
            _exit_if_device_lost_or_full(error)
            self._finish(model_id, job, reports.failed(job.order.ticket, error))
            return False
        return True

    def _check_loss(self, work: ForwardBackwardInput, session_id: str) -> None:
        """A loss of another session is not there."""
        loss_id = (work.loss_fn_config or {}).get("loss_id")
        if isinstance(loss_id, str) and self._loss_sessions.get(loss_id) != session_id:
            raise no_custom_loss(loss_id)

    def _batch_tokens(self) -> int:
        """A full micro-batch, or a short one while samples wait for it."""
        most = self._engine.max_batch_tokens
        if self._engine.settings.deterministic or not self._engine.sampling:
            return most
        return max(1, min(most, max(FEWEST_TOKENS, int(self._tokens_per_s * SAMPLES_WAIT_S))))

    def _finish(self, model_id: str, job: Job, report: engine_protocol.Report) -> None:
        """Answer an order, and let its model's line go on at the end of the models' line."""
        self._wire.send(report)
        self._over(model_id, job)

    def _over(self, model_id: str, job: Job) -> None:
        waiting = self._training.pop(model_id)
        waiting.remove(job)
        if waiting:
            self._training[model_id] = waiting

    def _train(self, job: Job) -> bytes:
        """What came of an order that is no pass."""
        engine = self._engine
        order = job.order
        match order.WhichOneof("work"):
            case "create":
                self._create(order.create)
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

    def _create(self, create: frames_pb2.Create) -> None:
        # A model that is built again from its log starts from nothing.
        if self._engine.has(create.model_id):
            self._engine.drop(create.model_id)
        lora = decode_json(LoraConfig, create.lora_config)
        optimizer = optimizer_config_from(json.loads(create.optimizer_config))
        self._engine.create(create.model_id, lora, optimizer)

    def _optim_step(self, work: frames_pb2.OptimStep) -> bytes:
        try:
            metrics = self._engine.optim_step(work.model_id, _optim_params(work.payload))
        except UserFailure:
            # A refused step takes the gradients with it: left behind, they would be added to
            # the next batch's, or, when they are not finite, stop the model for good.
            self._engine.clear_gradients(work.model_id)
            raise
        return encode_json(OptimStepResponse(metrics=metrics))


def _optim_params(payload: frames_pb2.Payload) -> OptimParams:
    try:
        return decode_json(OptimStepRequest, _bytes(payload)).optim_params
    except WireError as error:
        # What an older version took in may not fit the types of this one.
        raise UserFailure(str(error)) from error


def _model_of(job: Job) -> str:
    return str(job.order.run_pass.model_id)


def _is_pass(job: Job) -> bool:
    return job.order.WhichOneof("work") == "run_pass"


def _is_snapshot(job: Job) -> bool:
    return job.order.WhichOneof("work") == "snapshot"


def _front_passes(waiting: Sequence[Job], most: int | None) -> list[Job]:
    """The passes before the first other operation, all with gradients or all without."""
    front: list[Job] = []
    for job in waiting:
        if not _is_pass(job) or len(front) == most:
            break
        if front and job.order.run_pass.backward != front[0].order.run_pass.backward:
            break
        front.append(job)
    return front


def _begun(jobs: Sequence[Job]) -> list[tuple[Job, Pass]]:
    return [(job, job.running) for job in jobs if job.running is not None]


def _spread(jobs: Sequence[Job], count: int) -> Iterator[tuple[Job, Pass, int]]:
    """The next `count` rows of a model, pass after pass."""
    for job, running in _begun(jobs):
        if not count:
            return
        taken = min(count, len(running.waiting))
        count -= taken
        yield job, running, taken


def _answered(job: Job, running: Pass) -> engine_protocol.Report:
    try:
        result = encode_forward_backward_output(running.output())
    except Exception as error:  # noqa: BLE001  every failure is an answer to one order
        return reports.failed(job.order.ticket, error)
    return reports.done(job.order.ticket, result, job.compute_s)


def _bytes(payload: frames_pb2.Payload) -> bytes:
    if payload.WhichOneof("source") == "file":
        return Path(payload.file).read_bytes()
    return payload.inline


def _exit_if_device_lost(error: Exception) -> None:
    """Ends the process if only another one can use the device now."""
    if is_broken(error):
        _exit(error)


def _exit_if_device_lost_or_full(error: Exception) -> None:
    """The same when it has no memory left: another process begins with all of it."""
    if is_broken(error) or is_full(error):
        _exit(error)


def _exit(error: Exception) -> NoReturn:
    log.critical("the device is broken for this process, or full", exc_info=error)
    os._exit(engine_protocol.DEVICE_LOST_STATUS)


@contextlib.contextmanager
def _turn(file: Path | None) -> Iterator[None]:
    """Hold the turn that engines on one processor share; the system frees it if we die."""
    if file is None:
        yield
        return
    with file.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _begin_log() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(RedactingFormatter("%(asctime)s engine %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.INFO)


def parser() -> argparse.ArgumentParser:
    """Options that are settings of the engine have their names. Without one the default counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    for name in (
        "--threads",
        "--memory-bytes",
        "--adapter-bytes",
        "--kv-tokens",
        "--max-batch-tokens",
        "--max-sequences",
        "--idle-adapters",
        "--host-bytes",
    ):
        parser.add_argument(name, type=int)
    parser.add_argument("--prefix-cache", action=argparse.BooleanOptionalAction)
    parser.add_argument("--spill-folder", type=Path)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--turn-file", type=Path)
    parser.add_argument("--roll-fd", type=int)
    return parser


def settings_of(options: argparse.Namespace) -> EngineSettings:
    """The settings that were given; the others keep their defaults."""
    names = {field.name for field in fields(EngineSettings)}
    given = {name: value for name, value in vars(options).items() if name in names}
    return EngineSettings(**{name: value for name, value in given.items() if value is not None})


def main() -> None:
    options = parser().parse_args()
    _begin_log()
    # A service manager tells all processes to stop at once. The web process then finishes what it
    # can, with this one, and hangs up.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    wire = Wire(options.fd, options.roll_fd)
    wire.listen()
    log.info("loading %s from %s", options.name, options.folder)
    began_s = time.perf_counter()
    try:
        engine = Engine(settings_of(options))
    except Exception as error:
        log.exception("%s cannot be loaded", options.name)
        refused = frames_pb2.Refused(message=f"{options.name} cannot be loaded: {error}")
        wire.send(engine_protocol.Report(refused=refused))
        return
    log.info("loaded %s in %.1f s", options.name, time.perf_counter() - began_s)
    facts = engine.facts
    wire.send(
        engine_protocol.Report(
            ready=frames_pb2.Ready(
                arch=facts.arch,
                max_context_length=facts.max_context_length,
                vocab_size=facts.vocab_size,
                device=str(facts.device),
                dtype=str(facts.dtype),
            )
        )
    )
    # Engines on a device of their own do not stand in each other's way.
    turn_file = options.turn_file if facts.device.startswith("cpu") else None
    Worker(engine, wire, turn_file=turn_file).run()


if __name__ == "__main__":
    main()
