"""Steps are sent in the order of the calls, each once, even if some of them fail."""

import asyncio
import pickle
import threading
import warnings

import pytest

import tinkex
from tinkex import types
from tinkex.client.http.circuit_breaker import Breaker
from tinkex.testing import Answer, FakeService, Lost
from tinkex.wire.protobuf import decode_forward_backward_request

ADAM = types.AdamParams(learning_rate=1e-2)
CHUNKS = {"fwdbwd_max_chunk_len": 2}


@pytest.fixture
def training(service):
    return service.create_lora_training_client("fake/model", rank=4)


@pytest.fixture
def chunked():
    """A fake that accepts two datums per request, and a training client of it."""
    fake = FakeService(config=CHUNKS)
    service = fake.client()
    yield fake, service.create_lora_training_client("fake/model", rank=4)
    service.close("success").result(5)


def ran(fake):
    return [(number, kind) for _, number, kind in fake.ran]


def sent(fake, endpoint="forward_backward"):
    """The seq_ids of the passes in the order of arrival."""
    return [
        decode_forward_backward_request(seen.body)[0].seq_id
        for seen in fake.requests
        if seen.endpoint == endpoint
    ]


def test_operations_get_seq_ids_in_the_order_of_the_calls(fake, training, datum):
    futures = []
    for _ in range(50):
        futures.append(training.forward_backward([datum], "cross_entropy"))
        futures.append(training.optim_step(ADAM))
    for future in futures:
        future.result(20)
    assert ran(fake) == [
        (number, "forward_backward" if number % 2 else "optim_step") for number in range(1, 101)
    ]


def test_a_save_for_a_sampler_is_ordered_before_later_steps(fake, training, datum):
    futures = []
    for step in range(50):
        futures.append(training.save_weights_for_sampler(f"at-{step}"))
        futures.append(training.optim_step(ADAM))
    [future.result(20) for future in futures]
    kinds = [kind for _, kind in ran(fake)]
    assert kinds == ["save_weights_for_sampler", "optim_step"] * 50


def test_an_unnamed_save_is_ordered_too(fake, training, datum):
    async def main():
        sampler, step = await asyncio.gather(
            training.save_weights_and_get_sampling_client_async(),
            training.optim_step_async(ADAM),
        )
        await step
        return sampler

    asyncio.run(main())
    assert [kind for _, kind in ran(fake)] == ["save_weights_for_sampler", "optim_step"]


def test_calls_from_many_threads_get_consecutive_seq_ids(fake, training, datum):
    def work():
        for _ in range(20):
            training.forward_backward([datum], "cross_entropy").result(20)

    threads = [threading.Thread(target=work) for _ in range(8)]
    [thread.start() for thread in threads]
    [thread.join(30) for thread in threads]
    assert [number for number, _ in ran(fake)] == list(range(1, 161))


def test_submitting_does_not_wait_for_the_server(fake, training, datum):
    hold = fake.hold("forward_backward")  # a call that waited would never return
    futures = [training.forward_backward([datum], "cross_entropy") for _ in range(100)]
    assert hold.arrived.wait(5)
    hold.release()
    [future.result(10) for future in futures]


def test_a_call_cancelled_before_its_turn_is_never_sent(fake, training, datum):
    hold = fake.hold("forward_backward")
    first = training.forward_backward([datum], "cross_entropy")
    assert hold.arrived.wait(5)
    second = training.optim_step(ADAM)
    third = training.save_state("after")
    assert second.cancel()
    assert not first.cancel()  # it was sent and runs
    hold.release()
    assert third.result(5).path.endswith("/weights/after")
    first.result(5)
    assert ran(fake) == [(1, "forward_backward"), (2, "save_weights")]


def test_a_coroutine_cancelled_while_it_waits_for_its_turn_does_not_block_others(
    fake, training, datum
):
    async def main():
        hold = fake.hold("forward_backward")
        first = training.forward_backward([datum], "cross_entropy")
        second = asyncio.create_task(_submit_and_wait(training))
        await asyncio.sleep(0.02)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        third = training.save_state("after")
        hold.release()
        await first
        return await third.result_async(5)

    assert asyncio.run(main()).path.endswith("after")
    # It was submitted, so it runs, although no caller waits for it.
    assert [number for number, _ in ran(fake)] == [1, 2, 3]


