"""E4: every exception of the client names what failed, the request id, and what to do next."""

import importlib
import pickle
import pkgutil
import re

import pytest

import tinkex
import tinkex.client
from tinkex import BreakerPolicy, types
from tinkex.client.recovery import CorruptedRunError, corrupted_error
from tinkex.client.settings import Settings
from tinkex.testing import Answer, FakeService, Lost

#: Endpoint, its response, the resulting error, and a word of its hint.
CASES = [
    (
        "optim_step",
        Answer(status=301, headers={"location": "/x"}),
        tinkex.APIStatusError,
        "base_url",
    ),
    ("optim_step", Answer(status=400, body={"a": 1}), tinkex.BadRequestError, "Change the request"),
    ("optim_step", Answer(status=401), tinkex.AuthenticationError, "TINKER_API_KEY"),
    ("optim_step", Answer(status=402), tinkex.BillingError, "billing"),
    ("optim_step", Answer(status=403), tinkex.PermissionDeniedError, "The key"),
    ("optim_step", Answer(status=404), tinkex.NotFoundError, "Check the id"),
    ("optim_step", Answer(status=408), tinkex.APIStatusError, "Try again"),
    ("optim_step", Answer(status=409), tinkex.ConflictError, "Check the current state"),
    ("optim_step", Answer(status=410), tinkex.APIStatusError, "last saved checkpoint"),
    ("optim_step", Answer(status=413), tinkex.APIStatusError, "Send less"),
    ("optim_step", Answer(status=418), tinkex.APIStatusError, "Change the request"),
    ("optim_step", Answer(status=422), tinkex.UnprocessableEntityError, "the field"),
    ("optim_step", Answer(status=429), tinkex.RateLimitError, "Try again later"),
    ("optim_step", Answer(status=500), tinkex.InternalServerError, "see its log"),
    ("optim_step", Lost(), tinkex.APIConnectionError, "Check that the server is running"),
    ("optim_step", Lost(slow=True), tinkex.APITimeoutError, "Check that the server is running"),
    (
        "optim_step",
        Answer(status=200, body={"x": 1}),
        tinkex.APIResponseValidationError,
        "base_url",
    ),
    ("retrieve_future", Answer(status=403), tinkex.PermissionDeniedError, "The key"),
    ("retrieve_future", Answer(status=410), tinkex.APIStatusError, "last saved checkpoint"),
    (
        "retrieve_future",
        Answer(status=200, body=[1]),
        tinkex.APIResponseValidationError,
        "report",
    ),
    (
        "retrieve_future",
        Answer(status=200, body={"error": "no", "category": "user"}),
        tinkex.RequestFailedError,
        "Change the request",
    ),
    (
        "retrieve_future",
        Answer(status=200, body={"error": "no", "category": "server"}),
        tinkex.RequestFailedError,
        "log",
    ),
    (
        "retrieve_future",
        Answer(status=200, body={"error": "no"}),
        tinkex.RequestFailedError,
        "log",
    ),
]


def name(case: object) -> str:
    return case.__name__ if isinstance(case, type) else str(case)


@pytest.mark.parametrize(("endpoint", "fault", "kind", "advice"), CASES, ids=name)
def test_e4_an_error_names_what_failed_the_request_and_what_to_do(endpoint, fault, kind, advice):
    fake = FakeService(config={"billing_exception_max_pause_duration_sec": 0})
    settings = Settings(base_url="http://127.0.0.1:9", give_up_s=0.01, reconnect_s=0.01)
    service = tinkex.ServiceClient(settings=settings, _make_transport=fake.transport)
    training = service.create_lora_training_client("fake/model")
    fake.script(endpoint, *[fault] * 8)
    with pytest.raises(kind) as caught:
        training.optim_step(tinkex.AdamParams()).result(10)
    assert type(caught.value) is kind
    text = str(caught.value)
    if kind is not tinkex.RequestFailedError:  # its message is that of the service
        assert re.search(r"step 1 of s-\d+:train:0|result of OptimStep", text), text
    assert re.search(r"request (tinkex-[0-9a-f-]{36}|r-\d+)", text), text
    assert advice in text, text
    fake._scripts.clear()
    service.close("success").result(5)


