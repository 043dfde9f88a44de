"""Images in the worker: they are decoded apart, and only what needs them waits for them."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from engine.test_worker import Rounds, passes, step
from numerics.helpers import sample
from numerics.pictures import datum_of, picture, text, write_image_model
from tinkex.engine import Engine, EngineSettings
from tinkex.engine.images.image_reader import ImageReader
from tinkex.engine.images.prepared_image import PreparedImage
from tinkex.engine.request_images import (
    DecodedImages,
    Holder,
    NamedInput,
    RequestImages,
    most_tokens,
    reader_count,
)
from tinkex.wire import engine_protocol
from tinkex.wire.codec import encode_json
from tinkex.wire.errors import UserFailure
from tinkex.wire.inputs import ImageChunk, ModelInput
from tinkex.wire.prompt_chunks import Chunk
from tinkex.wire.proto import frames_pb2
from tinkex.wire.protobuf import (
    decode_forward_backward_output,
    decode_sample_response,
    encode_forward_backward_request,
)
from tinkex.wire.sampling import SampleRequest, SamplingParams
from tinkex.wire.training import ForwardBackwardInput, ForwardBackwardRequest

pytestmark = pytest.mark.filterwarnings("ignore")


class GatedReader(ImageReader):
    """Decodes when it is let."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.gate = threading.Event()

    def prepare(self, images: Sequence[ImageChunk]) -> list[PreparedImage]:
        assert self.gate.wait(30)
        return super().prepare(images)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = write_image_model(tmp_path_factory.mktemp("worker") / "m", "Qwen3VL")
    engine = Engine(EngineSettings(name="m", folder=folder, device="cpu", kv_tokens=1024))
    assert engine.images is not None
    engine.images.close()
    return engine


@pytest.fixture
def reader(engine: Engine) -> Iterator[GatedReader]:
    reader = GatedReader(engine.settings.folder)
    engine.images = RequestImages([reader], engine.limits)
    yield reader
    reader.gate.set()
    reader.close()


@pytest.fixture
def rounds(engine: Engine, reader: GatedReader) -> Iterator[Rounds]:
    rounds = Rounds(engine)
    rounds.create("a", "b")
    yield rounds
    reader.gate.set()
    rounds.close()


def sampled(*chunks: Chunk) -> frames_pb2.Sample:
    params = SamplingParams(max_tokens=3, seed=1, stop=[])
    request = SampleRequest(prompt=ModelInput(list(chunks)), num_samples=1, sampling_params=params)
    return frames_pb2.Sample(payload=frames_pb2.Payload(inline=encode_json(request)), owner="o")


def trained(model_id: str, *chunks: Chunk) -> frames_pb2.Pass:
    work = ForwardBackwardInput._of([datum_of(chunks)], "cross_entropy", None)
    body = encode_forward_backward_request(ForwardBackwardRequest(work, model_id, 1))
    payload = frames_pb2.Payload(inline=body)
    return frames_pb2.Pass(model_id=model_id, payload=payload, backward=True)


def until(rounds: Rounds, *tickets: int) -> dict[int, engine_protocol.Report]:
    """Runs rounds until these requests are done; all reports on the way."""
    reports: dict[int, engine_protocol.Report] = {}
    while not reports.keys() >= {*tickets}:
        reports |= rounds.whole_round()
    return reports


def test_a_sample_with_an_image_delays_no_other(rounds: Rounds, reader: GatedReader) -> None:
    with_image = rounds.order(sample=sampled(text(3), picture(2, 3), text(2)))
    plain = rounds.order(sample=sampled(text(5)))
    training = rounds.order(run_pass=passes("a", 1, 4))
    assert sorted(until(rounds, plain, training)) == [plain, training]
    reader.gate.set()
    # Nothing else is to do: the worker waits until it is woken.
    found = decode_sample_response(until(rounds, with_image)[with_image].done.result)
    engine = rounds.worker._engine
    params = SamplingParams(max_tokens=3, seed=1, stop=[])
    prompt = ModelInput([text(3), picture(2, 3), text(2)])
    (alone,) = sample(engine, [SampleRequest(prompt=prompt, num_samples=1, sampling_params=params)])
    assert found.sequences[0].tokens == alone.sequences[0].tokens
    assert engine.images is not None
    assert engine.images._decoded.tokens == 0


def test_a_pass_with_an_image_delays_only_its_model(rounds: Rounds, reader: GatedReader) -> None:
    with_image = rounds.order(run_pass=trained("a", text(3), picture(2, 3), text(2)))
    stepped = rounds.order(optim_step=step("a"))
    others = [rounds.order(run_pass=passes("b", 1, 4)), rounds.order(optim_step=step("b"))]
    assert sorted(until(rounds, others[1])) == others
    reader.gate.set()
    reports = until(rounds, stepped)
    assert list(reports) == [with_image, stepped]
    output = decode_forward_backward_output(reports[with_image].done.result)
    # Nine places of 3 + 6 + 1 tokens, of which the last five have targets that are text.
    assert output.loss_fn_outputs[0]["logprobs"].shape == [10]
    assert np.isfinite(output.metrics["loss:sum"])
    engine = rounds.worker._engine
    assert engine.images is not None
    assert engine.images._decoded.tokens == 0


