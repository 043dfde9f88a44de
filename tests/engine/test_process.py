"""The engine process over a real socket, with the tiny model."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

from tinkex.engine import process
from tinkex.wire import engine_protocol
from tinkex.wire.codec import encode_json
from tinkex.wire.engine_settings import EngineSettings
from tinkex.wire.inputs import Datum, ModelInput
from tinkex.wire.proto import frames_pb2
from tinkex.wire.protobuf import (
    decode_forward_backward_output,
    decode_sample_response,
    encode_forward_backward_request,
)
from tinkex.wire.sampling import SampleRequest, SamplingParams
from tinkex.wire.training import ForwardBackwardInput, ForwardBackwardRequest


@dataclass
class Engine:
    """The web process's end of the socket."""

    socket: socket.socket
    stream: IO[bytes]
    process: "subprocess.Popen[bytes]"
    log: Path
    tickets: int = 0
    stats: frames_pb2.Stats | None = None

    def order(self, **work: object) -> int:
        self.tickets += 1
        order = engine_protocol.Order(ticket=self.tickets, **work)  # type: ignore[arg-type]
        self.socket.sendall(engine_protocol.frame(order))
        return self.tickets

    def report(self) -> engine_protocol.Report:
        """The next report other than stats, which may come at any time."""
        while (report := self.any_report()).WhichOneof("body") == "stats":
            self.stats = report.stats
        return report

    def any_report(self) -> engine_protocol.Report:
        head = self.stream.read(engine_protocol.LENGTH_PREFIX.size)
        return engine_protocol.Report.FromString(
            self.stream.read(engine_protocol.body_length(head))
        )

    def ask(self, **work: object) -> engine_protocol.Report:
        ticket = self.order(**work)
        report = self.report()
        assert report.ticket == ticket
        return report

    def create(self, model_id: str) -> None:
        create = frames_pb2.Create(
            model_id=model_id,
            lora_config=b'{"rank":4,"seed":1}',
            optimizer_config=b'{"type":"adamw"}',
        )
        assert json.loads(self.ask(create=create).done.result)["snapshot_bytes"] > 0


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    ours, theirs = socket.socketpair()
    with tempfile.NamedTemporaryFile() as log, ours:
        command = [sys.executable, "-m", "tinkex.engine", "--fd", str(theirs.fileno())]
        settings = EngineSettings(name="tiny", folder=tiny_model, threads=1)
        command += ["--settings", settings.to_json()]
        process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stderr=log)
        theirs.close()
        with ours.makefile("rb") as stream:
            engine = Engine(ours, stream, process, Path(log.name))
            ready = engine.report().ready
            assert ready.max_context_length > 0
            assert ready.device == "cpu"
            yield engine
        # Closing the socket ends the process.
        ours.shutdown(socket.SHUT_RDWR)
        assert process.wait(20) == 0


def pass_of(model_id: str, loss: str = "cross_entropy") -> frames_pb2.Pass:
    datum = Datum(
        model_input=ModelInput.from_ints([5, 6, 7]),
        loss_fn_inputs={"target_tokens": [6, 7, 8], "weights": [1.0, 1.0, 1.0]},
    )
    request = ForwardBackwardRequest(ForwardBackwardInput._of([datum], loss, None), model_id, 1)
    payload = frames_pb2.Payload(inline=encode_forward_backward_request(request))
    return frames_pb2.Pass(model_id=model_id, payload=payload, backward=True)


def step_of(model_id: str, **params: float) -> frames_pb2.OptimStep:
    body = json.dumps({"model_id": model_id, "seq_id": 1, "adam_params": params}).encode()
    return frames_pb2.OptimStep(model_id=model_id, payload=frames_pb2.Payload(inline=body))


def test_training_goes_through_frames(engine: Engine) -> None:
    engine.create("m")
    losses = []
    for _ in range(3):
        done = engine.ask(run_pass=pass_of("m")).done
        losses.append(decode_forward_backward_output(done.result).metrics["loss:sum"])
        assert done.compute_s > 0
        stepped = engine.ask(optim_step=step_of("m", learning_rate=1e-2)).done
        assert all(name.count(":") == 1 for name in json.loads(stepped.result)["metrics"])
    assert losses[2] < losses[0]


def test_a_payload_may_be_a_file(engine: Engine, tmp_path: Path) -> None:
    engine.create("file")
    work = pass_of("file")
    (tmp_path / "payload").write_bytes(work.payload.inline)
    work.payload.file = str(tmp_path / "payload")
    assert engine.ask(run_pass=work).done.result


def test_creating_a_model_again_resets_it(engine: Engine) -> None:
    engine.create("again")
    first = engine.ask(run_pass=pass_of("again")).done.result
    engine.ask(optim_step=step_of("again", learning_rate=1e-2))
    assert engine.ask(run_pass=pass_of("again")).done.result != first
    engine.create("again")
    assert engine.ask(run_pass=pass_of("again")).done.result == first


def test_a_refused_step_clears_the_gradients(engine: Engine) -> None:
    engine.create("refused")
    engine.ask(run_pass=pass_of("refused"))
    failed = engine.ask(optim_step=step_of("refused", learning_rate=1e-2, momentum=1.0)).failed
    assert failed.category == "user"
    assert "momentum" in failed.message
    metrics = json.loads(engine.ask(optim_step=step_of("refused")).done.result)["metrics"]
    assert metrics["grad_norm:mean"] == 0