def test_e4_the_services_own_id_of_a_request_is_named_where_it_gives_one(fake, service):
    fake.script("create_model", Answer(status=403, headers={"X-Request-Id": "req-77"}))
    with pytest.raises(tinkex.PermissionDeniedError, match="request req-77"):
        service.create_lora_training_client("fake/model")


def test_e4_a_request_that_was_not_sent_says_so_and_when_it_will_be(fake):
    settings = Settings(base_url="http://127.0.0.1:8", breaker=BreakerPolicy(failures=1))
    service = tinkex.ServiceClient(settings=settings, _make_transport=fake.transport)
    training = service.create_lora_training_client("fake/model")
    fake.script("optim_step", Lost())
    with pytest.raises(tinkex.CircuitOpenError, match=r"optim_step was not sent.*again in \d+ s"):
        training.optim_step(tinkex.AdamParams()).result(5)
    service.close("success").result(5)


def test_e4_a_corrupted_run_is_named(service):
    training = service.create_lora_training_client("fake/model")
    assert re.search(rf"{training.model_id}.*Restart", str(corrupted_error(training)))


def test_e4_invalid_arguments_are_reported_before_anything_is_sent(fake, service):
    training = service.create_lora_training_client("fake/model")
    sampling = service.create_sampling_client(base_model="fake/model")
    params = types.SamplingParams(max_tokens=1)
    fake.requests.clear()
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([1]), loss_fn_inputs={"target_tokens": [1]}
    )
    for call, says in (
        (lambda: training.forward_backward([], "ppo"), "at least one Datum"),
        (lambda: training.forward_backward([1], "ppo"), r"data\[0\] is a int"),
        (lambda: training.forward_backward([datum], "pppo"), "did you mean `ppo`"),
        (lambda: training.forward_backward(datum, "ppo"), "data is a Datum; .* list of Datum"),
        (lambda: training.forward_backward("text", "ppo"), "data is a str"),
        (lambda: training.forward_backward([datum], print), "forward_backward_custom"),
        (
            lambda: training.forward_backward([datum], "ppo", {"clip": [1]}),
            r"loss_fn_config\['clip'\] is a list; it must be a number or a string",
        ),
        (lambda: training.forward_backward([datum], "ppo", ["clip"]), "must be a dict"),
        (lambda: training.forward_backward_custom(datum, print), "data is a Datum"),
        (lambda: training.optim_step(None), r"AdamParams\(learning_rate"),
        (lambda: service.create_sampling_client(), "base_model"),
        (lambda: sampling.sample("text", 1, params), r"ModelInput.from_text\(text, tokenizer\)"),
        (lambda: sampling.sample_stream([1, 2], 1, params), "prompt is a list"),
        (lambda: sampling.compute_logprobs([1, 2]), r"ModelInput.from_ints\(tokens\)"),
        (lambda: service.close("done"), "'done'; it must be one of success, errored, interrupted"),
        (lambda: pickle.dumps(service), "ServiceClient cannot be pickled"),
    ):
        with pytest.raises((ValueError, TypeError), match=says):
            call()
    background = {"session_heartbeat", "telemetry", "client/dynamic_config"}
    assert {request.endpoint for request in fake.requests} <= background
    assert not service.holder.closed  # an invalid status closes nothing


def kinds(root: type[BaseException]) -> set[type[BaseException]]:
    return {root}.union(*(kinds(each) for each in root.__subclasses__()))


def test_e4_every_kind_of_error_is_covered():
    for module in pkgutil.walk_packages(tinkex.client.__path__, "tinkex.client."):
        importlib.import_module(module.name)
    shown = {kind for _, _, kind, _ in CASES} | {tinkex.CircuitOpenError, CorruptedRunError}
    abstract = {tinkex.TinkerError, tinkex.APIError}
    # Not about a request; each is tested with its module.
    elsewhere = {"DownloadFailed", "HubError", "TokenizerUnavailable"}
    missing = {
        kind.__name__
        for kind in kinds(tinkex.TinkerError) - shown - abstract
        if kind.__module__.startswith("tinkex.")
    }
    assert missing == elsewhere