async def _submit_and_wait(training):
    return await (await training.optim_step_async(ADAM))


@pytest.mark.parametrize("fault", [Lost(), Lost(after=True), Answer(status=503)], ids=str)
def test_a_retried_submission_keeps_its_seq_id_and_runs_once(fake, training, datum, fault):
    fake.script("forward_backward", fault)
    first = training.forward_backward([datum], "cross_entropy")
    second = training.optim_step(ADAM)
    first.result(10)
    second.result(10)
    assert ran(fake) == [(1, "forward_backward"), (2, "optim_step")]
    assert sent(fake) == [1, 1]


def test_the_seq_id_of_a_refused_call_is_reused(fake, training, datum):
    fake.script("forward_backward", Answer(status=422, body={"detail": "no"}))
    first = training.forward_backward([datum], "cross_entropy")
    second = training.optim_step(ADAM)
    with pytest.raises(tinkex.UnprocessableEntityError, match="step 1 of"):
        first.result(5)
    second.result(5)
    assert ran(fake) == [(1, "optim_step")]


def test_o6_the_seq_id_of_a_step_that_cannot_be_encoded_is_reused(fake, training, datum):
    with pytest.raises(ValueError, match="ttl_seconds"):
        training.save_state("a", ttl_seconds="soon").result(5)
    training.forward_backward([datum], "cross_entropy").result(5)
    assert [(number, kind) for _, number, kind in fake.ran] == [(1, "forward_backward")]


def _fails(*_, **__):
    raise TypeError("cannot be encoded")


async def _no_key(*_):
    raise tinkex.TinkerError("the command printed no key")


@pytest.mark.parametrize(
    ("place", "how", "error"),
    [
        ("tinkex.client.submission.encode_forward_backward_request", _fails, "cannot be encoded"),
        ("tinkex.client.auth.credentials.StaticCredential.token", _no_key, "printed no key"),
        ("tinkex.client.http.typed_requests.Calls.signed", _no_key, "printed no key"),
    ],
)
def test_a_failure_before_sending_uses_no_seq_id(
    fake, training, datum, monkeypatch, place, how, error
):
    training.optim_step(ADAM).result(5)
    with monkeypatch.context() as broken:
        broken.setattr(place, how)
        step = training.forward_backward([datum], "cross_entropy")
        with pytest.raises((TypeError, tinkex.TinkerError), match=error):
            step.result(5)
    training.optim_step(ADAM).result(5)
    assert ran(fake) == [(1, "optim_step"), (2, "optim_step")]


def test_a_step_that_the_circuit_breaker_stops_uses_no_seq_id(datum, monkeypatch):
    fake = FakeService()
    breaker = tinkex.BreakerPolicy(failures=1, open_s=600)
    settings = tinkex.Settings(base_url="http://127.0.0.1:9", breaker=breaker)
    with tinkex.ServiceClient(settings=settings, _make_transport=fake.transport) as service:
        training = service.create_lora_training_client("fake/model")
        fake.script("create_model", Answer(status=503))
        with pytest.raises(tinkex.CircuitOpenError):
            service.create_lora_training_client("fake/model")
        with pytest.raises(tinkex.CircuitOpenError):
            training.forward_backward([datum], "cross_entropy").result(5)
        monkeypatch.setattr(Breaker, "_left_s", lambda _: 0.0)  # the open interval is over
        training.optim_step(ADAM).result(5)
    assert ran(fake) == [(1, "optim_step")]


def test_the_seq_id_of_a_rate_limited_step_is_reused(monkeypatch, datum):
    monkeypatch.setenv("TINKEX_GIVE_UP_S", "0.01")
    fake = FakeService()
    with fake.client() as service:
        training = service.create_lora_training_client("fake/model")
        fake.script("forward_backward", *[Answer(status=429)] * 3)
        with pytest.raises(tinkex.RateLimitError):
            training.forward_backward([datum], "cross_entropy").result(5)
        fake._scripts["forward_backward"].clear()
        training.optim_step(ADAM).result(5)
    assert ran(fake) == [(1, "optim_step")]


