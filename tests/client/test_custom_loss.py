"""Custom losses: the order of their passes, where they run, and what is refused."""

import asyncio
import contextvars
import json
import sys
import threading
from pathlib import Path

import pytest
import torch

import tinkex
from custom_loss_examples import BY_NAME
from tinkex import types
from tinkex.client import loss_tracing
from tinkex.client.custom_loss import LossHandle
from tinkex.testing import Answer, FakeService
from tinkex.wire.custom_loss import CreateCustomLossRequest
from tinkex.wire.protobuf import decode_forward_backward_request

ADAM = types.AdamParams(learning_rate=1e-4)
RECORDED = Path(__file__).parents[1] / "data" / "graphs" / "official-0.36.0.jsonl"


@pytest.fixture
def training(service):
    return service.create_lora_training_client("fake/model")


def ran(fake):
    return [(number, kind) for _, number, kind in fake.ran]


def plain(data, logprobs):
    """Cross entropy with a weight of 2, and a metric."""
    return -2 * sum(each.sum() for each in logprobs), {"mine:sum": torch.tensor(3.0)}


def passes(fake):
    return [
        decode_forward_backward_request(seen.body)
        for seen in fake.requests
        if seen.endpoint == "forward_backward"
    ]


# -- the callable: passes, order, threads ------------------------------------------------------------


def test_m2_a_callable_is_a_forward_pass_then_a_pass_with_its_negative_gradient_as_weights(
    fake, training
):
    spans = [tinkex.SampledProvenanceSpan(sequence_id="q", length=3)]
    datum = types.Datum(
        types.ModelInput.from_ints([1, 2, 3]),
        {"target_tokens": [2, 3, 4], "advantages": [1.0, 2.0, 3.0]},
    ).with_provenance(spans, spans)

    training.forward_backward_custom([datum], plain).result(5)

    (first, only_forward), (second, still_only_forward) = passes(fake)
    assert (only_forward, still_only_forward) == (True, False)
    for request, weights in ((first, [0.0] * 3), (second, [2.0] * 3)):
        (sent,) = request.forward_backward_input.data
        assert request.forward_backward_input.loss_fn == "cross_entropy"
        assert {name: each.tolist() for name, each in sent.loss_fn_inputs.items()} == {
            "target_tokens": [2, 3, 4],
            "weights": weights,
        }
        assert sent.model_input_spans == spans


def test_the_loss_gets_the_callers_own_datums(training, datum):
    """Programs keep data about a datum in a dict, by its id()."""
    datums = [datum, types.Datum(datum.model_input, dict(datum.loss_fn_inputs))]
    seen = []

    def loss(data, logprobs):
        seen.extend(data)
        return plain(data, logprobs)

    training.forward_backward_custom(iter(datums), loss).result(5)

    assert [id(each) for each in seen] == [id(each) for each in datums]


def test_its_result_has_the_custom_loss_the_users_metrics_and_the_servers(training, datum):
    found = training.forward_backward_custom([datum, datum], plain).result(5)
    logprobs = sum(sum(output["logprobs"].tolist()) for output in found.loss_fn_outputs)
    assert found.metrics["loss:sum"] == pytest.approx(-2 * logprobs)
    assert found.metrics["surrogate_loss:sum"] == pytest.approx(-2 * logprobs)
    assert found.metrics["mine:sum"] == 3.0


def test_defect_15_reading_a_result_twice_gives_the_same(training, datum):
    future = training.forward_backward_custom(
        [datum], lambda _, logprobs: (logprobs[0].exp().sum(), {})
    )
    first = future.result(5)
    assert future.result(5).metrics == first.metrics
    assert asyncio.run(_result_of(future)).metrics == first.metrics
    assert first.metrics["loss:sum"] != first.metrics["surrogate_loss:sum"]


async def _result_of(future):
    return await future


def test_the_next_call_runs_next_while_the_backward_pass_is_pending(fake, training, datum):
    passed = training.forward_backward_custom([datum], plain)
    stepped = training.optim_step(ADAM)
    again = training.forward_backward_custom([datum], plain)
    for future in (passed, stepped, again):
        future.result(5)
    assert ran(fake) == [
        (1, "forward"),
        (2, "forward_backward"),
        (3, "optim_step"),
        (4, "forward"),
        (5, "forward_backward"),
    ]


