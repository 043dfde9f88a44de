"""What objects show in a shell and in a notebook: bounded, on one line, without secrets."""

import asyncio
import time
from datetime import datetime, timedelta, timezone
from html.parser import HTMLParser

import numpy as np
import pytest

from tinkex import types
from tinkex.client.futures import Promise
from tinkex.models.tokenizer import load_tokenizer
from tinkex.testing import FakeService

HOSTILE = '<script>alert("1")</script> & <img src=x onerror=alert(1)>\n\x1b[2J'
NOW = datetime(2026, 11, 16, 3, 4, 5, 678, tzinfo=timezone(timedelta(hours=2)))
MODEL = "fake/model"


@pytest.fixture
def fake():
    return FakeService()


def sequence(count: int, logprobs: bool = True, stop_reason: str = "stop"):
    return types.SampledSequence(
        stop_reason=stop_reason,
        sequence_id="s-1",
        tokens_np=np.arange(100, 100 + count),
        logprobs_np=np.full(count, -0.123456) if logprobs else None,
    )


def checkpoint(name: str = "0001", **more) -> types.Checkpoint:
    return types.Checkpoint(
        checkpoint_id=f"weights/{name}",
        checkpoint_type="training",
        time=NOW,
        tinker_path=f"tinker://run:train:0/weights/{name}",
        **more,
    )


def training_run(number: int = 0, **more) -> types.TrainingRun:
    return types.TrainingRun(
        training_run_id=f"run:train:{number}",
        base_model="some/model",
        model_owner="local",
        is_lora=True,
        lora_rank=16,
        last_request_time=NOW,
        **more,
    )


# -- reprs of types --------------------------------------------------------------------------------


def test_a_sampled_sequence_shows_tokens_logprobs_and_why_it_stopped():
    assert repr(sequence(40)) == (
        "SampledSequence(tokens=[100, 101, 102, 103, 104, 105, 106, 107, ... 40 in all], "
        "logprobs=[-0.1235, -0.1235, -0.1235, ... 40 in all], "
        "stop_reason='stop', sequence_id='s-1')"
    )
    assert repr(sequence(2, logprobs=False, stop_reason="length")) == (
        "SampledSequence(tokens=[100, 101], logprobs=None, stop_reason='length', sequence_id='s-1')"
    )


def test_a_sample_response_shows_its_sequences():
    shown = repr(types.SampleResponse(sequences=[sequence(3), sequence(2)]))
    assert shown.startswith("SampleResponse(sequences=[SampledSequence(tokens=[100, 101, 102], ")
    assert "tokens=[100, 101], " in shown
    many = repr(types.SampleResponse(sequences=[sequence(50)] * 100, prompt_logprobs_np=[-1.0] * 9))
    assert "... 100 in all]" in many
    assert "prompt_logprobs=[-1.0, -1.0, -1.0, ... 9 in all]" in many


def test_the_output_of_a_pass_shows_its_metrics_first():
    output = types.ForwardBackwardOutput(
        "ArrayRecord",
        [{"logprobs": types.TensorData(data=[-1.0] * 50, dtype="float32")}] * 30,
        {"loss:sum": 53.13420382142067, "tokens:sum": 50.0},
    )
    shown = repr(output)
    assert shown.startswith(
        "ForwardBackwardOutput(metrics={'loss:sum': 53.1342, 'tokens:sum': 50.0}, "
    )
    assert "... 30 in all]" in shown


def test_runs_and_checkpoints_show_paths_and_times():
    assert repr(checkpoint()) == (
        "Checkpoint(tinker_path='tinker://run:train:0/weights/0001', "
        "time='2026-11-16T01:04:05Z', public=False)"
    )
    assert repr(training_run(last_checkpoint=checkpoint())) == (
        "TrainingRun(training_run_id='run:train:0', base_model='some/model', model_owner='local', "
        "is_lora=True, lora_rank=16, last_request_time='2026-11-16T01:04:05Z', "
        "last_checkpoint='tinker://run:train:0/weights/0001')"
    )
    assert "corrupted=True" in repr(training_run(corrupted=True))


