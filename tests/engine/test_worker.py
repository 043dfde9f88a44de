"""The engine process's loop, turn by turn: which orders one micro-batch answers."""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from server.api.test_custom_losses import loss
from tinkex.engine import Engine, EngineSettings, process, reports, snapshot_writer
from tinkex.engine.adapters import checkpoints
from tinkex.engine.adapters.checkpoints import Files, SavedAdapter, read_adapter, write
from tinkex.engine.device import is_broken, is_full
from tinkex.engine.process import Wire, Worker
from tinkex.engine.sampling.sampler import Finished
from tinkex.wire import engine_protocol
from tinkex.wire.codec import encode_json
from tinkex.wire.inputs import Datum, ModelInput
from tinkex.wire.proto import frames_pb2
from tinkex.wire.protobuf import decode_forward_backward_output, encode_forward_backward_request
from tinkex.wire.sampling import SampleRequest, SamplingParams
from tinkex.wire.training import ForwardBackwardInput, ForwardBackwardRequest


class Turns:
    """A worker that takes one turn at a time, and what it said."""

    def __init__(self, engine: Engine) -> None:
        self._ours, theirs = socket.socketpair()
        self._theirs = theirs.detach()
        self.worker = Worker(engine, Wire(self._theirs), turn_file=None)
        self._stream = self._ours.makefile("rb")
        self._tickets = 0

    def order(self, **work: object) -> int:
        self._tickets += 1
        self.worker._sort(engine_protocol.Order(ticket=self._tickets, **work))  # type: ignore[arg-type]
        return self._tickets

    def turn(self) -> dict[int, engine_protocol.Report]:
        """What one turn of training answered."""
        return self._said_by(self.worker._train_once)

    def whole_turn(self) -> dict[int, engine_protocol.Report]:
        """What a turn of everything answered."""
        return self._said_by(self.worker.turn)

    def _said_by(self, act: Callable[[], None]) -> dict[int, engine_protocol.Report]:
        act()
        # A mark behind everything that was said in this turn.
        self.worker._wire.send(engine_protocol.Report(ticket=0))
        said = {}
        while (report := self._report()).WhichOneof("body"):
            if report.ticket:  # sizes and counts answer nothing
                said[report.ticket] = report
        return said

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
            self.turn()

    def close(self) -> None:
        self._stream.close()
        self._ours.close()
        self.worker._wire._socket.close()


@pytest.fixture(scope="module")
def turns_on(tiny_folder: Path) -> Callable[[bool], Turns]:
    torch.set_num_threads(1)
    made: dict[bool, Engine] = {}

    def get(deterministic: bool) -> Turns:
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
        return Turns(made[deterministic])

    return get


@pytest.fixture
def turns(turns_on: Callable[[bool], Turns]) -> Iterator[Turns]:
    turns = turns_on(False)
    turns.create("a", "b", "c")
    yield turns
    turns.close()


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


def test_small_passes_of_several_models_are_one_micro_batch(turns: Turns) -> None:
    tickets = [turns.order(run_pass=passes(name, 2, 4)) for name in "abc"]
    tickets.append(turns.order(run_pass=passes("a", 1, 4)))  # the next chunk of the same batch
    said = turns.turn()
    assert sorted(said) == sorted(tickets)
    losses = [
        decode_forward_backward_output(said[ticket].done.result).metrics["loss:sum"]
        for ticket in tickets
    ]
    # The models begin alike, so equal data has equal losses, and half of it half.
    assert losses == pytest.approx([losses[0], losses[0], losses[0], losses[0] / 2], rel=1e-5)
    assert sum(said[ticket].done.compute_s for ticket in tickets) > 0


def test_a_large_pass_is_cut_and_a_small_one_does_not_wait_for_it(turns: Turns) -> None:
    large = turns.order(run_pass=passes("a", 12, 10))
    small = turns.order(run_pass=passes("b", 1, 10))
    assert list(turns.turn()) == [small]
    later = [list(turns.turn()) for _ in range(3)]
    assert later == [[], [], [large]]


def test_a_step_waits_for_the_passes_before_it_and_holds_up_those_behind(turns: Turns) -> None:
    first = turns.order(run_pass=passes("a", 1, 4))
    stepped = turns.order(optim_step=step("a"))
    second = turns.order(run_pass=passes("a", 1, 4))
    other = turns.order(run_pass=passes("b", 1, 4))
    assert list(turns.turn()) == [first, other]
    assert list(turns.turn()) == [stepped]
    assert list(turns.turn()) == [second]


def test_an_operation_does_not_wait_for_a_model_that_waits_for_others(turns: Turns) -> None:
    turns.order(run_pass=passes("a", 8, 20))
    turns.order(run_pass=passes("b", 1, 4))
    turns.turn()  # a got many tokens, b few
    many = [turns.order(run_pass=passes("b", 1, 4)) for _ in range(40)]
    stepped = turns.order(optim_step=step("c"))
    answered: list[int] = []
    for _ in range(3):
        answered += turns.turn()
    assert stepped in answered
    assert set(answered) & set(many)