def test_a_refusal_after_an_attempt_without_response_does_not_free_the_seq_id(
    fake, training, datum
):
    """The first attempt may have arrived: another step under its seq_id would be lost."""
    fake.script("optim_step", Lost(after=True), Answer(status=403, body={"detail": "no"}))
    with pytest.raises(tinkex.PermissionDeniedError):
        training.optim_step(ADAM).result(10)
    training.optim_step(ADAM).result(5)
    assert ran(fake) == [(1, "optim_step"), (2, "optim_step")]


def test_a_step_whose_task_cannot_be_created_fails_and_later_steps_continue(
    fake, training, datum, monkeypatch
):
    """Also if its submission was already created: it is cancelled before it sends anything."""
    training.optim_step(ADAM).result(5)
    with monkeypatch.context() as broken:

        def refuse(*_):
            raise MemoryError("no room for another task")

        broken.setattr(training._steps, "_finish", refuse)
        failed = training.forward_backward([datum], "cross_entropy")
        with pytest.raises(MemoryError, match="no room"):
            failed.result(5)
    training.optim_step(ADAM).result(5)
    assert ran(fake) == [(1, "optim_step"), (2, "optim_step")]


def test_a_step_without_a_loop_takes_no_ticket(fake, training, monkeypatch):
    training.optim_step(ADAM).result(5)
    with monkeypatch.context() as broken:

        def refuse():
            raise RuntimeError("can't start new thread")

        broken.setattr("tinkex.client.background_loop.background", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            training.optim_step(ADAM)
    training.optim_step(ADAM).result(5)
    assert [number for number, _ in ran(fake)] == [1, 2]


def test_a_call_without_response_leaves_no_gap(monkeypatch, datum):
    monkeypatch.setenv("TINKEX_GIVE_UP_S", "0.2")
    fake = FakeService()
    service = fake.client()
    training = service.create_lora_training_client("fake/model")
    fake.script("optim_step", *[Lost()] * 50)
    with pytest.raises(tinkex.APIConnectionError):
        training.optim_step(ADAM).result(10)
    fake._scripts["optim_step"].clear()
    training.save_state("after").result(5)
    # seq_id 1 never arrived; a no-op step used it.
    assert ran(fake) == [(1, "forward"), (2, "save_weights")]

    fake.script("optim_step", *[Lost(after=True)] * 50)
    with pytest.raises(tinkex.APIConnectionError):
        training.optim_step(ADAM).result(10)
    fake._scripts["optim_step"].clear()
    training.save_state("again").result(5)
    # seq_id 3 had arrived; the no-op step ran nothing.
    assert ran(fake)[2:] == [(3, "optim_step"), (4, "save_weights")]
    service.close("success").result(5)


def test_a_seq_id_that_the_server_already_has_is_not_a_gap(monkeypatch, caplog):
    """Servers refuse a seq_id that was used for another kind of step: the first had arrived."""
    caplog.set_level("DEBUG", "tinkex")
    monkeypatch.setenv("TINKEX_GIVE_UP_S", "0.2")
    fake = FakeService()
    service = fake.client()
    training = service.create_lora_training_client("fake/model")
    fake.script("optim_step", *[Lost(after=True)] * 50)
    with pytest.raises(tinkex.APIConnectionError):
        training.optim_step(ADAM).result(10)
    fake._scripts["optim_step"].clear()
    fake.script("forward_backward", Answer(status=422, body={"detail": "already used"}))
    training.save_state("after").result(5)
    training.optim_step(ADAM).result(5)
    assert ran(fake) == [(1, "optim_step"), (2, "save_weights"), (3, "optim_step")]
    assert f"seq_id 1 of {training.model_id} is already used" in caplog.text
    service.close("success").result(5)


def test_changes_after_the_call_are_not_sent(fake, training, datum):
    hold = fake.hold("optim_step")
    training.optim_step(ADAM)
    assert hold.arrived.wait(5)  # later steps wait for their turn
    data = [datum]
    steps = [training.forward_backward(data, "cross_entropy"), training.forward(data, "ppo")]
    datum.loss_fn_inputs["weights"] = types.TensorData(data=[7.0], dtype="float32")
    del datum.loss_fn_inputs["target_tokens"]
    data.clear()
    hold.release()
    for step in steps:
        step.exception(10)
    passes = [
        decode_forward_backward_request(seen.body)[0].forward_backward_input.data
        for seen in fake.requests
        if seen.endpoint == "forward_backward"
    ]
    assert len(passes) == 2
    for (found,) in passes:
        assert found.loss_fn_inputs["target_tokens"].tolist() == [2, 3, 4]
        assert found.loss_fn_inputs["weights"].tolist() == [1.0, 1.0, 1.0]


def test_values_added_to_a_datum_before_the_call_become_tensors(fake, training, datum):
    datum.loss_fn_inputs["weights"] = [1.0, 0.0, 2.0]
    training.forward_backward([datum], "cross_entropy").result(5)
    (body,) = [seen.body for seen in fake.requests if seen.endpoint == "forward_backward"]
    (found,) = decode_forward_backward_request(body)[0].forward_backward_input.data
    assert found.loss_fn_inputs["weights"].tolist() == [1.0, 0.0, 2.0]
    assert datum.loss_fn_inputs["weights"] == [1.0, 0.0, 2.0]


def test_invalid_data_are_not_sent_and_use_no_seq_id(fake, training, datum):
    pointer = types.Datum(
        model_input=types.ModelInput(
            chunks=[types.ImageAssetPointerChunk(format="png", location="x", expected_tokens=3)]
        ),
        loss_fn_inputs={"target_tokens": [1]},
    )
    with pytest.raises(ValueError, match=r"data\[1\] contains an ImageAssetPointerChunk"):
        training.forward_backward([datum, pointer], "cross_entropy")
    with pytest.raises(ValueError, match="data is empty"):
        training.forward_backward([], "cross_entropy")
    with pytest.raises(TypeError, match=r"data\[0\] is a dict"):
        training.forward_backward([{}], "cross_entropy")
    with pytest.raises(ValueError, match="cross_entropy"):
        training.forward_backward([datum], "cross_entropi")
    with pytest.raises(TypeError, match="AdamParams"):
        training.optim_step()
    with pytest.raises(ValueError, match="pass only one of them"):
        training.optim_step(ADAM, adam_params=ADAM)
    training.optim_step(adam_params=ADAM).result(5)
    assert ran(fake) == [(1, "optim_step")]


# -- chunks ------------------------------------------------------------------------------------------


def test_chunks_of_a_batch_give_one_result(chunked, datum):
    _, training = chunked
    result = training.forward_backward([datum] * 7, "cross_entropy").result(5)
    single = training.forward([datum], "cross_entropy").result(5)
    assert len(result.loss_fn_outputs) == 7
    assert result.metrics["loss:sum"] == pytest.approx(7 * single.metrics["loss:sum"])


def test_a_batch_is_split_by_bytes_too(datum):
    size = 3 * 4 + 3 * 8 + 3 * 4  # tokens, targets, weights
    fake = FakeService(config={"fwdbwd_max_chunk_bytes_count": 2 * size})
    with fake.client() as service:
        training = service.create_lora_training_client("fake/model", rank=4)
        result = training.forward_backward([datum] * 5, "cross_entropy").result(5)
    assert len(result.loss_fn_outputs) == 5
    passes = [seen.body for seen in fake.requests if seen.endpoint == "forward_backward"]
    counts = [
        len(decode_forward_backward_request(p)[0].forward_backward_input.data) for p in passes
    ]
    assert sorted(counts) == [1, 2, 2]


def test_the_first_chunk_is_sent_last_and_what_follows_after_it(chunked, datum):
    fake, training = chunked
    batch = training.forward_backward([datum] * 7, "cross_entropy")
    step = training.optim_step(ADAM)
    batch.result(5)
    step.result(5)
    order = sent(fake)
    assert sorted(order[:3]) == [2, 3, 4]
    assert order[3] == 1
    assert ran(fake) == [(number, "forward_backward") for number in (1, 2, 3, 4)] + [
        (5, "optim_step")
    ]


def test_chunks_are_sent_one_by_one_if_the_server_asks(datum):
    fake = FakeService(config=CHUNKS | {"parallel_fwdbwd_chunks": False})
    service = fake.client()
    training = service.create_lora_training_client("fake/model")
    training.forward_backward([datum] * 5, "cross_entropy").result(5)
    assert sent(fake) == [1, 2, 3]
    service.close("success").result(5)


@pytest.mark.parametrize("refused", [1, 2, 3, 4])
def test_a_batch_of_which_one_chunk_was_refused_fails_as_a_whole(chunked, datum, refused):
    fake, training = chunked
    fake.script(
        "forward_backward",
        *(
            Answer(status=422, body={"detail": f"not {index}"}) if index == refused else _PASS
            for index in range(1, 5)
        ),
    )
    _let_through(fake)
    batch = training.forward_backward([datum] * 7, "cross_entropy")
    step = training.optim_step(ADAM)
    save = training.save_state("after")
    with pytest.raises(tinkex.UnprocessableEntityError):
        batch.result(5)
    # Later steps do not hang, and the gradients of a partial batch are not applied.
    step.result(5)
    assert save.result(5).path.endswith("after")
    numbers = [number for number, _ in ran(fake)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert [kind for _, kind in ran(fake)][-2:] == ["optim_step", "save_weights"]


def test_a_partly_refused_batch_is_followed_by_a_failing_step(chunked, datum):
    fake, training = chunked
    fake.script("forward_backward", Answer(status=422, body={"detail": "no"}))
    with pytest.raises(tinkex.UnprocessableEntityError):
        training.forward_backward([datum] * 7, "cross_entropy").result(5)
    training.optim_step(ADAM).result(5)
    passes = [
        decode_forward_backward_request(seen.body)[0]
        for seen in fake.requests
        if seen.endpoint == "forward_backward"
    ]
    fillers = [p.forward_backward_input for p in passes if p.forward_backward_input.loss_fn_config]
    assert fillers
    for noop_step in fillers:
        assert list(noop_step.loss_fn_config) == ["part_of_this_batch_was_never_sent"]
        # No server can compute it, not even one that ignores unknown settings.
        (datum,) = noop_step.data
        assert datum.model_input.length == 1
        assert datum.loss_fn_inputs["target_tokens"].tolist() == [0, 0]
        assert datum.loss_fn_inputs["weights"].tolist() == [0.0, 0.0]


class ChecksFirst(FakeService):
    """Refuses a pass with an unknown setting before it accepts its seq_id."""

    async def answer(self, method, endpoint, headers, body):
        if endpoint == "forward_backward":
            request, _ = decode_forward_backward_request(body)
            if request.forward_backward_input.loss_fn_config:
                return self.status, {"content-type": "application/json"}, b'{"detail": "no"}'
        return await super().answer(method, endpoint, headers, body)


@pytest.mark.parametrize("status", [400, 422])
def test_a_server_that_refuses_the_failing_step_gets_a_no_op_step(datum, caplog, status):
    caplog.set_level("DEBUG", "tinkex")
    fake = ChecksFirst(config=CHUNKS)
    fake.status = status
    with fake.client() as service:
        training = service.create_lora_training_client("fake/model", rank=4)
        fake.script("forward_backward", Answer(status=422, body={"detail": "no"}))
        with pytest.raises(tinkex.UnprocessableEntityError):
            training.forward_backward([datum] * 7, "cross_entropy").result(5)
        training.optim_step(ADAM).result(5)
    numbers = [number for number, _ in ran(fake)]
    assert numbers == list(range(1, len(numbers) + 1))
    caught = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [text for text in caught if "accepted only part of a batch" in text]
    assert "is already used" not in caplog.text


def test_a_partly_refused_forward_pass_does_not_affect_gradients(chunked, datum):
    fake, training = chunked
    fake.script("forward_backward", Answer(status=422, body={"detail": "no"}))
    with pytest.raises(tinkex.UnprocessableEntityError):
        training.forward([datum] * 7, "cross_entropy").result(5)
    training.optim_step(ADAM).result(5)
    for seen in fake.requests:
        if seen.endpoint == "forward_backward":
            request, forward_only = decode_forward_backward_request(seen.body)
            assert forward_only
            assert not request.forward_backward_input.loss_fn_config


def test_a_batch_is_not_affected_by_retried_chunks(chunked, datum):
    fake, training = chunked
    fake.script("forward_backward", Lost(), Lost(after=True), Answer(status=503))
    result = training.forward_backward([datum] * 9, "cross_entropy").result(20)
    assert len(result.loss_fn_outputs) == 9
    assert [number for number, _ in ran(fake)] == [1, 2, 3, 4, 5]


# A response that means "pass through", for scripts that fail only later.
_PASS = Answer(status=-1)


def _let_through(fake):
    """Make `_PASS` in scripts mean normal operation."""
    original = fake.answer

    async def answer(method, endpoint, headers, body):
        script = fake._scripts[endpoint]
        if script and script[0] is _PASS:
            script.pop(0)
            held, fake._scripts[endpoint] = script[:], []
            try:
                return await original(method, endpoint, headers, body)
            finally:
                fake._scripts[endpoint] = held
        return await original(method, endpoint, headers, body)

    fake.answer = answer


# -- checkpoints -------------------------------------------------------------------------------------


def test_saved_weights_are_restored_in_a_new_client(service, training, datum):
    training.optim_step(ADAM).result(5)
    path = training.save_state("a", ttl_seconds=3600, user_metadata={"k": "v"}).result(5).path
    copy = service.create_training_client_from_state(path)
    both = [t.forward([datum], "cross_entropy").result(5).metrics for t in (training, copy)]
    assert both[0] == both[1]
    full = service.create_training_client_from_state_with_optimizer(path)
    assert full.get_info().lora_rank == 4


def test_a_server_that_restores_in_one_request_gets_one(datum):
    fake = FakeService(config={"create_model_via_load_weights": True})
    service = fake.client()
    fake.script("load_weights", Answer(status=200, body={"request_id": "r-x"}))
    fake.script("retrieve_future", Answer(status=200, body={"path": "tinker://a/weights/b"}))
    training = service.create_training_client_from_state("tinker://a/weights/b")
    assert training.model_id == f"{service.holder.session_id}:train:0"
    body = next(s.json() for s in fake.requests if s.endpoint == "load_weights")
    assert (body["session_id"], body["model_seq_id"]) == (service.holder.session_id, 0)
    assert "seq_id" not in body
    service.close("success").result(5)


def test_loading_into_a_client_works_and_warns_of_its_deprecation(training):
    path = training.save_state("a").result(5).path
    with pytest.warns(FutureWarning, match="create_training_client_from_state"):
        training.load_state(path).result(5)
    with pytest.warns(FutureWarning, match="with_optimizer"):
        assert training.load_state_with_optimizer(path).result(5).path == path


def test_deprecations_warn_at_the_line_of_the_program(training):
    path = training.save_state("a").result(5).path

    async def later():
        await (await training.load_state_async(path))
        await training.save_weights_and_get_sampling_client_async("name")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training.load_state_with_optimizer(path).result(5)
        training.save_weights_and_get_sampling_client("name")
        asyncio.run(later())
    assert [each.category for each in caught] == [FutureWarning, DeprecationWarning] * 2
    assert {each.filename for each in caught} == {__file__}


def test_an_invalid_path_is_refused_before_anything_is_sent(fake, service):
    with pytest.raises(ValueError, match="must start with 'tinker://'"):
        service.create_training_client_from_state("weights/a")
    assert not [seen for seen in fake.requests if seen.endpoint == "weights_info"]


def test_a_training_client_says_why_it_cannot_be_pickled(training):
    with pytest.raises(TypeError, match="Send a SamplingClient"):
        pickle.dumps(training)


def test_a_refused_base_model_names_the_available_ones(service):
    with pytest.raises(tinkex.RequestFailedError, match="there is: fake/model"):
        service.create_lora_training_client("other/model")


def test_a_model_with_nothing_to_train_is_refused(service):
    with pytest.raises(ValueError, match="Nothing to train"):
        service.create_lora_training_client(
            "fake/model", train_mlp=False, train_attn=False, train_unembed=False
        )


def test_bodies_are_compressed_if_the_server_asks(datum):
    pytest.importorskip("zstandard")
    fake = FakeService(config={"proto_compress_fwdbwd": True})
    service = fake.client()
    training = service.create_lora_training_client("fake/model")
    training.forward_backward([datum], "cross_entropy").result(5)
    seen = next(s for s in fake.requests if s.endpoint == "forward_backward")
    assert seen.headers["content-encoding"] == "zstd"
    service.close("success").result(5)