def test_a_large_request_is_decoded_apart(
    rounds: Rounds, reader: GatedReader, tmp_path: Path
) -> None:
    """Base64 of megabytes: also if it is in a file."""
    reader.gate.set()
    order = sampled(text(3), picture(2, 3), text(2))
    file = tmp_path / "payload"
    file.write_bytes(order.payload.inline)
    large = frames_pb2.Sample(payload=frames_pb2.Payload(file=str(file)), owner="o")
    broken = frames_pb2.Sample(payload=frames_pb2.Payload(inline=b" " * (1 << 17)), owner="o")
    tickets = [rounds.order(sample=each) for each in (order, large, broken)]
    assert set(rounds.worker._awaited_samples) == {*tickets}
    reports = until(rounds, *tickets)
    one, other = (decode_sample_response(reports[each].done.result) for each in tickets[:2])
    assert one.sequences[0].tokens == other.sequences[0].tokens
    assert reports[tickets[2]].WhichOneof("body") == "failed"


def test_passes_of_a_model_are_decoded_in_order_and_others_beside_them(
    rounds: Rounds, reader: GatedReader
) -> None:
    """With room for one image: a later pass must not take it before an earlier one."""
    engine = rounds.worker._engine
    engine.images = RequestImages([reader], engine.limits, max_tokens=6)
    tickets = [
        rounds.order(run_pass=trained(name, picture(2, 3, seed), text(3)))
        for name in "ab"
        for seed in range(4)
    ]
    reader.gate.set()
    reports = until(rounds, *tickets)
    assert {report.WhichOneof("body") for report in reports.values()} == {"done"}
    assert [each for each in reports if each in tickets[:4]] == tickets[:4]
    assert engine.images._decoded.tokens == 0


def test_a_refused_image_fails_its_request_alone(rounds: Rounds, reader: GatedReader) -> None:
    reader.gate.set()
    bad = ImageChunk(data=picture(2, 3).data[:100], format="png")
    tickets = [
        rounds.order(sample=sampled(text(3), bad)),
        rounds.order(run_pass=trained("a", picture(2, 3), text(3))),
        rounds.order(run_pass=trained("a", bad.model_copy(update={"expected_tokens": 6}), text(3))),
        rounds.order(run_pass=trained("a", picture(2, 3), text(3))),
    ]
    reports = until(rounds, *tickets)
    failed = [reports[tickets[at]].failed for at in (0, 2)]
    assert [each.category for each in failed] == ["user", "user"]
    assert failed[0].message.startswith("prompt.chunks[1]: ")
    assert failed[1].message.startswith("data[0].model_input.chunks[0]: ")
    assert reports[tickets[1]].WhichOneof("body") == "done"
    assert reports[tickets[3]].WhichOneof("body") == "done"


def test_a_cancelled_sample_gives_its_room_back(rounds: Rounds, reader: GatedReader) -> None:
    cancelled = rounds.order(sample=sampled(picture(2, 3), text(3)))
    rounds.order(cancel=frames_pb2.Cancel(sample_ticket=cancelled))
    reader.gate.set()
    last = rounds.order(sample=sampled(picture(2, 4), text(3)))
    assert list(until(rounds, last)) == [last]
    engine = rounds.worker._engine
    assert engine.images is not None
    assert engine.images._decoded.tokens == 0


def test_images_of_a_request_are_decoded_at_once(engine: Engine) -> None:
    """Each by a reader of its own; the first that fails in the request is the one that is named."""
    both = threading.Barrier(2)

    class Meeting(ImageReader):
        def prepare(self, images: Sequence[ImageChunk]) -> list[PreparedImage]:
            both.wait(30)
            return super().prepare(images)

    readers = [Meeting(engine.settings.folder) for _ in range(reader_count(8))]
    images = RequestImages(readers, engine.limits)
    chunks = [picture(2, 3, 1), picture(4, 5, 2), picture(2, 3, 1), text(2), picture(3, 3, 3)]
    chunks.append(picture(1, 9, 4))
    found = images.prepare([NamedInput("prompt", ModelInput(chunks))], Holder(1, "o"))
    assert [image.tokens for image in found.values()] == [6, 20, 9, 9]
    images.close()
    images = RequestImages([ImageReader(engine.settings.folder) for _ in range(2)], engine.limits)
    bad = [
        ImageChunk(data=picture(2, size).data[:-40], format="png", expected_tokens=2 * size)
        for size in (3, 4)
    ]
    inputs = [NamedInput("prompt", ModelInput([picture(4, 5, 2), *bad, picture(3, 3, 3)]))]
    with pytest.raises(UserFailure, match=r"prompt\.chunks\[1\]: "):
        images.prepare(inputs, Holder(2, "o"))
    assert images._decoded.tokens == 0
    images.close()
    assert [reader_count(cores) for cores in (1, 2, 8, 64)] == [1, 1, 2, 4]