def test_passes_without_gradients_are_batches_of_their_own(turns: Turns) -> None:
    backward = turns.order(run_pass=passes("a", 1, 4))
    forward = turns.order(run_pass=passes("b", 1, 4, backward=False))
    assert list(turns.turn()) == [backward]
    assert list(turns.turn()) == [forward]


def test_a_refused_pass_is_answered_and_the_others_run(turns: Turns) -> None:
    bad = turns.order(run_pass=passes("a", 1, 4, loss="no_such_loss"))
    good = turns.order(run_pass=passes("b", 1, 4))
    said = turns.turn()
    assert said[bad].failed.category == "user"
    assert said[good].done.result


def test_a_batch_that_fails_blames_the_one_that_was_alone_in_it(
    turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_cuts: object) -> None:
        raise RuntimeError("half-way")

    monkeypatch.setattr(turns.worker._engine, "run_together", fail)
    shared = [turns.order(run_pass=passes(name, 1, 4)) for name in "aab"]
    # It would run on what the batch left of its model, so it is tried again as well.
    behind = turns.order(run_pass=passes("a", 1, 4, backward=False))
    said = turns.turn()
    assert sorted(said) == sorted([*shared, behind])
    assert {report.failed.category for report in said.values()} == {engine_protocol.SHARED_FAILURE}
    alone = turns.order(run_pass=passes("a", 1, 4))
    failed = turns.turn()[alone].failed
    assert failed.category == "server"
    assert "half-way" in failed.message


