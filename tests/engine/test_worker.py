"""The worker loop, round by round: which orders each micro-batch completes."""

import contextlib
import dataclasses
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from server.api.test_custom_losses import loss
from tinkex.engine import Engine, EngineSettings, connection, snapshot_writer
from tinkex.engine.adapters import checkpoints
from tinkex.engine.adapters.checkpoints import Files, SavedAdapter, read_adapter, write
from tinkex.engine.connection import Connection
from tinkex.engine.device import is_device_lost, is_out_of_memory
from tinkex.engine.sampling.interface import Finished
from tinkex.engine.worker import Worker
from tinkex.server.store.storage_health import os_error_in, storage_problem
from tinkex.wire import engine_protocol
from tinkex.wire.codec import encode_json
from tinkex.wire.inputs import Datum, ModelInput
from tinkex.wire.proto import frames_pb2
from tinkex.wire.protobuf import decode_forward_backward_output, encode_forward_backward_request
from tinkex.wire.sampling import SampleRequest, SamplingParams
from tinkex.wire.training import ForwardBackwardInput, ForwardBackwardRequest


class Rounds:
    """A worker that runs one round at a time, and its reports."""

    def __init__(self, engine: Engine) -> None:
        self._ours, theirs = socket.socketpair()
        self._theirs = theirs.detach()
        self.worker = Worker(engine, Connection(self._theirs), compute_lock=None)
        self._stream = self._ours.makefile("rb")
        self._tickets = 0

    def order(self, **work: object) -> int:
        self._tickets += 1
        self.worker._accept(engine_protocol.Order(ticket=self._tickets, **work))  # type: ignore[arg-type]
        return self._tickets

    def train(self) -> dict[int, engine_protocol.Report]:
        """Runs one piece of training; returns the reports by ticket."""
        return self._reports_of(self.worker._train_once)

    def whole_round(self) -> dict[int, engine_protocol.Report]:
        """Runs one whole round; returns the reports by ticket."""
        return self._reports_of(self.worker.run_once)

    def _reports_of(self, act: Callable[[], None]) -> dict[int, engine_protocol.Report]:
        act()
        # Marks the end of the reports of this round.
        self.worker._connection.send(engine_protocol.Report(ticket=0))
        reports = {}
        while (report := self._report()).WhichOneof("body"):
            if report.ticket:  # stats have no ticket
                reports[report.ticket] = report
        return reports

    def _report(self) -> engine_protocol.Report:
        head = self._stream.read(engine_protocol.LENGTH_PREFIX.size)
        return engine_protocol.Report.FromString(
            self._stream.read(engine_protocol.body_length(head))
        )

    def create(self, *model_ids: str) -> None:
        for model_id in model_ids:
            create = frames_pb2.Create(
                model_id=model_id,
                lora_config=b'{"rank":4,"seed":1}',
                optimizer_config=b'{"type":"adamw"}',
            )
            self.order(create=create)
            self.train()

    def close(self) -> None:
        self._stream.close()
        self._ours.close()
        self.worker._connection._socket.close()


@pytest.fixture(scope="module")
def rounds_on(tiny_folder: Path) -> Callable[[bool], Rounds]:
    made: dict[bool, Engine] = {}

    def get(deterministic: bool) -> Rounds:
        if deterministic not in made:
            settings = EngineSettings(
                name="tiny",
                folder=tiny_folder,
                device="cpu",
                kv_tokens=512,
                max_batch_tokens=40,
                deterministic=deterministic,
            )
            made[deterministic] = Engine(settings)
        return Rounds(made[deterministic])

    return get


@pytest.fixture
def rounds(rounds_on: Callable[[bool], Rounds]) -> Iterator[Rounds]:
    rounds = rounds_on(False)
    rounds.create("a", "b", "c")
    yield rounds
    rounds.close()