def everything():
    """Objects that may be large, each with hostile text where it can have text."""
    tensors = {f"t{number}": list(range(1000)) for number in range(50)}
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(range(10_000)), loss_fn_inputs=tensors
    )
    metadata = {f"key {number}": HOSTILE * 100 for number in range(100)}
    runs = [training_run(number, user_metadata=metadata) for number in range(200)]
    saved = [checkpoint(f"{number:04}", user_metadata=metadata) for number in range(200)]
    cursor = types.Cursor(offset=0, limit=200, total_count=1234)
    topk = types.TopkLogprobs(np.ones((500, 20), int), np.ones((500, 20)))
    long = types.SampledSequence("stop", HOSTILE * 100, np.arange(9000), np.ones(9000), topk)
    failed: Promise[None] = Promise()
    failed.fail(ValueError(HOSTILE * 1000))
    done: Promise[object] = Promise()
    done.finish(types.SampleResponse([long] * 500, np.ones(9000), topk))
    return [
        datum,
        datum.model_input,
        types.ForwardBackwardInput([datum] * 20, "cross_entropy"),
        types.SampleResponse([long] * 500, np.ones(9000), topk),
        long,
        topk,
        types.ForwardBackwardOutput(
            "x", [{HOSTILE: datum.loss_fn_inputs["t0"]}] * 90, {HOSTILE: 1.5}
        ),
        types.OptimStepResponse(metrics={HOSTILE: 2.0, **{str(n): 1.0 for n in range(500)}}),
        runs[0],
        types.TrainingRunsResponse(training_runs=runs, cursor=cursor),
        saved[0],
        types.CheckpointsListResponse(checkpoints=saved, cursor=cursor),
        failed,
        done,
        Promise(),
    ]


@pytest.mark.parametrize("thing", everything(), ids=lambda each: type(each).__name__)
def test_every_repr_is_one_short_line(thing):
    shown = repr(thing)
    assert len(shown) <= 700
    assert len(shown.splitlines()) == 1
    assert "\x1b" not in shown
    assert " at 0x" not in shown


def test_equal_objects_still_have_equal_hashes():
    one, two = everything()[3], everything()[3]
    assert one == two
    assert hash(one) == hash(two)
    assert one != types.SampleResponse([sequence(1)])


def test_signed_links_are_not_shown():
    link = "https://host/file.tar?signature=0123456789abcdef"
    archive = types.CheckpointArchiveUrlResponse(url=link, expires=NOW)
    assert repr(archive) == (
        "CheckpointArchiveUrlResponse(url='https://host/file.tar', expires='2026-11-16T01:04:05Z')"
    )
    assert "0123456" not in repr(types.ExternalWeightsUrlsResponse(urls={"a": link}, expires=NOW))
    exported: Promise[str] = Promise()
    exported.finish(link)
    assert repr(exported) == "Promise(state='done', result=<text>)"


# -- reprs of clients ------------------------------------------------------------------------------


def test_clients_show_service_model_and_rank_without_a_request(fake):
    service = fake.client()
    assert repr(service) == f"ServiceClient(base_url={service.holder.settings.base_url!r})"
    training = service.create_lora_training_client(MODEL, rank=4)
    seen = len(fake.requests)
    run = training.model_id
    assert repr(training) == (
        f"TrainingClient(model_id={run!r}, base_model={MODEL!r}, lora_rank=4)"
    )
    assert f"session_id={service.holder.session_id!r}" in repr(service)
    assert len(fake.requests) == seen
    sampling = training.save_weights_and_get_sampling_client()
    assert f"base_model={MODEL!r}, sampling_session_id=" in repr(sampling)
    path = training.save_weights_for_sampler("one").result().path
    assert repr(service.create_sampling_client(path)).startswith(
        f"SamplingClient(model_path={path!r}, sampling_session_id="
    )
    service.close("success").result()
    assert "closed=True" in repr(service)