def test_a_call_from_another_thread_does_not_come_between_the_two_passes(fake, training, datum):
    running, go = threading.Event(), threading.Event()

    def slow(data, logprobs):
        running.set()
        assert go.wait(10)
        return plain(data, logprobs)

    def main():
        training.forward_backward_custom([datum], slow).result(10)

    thread = threading.Thread(target=main)
    thread.start()
    assert running.wait(10)
    stepped = training.optim_step(ADAM)
    with pytest.raises(TimeoutError):
        stepped.result(0.05)
    go.set()
    stepped.result(10)
    thread.join(10)
    assert ran(fake) == [(1, "forward"), (2, "forward_backward"), (3, "optim_step")]


def test_a_batch_in_many_chunks_is_one_loss(datum):
    fake = FakeService(config={"fwdbwd_max_chunk_len": 2})
    with fake.client() as service:
        training = service.create_lora_training_client("fake/model")
        seen = []

        def loss(data, logprobs):
            seen.append((len(data), len(logprobs)))
            return plain(data, logprobs)

        found = training.forward_backward_custom([datum] * 5, loss).result(5)
        assert seen == [(5, 5)]
        assert len(found.loss_fn_outputs) == 5
    assert [kind for _, kind in ran(fake)] == ["forward"] * 3 + ["forward_backward"] * 3


def test_defect_9_a_loss_runs_on_its_own_thread_and_the_session_continues(service, datum):
    training = service.create_lora_training_client("fake/model")
    where = []

    def asks_the_service(data, logprobs):
        where.append(threading.current_thread().name)
        # Would deadlock if the loop were waiting for this function.
        assert service.get_server_capabilities().supported_models
        return plain(data, logprobs)

    training.forward_backward_custom([datum], asks_the_service).result(5)
    assert where == ["tinkex-loss"]


def test_defect_9_the_async_form_does_not_stop_the_callers_loop(training, datum):
    async def main():
        ticked, loop = threading.Event(), asyncio.get_running_loop()

        def waits_for_the_callers_loop(data, logprobs):
            loop.call_soon_threadsafe(ticked.set)
            assert ticked.wait(5)
            return plain(data, logprobs)

        future = await training.forward_backward_custom_async([datum], waits_for_the_callers_loop)
        return await future

    assert asyncio.run(main()).metrics["mine:sum"] == 3.0


def test_the_call_returns_after_the_function_has_run_so_loop_variables_are_as_they_were(
    training, datum
):
    seen = []
    futures = []
    for batch in (1, 2, 3):

        def loss(data, logprobs):
            seen.append(batch)  # noqa: B023 (the point of the test)
            return plain(data, logprobs)

        futures.append(training.forward_backward_custom([datum], loss))
    for future in futures:
        future.result(5)
    assert seen == [1, 2, 3]


def test_a_loss_sees_the_context_of_its_caller_and_its_own_parameters_get_gradients(
    training, datum
):
    name = contextvars.ContextVar("name", default="nobody")
    name.set("caller")
    scale = torch.nn.Parameter(torch.tensor(2.0))
    seen = []

    def loss(data, logprobs):
        seen.append(name.get())
        return (scale * logprobs[0]).sum(), {}

    with torch.no_grad():  # of the caller's thread; a loss always has gradients
        training.forward_backward_custom([datum], loss).result(5)
    assert seen == ["caller"]
    assert scale.grad is not None