def passes(
    model_id: str, rows: int, tokens: int, *, backward: bool = True, loss: str = "cross_entropy"
) -> frames_pb2.Pass:
    datum = Datum(
        model_input=ModelInput.from_ints([5] * tokens),
        loss_fn_inputs={"target_tokens": [6] * tokens, "weights": [1.0] * tokens},
    )
    work = ForwardBackwardInput._of([datum] * rows, loss, None)
    body = encode_forward_backward_request(ForwardBackwardRequest(work, model_id, 1))
    payload = frames_pb2.Payload(inline=body)
    return frames_pb2.Pass(model_id=model_id, payload=payload, backward=backward)


def step(model_id: str) -> frames_pb2.OptimStep:
    body = json.dumps({"model_id": model_id, "seq_id": 1, "adam_params": {}}).encode()
    return frames_pb2.OptimStep(model_id=model_id, payload=frames_pb2.Payload(inline=body))


def test_small_passes_of_several_models_are_one_micro_batch(rounds: Rounds) -> None:
    tickets = [rounds.order(run_pass=passes(name, 2, 4)) for name in "abc"]
    tickets.append(rounds.order(run_pass=passes("a", 1, 4)))  # the next part of the same batch
    reports = rounds.train()
    assert sorted(reports) == sorted(tickets)
    losses = [
        decode_forward_backward_output(reports[ticket].done.result).metrics["loss:sum"]
        for ticket in tickets
    ]
    # The models start with equal weights, so equal data have equal losses, and half the data half.
    assert losses == pytest.approx([losses[0], losses[0], losses[0], losses[0] / 2], rel=1e-5)
    assert sum(reports[ticket].done.compute_s for ticket in tickets) > 0


def test_a_large_pass_is_split_and_a_small_one_does_not_wait_for_it(rounds: Rounds) -> None:
    large = rounds.order(run_pass=passes("a", 12, 10))
    small = rounds.order(run_pass=passes("b", 1, 10))
    assert list(rounds.train()) == [small]
    later = [list(rounds.train()) for _ in range(3)]
    assert later == [[], [], [large]]


def test_a_step_waits_for_earlier_passes_and_delays_later_ones(rounds: Rounds) -> None:
    first = rounds.order(run_pass=passes("a", 1, 4))
    stepped = rounds.order(optim_step=step("a"))
    second = rounds.order(run_pass=passes("a", 1, 4))
    other = rounds.order(run_pass=passes("b", 1, 4))
    assert list(rounds.train()) == [first, other, stepped]
    assert list(rounds.train()) == [second]


def test_the_optimizer_step_behind_a_small_pass_waits_for_no_other_batch(rounds: Rounds) -> None:
    rounds.order(run_pass=passes("a", 3, 40))
    small = rounds.order(run_pass=passes("b", 1, 4))
    optim = rounds.order(optim_step=step("b"))
    assert sorted(rounds.train()) == [small, optim]


def test_an_operation_is_not_delayed_by_many_passes_of_another_model(rounds: Rounds) -> None:
    rounds.order(run_pass=passes("a", 8, 20))
    rounds.order(run_pass=passes("b", 1, 4))
    rounds.train()  # a was served many tokens, b few
    many = [rounds.order(run_pass=passes("b", 1, 4)) for _ in range(40)]
    stepped = rounds.order(optim_step=step("c"))
    answered: list[int] = []
    for _ in range(3):
        answered += rounds.train()
    assert stepped in answered
    assert set(answered) & set(many)


def test_passes_without_gradients_run_in_separate_batches(rounds: Rounds) -> None:
    backward = rounds.order(run_pass=passes("a", 1, 4))
    forward = rounds.order(run_pass=passes("b", 1, 4, backward=False))
    assert list(rounds.train()) == [backward]
    assert list(rounds.train()) == [forward]


def test_a_refused_pass_is_answered_and_the_others_run(rounds: Rounds) -> None:
    bad = rounds.order(run_pass=passes("a", 1, 4, loss="no_such_loss"))
    good = rounds.order(run_pass=passes("b", 1, 4))
    reports = rounds.train()
    assert reports[bad].failed.category == "user"
    assert reports[good].done.result