def test_an_invalid_request_is_a_user_failure(engine: Engine) -> None:
    engine.create("user")
    failed = engine.ask(run_pass=pass_of("user", loss="no_such_loss")).failed
    assert failed.category == "user"
    assert "no_such_loss" in failed.message


def test_a_bug_is_the_servers_with_an_id_that_is_in_the_log(engine: Engine) -> None:
    engine.create("bug")
    broken = pass_of("bug")
    broken.payload.inline = b"\xff\xff\xff"
    failed = engine.ask(run_pass=broken).failed
    assert failed.category == "server"
    bug = failed.message.removesuffix(".").split()[-1]
    assert f"engine bug {bug}" in engine.log.read_text()
    assert "Traceback" in engine.log.read_text()
    # The engine continues to work.
    assert engine.ask(run_pass=pass_of("bug")).done.result


def test_samples_and_training_of_several_models_take_turns(engine: Engine) -> None:
    for model_id in ("one", "two"):
        engine.create(model_id)
    request = SampleRequest(
        prompt=ModelInput.from_ints([1, 2, 3]),
        sampling_params=SamplingParams(max_tokens=12, temperature=0.0, stop=[]),
    )
    payload = frames_pb2.Payload(inline=encode_json(request))
    expected = {}
    for _ in range(3):
        expected[engine.order(sample=frames_pb2.Sample(payload=payload))] = "sample"
        for model_id in ("one", "two"):
            expected[engine.order(run_pass=pass_of(model_id))] = "pass"
    reports = {report.ticket: report for report in (engine.report() for _ in expected)}
    assert reports.keys() == expected.keys()
    samples = {
        tuple(decode_sample_response(report.done.result).sequences[0].tokens)
        for ticket, report in reports.items()
        if expected[ticket] == "sample"
    }
    assert len(samples) == 1
    assert len(samples.pop()) == 12


def test_a_streamed_sample_reports_its_tokens_before_the_result(engine: Engine) -> None:
    request = SampleRequest(
        num_samples=2,
        prompt=ModelInput.from_ints([1, 2, 3]),
        sampling_params=SamplingParams(max_tokens=40, seed=4, stop=[]),
    )
    payload = frames_pb2.Payload(inline=encode_json(request))
    ticket = engine.order(sample=frames_pb2.Sample(payload=payload, streams=True))
    tokens: list[list[int]] = [[], []]
    bursts = 0
    while (report := engine.report()).WhichOneof("body") == "grown":
        assert report.ticket == ticket
        bursts += 1
        for grown in report.grown.sequences:
            assert grown.start == len(tokens[grown.sequence])
            assert len(grown.tokens) == len(grown.logprobs)
            tokens[grown.sequence] += grown.tokens
    assert bursts >= 5
    answer = decode_sample_response(report.done.result)
    assert [sequence.tokens for sequence in answer.sequences] == tokens


def test_a_save_is_complete_and_can_be_loaded(engine: Engine, tmp_path: Path) -> None:
    engine.create("saved")
    engine.ask(run_pass=pass_of("saved"))
    engine.ask(optim_step=step_of("saved", learning_rate=1e-2))
    folder = str(tmp_path / "a" / "b")
    save = frames_pb2.Save(model_id="saved", folder=folder, optimizer=True)
    size = json.loads(engine.ask(save=save).done.result)["size_bytes"]
    assert size == sum(file.stat().st_size for file in Path(folder).iterdir())
    engine.create("loaded")
    load = frames_pb2.Load(model_id="loaded", folder=folder, optimizer=True)
    engine.ask(load=load)
    assert (
        engine.ask(run_pass=pass_of("loaded")).done.result
        == engine.ask(run_pass=pass_of("saved")).done.result
    )
    missing = frames_pb2.Load(model_id="loaded", folder=str(tmp_path / "none"), optimizer=False)
    assert engine.ask(load=missing).WhichOneof("body") == "failed"
    assert os.path.isdir(folder)


def test_stats_are_reported_when_the_engine_becomes_idle(engine: Engine) -> None:
    engine.create("sized")
    while (report := engine.any_report()).WhichOneof("body") != "stats":
        pass
    before = report.stats
    assert before.training_waiting == 0
    assert before.memory_bytes > before.base_bytes > 100_000
    engine.create("sized-2")
    while (report := engine.any_report()).WhichOneof("body") != "stats":
        pass
    assert report.stats.adapters_resident == before.adapters_resident + 1
    assert report.stats.adapters_resident_bytes > before.adapters_resident_bytes
    assert report.stats.adapters_on_disk == 0


def test_a_device_that_is_not_there_is_refused_with_a_hint(tiny_model: Path) -> None:
    refused = process.load(EngineSettings(name="tiny", folder=tiny_model, device="cuda:99"))
    assert isinstance(refused, frames_pb2.Refused)
    says = "tiny cannot be loaded: the device is 'cuda:99', but torch finds "
    assert refused.message.startswith(says)
    assert refused.hint.startswith("Use ")


def test_damaged_weights_are_refused_without_a_traceback(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for file in tiny_model.iterdir():
        content = b"not a tensor" if file.suffix == ".safetensors" else file.read_bytes()
        (tmp_path / file.name).write_bytes(content)
    refused = process.load(EngineSettings(name="broken", folder=tmp_path))
    assert isinstance(refused, frames_pb2.Refused)
    assert refused.message.startswith("broken cannot be loaded: ")
    assert "Traceback" not in caplog.text