# -- the callable: what goes wrong -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda _, logprobs: logprobs[0].sum(), "returned a Tensor; it must return a pair"),
        (lambda _, logprobs: (1.0, {}), "is a float; it must be a torch.Tensor"),
        (lambda _, logprobs: (logprobs[0], {}), r"has shape \(3,\); it must be one number"),
        (lambda _, logprobs: (torch.tensor(1.0), {}), "has no gradient"),
        (lambda _, logprobs: (logprobs[0].sum(), {}), r"no gradient for data\[1\]"),
        (lambda _, lp: ((lp[0] + lp[1]).sum(), None), "metrics are a NoneType"),
        (lambda _, lp: ((lp[0] + lp[1]).sum(), {"m": lp[0]}), "metric must be one number"),
        (lambda _, lp: ((lp[0] / 0 + lp[1]).sum(), {}), r"data\[0\] is not finite"),
    ],
)
def test_an_unusable_loss_is_a_value_error_of_the_call(fake, training, datum, loss, words):
    with pytest.raises(ValueError, match=words):
        training.forward_backward_custom([datum, datum], loss)
    # Later steps continue, without a gap.
    training.optim_step(ADAM).result(5)
    assert ran(fake) == [(1, "forward"), (2, "optim_step")]


def test_the_users_own_error_is_raised_by_the_call_with_its_traceback(training, datum):
    def broken(data, logprobs):
        return 1 / 0

    with pytest.raises(ZeroDivisionError) as caught:
        training.forward_backward_custom([datum], broken)
    assert any(entry.name == "broken" for entry in caught.traceback)


def test_exit_in_a_loss_does_not_end_the_client(training, datum):
    with pytest.raises(RuntimeError, match="ended with SystemExit"):
        training.forward_backward_custom([datum], lambda *_: sys.exit(3))
    training.optim_step(ADAM).result(5)


def test_a_refused_forward_pass_is_raised_and_the_loss_never_runs(fake, training, datum):
    fake.script("forward_backward", Answer(status=422, body={"detail": "no"}))
    with pytest.raises(tinkex.UnprocessableEntityError):
        training.forward_backward_custom([datum], lambda *_: pytest.fail("ran"))
    assert ran(fake) == []


def test_missing_targets_are_named_before_anything_is_sent(fake, training):
    datum = types.Datum(types.ModelInput.from_ints([1]), {"weights": [1.0]})
    with pytest.raises(ValueError, match=r"data\[0\] has no target_tokens"):
        training.forward_backward_custom([datum], plain)
    with pytest.raises(ValueError, match="data is empty"):
        training.forward_backward_custom([], plain)
    with pytest.raises(TypeError, match="loss_fn is a str"):
        training.forward_backward_custom([datum], "cross_entropy")
    assert passes(fake) == []


def test_a_loss_that_calls_its_own_client_is_an_error_instead_of_a_deadlock(training, datum):
    def loss(data, logprobs):
        training.optim_step(ADAM)

    with pytest.raises(RuntimeError, match="cannot call the training client that runs it"):
        training.forward_backward_custom([datum], loss)
    training.optim_step(ADAM).result(5)


def test_closing_the_service_ends_a_call_whose_loss_still_runs(fake, datum):
    service = fake.client()
    training = service.create_lora_training_client("fake/model")
    running, go = threading.Event(), threading.Event()
    caught = []

    def loss(data, logprobs):
        running.set()
        go.wait(10)
        return plain(data, logprobs)

    def main():
        try:
            training.forward_backward_custom([datum], loss)
        except RuntimeError as error:
            caught.append(str(error))

    thread = threading.Thread(target=main)
    thread.start()
    assert running.wait(10)
    service.close("success").result(5)
    thread.join(5)
    go.set()
    assert not thread.is_alive()
    assert "closed before the result arrived" in caught[0]


def test_the_old_argument_warns_and_takes_one_value(training, datum):
    with pytest.warns(DeprecationWarning, match="loss_type_input") as shown:
        training.forward_backward_custom([datum], plain, loss_type_input="logprobs").result(5)
    assert shown[0].filename == __file__
    with (
        pytest.warns(DeprecationWarning, match="loss_type_input"),
        pytest.raises(ValueError, match="only 'logprobs' exists"),
    ):
        training.forward_backward_custom([datum], plain, loss_type_input="logits")


def test_m3_without_torch_the_error_names_it(monkeypatch, service, training, datum):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"needs torch.*tinkex\[engine\]"):
        training.forward_backward_custom([datum], plain)
    with pytest.raises(ImportError, match=r"needs torch.*tinkex\[engine\]"):
        service.create_custom_loss(plain, {"logprobs": 1})