def test_a_client_from_saved_state_shows_model_and_rank(fake):
    with fake.client() as service:
        training = service.create_lora_training_client(MODEL, rank=4)
        path = training.save_state("one").result().path
        again = service.create_training_client_from_state(path)
        again.get_info()
        assert f"base_model={MODEL!r}, lora_rank=4)" in repr(again)


def test_futures_and_streams_show_their_state(fake):
    waiting: Promise[int] = Promise()
    assert repr(waiting) == "Promise(state='pending')"
    waiting.cancel()
    assert repr(waiting) == "Promise(state='cancelled')"
    failed: Promise[int] = Promise()
    failed.fail(ValueError("no such model"))
    assert repr(failed) == "Promise(state='failed', error=ValueError('no such model'))"
    with fake.client() as service:
        training = service.create_lora_training_client(MODEL)
        step = training.optim_step(types.AdamParams())
        step.result()
        assert repr(step).startswith("Promise(state='done', result=OptimStepResponse(")
        sampling = training.save_weights_and_get_sampling_client()
        prompt = types.ModelInput.from_ints([1, 2, 3])
        with sampling.sample_stream(prompt, 2, types.SamplingParams(max_tokens=5)) as stream:
            stream.response()
            assert repr(stream) == "SampleStream(state='done', tokens_per_sequence=[5, 5])"


def test_a_future_is_shown_while_the_loop_runs():
    async def main() -> str:
        promise: Promise[int] = Promise()
        waiter = asyncio.ensure_future(promise.result_async())
        await asyncio.sleep(0)
        shown = repr(promise)
        promise.finish(1)
        await waiter
        return shown

    assert asyncio.run(main()) == "Promise(state='pending')"


def test_a_tokenizer_shows_its_model_and_size(tiny_model):
    tokenizer = load_tokenizer(tiny_model, name="some/model")
    assert repr(tokenizer) == f"Tokenizer(name_or_path='some/model', vocab_size={len(tokenizer)})"


# -- notebooks -------------------------------------------------------------------------------------


class Page(HTMLParser):
    """The tags and the text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.open: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.open.append(tag)
        assert all(name == "style" for name, _ in attrs)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data + "\n"


@pytest.mark.parametrize(
    "thing",
    [each for each in everything() if hasattr(each, "_repr_html_")],
    ids=lambda each: type(each).__name__,
)
def test_html_is_small_escaped_and_closed(thing):
    html = thing._repr_html_()
    page = Page(html)
    assert not page.open
    assert page.tags <= {"table", "caption", "thead", "tbody", "tr", "th", "td"}
    assert len(html) < 60_000


def test_notebook_tables_have_what_a_person_looks_for():
    cursor = types.Cursor(offset=0, limit=20, total_count=300)
    runs = types.TrainingRunsResponse(
        training_runs=[
            training_run(7, user_metadata={"name": HOSTILE}, last_checkpoint=checkpoint())
        ],
        cursor=cursor,
    )
    text = Page(runs._repr_html_()).text
    for expected in ("run:train:7", "some/model", "16", "2026-11-16T01:04:05Z", "1 of 300"):
        assert expected in text
    assert "<script>" in text  # as text, not as a tag
    saved = types.CheckpointsListResponse(checkpoints=[checkpoint(size_bytes=1234)])
    text = Page(saved._repr_html_()).text
    assert "tinker://run:train:0/weights/0001" in text
    assert "1234" in text
    text = Page(types.SampleResponse([sequence(3)])._repr_html_()).text
    assert "[100, 101, 102]" in text
    assert "stop" in text
    text = Page(types.OptimStepResponse(metrics={"grad_norm:mean": 0.25})._repr_html_()).text
    assert "grad_norm:mean" in text
    assert "0.25" in text


def test_a_repr_of_a_large_batch_takes_no_time():
    datum = types.Datum(model_input=types.ModelInput.from_ints(range(100)))
    output = types.ForwardBackwardInput([datum] * 100_000, "cross_entropy")
    started = time.thread_time()
    repr(output)
    assert time.thread_time() - started < 0.1