def test_a_device_that_is_lost_is_told_from_one_that_is_full() -> None:
    assert is_broken(torch.AcceleratorError("CUDA error: device-side assert triggered"))
    # As seen on a GPU (`benchmarks/check_gpu_recovery.py`): it has no type of its own.
    assert is_broken(RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `c`"))
    full = torch.OutOfMemoryError("CUDA out of memory")
    assert is_full(full)
    assert not is_broken(full)
    assert not is_broken(RuntimeError("a bug"))
    assert not is_broken(ValueError("a bug"))


class Exited(BaseException):
    """The process would be gone."""


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    statuses: list[int] = []

    def leave(status: int) -> NoReturn:
        statuses.append(status)
        raise Exited

    monkeypatch.setattr(os, "_exit", leave)
    return statuses


LOST = RuntimeError("CUDA error: device-side assert triggered")
FULL = torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("error", [LOST, FULL, ValueError("a bug")])
def test_telling_of_a_failure_never_ends_the_process(error: Exception, exits: list[int]) -> None:
    assert str(error) in reports.failed(1, error).failed.message
    assert str(error) in reports.muddled(1, error).failed.message
    assert not exits


def test_a_lost_device_ends_the_process_and_a_full_one_if_nothing_smaller_is_left(
    turns: Turns, exits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails_with(error: Exception) -> None:
        def fail(*_: object, **__: object) -> NoReturn:
            raise error

        for name in ("run_together", "optim_step", "copy", "submit"):
            monkeypatch.setattr(turns.worker._engine, name, fail)

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
                turns.order(**work)
                turns.turn()
            assert exits == [engine_protocol.DEVICE_LOST_STATUS]
            turns.worker._training.clear()
    exits.clear()
    tickets = [turns.order(run_pass=passes(name, 1, 4)) for name in "ab"]
    assert sorted(turns.turn()) == tickets  # tried apart: each may fit by itself
    fails_with(LOST)
    for name in "ab":
        turns.order(run_pass=passes(name, 1, 4))
    with pytest.raises(Exited):
        turns.turn()
    turns.worker._training.clear()


SAMPLE = encode_json(
    SampleRequest(
        prompt=ModelInput.from_ints([1, 2, 3]),
        sampling_params=SamplingParams(max_tokens=2, stop=[]),
        num_samples=1,
    )
)


class SlowDisk:
    """Writes of snapshots that end when they are let."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lets = threading.Semaphore(0)
        self.written: list[str] = []

        def slow(files: Files, folder: Path) -> int:
            assert self.lets.acquire(timeout=30)
            self.written.append(folder.name)
            return write(files, folder)

        monkeypatch.setattr(snapshot_writer, "write_files", slow)


@pytest.mark.parametrize("most_bytes", [2**28, 1])
def test_snapshots_wait_for_a_slow_disk_and_nobody_for_them(
    turns: Turns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_bytes: int
) -> None:
    monkeypatch.setattr(process, "COPIES_BYTES", most_bytes)
    disk = SlowDisk(monkeypatch)
    snapshots = {
        name: turns.order(snapshot=frames_pb2.Snapshot(model_id=name, folder=str(tmp_path / name)))
        for name in "ab"
    }
    behind = {name: turns.order(run_pass=passes(name, 1, 4)) for name in "abc"}
    sample = turns.order(sample=frames_pb2.Sample(payload=frames_pb2.Payload(inline=SAMPLE)))
    said: dict[int, engine_protocol.Report] = {}

    def work_on() -> None:
        for _ in range(8):
            if turns.worker._engine.sampling or turns.worker._next_model():
                said.update(turns.whole_turn())

    computing = threading.Thread(target=work_on, daemon=True)
    computing.start()
    computing.join(15)
    stood_still = computing.is_alive()
    at_once = set(said)
    disk.lets.release(2)
    computing.join(15)
    assert not stood_still, "the computing thread waits for the disk"
    # With room for one copy only b itself waits: its pass comes after its snapshot.
    waits = set() if most_bytes > 1 else {behind["b"]}
    assert at_once == {sample, *behind.values()} - waits
    while turns.worker._copies_bytes or turns.worker._next_model():
        said.update(turns.whole_turn())
    assert said.keys() == {sample, *snapshots.values(), *behind.values()}
    assert disk.written == ["a", "b"]
    assert all(report.WhichOneof("body") == "done" for report in said.values())
    for name in "ab":
        assert turns.worker._engine.restore(name, tmp_path / name) == {}


def test_training_goes_on_while_an_adapter_is_read_from_a_slow_disk(
    turns: Turns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = turns.worker._engine
    engine.save("a", tmp_path / "saved", optimizer=False)
    lets = threading.Event()

    def slow(folder: Path) -> SavedAdapter:
        assert lets.wait(30)
        return read_adapter(folder)

    monkeypatch.setattr(checkpoints, "read_adapter", slow)
    payload = frames_pb2.Payload(inline=SAMPLE)
    folder = str(tmp_path / "saved")
    sample = turns.order(sample=frames_pb2.Sample(payload=payload, adapter_folder=folder))
    # Sampling is owed a second, and cannot use it.
    turns.worker._trained_s, turns.worker._sampled_s = 1.0, 0.0
    trained = [turns.order(run_pass=passes("a", 1, 40)) for _ in range(5)]
    took_s, said = [], []
    for _ in trained:
        began_s = time.monotonic()
        said += list(turns.whole_turn())
        took_s.append(time.monotonic() - began_s)
    assert said == trained
    assert min(took_s) < 0.2  # nobody waits for the disk
    # Nothing is left but the read: the thread sleeps, and wakes when it is done.
    asked = 0
    advance = engine.advance

    def counted(*, wait_for_reads: bool = True) -> list[Finished]:
        nonlocal asked
        asked += 1
        return advance(wait_for_reads=wait_for_reads)

    monkeypatch.setattr(engine, "advance", counted)
    threading.Timer(0.3, lets.set).start()
    answered: dict[int, engine_protocol.Report] = {}
    while sample not in answered:
        answered |= turns.whole_turn()
    assert asked < 5
    assert answered[sample].WhichOneof("body") == "done"


def test_deterministic_engines_never_mix(turns_on: Callable[[bool], Turns]) -> None:
    turns = turns_on(True)
    turns.create("a", "b")
    tickets = [turns.order(run_pass=passes(name, 1, 4)) for name in ("a", "b", "a")]
    assert [list(turns.turn()) for _ in tickets] == [[ticket] for ticket in tickets]
    turns.close()


def test_losses_of_a_session_are_forgotten_together(turns: Turns) -> None:
    def custom(model_id: str, session_id: str, loss_id: str) -> engine_protocol.Report:
        inputs = {"target_tokens": [1] * 3, "weights": [1.0] * 3}
        datum = Datum(model_input=ModelInput.from_ints([1, 2, 3]), loss_fn_inputs=inputs)
        work = ForwardBackwardInput._of([datum], "custom", {"loss_id": loss_id})
        asked = ForwardBackwardRequest(forward_backward_input=work, model_id=model_id, seq_id=1)
        payload = frames_pb2.Payload(inline=encode_forward_backward_request(asked))
        order = frames_pb2.Pass(model_id=model_id, payload=payload, session_id=session_id)
        ticket = turns.order(run_pass=order)
        return turns.turn()[ticket]

    turns.create("m")
    asked = frames_pb2.Payload(inline=json.dumps(loss("any")).encode())
    for loss_id, session_id in (("a", "one"), ("b", "one"), ("c", "two")):
        turns.order(
            register_loss=frames_pb2.RegisterLoss(
                loss_id=loss_id, session_id=session_id, payload=asked
            )
        )
    assert custom("m", "one", "a").WhichOneof("body") == "done"
    turns.order(forget_losses=frames_pb2.ForgetLosses(session_id="one"))
    for gone in ("a", "b"):
        assert "there is no custom loss" in custom("m", "one", gone).failed.message
    assert custom("m", "two", "c").WhichOneof("body") == "done"
    assert set(turns.worker._engine._losses) == {"c"}