# -- the handle --------------------------------------------------------------------------------------


def weighted(logprobs, advantages):
    return -(logprobs * advantages).sum(), {
        "custom/total:sum": advantages.sum(),
        "custom/size:mean": advantages.mean(),
    }


RANKS = {"logprobs": 1, "advantages": 1}


def with_advantages(*values):
    return types.Datum(
        types.ModelInput.from_ints([1, 2, 3]),
        {"target_tokens": [2, 3, 4], "advantages": list(values)},
    )


@pytest.mark.parametrize("name", BY_NAME)
def test_a_traced_loss_is_sent_as_the_official_client_sends_it(name):
    recorded = {
        request.name: request
        for request in map(
            CreateCustomLossRequest.model_validate_json, RECORDED.read_text().splitlines()
        )
    }[name]
    fn, ranks = BY_NAME[name]

    traced = loss_tracing.trace(fn, dict(reversed(ranks.items())))  # the parameters give the order

    assert traced.name == name
    assert list(traced.inputs) == recorded.inputs
    # As text too: 0 and 0.0 and False are one value in Python.
    ours = json.dumps(traced.graph.model_dump(), sort_keys=True)
    assert ours == json.dumps(recorded.graph.model_dump(), sort_keys=True)


def test_a_handle_knows_its_inputs_and_its_session(service):
    handle = service.create_custom_loss(weighted, RANKS).result(5)
    assert isinstance(handle, LossHandle)
    assert (handle.name, handle.loss_id) == ("weighted", None)
    assert handle.session_id == service.holder.session_id
    assert handle.input_names == ("advantages",)
    assert handle.key == loss_tracing.digest(handle.graph, handle.inputs)
    with pytest.raises(AttributeError):
        handle.name = "other"


def test_a_handle_runs_in_the_client_if_the_server_runs_no_losses(service, fake):
    training = service.create_lora_training_client("fake/model")
    handle = service.create_custom_loss(weighted, RANKS).result(5)
    data = [with_advantages(1.0, 2.0, 3.0), with_advantages(0.0, 0.0, 6.0)]

    found = training.forward_backward_custom(data, handle).result(5)

    assert found.metrics["custom/total:sum"] == 12.0
    assert found.metrics["custom/size:mean"] == 2.0
    assert found.metrics["loss:sum"] == pytest.approx(found.metrics["surrogate_loss:sum"])
    (_, (backward, _)) = passes(fake)
    weights = [d.loss_fn_inputs["weights"].tolist() for d in backward.forward_backward_input.data]
    assert weights == [[1.0, 2.0, 3.0], [0.0, 0.0, 6.0]]


def test_the_same_loss_is_created_once_in_a_session(service, fake):
    service.create_custom_loss(weighted, RANKS).result(5)
    with pytest.raises(ValueError, match="already has the same loss, created as 'weighted'"):
        service.create_custom_loss(weighted, RANKS)
    service.create_custom_loss(weighted, {"logprobs": 1, "advantages": 0}).result(5)
    fake.client().create_custom_loss(weighted, RANKS).result(5)


def test_a_loss_that_did_not_reach_the_server_may_be_created_again(datum):
    fake = FakeService(config={"custom_loss_server_side": True})
    fake.script("create_custom_loss", Answer(status=422, body={"detail": "not now"}))
    with fake.client() as service:
        with pytest.raises(tinkex.UnprocessableEntityError):
            service.create_custom_loss(weighted, RANKS).result(5)
        fake.script("create_custom_loss", Answer(status=422, body={"detail": "not now"}))
        with pytest.raises(tinkex.UnprocessableEntityError):
            service.create_custom_loss(weighted, RANKS).result(5)


