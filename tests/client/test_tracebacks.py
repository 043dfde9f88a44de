"""A user's mistake gives a traceback that ends in the user's frame."""

import asyncio
import traceback
from pathlib import Path

import pytest

import tinkex
from tinkex import types
from tinkex.testing import Answer

PACKAGE = str(Path(tinkex.__file__).parent)
PROMPT = types.ModelInput.from_ints([1])
PARAMS = types.SamplingParams(max_tokens=1)


def frames(error: BaseException) -> list[str]:
    """The files of the traceback, and of the causes that are shown with it."""
    found = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    shown = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return found + (frames(shown) if shown is not None else [])


def raised(call) -> BaseException:
    try:
        call()
    except Exception as error:  # noqa: BLE001 (what a program sees)
        return error
    raise AssertionError("nothing was raised")


def ends_in_this_file(error: BaseException) -> bool:
    return set(frames(error)) == {__file__}


@pytest.fixture
def training(service):
    return service.create_lora_training_client("fake/model")


@pytest.fixture
def sampling(service):
    return service.create_sampling_client(base_model="fake/model")


def test_wrong_arguments_end_at_the_caller(service, training, sampling, datum):
    for call in (
        lambda: training.forward_backward([datum], "dpo"),
        lambda: training.forward_backward([], "cross_entropy"),
        lambda: training.forward_backward_custom(datum, print),
        lambda: training.optim_step(None),
        lambda: training.save_state(3).result(5),
        lambda: sampling.sample("text", 1, PARAMS),
        lambda: sampling.sample_stream([1], 1, PARAMS),
        lambda: sampling.compute_logprobs([1]),
        lambda: service.create_sampling_client(),
        lambda: service.create_sampling_client(model_path="weights"),
        lambda: (
            service.create_lora_training_client("m", train_mlp=False, train_attn=False)
            and service.create_lora_training_client(
                "m", train_mlp=False, train_attn=False, train_unembed=False
            )
        ),
        lambda: service.close("done"),
        lambda: training.forward_backward(wrong=1),
        lambda: types.Datum(model_input=PROMPT, loss_fn_inputs={"target_tokens": "text"}),
        lambda: types.Datum(model_inputs=PROMPT),
        lambda: tinkex.RestClient(base_url="ftp://x"),
        lambda: tinkex.ServiceClient(base_url="ftp://x"),
    ):
        error = raised(call)
        assert isinstance(error, ValueError | TypeError | tinkex.TinkerError)
        assert ends_in_this_file(error), "".join(traceback.format_exception(error))


def test_errors_of_the_service_end_at_the_caller(fake, service, training, sampling, datum):
    refused = Answer(status=400, body={"detail": "no"})
    failed = Answer(status=200, body={"error": "no", "category": "user"})

    async def awaited():
        await training.optim_step(types.AdamParams())

    async def awaited_variant():
        await (await training.optim_step_async(types.AdamParams()))

    async def sampled():
        await sampling.sample_async(PROMPT, 1, PARAMS)

    for endpoint, reply, call in (
        ("optim_step", refused, lambda: training.optim_step(types.AdamParams()).result(5)),
        ("retrieve_future", failed, lambda: training.optim_step(types.AdamParams()).result(5)),
        ("create_model", refused, lambda: service.create_lora_training_client("fake/model")),
        ("asample", refused, lambda: sampling.sample(PROMPT, 1, PARAMS).result(5)),
        ("get_server_capabilities", refused, service.get_server_capabilities),
    ):
        fake.script(endpoint, reply)
        assert ends_in_this_file(raised(call)), endpoint
    for endpoint, coroutine in (
        ("optim_step", awaited),
        ("optim_step", awaited_variant),
        ("asample", sampled),
    ):
        fake.script(endpoint, refused)
        error = raised(lambda run=coroutine: asyncio.run(run()))
        assert not any(file.startswith(PACKAGE) for file in frames(error))
        assert frames(error)[-1] == __file__


def test_a_result_that_is_asked_for_twice_is_as_short(fake, training):
    fake.script("optim_step", Answer(status=400, body={"detail": "no"}))
    step = training.optim_step(types.AdamParams())
    first, second = raised(lambda: step.result(5)), raised(lambda: step.result(5))
    assert first is second
    assert len(frames(second)) == 2


def test_frames_of_a_custom_loss_stay(training, datum):
    pytest.importorskip("torch")

    def loss(data, logprobs):
        return {}["missing"]

    error = raised(lambda: training.forward_backward_custom([datum], loss).result(10))
    assert isinstance(error, KeyError)
    assert traceback.extract_tb(error.__traceback__)[-1].name == "loss"
    assert not any(file.startswith(PACKAGE) for file in frames(error))


def test_a_bug_of_this_package_keeps_its_frames(service, monkeypatch):
    monkeypatch.setattr(service.holder, "_connected", None)
    error = raised(service.get_server_capabilities)
    assert isinstance(error, AttributeError)
    assert any(file.startswith(PACKAGE) for file in frames(error))
    monkeypatch.undo()


def test_the_setting_keeps_frames_and_causes(fake, service, monkeypatch):
    from tinkex.testing import Lost

    monkeypatch.setenv("TINKEX_GIVE_UP_S", "0.01")
    fake.script("create_session", *[Lost()] * 2)
    with fake.client() as other:
        short = raised(lambda: other.create_lora_training_client("fake/model"))
    assert short.__cause__ is None
    assert ends_in_this_file(short)
    monkeypatch.setenv("TINKEX_TRACEBACKS", "full")
    fake.script("create_session", *[Lost()] * 2)
    with fake.client() as other:
        full = raised(lambda: other.create_lora_training_client("fake/model"))
    assert full.__cause__ is not None
    assert any(file.startswith(PACKAGE) for file in frames(full))


def test_what_a_program_was_handling_is_still_shown(training):
    def handle() -> None:
        try:
            {}["own"]
        except KeyError:
            training.optim_step(None)

    error = raised(handle)
    assert isinstance(error.__context__, KeyError)
    assert not error.__suppress_context__