def test_a_failed_batch_of_one_fails_its_request_and_a_shared_batch_is_retried(
    rounds: Rounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_cuts: object) -> None:
        raise RuntimeError("half-way")

    monkeypatch.setattr(rounds.worker._engine, "run_micro_batch", fail)
    shared = [rounds.order(run_pass=passes(name, 1, 4)) for name in "aab"]
    # Its model may have been changed by the failed batch, so it is retried as well.
    behind = rounds.order(run_pass=passes("a", 1, 4, backward=False))
    reports = rounds.train()
    assert sorted(reports) == sorted([*shared, behind])
    assert {report.failed.category for report in reports.values()} == {
        engine_protocol.SHARED_FAILURE
    }
    alone = rounds.order(run_pass=passes("a", 1, 4))
    failed = rounds.train()[alone].failed
    assert failed.category == "server"
    assert "half-way" in failed.message


def test_device_lost_and_out_of_memory_are_distinguished() -> None:
    assert is_device_lost(torch.AcceleratorError("CUDA error: device-side assert triggered"))
    # As seen on a GPU (`benchmarks/check_gpu_recovery.py`): it has no error type of its own.
    assert is_device_lost(
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `c`")
    )
    full = torch.OutOfMemoryError("CUDA out of memory")
    assert is_out_of_memory(full)
    assert not is_device_lost(full)
    assert not is_device_lost(RuntimeError("a bug"))
    assert not is_device_lost(ValueError("a bug"))


