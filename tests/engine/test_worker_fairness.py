"""Samples and training on one engine: no request waits for the whole step of another."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tinkex.engine import Engine, EngineSettings
from tinkex.engine.connection import Connection
from tinkex.engine.worker import MAX_TRAINED_S, Worker, sampling_time
from tinkex.wire import engine_protocol
from tinkex.wire.codec import encode_json
from tinkex.wire.inputs import Datum, ModelInput
from tinkex.wire.proto import frames_pb2
from tinkex.wire.protobuf import decode_sample_response, encode_forward_backward_request
from tinkex.wire.sampling import SampleRequest, SamplingParams
from tinkex.wire.training import ForwardBackwardInput, ForwardBackwardRequest

TOKENS = 64


class Bench:
    """A worker that runs one round at a time, with counted micro-batches, and its reports."""

    def __init__(self, engine: Engine) -> None:
        self.ours, theirs = socket.socketpair()
        self.ours.setblocking(False)
        self.connection = Connection(theirs.detach())
        self.worker = Worker(engine, self.connection, compute_lock=None)
        self.micro_batches = 0
        self.tickets = 0
        self._received = b""
        run_micro_batch = engine.run_micro_batch

        def counted(cuts: object) -> None:
            self.micro_batches += 1
            run_micro_batch(cuts)  # type: ignore[arg-type]

        engine.run_micro_batch = counted  # type: ignore[method-assign]

    def order(self, **work: object) -> int:
        self.tickets += 1
        self.connection.inbox.put(engine_protocol.Order(ticket=self.tickets, **work))  # type: ignore[arg-type]
        return self.tickets

    def round(self) -> list[engine_protocol.Report]:
        self.worker.run_once()
        try:
            self._received += self.ours.recv(1 << 20)
        except BlockingIOError:
            return []
        reports = []
        while len(self._received) >= engine_protocol.LENGTH_PREFIX.size:
            head, rest = (
                self._received[: engine_protocol.LENGTH_PREFIX.size],
                self._received[engine_protocol.LENGTH_PREFIX.size :],
            )
            size = engine_protocol.body_length(head)
            report, self._received = engine_protocol.Report.FromString(rest[:size]), rest[size:]
            if report.ticket:
                reports.append(report)
        return reports

    def until(self, ticket: int) -> engine_protocol.Report:
        for _ in range(2000):
            for report in self.round():
                if report.ticket == ticket:
                    return report
        raise AssertionError("no report for this ticket")


@pytest.fixture
def bench(tiny_folder: Path) -> Iterator[Bench]:
    # Micro-batches of one datum each.
    settings = EngineSettings(
        name="tiny",
        folder=tiny_folder,
        device="cpu",
        threads=1,
        kv_tokens=4096,
        max_batch_tokens=TOKENS,
    )
    bench = Bench(Engine(settings))
    create = frames_pb2.Create(
        model_id="m", lora_config=b'{"rank":4,"seed":1}', optimizer_config=b'{"type":"adamw"}'
    )
    bench.until(bench.order(create=create))
    yield bench
    bench.ours.close()
    bench.connection._socket.close()


def long_pass(rows: int) -> frames_pb2.Pass:
    tokens = [1 + n % 300 for n in range(TOKENS + 1)]
    datum = Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * TOKENS},
    )
    work = ForwardBackwardInput._of([datum] * rows, "cross_entropy", None)
    payload = encode_forward_backward_request(ForwardBackwardRequest(work, "m", 1))
    return frames_pb2.Pass(model_id="m", payload=frames_pb2.Payload(inline=payload), backward=True)


def sample(prompt: int, new: int, owner: str = "", samples: int = 1) -> frames_pb2.Sample:
    request = SampleRequest(
        prompt=ModelInput.from_ints([n % 300 for n in range(prompt)]),
        sampling_params=SamplingParams(max_tokens=new, seed=1, stop=[]),
        num_samples=samples,
    )
    return frames_pb2.Sample(payload=frames_pb2.Payload(inline=encode_json(request)), owner=owner)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_training_gets_its_share_of_the_time(share: float) -> None:
    trained_s = 0.25
    assert trained_s / (trained_s + sampling_time(trained_s, share)) == pytest.approx(share)


def test_a_very_long_piece_of_training_does_not_stop_training_for_as_long() -> None:
    assert sampling_time(60.0, 0.5) == MAX_TRAINED_S


def test_short_samples_finish_within_a_few_micro_batches_of_a_long_step(bench: Bench) -> None:
    step = bench.order(run_pass=long_pass(60))
    for _ in range(5):
        assert bench.round() == []
    assert bench.micro_batches == 5
    for _ in range(3):
        before = bench.micro_batches
        report = bench.until(bench.order(sample=sample(10, 8)))
        assert len(decode_sample_response(report.done.result).sequences[0].tokens) == 8
        assert bench.micro_batches - before <= 3
    # The step also continues: it runs after every burst that took as much time.
    before = bench.micro_batches
    endless = bench.order(sample=sample(10, 1500, samples=4))
    while bench.micro_batches - before < 5:
        assert bench.round() == []
    bench.order(cancel=frames_pb2.Cancel(sample_ticket=endless))
    assert bench.until(step).WhichOneof("body") == "done"


def test_a_canceled_sample_gets_no_report_and_releases_its_pages(bench: Bench) -> None:
    canceled = bench.order(sample=sample(10, 1500))
    for _ in range(5):
        assert bench.round() == []
    bench.order(cancel=frames_pb2.Cancel(sample_ticket=canceled))
    after = bench.order(sample=sample(10, 4))
    assert bench.round()[0].ticket == after
    assert not bench.worker._engine.sampling
    assert bench.worker._engine.stats().kv_pages_used == 0
    bench.order(cancel=frames_pb2.Cancel(sample_ticket=canceled))
    assert bench.until(bench.order(sample=sample(10, 4))).ticket


def test_a_flood_of_requests_of_one_owner_does_not_delay_another(bench: Bench) -> None:
    flood = [bench.order(sample=sample(40, 60, "flood", samples=8)) for _ in range(40)]
    for _ in range(2):
        bench.round()
    single = bench.order(sample=sample(8, 8, "single"))
    answered: list[int] = []
    while single not in answered:
        answered += [report.ticket for report in bench.round()]
    assert len(answered) <= 12
    for ticket in flood:
        bench.order(cancel=frames_pb2.Cancel(sample_ticket=ticket))
    bench.until(bench.order(sample=sample(4, 1)))
