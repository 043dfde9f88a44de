"""Writers of metrics: TensorBoard with its real package, the others at the edge of theirs."""

import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tinkex
from tinkex import types
from tinkex.metric_writers import MetricWriter, TensorBoardWriter, TrackioWriter, WandbWriter
from tinkex.testing import FakeService


def scalars_in(folder: Path) -> list[tuple[int, str, float]]:
    """The scalars of the event file in a folder. A record: length, checksum, event, checksum."""
    from tensorboardX.proto.event_pb2 import Event

    (file,) = folder.iterdir()
    data, found, at = file.read_bytes(), [], 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        event = Event.FromString(data[at + 12 : at + 12 + length])
        found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
        at += 12 + length + 4
    return found


def test_tensorboard_gets_every_metric_of_every_step(tmp_path: Path) -> None:
    with TensorBoardWriter(tmp_path) as writer:
        writer.write(1, {"loss:sum": 2.5, "grad_norm": 1.0})
        writer.write(2, {"loss:sum": 1.5})
    assert scalars_in(tmp_path) == [
        (1, "loss_sum", 2.5),
        (1, "grad_norm", 1.0),
        (2, "loss_sum", 1.5),
    ]


def test_the_stored_metrics_of_a_run_are_copied_in_two_lines(
    tmp_path: Path, fake: FakeService, datum: Any
) -> None:
    with fake.client() as service:
        training = service.create_lora_training_client("fake/model")
        for _ in range(2):
            training.forward_backward([datum], "cross_entropy").result(5)
            training.optim_step(types.AdamParams(learning_rate=0.5)).result(5)
        rest = tinkex.RestClient(service.holder)
        writer: MetricWriter = TensorBoardWriter(tmp_path)
        for point in rest.get_training_run_metrics(training.model_id).result(5).points:
            writer.write(point.step, point.metrics)
        writer.close()
    found = scalars_in(tmp_path)
    assert [step for step, name, _ in found if name == "loss"] == [1, 2]
    assert {value for _, name, value in found if name == "learning_rate"} == {0.5}


class Run:
    """A run of Weights & Biases or trackio, as their documentation describes it."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, float], int]] = []
        self.finished = False

    def log(self, data: dict[str, float], step: int) -> None:
        self.logged.append((data, step))

    def finish(self) -> None:
        self.finished = True


@pytest.mark.parametrize(
    ("package", "writer_type"), [("wandb", WandbWriter), ("trackio", TrackioWriter)]
)
def test_a_run_is_started_with_the_options_and_finished(
    package: str, writer_type: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, run = [], Run()

    def init(**options: Any) -> Run:
        given.append(options)
        return run

    monkeypatch.setitem(sys.modules, package, SimpleNamespace(init=init))
    with writer_type("my-project", "my-run", config={"rank": 8}) as writer:
        writer.write(7, {"loss": 0.5})
        assert not run.finished
    assert given == [{"project": "my-project", "name": "my-run", "config": {"rank": 8}}]
    assert run.logged == [({"loss": 0.5}, 7)]
    assert run.finished


def test_importing_the_module_loads_no_package() -> None:
    code = (
        "import sys, tinkex.metric_writers\n"
        "assert not {'tensorboardX', 'wandb', 'trackio', 'numpy', 'pydantic'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