def test_a_handle_of_another_session_is_refused(service, fake):
    handle = fake.client().create_custom_loss(weighted, RANKS).result(5)
    training = service.create_lora_training_client("fake/model")
    with pytest.raises(ValueError, match="belongs to session"):
        training.forward_backward_custom([with_advantages(1.0, 2.0, 3.0)], handle)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"advantages": [1.0]}, r"data\[0\] has no 'target_tokens'"),
        ({"target_tokens": [1]}, r"data\[0\] has no 'advantages'.*\['target_tokens'\]"),
        (
            {"target_tokens": [1], "advantages": [[1.0]]},
            "'advantages' has rank 2.*created for rank 1",
        ),
        ({"target_tokens": [[1, 2]], "advantages": [1.0]}, "'target_tokens' has rank 2"),
    ],
)
def test_data_that_do_not_fit_a_handle_are_named_before_anything_is_sent(
    service, fake, inputs, words
):
    handle = service.create_custom_loss(weighted, RANKS).result(5)
    training = service.create_lora_training_client("fake/model")
    with pytest.raises(ValueError, match=words):
        training.forward_backward_custom(
            [types.Datum(types.ModelInput.from_ints([1]), inputs)], handle
        )
    assert passes(fake) == []


class Callable:
    def __call__(self, logprobs):
        return logprobs.sum(), {}


def outside(tensor):
    return lambda logprobs: ((logprobs * tensor).sum(), {})


def sorted_by_python(logprobs):
    return sum(sorted(logprobs)), {}


SEVENTEEN = eval(
    f"lambda logprobs, {', '.join(f'a{i}' for i in range(16))}: (logprobs.sum(), {{}})"
)


@pytest.mark.parametrize(
    ("fn", "ranks", "words"),
    [
        (lambda x: (x.sum(), {}), {"x": 1}, "first parameter must be 'logprobs'"),
        (lambda: None, {}, "first parameter must be 'logprobs'"),
        (lambda logprobs, B: (logprobs.sum(), {}), {"logprobs": 1, "B": 1}, "'B' must have a name"),
        (lambda logprobs, b=1: (logprobs.sum(), {}), {"logprobs": 1, "b": 1}, "has a default"),
        (lambda logprobs, *b: (logprobs.sum(), {}), {"logprobs": 1, "b": 1}, "variadic"),
        (lambda logprobs, *, b: (logprobs.sum(), {}), {"logprobs": 1, "b": 1}, "keyword-only"),
        (SEVENTEEN, {}, "17 parameters; at most 16"),
        (Callable(), {"logprobs": 1}, "Callable is not a plain function"),
        (weighted, {"logprobs": 1}, "input_ranks names"),
        (weighted, {"logprobs": 1, "advantages": 3}, r"input_ranks\['advantages'\] is 3"),
        (weighted, {"logprobs": 0, "advantages": 1}, "allowed: 1 or 2"),
        (lambda logprobs: logprobs.sum(), {"logprobs": 1}, "must return a pair"),
        (lambda logprobs: (1.0, {}), {"logprobs": 1}, "its loss is 1.0, not a tensor"),
        (lambda logprobs: (logprobs.sum(), None), {"logprobs": 1}, "metrics are a NoneType"),
        (lambda logprobs: (logprobs.sum(), {"m": logprobs}), {"logprobs": 1}, "custom/NAME:sum"),
        (lambda logprobs: (logprobs.sum(), {"custom/m:max": 1}), {"logprobs": 1}, "custom/NAME"),
        (lambda logprobs: (logprobs.sum(), {"custom/m:sum": 1}), {"logprobs": 1}, "is 1, not a"),
        (outside(torch.ones(3)), {"logprobs": 1}, "reads a tensor from outside"),
        (
            lambda logprobs: (logprobs.sum().item(), {}),
            {"logprobs": 1},
            r"\.item\(\), which does not return a tensor",
        ),
        (lambda logprobs: (logprobs.nothing(), {}), {"logprobs": 1}, "not a method of tensors"),
        (
            lambda logprobs: (logprobs.sum() if logprobs else 0, {}),
            {"logprobs": 1},
            "cannot branch",
        ),
        (sorted_by_python, {"logprobs": 1}, "torch.fx cannot trace it"),
    ],
)
def test_a_forbidden_operation_in_a_custom_loss_is_a_value_error_that_names_it(
    service, fn, ranks, words
):
    with pytest.raises(ValueError, match=words):
        service.create_custom_loss(fn, ranks)
