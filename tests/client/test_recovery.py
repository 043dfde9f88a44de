"""Runs are restarted from their last checkpoint when the server loses them."""

import asyncio
from collections.abc import Callable

import pytest

import tinkex
from tinkex import types
from tinkex.client.errors import status_error
from tinkex.client.http.transport import Request, Response
from tinkex.client.recovery import CorruptedRunError, Restarts, Saved, may_recover
from tinkex.testing import Answer, FakeService
from tinkex.testing.toy_model import toy_logprob
from tinkex.wire.errors import RequestErrorCategory

STEPS = 6


def create(service: tinkex.ServiceClient) -> tinkex.TrainingClient:
    return service.create_lora_training_client("fake/model")


def trains(datum: types.Datum, before: Callable[[int], None] = lambda _: None):
    """A run of six steps with a checkpoint after every second; the loss at its end."""

    def train(run: tinkex.Recovery) -> float:
        for step in range(run.step, STEPS):
            before(step)
            run.training.forward_backward([datum], "cross_entropy").result(5)
            run.training.optim_step(tinkex.AdamParams()).result(5)
            if step % 2 == 1:
                run.save(step + 1)
        output = run.training.forward([datum], "cross_entropy").result(5)
        return output.metrics["loss:sum"]

    return train


FAILURES = {
    "lost": ("forward_backward", Answer(status=404, body={"detail": "there is no model"})),
    "gone": ("retrieve_future", Answer(status=410)),
    "broke": ("retrieve_future", Answer(status=200, body={"error": "x", "category": "server"})),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_recovered_run_ends_like_an_undisturbed_one(fake, datum, failure):
    undisturbed = FakeService()
    expected = tinkex.recovering(trains(datum), service=undisturbed.client, create=create)
    assert expected == pytest.approx(-3 * toy_logprob(STEPS))
    restarts: list = []
    todo = {3}

    def loses(step: int) -> None:
        if step in todo:
            todo.discard(step)
            endpoint, answer = FAILURES[failure]
            fake.script(endpoint, answer)

    found = tinkex.recovering(
        trains(datum, loses),
        service=fake.client,
        create=create,
        back_off_s=0.0,
        on_restart=restarts.append,
    )
    assert found == expected
    assert [each.attempt for each in restarts] == [1]
    assert restarts[0].saved.step == 2
    loaded = [seen.json() for seen in fake.requests if seen.endpoint == "load_weights"]
    assert loaded[-1]["optimizer"] is True
    ended = [s.json()["reason"]["type"] for s in fake.requests if s.endpoint.endswith("/finish")]
    assert ended == ["errored", "success"]


def test_it_starts_over_if_there_is_no_checkpoint_yet(fake, datum):
    fake.script("optim_step", Answer(status=410))
    tinkex.recovering(trains(datum), service=fake.client, create=create, back_off_s=0.0)
    assert len([seen for seen in fake.requests if seen.endpoint == "create_model"]) == 2


def test_it_gives_up_after_most_restarts_without_a_new_checkpoint(fake, datum):
    restarts: list = []

    def loses(step: int) -> None:
        if step in (1, 3):
            fake.script("forward_backward", Answer(status=404))

    with pytest.raises(tinkex.NotFoundError):
        tinkex.recovering(
            trains(datum, loses),
            service=fake.client,
            create=create,
            most_restarts=2,
            back_off_s=0.001,
            on_restart=restarts.append,
        )
    assert [(each.attempt, each.delay_s) for each in restarts] == [(1, 0.001), (2, 0.002)]


def test_every_checkpoint_resets_the_restart_count():
    restarts = Restarts(most=1, back_off_s=1.0)
    error, first = ValueError(), Saved(path="tinker://a", step=1)
    assert restarts.after(error, None)
    assert not restarts.after(error, None)
    assert restarts.after(error, first)
    assert not restarts.after(error, first)


def test_user_errors_are_raised_at_once(fake):
    def bad(run: tinkex.Recovery) -> None:
        run.training.forward_backward([types.Datum(types.ModelInput.from_ints([1]), {})], "ppo")
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        tinkex.recovering(bad, service=fake.client, create=create)
    with pytest.raises(tinkex.RequestFailedError, match="no base model"):
        tinkex.recovering(
            bad,
            service=fake.client,
            create=lambda service: service.create_lora_training_client("no/model"),
        )


def test_a_corrupted_run_is_started_again_and_its_checkpoint_not_used(fake, datum):
    run_ids: list[str] = []
    restarts: list = []

    def train(run: tinkex.Recovery) -> int:
        run_ids.append(run.training.model_id)
        if run.step == 0:
            run.save(1)
            about = {
                "training_run_id": run.training.model_id,
                "base_model": "fake/model",
                "model_owner": "me",
                "is_lora": True,
                "corrupted": True,
                "last_request_time": "2026-01-01T00:00:00Z",
            }
            asked = f"training_runs/{run.training.model_id}"
            fake.script(asked, Answer(status=200, body=about))
            run.save(2)
        return run.step

    found = tinkex.recovering(
        train, service=fake.client, create=create, back_off_s=0.0, on_restart=restarts.append
    )
    assert found == 1
    assert isinstance(restarts[0].error, CorruptedRunError)
    assert run_ids[0] in str(restarts[0].error)
    assert len(set(run_ids)) == 2


def test_it_resumes_from_a_checkpoint_of_an_earlier_program(fake, datum):
    saved: list[Saved] = []

    def first(run: tinkex.Recovery) -> None:
        run.training.optim_step(tinkex.AdamParams()).result(5)
        saved.append(run.save(1))

    tinkex.recovering(first, service=fake.client, create=create)
    steps = tinkex.recovering(
        lambda run: run.step, service=fake.client, create=create, saved=saved[0]
    )
    assert steps == 1


def test_coroutines_recover_in_the_same_way(fake, datum):
    async def make(service: tinkex.ServiceClient) -> tinkex.TrainingClient:
        return await service.create_lora_training_client_async("fake/model")

    async def train(run: tinkex.Recovery) -> float:
        for step in range(run.step, STEPS):
            await run.training.forward_backward([datum], "cross_entropy")
            await run.training.optim_step(tinkex.AdamParams())
            if step % 2 == 1:
                await run.save_async(step + 1)
            if step == 2 and not restarts:
                fake.script("forward_backward", Answer(status=410))
        return (await run.training.forward([datum], "cross_entropy")).metrics["loss:sum"]

    restarts: list = []
    loss = asyncio.run(
        tinkex.recovering_async(
            train, service=fake.client, create=make, back_off_s=0.0, on_restart=restarts.append
        )
    )
    assert loss == pytest.approx(-3 * toy_logprob(STEPS))
    assert len(restarts) == 1


REQUEST = Request(method="POST", url="http://h/api/v1/optim_step")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (tinkex.APIConnectionError(REQUEST), True),
        *((status_error(Response(status_code=s, request=REQUEST)), True) for s in (404, 410, 503)),
        *((status_error(Response(status_code=s, request=REQUEST)), False) for s in (400, 401, 422)),
        (tinkex.RequestFailedError("x", "r", RequestErrorCategory.Server), True),
        (tinkex.RequestFailedError("x", "r", RequestErrorCategory.Unknown), True),
        (tinkex.RequestFailedError("x", "r", RequestErrorCategory.User), False),
        (ValueError(), False),
    ],
    ids=str,
)
def test_which_errors_are_worth_a_restart(error, expected):
    assert may_recover(error) is expected