def test_a_large_request_lets_a_small_one_through(engine: Engine) -> None:
    """Image by image, with one reader."""
    order: list[int] = []
    begun, later = threading.Event(), threading.Event()

    class Noting(ImageReader):
        def prepare(self, images: Sequence[ImageChunk]) -> list[PreparedImage]:
            begun.set()
            assert later.wait(30)
            found = super().prepare(images)
            order.append(found[0].tokens)
            return found

    images = RequestImages([Noting(engine.settings.folder)], engine.limits)
    many = [NamedInput("prompt", ModelInput([picture(2, 2, seed) for seed in range(6)]))]
    one = [NamedInput("prompt", ModelInput([picture(3, 3)]))]
    threads = [threading.Thread(target=images.prepare, args=(each,)) for each in (many, one)]
    threads[0].start()
    assert begun.wait(30)
    threads[1].start()
    while images._threads._work_queue.empty():
        threads[1].join(0.01)
    later.set()
    for thread in threads:
        thread.join(30)
    assert order == [4, 9, 4, 4, 4, 4, 4]
    images.close()


def image(number: int, tokens: int) -> PreparedImage:
    return PreparedImage(bytes([number]), (1, 2, 2), np.zeros((0, 0), np.float32), tokens)


def test_decoding_waits_for_room() -> None:
    images = DecodedImages(max_tokens=100)
    first, second = Holder(1, "o"), Holder(2, "o")
    # More than the limit, but no other request has any.
    images.wait_for_room(first, 150)
    images.add(first, image(1, 90))
    assert images.find(second, [bytes([1])]) == images.find(first, [bytes([1]), bytes([2])])
    assert images.find(Holder(3, "other"), [bytes([1])]) == {}
    passed: list[int] = []

    def wait(holder: Holder, tokens: int) -> None:
        images.wait_for_room(holder, tokens)
        passed.append(holder.ticket)

    threads = []
    for ticket, tokens in ((2, 20), (3, 10)):
        threads.append(threading.Thread(target=wait, args=(Holder(ticket, "o"), tokens)))
        threads[-1].start()
        while len(images._line) < len(threads):
            threads[-1].join(0.01)
    images.release(2)
    assert not passed, "90 of 100 tokens are taken, and a small request passes no larger one"
    images.release(1)
    for thread in threads:
        thread.join(10)
    assert sorted(passed) == [2, 3]
    assert images.tokens == 0
    # What was promised is taken, before the images are there.
    threads = [threading.Thread(target=wait, args=(Holder(4, "o"), 75))]
    threads[0].start()
    while not images._line:
        threads[0].join(0.01)
    assert 4 not in passed
    images.add(Holder(2, "o"), image(2, 15))
    assert 4 not in passed
    images.release(2)
    threads[0].join(10)
    assert 4 in passed


def test_two_requests_with_images_of_earlier_ones_do_not_wait_for_each_other() -> None:
    images = DecodedImages(max_tokens=100)
    for ticket in (1, 2):
        images.wait_for_room(Holder(ticket, "o"), 40)
        images.add(Holder(ticket, "o"), image(ticket, 40))
    threads = []
    for ticket in (3, 4):
        holder = Holder(ticket, "o")
        images.find(holder, [bytes([ticket - 2])])
        thread = threading.Thread(target=images.wait_for_room, args=(holder, 60), daemon=True)
        thread.start()
        while len(images._line) < len(threads) + 1:
            thread.join(0.01)
        threads.append(thread)
    # Nobody but the two that wait has images now.
    images.release(1)
    images.release(2)
    threads[0].join(10)
    assert not threads[0].is_alive()
    assert threads[1].is_alive(), "the second one waits for the first"
    images.release(3)
    threads[1].join(10)
    assert not threads[1].is_alive()


def test_a_request_with_too_many_images_is_refused(engine: Engine, reader: GatedReader) -> None:
    images = RequestImages([reader], engine.limits, max_tokens=11)
    inputs = [
        NamedInput(f"data[{at}]", ModelInput([picture(2, 3, seed)]))
        for at, seed in enumerate((1, 1, 2))
    ]
    with pytest.raises(UserFailure, match=r"the 2 different images .* 12 tokens; at most 11 are"):
        images.prepare(inputs)
    # Four patches of 4 by 4 pixels, 3 colors and 2 frames, in float32: 1,536 bytes for a token.
    assert most_tokens(reader.rules, 4 * 1536 * 100) == 100
    assert most_tokens(reader.rules, 10**12) == 131_072
