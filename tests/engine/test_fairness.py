"""Samples and training on one engine: nobody waits for somebody else's whole step."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tinkex.engine import Engine, EngineSettings
from tinkex.engine.process import Wire, Worker
from tinkex.wire import engine_protocol
from tinkex.wire.codec import encode_json
from tinkex.wire.inputs import Datum, ModelInput
from tinkex.wire.proto import frames_pb2
from tinkex.wire.protobuf import decode_sample_response, encode_forward_backward_request
from tinkex.wire.sampling import SampleRequest, SamplingParams
from tinkex.wire.training import ForwardBackwardInput, ForwardBackwardRequest

TOKENS = 64


class Bench:
    """A worker whose turns are counted one by one, and what it reports."""

    def __init__(self, engine: Engine) -> None:
        self.ours, theirs = socket.socketpair()
        self.ours.setblocking(False)
        self.wire = Wire(theirs.detach())
        self.worker = Worker(engine, self.wire, turn_file=None)
        self.micro_batches = 0
        self.tickets = 0
        self._heard = b""
        run_together = engine.run_together

        def counted(cuts: object) -> None:
            self.micro_batches += 1
            run_together(cuts)  # type: ignore[arg-type]

        engine.run_together = counted  # type: ignore[method-assign]

    def order(self, **work: object) -> int:
        self.tickets += 1
        self.wire.inbox.put(engine_protocol.Order(ticket=self.tickets, **work))  # type: ignore[arg-type]
        return self.tickets

    def turn(self) -> list[engine_protocol.Report]:
        self.worker.turn()
        try:
            self._heard += self.ours.recv(1 << 20)
        except BlockingIOError:
            return []
        reports = []
        while len(self._heard) >= engine_protocol.LENGTH_PREFIX.size:
            head, rest = (
                self._heard[: engine_protocol.LENGTH_PREFIX.size],
                self._heard[engine_protocol.LENGTH_PREFIX.size :],
            )
            size = engine_protocol.body_length(head)
            report, self._heard = engine_protocol.Report.FromString(rest[:size]), rest[size:]
            if report.ticket:
                reports.append(report)
        return reports

    def until(self, ticket: int) -> engine_protocol.Report:
        for _ in range(2000):
            for report in self.turn():
                if report.ticket == ticket:
                    return report
        raise AssertionError("never answered")


@pytest.fixture
def bench(tiny_folder: Path) -> Iterator[Bench]:
    # Micro-batches of one row each.
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
    bench.wire._socket.close()


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


def test_short_samples_finish_within_a_few_micro_batches_of_a_long_step(bench: Bench) -> None:
    step = bench.order(run_pass=long_pass(60))
    for _ in range(5):
        assert bench.turn() == []
    assert bench.micro_batches == 5
    for _ in range(3):
        before = bench.micro_batches
        report = bench.until(bench.order(sample=sample(10, 8)))
        assert len(decode_sample_response(report.done.result).sequences[0].tokens) == 8
        assert bench.micro_batches - before <= 3
    # And the step goes on meanwhile: it has its turn after every burst of as much time.
    before = bench.micro_batches
    endless = bench.order(sample=sample(10, 1500, samples=4))
    while bench.micro_batches - before < 5:
        assert bench.turn() == []
    bench.order(cancel=frames_pb2.Cancel(sample_ticket=endless))
    assert bench.until(step).WhichOneof("body") == "done"


def test_a_cancelled_sample_is_never_answered_and_leaves_its_pages(bench: Bench) -> None:
    given_up = bench.order(sample=sample(10, 1500))
    for _ in range(5):
        assert bench.turn() == []
    bench.order(cancel=frames_pb2.Cancel(sample_ticket=given_up))
    after = bench.order(sample=sample(10, 4))
    assert bench.turn()[0].ticket == after
    assert not bench.worker._engine.sampling
    assert bench.worker._engine.stats().kv_pages_used == 0
    bench.order(cancel=frames_pb2.Cancel(sample_ticket=given_up))
    assert bench.until(bench.order(sample=sample(10, 4))).ticket


def test_one_owner_s_flood_does_not_hold_up_another(bench: Bench) -> None:
    flood = [bench.order(sample=sample(40, 60, "flood", samples=8)) for _ in range(40)]
    for _ in range(2):
        bench.turn()
    single = bench.order(sample=sample(8, 8, "single"))
    answered: list[int] = []
    while single not in answered:
        answered += [report.ticket for report in bench.turn()]
    assert len(answered) <= 12
    for ticket in flood:
        bench.order(cancel=frames_pb2.Cancel(sample_ticket=ticket))
    bench.until(bench.order(sample=sample(4, 1)))