class Exited(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    statuses: list[int] = []

    def exit_(status: int) -> NoReturn:
        statuses.append(status)
        raise Exited

    monkeypatch.setattr(os, "_exit", exit_)
    return statuses


LOST = RuntimeError("CUDA error: device-side assert triggered")
FULL = torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("error", [LOST, FULL, ValueError("a bug")])
def test_building_a_failure_report_never_ends_the_process(
    error: Exception, exits: list[int]
) -> None:
    assert str(error) in connection.failure_report(1, error).failed.message
    assert str(error) in connection.shared_failure_report(1, error).failed.message
    assert not exits


def test_device_lost_ends_the_process_and_out_of_memory_only_for_a_single_request(
    rounds: Rounds, exits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails_with(error: Exception) -> None:
        def fail(*_: object, **__: object) -> NoReturn:
            raise error

        for name in ("run_micro_batch", "optim_step", "snapshot_files", "submit"):
            monkeypatch.setattr(rounds.worker._engine, name, fail)

    sample = frames_pb2.Sample(payload=frames_pb2.Payload(inline=SAMPLE))
    for error in (LOST, FULL):
        fails_with(error)
        for work in (
            {"run_pass": passes("a", 1, 4)},
            {"optim_step": step("a")},
            {"snapshot": frames_pb2.Snapshot(model_id="a", folder="nowhere")},
            {"sample": sample},
        ):
            exits.clear()
            with contextlib.suppress(Exited):
                rounds.order(**work)
                rounds.train()
            assert exits == [engine_protocol.DEVICE_LOST_STATUS]
            rounds.worker._training.clear()
    exits.clear()
    tickets = [rounds.order(run_pass=passes(name, 1, 4)) for name in "ab"]
    assert sorted(rounds.train()) == tickets  # retried separately: each may fit alone
    fails_with(LOST)
    for name in "ab":
        rounds.order(run_pass=passes(name, 1, 4))
    with pytest.raises(Exited):
        rounds.train()
    rounds.worker._training.clear()


SAMPLE = encode_json(
    SampleRequest(
        prompt=ModelInput.from_ints([1, 2, 3]),
        sampling_params=SamplingParams(max_tokens=2, stop=[]),
        num_samples=1,
    )
)


class SlowDisk:
    """Blocks writes of snapshots until they are released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.released = threading.Semaphore(0)
        self.written: list[str] = []

        def slow(files: Files, folder: Path, *, reserve: int) -> int:
            assert self.released.acquire(timeout=30)
            self.written.append(folder.name)
            return write(files, folder, reserve=reserve)

        monkeypatch.setattr(snapshot_writer, "write_files", slow)


@pytest.mark.parametrize("most_bytes", [2**28, 1])
def test_snapshots_wait_for_a_slow_disk_but_other_work_continues(
    rounds: Rounds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_bytes: int
) -> None:
    monkeypatch.setattr(snapshot_writer, "MAX_PENDING_BYTES", most_bytes)
    disk = SlowDisk(monkeypatch)
    snapshots = {
        name: rounds.order(snapshot=frames_pb2.Snapshot(model_id=name, folder=str(tmp_path / name)))
        for name in "ab"
    }
    behind = {name: rounds.order(run_pass=passes(name, 1, 4)) for name in "abc"}
    sample = rounds.order(sample=frames_pb2.Sample(payload=frames_pb2.Payload(inline=SAMPLE)))
    reports: dict[int, engine_protocol.Report] = {}

    def work_on() -> None:
        for _ in range(8):
            if rounds.worker._engine.sampling or rounds.worker._next_model():
                reports.update(rounds.whole_round())

    computing = threading.Thread(target=work_on, daemon=True)
    computing.start()
    computing.join(15)
    stood_still = computing.is_alive()
    at_once = set(reports)
    disk.released.release(2)
    computing.join(15)
    assert not stood_still, "the compute thread waits for the disk"
    # With memory for one copy, only the pass of b waits, because it comes after its snapshot.
    waits = set() if most_bytes > 1 else {behind["b"]}
    assert at_once == {sample, *behind.values()} - waits
    while rounds.worker._snapshots.pending_bytes or rounds.worker._next_model():
        reports.update(rounds.whole_round())
    assert reports.keys() == {sample, *snapshots.values(), *behind.values()}
    assert disk.written == ["a", "b"]
    assert all(report.WhichOneof("body") == "done" for report in reports.values())
    for name in "ab":
        rounds.worker._engine.restore(name, tmp_path / name)


def test_without_host_memory_for_a_copy_a_snapshot_is_written_before_other_work(
    rounds: Rounds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_writer, "MAX_PENDING_BYTES", 1)
    monkeypatch.setattr(snapshot_writer, "MAX_COPY_FRACTION", 0.0)
    engine = rounds.worker._engine
    weights = engine._adapters["a"].master.clone()
    ticket = rounds.order(snapshot=frames_pb2.Snapshot(model_id="a", folder=str(tmp_path / "a")))
    # The report is there at once: no thread writes.
    (report,) = rounds.train().values()
    assert report.ticket == ticket
    written = json.loads(report.done.result)["size_bytes"]
    assert rounds.worker._snapshots.pending_bytes == 0
    engine._adapters["a"].master.zero_()
    engine.restore("a", tmp_path / "a")
    assert torch.equal(engine._adapters["a"].master, weights)
    # What the server was told when the model was made, without names and shapes.
    told = engine.snapshot_bytes("a")
    assert told == 12 * len(weights)
    assert told < written < told + 50_000


def test_a_snapshot_that_the_disk_has_no_space_for_is_not_begun(
    rounds: Rounds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = rounds.worker._engine
    full = dataclasses.replace(engine.settings, disk_reserve_bytes=2**60)
    monkeypatch.setattr(engine, "settings", full)
    folder = tmp_path / "a"
    for work in (
        {"snapshot": frames_pb2.Snapshot(model_id="a", folder=str(folder))},
        {"save": frames_pb2.Save(model_id="a", folder=str(folder), optimizer=True)},
    ):
        ticket = rounds.order(**work)
        reports: dict[int, engine_protocol.Report] = {}
        while ticket not in reports:
            reports |= rounds.whole_round()
        failed = reports[ticket].failed
        assert failed.category == "server"
        assert "No space left on device: it takes 1" in failed.message
        assert "are free, of which 1152921504.6 GB are reserved" in failed.message
        problem = storage_problem(os_error_in(failed.message))
        assert problem is not None
        assert problem.kind == "full"  # the server waits with a save
    assert not [*tmp_path.iterdir()]


def test_training_continues_while_an_adapter_is_read_from_a_slow_disk(
    rounds: Rounds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = rounds.worker._engine
    engine.save("a", tmp_path / "saved", optimizer=False)
    released = threading.Event()

    def slow(folder: Path, known: Iterable[str]) -> SavedAdapter:
        assert released.wait(30)
        return read_adapter(folder, known)

    monkeypatch.setattr(checkpoints, "read_adapter", slow)
    payload = frames_pb2.Payload(inline=SAMPLE)
    folder = str(tmp_path / "saved")
    sample = rounds.order(sample=frames_pb2.Sample(payload=payload, adapter_folder=folder))
    # Sampling is owed a second, but cannot use it.
    rounds.worker._trained_s, rounds.worker._sampled_s = 1.0, 0.0
    trained = [rounds.order(run_pass=passes("a", 1, 40)) for _ in range(5)]
    took_s, reports = [], []
    for _ in trained:
        began_s = time.monotonic()
        reports += list(rounds.whole_round())
        took_s.append(time.monotonic() - began_s)
    assert reports == trained
    assert min(took_s) < 0.2  # no round waits for the disk
    # Only the read is left: the thread blocks, and wakes when it is done.
    asked = 0
    advance = engine.advance

    def counted(*, wait_for_reads: bool = True) -> list[Finished]:
        nonlocal asked
        asked += 1
        return advance(wait_for_reads=wait_for_reads)

    monkeypatch.setattr(engine, "advance", counted)
    threading.Timer(0.3, released.set).start()
    answered: dict[int, engine_protocol.Report] = {}
    while sample not in answered:
        answered |= rounds.whole_round()
    assert asked < 5
    assert answered[sample].WhichOneof("body") == "done"


def test_deterministic_engines_never_mix(rounds_on: Callable[[bool], Rounds]) -> None:
    rounds = rounds_on(True)
    rounds.create("a", "b")
    tickets = [rounds.order(run_pass=passes(name, 1, 4)) for name in ("a", "b", "a")]
    assert [list(rounds.train()) for _ in tickets] == [[ticket] for ticket in tickets]
    rounds.close()


def test_losses_of_a_session_are_dropped_together(rounds: Rounds) -> None:
    def custom(model_id: str, session_id: str, loss_id: str) -> engine_protocol.Report:
        inputs = {"target_tokens": [1] * 3, "weights": [1.0] * 3}
        datum = Datum(model_input=ModelInput.from_ints([1, 2, 3]), loss_fn_inputs=inputs)
        work = ForwardBackwardInput._of([datum], "custom", {"loss_id": loss_id})
        asked = ForwardBackwardRequest(forward_backward_input=work, model_id=model_id, seq_id=1)
        payload = frames_pb2.Payload(inline=encode_forward_backward_request(asked))
        order = frames_pb2.Pass(model_id=model_id, payload=payload, session_id=session_id)
        ticket = rounds.order(run_pass=order)
        return rounds.train()[ticket]

    rounds.create("m")
    asked = frames_pb2.Payload(inline=json.dumps(loss("any")).encode())
    for loss_id, session_id in (("a", "one"), ("b", "one"), ("c", "two")):
        rounds.order(
            register_loss=frames_pb2.RegisterLoss(
                loss_id=loss_id, session_id=session_id, payload=asked
            )
        )
    assert custom("m", "one", "a").WhichOneof("body") == "done"
    rounds.order(forget_losses=frames_pb2.ForgetLosses(session_id="one"))
    for gone in ("a", "b"):
        assert "there is no custom loss" in custom("m", "one", gone).failed.message
    assert custom("m", "two", "c").WhichOneof("body") == "done"
    assert set(rounds.worker._engine._losses) == {"c"}
